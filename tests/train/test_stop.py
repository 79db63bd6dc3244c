"""Signals through the Trainer: whatever they hit, the state is saved, the exit status tells the
scheduler, and the run that goes on is the run that was never stopped, bit for bit.

Each run is a process of its own. It reports where it stands and waits there for the parent, which
sends the signal and lets it go on: nothing depends on time.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from children import environment
from holdfast import At, CheckpointManager, Every, On, SavePolicy, Stop
from holdfast.data import Loader
from holdfast.errors import OwnedElsewhere
from holdfast.store.local import LocalStore
from holdfast.testing import Fault, FaultyStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import (
    Callback,
    Counters,
    HookFailed,
    Logger,
    Metrics,
    Trainer,
    Training,
    Validation,
)
from marks import diagonal, full
from runs import be_a_script
from train.small import Noisy, mean_square, network, with_record

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

PROCESSES = multiprocessing.get_context("forkserver")

STEPS = 8
WAIT_S = 60.0


@dataclass
class Pause:
    """Where a run is to wait for its parent: at the n-th time that it comes by `place`."""

    place: str
    nth: int
    channel: Connection
    counters: Any = None
    times: int = 0

    def at(self, place: str) -> None:
        if place != self.place:
            return
        self.times += 1
        if self.times == self.nth:
            self.channel.send(self.counters.step)
            self.channel.recv()


@dataclass
class Meddling(Callback):
    """A callback that is part of the state, and draws numbers, in every hook that comes between
    steps; so half of anything would show."""

    pause: Pause | None
    seen: dict[str, int] = field(default_factory=dict)
    best: float = float("inf")

    def _see(self, hook: str) -> None:
        self.seen[hook] = self.seen.get(hook, 0) + 1
        random.random()
        torch.rand(1)
        if self.pause is not None:
            self.pause.at(hook)

    def epoch_start(self, training: Training) -> None:
        self._see("epoch_start")

    def before_data(self, training: Training) -> None:
        self._see("before_data")

    def validation_start(self, training: Training, name: str) -> None:
        self._see("validation_start")

    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        self._see("validation_batch_end")

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        self.best = min(self.best, metrics["val/loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.seen), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.best = dict(state["seen"]), state["best"]


class Reporting(Callback):
    """Hooks outside of the state."""

    def __init__(self, pause: Pause | None) -> None:
        self.pause = pause

    def _see(self, hook: str) -> None:
        if self.pause is not None:
            self.pause.at(hook)

    def before_load(self, training: Training) -> None:
        self._see("before_load")

    def fit_start(self, training: Training) -> None:
        self._see("fit_start")

    def before_save(self, training: Training) -> None:
        self._see("before_save")

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self._see("step_end")


class Data:
    """Ten noisy samples, each of which is a place to wait at."""

    def __init__(self, place: str, pause: Pause | None) -> None:
        self.noisy, self.place, self.pause = Noisy(), place, pause

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        random.random()
        if self.pause is not None:
            self.pause.at(self.place)
        return self.noisy[index]


class SlowStore(LocalStore):
    """A disk whose commits are a place to wait at, in the background of the training."""

    pause: Pause

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.endswith("manifest.json"):
            self.pause.at("commit")
        super().put(key, data, if_absent=if_absent)


class Counting(nn.Module):
    """A buffer that every forward pass changes, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        self.passes += 1
        return batch + 0.001 * self.passes


def trainer(root: Path, pause: Pause | None, /, **options: Any) -> Trainer:
    def loss(place: str, model: nn.Module, batch: Tensor) -> Any:
        if pause is not None:
            pause.at(place)
        return mean_square(model, batch)

    num_workers = options.pop("num_workers", 0)
    store: Any = root
    if pause is not None and pause.place == "commit":
        store = SlowStore(root)
        store.pause = pause
    model = nn.Sequential(Counting(), nn.BatchNorm1d(4), *network())
    callbacks = [Reporting(pause), *options.pop("callbacks", ())]
    if options.pop("is_meddled_with", True):
        callbacks.append(Meddling(pause))
    made = Trainer(
        model,
        **with_record(
            options.pop("root", store),
            {
                "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
                "scheduler": lambda given: torch.optim.lr_scheduler.StepLR(given, 3),
                "data": Loader(Data("data", pause), batch_size=2, num_workers=num_workers),
                "loss": partial(loss, "train"),
                "accumulate": 2,
                "validate": Validation(
                    data=Loader(Data("validation data", pause), batch_size=4, seed=3),
                    loss=partial(loss, "evaluation"),
                    every="2step",
                ),
                "every": "3step",
                "ema": 0.9,
                "callbacks": callbacks,
                "log": root / "log" / "train.jsonl",
                "log_every": 3,
                "progress": False,
                **options,
            },
        ),
    )
    if pause is not None:
        pause.counters = made.counters
    return made


