"""Collection of a component's tensors: which can be saved, and under which key.

Knows storages, strides and element types; knows nothing of modules, optimizers or trees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from holdfast.format.objects import Refused, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import DTYPE_NAMES

_PLAIN_TYPES = frozenset({Tensor, Parameter})
# `__metadata__` is a name of safetensors' own, so it can never be a tensor's.
_RESERVED_KEYS = frozenset({"", "__metadata__"})
_ROOT_KEY = "value"


def refusal(tensor: Tensor) -> str | None:
    """Return why `tensor` can be neither saved nor loaded into, or None if it can."""
    if type(tensor) not in _PLAIN_TYPES:
        return _subclass_refusal(tensor)
    if tensor.is_meta:
        return "a meta tensor has no data; materialise the model first"
    if tensor.is_nested:
        return "nested tensors cannot be saved"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} cannot be saved; only strided tensors can"
    if tensor.is_quantized:
        return f"quantized tensors ({tensor.dtype}) cannot be saved"
    if tensor.dtype not in DTYPE_NAMES:
        return f"dtype {tensor.dtype} has no name in the format"
    if tensor._is_zerotensor():
        return "a ZeroTensor has no memory; save a clone of it"
    return None if _has_data(tensor) else "its storage was freed"


def _subclass_refusal(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "not initialised yet (lazy module); run one forward pass first"
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if type(tensor).__name__ == "DTensor":
        return f"{name}: comes with multi-rank support"
    if type(tensor).__name__ == "FakeTensor":
        return f"{name}: a fake tensor has no data"
    return f"tensor subclass {name} cannot be saved; only torch.Tensor and Parameter can"


def _has_data(tensor: Tensor) -> bool:
    # Sharded wrappers free a parameter's storage between uses; reading it would crash.
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def identity(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors with the same memory, layout and dtype.

    Valid only while both are alive. The tensor must have a storage (see `refusal`).
    """
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

    _refs: dict[Hashable, TensorRef] = field(default_factory=dict)

    def add(self, tensor: Tensor, path: str) -> TensorRef | Refused:
        """Return a reference to `tensor`, one for each distinct memory, or why it is refused."""
        reason = refusal(tensor)
        if reason is not None:
            return Refused(reason)
        # Not `is_set_to`: it is False for a conjugate view and itself.
        who = identity(tensor)  # holds while the tensor lives, in `originals`
        ref = self._refs.get(who)
        if ref is None:
            ref = self._refs[who] = self._new(tensor, path)
        return ref

    def _new(self, tensor: Tensor, path: str) -> TensorRef:
        key = self._unique(path)
        self.originals.append(tensor)
        plain = tensor.detach() if tensor.requires_grad else tensor
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        self.tensors[key] = plain
        self.specs.append(TensorSpec(key, DTYPE_NAMES[plain.dtype], tuple(plain.shape)))
        return TensorRef(key, _device_name(tensor))

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


def _device_name(tensor: Tensor) -> str:
    return "cpu" if tensor.is_cpu else str(tensor.device)
