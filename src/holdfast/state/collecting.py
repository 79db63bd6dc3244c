"""Tensors of one component, collected by key in the order of its tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.format.nodes import TensorRef
from holdfast.format.objects import Refused
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import DTYPE_NAMES, identity, is_dtensor, local_of, refusal
from holdfast.state.shards import LocalShards, shards_of, shards_of_inner

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# `__metadata__` is a name of safetensors' own, so it can never be a tensor's.
_RESERVED_KEYS = frozenset({"", "__metadata__"})
_ROOT_KEY = "value"
_A_PART = "this process holds only a part of the tensor, and saves by itself; all its ranks must"


@dataclass(slots=True, kw_only=True)
class Leaves:
    """Collects the tensors of one component, in the order of its tree."""

    component: str
    """Name of the component, for messages."""
    key_of: Callable[[str], str] = str
    """Path in the typed tree -> wanted tensor key, which is also the path in messages."""
    is_shared: bool = False
    """Whether other ranks capture it too: names of devices have no index then."""
    is_edited: bool = False
    """Whether a hook may omit leaves that cannot be saved: see `refused`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Key in the tree of each leaf that cannot be saved, and is in no other member -> reason."""
    taken: Collection[str] = ()
    """Keys in use by other tensors."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Key -> live tensor, of a DTensor the local one: detached; conjugate and negative views are
    resolved."""
    specs: list[TensorSpec] = field(default_factory=list)
    """Specs of the tensors, in the same order."""
    offenders: list[tuple[str, str]] = field(default_factory=list)
    """(path with the component's name, reason) of everything that cannot be saved."""
    originals: list[Tensor] = field(default_factory=list)
    """The original of each of `tensors`, which may be copies."""
    shards: dict[str, LocalShards] = field(default_factory=dict)
    """Key -> the boxes of each DTensor."""
    _refs: dict[Hashable, TensorRef] = field(default_factory=dict)

    def add_tensor(
        self, tensor: Tensor, path: str, outer: DTensor | None = None
    ) -> TensorRef | Refused:
        """Add a tensor; returns its reference, the same for the same memory, or the refusal.

        `outer`: the DTensor in whose local tensor it is an inner one.
        """
        reason = refusal(tensor)
        if reason is not None:
            return Refused(reason)
        # Not `is_set_to`: it is False for a conjugate view and itself.
        who = identity(tensor)  # valid while the tensor lives, in `originals`
        ref = self._refs.get(who)
        if ref is None:
            if outer is not None:
                shards: LocalShards | Refused | None = shards_of_inner(outer, tensor)
            else:
                shards = shards_of(tensor) if is_dtensor(tensor) else None
            if isinstance(shards, Refused):
                return shards
            if shards is not None and not self.is_shared and not shards.is_whole:
                return Refused(_A_PART)
            ref = self._refs[who] = self._new(tensor, path, shards)
        return ref

    def _new(self, tensor: Tensor, path: str, shards: LocalShards | None) -> TensorRef:
        key = self._unique(path)
        self.originals.append(tensor)
        plain = local_of(tensor)
        plain = plain.detach() if plain.requires_grad else plain
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        self.tensors[key] = plain
        if shards is not None:
            self.shards[key] = shards.in_memory_of(plain)
        self.specs.append(TensorSpec(key, DTYPE_NAMES[plain.dtype], tuple(plain.shape)))
        return TensorRef(key, "cpu" if tensor.is_cpu else self.device_name(tensor.device))

    def stand_in(self, path: str, reason: str) -> TensorRef:
        """Return a node for a leaf that cannot be saved, and that a hook may omit."""
        key = self._unique(path)
        self.refused[key] = reason
        return TensorRef(key, "cpu")

    def device_name(self, device: torch.device) -> str:
        """Return the name under which a device is saved, the same on all ranks."""
        return device.type if self.is_shared else str(device)

    def record_refusal(self, path: str, reason: str) -> None:
        """Record that the value at `path` cannot be saved."""
        shown = self.key_of(path)
        self.offenders.append((f"{self.component}.{shown}" if shown else self.component, reason))

    def _unique(self, path: str) -> str:
        wanted = self.key_of(path) or _ROOT_KEY
        key, number = wanted, 1
        taken = (self.tensors, self.refused, self.taken, _RESERVED_KEYS)
        while any(key in keys for keys in taken):
            number += 1
            key = f"{wanted}#{number}"
        return key