def run(root: str, result: str, pause: Pause | None, steps: int = STEPS, **options: Any) -> None:
    """What a training script does; leaves the digests of its last state."""
    be_a_script()
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    made = trainer(Path(root), pause, **options)
    try:
        made.fit(steps)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    digests = leaf_digests({**made.state, "python": random.getstate()[1][:8]})
    Path(result).write_text(json.dumps(digests))


class Process:
    """A run, and the other end of its pause."""

    def __init__(
        self,
        root: Path,
        place: str | None = None,
        nth: int = 1,
        target: Callable[..., None] = run,
        **options: Any,
    ) -> None:
        self.channel, theirs = PROCESSES.Pipe()
        pause = None if place is None else Pause(place, nth, theirs)
        self.result = root.with_suffix(".json")
        arguments = (str(root), str(self.result), pause)
        self.process: BaseProcess = PROCESSES.Process(target=target, args=arguments, kwargs=options)
        self.process.start()
        theirs.close()

    def step_at_pause(self) -> int:
        assert self.channel.poll(WAIT_S), "it did not come by"
        return int(self.channel.recv())

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def go_on(self) -> None:
        with suppress(BrokenPipeError):
            self.channel.send(None)

    def status(self) -> int | None:
        self.process.join(WAIT_S)
        if self.process.exitcode is None:
            self.process.kill()
        return self.process.exitcode


def saved(root: Path) -> list[Any]:
    with CheckpointManager(root, {"none": {}}) as manager:
        return list(manager.list())


