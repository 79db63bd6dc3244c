"""Saves beside the training of a Trainer: the same checkpoints as without."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data import Loader
from holdfast.root.catalog import Catalog
from holdfast.staging import arena, guard, in_memory
from holdfast.store import open_store
from holdfast.train import Callback, Training, Validation
from holdfast.train.build import checked_overlap
from train.small import Noisy, make


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies beside training are made when somebody waits for them, and not before."""
    opened = threading.Event()
    run_later, wait = in_memory.ImageTransfer.run_later, guard.StepGuard.wait_before_change

    def copy_late(self: in_memory.ImageTransfer) -> None:
        assert opened.wait(60)
        run_later(self)

    def wait_and_open(self: guard.StepGuard, who: str = "fence()") -> None:
        if self._overlapped is not None:
            opened.set()
        wait(self, who)
        opened.clear()

    monkeypatch.setattr(in_memory.ImageTransfer, "run_later", copy_late)
    monkeypatch.setattr(guard.StepGuard, "wait_before_change", wait_and_open)
    monkeypatch.setattr(arena, "LARGE_NBYTES", 4)
    monkeypatch.setattr("holdfast.staging.overlap.LARGE_NBYTES", 4)
    return opened


class Doubles(Callback):
    """Validates after a save, and changes weights in that, in a way that torch does not count."""

    def __init__(self, at: int) -> None:
        self._at = at

    def step_start(self, training: Training) -> None:
        if training.counters.step == self._at:
            training.validate()  # type: ignore[attr-defined]

    def validation_start(self, training: Training, name: str) -> None:
        for parameter in training.model.parameters():
            parameter.data.mul_(2)


class Opens(Callback):
    """Lets the last copy be made, which nobody waits for."""

    def __init__(self, opened: threading.Event, last: int) -> None:
        self._opened = opened
        self._last = last

    def before_save(self, training: Training) -> None:
        if training.counters.step == self._last:
            self._opened.set()


def checkpoints(root: Path) -> list[dict[str, str]]:
    """The digests of the files with tensors, oldest first."""
    found = reversed(Catalog(open_store(root)).checkpoints())
    return [
        {name: file.digest for name, file in one.manifest.files.items() if "tensors" in name}
        for one in found
    ]


def test_on_a_cpu_saves_do_not_overlap_by_themselves() -> None:
    assert checked_overlap(None, "cpu") is False
    assert checked_overlap(None, "cuda") is True
    assert checked_overlap("check", "cpu") == "check"


@pytest.mark.parametrize(
    "options",
    [{}, {"skip_steps": [range(1, 3)]}, {"ema": 0.5}, {"precision": "bf16"}],
    ids=["plain", "skipped steps", "averaged", "bf16"],
)
def test_checkpoints_are_those_of_a_training_without_overlap(
    tmp_path: Path, held: threading.Event, options: dict[str, Any]
) -> None:
    """I7, also where a hook changes the weights in a validation right after a save."""
    for name, overlap in (("with", "check"), ("without", False)):
        torch.manual_seed(0)
        make(
            tmp_path / name,
            overlap=overlap,
            every="1step",
            keep=None,
            validate=Validation(data=Loader(Noisy(), batch_size=5), every="9step", at_end=False),
            callbacks=[Doubles(2), Opens(held, 4)],
            **options,
        ).fit(4)
    assert checkpoints(tmp_path / "with") == checkpoints(tmp_path / "without")
    assert len(checkpoints(tmp_path / "with")) == 4
