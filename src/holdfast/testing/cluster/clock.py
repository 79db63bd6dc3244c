"""Virtual time: threads of which one runs at a time, and events in the order of their times.

A thread that waits gives its turn to the earliest event. So a run takes no longer than its
computations, and the same seed gives the same order of events.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from holdfast.errors import DeadlineExceeded

Event: TypeAlias = "Callable[[], object]"
"""Function that is called between two turns, at its time."""
Condition: TypeAlias = "Callable[[], bool]"
_Step: TypeAlias = "Callable[[], VirtualThread | None]"
"""Event of the queue: returns the thread that gets the turn, if one does."""

_REAL_LIMIT_S = 300.0
"""Seconds of the real clock after which a turn that nobody gives back is an error."""
_STACK_NBYTES = 1 << 20


class VirtualThread:
    """A thread of the simulation, and the lock by which it gets its turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident: int | None = None
        self.is_done = False
        self.num_waits = 0
        """Number of its last wait: an event that ends an earlier one does nothing."""
        self._go = threading.Semaphore(0)

    def is_other_thread(self) -> bool:
        """Whether the thread that calls is not that of this task."""
        return threading.get_ident() != self.ident

    def take_turn(self) -> None:
        """Let this thread continue."""
        self._go.release()

    def wait_for_turn(self) -> None:
        """Wait, in this thread, for its turn."""
        if not self._go.acquire(timeout=_REAL_LIMIT_S):
            raise DeadlineExceeded(f"{self.name} got no turn within {_REAL_LIMIT_S:.0f} s")


class VirtualClock:
    """Time and turns of a simulation. All methods run in the thread that has the turn."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, _Step]] = []
        self._numbers = count()
        self._waiting: defaultdict[object, list[tuple[VirtualThread, int]]] = defaultdict(list)
        self._tasks: list[VirtualThread] = []
        self._num_running = 0
        self._main = VirtualThread("the simulation")

    def call_at(self, time_s: float, call: Event) -> None:
        """Call a function at a time, between two turns."""

        def event() -> None:
            call()

        self._push(time_s, event)

    def start_task(self, name: str, work: Event, *, at_s: float) -> VirtualThread:
        """Start a thread at a time; `work` must raise nothing."""
        task = VirtualThread(name)
        self._tasks.append(task)
        self._num_running += 1

        def run() -> None:
            task.ident = threading.get_ident()
            # It starts while another thread has the turn, which passes it on to this one.
            task.wait_for_turn()
            try:
                work()
            finally:
                task.is_done = True
                self._num_running -= 1
                self._pass_turn(None)

        def begin() -> VirtualThread:
            before = threading.stack_size(_STACK_NBYTES)
            try:
                threading.Thread(target=run, name=name, daemon=True).start()
            finally:
                threading.stack_size(before)
            return task

        self._push(at_s, begin)
        return task

    def run_all(self) -> None:
        """Run until every task has ended and every event has come, in the thread that calls.

        Raises:
            DeadlineExceeded: tasks wait for something that will never come.
        """
        self._pass_turn(self._main)
        if self._num_running:
            names = [task.name for task in self._tasks if not task.is_done]
            raise DeadlineExceeded(f"waiting for ever: {', '.join(names[:10])}")

    def pause(self, task: VirtualThread, seconds: float) -> None:
        """Let time pass in a task."""
        self._push(self.now_s + seconds, self._resumer(task))
        self._pass_turn(task)

    def wait_until(self, task: VirtualThread, key: object, is_so: Condition, end_s: float) -> bool:
        """Wait until a condition holds after a `notify`, or a time; return whether it holds."""
        while not is_so():
            if self.now_s >= end_s:
                return False
            resume = self._resumer(task)
            self._waiting[key].append((task, task.num_waits))
            self._push(end_s, resume)
            self._pass_turn(task)
        return True

    def notify(self, key: object) -> None:
        """Let the tasks that wait for a key look again."""
        for task, number in self._waiting.pop(key, ()):
            if task.num_waits == number:
                self._push(self.now_s, self._resumer(task))

    def _resumer(self, task: VirtualThread) -> _Step:
        task.num_waits += 1
        number = task.num_waits

        def resume() -> VirtualThread | None:
            if task.num_waits != number or task.is_done:
                return None  # another event has ended this wait, such as its deadline
            # Else a second event for the same wait would give the turn to a thread that has it.
            task.num_waits += 1
            return task

        return resume

    def _push(self, time_s: float, event: _Step) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def _pass_turn(self, task: VirtualThread | None) -> None:
        """Let the earliest events happen until the turn is that of a task, perhaps this one."""
        following: VirtualThread | None = None
        while following is None and self._events:
            time_s, _, event = heapq.heappop(self._events)
            self.now_s = time_s
            following = event()
        if following is None:
            # Nothing is left to happen: all threads have ended, or wait for ever.
            following = self._main
        if following is task:
            return
        following.take_turn()
        if task is not None:
            task.wait_for_turn()
