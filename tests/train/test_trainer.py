"""Trainer: the run that is killed and resumed is the run that was not; hooks, goals and ends."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.data import Loader
from holdfast.errors import MismatchError, OwnedElsewhere, SaveFailed, Superseded, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.policy.savers import SavePolicy, SideSaver
from holdfast.policy.triggers import At, AtStart, Every, On
from holdfast.results import Checkpoint
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.testing.resume import Report, StepReporter, assert_resume_equivalent
from holdfast.train import (
    REQUEUE_EXIT_CODE,
    Callback,
    Counts,
    HookFailed,
    Limits,
    Metrics,
    Outcome,
    SpeedMonitor,
    Trainer,
    Training,
    Validation,
)
from runs import be_a_script
from train.small import Noisy, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Total(Callback):
    """A callback with a state."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.total = 0.0

    def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self.total += self.factor * metrics["loss"]

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def checkpoints(root: Any) -> list[Checkpoint]:
    """Oldest first."""
    with CheckpointManager(root, {"nothing": {}}) as manager:
        return list(reversed(manager.list()))


def log_lines(root: Path) -> list[dict[str, Any]]:
    """All but those of what saves and loads took, which are another each time."""
    text = (root / "log" / "train.jsonl").read_text("utf-8")
    lines = map(json.loads, text.splitlines())
    return [line for line in lines if not {"save/nbytes", "load/nbytes"} & set(line["metrics"])]


class Stop(Exception):
    """What a test ends a training with."""