def lines(root: Path) -> list[Any]:
    """The log, without what is a matter of time."""
    found = [json.loads(line) for line in (root / "log" / "train.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["epoch"], line["metrics"])
        for line in found
        if not any(name.startswith(("save/", "load/")) for name in line["metrics"])
    ]


@dataclass(frozen=True)
class Undisturbed:
    digests: dict[str, str]
    lines: list[Any]
    best: dict[int, float]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    process = Process(root)
    assert process.status() == 0
    return Undisturbed(json.loads(process.result.read_text()), lines(root), measured(root))


def measured(root: Path) -> dict[int, float]:
    """The loss on the validation data, by step, as the checkpoints have it."""
    return {c.step: c.metrics["val/loss"] for c in saved(root) if "val/loss" in c.metrics}


PLACES = {
    "train step": ("train", [3, 6, 9, 12]),
    "data wait": ("data", [1, 8, 11, 24]),
    "data wait of a worker": ("data", [3]),
    "evaluation": ("evaluation", [1, 2, 5, 11]),
    "data of an evaluation": ("validation data", [1, 6, 11, 37]),
    "hook of an evaluation": ("validation_batch_end", [1, 3, 6, 12]),
    "save": ("before_save", [1, 2]),
    "commit": ("commit", [1, 2]),
    "warm-up": (None, [1, 2, 3, 4]),
    "step end": ("step_end", [1, 4, 7, 8]),
}
WARM_UP = ("before_load", "fit_start", "epoch_start", "before_data")
STOPS = [
    pytest.param(
        *(phase, place or WARM_UP[nth - 1], nth if place else 1),
        marks=pytest.mark.full if at or phase == "data wait of a worker" else (),
    )
    for phase, (place, numbers) in PLACES.items()
    for at, nth in enumerate(numbers)
]
"""Of each phase `make test` has the first, but for the one that starts workers for seconds."""
LONG = [
    *(("train step", "train", 1 + nth % 14) for nth in range(20)),
    *(("data wait", "data", 1 + nth) for nth in range(26)),
    *(("evaluation", "evaluation", nth) for nth in range(1, 13)),
    *(("data of an evaluation", "validation data", nth) for nth in range(1, 40, 4)),
    *(("hook of an evaluation", "validation_batch_end", nth) for nth in range(1, 13)),
    *(("save", "before_save", 1 + nth % 3) for nth in range(20)),
    *(("commit", "commit", 1 + nth % 3) for nth in range(20)),
    *(("warm-up", WARM_UP[nth % 4], 1) for nth in range(20)),
]


def check_stop_and_resume(
    root: Path, undisturbed: Undisturbed, phase: str, place: str, nth: int
) -> None:
    options = {"num_workers": 2} if phase.endswith("worker") else {}
    stopped = Process(root, place, nth, **options)
    at = stopped.step_at_pause()
    stopped.send(signal.SIGTERM)
    stopped.go_on()
    assert stopped.status() == 75
    newest = saved(root)[0]
    # A step is finished. Where a commit hangs, training is ahead of it; a worker knows no step.
    is_told = phase not in ("commit", "data wait of a worker")
    assert not is_told or newest.step == at + (phase == "train step")
    resumed = Process(root, **options)
    assert resumed.status() == 0
    digests = json.loads(resumed.result.read_text())
    assert {k: v for k, v in digests.items() if undisturbed.digests.get(k) != v} == {}
    assert digests == undisturbed.digests
    assert lines(root) == undisturbed.lines
    assert undisturbed.best.items() <= measured(root).items()


@pytest.mark.parametrize(("phase", "place", "nth"), STOPS)
def test_a_stop_in_any_phase_is_saved_and_goes_on_bit_for_bit(
    tmp_path: Path, undisturbed: Undisturbed, phase: str, place: str, nth: int
) -> None:
    """Invariant 7, R1: the state is durable, the status 75, and nothing of it shows later."""
    check_stop_and_resume(tmp_path / "run", undisturbed, phase, place, nth)


@pytest.mark.long
@pytest.mark.parametrize(("phase", "place", "nth"), LONG)
def test_a_stop_in_any_phase_many_times(
    tmp_path: Path, undisturbed: Undisturbed, phase: str, place: str, nth: int
) -> None:
    """Invariant 7, R1."""
    check_stop_and_resume(tmp_path / "run", undisturbed, phase, place, nth)


@pytest.mark.full
def test_stops_in_life_after_life_go_on_bit_for_bit(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Invariant 7: also while a validation is made up for, and right after it."""
    root = tmp_path / "run"
    for place, nth in [
        ("evaluation", 5),
        ("evaluation", 2),
        ("validation data", 3),
        ("data", 1),
        ("train", 1),
        ("before_save", 1),
        ("validation_start", 1),
    ]:
        process = Process(root, place, nth)
        process.step_at_pause()
        process.send(signal.SIGTERM)
        process.go_on()
        assert process.status() == 75
    last = Process(root)
    assert last.status() == 0
    assert json.loads(last.result.read_text()) == undisturbed.digests
    assert lines(root) == undisturbed.lines
    assert undisturbed.best.items() <= measured(root).items()


def loop(root: str, result: str, pause: Pause | None) -> None:
    """A loop of one's own, as the page on stops shows it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Loader(Noisy(), batch_size=2)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with Stop() as stop, CheckpointManager(root, state, every="4step", stop=stop) as manager:
        found = manager.resume()
        step = found.step if found else 0
        for batch in data.until(10, start=step):
            mean_square(model, batch)[0].backward()
            if pause is not None:
                pause.counters = Counters(step=step)
                pause.at("train")
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            manager.maybe_save(step)
            if pause is not None:
                pause.at("saved")
            if stop.requested:
                break
        manager.save(step, reason="end")
    Path(result).write_text(json.dumps(leaf_digests(state)))


@pytest.mark.parametrize(("place", "nth"), diagonal(["train", "saved"], [1, 4, 6]))
def test_a_loop_of_ones_own_is_saved_and_goes_on_bit_for_bit(
    tmp_path: Path, place: str, nth: int
) -> None:
    """Invariant 7, R1: also when the signal comes between the save and the look for it."""
    straight = Process(tmp_path / "straight", target=loop)
    stopped = Process(tmp_path / "run", place, nth, target=loop)
    stopped.step_at_pause()
    stopped.send(signal.SIGTERM)
    stopped.go_on()
    assert stopped.status() == 75
    assert saved(tmp_path / "run")[0].step == nth
    resumed = Process(tmp_path / "run", target=loop)
    assert resumed.status() == straight.status() == 0
    assert json.loads(resumed.result.read_text()) == json.loads(straight.result.read_text())


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGUSR1, 75)],
)
def test_other_signals_stop_as_well_and_ctrl_c_is_a_keyboard_interrupt(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    process = Process(tmp_path / "run", "train", 7)
    at = process.step_at_pause()
    process.send(number)
    process.go_on()
    assert process.status() == status
    assert saved(tmp_path / "run")[0].step == at + 1


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The step under way is not finished, and what is durable stays."""
    process = Process(tmp_path / "run", "train", 9)
    assert process.step_at_pause() == 4
    while process.process.is_alive():
        process.send(signal.SIGINT)
        process.process.join(0.1)
    assert process.status() == 130
    assert saved(tmp_path / "run")[0].step == 3


def test_a_signal_for_a_save_makes_one_and_training_goes_on(tmp_path: Path) -> None:
    process = Process(tmp_path / "run", "train", 8)
    assert process.step_at_pause() == 4
    process.send(signal.SIGUSR2)
    process.go_on()
    assert process.status() == 0
    found = {checkpoint.step: checkpoint.reason for checkpoint in saved(tmp_path / "run")}
    assert found[5] == "demand"
    assert found[8] == "final"


def test_without_a_stop_signals_are_left_alone(tmp_path: Path) -> None:
    process = Process(tmp_path / "run", "train", 3, stop=None)
    process.step_at_pause()
    process.send(signal.SIGTERM)
    assert process.status() == -signal.SIGTERM


def hang(root: str, result: str, pause: Pause) -> None:
    """A run that hangs in its fourth step, with a commit under way."""
    os.dup2(os.open(result, os.O_WRONLY | os.O_CREAT), 2)
    made = trainer(Path(root), pause, stop=Stop(grace="2s"))
    inner = made.model.forward

    def forward(batch: Tensor) -> Any:
        if made.counters.step == 3:
            threading.Event().wait()
        return inner(batch)

    made.model.forward = forward  # type: ignore[method-assign]
    made.fit(STEPS)


def test_when_the_grace_is_nearly_over_the_save_under_way_is_finished(tmp_path: Path) -> None:
    process = Process(tmp_path / "run", "commit", target=hang)
    process.step_at_pause()
    process.send(signal.SIGTERM)
    process.go_on()
    assert process.status() == 75
    assert saved(tmp_path / "run")[0].step == 3
    said = process.result.read_text()
    assert "the grace of 2 s is nearly over" in said
    assert "the newest checkpoint is step-00000003" in said


SCRIPT = """
import sys
import time
from pathlib import Path
from holdfast import Stop
from holdfast.train import Callback
from train.small import make

stop = Stop()

class Waits(Callback):
    def batch_start(self, training, batch):
        if training.present_step == 3:
            print("ready", flush=True)
            while not stop.requested:
                time.sleep(0.01)

if __name__ == "__main__":
    root, num_workers = Path(sys.argv[1]), int(sys.argv[2])
    make(root, callbacks=[Waits()], log=False, stop=stop, num_workers=num_workers).fit(6)
"""


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [2, *full(0)])
def test_under_a_supervisor_a_forwarded_signal_ends_both_with_the_status_for_a_requeue(
    tmp_path: Path, num_workers: int
) -> None:
    """The whole group gets it, also the workers of the loader, whose end would be an error."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "holdfast.cli", "run", "--root", str(tmp_path / "run"), "--"]
    script = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), str(num_workers)]
    with subprocess.Popen(
        [*command, *script], stdout=subprocess.PIPE, text=True, env=environment()
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(WAIT_S) == 75
    assert saved(tmp_path / "run")[0].step == 3


# From here on in one process: a callback sends the signal.


class Sends(Callback):
    """Sends a signal when a hook is told for a step."""

    def __init__(self, hook: str, at: int, number: signal.Signals = signal.SIGTERM) -> None:
        def told(training: Training, *_: Any, **__: Any) -> None:
            if training.counters.step == at:
                signal.raise_signal(number)

        setattr(self, hook, told)
        self.outcomes: list[Any] = []


def stopped(made: Trainer, steps: int = STEPS) -> None:
    with pytest.raises(SystemExit) as ended:
        made.fit(steps)
    assert ended.value.code == 75


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("100step", ("permanent", "signal")),
        (SavePolicy(permanent="100step", ephemeral="50step"), ("ephemeral", "signal")),
        (
            SavePolicy(permanent=On("signal"), ephemeral="50step"),
            ("permanent", "signal"),
        ),
        (At("4step"), ("permanent", "at 4step")),
        (None, ("permanent", "signal")),
    ],
)
def test_the_policy_decides_the_class_of_what_a_signal_saves(
    tmp_path: Path, every: Any, expected: tuple[str, str]
) -> None:
    stopped(trainer(tmp_path / "run", None, every=every, callbacks=[Sends("step_start", 3)]))
    newest = saved(tmp_path / "run")[0]
    assert (newest.step, newest.save_class) == (4, expected[0])
    assert expected[1] in newest.reason


