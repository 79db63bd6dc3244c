"""Base class of event sinks that may be slow, offline or broken, such as those of trackers.

Owns the queue, the thread and the time limits; knows nothing of what is done with an event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import ClassVar

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.events import Event, Kind, without_secrets
from holdfast.threads.workers import Workers

logger = logging.getLogger("holdfast")

MAX_WAITING = 10_000
"""Most events that wait for a handler that is slow; further ones are dropped with a warning."""


class Reporter:
    """Event sink that handles events in order, in a thread of its own.

    Override `report`. A save never waits for it. What it raises is logged as a warning, and so is a
    handler that takes longer than `timeout_s` seconds. The close of the manager waits as long for
    what is queued, and warns of what was not handled. With several ranks only the leader reports.
    """

    is_for_leader: ClassVar[bool] = True
    kinds: tuple[Kind, ...] | None = None
    """Kinds of the events that are handled; None: all."""

    @check_arguments()
    def __init__(self, *, timeout_s: float = 10.0) -> None:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s!r}: must be a positive number of seconds")
        self.timeout_s = timeout_s
        self._workers = Workers(1, f"holdfast-{type(self).__name__}")
        self._lock = threading.Lock()
        self._queued: deque[tuple[Event, Future[None]]] = deque()
        self._began_s: float | None = None
        """Time when the handler under way was called; None: none is."""
        self._warned: set[str] = set()
        self._num_failed = 0

    @property
    def close_timeout_s(self) -> float:
        """Seconds that the close of the manager waits for what is queued."""
        return self.timeout_s

    def report(self, event: Event, at_s: float) -> None:
        """Handle an event that was emitted at `at_s`, a Unix time. Called in the thread."""
        raise NotImplementedError

    def __call__(self, event: Event) -> None:
        """Queue an event; at "closed", wait until all are handled, up to the time limit."""
        if self.kinds is None or event.kind in self.kinds:
            self._queue(event)
        if event.kind == "closed":
            self._drain_queue()

    def _queue(self, event: Event) -> None:
        self._warn_of_slowness()
        with self._lock:
            while self._queued and self._queued[0][1].done():
                self._queued.popleft()
            is_full = len(self._queued) >= MAX_WAITING
            if not is_full:
                at_s = time.time()
                future = self._workers.submit(lambda: self._handle(event, at_s))
                self._queued.append((event, future))
        if is_full:
            self._warn_once("full", f"{MAX_WAITING:,} events wait; what comes next is left out")

    def _handle(self, event: Event, at_s: float) -> None:
        self._began_s = time.monotonic()
        try:
            self.report(event, at_s)
        except BaseException as error:  # noqa: BLE001 - it is logged, also SystemExit
            self._num_failed += 1
            self._warn_once("failed", f"failed for {_describe_event(event)}: {_told(error)}")
        finally:
            self._began_s = None

    def _warn_of_slowness(self) -> None:
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s > self.timeout_s:
            self._warn_once("slow", f"one event takes more than {self.timeout_s:g} s; others wait")

    def _drain_queue(self) -> None:
        """Wait for queued events up to the time limit; warn of what was not handled."""
        with self._lock:
            queued = [*self._queued]
        left = wait([future for _, future in queued], timeout=self.close_timeout_s).not_done
        if left:
            named = [_describe_event(event) for event, future in queued if future in left]
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            text = f"not done after {self.close_timeout_s:g} s, and left: {named[0]}{more}"
            logger.warning("%s: %s. The checkpoints are not affected", self, text)
        if self._num_failed > 1:
            logger.warning("%s: failed %d times in all", self, self._num_failed)
        self._num_failed = 0
        self._warned.clear()

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s. Saves and training are not affected", self, text)

    def __repr__(self) -> str:
        return type(self).__name__


def _describe_event(event: Event) -> str:
    folder = event.fields.get("folder")
    if folder is not None:
        return f"{event.kind} {folder}"
    return event.kind if event.step is None else f"{event.kind} of step {event.step}"


def _told(error: BaseException) -> str:
    text = without_secrets(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
