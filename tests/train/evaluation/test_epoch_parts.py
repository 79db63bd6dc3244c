"""Parts of an epoch as intervals: one rule for validations, saves and schedules."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import StepLR

from holdfast import CheckpointManager, MemoryStore, SavePolicy, SideSaver
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import parse
from holdfast.policy.triggers import At, Every
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Metrics, Schedule, Training, Validation, cosine
from train.small import Noisy, NoLength, make

BATCHES = 5
"""Batches of an epoch of `make`."""


class Killed(BaseException):
    """Ends a process at once, as far as a Trainer can tell."""


class Validations(Callback):
    """Notes the steps that were validated, and may be killed in a step."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.killed_at = killed_at

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        self.steps.append(training.counters.step)

    def after_backward(self, training: Training) -> None:
        if training.present_step == self.killed_at:
            raise Killed


def held_out(every: Any, **options: Any) -> Validation:
    return Validation(data=Loader(Noisy(), batch_size=5), every=every, **options)


def saved(root: Path) -> list[int]:
    return sorted(entry.step for entry in Catalog(open_store(root)).checkpoints())


@pytest.mark.parametrize(
    ("every", "accumulate", "until", "expected"),
    [
        ("0.5ep", 1, "2ep", [3, 5, 8, 10]),  # of 5 steps: 2.5, 5, 7.5, 10
        ("0.5ep", 2, "2ep", [2, 3, 5, 6]),  # 5 batches are 3 steps, the last of one batch
        ("0.5ep", 5, "3step", [1, 2, 3]),  # an epoch is one step
        ("1.5ep", 1, "3ep", [8, 15]),
        ("0.2ep", 1, "4step", [1, 2, 3, 4]),
        ("0.05ep", 1, "3step", [1, 2, 3]),  # at most once a step
    ],
)
def test_validations_and_saves_come_at_the_first_step_that_reaches_the_part(
    tmp_path: Path, every: str, accumulate: int, until: str, expected: list[int]
) -> None:
    seen = Validations()
    validate = held_out(every, at_end=False)
    made = make(tmp_path, every=every, validate=validate, accumulate=accumulate, callbacks=[seen])
    made.fit(until)
    assert seen.steps == expected
    assert saved(tmp_path) == sorted({*expected, made.counters.step})


def test_schedules_curves_and_savers_take_them_too(tmp_path: Path) -> None:
    trained = make(
        tmp_path,
        scheduler=Schedule(lambda given: StepLR(given, 1, 0.5), "0.5ep"),
        every=SavePolicy(permanent="1ep", ephemeral="0.5ep"),
        savers=[SideSaver("weights", every=At("0.6ep"), components=["model"])],
    )
    trained.fit("2ep")
    assert trained.schedulers["scheduler"].last_epoch == 4
    store = open_store(tmp_path)
    found = {one.step: one.manifest.savers for one in Catalog(store).checkpoints()}
    assert sorted(found) == [3, 5, 8, 10]  # that at 0.6 epochs is at step 3
    assert "weights" in found[3]
    rates = make(MemoryStore(), scheduler=cosine("0.6ep"))
    rates.fit("3step")
    assert rates.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


@pytest.mark.parametrize("killed_at", [4, 8])
def test_a_killed_run_goes_on_with_the_same_parts_bit_for_bit(
    tmp_path: Path, killed_at: int
) -> None:
    """Invariant 7."""

    def run(root: Path, **options: Any) -> tuple[Any, list[int]]:
        seen = Validations(**options)
        made = make(root, every="0.5ep", validate=held_out("0.5ep"), callbacks=[seen])
        made.fit("2ep")
        return made, seen.steps

    straight, steps = run(tmp_path / "straight")
    with pytest.raises(Killed):
        run(tmp_path / "run", killed_at=killed_at)
    resumed, later = run(tmp_path / "run")
    assert steps == [3, 5, 8, 10]
    assert later == [step for step in steps if step >= killed_at]
    assert dict(leaf_digests(resumed.state)) == dict(leaf_digests(straight.state))
    assert saved(tmp_path / "run") == saved(tmp_path / "straight") == steps


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"validate": held_out("0.5ep")}, "validation every"),
        ({"every": Every("1step") | At("0.5ep")}, "every"),
        ({"scheduler": Schedule(lambda given: StepLR(given, 1), "0.5ep")}, "scheduler"),
    ],
)
def test_data_without_a_length_refuses_them_before_it_trains(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    made = make(tmp_path, data=NoLength(), **options)
    with pytest.raises(UsageError, match=f"{what}: a part of an epoch .* give the interval in st"):
        made.fit(1)
    assert made.counters.step == 0


def test_a_goal_is_whole_epochs() -> None:
    with pytest.raises(UsageError, match=r"until='1\.5ep': must be a whole number of epochs"):
        make(MemoryStore()).fit("1.5ep")


@pytest.mark.parametrize("every", [0.5, 1, 500, True])
def test_a_bare_number_is_refused_with_both_spellings(every: Any) -> None:
    """Half of what? Lightning means the epoch, Composer the run."""
    with pytest.raises(UsageError, match=r"'0.5ep' is half of an epoch, '0.5dur' half of the whol"):
        Validation(data=[1], every=every)


def test_a_manager_needs_the_length_of_the_epoch() -> None:
    state = {"model": {"step": 0}}
    for trigger in (Every("0.5ep"), At("0.5ep"), Every("1ep") | Every("0.5ep")):
        with pytest.raises(UsageError, match=r"Every\('0.5ep', epoch='100step'\)"):
            CheckpointManager(MemoryStore(), state, every=trigger)
        with pytest.raises(UsageError, match="part of an epoch"):
            trigger.due(None, None, Timestamp(step=9, epoch=1))
    half = Every("0.5ep", epoch="7step")
    assert repr(half) == "Every(interval='0.5ep', epoch='7step')"
    stamps = [Timestamp(step=step) for step in range(15)]
    assert [b.step for a, b in pairwise(stamps) if half.due(a, None, b)] == [4, 7, 11, 14]
    with CheckpointManager(MemoryStore(), state, every=half, sinks=()) as manager:
        found = [manager.maybe_save(step) for step in range(1, 15)]
    assert [save.step for save in found if save] == [4, 7, 11, 14]
    with pytest.raises(UsageError, match="only an interval in epochs needs epoch"):
        Every("5step", epoch="7step")


def test_a_part_of_an_epoch_is_exact_and_read_back_from_its_text() -> None:
    for text in ("0.1ep", "1.5ep", "0.333ep"):
        time = parse(text, parts=True)
        assert str(time) == text
        assert parse(time, parts=True) == time
    assert parse("2.0ep") == parse("2ep")
    assert parse("0.1ep", parts=True).in_steps(parse("30step")) == 3
    with pytest.raises(UsageError, match="above zero"):
        parse("-0.5ep", parts=True)
