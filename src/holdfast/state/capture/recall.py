"""Caches for repeated captures: predicted `state_dict`s of modules, and captured components.

A state is captured many times, and its structure hardly ever changes. `state_dict` calls two
functions of every submodule, which is most of the cost of a capture: where only torch's own code
decides the result, reading the same attributes is enough. A walk over the plain containers of a
component finds its tensors and everything else in its tree. If all of that is unchanged, so are
names, specs and tree; changed numbers are put into the tree. A component with anything that the
walk does not support is captured without a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter, eq
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from holdfast.errors import UnsupportedState
from holdfast.format.nodes import WRITERS
from holdfast.format.objects import TreeDocument
from holdfast.state.components import CapturedComponent, Kind, reshard, unwrap_module
from holdfast.state.leaves import PLAIN_TYPES, identity, is_dtensor, local_of, refusal, tensor_types
from holdfast.state.shards import LocalShards

_NUMBERS = frozenset({bool, int, float})
_CONTAINERS = frozenset({dict, list, tuple})
_DICTS = frozenset({dict})
_TEXT = frozenset({str})
_IS_CPU = attrgetter("is_cpu")
_REQUIRES_GRAD = attrgetter("requires_grad")
_REQUIRES_GRAD_AND_IS_LEAF = attrgetter("requires_grad", "is_leaf")
_DEVICE = attrgetter("device")
_DTYPE = attrgetter("dtype")
_LAYOUT = attrgetter("layout")
_SHAPE = attrgetter("shape")
_PLAIN = frozenset({torch.strided})
_DECIDING = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_modules",
    "_named_members",
)
_SHADOWED = frozenset({*_DECIDING, "_version"})
_TORCHS = vars(nn.modules.module)
_MEMBERS = ("_parameters", "_buffers", "_modules")

_NumberPlace: TypeAlias = tuple[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStateDict:
    """Predicted entries of a module's `state_dict`."""

    outline: list[Any]
    """Types, names, versions and ids of parameters, which decide the names and versions of the
    entries. Holds no tensors."""
    tensors: list[Tensor]
    """Parameters and persistent buffers, in the order of the entries."""
    are_plain: bool
    """Whether none is a DTensor."""

    def matches_tensors(self, entries: Sequence[Any]) -> bool:
        """Whether `entries`, from `state_dict`, are the predicted ones."""
        pairs = list(zip(entries, self.tensors, strict=False))
        is_whole = len(entries) == len(self.tensors)
        return is_whole and all(_is_detached(a, b) for a, b in pairs)

    def detached(self, omitted: Collection[int]) -> list[Tensor]:
        """Return the tensors as in the `state_dict`; but not DTensors, which takes long.

        `omitted` has the `id()` of tensors to leave out.
        """
        chosen = self.tensors
        if omitted:
            chosen = [one for one in chosen if id(one) not in omitted]
        if self.are_plain:
            return [tensor.detach() for tensor in chosen]
        return [one if is_dtensor(one) else one.detach() for one in chosen]


def predict_state(wrapped: nn.Module) -> PredictedStateDict | None:
    """Predict the result of `state_dict`; None where code other than torch's affects it."""
    scan = _Scan()
    if not scan.record_module(unwrap_module(wrapped)):
        return None
    scan.outline += scan.kinds.values()
    tensors = [entry for entry in scan.entries if entry is not None]
    are_plain = PLAIN_TYPES.issuperset(map(type, tensors))
    if not all(map(_is_plain_class, scan.kinds)):
        return None
    if not are_plain and not tensor_types().issuperset(map(type, tensors)):
        return None
    if not are_plain and not PLAIN_TYPES.issuperset(map(type, map(local_of, tensors))):
        return None
    return PredictedStateDict(outline=scan.outline, tensors=tensors, are_plain=are_plain)


def _is_detached(entry: Any, tensor: Tensor) -> bool:
    """Whether an entry is the detached tensor."""
    if is_dtensor(entry) and is_dtensor(tensor):
        is_same = entry._local_tensor.is_set_to(tensor._local_tensor)
        return is_same and entry._spec == tensor._spec
    return type(entry) is Tensor and not is_dtensor(tensor) and entry.is_set_to(tensor)


