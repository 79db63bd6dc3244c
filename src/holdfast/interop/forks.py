"""Forks of this process to compute in: threads that use NumPy wait for the interpreter in turns.

A fork may only be made while there is one thread, so they are made before anything is opened, and
wait for their work.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from typing_extensions import Self

from holdfast.engine.workers import num_cores
from holdfast.errors import DeadlineExceeded, OutOfMemory
from holdfast.interop.reading import READ_TIMEOUT_S
from holdfast.system import IS_LINUX

T = TypeVar("T")

_MAX_FORKS = 3
"""Most forks: each takes about 120 MB, the same however many tensors there are."""
_END_S = 10.0
"""Longest wait for a fork to close what it has open, before it is killed."""


class Forks:
    """Processes that each run a function once. Use it in a `with`."""

    def __init__(self) -> None:
        """Make one for each core; none on a single core, or where a fork would not be safe."""
        self.num_threads = 1
        """Threads of a fork that should compute at a time: its part of the cores."""
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        if IS_LINUX and threading.active_count() == 1 and num_cores() > 1:
            num = min(num_cores(), _MAX_FORKS)
            self.num_threads = num_cores() // num
            for _ in range(num):
                self._add()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End them; what they have open is closed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_S)
            process.kill()
            process.join()

    def __len__(self) -> int:
        return len(self._processes)

    def _add(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self._connections.append(ours)
        process = context.Process(target=_serve, args=(theirs, self._connections), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 counts the threads of NumPy's OpenBLAS, which may be forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        self._processes.append(process)
        theirs.close()

    def run(
        self, function: Callable[..., Iterable[T]], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Call a function with the arguments of each task, each in a process of its own.

        There are at most as many tasks as processes. Yields the number of a task with each item
        that its call yields; those of one task are in order, and come among those of others.

        Raises:
            DeadlineExceeded: none yielded anything within `READ_TIMEOUT_S`.
            OutOfMemory: a process was killed.
            Exception: what the function raises.
        """
        numbers: dict[Any, int] = {}
        for number, task in enumerate(tasks):
            self._connections[number].send((function, task))
            numbers[self._connections[number]] = number
        while numbers:
            ready = wait(numbers, READ_TIMEOUT_S)
            if not ready:
                raise DeadlineExceeded(f"nothing was read within {READ_TIMEOUT_S:.0f} s")
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
                f"a process that computes ended with code {process.exitcode}; the system kills "
                "processes when memory runs out"
            ) from None
        return found


_Message = tuple[Any, "Exception | None", bool]
"""An item, the error that ended the call, and whether it has ended well."""


def _serve(connection: Connection, others: Sequence[Connection]) -> None:
    """Run a function on what the parent sends; end when it has closed the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this
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
