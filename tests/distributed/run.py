"""Runs a function in several processes that form a process group."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from holdfast.ranks.c10d import open_group

T = TypeVar("T")

_FORKS = multiprocessing.get_context("forkserver")


def run_ranks(
    num_ranks: int,
    function: Callable[[int], T],
    *,
    lost: Collection[int] = (),
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[T | None]:
    """Call `function(rank)` in as many processes, which form a group.

    The processes are forked from one that has imported torch. This process hosts the store, as the
    agent of torchrun does. The result of a rank that is `lost` is None: the function kills or stops
    it, and nobody waits for it.

    Raises:
        AssertionError: a rank raised, with its traceback; or it ended without a result.
        TimeoutError: some ranks were not done after `timeout_s` seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = (num_ranks, store.port, function, timeout_s, backend)
    ranks = [_Rank(rank, *words) for rank in range(num_ranks)]
    try:
        _wait_for([ranks[rank] for rank in range(num_ranks) if rank not in lost], timeout_s)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.result for rank in ranks]


class _Rank(Generic[T]):
    """A process of the run, and what has come from it."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        port: int,
        function: Callable[[int], T],
        timeout_s: float,
        backend: str,
    ) -> None:
        self.rank = rank
        self.result: T | None = None
        self.reading, writing = _FORKS.Pipe(duplex=False)
        self._process: BaseProcess = _FORKS.Process(
            target=_in_rank, args=(rank, num_ranks, port, function, timeout_s, backend, writing)
        )
        self._process.start()
        writing.close()

    def receive(self) -> None:
        """Take the result, or raise what the rank raised."""
        try:
            self.result, error = self.reading.recv()
        except EOFError:
            self._process.join(60)
            raise AssertionError(f"rank {self.rank} ended: {self._process.exitcode}") from None
        assert error is None, f"rank {self.rank} raised\n{error}"

    def kill(self) -> None:
        """SIGKILL, also of a process that is stopped."""
        self._process.kill()
        self._process.join(60)
        self.reading.close()


def _wait_for(ranks: list[_Rank[T]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    pending = {rank.reading: rank for rank in ranks}
    while pending:
        ready = wait([*pending], max(end - time.monotonic(), 0))
        if not ready:
            late = [rank.rank for rank in pending.values()]
            raise TimeoutError(f"ranks {late} are not done after {timeout_s:.0f} s")
        for reading in ready:
            assert isinstance(reading, Connection)
            pending.pop(reading).receive()


def _in_rank(
    rank: int,
    num_ranks: int,
    port: int,
    function: Callable[[int], T],
    timeout_s: float,
    backend: str,
    writing: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        patience = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False)
        open_group(backend, timeout_s=timeout_s, store=store, rank=rank, world_size=num_ranks)
        if store.add("connected", 1) == num_ranks:
            store.set("go", "")
        store.wait(["go"])  # else a rank that is done would disconnect from one that connects
        writing.send((function(rank), None))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        writing.send((None, traceback.format_exc()))
