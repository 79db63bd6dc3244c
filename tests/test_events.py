"""Event sinks: each hears everything, and one that fails harms neither the others nor a save."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.events import Emitter, Event
from holdfast.manager import CheckpointManager
from holdfast.store.memory import MemoryStore


class Broken:
    """A sink that always raises, and counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: Event) -> None:
        self.calls += 1
        raise ValueError("a broken sink")


def test_a_sink_that_fails_is_reported_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 8."""
    heard: list[Event] = []
    broken = Broken()
    emit = Emitter((broken, heard.append))
    emit("warning", "first", step=1, nbytes=2)
    emit("warning", "second")
    assert [event.message for event in heard] == ["first", "second"]
    assert (heard[0].step, heard[0].fields) == (1, {"nbytes": 2})
    assert broken.calls == 2
    assert caplog.text.count("its later failures are not shown") == 1


def test_a_sink_that_fails_stops_no_save() -> None:
    """Invariant 8: neither the save nor what follows it."""
    store, broken = MemoryStore(), Broken()
    with CheckpointManager(store, {"a": {"b": 1}}, sinks=[broken]) as manager:
        assert manager.resume() is None
        manager.save(1)
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [1]
    assert broken.calls


def test_each_start_save_and_deletion_is_one_line_at_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Technical remarks, and a save of what is saved already, are not."""
    caplog.set_level(logging.INFO, logger="holdfast")
    for step in (1, 3):
        with CheckpointManager(tmp_path, {"a": {"b": 1}}, keep="last:1") as manager:
            manager.resume()
            for number in (step, step + 1, step + 1):
                manager.save(number, wait=True)
    expected = ["starting a new run", "saved step 1", "saved step 2", "deleted step-00000001"]
    expected += ["resuming from step 2", "saved step 3", "deleted step-00000002", "saved step 4"]
    expected += ["deleted step-00000003"]
    assert [text for text in caplog.messages if not text.startswith((*expected,))] == []
    assert len(caplog.messages) == len(expected)