def test_a_run_that_has_nothing_saved_is_saved_at_step_0(tmp_path: Path) -> None:
    stopped(trainer(tmp_path / "run", None, callbacks=[Sends("before_load", 0)]))
    assert [checkpoint.step for checkpoint in saved(tmp_path / "run")] == [0]


def test_a_run_that_stands_on_a_checkpoint_saves_nothing_new(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "every": SavePolicy(permanent="100step", ephemeral="4step"),
        "validate": None,
    }
    stopped(trainer(tmp_path / "run", None, callbacks=[Sends("step_start", 3)], **options))
    before = [checkpoint.folder for checkpoint in saved(tmp_path / "run")]
    for hook in ("before_load", "fit_start", "before_data"):
        at = 4 if hook != "before_load" else 0
        stopped(trainer(tmp_path / "run", None, callbacks=[Sends(hook, at)], **options))
        assert [checkpoint.folder for checkpoint in saved(tmp_path / "run")] == before


def test_a_failed_save_is_tried_again_before_the_program_ends(tmp_path: Path) -> None:
    """Invariant 8."""
    fault = Fault(kind="fail", op="put", key="*/manifest.json", times=2)
    store = FaultyStore(LocalStore(tmp_path / "run"), [fault])
    stopped(trainer(tmp_path / "log", None, root=store, callbacks=[Sends("step_start", 3)]))
    assert saved(tmp_path / "run")[0].step == 4


