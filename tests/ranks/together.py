"""Ranks that are threads of the test, and the coordinators and stores that they use."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from children import Child
from holdfast.encryption.messages import encrypted
from holdfast.keys import Encryption, SecretKey
from holdfast.ranks.c10d import C10d
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.testing import ThreadCoordinator

T = TypeVar("T")

PATIENCE_S = 60.0
"""Deadline of what must happen."""
BRIEF_S = 0.3
"""Deadline of what must not happen."""


def in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(ranks: Sequence[Coordinator], function: Callable[[Any], T]) -> list[T]:
    """Call a function in a thread of each rank; return the results, or raise the first error."""
    futures = [in_thread(function, rank) for rank in ranks]
    return [future.result(PATIENCE_S) for future in futures]


def until(is_so: Callable[[], bool]) -> None:
    """Look until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end


def client(port: int) -> dist.Store:
    """A client of a TCPStore."""
    return dist.TCPStore(
        "127.0.0.1", port, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False
    )


def meet(store: Callable[[], dist.Store], world_size: int) -> list[C10d]:
    """The coordinators of all ranks, each with a store of its own."""
    futures = [
        in_thread(lambda rank=rank: C10d(store(), rank, world_size, timeout_s=PATIENCE_S))
        for rank in range(world_size)
    ]
    return [future.result(PATIENCE_S) for future in futures]


def new_server() -> dist.TCPStore:
    """A TCPStore whose server is in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Server(Child):
    """A process with the server of a TCPStore, which may be stopped and killed."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("server.py"))
        self.port = int(self.says())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process while the block runs."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def coordinators(kind: str, world_size: int, folder: Path) -> Sequence[Coordinator]:
    """The coordinators of all ranks of a run, in the order of ranks."""
    if kind == "alone":
        return [SingleProcess()]
    if kind == "threads":
        return ThreadCoordinator.for_ranks(world_size)
    if kind == "encrypted":
        seals = Encryption(keys=SecretKey(bytes(32)))
        return [encrypted(one, seals) for one in ThreadCoordinator.for_ranks(world_size)]
    if kind == "file":
        return meet(lambda: dist.FileStore(str(folder / "store"), world_size), world_size)
    server = new_server()
    return meet(lambda: server, world_size)
