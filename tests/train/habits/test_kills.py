"""Every habit that has a state, killed in training, in a validation and in a save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.data import Loader
from holdfast.testing.resume import Report, assert_resume_equivalent
from holdfast.train import SWA, Freeze, Limits, Validation
from runs import be_a_script
from train.small import Noisy, make, mean_square, network
from train.test_resume import KilledIn, Phase

STEPS = 9


def sometimes_bad(model: nn.Module, batch: Tensor) -> Any:
    """Not finite in two steps of the run, wherever it was killed: their batches say so."""
    loss, metrics = mean_square(model, batch)
    is_bad = model.training and 1.6 < float(batch[0, 0]) < 1.9
    return (loss * float("nan") if is_bad else loss), metrics


def run(limits: dict[str, Any], phase: Phase, root: str, steps: int, report: Report) -> None:
    be_a_script()
    held_out = Loader(Noisy(), batch_size=4)
    make(
        Path(root),
        model=network(),
        loss=sometimes_bad,
        validate=Validation(data=held_out, every="1step"),
        every="1step",
        ema=0.9,
        swa=SWA(start="3step", every="2step"),
        skip_nan=STEPS,
        limits=Limits(sanity=1, val=2, **limits),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        callbacks=[
            Freeze("0.*", until="2ep"),
            Freeze("2.bias", since="4step", until="7step"),
            KilledIn(report, phase),
        ],
    ).fit(steps)


CASES = [
    ({"overfit": 2}, "validation"),
    pytest.param({"train": 3}, "train", marks=pytest.mark.full),
    pytest.param({}, "save", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("limits", "phase"), CASES, ids=str)
def test_a_killed_run_goes_on_bit_for_bit(limits: dict[str, Any], phase: Phase) -> None:
    """Invariant 7, R1."""
    assert_resume_equivalent(
        partial(run, limits, phase), STEPS, 5, timeout_s=120.0, start_method="forkserver"
    )


@pytest.mark.long
@pytest.mark.parametrize("phase", ["train", "validation", "save"])
@pytest.mark.parametrize("limits", [{}, {"train": 3}, {"overfit": 2}], ids=str)
def test_killed_again_and_again(limits: dict[str, Any], phase: Phase) -> None:
    """Invariant 7, R1."""
    assert_resume_equivalent(
        partial(run, limits, phase), STEPS, [4, 6, 8], start_method="forkserver"
    )
