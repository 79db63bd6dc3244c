"""Conversion between live values and typed trees: lowering on save, lifting on load.

Handles tensors, arrays, dtypes, devices and generators. `format.objects` handles containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.utils.data import DataLoader

from holdfast.errors import FormatError, UnsupportedState
from holdfast.format.nodes import (
    ArrayRef,
    DeviceName,
    DtypeName,
    EnumValue,
    GeneratorState,
    SizeTuple,
    SubclassRef,
    TensorRef,
)
from holdfast.format.objects import (
    DequeItems,
    Refused,
    TreeDocument,
    decode_beside,
    decode_tree,
    document,
    join_path,
    type_name,
)
from holdfast.format.strictjson import FROZEN
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.collecting import Leaves
from holdfast.state.leaves import (
    DTYPE_NAMES,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    by_plain_name,
    explain_refused_loader,
    inner_tensors,
    is_dtensor,
    is_subclass,
    local_of,
    plain_context,
    plain_name,
    refusal,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def encoded(
    tree: Any,
    leaves: Leaves,
    *,
    versions: Mapping[str, int] | None = None,
    unsaved: Mapping[str, str] | None = None,
    frozen: Mapping[str, str] | None = None,
) -> TreeDocument | None:
    """Encode `tree`; its tensors, and values that cannot be saved, are added to `leaves`.

    `versions`, `unsaved` and `frozen` are stored beside the tree of a module (see `Skeleton`).
    None where something cannot be saved.
    """
    lowering = _Lowering(leaves)
    parts = {_VERSIONS: versions, UNSAVED: unsaved, FROZEN: frozen}
    beside = {name: part for name, part in parts.items() if part}
    try:
        stand_in = leaves.stand_in if leaves.is_edited else None
        return document(tree, lower=lowering.lower, beside=beside, stand_in=stand_in)
    except UnsupportedState as err:
        for path, reason in err.offenders:
            leaves.record_refusal("" if path == _WHOLE else path, reason)
        return None


# The name of the root in errors of `document`.
_WHOLE = "the tree"
_KEY, _DEVICE, _DTYPE = map(attrgetter, ("key", "device", "dtype"))
_VERSIONS = "versions"
UNSAVED = "unsaved"
"""Name of the record of non-persistent buffers beside the tree of a module."""


class _Lowering:
    """Converts values of torch and numpy to nodes of the tree."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._arrays: dict[tuple[Any, ...], ArrayRef] = {}
        # Arrays made on the way must live as long as keys are derived from their addresses.
        self._alive: list[Any] = []

    def lower(self, value: Any, path: str) -> Any:
        """Return the node for `value`, why it is refused, or NotImplemented for other types."""
        if isinstance(value, Tensor) and is_subclass(local_of(value)):
            return self._lower_subclass(value, path, value if is_dtensor(value) else None)
        if isinstance(value, Tensor):
            return _add_tensor_flags(self._leaves.add_tensor(value, path), value)
        if isinstance(value, np.ndarray):
            return self._lower_array(value, path)
        if isinstance(value, torch.dtype):
            return DtypeName(plain_name(value))
        if isinstance(value, torch.device):
            return DeviceName(self._leaves.device_name(value))
        if isinstance(value, torch.Size):
            return SizeTuple(tuple(value))
        if generators.kind_of(value) is not None:
            return self._lower_generator(value, path)
        if isinstance(value, DataLoader):
            return Refused(explain_refused_loader(value))
        return NotImplemented

    def _lower_subclass(
        self, tensor: Tensor, path: str, outer: DTensor | None
    ) -> SubclassRef | Refused:
        """Lower a subclass, or a DTensor of one; `outer` is the DTensor that it is inside of."""
        local = local_of(tensor)
        kind, reason = type_name(type(local)), refusal(tensor)
        if reason is not None:
            return Refused(reason)
        inner = inner_tensors(local)
        self._alive.append(inner)
        parts: dict[str, SubclassRef | TensorRef | Refused] = {}
        for name, part in inner.items():
            at = join_path(path, name)
            if is_subclass(part):
                parts[name] = self._lower_subclass(part, at, outer)
            else:
                parts[name] = _add_tensor_flags(self._leaves.add_tensor(part, at, outer), part)
        for name, one in parts.items():
            if isinstance(one, Refused):
                return Refused(f"tensor subclass {kind}: {name}: {one.reason}")
        try:
            context = plain_context(tensor)
        except ValueError as err:
            return Refused(f"tensor subclass {kind} has {err} in its context")
        return SubclassRef(kind, tuple(tensor.shape), plain_name(tensor.dtype), parts, context)

    def _lower_array(self, array: np.ndarray[Any, Any], path: str) -> ArrayRef | Refused:
        reason = _array_refusal(array)
        if reason is not None:
            return Refused(reason)
        who = (array.__array_interface__["data"], array.shape, array.strides, array.dtype.str)
        ref = self._arrays.get(who)
        if ref is None:
            self._alive.append(array)
            tensor = self._leaves.add_tensor(_as_tensor(array), path)
            assert isinstance(tensor, TensorRef), "every accepted numpy dtype has a name"
            ref = self._arrays[who] = ArrayRef(tensor.key)
        return ref

    def _lower_generator(self, generator: Any, path: str) -> GeneratorState | Refused:
        try:
            kind, members = generators.read_generator_state(generator)
        except ValueError as err:
            return Refused(str(err))
        return GeneratorState(kind, self._lower_members(members, path))

    def _lower_members(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {k: self._lower_members(v, f"{path}.{k}".lstrip(".")) for k, v in value.items()}
        if isinstance(value, Tensor | np.ndarray):
            self._alive.append(value)
            return self.lower(value, path)
        return value


def _add_tensor_flags(ref: TensorRef | Refused, tensor: Tensor) -> TensorRef | Refused:
    """Add grad flag, parameter flag and memory order of `tensor` to its reference."""
    if isinstance(ref, Refused):
        return ref
    # A tensor with a graph is restored without one, and must not become a leaf that requires grad.
    grad = tensor.requires_grad and tensor.is_leaf
    parameter = isinstance(tensor, Parameter)
    order = () if tensor.is_contiguous() else _memory_order(tensor)
    if not (grad or parameter or order):
        return ref
    return TensorRef(ref.key, ref.device, grad, parameter, order)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions by falling stride, if dense and not row-major; else empty."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    # A tensor with gaps or overlaps is restored row-major.
    is_dense = tensor.permute(order).is_contiguous()
    return order if is_dense and order != tuple(range(tensor.dim())) else ()


def _array_refusal(array: np.ndarray[Any, Any]) -> str | None:
    if type(array) not in (np.ndarray, np.memmap):
        return f"array subclass {type(array).__qualname__} cannot be saved"
    if array.dtype.newbyteorder("=") not in NUMPY_DTYPES.values():
        return f"numpy dtype {array.dtype} has no name in the format"
    return None


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if not is_torch_memory(array):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array)


