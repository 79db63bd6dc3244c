"""Tensors of a state: which can be saved, and under which keys and dtype names.

A dtype without a name cannot be saved; nothing is ever cast. Knows storages, strides and element
types; knows nothing of modules, optimizers or trees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from holdfast.format.nodes import TensorRef
from holdfast.format.objects import Refused
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import DTYPE_NAMES
from holdfast.state.shards import LocalShards, is_sharded, local_of, refusal, shards_of

# `__metadata__` is a name of safetensors' own, so it can never be a tensor's.
_RESERVED_KEYS = frozenset({"", "__metadata__"})
_ROOT_KEY = "value"


def in_place_of(loader: DataLoader[Any]) -> str:
    """Explain why a torch DataLoader cannot be a component, and what to write instead."""
    why = "a torch DataLoader has no position, so a resumed run gets its data from the beginning"
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return (
            f"{why}: for an IterableDataset or a batch sampler, put an object into the state that "
            "keeps the position, with state_dict and load_state_dict; holdfast.data.Loader does so "
            "for map-style datasets (docs/data.md)"
        )
    arguments = [f"batch_size={loader.batch_size}"]
    arguments.append(f"shuffle={not isinstance(loader.sampler, SequentialSampler)}")
    if loader.drop_last:
        arguments.append("drop_last=True")
    if loader.num_workers:
        arguments.append(f"num_workers={loader.num_workers}")
    if loader.collate_fn is not default_collate:
        arguments.append("collate_fn=…")
    return (
        f"{why}: write data = holdfast.data.Loader(dataset, {', '.join(arguments)}), iterate over "
        "that, and put it into the state (docs/data.md)"
    )


def span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's byte range in its storage: the first byte, and the one after the last.

    Of a DTensor it is that of the local tensor, here and in `identity`.
    """
    tensor = local_of(tensor)
    item, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum(int((size - 1) * stride) for size, stride in steps)
    return start * item, (start + extent) * item


def identity(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors with the same memory, layout and dtype.

    Valid only while both are alive. The tensor must have a storage (see `refusal`).
    """
    tensor = local_of(tensor)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _plain(path: str) -> str:
    return path


@dataclass(slots=True, kw_only=True)
class Leaves:
    """Collects the tensors of one component, in the order of its tree."""

    component: str
    """Name of the component, for messages."""

    key_of: Callable[[str], str] = _plain
    """Path in the typed tree -> wanted tensor key, which is also the path in messages."""

    is_shared: bool = False
    """Whether several ranks have this state, so that devices are named without an index."""

    taken: Collection[str] = ()
    """Keys in use by other tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Key -> live tensor, detached; conjugate and negative views are resolved."""

    specs: list[TensorSpec] = field(default_factory=list)
    """Specs of the tensors, in the same order."""

    offenders: list[tuple[str, str]] = field(default_factory=list)
    """(path with the component's name, reason) of everything that cannot be saved."""

    originals: list[Tensor] = field(default_factory=list)
    """The original of each of `tensors`, which may be copies."""

    shards: dict[str, LocalShards] = field(default_factory=dict)
    """Key -> the boxes of each DTensor, whose entry in `tensors` is the local one."""

    _refs: dict[Hashable, TensorRef] = field(default_factory=dict)

    def add(self, tensor: Tensor, path: str) -> TensorRef | Refused:
        """Add a tensor; returns its reference, the same for the same memory, or the refusal."""
        reason = refusal(tensor)
        if reason is not None:
            return Refused(reason)
        # Not `is_set_to`: it is False for a conjugate view and itself.
        who = identity(tensor)  # valid while the tensor lives, in `originals`
        ref = self._refs.get(who)
        if ref is None:
            ref = self._refs[who] = self._new(tensor, path)
        return ref

    def _new(self, tensor: Tensor, path: str) -> TensorRef:
        key = self._unique(path)
        self.originals.append(tensor)
        if is_sharded(tensor):
            held = shards_of(tensor)
            assert isinstance(held, LocalShards), "the caller has asked whether it is refused"
            self.shards[key] = held
        local = local_of(tensor)
        plain = local.detach() if local.requires_grad else local
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        self.tensors[key] = plain
        self.specs.append(TensorSpec(key, DTYPE_NAMES[plain.dtype], tuple(plain.shape)))
        return TensorRef(key, self.device_name(tensor))

    def device_name(self, tensor: Tensor) -> str:
        """Return the name under which a tensor's device is saved."""
        if tensor.is_cpu:
            return "cpu"
        return tensor.device.type if self.is_shared else str(tensor.device)

    def refuse(self, path: str, reason: str) -> None:
        """Record that the value at `path` cannot be saved."""
        shown = self.key_of(path)
        self.offenders.append((f"{self.component}.{shown}" if shown else self.component, reason))

    def _unique(self, path: str) -> str:
        wanted = self.key_of(path) or _ROOT_KEY
        key, number = wanted, 1
        while key in self.tensors or key in self.taken or key in _RESERVED_KEYS:
            number += 1
            key = f"{wanted}#{number}"
        return key