class _Scan:
    def __init__(self) -> None:
        self.outline: list[Any] = []
        self.entries: list[Tensor | None] = []
        self.kinds: dict[type[nn.Module], int] = {}
        """Types of modules -> versions of what they save."""

    def record_module(self, module: nn.Module | None) -> bool:
        """Record a module and its submodules; False if one of them is not plain."""
        if module is None:
            self.outline.append(None)
            return True
        own, kind = module.__dict__, type(module)
        parameters, buffers, children = map(own.get, _MEMBERS)
        if not (type(parameters) is type(buffers) is type(children) is dict):
            return False  # a scripted module makes new ones on each access
        if own.get("_state_dict_hooks") or not reshard(module):
            return False
        if not own.keys().isdisjoint(_SHADOWED):
            return False
        self.kinds[kind] = kind._version
        self.outline += (kind, tuple(parameters), tuple(children))
        if parameters:
            self.outline += map(id, parameters.values())
            self.entries += parameters.values()
        if buffers:
            self._note_buffers(buffers, own.get("_non_persistent_buffers_set", ()))
        return all(map(self.record_module, children.values()))

    def _note_buffers(
        self, buffers: Mapping[str, Tensor | None], not_kept: Collection[str]
    ) -> None:
        """Record buffers without their ids, as a step may replace them by others."""
        kept = {name: value for name, value in buffers.items() if name not in not_kept}
        self.outline += ((name, value is None) for name, value in kept.items())
        self.entries += kept.values()


def _is_plain_class(kind: type[nn.Module]) -> bool:
    """Whether a class has torch's own methods behind `state_dict`: not overridden or patched."""
    deciding = (getattr(kind, name) for name in _DECIDING)
    return all(getattr(one, "__globals__", None) is _TORCHS for one in deciding)


class Irregular(Exception):
    """Error of a walk that meets an unsupported value; the component is captured uncached."""