def is_torch_memory(array: np.ndarray[Any, Any]) -> bool:
    """Whether a writable tensor can share the memory of an array."""
    strides = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return array.dtype.isnative and strides and array.flags.writeable and array.flags.aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A stored tree, decoded and checked, whose tensors and generators are still nodes."""

    value: Any
    absent_devices: tuple[str, ...] = ()
    """Devices that tensors were saved from and that this machine lacks."""
    has_enums: bool = False
    """Whether the tree has an enumeration anywhere."""
    has_subclasses: bool = False
    """Whether it has a tensor subclass anywhere."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Path of a submodule -> its `_version` when saved, where it was not 1."""
    unsaved: Mapping[str, str] = field(default_factory=dict)
    """Path of a non-persistent buffer -> some of its values when saved (see `state.unsaved`)."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter that is not in the tree -> its dtype, sizes and digest as text."""

    def list_absent_devices(self, component: str) -> list[str]:
        """List a message for each absent device that tensors were saved from."""
        return [
            f"{component}: saved from {device}, which is not here: on the CPU instead"
            for device in self.absent_devices
        ]


def decode_skeleton(data: bytes, specs: Mapping[str, TensorSpec], *, what: str) -> Skeleton:
    """Decode a stored tree without its tensors and check every node in it."""
    checking = _Checking(specs, what)
    value = decode_tree(data, lift=checking.lift, lift_tensors=checking.lift_tensors, what=what)
    return Skeleton(
        value=value,
        absent_devices=tuple(checking.absent_devices),
        has_enums=checking.has_enums,
        has_subclasses=checking.has_subclasses,
        versions=_beside(data, _VERSIONS, int, what),
        unsaved=_beside(data, UNSAVED, str, what),
        frozen=_beside(data, FROZEN, str, what),
    )


