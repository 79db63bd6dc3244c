"""Schedulers step by steps, epochs, tokens and validations: each once, whatever ends a run."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Counts, HookFailed, Schedule, Training, Validation, cosine
from marks import diagonal
from train.small import Noisy, NoLength, make

Factory = Callable[[torch.optim.Optimizer], Any]


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def plateaus(metric: str, **options: Any) -> Any:
    schedule = Schedule(plateau, every="evaluation", metric=metric, **options)
    return make(MemoryStore(), scheduler=schedule, validate=[torch.zeros(1, 4)])


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


class Steps(Callback):
    """Notes at which step of the run schedulers step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_scheduler_step(self, training: Training, scheduler: Any) -> None:
        self.seen.append(training.counters.step)


class Rates(Callback):
    """Notes the rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_optimizer_step(self, training: Training) -> None:
        self.seen.append(training.optimizer.param_groups[0]["lr"])


def validation(every: str = "3step", **options: Any) -> Validation:
    return Validation(data=Loader(Noisy(), batch_size=5), every=every, **options)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("step", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # within the step, before it is counted
        ("4step", [4, 8]),
        ("1ep", [5, 10]),
        ("24tok", [3, 6, 9]),
        ("4tok", [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]),
        ("0.5dur", [6, 11]),
        ("evaluation", [3, 6, 9]),  # not the one at the goal
    ],
)
def test_a_schedule_steps_when_it_says(every: str, expected: list[int]) -> None:
    steps = Steps()
    make(
        MemoryStore(),
        scheduler=Schedule(halving, every=every),
        counts=Counts(tokens=torch.numel),  # 8 a step
        validate=validation(),
        callbacks=[steps],
    ).fit(11)
    assert steps.seen == expected


def test_an_epoch_that_ends_unseen_counts_before_the_next_step() -> None:
    make(
        MemoryStore(),
        data=NoLength(),
        scheduler=Schedule(halving, every="1ep"),
        callbacks=[rates := Rates()],
    ).fit(7)
    assert rates.seen == [0.001] * 5 + [0.0005] * 2


CASES: dict[str, Any] = {
    "by epoch": lambda: Schedule(halving, every="1ep"),
    "by tokens": lambda: Schedule(halving, every="20tok"),
    "by validation": lambda: Schedule(halving, every="evaluation"),
    "plateau": lambda: Schedule(plateau, every="evaluation", metric="val/loss"),
    "plateau of training": lambda: Schedule(plateau, every="2step", metric="loss"),
    "several": lambda: None,
}


def options_of(case: str) -> dict[str, Any]:
    scheduler = CASES[case]()
    return {
        "scheduler": [] if scheduler is None else scheduler,
        "counts": Counts(tokens=torch.numel),
        "validate": validation("2step"),
    }


@pytest.mark.parametrize(("case", "end"), diagonal([*CASES], [1, 4, 5, 7]))
def test_a_run_in_two_lives_is_the_run_in_one(tmp_path: Path, case: str, end: int) -> None:
    """Invariant 7: ended inside an epoch, at its end, and at a validation, with a longer goal."""
    whole = make(tmp_path / "one", **options_of(case))
    whole.fit(9)
    make(tmp_path / "two", **options_of(case)).fit(end)
    resumed = make(tmp_path / "two", **options_of(case))
    assert resumed.fit(9).notes == ()
    assert leaf_digests(resumed.state) == leaf_digests(whole.state)


class Signals(Callback):
    """Sends the process a signal in the n-th validation."""

    def __init__(self, nth: int) -> None:
        self.nth = nth

    def validation_start(self, training: Training, name: str) -> None:
        self.nth -= 1
        if self.nth == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("nth", "until"), [(1, 9), (2, 9), (3, 7)], ids=str)
@pytest.mark.parametrize("case", ["by validation", "plateau"])
def test_a_signal_in_a_validation_loses_and_adds_no_step(
    tmp_path: Path, case: str, nth: int, until: int
) -> None:
    """Invariant 7: the third validation is made at the goal only, and the run goes on later."""
    options = {**options_of(case), "validate": validation("3step")}
    whole = make(tmp_path / "one", **options)
    whole.fit(9)
    options = {**options_of(case), "validate": validation("3step")}
    with pytest.raises(SystemExit):
        make(tmp_path / "two", callbacks=[Signals(nth)], **options).fit(until)
    options = {**options_of(case), "validate": validation("3step")}
    resumed = make(tmp_path / "two", **options)
    resumed.fit(9)
    assert leaf_digests(resumed.state) == leaf_digests(whole.state)


def test_a_plateau_lowers_the_rate() -> None:
    trainer = make(
        MemoryStore(),
        scheduler=Schedule(plateau, every="evaluation", metric="val/loss"),
        validate=validation("1step"),
    )
    trainer.fit(6)
    assert trainer.optimizer.param_groups[0]["lr"] < 0.001
    assert trainer.schedulers["scheduler"].last_epoch == 6


def test_of_several_validations_that_with_the_metric_counts() -> None:
    steps = Steps()
    make(
        MemoryStore(),
        scheduler=Schedule(plateau, every="evaluation", metric="val/full/loss"),
        validate=[validation("2step", name="quick"), validation("4step", name="full")],
        callbacks=[steps],
    ).fit(9)
    assert steps.seen == [4, 8]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Schedule(plateau, every="evaluation", metric="val/lost", mode="min"),
            "there is no metric 'val/lost'",
        ),
        (
            Schedule(plateau, every="evaluation", metric="top", mode="min"),
            "there are 'loss', 'draw', 'val/loss'",
        ),
        (
            Schedule(plateau, every="2step", metric="top", mode="min"),
            "there is no metric 'top'",
        ),
    ],
)
def test_a_metric_that_nothing_gives_ends_the_run_at_once(schedule: Schedule, message: str) -> None:
    trainer = make(MemoryStore(), scheduler=schedule, validate=validation("2step"))
    with pytest.raises((UsageError, HookFailed), match=message):
        trainer.fit(9)
    assert trainer.counters.step == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Schedule(cosine(), every="1ep"), "a curve follows the counters"),
        (lambda: Schedule(halving, every="5min"), "by the clock"),
        (lambda: Schedule(halving, every="often"), "every='often'"),
        (lambda: Schedule(halving, every=3), "every=3"),
        (lambda: Schedule(halving, metric=3), "metric"),
        (lambda: Schedule(plateau, every="1ep", metric="val/loss"), 'every="evaluation"'),
        (lambda: plateaus("val/accuracy"), "good values of 'val/accuracy' are high"),
        (lambda: plateaus("val/score"), "does not show"),
        (lambda: plateaus("val/score", mode="max"), r"mode='min'"),
        (lambda: make(MemoryStore(), scheduler=plateau), r"give Schedule\(ReduceLROnPlateau"),
        (
            lambda: make(MemoryStore(), scheduler=Schedule(halving, every="1ep", metric="loss")),
            "StepLR steps on no metric",
        ),
        (
            lambda: make(MemoryStore(), scheduler=Schedule(halving, every="evaluation")),
            "nothing to validate on",
        ),
        (
            lambda: make(MemoryStore(), scheduler=Schedule(halving, every="1tok")),
            "tokens are not counted",
        ),
    ],
)
def test_what_cannot_work_is_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("scheduler", "until", "warns"),
    [
        (lambda optimizer: StepLR(optimizer, 3), "4ep", True),
        (lambda optimizer: StepLR(optimizer, 3), "40step", True),
        (lambda optimizer: MultiStepLR(optimizer, [2, 3]), "4ep", True),
        (lambda optimizer: CosineAnnealingLR(optimizer, 3), "3ep", True),
        (lambda optimizer: StepLR(optimizer, 4), "4ep", False),
        (lambda optimizer: MultiStepLR(optimizer, [2, 8]), "4ep", False),
        (lambda optimizer: StepLR(optimizer, 3), "10step", False),
        (lambda optimizer: LinearLR(optimizer, total_iters=3), "4ep", False),
        (Schedule(lambda optimizer: StepLR(optimizer, 3), every="1ep"), "4ep", False),
    ],
)
def test_steps_that_are_probably_epochs_are_warned_of(
    scheduler: Any, until: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make(MemoryStore(), data=Loader(Noisy(), batch_size=1), scheduler=scheduler, every=None).fit(
        until
    )
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("To advance per epoch" in text for text in texts) == warns


def test_a_validation_only_at_a_goal_whose_epoch_ends_late_steps_nothing() -> None:
    validation = Validation(data=Loader(Noisy(), batch_size=5), every="100step")
    root = MemoryStore()
    for until in ("1ep", "2ep"):
        trainer = make(
            root,
            data=NoLength(),
            scheduler=Schedule(halving, every="evaluation"),
            validate=validation,
        )
        rate = trainer.optimizer.param_groups[0]["lr"]
        trainer.fit(until)
        assert trainer.optimizer.param_groups[0]["lr"] == rate
