"""Giving a run up: in time, also where the storage hangs, and never falsely recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.ownership.claim import is_closed
from holdfast.ownership.tiered_options import Tiered
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from runs import Recorder, new_run

HUNG_S = 3600.0


@pytest.fixture
def hangs() -> Iterator[list[Fault]]:
    """Faults that hang until the test is over."""
    faults: list[Fault] = []
    yield faults
    for fault in faults:
        fault.release.set()


def hang(op: str, key: str) -> Fault:
    return Fault(kind="hang", op=op, key=key, times=None, deadline_s=HUNG_S)  # type: ignore[arg-type]


def told(recorder: Recorder) -> list[str]:
    return [event.message for event in recorder.events if event.kind == "housekeeping_failed"]


@pytest.mark.parametrize(
    ("op", "key", "what"),
    [
        ("put", "writers/*.closed.json", "recording the close hangs"),
        ("delete", "writers/*.alive.json", "recording the close hangs"),
        ("put", "writers/*.alive.json", "a heartbeat hangs"),
    ],
)
def test_a_storage_that_hangs_at_the_end_does_not_hold_the_close_up(
    tmp_path: Path, hangs: list[Fault], op: str, key: str, what: str
) -> None:
    """Invariant 9: it ends by its deadline and says what hangs; what was saved is there."""
    hangs.append(hang(op, key))
    store = FaultyStore(LocalStore(tmp_path), hangs)
    recorder = Recorder()
    manager = new_run().manager(store, exit_timeout_s=0.5, sinks=[recorder])
    manager.save(1).wait()
    manager._session.finish_at_exit()
    (said,) = told(recorder)
    assert what in said
    assert "not done after" in said
    assert [found.step for found in new_run().manager(tmp_path).list()] == [1]


def test_a_storage_that_hangs_in_a_save_is_told_once_and_nothing_is_closed(
    tmp_path: Path, hangs: list[Fault]
) -> None:
    """Invariant 9: the whole end has one deadline, however many of its parts hang."""
    hangs += [hang("put", "*/manifest.json"), hang("put", "writers/*.closed.json")]
    store = FaultyStore(LocalStore(tmp_path), hangs)
    recorder = Recorder()
    manager = new_run().manager(store, exit_timeout_s=0.5, sinks=[recorder])
    manager.save(1)
    hangs[0].reached.wait()
    with pytest.raises(errors.DeadlineExceeded, match="not done after"):
        manager._session.finish_at_exit()
    assert told(recorder) == []
    hangs[0].release.set()
    assert not is_closed(LocalStore(tmp_path), 1)


def test_a_remote_tier_that_hangs_at_the_end_keeps_nothing_from_the_local_one(
    tmp_path: Path, hangs: list[Fault]
) -> None:
    hangs.append(hang("put", "writers/*.closed.json"))
    remote: Store = FaultyStore(MemoryStore(), hangs)
    recorder = Recorder()
    manager = new_run().manager(
        Tiered(LocalStore(tmp_path), remote), exit_timeout_s=0.5, sinks=[recorder]
    )
    manager.save(1).wait()
    manager.wait()
    manager._session.finish_at_exit()
    (said,) = told(recorder)
    assert "recording the close hangs" in said
    assert is_closed(LocalStore(tmp_path), 1)