def _beside(data: bytes, name: str, kind: type[T], what: str) -> dict[str, T]:
    """Read a dict of values of one type that is beside a tree; empty if it is not there."""
    if f'"{name}"'.encode() not in data:
        return {}
    found = decode_beside(data, name, what=what)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(type(value) is kind for value in found.values()):
        raise FormatError(f"{what}: {name} is not a dict of {kind.__name__}")
    return found


class _Checking:
    """Converts nodes that need no tensor to values, and checks the others."""

    def __init__(self, specs: Mapping[str, TensorSpec], what: str) -> None:
        self._specs = specs
        self._what = what
        self.absent_devices: dict[str, None] = {}
        self.has_enums = self.has_subclasses = False

    def lift(self, node: Any) -> Any:
        if isinstance(node, TensorRef):
            self._spec(node.key)
            if node.device != "cpu" and present_device(node.device).type == "cpu":
                self.absent_devices[node.device] = None
            return node
        if isinstance(node, ArrayRef):
            self._check_array(node.key)
        elif isinstance(node, GeneratorState):
            self._check_generator(node)
        elif isinstance(node, EnumValue):
            self.has_enums = True
        elif isinstance(node, SubclassRef):
            self.has_subclasses = True
        return _lift_plain(node)

    def lift_tensors(self, refs: Sequence[TensorRef]) -> Sequence[TensorRef]:
        """Check many tensor nodes at once."""
        keys = [*map(_KEY, refs)]
        have_specs = keys == self._keys or self._specs.keys() >= {*keys}
        if not (self._has_known_dtypes and have_specs) or {*map(_DEVICE, refs)} != {"cpu"}:
            for ref in refs:
                self.lift(ref)
        return refs

    @cached_property
    def _keys(self) -> list[str]:
        return [*self._specs]

    @cached_property
    def _has_known_dtypes(self) -> bool:
        return {*map(_DTYPE, self._specs.values())} <= TORCH_DTYPES.keys()

    def _spec(self, key: str) -> TensorSpec:
        spec = self._specs.get(key)
        if spec is None:
            raise FormatError(f"{self._what}: the index has no tensor {key[:80]!r}")
        if spec.dtype not in TORCH_DTYPES:
            raise FormatError(f"{self._what}: {key[:80]!r}: this torch has no {spec.dtype[:20]}")
        return spec

    def _check_array(self, key: str) -> None:
        spec = self._spec(key)
        if spec.dtype not in NUMPY_DTYPES:
            raise FormatError(f"{self._what}: {key[:80]!r}: numpy has no {spec.dtype}")

    def _check_generator(self, node: GeneratorState) -> None:
        for ref in nodes_in(dict(node.members)):
            if isinstance(ref, TensorRef | ArrayRef):
                self._spec(ref.key)


def decoded_context(tensor: Tensor) -> Any:
    """Return the context of a live subclass as a load decodes the stored one; or `ValueError`."""
    lowering = _Lowering(Leaves(component=""))
    try:
        data = document(plain_context(tensor), lower=lowering.lower).data
    except UnsupportedState as err:
        raise ValueError(str(err)) from err
    return decode_tree(data, lift=_lift_plain, what="a context")


def _lift_plain(node: Any) -> Any:
    if isinstance(node, DtypeName):
        return by_plain_name(node.name)
    if isinstance(node, DeviceName):
        return device_named(node.name)
    if isinstance(node, SizeTuple):
        return torch.Size(node.dims)
    return node


