"""The Trainer resumed is the Trainer that never stopped, bit for bit, whatever it trains with.

The quick tier takes each value of each setting at least once; the long one takes the product.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torchmetrics
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from holdfast.data import Loader
from holdfast.testing.resume import Report, StepReporter, assert_resume_equivalent
from holdfast.train import (
    Callback,
    Measured,
    Metrics,
    Perplexity,
    Precision,
    Training,
    Validation,
    for_group,
)
from runs import be_a_script
from train.small import Noisy, make, network

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

Phase = Literal["train", "validation", "save"]

STEPS = 8
KILL_AT = 5


@dataclass(frozen=True)
class Case:
    precision: str
    accumulate: int
    num_workers: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.precision}-{self.accumulate}-{self.num_workers}-{self.phase}"


CASES = list(
    itertools.starmap(
        Case,
        itertools.product(
            ("fp32", "bf16", "fp16"), (1, 4), (0, 2), ("train", "validation", "save")
        ),
    )
)
QUICK = [
    Case("fp32", 1, 0, "train"),
    Case("bf16", 4, 2, "validation"),
    Case("fp16", 4, 0, "save"),
    Case("fp16", 1, 2, "train"),
]


class Best(Callback):
    """A callback whose state comes from validations."""

    def __init__(self) -> None:
        self.best = float("inf")

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        self.best = min(self.best, metrics["val/loss"])

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


class KilledIn(StepReporter):
    """Reports a step when it is saved; the kill itself comes in the phase that is asked for."""

    def __init__(self, report: Report, phase: Phase) -> None:
        super().__init__(report)
        self.phase = phase
        self.pending = False

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.pending = True
        if self.phase == "train":
            self._tell(training)

    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        if self.phase == "validation":
            self._tell(training)

    def before_save(self, training: Training) -> None:
        if self.phase == "save":
            self._tell(training)

    def _tell(self, training: Training) -> None:
        if self.pending:
            self.pending = False
            super().step_end(training, {})


def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    )


def run(case: Case, root: str, steps: int, report: Report) -> None:
    be_a_script()
    precision = Precision(dtype=case.precision, loss_scale=2.0**4, growth_interval=3)  # type: ignore[arg-type]
    trainer = make(
        Path(root),
        model=network(),
        optimizer=optimizer,
        scheduler=[
            for_group(0, lambda given: StepLR(given, 3)),
            for_group(1, lambda given: CosineAnnealingLR(given, 20)),
        ],
        data=Loader(Noisy(), batch_size=1, num_workers=case.num_workers),
        validate=Validation(data=Loader(Noisy(), batch_size=4), every="1step"),
        every="1step",  # so that those before the last are committed at any kill
        accumulate=case.accumulate,
        precision=precision,
        clip=0.5,
        ema=0.9,
        metrics={
            "mean": Measured(torchmetrics.MeanMetric(), lambda batch, outputs: outputs.loss),
            "perplexity": Measured(Perplexity(), lambda batch, outputs: (outputs.loss, len(batch))),
            "all": Measured(torch.std, lambda batch, outputs: batch),
        },
        callbacks=[Best(), KilledIn(report, case.phase)],
    )
    trainer.fit(steps)


def check(case: Case) -> None:
    assert_resume_equivalent(
        partial(run, case), STEPS, KILL_AT, timeout_s=120.0, start_method="forkserver"
    )


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_run_killed_in_any_phase_goes_on_bit_for_bit(case: Case) -> None:
    """Invariant 7, R1, D34, D55, D69."""
    check(case)


def test_the_quick_cases_have_every_value_of_every_setting() -> None:
    for setting in ("precision", "accumulate", "num_workers", "phase"):
        assert {getattr(case, setting) for case in QUICK} == {
            getattr(case, setting) for case in CASES
        }


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_of_all_settings(case: Case) -> None:
    """Invariant 7, R1."""
    check(case)


def test_the_kill_of_these_tests_is_a_kill() -> None:
    """The process ends by the signal, with nothing cleaned up."""
    process = multiprocessing.get_context("forkserver").Process(target=_kill_itself)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
