"""docs/recipes.md: its snippets run, are short, and each training resumes bit for bit."""

from __future__ import annotations

import re
import runpy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bridges import forks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
RECIPES = (
    "image_classifier",
    "language_model",
    "fine_tune",
    "teacher_and_student",
    "curriculum",
    "trial",
)
GAN = Path(__file__).resolve().parents[2] / "examples" / "gan.py"
GOAL = "48step"
"""Of all recipes but the GAN, whose example says how long it trains."""
KILLS = [pytest.param(1, marks=pytest.mark.full), pytest.param(10, marks=pytest.mark.long)]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@cache
def makers() -> dict[str, Any]:
    """What the page defines, without the trainings that it runs."""
    names: dict[str, Any] = {"__name__": "recipes"}
    for block in blocks():
        defined = re.split(r"^(?:\w+\(.*\)\.fit|for lr in)", block, maxsplit=1, flags=re.MULTILINE)
        exec(defined[0], names)
    return names


def test_its_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "recipes"}
    for block in blocks():
        exec(block, names)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    """Invariant 7."""
    make = makers()[recipe]
    once = make(tmp_path / "once")
    once.fit("7step")
    make(tmp_path / "twice").fit("4step")
    twice = make(tmp_path / "twice")
    twice.fit("7step")
    for found, expected in zip(end_of(twice), end_of(once), strict=True):
        assert torch.equal(found, expected)


def end_of(trainer: Any) -> list[torch.Tensor]:
    """The weights, the optimizer's slots and the generator of a run."""
    modules = [value for value in trainer.state.values() if isinstance(value, torch.nn.Module)]
    weights = [tensor for module in modules for tensor in module.state_dict().values()]
    slots = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
    return [*weights, *slots, torch.get_rng_state()]


def test_each_recipe_has_fewer_than_60_lines() -> None:
    sizes = [sum(1 for line in block.splitlines() if line.strip()) for block in blocks()]
    assert max(sizes) < 60


def live(recipe: str, root: Path, _: forks.Say) -> dict[str, Any]:
    """Train to the end; a run that was killed goes on."""
    if recipe == "gan":
        runpy.run_path(str(GAN))["train"](root, [])
        return dict(torch.load(root / "trained.pt"))
    trainer = makers()[recipe](root)
    more: dict[str, Any] = {}
    if recipe == "trial":
        base = root.parent / "base"
        makers()["trial"](base).fit("8step")
        more = {"start_from": base, "override": ["lr"]}
    trainer.fit(GOAL, **more)
    return {"end": end_of(trainer)}


@pytest.mark.parametrize("num_kills", KILLS)
@pytest.mark.parametrize("recipe", [*RECIPES, "gan"])
def test_a_recipe_that_is_killed_at_any_moment_ends_with_the_same_bits(
    recipe: str, num_kills: int, tmp_path: Path
) -> None:
    """Invariant 7, by SIGKILL at any call of a function."""
    job = partial(live, recipe)
    forks.assert_kills_change_nothing(job, tmp_path, kills=num_kills, seed=1, at_calls=True)
