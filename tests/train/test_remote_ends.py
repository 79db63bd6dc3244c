"""Two tiers, and the remote one is away, slow or full: the last step is committed locally first."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast import CheckpointManager, LocalStore, Stop, Tiered
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.train import Callback
from marks import diagonal
from train.remotes import ENDS, HANG_S, KINDS, SHORT_END_S, assert_only_local, remote_of, steps_in
from train.small import make

GOAL = 3


class Ends(Callback):
    """Sends this process a signal in the last step."""

    def __init__(self, end: str) -> None:
        self.end = end

    def step_start(self, trainer: Any) -> None:
        if self.end != "goal" and trainer.counters.step == GOAL - 1:
            signal.raise_signal(signal.Signals[self.end])


def train_by_trainer(root: Tiered, end: str, **options: Any) -> None:
    goal = GOAL if end == "goal" else 100 * GOAL
    given = {"every": "2step", "save_timeout_s": HANG_S, "log": False, **options}
    make(root, callbacks=[Ends(end)], stop=Stop(grace="5min"), **given).fit(goal)


def train_in_a_loop(root: Tiered, end: str, **options: Any) -> None:
    model, step = nn.Linear(2, 1), 0
    given = {"every": "2step", "save_timeout_s": HANG_S, **options}
    stop = Stop(grace="5min")
    with stop, CheckpointManager(root, {"model": model}, stop=stop, **given) as m:
        m.resume()
        while step < GOAL and not stop.requested:
            step += 1
            if end != "goal" and step == GOAL:
                signal.raise_signal(signal.Signals[end])
            m.maybe_save(step)
        m.save(step, wait=True)


LOOPS = {"trainer": train_by_trainer, "own": train_in_a_loop}


@pytest.mark.parametrize(("loop", "kind", "end"), diagonal([*LOOPS], KINDS, [*ENDS]))
def test_the_last_step_is_local_whatever_the_remote_tier_does(
    loop: str,
    kind: str,
    end: str,
    ram_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a warning names the steps that are not uploaded, and how to upload them later."""
    monkeypatch.setattr("holdfast.replication.upload_thread._END_S", SHORT_END_S)
    local, remote = LocalStore(ram_path), remote_of(kind)
    with ENDS[end]:
        LOOPS[loop](Tiered(local, remote, close_timeout_s=SHORT_END_S), end)
    assert_only_local(local, remote, GOAL, caplog)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_later_start_uploads_the_rest_of_a_finished_run(loop: str, ram_path: Path) -> None:
    local, remote = LocalStore(ram_path), MemoryStore("remote")
    away = FaultyStore(remote, [Fault(kind="fail", op="put", key="step-*", times=None)])
    LOOPS[loop](Tiered(local, away, close_timeout_s=0), "goal")
    assert not Catalog(remote).checkpoints()
    LOOPS[loop](Tiered(local, remote), "goal")
    assert Catalog(remote).checkpoints()[0].step == GOAL


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_does_not_wait_for_max_lag(loop: str, ram_path: Path) -> None:
    """The save of a signal is made, however far behind the remote tier is."""
    local = LocalStore(ram_path)
    root = Tiered(local, remote_of("away"), max_lag="1B", close_timeout_s=0)
    with ENDS["SIGTERM"]:
        LOOPS[loop](root, "SIGTERM")
    assert steps_in(local) == [3, 2]


def test_the_goal_of_the_trainer_does_not_wait_for_max_lag(ram_path: Path) -> None:
    local = LocalStore(ram_path)
    train_by_trainer(Tiered(local, remote_of("away"), max_lag="1B", close_timeout_s=0), "goal")
    assert steps_in(local) == [3, 2]
