"""Strategies as the caller gives them: how several ranks train one model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.arguments import check_arguments

Dtype = Literal["fp32", "bf16", "fp16"]


@check_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class DDP:
    """Strategy: each rank holds the whole model, and gradients are averaged.

    By torch's `DistributedDataParallel`. All but `rebuild_buckets` are its arguments.
    """

    find_unused_parameters: bool = False
    """Whether some parameters get no gradient in some steps."""
    bucket_cap_mb: float | None = None
    """Size of the buckets of gradients, in MiB; None: torch's default."""
    rebuild_buckets: bool = False
    """Whether torch may reorder the buckets after the first step, as gradients arrived in it. On
    three ranks or more a resume is then not exact in the last digits, and logs a warning. False:
    the order is that of the parameters from the first step on. Of no effect on two ranks, where a
    sum has one order only, and with `find_unused_parameters`, where torch never reorders."""


@check_arguments(but=("mesh",))
@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2:
    """Strategy: parameters, gradients and optimizer slots are sharded over the ranks.

    By torch's `fully_shard`. With it the optimizer is a function, which gets the sharded model.
    """

    mesh: tuple[int, int] | DeviceMesh | None = None
    """(replicas, shards) for hybrid sharding, or a mesh of torch; None: over all ranks."""
    blocks: Collection[type[nn.Module]] | None = None
    """Classes of the modules that are gathered one at a time, such as a transformer's layer. None:
    each item of each `nn.ModuleList`."""
    reshard_after_forward: bool = True
    """Whether the parameters of a block are freed between forward and backward pass."""
    param_dtype: Dtype | None = None
    """Type of the parameters in computation and in all-gathers; None: their own."""
    reduce_dtype: Dtype | None = None
    """Type in which gradients are reduced; None: that of the parameters in computation."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer slots stay in host memory between uses."""


Strategy: TypeAlias = DDP | FSDP2
Name = Literal["ddp", "fsdp2", "single"]
