"""Forked processes that compute in parallel, where threads would wait for Python's global lock.

A fork is safe only while the process has one thread. So forks are made before anything is opened,
and wait for their work.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from typing_extensions import Self

from holdfast.errors import DeadlineExceeded, OutOfMemory
from holdfast.interop.source import READ_TIMEOUT_S
from holdfast.ownership.owner import left_s
from holdfast.system import IS_LINUX
from holdfast.threads.workers import num_cores

T = TypeVar("T")

_MAX_FORKS = 3
"""Most forks: each takes about 120 MB of memory, however many tensors there are."""
_END_S = 5.0
"""Longest wait for forks to close what they have open, before they are killed."""


class Forks:
    """Forked processes, each of which runs one call of a function. Use it in a `with`."""

    def __init__(self) -> None:
        """Make one for each core, at most three; fewer or none if the system does not allow it."""
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        if IS_LINUX and threading.active_count() == 1 and num_cores() > 1:
            with suppress(OSError):
                for _ in range(min(num_cores(), _MAX_FORKS)):
                    self._start_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; one that does not close what it has open in time is killed."""
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + _END_S
        for process in self._processes:
            process.join(left_s(end))
            process.kill()
            process.join()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def num_threads(self) -> int:
        """Threads that each fork may use to compute: its part of the cores."""
        return max(num_cores() // max(len(self), 1), 1)

    def _start_process(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [*self._connections, ours]
        process = context.Process(target=_serve, args=(theirs, others), daemon=True)
        with theirs, warnings.catch_warnings():
            # Python 3.12 counts the threads of NumPy's OpenBLAS, which may be forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        self._processes.append(process)
        self._connections.append(ours)

    def run(
        self, function: Callable[..., Iterable[T]], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Call a function in a process for each task; yield (number of the task, item)."""
        numbers: dict[Any, int] = {}
        for number, task in enumerate(tasks):
            self._connections[number].send((function, task))
            numbers[self._connections[number]] = number
        while numbers:
            ready = wait(numbers, READ_TIMEOUT_S)
            if not ready:
                raise DeadlineExceeded(
                    f"nothing was read within {READ_TIMEOUT_S:.0f} s; the storage hangs"
                )
            for connection in ready:
                number = numbers[connection]
                item, error, is_last = self._received(number)
                if error is not None:
                    raise error
                if is_last:
                    del numbers[connection]
                else:
                    yield number, item

    def _received(self, number: int) -> _Message:
        try:
            found: _Message = self._connections[number].recv()
        except (EOFError, ConnectionError):
            process = self._processes[number]
            process.join(_END_S)
            raise OutOfMemory(
                f"a worker process ended with code {process.exitcode}; the system kills "
                "processes when memory runs out"
            ) from None
        return found


_Message = tuple[Any, "Exception | None", bool]
"""An item, the error that ended the call, and whether the call ended without one."""


def _serve(connection: Connection, others: Sequence[Connection]) -> None:
    """Run the function that the parent sends; end if the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # the parent's ends: a pipe is closed when they all are
    with suppress(EOFError, ConnectionError):
        function, task = connection.recv()
        try:
            for item in function(*task):
                connection.send((item, None, False))
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the parent raises it
            connection.send((None, error, False))
        else:
            connection.send((None, None, True))
