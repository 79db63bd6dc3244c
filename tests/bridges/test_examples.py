"""The examples of the bridges, each killed and resumed on the real framework."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, once here for all forks

from bridges import forks
from bridges.frameworks import needed
from marks import full

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, version by version
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "bridges"
EXAMPLES = sorted(path.stem.removeprefix("with_") for path in FOLDER.glob("with_*.py"))


@pytest.mark.parametrize("kills", [2, *full(5), pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [EXAMPLES[0], *full(*EXAMPLES[1:])])
def test_kills_at_any_call_of_a_function_change_no_bit(
    name: str, kills: int, tmp_path: Path
) -> None:
    """I7, R1: SIGKILL at random moments of one training, also in the midst of a save."""
    needed(name)
    train = runpy.run_path(str(FOLDER / f"with_{name}.py"), run_name=f"with_{name}")["train"]

    def job(root: Path, _: forks.Say) -> dict[str, Any]:
        train(root)
        found: dict[str, Any] = torch.load(root / "trained.pt")
        return found

    forks.assert_kills_change_nothing(job, tmp_path, kills=kills, seed=kills, at_calls=True)


@pytest.mark.full
@pytest.mark.timeout(900)  # four processes, each of which imports the framework
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_as_a_user_runs_it(name: str) -> None:
    """Invariant 7, R1: two kills, and the same bits as in one go."""
    needed(name)
    assert forks.run_example(FOLDER / f"with_{name}.py")[-1] == "the same bits: True"


def test_there_is_one_for_each_bridge_that_has_a_trainer_on_a_cpu() -> None:
    assert EXAMPLES == ["accelerate", "ignite", "lightning", "transformers"]
