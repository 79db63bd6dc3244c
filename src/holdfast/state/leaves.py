"""Tensors of a state: which can be saved, under which dtype names, and where their memory is.

A dtype without a name cannot be saved; nothing is ever cast. Knows storages, strides and element
types; knows nothing of modules, optimizers or trees.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate
from typing_extensions import TypeIs

from holdfast.errors import FormatError
from holdfast.format.tensors import INDEX_NAMES

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN_TYPES = frozenset({Tensor, Parameter})
"""Types of tensors whose memory is all of them."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, name): index for name, index in INDEX_NAMES.items() if hasattr(torch, name)
}
"""torch dtype -> name in the index; without types that this torch lacks."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Name in the index -> torch dtype."""

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    index: np.dtype(name)
    for name, index in INDEX_NAMES.items()
    if name not in ("bfloat16", "complex32") and not name.startswith(("float8", "float4"))
}
"""Name in the index -> numpy dtype in native byte order, for the types that numpy has."""

_BY_PLAIN_NAME = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def plain_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is saved as a value: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def by_plain_name(name: str) -> torch.dtype:
    """Return the dtype with this name; the inverse of `plain_name`."""
    dtype = _BY_PLAIN_NAME.get(name)
    if dtype is None:
        raise FormatError(f"this torch ({torch.__version__}) has no dtype {name[:40]!r}")
    return dtype


_PLAIN_VALUES = (
    *(type(None), bool, int, float, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.Size),
)
_AS_TEXT = (torch.layout, torch.memory_format)
PARTS = ("__tensor_flatten__", "__tensor_unflatten__")
"""Methods by which torch takes a tensor subclass apart, and makes one."""

_META = "a meta tensor has no data; materialize the model first"
_FREED = "its storage was freed"
_LAZY = "not initialized yet (lazy module); run one forward pass first"
PASSING = frozenset({_META, _FREED, _LAZY})
"""Refusals of tensors that may get data before the first save."""


def refusal(tensor: Tensor) -> str | None:
    """Return why `tensor` can be neither saved nor loaded into, or None if it can."""
    if type(tensor) not in PLAIN_TYPES:
        if is_dtensor(tensor):
            return refusal(tensor._local_tensor)
        return _subclass_refusal(tensor)
    if tensor.is_meta:
        return _META
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
    return None if _has_data(tensor) else _FREED


def _subclass_refusal(tensor: Tensor) -> str | None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return _LAZY
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if type(tensor).__name__ == "ShardedTensor":
        return "a ShardedTensor cannot be saved; shard with fully_shard or DTensors instead"
    if type(tensor).__name__ == "FakeTensor":
        return f"{name}: a fake tensor has no data"
    if tensor.is_nested:
        return "nested tensors cannot be saved"
    if not is_subclass(tensor):
        return f"tensor subclass {name} cannot be saved, as it lacks {' and '.join(PARTS)}"
    again = inner_tensors(tensor)
    for part, inner in inner_tensors(tensor).items():
        reason = refusal(inner)
        if reason is None and again[part] is not inner and identity(again[part]) != identity(inner):
            reason = "each access makes a new tensor, so a load could not fill it"
        if reason is not None:
            return reason if reason in PASSING else f"tensor subclass {name}: {part}: {reason}"
    return None


def is_subclass(tensor: Tensor) -> bool:
    """Whether a tensor is a subclass that consists of inner tensors, and no DTensor."""
    kind = type(tensor)
    if kind in PLAIN_TYPES or is_dtensor(tensor):
        return False
    return all(hasattr(kind, name) for name in PARTS)


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """Return the inner tensors of a subclass by name; some may be subclasses again."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def plain_context(tensor: Any) -> Any:
    """Return the context of a subclass as plain values, named tuples and dataclasses as dicts.

    For that of the local tensor of a DTensor, its shape is replaced by the global one.

    Raises:
        ValueError: it has a value of a type that cannot be compared.
    """
    local: Any = local_of(tensor)
    shapes = ([*local.shape], [*tensor.shape]) if is_dtensor(tensor) else ([], [])
    try:
        return _simplify_value(local.__tensor_flatten__()[1], *shapes)
    except RecursionError:
        raise ValueError("a value inside itself") from None


def _simplify_value(value: Any, local: list[int], whole: list[int]) -> Any:
    kind = type(value)
    if local and kind in (tuple, list, torch.Size) and [*value] == local:
        return kind(whole)
    if isinstance(value, _PLAIN_VALUES):
        return value
    if isinstance(value, _AS_TEXT):
        return str(value)
    if is_dataclass(kind):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
        return {kind.__qualname__: _simplify_value(members, local, whole)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        members = dict(zip(kind._fields, value, strict=True))
        return {kind.__qualname__: _simplify_value(members, local, whole)}
    if kind is list or kind is tuple:
        return kind(_simplify_value(item, local, whole) for item in value)
    if kind is dict:
        return {_check_key(key): _simplify_value(item, local, whole) for key, item in value.items()}
    raise ValueError(f"a {kind.__module__}.{kind.__qualname__}")


def _check_key(key: object) -> object:
    if isinstance(key, str | int | Enum):
        return key
    raise ValueError(f"a key of type {type(key).__qualname__}")


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors whose memory a tensor is: itself, or those inside of it."""
    tensor = local_of(tensor)
    if not is_subclass(tensor):
        return [tensor]
    return [part for inner in inner_tensors(tensor).values() for part in plain_parts(inner)]


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether a value is a DTensor."""
    # Compared by name: importing the class takes a second.
    kind = type(value)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def tensor_types() -> frozenset[type]:
    """Return the types of tensors that can be saved: DTensor is one once it was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return PLAIN_TYPES if kind is None else PLAIN_TYPES | {kind}


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without its methods; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def _has_data(tensor: Tensor) -> bool:
    # Sharded wrappers free a parameter's storage between uses; reading it would crash.
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def explain_refused_loader(loader: DataLoader[Any]) -> str:
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
    """Return a tensor's byte range in its storage: the first byte, and the one after the last."""
    item, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum(int((size - 1) * stride) for size, stride in steps)
    return start * item, (start + extent) * item


def identity(tensor: Tensor) -> Hashable:
    """Return a key that live tensors with the same memory, layout and dtype share."""
    if is_subclass(tensor):
        return (type(tensor), *map(identity, inner_tensors(tensor).values()))
    if is_dtensor(tensor):
        return (identity(tensor._local_tensor), tensor.shape, tensor.device_mesh, tensor.placements)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