class Foreign:
    """Data of others: a position, and no `holdfast.data.Loader`."""

    def __init__(self, at: int) -> None:
        self.taken, self.signal_at = 0, at

    def __iter__(self) -> Iterator[Tensor]:
        while self.taken < 100:
            self.taken += 1
            if self.taken == self.signal_at:
                signal.raise_signal(signal.SIGTERM)
            yield torch.full((2, 4), self.taken / 10)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@pytest.mark.filterwarnings("ignore:data")
@pytest.mark.parametrize("at", [5, 6])
def test_with_data_of_others_the_window_is_trained_before_the_stop(tmp_path: Path, at: int) -> None:
    """Its position cannot be put back, and what was taken is not to be lost."""
    stopped(trainer(tmp_path / "run", None, data=Foreign(at)))
    assert saved(tmp_path / "run")[0].step == 3
    straight = trainer(tmp_path / "straight", None, data=Foreign(0))
    straight.fit(STEPS)
    again = trainer(tmp_path / "run", None, data=Foreign(0))
    again.fit(STEPS)
    assert leaf_digests(again.state) == leaf_digests(straight.state)


class Begins(Callback):
    """Counts the epochs that begin."""

    def __init__(self) -> None:
        self.count = 0

    def epoch_start(self, training: Training) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.filterwarnings("ignore:data")
def test_an_epoch_of_data_of_others_begins_once_although_it_is_stopped_there(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"is_meddled_with": False, "data": Foreign(0)}
    stopped(
        trainer(tmp_path, None, callbacks=[Begins(), Sends("epoch_start", 0)], **options), steps=2
    )
    begins = Begins()
    trainer(tmp_path, None, callbacks=[begins], **{**options, "data": Foreign(0)}).fit(2)
    assert begins.count == 1


class Hanging:
    """The fifth fetch sends the signal, and ends when it is allowed to, as do those after it.

    One signal: a second one, seconds later, is an order to end at once.
    """

    def __init__(self) -> None:
        self.may_end = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            os.kill(os.getppid(), signal.SIGTERM)
        if index >= 4:
            self.may_end.wait()
        return torch.full((4,), float(index))


