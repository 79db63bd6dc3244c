"""Real code in threads, one store operation at a time, in an order that a seed decides.

`run(seed, actors)` starts a thread for each actor and hands it a store of its own over one
`MemoryStore`. A thread stops before each store operation; the scheduler picks which one goes on,
so that at any time only one thread runs, and the same seed gives the same run. There are no
sleeps, and every wait has a deadline.

With `Faults` the seed also decides where a put's reply is lost, where a put stays in flight and
lands later (or never), where a process stops for ever, and how long it is paused. `watch` is
called with the bare store after each step that changed it, to check what must hold at every
moment:

    def saver(store):
        store.put("a", b"1", if_absent=True)

    done = run(7, {"one": saver, "two": saver})
    assert [type(error) for error in done.errors.values()] == [AlreadyExists]

What a thread does between two operations is its own business and must not depend on threads of
its own: an actor's operations come from one thread at a time. Names of attempts hold random save
ids; the trace leaves these out.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.errors import AlreadyExists, DeadlineExceeded, OutcomeUnknown
from holdfast.store.base import Buffer, ObjectInfo, Store
from holdfast.store.memory import MemoryStore

DEADLINE_S = 60.0
_SAVE_ID = re.compile(r"-[0-9a-f]{8}(?=/|$)")


class Crashed(BaseException):
    """The process has stopped for ever. Not an `Exception`, so that no handler mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each trouble is, between 0 and 1; and which keys are put over a bad network."""

    lose_reply: float = 0.0
    """A put takes effect and its caller gets `OutcomeUnknown`."""
    delay: float = 0.0
    """A put gets `OutcomeUnknown`, stays in flight and may take effect later, or never."""
    crash: float = 0.0
    """An actor stops for ever before its next operation."""
    pause: float = 0.0
    """An actor sleeps until all others have ended or sleep."""
    strikes: Callable[[str], bool] = field(default=lambda key: True)
    """Keys whose puts may be lost or delayed."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """What happened: the steps in order, and the errors that ended actors."""

    seed: int
    steps: list[str] = field(default_factory=list)
    errors: dict[str, BaseException] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join((f"seed {self.seed}", *self.steps))


Actor = Callable[[Store], object]
Watch = Callable[[MemoryStore], None]


def run(
    seed: int,
    actors: Mapping[str, Actor],
    faults: Faults | None = None,
    *,
    store: MemoryStore | None = None,
    watch: Watch | None = None,
    plan: Iterable[str] = (),
    deadline_s: float = DEADLINE_S,
) -> Trace:
    """Run the actors to their ends in an order that follows from `seed`.

    `plan` names who makes the next step, for as long as it lasts; who has ended is passed over.
    `watch` may raise to end the run; its error is raised here.

    Raises:
        DeadlineExceeded: an actor did not come back to the store in time.
    """
    scheduler = _Scheduler(seed, store or MemoryStore("scheduled"), faults or Faults(), deadline_s)
    scheduler.plan = iter(plan)
    return scheduler.run(actors, watch)


class _Thread:
    """One actor: its thread, and the semaphore that lets it go one step on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.is_done = False
        self.is_crashed = False
        self.is_asleep = False


