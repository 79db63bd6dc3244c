"""Runs with schedules of all kinds, killed in a step, a validation and a save, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from holdfast.data import Loader
from holdfast.testing.resume import Report, assert_resume_equivalent
from holdfast.train import Counts, Schedule, Validation, for_group, linear, warmup
from marks import full
from runs import be_a_script
from train.small import Noisy, make, network
from train.test_resume import KilledIn, Phase

STEPS, KILL_AT = 9, 6  # epochs of five steps, and a validation at each second one

PHASES: tuple[Phase, ...] = ("train", "validation", "save")


def _optimizer(model: Any) -> torch.optim.Optimizer:
    extra = torch.nn.Parameter(torch.zeros(1))
    model.register_parameter("extra", extra)
    return torch.optim.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": 0.01},
            {"params": [extra], "lr": 0.1},
        ]
    )


def _plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def _run(phase: Phase, root: str, steps: int, report: Report) -> None:
    be_a_script()
    trainer = make(
        Path(root),
        model=network(),
        optimizer=_optimizer,
        scheduler=[
            Schedule(for_group(0, _plateau), every="evaluation", metric="val/other/loss"),
            Schedule(for_group(1, lambda optimizer: StepLR(optimizer, 1)), every="1ep"),
            for_group(2, warmup("3step").then(linear("20tok")).then(linear(end=0.5))),
        ],
        data=Loader(Noisy(), batch_size=2),
        counts=Counts(tokens=torch.numel),
        validate=[
            Validation(name="each", data=Loader(Noisy(), batch_size=4), every="1step", batches=1),
            Validation(name="other", data=Loader(Noisy(), batch_size=4), every="2step"),
        ],
        every="1step",
        callbacks=[KilledIn(report, phase)],
    )
    trainer.fit(steps)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("phase", [*full(*PHASES[:2]), PHASES[2]])
def test_schedules_of_all_kinds_survive_a_kill(phase: Phase) -> None:
    """Invariant 7."""
    assert_resume_equivalent(
        partial(_run, phase), STEPS, KILL_AT, timeout_s=120.0, start_method="forkserver"
    )