def test_the_save_does_not_wait_for_workers_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no time for both."""
    order: list[str] = []
    workers: Any = _MultiProcessingDataLoaderIter
    shut_down, data = workers._shutdown_workers, Hanging()

    def shut_down_and_tell(self: Any) -> None:
        order.append("workers")
        shut_down(self)

    class Watch(Callback):
        def checkpoint_saved(self, training: Training, *_: Any) -> None:
            order.append("saved")
            data.may_end.set()

    monkeypatch.setattr(workers, "_shutdown_workers", shut_down_and_tell)
    loader = Loader(
        data, batch_size=2, shuffle=False, num_workers=1, multiprocessing_context="fork"
    )
    stopped(trainer(tmp_path, None, data=loader, accumulate=1, every=None, callbacks=[Watch()]))
    assert order[0] == "saved"
    assert "workers" in order


def test_the_validation_of_the_end_is_made_up_for(tmp_path: Path) -> None:
    """The goal is reached, and yet not all that belongs to it is done."""
    validate = Validation(data=Loader(Noisy(), batch_size=4, seed=3), every="3step")
    sends = Sends("validation_batch_end", STEPS)
    stopped(trainer(tmp_path / "run", None, validate=validate, callbacks=[sends]))
    newest = saved(tmp_path / "run")[0]
    assert (newest.step, newest.reason) == (STEPS, "final")
    assert "val/loss" not in newest.metrics
    trainer(tmp_path / "run", None, validate=validate).fit(STEPS)
    newest = saved(tmp_path / "run")[0]
    assert (newest.step, newest.reason) == (STEPS, "final")
    assert "val/loss" in newest.metrics
    assert "loss" in newest.metrics
    assert lines(tmp_path / "run")[-1][2].keys() == newest.metrics.keys()


def test_a_goal_that_was_reached_is_an_outcome_and_the_program_still_ends(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", None, callbacks=[Sends("fit_end", STEPS)])
    stopped(made)
    assert saved(tmp_path / "run")[0].reason == "final"


class AtInstruction(Logger):
    """Sends SIGTERM before the n-th instruction that borrows or returns the generators for a fetch
    of the fifth step."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def before_data(self, training: Training) -> None:
        if training.counters.step == 4:
            sys.settrace(self._trace)

    def step_start(self, training: Training) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(("randomness.py", "contextlib.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return self._trace


def check_interrupted_borrowing(folder: Path, nth: int) -> None:
    torch.set_num_threads(2)
    options: dict[str, Any] = {"validate": None, "ema": None, "is_meddled_with": False}
    straight = trainer(folder / "straight", None, **options)
    straight.fit(6)
    tracing = AtInstruction(nth)
    try:
        stopped(trainer(folder / "run", None, callbacks=[tracing], **options), 6)
    finally:
        sys.settrace(None)
    assert tracing.left <= 0
    assert torch.get_num_threads() == 2
    assert saved(folder / "run")[0].step == 4
    again = trainer(folder / "run", None, **options)
    again.fit(6)
    assert leaf_digests(again.state) == leaf_digests(straight.state)


@pytest.mark.parametrize(
    "nth", [*range(127, 400, 248), *full(3, 251, *range(65, 400, 124), *range(266, 300, 5))]
)
def test_a_fetch_may_be_interrupted_while_it_borrows_the_global_generators(
    tmp_path: Path, nth: int
) -> None:
    """Invariant 7: what it does not come to put back is put back."""
    check_interrupted_borrowing(tmp_path, nth)


@pytest.mark.long
@pytest.mark.parametrize("nth", range(1, 400))
def test_a_fetch_may_be_interrupted_at_any_instruction(tmp_path: Path, nth: int) -> None:
    """Invariant 7."""
    check_interrupted_borrowing(tmp_path, nth)


class Fails:
    """In the place of a pause: raises at the n-th time that training comes by."""

    counters: Any = None

    def __init__(self, place: str, nth: int, error: type[BaseException] = ZeroDivisionError):
        self.place, self.nth, self.error, self.times = place, nth, error, 0

    def at(self, place: str) -> None:
        self.times += place == self.place
        if place == self.place and self.times == self.nth:
            raise self.error


FAILING = Every("3step") | On("exception")
FAILURES = [
    ("train", 1, 0),
    ("train", 10, 5),
    ("data", 3, 0),
    ("data", 15, 4),
    ("evaluation", 2, 2),
    ("validation data", 15, 4),
    ("before_data", 5, 4),
    ("epoch_start", 2, 3),
    ("validation_batch_end", 5, 4),
    ("step_end", 3, 3),
    ("step_end", 4, 4),
    ("step_end", 5, 5),
]


@pytest.mark.parametrize(
    ("place", "nth", "step"),
    [
        pytest.param(*row, marks=pytest.mark.full if at % 4 else ())
        for at, row in enumerate(FAILURES)
    ],
)
def test_after_an_error_the_last_boundary_is_saved_where_that_is_asked_for(
    tmp_path: Path, place: str, nth: int, step: int
) -> None:
    """Invariant 7, D46: bit for bit, whatever the step had done before its update."""
    torch.set_num_threads(1)
    straight = trainer(tmp_path / "straight", None, every=FAILING)
    straight.fit(STEPS)
    failing: Any = Fails(place, nth)
    with pytest.raises((ZeroDivisionError, HookFailed)):
        trainer(tmp_path / "run", failing, every=FAILING).fit(STEPS)
    found = {checkpoint.step: checkpoint.reason for checkpoint in saved(tmp_path / "run")}
    assert max(found, default=0) == step
    assert step in (0, 3) or found[step] == "exception"
    again = trainer(tmp_path / "run", None, every=FAILING)
    again.fit(STEPS)
    assert leaf_digests(again.state) == leaf_digests(straight.state)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_after_an_error_at_the_goal_the_validation_of_the_end_is_made_up_for(
    tmp_path: Path,
) -> None:
    validate = Validation(data=Loader(Noisy(), batch_size=4, seed=3), every="100step")
    failing: Any = Fails("step_end", STEPS)
    with pytest.raises(HookFailed):
        trainer(tmp_path / "run", failing, every=On("exception"), validate=validate).fit(STEPS)
    trainer(tmp_path / "run", None, every=On("exception"), validate=validate).fit(STEPS)
    newest = saved(tmp_path / "run")[0]
    assert (newest.step, newest.reason) == (STEPS, "final")
    assert "val/loss" in newest.metrics


class BrokenAdam(torch.optim.AdamW):
    """Fails in the middle of its fifth update."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        super().step(closure)
        if self.updates == 5:
            raise ZeroDivisionError
        return None


def test_after_an_error_within_the_update_nothing_is_saved_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = lambda model: BrokenAdam(model.parameters())  # noqa: E731
    made = trainer(tmp_path / "run", None, every=FAILING, optimizer=optimizer)
    with pytest.raises(ZeroDivisionError):
        made.fit(STEPS)
    assert saved(tmp_path / "run")[0].step == 3
    assert "step 5 failed in its update" in caplog.text
    assert "the newest checkpoint is step-00000003" in caplog.text


class CannotGoBack(Callback):
    """A callback whose state can be saved and not be loaded."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError


@pytest.mark.parametrize("every", [FAILING, Every("3step")])
def test_an_error_in_a_validation_is_not_masked_by_a_callback_that_cannot_go_back(
    tmp_path: Path, every: Any
) -> None:
    """And what is no boundary is not saved."""
    failing: Any = Fails("evaluation", 6)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, failing, every=every, callbacks=[CannotGoBack()]).fit(STEPS)
    assert saved(tmp_path)[0].step == 3


@pytest.mark.parametrize(
    ("error", "step"), [(KeyboardInterrupt, 4), (SystemExit, 4), (OwnedElsewhere, 3)]
)
def test_an_interruption_saves_as_an_error_does_and_a_lost_run_does_not(
    tmp_path: Path, error: type[BaseException], step: int
) -> None:
    failing: Any = Fails("train", 9, error)
    with pytest.raises(error):
        trainer(tmp_path / "run", failing, every=FAILING).fit(STEPS)
    assert saved(tmp_path / "run")[0].step == step


def test_without_a_trigger_for_it_an_error_saves_nothing(tmp_path: Path) -> None:
    failing: Any = Fails("train", 9)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "run", failing).fit(STEPS)
    assert saved(tmp_path / "run")[0].step == 3
