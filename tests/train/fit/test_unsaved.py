"""A Trainer without a root: trains, validates and logs, and saves nothing."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.policy.rules import Last
from holdfast.policy.triggers import On
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, HookFailed, JsonLines, StopWhen, Training, Validation
from train.small import Noisy, make

VALIDATION = Validation(data=Loader(Noisy(), batch_size=5, shuffle=False), every="2step")


def weights(trainer: Any) -> Any:
    return [weight.tolist() for weight in trainer.model.parameters()]


def test_it_trains_as_with_a_root_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Line 10: for trials, without filling the memory; and who gave None by mistake is told."""
    monkeypatch.chdir(tmp_path)
    options: Any = {"every": "1step", "keep": Last(1), "ema": 0.9, "validate": VALIDATION}
    log = JsonLines(tmp_path / "log.jsonl")
    saved = make(MemoryStore(), **options)
    saved.fit(4)
    names = {thread.name for thread in threading.enumerate()}

    class Threads(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            assert {thread.name for thread in threading.enumerate()} <= names

    unsaved = make(None, **options, callbacks=[log, Threads()])
    caplog.clear()
    outcome = unsaved.fit(4)
    assert (outcome.reason, outcome.step) == ("goal", 4)
    assert weights(unsaved) == weights(saved)
    assert '"val/loss"' in (tmp_path / "log.jsonl").read_text()
    assert os.listdir(tmp_path) == ["log.jsonl"]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "checkpoints=None" in record.message
    assert unsaved.validate().keys() == {"val/loss", "val/draw"}


def test_it_begins_with_a_checkpoint(tmp_path: Path) -> None:
    """Line 10: a trial may go on from what another run has saved."""
    straight = make(MemoryStore())
    straight.fit(5)
    make(tmp_path / "old", validate=VALIDATION).fit(3)
    trial = make(None, validate=VALIDATION)
    assert trial.fit(5, start_from=tmp_path / "old").step == 5
    assert weights(trial) == weights(straight)
    assert trial.validate_all(tmp_path / "old")[0].checkpoint.step == 3


def test_a_callback_that_saves_is_told_why_it_cannot() -> None:
    """Line 10: a call that needs a root is refused in words."""
    calls: list[Any] = [
        lambda manager: manager.save(1),
        lambda manager: manager.load(),
        lambda manager: manager.pin("latest"),
        lambda manager: manager.tag("latest", "a"),
        lambda manager: manager.store,
    ]

    class Saves(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            assert training.manager is not None
            assert training.manager.list() == ()
            assert not training.manager.is_owner
            for call in calls:
                with pytest.raises(UsageError, match="checkpoints=None"):
                    call(training.manager)
            training.manager.save(1)

    with pytest.raises(HookFailed, match="checkpoints=None"):
        make(None, callbacks=[Saves()]).fit(2)


def test_what_needs_a_root_is_refused() -> None:
    """Line 10."""
    trainer = make(None, validate=VALIDATION)
    with pytest.raises(UsageError, match="checkpoints=None"):
        trainer.validate("latest")
    with pytest.raises(UsageError, match="checkpoints=None"):
        trainer.validate_all()
    with pytest.raises(UsageError, match="name a file"):
        make(None, log=True)
    trainer.fit(2)
    with pytest.raises(UsageError, match="new Trainer"):
        trainer.fit(4)


def test_ends_and_errors_are_those_of_any_training(caplog: pytest.LogCaptureFixture) -> None:
    """Line 10: a request ends it, and an error goes through."""
    stop = StopWhen(lambda training, metrics: training.counters.step == 2)
    assert make(None, callbacks=[stop]).fit(4).reason == "stopped"

    class Fails(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            raise OSError("a disk")

    with pytest.raises(HookFailed, match="a disk"):
        make(None, every=On("exception"), callbacks=[Fails()]).fit(4)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
