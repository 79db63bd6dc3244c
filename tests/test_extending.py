"""What docs/extending.md shows works, and what it says of the package is so."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.roots.catalog import Catalog
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy import retention
from holdfast.policy.retention import Candidate, Last, decide
from holdfast.policy.triggers import At
from holdfast.store.local import LocalStore
from holdfast.train import Callback

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
*CLASSES, TOGETHER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODULE = "\n".join(CLASSES)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "extending"}
    # As its own file: the annotations are values there.
    exec(compile(MODULE, "extending.md", "exec", dont_inherit=True), names)
    return names


def task() -> dict[str, Any]:
    """The names that the last block takes for granted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = torch.randn(256, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "dataset": dataset,
        "held_out": dataset,
        "loss_fn": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }


def test_all_of_it_works_in_one_training(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    first = {**page, **task()}
    exec(TOGETHER, first)
    assert first["outcome"].reason == "goal"
    entries = Catalog(LocalStore(tmp_path / "runs" / "extended")).checkpoints()
    assert [entry.step for entry in entries] == [200, 100, 50, 25]
    lines = (tmp_path / "runs" / "numbers.csv").read_text().splitlines()
    assert sum(",val/loss," in line for line in lines) == 8


def test_the_trigger_fires_at_each_doubling_also_after_a_jump(page: dict[str, Any]) -> None:
    trigger = page["Doubling"]("25step") | At("60step")

    def fired(*steps: int) -> list[int]:
        stamps = [Timestamp(step=step) for step in steps]
        return [b.step for a, b in pairwise(stamps) if trigger.due(a, None, b)]

    assert fired(*range(450)) == [25, 50, 60, 100, 200, 400]
    assert fired(0, 20, 110, 190, 210) == [110, 210]
    assert trigger.due(None, None, Timestamp(step=25)) == "doubling from 25step"
    with pytest.raises(UsageError, match="tokens"):
        page["Doubling"]("5tok").due(None, None, Timestamp(step=1))


def test_the_rule_keeps_the_same_when_the_others_are_gone(page: dict[str, Any]) -> None:
    rule = page["Records"]("loss") | Last(1)

    def entries(losses: dict[int, float], *, rejected: int = 0) -> list[Candidate]:
        return [
            Candidate(
                order=(1, step),
                timestamp=Timestamp(step=step),
                metrics={"loss": loss},
                rejected=step == rejected,
                components=("model",),
            )
            for step, loss in losses.items()
        ]

    def kept(losses: dict[int, float]) -> dict[int, float]:
        decisions = decide(entries(losses), rule)
        steps = {decision.entry.timestamp.step for decision in decisions if decision.keep}
        return {step: loss for step, loss in losses.items() if step in steps}

    first = kept({1: 0.5, 2: 0.7, 3: float("nan"), 4: 0.4, 5: 0.4, 6: 0.3, 7: 0.9})
    assert list(first) == [1, 4, 6, 7]
    assert kept(first) == first
    newest_first = entries({4: 0.4, 3: 0.45, 2: 0.1, 1: 0.5}, rejected=2)
    assert sorted(page["Records"]("loss").picks(newest_first)) == [0, 1, 3]


def test_the_callback_stops_and_goes_on_where_it_was(page: dict[str, Any]) -> None:
    class Training:
        stopped = ""

        def request_stop(self, reason: str) -> None:
            self.stopped = reason

    training, before = Training(), page["Patience"](2)
    for loss in (1.0, 0.5, 0.6):
        before.validation_end(training, "", {"val/loss": loss})
    after = page["Patience"](2)
    after.load_state_dict(before.state_dict())
    assert training.stopped == ""
    after.validation_end(training, "", {"val/loss": 0.7})
    assert training.stopped == "no better than 0.5"


def test_the_logger_drops_what_will_be_done_again(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {**page, **task()}
    exec(TOGETHER.replace('fit("200step")', 'fit("20step")'), names)
    path = tmp_path / "runs" / "numbers.csv"
    before = path.read_text()
    path.write_text(before + "30,loss,1.0\n40,loss,1.0\n")
    exec(TOGETHER.replace('fit("200step")', 'fit("40step")'), {**page, **task()})
    steps = [int(line.split(",")[0]) for line in path.read_text().splitlines()]
    assert path.read_text().startswith(before)
    assert steps.count(30) == 1
    assert steps == sorted(steps)


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:src|tests)/[\w/.]+)`", PAGE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_the_page_says_of_the_package_is_there() -> None:
    """Names that a contributor is sent to."""
    policy, train = ROOT / "src/holdfast/policy", ROOT / "src/holdfast/train"
    assert "__subclasses__()" in (policy / "spelling.py").read_text("utf-8")
    assert "Last" in retention.__all__
    assert "\nMOMENTS: " in (train / "callbacks/hooks.py").read_text("utf-8")
    assert "tell(Callback." in (train / "window/loop.py").read_text("utf-8")
    assert "def import_extra(" in (train / "loggers/extras.py").read_text("utf-8")
    assert not hasattr(Callback, "before_clip"), "name a hook that is not there"
