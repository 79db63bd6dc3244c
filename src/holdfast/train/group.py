"""Collectives of a training, in torch's default process group: few, small, in the main thread."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import RanksFailed, UsageError
from holdfast.launched import Ranks, has_group, present_ranks
from holdfast.ranks.coordinator import LEADER, RankFailure

T = TypeVar("T")

OPEN_TIMEOUT_S = 600.0
"""Limit on the ranks' connecting to each other, and on each of torch's collectives on a CPU."""


class Group:
    """Ranks of a training, which make the same calls in order; one rank needs no collective."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Describe the ranks; `device` is where tensors can be exchanged."""
        self.rank = ranks.rank
        self.local_rank = ranks.local_rank
        self.world_size = ranks.world_size
        self._device = device

    @property
    def is_leader(self) -> bool:
        """Whether this rank logs, and decides for all ranks."""
        return self.rank == LEADER

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.world_size == 1

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order; any that pickle can copy."""
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def from_leader(self, what: str, work: Callable[[], T]) -> T:
        """Run `work`, which errors call `what`, on the leader; return its result on all ranks."""
        found: T | None = None
        error: Exception | None = None
        if self.is_leader:
            try:
                found = work()
            except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
                error = raised
        failure = None if error is None else RankFailure.from_error(error, phase=what)
        result, failure = self.gather_values((found, failure))[LEADER]
        if error is not None:
            raise error
        if failure is not None:
            raise RanksFailed("work of the leader", {LEADER: failure})
        return result  # type: ignore[return-value]  # the leader's, which has not failed

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, on a device that the ranks can exchange."""
        if not self.is_alone:
            dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def copy_from_leader(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors of all ranks the values of the leader's."""
        if self.is_alone:
            return
        for tensor in tensors:
            here = tensor.detach()
            sent = here if here.is_contiguous() else here.contiguous()
            dist.broadcast(sent, 0)
            if sent is not here:
                here.copy_(sent)

    def _reduced(self, numbers: Sequence[int], operation: Any) -> list[int]:
        if self.is_alone:
            return [*numbers]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, operation)
        return [int(number) for number in tensor.tolist()]


ALONE = Group(Ranks(), torch.device("cpu"))
"""Group of a process that trains alone."""


def join_group(device: torch.device | None, *, also_alone: bool) -> Group:
    """Return the ranks of the default process group, which is opened if a launcher asks for it.

    What is opened here is closed when the program ends without an error.

    Args:
        device: where the model will train; None: the accelerator of this host, or else its CPU.
        also_alone: open a group of one rank, too, where there is no launcher.
    """
    ranks = present_ranks()
    is_on_cpu = device is not None and device.type == "cpu"
    uses_cuda = not is_on_cpu and torch.cuda.is_available()
    if (ranks.world_size > 1 or also_alone) and not has_group():
        if not dist.is_available():
            raise UsageError("several ranks need a torch that was built with torch.distributed")
        from torch._C._distributed_c10d import HashStore

        from holdfast.ranks.c10d import open_group

        # On a GPU both: numbers of the host are exchanged on the host.
        backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
        if ranks.world_size > 1:
            open_group(backend, timeout_s=OPEN_TIMEOUT_S)
        else:
            open_group(backend, timeout_s=OPEN_TIMEOUT_S, store=HashStore(), rank=0, world_size=1)
        atexit.register(_destroy_group, os.getpid())
        ranks = present_ranks()
    return Group(ranks, _exchange_device(ranks))


def _exchange_device(ranks: Ranks) -> torch.device:
    """Return the device of small tensors in collectives: the host, where the group allows it."""
    if ranks.world_size == 1 or "gloo" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _destroy_group(pid: int) -> None:
    # After an error other ranks may be gone, and NCCL would wait for them.
    if os.getpid() == pid and has_group() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
