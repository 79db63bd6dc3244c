"""docs/recipes.md: its snippets run, and each training resumes bit for bit."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
RECIPES = (
    "image_classifier",
    "language_model",
    "fine_tune",
    "teacher_and_student",
    "curriculum",
    "trial",
)


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
    for found, expected in zip(_tensors(twice), _tensors(once), strict=True):
        assert torch.equal(found, expected)


def _tensors(trainer: Any) -> list[torch.Tensor]:
    modules = [value for value in trainer.state.values() if isinstance(value, torch.nn.Module)]
    weights = [tensor for module in modules for tensor in module.state_dict().values()]
    slots = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
    return [*weights, *slots, torch.get_rng_state()]