_CONTAINERS = (dict, list, tuple, set, frozenset)


def nodes_in(value: Any) -> Iterator[Any]:
    """Yield everything in a decoded tree, containers included, each container once."""
    seen: set[int] = set()
    waiting: list[Any] = [value]
    for item in waiting:  # which grows meanwhile
        if type(item) is not TensorRef and isinstance(item, _CONTAINERS):
            if id(item) in seen:
                continue
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
        elif type(item) is SubclassRef:
            waiting.extend(item.tensors.values())
        yield item


def keys_in(value: Any) -> tuple[str, ...]:
    """List keys of the tensors of a decoded tree, including those of generators, each once."""
    if type(value) is dict and {*map(type, value.values())} == {TensorRef}:
        return tuple(dict.fromkeys(map(_KEY, value.values())))
    return tuple(dict.fromkeys(uses_in(value)))


def uses_in(value: Any) -> Iterator[str]:
    """Yield the key of each tensor of a decoded tree, as often as it is named."""
    for node in nodes_in(value):
        type_ = type(node)
        if type_ is TensorRef or type_ is ArrayRef:
            yield node.key
        elif type_ is GeneratorState:
            yield from keys_in(dict(node.members))


class LiveValue:
    """Wrapper of a live value in a stored tree, which `Lifting` returns unchanged."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Lifting:
    """Converts the nodes of a stored tree to live values.

    Tensors become new ones on the device they were saved from, or on the CPU where that is not
    present; the same key gives the same object. Generators become new ones in their state.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], lives: Mapping[int, Tensor] | None = None
    ) -> None:
        """`lives`: id of a node of a tensor subclass -> the live tensor that it is made like."""
        self._tensors = tensors
        self._lives = lives or {}
        self._made: dict[str, Any] = {}

    def lift(self, node: Any) -> Any:
        """Convert a node to its live value."""
        if isinstance(node, TensorRef):
            made = self._once(node.key, self._lift_tensor, node)
            if not (node.grad or node.parameter):
                return made
            flagged = f"grad {node.grad} parameter {node.parameter}: {node.key}"
            return self._once(flagged, lambda ref: with_flags(made, ref), node)
        if isinstance(node, ArrayRef):
            return self._once("array:" + node.key, self._lift_array, node)
        if isinstance(node, GeneratorState):
            return self.lift_generator(node)
        if isinstance(node, SubclassRef):
            return self._lift_subclass(node)
        return node.value if isinstance(node, LiveValue) else _lift_plain(node)

    def lift_tree(self, value: Any) -> Any:
        """Copy a decoded tree with every node lifted; shared containers stay shared."""
        is_container = isinstance(value, dict | list | tuple | set | frozenset)
        if is_container and not isinstance(value, Enum):
            return self._once(f"container:{id(value)}", self._container, value)
        return self.lift(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = type(value)()
            for key, item in value.items():
                made[key] = self.lift_tree(item)
            return made
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, DequeItems):
            return deque(map(self.lift_tree, value), value.maxlen)
        return type(value)(self.lift_tree(item) for item in value)

    def lift_generator(self, node: GeneratorState) -> Any:
        """Make a new generator in the stored state."""
        made = generators.build(node)
        # Before it is written: NumPy takes positions outside of its state and then reads there.
        why = generators.misfit(made, node, self._specs_of(node))
        if why is not None:
            raise FormatError(f"a stored {node.kind} generator state is not valid: {why}")
        try:
            generators.write_generator_state(made, self.lift_members(node.members))
        except (ValueError, TypeError, RuntimeError, OverflowError, LookupError) as err:
            raise FormatError(f"a stored {node.kind} generator state is not valid: {err}") from err
        return made

    def _specs_of(self, node: GeneratorState) -> Mapping[str, TensorSpec]:
        tensors = {key: self._tensors[key] for key in keys_in(node)}
        return {
            key: TensorSpec(key=key, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))
            for key, tensor in tensors.items()
        }

    def _lift_subclass(self, node: SubclassRef) -> Any:
        """Make a tensor like a live one; without that return the parts as a dict, with no class."""
        live = self._lives.get(id(node))
        if live is not None:
            return rebuilt(live, node, self._tensors)
        return {name: self.lift_tree(part) for name, part in node.items()}

    def lift_members(self, value: Any) -> Any:
        """Replace tensor and array nodes in a generator's members by their values."""
        if isinstance(value, Mapping):
            return {name: self.lift_members(member) for name, member in value.items()}
        if isinstance(value, TensorRef):
            return self._tensors[value.key]
        return self._lift_array(value) if isinstance(value, ArrayRef) else value

    def _once(self, key: str, make: Callable[[Any], Any], node: Any) -> Any:
        if key not in self._made:
            self._made[key] = make(node)
        return self._made[key]

    def _lift_tensor(self, node: TensorRef) -> Tensor:
        return placed(self._tensors[node.key], node, present_device(node.device))

    def _lift_array(self, node: ArrayRef) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.array(self._tensors[node.key].numpy())
        return array


