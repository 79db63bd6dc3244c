"""Saves of a training: when they may be made, what becomes of failures, and the last one."""

from __future__ import annotations

import inspect
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data import Loader
from holdfast.errors import SaveFailed, StoreError, UsageError
from holdfast.policy.savers import SavePolicy, SideSaver
from holdfast.policy.triggers import On
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.train import Callback, HookFailed, Metrics, Training, Validation
from train.small import Noisy, make

EPHEMERAL = SavePolicy(permanent="100step", ephemeral="5step")


class Stop(Callback):
    """Ends the training after a step, when all saves are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.step:
            assert training.manager is not None
            training.manager.wait()
            raise RuntimeError("killed")


def saves(root: Any) -> list[tuple[int, str, str]]:
    """Step, class and reason, oldest first."""
    store = open_store(root) if isinstance(root, Path) else root
    found = [entry.manifest for entry in Catalog(store).checkpoints()]
    return [(item.timestamp.step, item.save_class, item.reason) for item in reversed(found)]


def save_now(training: Training) -> Any:
    assert training.manager is not None
    return training.manager.save(training.counters.step)


@pytest.mark.parametrize("hook", ["batch_end", "before_data", "before_optimizer_step"])
def test_a_save_within_a_step_is_refused(hook: str) -> None:
    """Its parts would be of two steps."""

    def save(self: Callback, training: Training, *arguments: Any) -> None:
        save_now(training)

    save.__signature__ = _signature(hook)  # type: ignore[attr-defined]
    callback = type("Saves", (Callback,), {hook: save})()
    store = MemoryStore()
    with pytest.raises(HookFailed, match=r"UsageError.*between steps only.*step_end"):
        make(store, accumulate=2, every=None, callbacks=[callback]).fit(2)
    assert saves(store) == []


def _signature(hook: str) -> Any:
    return inspect.signature(getattr(Callback, hook))


def test_a_save_within_a_validation_or_a_save_is_refused() -> None:
    """Modes and generators are not those of training; a save does not contain another."""
    refused: list[str] = []

    class Saves(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            self.refuse(training, "validation")

        def before_save(self, training: Training) -> None:
            self.refuse(training, "save")

        def refuse(self, training: Training, where: str) -> None:
            with pytest.raises(UsageError, match="between steps only"):
                save_now(training)
            refused.append(where)

    plan = Validation(data=Loader(Noisy(), batch_size=5), every="1step")
    make(MemoryStore(), every=None, validate=plan, callbacks=[Saves()]).fit(1)
    assert refused == ["validation", "save"]


def test_a_save_that_fails_after_an_error_does_not_hide_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D46: the error is what the caller sees; that nothing was saved is in the log."""
    fault = Fault(kind="fail", op="put", key="*/manifest.json", times=None)
    store = FaultyStore(MemoryStore(), [fault])
    with pytest.raises(HookFailed, match="killed"):
        make(store, every=On("exception"), callbacks=[Stop(2)]).fit(4)
    assert "could not be saved" in caplog.text
    assert saves(store) == []


def test_the_third_save_in_a_row_that_fails_is_raised() -> None:
    """D37, invariant 8: each of the two before is made up for at the step after it."""
    failed: list[SaveFailed] = []

    class Failures(Callback):
        def checkpoint_failed(self, training: Training, error: SaveFailed) -> None:
            failed.append(error)

    fault = Fault(kind="fail", op="put", key="*/manifest.json", times=None)
    store = FaultyStore(MemoryStore(), [fault])
    with pytest.raises(SaveFailed) as raised:
        make(store, every="1step", callbacks=[Failures()]).fit(20)
    assert len(failed) == 3
    assert raised.value is failed[-1]