class _Scheduler:
    def __init__(self, seed: int, store: MemoryStore, faults: Faults, deadline_s: float) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.faults = faults
        self.deadline_s = deadline_s
        self.trace = Trace(seed=seed)
        self.in_flight: list[tuple[str, bytes, bool]] = []
        self.has_changed = False
        """Whether anything was put or deleted since `watch` looked."""
        self._arrived = threading.Semaphore(0)
        self._threads: list[_Thread] = []
        self._last: _Thread | None = None
        self.plan: Iterator[str] = iter(())
        self._stickiness = self.random.choice((0.0, 0.5, 0.9))

    def run(self, actors: Mapping[str, Actor], watch: Watch | None) -> Trace:
        try:
            for name, actor in actors.items():
                self._start(name, actor)
            while any(not thread.is_done for thread in self._threads):
                self._advance()
                self._look(watch)
            while self.in_flight:
                self._land()
                self._look(watch)
        finally:
            self._stop_all()
        return self.trace

    def _start(self, name: str, actor: Actor) -> None:
        thread = _Thread(name)
        self._threads.append(thread)

        def main() -> None:
            try:
                actor(ScheduledStore(self, thread))
            except Crashed:
                self.trace.crashed.append(name)
            except BaseException as error:
                self.trace.errors[name] = error
            finally:
                thread.is_done = True
                self._arrived.release()

        thread.thread = threading.Thread(target=main, name=f"actor-{name}", daemon=True)
        thread.thread.start()
        self._wait(thread)

    def _advance(self) -> None:
        """One step of an actor, or the landing of a put that was in flight."""
        if self.in_flight and self.random.random() < 0.1:
            self._land()
            return
        thread = self._pick()
        if self.random.random() < self.faults.crash:
            self.trace.steps.append(f"{thread.name} stops for ever")
            thread.is_crashed = True
        elif self.random.random() < self.faults.pause:
            self.trace.steps.append(f"{thread.name} sleeps")
            thread.is_asleep = True
            return
        thread.go.release()
        self._wait(thread)

    def _look(self, watch: Watch | None) -> None:
        if watch is not None and self.has_changed:
            self.has_changed = False
            watch(self.store)

    def _pick(self) -> _Thread:
        alive = [thread for thread in self._threads if not thread.is_done]
        names = {thread.name: thread for thread in alive}
        planned = next((name for name in self.plan if name in names), None)
        if planned is not None:
            return names[planned]
        awake = [thread for thread in alive if not thread.is_asleep]
        if not awake:
            for thread in alive:
                thread.is_asleep = False
            awake = alive
        if self._last in awake and self.random.random() < self._stickiness:
            return self._last
        self._last = self.random.choice(awake)
        return self._last

    def _land(self) -> None:
        key, data, if_absent = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
        is_lost = self.random.random() < 0.25
        self.trace.steps.append(f"in flight: put {_plain(key)} {'is lost' if is_lost else 'lands'}")
        if is_lost:
            return
        try:
            self.store.put(key, data, if_absent=if_absent)
            self.has_changed = True
        except AlreadyExists:
            self.trace.steps.append("... and finds the key taken")

    def _wait(self, thread: _Thread) -> None:
        if not self._arrived.acquire(timeout=self.deadline_s):
            raise DeadlineExceeded(
                f"actor {thread.name} did not come back within {self.deadline_s} s:\n{self.trace}"
            )

    def _stop_all(self) -> None:
        """End the threads that still stand before an operation, and wait for all."""
        for thread in self._threads:
            if not thread.is_done:
                thread.is_crashed = True
                thread.go.release()
            if thread.thread is not None:
                thread.thread.join(timeout=self.deadline_s)

    # Called in the actors' threads, of which only one runs at a time.

    def stop_before(self, thread: _Thread, step: str) -> None:
        """Wait until this actor may go on with `step`."""
        if not thread.is_crashed:
            self._arrived.release()
            if not thread.go.acquire(timeout=self.deadline_s):
                raise DeadlineExceeded(f"actor {thread.name} was not let on within the deadline")
        if thread.is_crashed:
            raise Crashed(thread.name)
        self.trace.steps.append(f"{thread.name}: {step}")

    def trouble(self, key: str) -> str:
        """What befalls a put of `key`: "lose", "delay" or nothing."""
        drawn = self.random.random()
        if not self.faults.strikes(key) or drawn >= self.faults.lose_reply + self.faults.delay:
            return ""
        return "lose" if drawn < self.faults.lose_reply else "delay"


class ScheduledStore(Store):
    """One actor's view of the store. Each operation waits for its turn."""

    def __init__(self, scheduler: _Scheduler, thread: _Thread) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._inner = scheduler.store

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Put an object; the reply may be lost, or the put may stay in flight."""
        self._step("put", key)
        trouble = self._scheduler.trouble(key)
        if trouble == "delay":
            self._note("... stays in flight")
            self._scheduler.in_flight.append((key, memoryview(data).tobytes(), if_absent))
            raise OutcomeUnknown(f"put {key}: no reply")
        self._inner.put(key, data, if_absent=if_absent)
        self._scheduler.has_changed = True
        if trouble == "lose":
            self._note("... and the reply is lost")
            raise OutcomeUnknown(f"put {key}: no reply")

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self._step("get", key)
        return self._inner.get(key, start, nbytes)

    def head(self, key: str) -> ObjectInfo:
        self._step("head", key)
        return self._inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._step("list", prefix)
        return self._inner.list(prefix)

    def children(self, folder: str = "") -> tuple[str, ...]:
        self._step("children", folder)
        return self._inner.children(folder)

    def delete(self, key: str) -> None:
        """Remove an object; a folder goes one object at a time, in an order of the seed."""
        inside = [key]
        if key.endswith("/"):
            self._step("list", key)
            inside = [info.key for info in self._inner.list(key)]
            self._scheduler.random.shuffle(inside)
        for one in inside:
            self._step("delete", one)
            self._inner.delete(one)
            self._scheduler.has_changed = True

    def _step(self, operation: str, key: str) -> None:
        self._scheduler.stop_before(self._thread, f"{operation} {_plain(key)}")

    def _note(self, text: str) -> None:
        self._scheduler.trace.steps.append(text)


def _plain(key: str) -> str:
    """The key without the random part of an attempt's name."""
    return _SAVE_ID.sub("", key)
