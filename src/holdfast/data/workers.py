"""Data workers of torch's DataLoader that neither signals nor a killed training leave behind."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.system import signals_of

_iterators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""torch's iterators with workers -> id of the process that started them."""


def kill_at_exit(batches: Any) -> None:
    """Have the workers of torch's iterator killed at this process's exit."""
    _iterators[batches] = os.getpid()


def begin_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a worker, and call the user's `worker_init_fn`."""
    _outlive_signals()
    threading.Thread(target=_end_with_training, name="holdfast-watch", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _end_with_training() -> None:
    """End this worker when the training process, not only its own parent, has ended."""
    training = multiprocessing.parent_process()
    assert training is not None, "a worker is a process of multiprocessing"
    multiprocessing.connection.wait([training.sentinel])
    os._exit(1)


def _outlive_signals() -> None:
    """Make this worker ignore signals to the process group, which are for the training process."""
    for number in signals_of("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(number, _ignore)
    # A second signal comes from the training process, for a worker that hangs.
    signal.signal(signal.SIGTERM, _ignore_once)


def _end_workers() -> None:
    """Kill the workers of this process at its exit: they ignore the SIGTERM that they would get."""
    ours = [batches for batches, pid in _iterators.items() if pid == os.getpid()]  # not a parent's
    workers = [worker for batches in ours for worker in getattr(batches, "_workers", ())]
    for number in signals_of("SIGCHLD") if workers else ():
        signal.signal(number, signal.SIG_DFL)  # torch's handler would raise
    for worker in workers:
        worker.kill()


# Runs before multiprocessing's own exit function, which its import above registered.
atexit.register(_end_workers)


def _ignore(number: int, frame: Any) -> None:
    """Ignore a signal, but not with SIG_IGN, which the worker's own children would inherit."""


def _ignore_once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
