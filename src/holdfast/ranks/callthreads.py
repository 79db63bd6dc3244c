"""Threads for calls that may hang, each of which has one to itself; knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import RLock, Thread
from typing import TypeAlias

from holdfast.errors import Disconnected

_NUM_SPARE = 2
"""Most threads that wait for a call; others end after theirs."""
_CLOSE_S = 1.0
_Calls: TypeAlias = "SimpleQueue[Callable[[], object] | None]"


class CallThreads:
    """Daemon threads that run one call at a time, of which one is always idle.

    From Python 3.12 on the interpreter starts no thread once it has begun to exit, while a save
    under way is still to be finished.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = RLock()  # `release_idle_threads` may be called by the garbage collector
        self._idle: list[_Calls] = []
        self._is_open = True

    def start_call(self, call: Callable[[], object]) -> None:
        """Begin a call, which raises nothing, in a thread that no other call is in."""
        with self._lock:
            if not self._idle:
                try:
                    self._start_thread()
                except RuntimeError as error:
                    raise Disconnected(f"no thread to speak to other ranks in: {error}") from error
            self._idle.pop().put(call)
            if not self._idle and self._is_open:
                with suppress(RuntimeError):  # the next call may find another one
                    self._start_thread()

    def release_idle_threads(self) -> None:
        """Let idle threads end, and others after their call; does not wait for them."""
        # In a fork of the process another thread may have had the lock, which nobody releases then.
        if not self._lock.acquire(timeout=_CLOSE_S):
            return
        try:
            self._is_open = False
            while self._idle:
                self._idle.pop().put(None)
        finally:
            self._lock.release()

    def _start_thread(self) -> None:
        calls: _Calls = SimpleQueue()
        Thread(target=self._work, args=(calls,), name=self._name, daemon=True).start()
        self._idle.append(calls)

    def _work(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            call()
            del call
            with self._lock:
                if not self._is_open or len(self._idle) >= _NUM_SPARE:
                    return
                self._idle.append(calls)