def test_a_save_of_another_step_is_refused() -> None:
    class Saves(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            assert training.manager is not None
            training.manager.save(7)

    with pytest.raises(HookFailed, match="the state is at step 1"):
        make(MemoryStore(), callbacks=[Saves()]).fit(2)


def test_a_resume_from_the_save_of_a_callback_is_exact(tmp_path: Path) -> None:
    """Between steps, with accumulation."""

    class Saves(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            save_now(training)

    straight = make(tmp_path / "straight", accumulate=2, every=None)
    straight.fit(5)
    with pytest.raises(HookFailed):
        make(tmp_path / "run", accumulate=2, every=None, callbacks=[Saves(), Stop(4)]).fit(5)
    assert saves(tmp_path / "run")[-1][0] == 4
    again = make(tmp_path / "run", accumulate=2, every=None)
    again.fit(5)
    for left, right in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_stop_asked_for_where_an_epoch_begins_is_saved() -> None:
    class Stops(Callback):
        def epoch_start(self, training: Training) -> None:
            training.request_stop("enough")

    store = MemoryStore()
    assert make(store, callbacks=[Stops()]).fit(3).step == 1
    assert saves(store) == [(1, "permanent", "stopped")]


class Failures(Callback):
    """Saves at some steps by itself, and writes down what it is told."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.failed: list[int] = []
        self.saved: list[int] = []

    def log(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step in self.steps:
            save_now(training)

    def checkpoint_failed(self, training: Training, error: SaveFailed) -> None:
        assert error.step is not None
        self.failed.append(error.step)

    def checkpoint_saved(self, training: Training, checkpoint: Any, cost: Metrics) -> None:
        self.saved.append(checkpoint.step)


def failing(*at: int) -> FaultyStore:
    """A store in which the commits with these numbers fail."""
    faults = [Fault(kind="fail", op="put", key="*/manifest.json", at=number) for number in at]
    return FaultyStore(MemoryStore(), faults)


def test_a_failure_is_made_up_for_at_the_next_step_and_not_at_its_own() -> None:
    """Invariant 8: also when it is known at once."""
    told, store = Failures(2), failing(0)

    class Waits(Callback):
        priority = -1

        def log(self, training: Training, metrics: Metrics) -> None:
            assert training.manager is not None
            with suppress(SaveFailed):
                training.manager.wait()

    make(store, every=None, callbacks=[told, Waits()]).fit(4)
    assert (told.failed, told.saved) == ([2], [3, 4])
    assert saves(store) == [(3, "permanent", "manual"), (4, "permanent", "final")]


def test_failed_saves_of_callbacks_count_towards_three_in_a_row() -> None:
    """Invariant 8."""
    told = Failures(*range(1, 20))
    with pytest.raises(SaveFailed):
        make(failing(*range(40)), every="100step", callbacks=[told]).fit(20)
    assert len(told.failed) == 3


def test_a_save_made_as_fit_ends_is_told_of() -> None:

    class Last(Failures):
        def fit_end(self, training: Training) -> None:
            assert training.manager is not None
            training.manager.save(training.counters.step, metrics={"mine": 1.0})

    told = Last()
    store = failing(1)
    make(store, every=None, callbacks=[told]).fit(2)
    assert (told.failed, told.saved) == ([2], [2, 2])


def test_a_permanent_save_is_not_dropped_for_an_ephemeral_one_of_the_step() -> None:
    """Epochs end at 5, 10 and 15, where ephemeral saves are due as well."""
    store = MemoryStore()
    make(store, every=SavePolicy(permanent=On("epoch"), ephemeral="5step")).fit(16)
    assert [item for item in saves(store) if item[1] == "permanent"] == [
        *((step, "permanent", "epoch") for step in (5, 10, 15)),
        (16, "permanent", "final"),
    ]
    assert [step for step, _, _ in saves(store)] == [5, 10, 15, 16]


def test_a_retry_keeps_class_and_reason() -> None:
    told, store = Failures(), failing(0)
    make(store, every=EPHEMERAL, callbacks=[told, Awaits()]).fit(9)
    assert told.failed == [5]
    assert (6, "ephemeral", "every 5step") in saves(store)


def test_a_retry_keeps_the_tags() -> None:
    store = failing(0, 1)

    class Tags(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            step = training.counters.step
            if step in (2, 3):
                assert training.manager is not None
                training.manager.save(step, tags=[f"at-{step}"])

    make(store, every="100step", callbacks=[Tags(), Awaits()]).fit(6)
    tagged = {tag for entry in Catalog(store).checkpoints() for tag in entry.tags}
    assert tagged == {"at-2", "at-3"}


class Awaits(Callback):
    """Lets the outcome of all saves be known at each step."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        assert training.manager is not None
        with suppress(SaveFailed):
            training.manager.wait()


STAGES = [
    ("make_folder", "step-00000004*"),
    ("create", "step-00000004*"),
    ("write", "step-00000004*"),
    ("finish", "step-00000004*"),
    ("put", "step-00000004*/index.json"),
    ("put", "step-00000004*/manifest.json"),
]


@pytest.mark.parametrize("awaits", [True, False])
@pytest.mark.parametrize(("op", "key"), STAGES)
def test_a_save_that_fails_at_any_stage_is_made_up_for_once(
    op: Any, key: str, awaits: bool, tmp_path: Path
) -> None:
    """Invariant 8: by the next save, or by one before it, and by no other."""
    fault = Fault(kind="fail", op=op, key=key, error=StoreError("no"))
    store, told = FaultyStore(LocalStore(tmp_path), [fault]), Failures()
    callbacks = [told, Awaits()] if awaits else [told]
    make(store, every="4step", callbacks=callbacks, log=False).fit(13)
    steps = [step for step, _, _ in saves(tmp_path)]
    assert told.failed == [4]
    assert steps == told.saved
    between = [5] if awaits else [step for step in (5, 6, 7) if step in steps][:1]
    assert steps == [*between, 8, 12, 13]


def trained(root: Path) -> list[str]:
    """The lines of the log on steps, without those on what saves and loads took."""
    lines = (root / "log" / "train.jsonl").read_text("utf-8").splitlines()
    return [line for line in lines if "/nbytes" not in line]


def test_an_ephemeral_save_at_the_goal_is_made_permanent_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the metrics that it had; a further rerun is told that all is done."""
    with pytest.raises(HookFailed):
        make(tmp_path, every=EPHEMERAL, callbacks=[Stop(6)]).fit(20)
    assert saves(tmp_path) == [(5, "ephemeral", "every 5step")]
    log = trained(tmp_path)
    for _ in range(2):
        outcome = make(tmp_path, every=EPHEMERAL).fit(5)
        assert (outcome.reason, outcome.step) == ("goal", 5)
        assert saves(tmp_path)[-1] == (5, "permanent", "final")
        assert len([item for item in saves(tmp_path) if item[1] == "permanent"]) == 1
    newest = Catalog(open_store(tmp_path)).checkpoints()[0]
    assert "loss" in newest.manifest.metrics
    assert trained(tmp_path) == log


def test_a_validation_that_was_done_is_not_done_again_for_the_last_save(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            seen.append(training.counters.step)

    plan = Validation(data=Loader(Noisy(), batch_size=5), every="5step")
    with pytest.raises(HookFailed):
        make(tmp_path, every=EPHEMERAL, validate=plan, callbacks=[Counts(), Stop(6)]).fit(20)
    make(tmp_path, every=EPHEMERAL, validate=plan, callbacks=[Counts()]).fit(5)
    assert seen == [5]
    newest = Catalog(open_store(tmp_path)).checkpoints()[0]
    assert {"loss", "val/loss"} <= set(newest.manifest.metrics)


def test_a_second_fit_of_which_nothing_was_saved_is_refused() -> None:
    """Weights and generators are no longer those of a beginning."""
    store = MemoryStore()

    class Once(Callback):
        is_on = True

        def after_backward(self, training: Training) -> None:
            if self.is_on and training.counters.step == 3:
                self.is_on = False
                raise KeyboardInterrupt

    trainer = make(store, every=None, callbacks=[Once()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(6)
    with pytest.raises(UsageError, match="trained before, to step 3, and nothing of it was saved"):
        trainer.fit(6)
    assert make(store, every=None).fit(6).step == 6


def test_lines_of_a_step_that_is_done_again_are_there_once(tmp_path: Path) -> None:
    """Also those that are logged within the step, before it is counted."""

    class Logs(Callback):
        def before_data(self, training: Training) -> None:
            training.log({"first": 1.0})

        def before_optimizer_step(self, training: Training) -> None:
            training.log({"within": 1.0})

    def lines(root: Path) -> list[tuple[int, list[str]]]:
        text = (root / "log" / "train.jsonl").read_text("utf-8").splitlines()
        found = [(line["step"], sorted(line["metrics"])) for line in map(json.loads, text)]
        return [item for item in found if "/" not in item[1][0]]  # no costs of saves and loads

    make(tmp_path / "straight", every="5step", callbacks=[Logs()]).fit(8)
    with pytest.raises(HookFailed):
        make(tmp_path / "run", every="5step", callbacks=[Logs(), Stop(7)]).fit(8)
    make(tmp_path / "run", every="5step", callbacks=[Logs()]).fit(8)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")
    assert [step for step, names in lines(tmp_path / "run") if names == ["within"]] == [
        *range(1, 9)
    ]


def test_a_callback_may_veto_ephemeral_saves() -> None:
    """Permanent ones are made all the same."""

    class Merging(Callback):
        def step_start(self, training: Training) -> None:
            self.vetoes_ephemeral = training.counters.step < 8

    store = MemoryStore()
    make(store, every=SavePolicy(permanent="7step", ephemeral="2step"), callbacks=[Merging()]).fit(
        11
    )
    assert [(step, kind) for step, kind, _ in saves(store)] == [
        *((7, "permanent"), (10, "ephemeral"), (11, "permanent"))
    ]


def test_there_is_no_goal_before_fit() -> None:
    found: list[str] = []

    class Asks(Callback):
        def setup(self, training: Training) -> None:
            with pytest.raises(UsageError, match="no goal before fit"):
                assert training.goal

        def fit_start(self, training: Training) -> None:
            found.append(str(training.goal))

    make(MemoryStore(), callbacks=[Asks()]).fit(1)
    assert found == ["1step"]


def test_an_unhealthy_save_is_warned_of_once_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Also when several events of the step ask for it."""

    class Spoils(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            with torch.no_grad():
                next(training.model.parameters()).fill_(float("nan"))

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        make(
            MemoryStore(), every=On("epoch"), unhealthy="skip", callbacks=[Spoils()], data=short()
        ).fit(3)
    assert caplog.text.count("this save was skipped") == 3


def short() -> Loader[Any]:
    return Loader(Noisy(), batch_size=10)


class Kills(Callback):
    """Saves in the end of a step, before the step is validated, and fails."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.step:
            save_now(training).wait()
            raise RuntimeError("killed")


@pytest.mark.parametrize(("every", "step"), [("2step", 2), ("100step", 5)])
def test_a_save_before_the_validation_of_its_step_says_that_it_is_to_come(
    tmp_path: Path, every: str, step: int
) -> None:
    """Also at the goal, where a rerun would have nothing else to do."""
    options: dict[str, Any] = {"every": None, "log_every": 100}
    options["validate"] = Validation(data=Loader(Noisy(), batch_size=5), every=every)
    validated: list[int] = []

    class Watch(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            validated.append(training.counters.step)

    with pytest.raises(HookFailed):
        make(tmp_path, callbacks=[Watch(), Kills(step)], **options).fit(5)
    make(tmp_path, callbacks=[Watch()], **options).fit(5)
    assert validated == ([5] if step == 5 else [2, 4, 5])


def test_at_the_last_step_a_side_saver_sees_what_has_happened(tmp_path: Path) -> None:
    """Here that an epoch has ended, as after any other step."""
    side = SideSaver("weights", every=On("epoch"), components=["model"])
    make(tmp_path, every=None, savers=[side]).fit(10)
    found = [entry.manifest for entry in Catalog(open_store(tmp_path)).checkpoints()]
    assert {item.timestamp.step for item in found if "weights" in item.savers} == {5, 10}
