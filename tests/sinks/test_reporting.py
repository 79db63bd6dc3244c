"""Reporters: a save waits for none of them, whatever they do, and the log says what went wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typing_extensions import override

from distributed.run import run_ranks
from holdfast import CheckpointManager, MemoryStore
from holdfast.errors import UsageError
from holdfast.events import Event, without_secrets
from holdfast.sinks import Reporter


class Recording(Reporter):
    """Records the steps of commits; raises, or waits until the test ends, where it is told to."""

    kinds = ("committed",)

    def __init__(self, *, hangs_at: int = 0, raises: bool = False, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self.steps: list[int | None] = []
        self.threads: set[str] = set()
        self.may_end = threading.Event()
        self.is_called = threading.Event()
        self._hangs_at = hangs_at
        self._raises = raises

    @override
    def report(self, event: Event, at_s: float) -> None:
        self.is_called.set()
        self.threads.add(threading.current_thread().name)
        if event.step == self._hangs_at:
            assert self.may_end.wait(60)
        if self._raises:
            raise OSError("no route to https://me:secret@tracker/run?token=abc")
        self.steps.append(event.step)


@pytest.fixture
def hanging() -> Iterator[Recording]:
    made = Recording(hangs_at=1, timeout_s=0.2)
    yield made
    made.may_end.set()


def train(sink: Reporter, num_saves: int = 3) -> list[int]:
    """Save some checkpoints; gives the steps that are there in the end."""
    store, state = MemoryStore(), {"a": {"b": 0}}
    with CheckpointManager(store, state, sinks=[sink]) as manager:
        for step in range(1, num_saves + 1):
            state["a"]["b"] = step
            manager.save(step, wait=True)
        return [checkpoint.step for checkpoint in manager.list()]


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_events_are_reported_in_order_and_all_of_them_before_the_close_ends() -> None:
    sink = Recording()
    assert train(sink) == [3, 2, 1]
    assert sink.steps == [1, 2, 3]
    assert sink.threads == {"holdfast-Recording-0"}


def test_one_that_hangs_delays_no_save_and_the_close_by_its_time_limit_only(
    hanging: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 8: each save has committed while the first report still hangs."""
    assert train(hanging) == [3, 2, 1]
    assert hanging.is_called.is_set()
    assert hanging.steps == []
    assert "not done after 0.2 s, and abandoned: committed step-00000001" in warnings(caplog)
    assert "and 2 more" in warnings(caplog)


def test_one_that_raises_harms_no_save_and_is_a_warning_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 8."""
    assert train(Recording(raises=True)) == [3, 2, 1]
    text = warnings(caplog)
    assert "failed for committed step-00000001" in text
    assert ": OSError: no route to https://***@tracker/run. Saves and training" in text
    assert text.count("OSError") == 1
    assert "failed 3 times in all" in text
    assert "secret" not in text
    assert "abc" not in text


def test_slowness_is_told_while_training_goes_on(
    hanging: Recording, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Event(kind="committed", message="", step=1, fields={"folder": "f"})
    hanging(event)
    assert hanging.is_called.wait(60)
    began_s = hanging._began_s
    assert began_s is not None
    monkeypatch.setattr(
        "holdfast.control.reporter.time.monotonic", lambda: began_s + hanging.timeout_s + 1
    )
    hanging(event)
    hanging(event)
    assert warnings(caplog).count("takes more than 0.2 s; others wait") == 1


def test_what_waits_is_bounded(
    hanging: Recording, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.control.reporter.MAX_WAITING", 2)
    for _ in range(5):
        hanging(Event(kind="committed", message="", step=1))
    assert len(hanging._queued) == 2
    assert warnings(caplog).count("further ones are dropped") == 1


def test_a_closed_manager_leaves_a_reporter_that_works_for_the_next_one() -> None:
    sink = Recording()
    train(sink)
    train(sink, num_saves=1)
    assert sink.steps == [1, 2, 3, 1]


def leads(root: Path, rank: int) -> list[int | None]:
    sink, state = Recording(), {"a": {"b": 0}}
    with CheckpointManager(root, state, sinks=[sink]) as manager:
        manager.save(1, wait=True)
    return sink.steps


@pytest.mark.full
def test_of_several_ranks_the_leader_reports(tmp_path: Path) -> None:
    assert run_ranks(2, partial(leads, tmp_path / "run")) == [[1], []]


@pytest.mark.parametrize("wrong", [0, -1.0])
def test_a_time_limit_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        Recording(timeout_s=wrong)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/runs/gpt", "s3://bucket/runs/gpt"),
        ("https://me:pass@host/x", "https://***@host/x"),
        ("https://host/x?sig=a&b=c#d", "https://host/x"),
        ("https://me@host/x?sig=a: 403 and more", "https://***@host/x 403 and more"),
        (
            "s3://bucket/runs/gpt failed; https://host?a=b",
            "s3://bucket/runs/gpt failed; https://host",
        ),
        ("/data/50%#1?/run", "/data/50%#1?/run"),
    ],
)
def test_secrets_are_cut_out_of_urls(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