def placed(stored: Tensor, ref: TensorRef, device: torch.device) -> Tensor:
    """Copy `stored` to `device` in memory of its own, with the saved order of dimensions."""
    if ref.grad or ref.order:
        check_fit(ref, stored)
    if not ref.order or is_dtensor(stored):
        return owned(stored, device)
    sizes = [stored.shape[dim] for dim in ref.order]
    inverse = sorted(range(len(ref.order)), key=ref.order.__getitem__)
    return torch.empty(sizes, dtype=stored.dtype, device=device).permute(inverse).copy_(stored)


def with_flags(tensor: Tensor, ref: TensorRef) -> Tensor:
    """Return `tensor`, or a view that requires grad or is a Parameter, as the saved one was."""
    if ref.parameter:
        return Parameter(tensor, requires_grad=ref.grad)
    return tensor.detach().requires_grad_() if ref.grad else tensor


def check_fit(ref: TensorRef, stored: Tensor) -> None:
    """Check the flags and the order of a node against its tensor."""
    if ref.grad and not (stored.is_floating_point() or stored.is_complex()):
        raise FormatError(f"{ref.key[:80]!r}: a tensor of {stored.dtype} cannot require grad")
    if ref.order and len(ref.order) != stored.dim():
        raise FormatError(
            f"{ref.key[:80]!r}: an order of {len(ref.order)} dimensions does not fit it"
        )


def rebuilt(live: Any, node: SubclassRef, tensors: Mapping[str, Tensor]) -> Tensor:
    """Make a subclass with the class and context of `live`, and the stored inner tensors."""
    if is_dtensor(live):
        raise FormatError(f"cannot make a DTensor of {node.type[:80]}; use fully_shard alone")
    inner: dict[str, Tensor] = {}
    for name, part in node.tensors.items():
        like = getattr(live, name)
        is_nested = isinstance(part, SubclassRef)
        inner[name] = (
            rebuilt(like, part, tensors)
            if is_nested
            else torch.empty_like(like, requires_grad=False).copy_(tensors[part.key])
        )
    context = live.__tensor_flatten__()[1]
    made: Tensor = type(live).__tensor_unflatten__(inner, context, live.shape, live.stride())
    return made


def owned(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device`, unless it has aligned memory of its own, no view, there."""
    if is_dtensor(tensor):
        return tensor
    if device.type != "cpu":
        return tensor.to(device)
    alone = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone and tensor.data_ptr() % 64 == 0 else tensor.clone()


def device_named(name: str) -> torch.device:
    """Parse a stored device name."""
    try:
        return torch.device(name)
    except RuntimeError as err:
        raise FormatError(f"not a device: {name[:40]!r}") from err


@lru_cache(maxsize=64)
def present_device(name: str) -> torch.device:
    """Return the device of a stored name, or the CPU if this machine lacks it."""
    if name == "cpu":
        return _CPU
    device = device_named(name)
    if device.type == "meta":
        raise FormatError("a stored tensor cannot be on the device meta")
    return device if _is_present(device) else _CPU


_CPU = torch.device("cpu")


def _is_present(device: torch.device) -> bool:
    if device.type == "cpu" or not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()
