"""A small run in two tiers, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.events import Event
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from ways import Tiny

LARGE = 1024 * 1024
"""Elements with which each tensor file has several blocks."""


def unopened(root: Tiered | Store, tiny: Tiny, **options: Any) -> CheckpointManager:
    """A manager of this state."""
    given: dict[str, Any] = {"sinks": (), "preflight": False, **options}
    return CheckpointManager(root, tiny.components, **given)


@contextmanager
def opened(root: Tiered | Store, tiny: Tiny, **options: Any) -> Iterator[CheckpointManager]:
    """A manager of this state, closed at the end."""
    with unopened(root, tiny, **options) as manager:
        yield manager


def saved(manager: CheckpointManager, tiny: Tiny, *steps: int) -> None:
    """Save the state of these steps, one after the other."""
    for step in steps:
        tiny.become(step)
        manager.save(step).wait()


def steps_in(store: Store) -> list[int]:
    """The steps of the checkpoints that are committed there, newest first, each of them whole."""
    entries = Catalog(store).checkpoints()
    for entry in entries:
        report = verify(store, entry.folder)
        assert report.ok, report.problems
    return [entry.step for entry in entries]


def sent_nbytes(recorder: Noted) -> int:
    """Bytes that uploads have sent."""
    return sum(event.fields["sent_nbytes"] for event in recorder.of("uploaded"))


class Noted:
    """An event sink that can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: str) -> list[Event]:
        """Events of one kind, oldest first."""
        return [event for event in self.events if event.kind == kind]

    def wait_for(self, kind: str, times: int = 1) -> Event:
        """The event of that kind, when there were so many of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= times, 60), self.events
        return self.of(kind)[times - 1]

    def wait_for_step(self, kind: str, step: int) -> None:
        """Wait for an event of that kind about that step."""
        with self._changed:
            found = self._changed.wait_for(lambda: step in [one.step for one in self.of(kind)], 60)
            assert found, self.events


class Switch(MemoryStore):
    """A remote tier that can be cut off."""

    def __init__(self, name: str = "remote") -> None:
        super().__init__(name)
        self.error: Exception | None = None

    def twin(self) -> MemoryStore:
        """The same objects, as another machine sees them, which is never cut off."""
        other = MemoryStore("remote")
        other._objects, other._lock = self._objects, self._lock
        return other

    def _up(self) -> None:
        if self.error is not None:
            raise self.error

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self._up()
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self._up()
        return super().get(key, start, nbytes)

    def head(self, key: str) -> Any:
        self._up()
        return super().head(key)

    def list(self, prefix: str = "") -> Any:
        self._up()
        return super().list(prefix)

    def create(self, key: str, nbytes: int) -> Any:
        self._up()
        return super().create(key, nbytes)


def without_backoff(monkeypatch: Any) -> None:
    """Have failed uploads tried again at once."""
    monkeypatch.setattr("holdfast.replication.upload_thread.BACKOFF_S", 0.001)