class TreeWalk:
    """A walk over dicts, lists, tuples, plain values and tensors, in the order of the tree."""

    def __init__(self, value: Any) -> None:
        """Walk `value`; raises `Irregular` at a value of an unsupported type."""
        self.outline: list[Any] = []
        """Types, keys and texts; equal for values whose trees differ in numbers at most."""
        self.live: list[Tensor] = []
        self.numbers: list[bool | int | float] = []
        self._seen: dict[int, int] = {}
        self._kinds = tensor_types()
        self._visit(value)
        self.tensors, self.layouts = self.live, list[Any]()
        """The tensors, of DTensors the local ones; and how DTensors are placed."""
        if not PLAIN_TYPES.issuperset(map(type, self.live)):
            self.layouts = [one._spec for one in self.live if is_dtensor(one)]
            self.tensors = list(map(local_of, self.live))
            if not PLAIN_TYPES.issuperset(map(type, self.tensors)):
                raise Irregular

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _NUMBERS:
            self.numbers.append(value)
            self.outline.append(kind)
        elif kind in self._kinds:
            self.live.append(value)
            self.outline.append(kind)
        elif value is None or kind is str:
            self.outline.append(value)
        elif kind is dict:
            self._visit_dict(value)
        elif kind is list or kind is tuple:
            if not self._was_seen(value):
                self.outline.append((kind, len(value)))
                self._visit_all(value)
        else:
            raise Irregular

    def _visit_dict(self, value: dict[Any, Any]) -> None:
        if self._was_seen(value):
            return
        if not _TEXT.issuperset(map(type, value)):
            raise Irregular
        self.outline.append(tuple(value))
        self._visit_all(list(value.values()))

    def _visit_all(self, values: Sequence[Any]) -> None:
        kinds = list(map(type, values))
        if self._kinds.issuperset(kinds):
            self.live += values
            self.outline += kinds
        elif _DICTS.issuperset(kinds) and self._visit_dicts_of_tensors(values):
            return
        else:
            for value in values:
                self._visit(value)

    def _visit_dicts_of_tensors(self, values: Sequence[dict[Any, Any]]) -> bool:
        """Visit many dicts of tensors, such as slots, at once; False if they hold other values."""
        ids = list(map(id, values))
        keys = list(map(tuple, values))
        tensors = list(chain.from_iterable(map(dict.values, values)))
        kinds = list(map(type, tensors))
        is_new = len({*ids, *self._seen}) == len(ids) + len(self._seen)
        is_text = _TEXT.issuperset(map(type, chain.from_iterable(keys)))
        if not (is_new and is_text and self._kinds.issuperset(kinds)):
            return False
        self._seen.update(zip(ids, count(len(self._seen))))
        self.outline += (dict, *keys, *kinds)
        self.live += tensors
        return True

    def _was_seen(self, value: Any) -> bool:
        """Record a container; True if it was visited before (`{"$same": …}` in the tree)."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.outline.append(number)
        return True


class CaptureCache:
    """Cached capture of a component, without its tensors, except views of DTensors."""

    def __init__(
        self,
        value: Any,
        stamp: Any,
        document: TreeDocument,
        component: CapturedComponent,
        originals: Sequence[Tensor],
    ) -> None:
        """Cache a capture.

        `value` is the walked value: the whole tree, members of it in the tree's order, or a list
        of tensors. `stamp` is everything else that the tree depends on. `originals`: the live
        tensors that those of the component were captured from.
        """
        if type(value) not in _CONTAINERS:
            raise Irregular  # a single leaf, which is quickly captured
        walk = TreeWalk(value)
        self._outline, self._stamp = _shared(walk.outline), stamp
        if any(tensor.is_complex() for tensor in walk.tensors):
            raise Irregular  # they may be conjugate views; checking every other tensor is slow
        flagged = _flagged(component.kind, walk)
        if len(flagged) < len(walk.live) and any(map(_REQUIRES_GRAD, walk.live)):
            raise Irregular  # a `state_dict` that does not detach its DTensors
        self._facts, self._layouts = _facts(walk.tensors, flagged), walk.layouts
        self._partition = _partition(walk.tensors, _addresses(walk.tensors))
        self._keys = tuple(component.tensors)
        self._component = replace(component, tree=b"", tensors={})
        self._document = document
        self._numbers = list(map(repr, walk.numbers))
        self._places = list(_locate_numbers(value, document.node, set()))
        if list(map(id, self._first_of_each(walk.live))) != list(map(id, originals)):
            raise Irregular

    def recall(self, kind: Kind, value: Any, stamp: Any) -> CapturedComponent | None:
        """Return the component with current tensors and numbers; None if its structure changed."""
        if (kind, stamp) != (self._component.kind, self._stamp):
            return None
        try:
            walk = TreeWalk(value)
            if walk.outline != self._outline or walk.layouts != self._layouts:
                return None
            if not self._facts.hold(walk.tensors, _flagged(kind, walk)):
                return None
            addresses = _addresses(walk.tensors)
            partition = _partition(walk.tensors, addresses)
            if partition != self._partition or not self._write_numbers(walk.numbers):
                return None
        except (Irregular, RuntimeError, UnsupportedState, ValueError):
            return None  # nested too deeply, or a tensor without memory, refused elsewhere
        tensors = self._first_of_each(walk.tensors)
        if self._facts.grads is not None or self._layouts:
            tensors = [one.detach() if one.requires_grad else one for one in tensors]
        by_key = dict(zip(self._keys, tensors, strict=True))
        if self._layouts:
            self._renew_shards(by_key)
        return replace(
            self._component,
            tree=self._document.data,
            tensors=by_key,
            addresses=self._first_of_each(addresses) if self._facts.are_contiguous else None,
        )

    def _renew_shards(self, tensors: Mapping[str, Tensor]) -> None:
        """Make new views of the local tensors that have moved."""
        known = self._component.shards
        moved = {
            key: shards.in_memory_of(tensors[key])
            for key, shards in known.items()
            if _have_moved(shards, tensors[key])
        }
        if moved:
            self._component = replace(self._component, shards={**known, **moved})

    def _first_of_each(self, tensors: list[T]) -> list[T]:
        """Drop items of tensors that share the memory of an earlier one."""
        if self._partition is None:
            return tensors
        return [tensors[i] for i, first in enumerate(self._partition) if i == first]

    def _write_numbers(self, numbers: Sequence[bool | int | float]) -> bool:
        """Put the numbers into the tree; False if the format cannot hold them."""
        # By their texts: -0.0 equals 0.0, and nan is not equal to itself.
        texts = list(map(repr, numbers))
        if texts == self._numbers:
            return True
        self._numbers = []  # until the tree has them
        try:
            for (home, key), number in zip(self._places, numbers, strict=True):
                home[key] = WRITERS[type(number)](number)
        except ValueError:
            return False
        self._document.encode_nodes()
        self._numbers = texts
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorFacts:
    """Facts about tensors, except values and addresses, that decide their specs and nodes."""

    strides: Sequence[Any] | None
    """Strides of each tensor; None: each is contiguous, so its shape decides."""
    shapes: Sequence[Any]
    dtypes: Sequence[Any]
    devices: Sequence[Any] | None
    """Device of each tensor; None: all are in host memory."""
    grads: Sequence[Any] | None
    """Whether each tensor requires grad, and is a leaf; None: none requires grad."""

    @property
    def are_contiguous(self) -> bool:
        """Whether each tensor is one contiguous run of bytes in host memory."""
        return self.devices is None and self.strides is None

    def hold(self, tensors: Sequence[Tensor], flagged: Sequence[Tensor]) -> bool:
        """Whether the facts hold for as many `tensors`, of which `flagged` may require grad."""
        # One after the other, without a list: each temporary object reuses the last one's memory,
        # which is in the processor's cache.
        try:
            return (
                _have_strides(tensors, self.strides)
                and all(map(eq, map(_SHAPE, tensors), self.shapes))
                and all(map(eq, map(_DTYPE, tensors), self.dtypes))
                and not any(map(Tensor.is_neg, tensors))
                and _devices(tensors) == self.devices
                and _grads(flagged) == self.grads
            )
        except RuntimeError:  # layouts without shapes or strides
            return False


def _facts(tensors: Sequence[Tensor], flagged: Sequence[Tensor]) -> _TensorFacts:
    if any(map(Tensor.is_neg, tensors)) or not _PLAIN.issuperset(map(_LAYOUT, tensors)):
        raise Irregular
    are_contiguous = all(map(Tensor.is_contiguous, tensors))
    return _TensorFacts(
        strides=None if are_contiguous else _shared(map(Tensor.stride, tensors)),
        shapes=_shared(map(_SHAPE, tensors)),
        dtypes=list(map(_DTYPE, tensors)),
        devices=_devices(tensors),
        grads=_grads(flagged),
    )


def _flagged(kind: Kind, walk: TreeWalk) -> Sequence[Tensor]:
    """Return live tensors whose requiring grad is in the tree: of a `state_dict` DTensors only."""
    if kind != "module" or not walk.layouts:
        return walk.live
    return [one for one in walk.live if not is_dtensor(one)]


def _have_moved(shards: LocalShards, local: Tensor) -> bool:
    # The first box begins where the local tensor does.
    return bool(shards.views) and shards.views[0].data_ptr() != local.data_ptr()


def _have_strides(tensors: Sequence[Tensor], strides: Sequence[Any] | None) -> bool:
    if strides is None:
        return all(map(Tensor.is_contiguous, tensors))
    return all(map(eq, map(Tensor.stride, tensors), strides))


def _devices(tensors: Sequence[Tensor]) -> list[Any] | None:
    return None if all(map(_IS_CPU, tensors)) else list(map(_DEVICE, tensors))


def _grads(tensors: Sequence[Tensor]) -> list[Any] | None:
    if not any(map(_REQUIRES_GRAD, tensors)):
        return None  # each is a leaf
    return list(map(_REQUIRES_GRAD_AND_IS_LEAF, tensors))


def _shared(values: Iterable[Any]) -> list[Any]:
    """Replace equal values by one object, so that comparing them is fast."""
    seen: dict[Any, Any] = {}
    return [seen.setdefault(value, value) for value in values]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _partition(tensors: Sequence[Tensor], places: Sequence[int]) -> list[int] | None:
    """Return each tensor's first twin in memory, by addresses `places`; None: all differ."""
    if 0 not in places and len(set(places)) == len(places):
        return None
    if any(refusal(tensor) is not None for tensor in tensors):
        raise Irregular
    first: dict[Hashable, int] = {}
    return [first.setdefault(identity(tensor), i) for i, tensor in enumerate(tensors)]


def _locate_numbers(value: Any, node: Any, seen: set[int]) -> Iterator[_NumberPlace]:
    """Yield (container, key) of each number of `value` in the node, in the order of the walk."""
    seen.add(id(value))
    home = node["$tuple"] if type(value) is tuple else node
    if "$dict" in home:
        raise Irregular
    for key, item in value.items() if type(value) is dict else enumerate(value):
        kind = type(item)
        if kind in _NUMBERS:
            yield home, key
        elif kind in _CONTAINERS and id(item) not in seen:
            yield from _locate_numbers(item, home[key], seen)