@dataclass
class Hooks(Callback):
    """Writes every hook down, and stops the training where it is told to."""

    name: str = "own"
    calls: list[str] = field(default_factory=list)
    stop_at: int | None = None
    error: BaseException = field(default_factory=Stop)

    def resumed(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        self.calls.append(f"{self.name}.resumed {checkpoint.step}")

    def already_done(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.already_done")

    def fit_start(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.fit_start")

    def epoch_start(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.epoch_start {trainer.counters.epoch}")

    def before_optimizer_step(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.before_optimizer_step")

    def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self.calls.append(f"{self.name}.step_end {trainer.counters.step}")
        if trainer.counters.step == self.stop_at:
            raise self.error

    def epoch_end(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.epoch_end {trainer.counters.epoch}")

    def checkpoint_saved(self, trainer: Trainer, checkpoint: Checkpoint, cost: Metrics) -> None:
        self.calls.append(f"{self.name}.checkpoint_saved {checkpoint.step}")

    def checkpoint_failed(self, trainer: Trainer, error: SaveFailed) -> None:
        self.calls.append(f"{self.name}.checkpoint_failed {error.step}")

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        self.calls.append(f"{self.name}.exception {type(error).__name__}")

    def fit_end(self, trainer: Trainer) -> None:
        self.calls.append(f"{self.name}.fit_end")

    def of(self, hook: str) -> list[str]:
        return [call.partition(" ")[2] for call in self.calls if f".{hook}" in call]


def killed_run(root: str, steps: int, report: Report) -> None:
    be_a_script()
    trainer = make(
        Path(root),
        num_workers=1,
        every="1step",  # so that those before the last are committed at any kill
        accumulate=2,
        clip=0.1,
        callbacks=[Total(), named(Total(2.0), "twice"), StepReporter(report)],
        state={"more": {"tensor": torch.ones(2), "list": [1, 2]}},
    )
    trainer.fit(steps)
    lines = log_lines(Path(root))
    assert [line["step"] for line in lines] == list(range(1, steps + 1))


def test_a_killed_run_goes_on_bit_for_bit() -> None:
    """Invariant 7, R1, D34, D55, D69: in mid-epoch, with accumulation, with its log."""
    assert_resume_equivalent(killed_run, 10, [4, 8], timeout_s=120.0, start_method="forkserver")


def test_the_rerun_of_a_finished_run_does_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D25: no step, no second save of the last step."""
    make(tmp_path).fit(5)
    before = checkpoints(tmp_path)
    hooks = Hooks()
    again = make(tmp_path, callbacks=[hooks])
    with caplog.at_level(logging.INFO, logger="holdfast"):
        again.fit("5step")
    assert "5step was already reached, at step 5" in caplog.text
    assert hooks.calls == ["own.resumed 5", "own.already_done"]
    assert checkpoints(tmp_path) == before
    assert again.counters.step == 5


def test_the_last_step_is_saved_once_and_as_final(tmp_path: Path) -> None:
    """D20, D25, D52: also when the trigger was due at that step."""
    make(tmp_path, every="2step").fit(4)
    found = checkpoints(tmp_path)
    assert [(item.step, item.reason, item.save_class) for item in found] == [
        (2, "every 2step", "permanent"),
        (4, "final", "permanent"),
    ]


def test_without_a_trigger_the_last_step_alone_is_saved(tmp_path: Path) -> None:
    make(tmp_path, every=None).fit(3)
    assert [found.step for found in checkpoints(tmp_path)] == [3]


def test_a_trigger_may_be_a_part_of_the_goal(tmp_path: Path) -> None:
    make(tmp_path, every="0.25dur").fit(8)
    assert [found.step for found in checkpoints(tmp_path)] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (AtStart() | Every("3step"), [0, 3, 6, 7]),
        (On("epoch"), [5, 7]),
        (On("evaluation"), [4, 7]),
        (On("epoch", "evaluation") | Every("5step"), [4, 5, 7]),
        (At("2step", "6step"), [2, 6, 7]),
        (lambda now, metrics, event: event == "step" and now.step == 3, [3, 7]),
    ],
)
def test_triggers_are_asked_at_every_event(tmp_path: Path, every: Any, expected: list[int]) -> None:
    """O8: one save a step, whatever asks for it."""
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="4step")
    make(tmp_path, every=every, validate=plan).fit(7)
    assert [found.step for found in checkpoints(tmp_path)] == expected


def test_a_trigger_sees_the_metrics_of_a_validation(tmp_path: Path) -> None:
    """A5."""
    seen: list[bool] = []

    def look(now: Timestamp, metrics: Metrics, event: str) -> bool:
        if event == "evaluation":
            seen.append("val/loss" in metrics)
        return False

    plan = Validation(data=Loader(Noisy(), batch_size=5), every="2step")
    make(tmp_path, every=look, validate=plan).fit(5)
    assert seen == [True, True, True]


def test_the_end_is_permanent_although_its_step_was_saved_as_ephemeral(tmp_path: Path) -> None:
    """O3: also when the end is asked for after the last save was begun."""

    class Stops(Callback):
        def log(self, training: Training, metrics: Metrics) -> None:
            if training.counters.step == 4:
                training.request_stop("enough")

    policy = SavePolicy(permanent="100step", ephemeral="2step")
    make(tmp_path, every=policy, callbacks=[Stops()]).fit(9)
    last = checkpoints(tmp_path)[-1]
    assert (last.step, last.save_class, last.reason) == (4, "permanent", "stopped")


def test_retention_is_the_managers(tmp_path: Path) -> None:
    make(tmp_path, every="1step", keep=Last(2)).fit(5)
    assert [found.step for found in checkpoints(tmp_path)] == [4, 5]


def test_two_fits_of_one_trainer_are_one_run(tmp_path: Path) -> None:
    twice, straight = make(tmp_path / "twice"), make(tmp_path / "straight")
    twice.fit(3)
    twice.fit(7)
    straight.fit(7)
    for left, right in zip(twice.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert twice.counters == straight.counters


def test_windows_end_with_their_epoch(tmp_path: Path) -> None:
    """D69: five batches in windows of two are three steps, each with the position at its end."""
    seen: list[tuple[int, int, int]] = []

    class Positions(Callback):
        def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
            now = trainer.counters
            assert (now.epoch, now.batch) == (trainer.data.epoch, trainer.data.batch)
            seen.append((now.step, now.epoch, now.batch))

    make(tmp_path, accumulate=2, callbacks=[Positions()]).fit(7)
    assert seen == [(1, 0, 2), (2, 0, 4), (3, 1, 0), (4, 1, 2), (5, 1, 4), (6, 2, 0), (7, 2, 2)]


def test_a_goal_in_epochs_ends_with_the_epoch(tmp_path: Path) -> None:
    """D54: the checkpoint of an epoch's last step says that the epoch is over."""
    hooks = Hooks()
    trainer = make(tmp_path, callbacks=[hooks])
    trainer.fit("2ep")
    last = checkpoints(tmp_path)[-1]
    assert (last.step, last.timestamp.epoch, last.reason) == (10, 2, "final")
    assert (trainer.data.epoch, trainer.data.batch) == (2, 0)
    assert hooks.of("epoch_end") == ["1", "2"]


def test_an_epoch_may_be_so_many_batches_and_a_resume_is_in_the_same_one(tmp_path: Path) -> None:
    """K35: five batches a lap, three an epoch, with a stop at each of its places."""
    straight, resumed = Hooks(), Hooks()
    options = {"every": "1ep", "ema": 0.5}
    data = partial(Loader, Noisy(), batch_size=2, batches_per_epoch=3)
    whole = make(tmp_path / "straight", data=data(), callbacks=[straight], **options)
    whole.fit("3ep")
    for step in (1, 3, 5, 7, 9):
        parts = make(tmp_path / "parts", data=data(), callbacks=[resumed], **options)
        parts.fit(step)
    assert straight.of("epoch_end") == resumed.of("epoch_end") == ["1", "2", "3"]
    assert [found.step for found in checkpoints(tmp_path / "straight")] == [3, 6, 9]
    assert (parts.data.epoch, parts.data.batch, parts.counters.step) == (3, 0, 9)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], weight)


def test_goals_and_triggers_in_samples_and_tokens(tmp_path: Path) -> None:
    """D34: the counts of earlier processes count."""
    counts = Counts(samples=len, tokens=lambda batch: batch.numel())
    make(tmp_path, every="8sp", counts=counts).fit("9sp")
    assert [found.timestamp.samples for found in checkpoints(tmp_path)] == [8, 10]
    again = make(tmp_path, every="8sp", counts=counts)
    again.fit("60tok")
    assert (again.counters.samples, again.counters.tokens, again.counters.step) == (16, 64, 8)


def test_counting_that_begins_later_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path).fit(2)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        make(tmp_path, counts=Counts(samples=len)).fit(3)
    assert "samples were not counted before step 2" in caplog.text


@pytest.mark.parametrize(
    "until", [0, -1, True, 2.0, "10", "0step", "10min", "100sp", "1e9tok", "2x"]
)
def test_what_is_no_goal_is_refused_before_anything_is_claimed(tmp_path: Path, until: Any) -> None:
    with pytest.raises(UsageError):
        make(tmp_path / "run").fit(until)
    assert not (tmp_path / "run").exists()


def test_an_epoch_begins_once_although_it_is_resumed_in_its_middle(tmp_path: Path) -> None:
    first, second = Hooks(stop_at=4), Hooks()
    with pytest.raises(HookFailed):
        make(tmp_path, callbacks=[first]).fit(8)
    make(tmp_path, callbacks=[second]).fit(8)
    assert first.of("epoch_start") == ["0"]
    assert second.calls[:2] == ["own.resumed 2", "own.fit_start"]
    assert second.of("epoch_start") == ["1"]


def named(callback: Callback, name: str) -> Callback:
    callback.name = name
    return callback


@pytest.mark.parametrize("error", [Stop("own"), KeyboardInterrupt()])
def test_an_error_ends_the_run_cleanly_and_is_what_the_caller_sees(
    tmp_path: Path, error: BaseException
) -> None:
    """D46: with a save under way; the run can be taken up at once."""
    hooks = Hooks(stop_at=3, error=error)
    trainer = make(tmp_path, every="1step", callbacks=[hooks])
    expected = HookFailed if isinstance(error, Stop) else type(error)
    with pytest.raises(expected) as raised:
        trainer.fit(9)
    assert error in (raised.value, raised.value.__cause__)
    assert trainer.manager is None
    assert hooks.of("exception") == [expected.__name__]
    assert hooks.of("fit_end") == []
    again = make(tmp_path, callbacks=[Hooks()])
    again.fit(4)
    assert again.counters.step == 4


def test_a_failed_save_is_told_and_tried_again_at_the_next_step() -> None:
    """Invariant 8: two failures in a row end nothing."""
    hooks = Hooks()
    fault = Fault(kind="fail", op="put", key="*/manifest.json", times=2)
    store = FaultyStore(MemoryStore(), [fault])
    make(store, every="100step", callbacks=[hooks]).fit(99)
    assert hooks.of("checkpoint_failed") == ["99", "99"]
    assert hooks.of("checkpoint_saved") == ["99"]


def test_failures_that_are_not_in_a_row_end_nothing() -> None:
    """Invariant 8: a save that commits begins the count anew."""
    hooks = Hooks()
    faults = [
        Fault(kind="fail", op="put", key="*/manifest.json", at=at, times=1) for at in (0, 2, 4, 6)
    ]
    make(FaultyStore(MemoryStore(), faults), every="1step", callbacks=[hooks]).fit(30)
    assert len(hooks.of("checkpoint_failed")) == 4
    assert hooks.of("checkpoint_saved")[-1] == "30"


def test_a_run_that_was_taken_over_ends_at_once() -> None:
    """R10: losing the run is not a failure to try again."""
    store = MemoryStore()

    class TakeOver(Callback):
        def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
            if trainer.counters.step == 3:
                make(store, every="1step", takeover=True).fit(3)

    hooks = Hooks()
    with pytest.raises(Superseded):
        make(store, every="1step", callbacks=[hooks, TakeOver()]).fit(9)
    assert hooks.of("checkpoint_failed") == []


class Clock(Callback):
    """Lets the time of a training be over after a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, over_after: int) -> None:
        self.now_s = 0.0
        self.over_after = over_after
        monkeypatch.setattr("holdfast.train.status.time.monotonic", lambda: self.now_s)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.over_after:
            self.now_s = 13_800.0


def test_when_the_time_is_over_the_step_is_saved_and_the_exit_code_says_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K47: and the next process goes on to the goal, which is no matter of time."""
    clock = Clock(monkeypatch, over_after=3)
    outcome = make(tmp_path, every=None, callbacks=[clock]).fit(9, max_time="3h50min")
    assert outcome == Outcome(reason="max_time", step=3)
    assert outcome.exit_code == REQUEUE_EXIT_CODE == 75
    (found,) = checkpoints(tmp_path)
    assert (found.step, found.reason) == (3, "max_time")
    monkeypatch.undo()
    outcome = make(tmp_path, every=None).fit(9, max_time="3h50min")
    assert (outcome.reason, outcome.step, outcome.exit_code) == ("goal", 9, 0)


def test_a_goal_that_is_reached_in_time_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, over_after=3)
    assert make(tmp_path, callbacks=[clock]).fit(3, max_time="3h50min").exit_code == 0


def test_a_stop_asked_for_before_the_first_step_trains_nothing(tmp_path: Path) -> None:
    class Never(Callback):
        def fit_start(self, training: Training) -> None:
            training.request_stop("enough")
            training.request_stop("a second reason changes nothing")

    trainer = make(tmp_path, callbacks=[Never()])
    outcome = trainer.fit(5)
    assert (outcome.reason, outcome.step, outcome.detail) == ("stopped", 0, "enough")
    assert make(tmp_path).fit(5).reason == "goal"


def test_a_longer_goal_goes_on_and_a_shorter_one_does_nothing(tmp_path: Path) -> None:
    """O53: the goal of each run is its own."""
    steps = [make(tmp_path, every="2step").fit(until).step for until in (4, 8, "1ep", "2ep")]
    assert steps == [4, 8, 8, 10]


def test_metrics_of_ones_own_go_to_the_log(tmp_path: Path) -> None:
    """K17."""

    class Measures(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"mine": 1.0})
            training.log({"other": 2.0}, to=["jsonlines"])

    make(tmp_path, log_every=5, callbacks=[Measures()]).fit(2)
    assert [(line["step"], set(line["metrics"])) for line in log_lines(tmp_path)] == [
        *((1, {"mine"}), (1, {"other"})),
        *((2, {"mine"}), (2, {"other"}), (2, {"loss", "draw"})),
    ]


@pytest.mark.parametrize("options", [{"progress": True}, {"callbacks": [SpeedMonitor()]}])
def test_without_a_logger_a_callbacks_entries_are_warned_of_once(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """K17."""

    class Logs(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"mine": 1.0})
            training.log({"mine": 2.0})

    callbacks = [Logs(), *options.pop("callbacks", [])]
    make(None, callbacks=callbacks, **options).fit(2)
    [warning] = [record for record in caplog.records if "no logger records" in record.message]
    assert "'mine'" in warning.message
    assert warning.levelname == "WARNING"


def test_no_warning_of_logs_without_entries_with_a_logger_or_in_a_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(None).log({})
    make(None, limits=Limits(fast_dev_run=True)).log({"mine": 1.0})
    make(tmp_path).log({"mine": 1.0})
    assert "no logger records" not in caplog.text


def test_outside_of_a_fit_nothing_is_logged(tmp_path: Path) -> None:
    make(tmp_path).log({"mine": 1.0})
    assert not (tmp_path / "log").exists()


def test_a_save_that_a_callback_makes_takes_the_place_of_one_that_is_due(tmp_path: Path) -> None:
    """A4: but for the last step, which the Trainer sees to itself."""

    class Saves(Callback):
        def log(self, training: Training, metrics: Metrics) -> None:
            assert training.manager is not None
            training.manager.save(training.counters.step, tags=["mine"])

    hooks = Hooks()
    make(tmp_path, every="1step", callbacks=[Saves(), hooks]).fit(3)
    assert hooks.of("checkpoint_saved") == ["1", "2", "3", "3"]
    assert [found.step for found in checkpoints(tmp_path)] == [1, 2, 3, 3]


def test_generators_are_seeded_for_a_fresh_run_only(tmp_path: Path) -> None:
    """Two fresh runs draw the same whatever was drawn before; a resumed one goes on."""
    draws: list[list[float]] = []
    for before in (1, 2):
        random.seed(before), np.random.seed(before), torch.manual_seed(before)
        make(tmp_path / str(before), seed=5).fit(2)
        draws.append([line["metrics"]["draw"] for line in log_lines(tmp_path / str(before))])
    assert draws[0] == draws[1]
    make(tmp_path / "1", seed=6).fit(4)
    make(tmp_path / "straight", seed=5).fit(4)
    assert [line["metrics"] for line in log_lines(tmp_path / "1")] == [
        line["metrics"] for line in log_lines(tmp_path / "straight")
    ]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path).fit(1)
    trainer = make(tmp_path)
    trainer.model.append(nn.Linear(1, 1))
    with pytest.raises(MismatchError):
        trainer.fit(2)


