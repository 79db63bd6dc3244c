"""Exchange of buffers between ranks by point-to-point operations of torch.distributed.

It has a process group of its own, because a timeout of gloo closes all connections of its group,
and those of the training's collectives must stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from holdfast.errors import Disconnected
from holdfast.ranks.coordinator import Exchange, RankTransfer


class GroupExchange(Exchange):
    """Exchange by the backends of the default group; NCCL's goes through the accelerator."""

    def __init__(self, *, timeout_s: float) -> None:
        """Make the group, as all ranks must do at the same point of the program."""
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        has_cpu = "cpu:" in dist.get_backend_config(self._group)
        self._device = None if has_cpu else _own_device()
        if self._device is not None:
            # NCCL connects in the first call, in which all ranks must take part. Not all of them
            # need to share blocks in a load.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._lost: set[int] = set()

    @override
    def start_exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> RankTransfer:
        ops: list[_Operation] = []
        for peer, buffer in sends:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            ops.append(_Operation(dist.isend, peer, host.to(self._device or "cpu")))
        for peer, buffer in receives:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            if self._device is None:
                ops.append(_Operation(dist.irecv, peer, host))
            else:
                there = torch.empty_like(host, device=self._device)
                ops.append(_Operation(dist.irecv, peer, there, partial(host.copy_, there)))
        return _GroupTransfer(ops, self._begun, self._lost)

    def _begun(self, ops: Sequence[_Operation]) -> list[Any]:
        batch = [dist.P2POp(op.do, op.tensor, group=self._group, group_peer=op.peer) for op in ops]
        return dist.batch_isend_irecv(batch)


def _own_device() -> torch.device:
    """Return the GPU of this rank: that of its process group, if it is bound to one."""
    group = dist.group.WORLD
    bound = None if group is None else group.bound_device_id
    return bound or torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True)
class _Operation:
    """Send or receive that is under way."""

    do: Callable[..., Any]
    peer: int
    tensor: Tensor
    after: Callable[[], object] | None = None
    """Copies what was received to the host."""


class _GroupTransfer(RankTransfer):
    """Operations of torch.distributed under way; adds lost ranks to a set."""

    def __init__(
        self,
        ops: Sequence[_Operation],
        begun: Callable[[Sequence[_Operation]], list[Any]],
        lost: set[int],
    ) -> None:
        self._ops = [op for op in ops if op.peer not in lost]
        self._lost = lost
        self._works: list[Any] = []
        # What a lost rank was to send will not come, also in the exchange of a later load.
        self._errors = ["an earlier transfer has failed"] if len(self._ops) < len(ops) else []
        if self._ops:
            with self._noting({op.peer for op in self._ops}):
                self._works = begun(self._ops)

    @override
    def wait_until_done(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        # NCCL gives one work for all of them.
        is_each = len(self._works) == len(self._ops)
        for number, work in enumerate(self._works):
            with self._noting({op.peer for op in ([self._ops[number]] if is_each else self._ops)}):
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        if self._errors:
            raise Disconnected(
                f"tensors could not be exchanged with ranks {sorted(self._lost)}: "
                f"{self._errors[0]}. One of the ranks has ended or is stopped"
            )
        for op in self._ops:
            if op.after is not None:
                op.after()

    @contextmanager
    def _noting(self, peers: set[int]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch
            self._errors.append(f"{error}")
            self._lost |= peers