class Foreign:
    """Data of others: it has a position, and tells nothing of its end beforehand."""

    def __init__(self, num_batches: int = 3) -> None:
        self.num_batches = num_batches
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.num_batches:
            self.position += 1
            yield torch.full((2, 4), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("stop_at", [2, 3, 4])
def test_data_of_others_resumes_at_and_around_an_epochs_end(tmp_path: Path, stop_at: int) -> None:
    first, second, straight = Hooks(stop_at=stop_at + 1), Hooks(), Hooks()
    make(tmp_path / "straight", data=Foreign(), callbacks=[straight]).fit("2ep")
    with pytest.raises(HookFailed):
        make(tmp_path / "killed", data=Foreign(), every="1step", callbacks=[first]).fit("2ep")
    trainer = make(tmp_path / "killed", data=Foreign(), every="1step", callbacks=[second])
    trainer.fit("2ep")
    assert (trainer.counters.step, trainer.counters.epoch, trainer.counters.batch) == (6, 2, 0)
    assert straight.of("epoch_end") == ["1", "2"]
    # The end of an epoch that was seen after the last save is seen once more.
    assert [*first.of("epoch_end"), *second.of("epoch_end")][-2:] == ["1", "2"]
    assert [found.step for found in checkpoints(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_over_data_of_others_is_saved_no_further(tmp_path: Path) -> None:
    """D25."""
    for _ in range(2):
        make(tmp_path, data=Foreign(), every="1step").fit("1ep")
        assert [found.step for found in checkpoints(tmp_path)] == [1, 2, 3]


def test_data_without_any_batch_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no batch"):
        make(tmp_path, data=Foreign(num_batches=0)).fit(1)


def test_beginning_an_iteration_leaves_the_global_generators_alone(tmp_path: Path) -> None:
    """PEERS 3.9: loaders of torch's kind draw from them in `iter`."""

    class Drawing(Foreign):
        def __iter__(self) -> Iterator[Tensor]:
            torch.rand(1), random.random(), np.random.random()
            return super().__iter__()

    make(tmp_path / "drawing", data=Drawing()).fit(5)
    make(tmp_path / "quiet", data=Foreign()).fit(5)
    found = [log_lines(tmp_path / name) for name in ("drawing", "quiet")]
    assert [line["metrics"] for line in found[0]] == [line["metrics"] for line in found[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [1, 2]}, r"holdfast\.data\.Loader"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"seed": 2**32}, "seed="),
        ({"clip": 0.0}, r"clip: norm=0\.0"),
        ({"callbacks": [object()]}, "not a holdfast"),
        ({"state": {"model": {}}}, "'model'"),
        ({"every": "10"}, "every"),
        ({"every": "5sp"}, r"counts=Counts\(samples=…\)"),
        ({"every": "5tok"}, r"counts=Counts\(tokens=…\)"),
        ({"every": Every("5tok") | Every("2step")}, r"counts=Counts\(tokens=…\)"),
        ({"every": At("5sp")}, r"counts=Counts\(samples=…\)"),
        ({"every": SavePolicy(permanent="9step", ephemeral="2tok")}, r"counts=Counts\(tokens=…\)"),
        ({"every": SavePolicy(permanent="9step", ephemeral="2step", cooldown="1tok")}, "cooldown"),
        ({"every": "2cycle"}, "no cycles"),
        ({"validate": Validation(data=[torch.ones(2, 4)], every="2cycle")}, "no cycles"),
        ({"every": On("signal", "cycle")}, "no event 'cycle'"),
        ({"every": SavePolicy(permanent=On("epoch") | On("cycle"))}, "no event 'cycle'"),
        ({"every": On("signal"), "stop": None}, "handles no signals"),
        ({"every": On("evaluation")}, "nothing to validate on"),
        (
            {"savers": [SideSaver("w", every="5tok", components=["model"])]},
            r"'w': .*counts=Counts\(tokens=…\)",
        ),
        ({"savers": [SideSaver("w", every="2cycle", components=["model"])]}, "'w': .*no cycles"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """D47."""
    with pytest.raises(UsageError, match=message):
        make(tmp_path, **options)


def test_a_log_needs_a_local_place() -> None:
    with pytest.raises(UsageError, match="log=True"):
        make(MemoryStore(), log=True)
    with pytest.raises(UsageError, match="log=True"):
        make("memory://somewhere", log=True)


def test_a_log_may_be_elsewhere(tmp_path: Path) -> None:
    make(MemoryStore(), log=tmp_path / "my" / "log.jsonl").fit(2)
    lines = (tmp_path / "my" / "log.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)["metrics"]) for line in lines] == [
        *[["draw", "loss"]] * 2,
        ["save/duration_s", "save/nbytes", "save/stall_s"],
    ]


def test_inexact_data_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inexact = type("StatefulDataLoader", (Foreign,), {"__module__": "torchdata", "num_workers": 2})
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        make(tmp_path, data=inexact())
    assert "random generators are not restored" in caplog.text


@pytest.mark.usefixtures("refused_at_once")
def test_a_second_trainer_of_a_root_is_refused_while_the_first_trains(tmp_path: Path) -> None:
    """Two that train into one root; one after the other is a run that goes on."""

    class Nested(Callback):
        def fit_start(self, training: Training) -> None:
            with pytest.raises(OwnedElsewhere, match=r"this process.*Close .* takeover=True"):
                make(tmp_path, log=False).fit(5)

    make(tmp_path, callbacks=[Nested()]).fit(2)
    assert make(tmp_path).fit(3).step == 3
