"""Converts descriptions of pickled values to components: typed trees, and places of tensors."""

from __future__ import annotations

import datetime
import math
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.errors import FormatError, LimitExceeded
from holdfast.format.nodes import (
    WRITERS,
    ArrayRef,
    DeviceName,
    DtypeName,
    EnumValue,
    GeneratorState,
    SizeTuple,
    TensorRef,
)
from holdfast.format.objects import join_path
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.boxes import is_row_major, row_major
from holdfast.interop.pickles.names import enumerated
from holdfast.interop.pickles.values import (
    LIFTED,
    ArrayValue,
    ByteArray,
    CountedItems,
    DefaultItems,
    Generator,
    Global,
    NamespaceItems,
    OrderedItems,
    Refusal,
    Span,
    Storage,
    StorageKind,
    TensorView,
    Unknown,
    bound,
)
from holdfast.interop.source import LeftOut, SourceComponent

MAX_VALUES = 4_000_000
"""Values of a component, shared ones counted as often as they are named; a tensor counts eight."""
MAX_PATHS_NBYTES = 64 << 20
"""Characters of the paths of all tensors together."""
MAX_LEVEL = 50
"""Nesting of containers; the format has room for 59 levels of brackets, and a leaf takes some."""
MAX_LEFT_OUT = 1_000
"""Values that are named one by one; of more there is a count."""
MAX_KEY = 4096
"""Characters of a key of a dict."""
MAX_TEXT = 8 << 20
"""Bytes of a text or of `bytes` in a tree; larger data belongs into a tensor."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Position of a tensor's bytes: `strides` and `offset` are in elements of its data."""

    data: Span | bytes
    offset: int
    strides: tuple[int, ...]


class NothingKept(FormatError):
    """Error for a component of which no value can be imported."""

    def __init__(self, left_out: list[LeftOut]) -> None:
        super().__init__(f"{left_out[0].path}: {left_out[0].why}")
        self.left_out = left_out


@dataclass(slots=True)
class Converted:
    """A component that was made of a description."""

    part: SourceComponent
    places: dict[str, TensorLocation]
    left_out: list[LeftOut]


"""Names under which people save a model."""
_OUT: Final = object()
_Path: TypeAlias = "tuple[_Path, Any] | None"
"""Names from the innermost outwards; joined only where a text is needed."""


def convert(
    component: str, description: Any, *, kind: str | None = None, where: str | None = None
) -> Converted:
    """Make a component of a description. Without `kind`, the kind is found from its content.

    What the format cannot hold is left out: a member of a dict alone, else the innermost member
    of a dict that holds it. `where` is the path of the description in its file.

    Raises:
        NothingKept: the whole of it would be left out.
        LimitExceeded: more values than a component may have.
    """
    builder = _Builder(component, where or component)
    tree = builder.build_tree(description, None, 1)
    if tree is _OUT:
        raise NothingKept(builder.left_out)
    found = kind or ("module" if _is_state_dict(tree) else "tree")
    if found == "module":
        tree = dict(tree)
    if builder.num_more_out:
        builder.left_out.append(LeftOut(where or component, f"{builder.num_more_out:,} more"))
    order = sorted(builder.specs, key=builder.position)
    specs = {key: builder.specs[key] for key in order}
    part = SourceComponent(kind=found, tree=tree, specs=specs)
    return Converted(part, builder.places, builder.left_out)


def _is_state_dict(tree: Any) -> bool:
    """Whether a tree looks like a module's state: names and tensors, at most some extra state."""
    if type(tree) not in (dict, OrderedDict) or not tree:
        return False
    tensors = sum(type(value) is TensorRef for value in tree.values())
    extra = sum(type(key) is str and key.endswith("_extra_state") for key in tree)
    return all(type(key) is str for key in tree) and tensors > 0 and tensors + extra >= len(tree)


@dataclass(slots=True)
class _Shared:
    """A container that was converted: what it became, and what naming it again costs."""

    value: Any
    weight: int
    num_tensors: int
    paths_nbytes: int


class _Builder:
    def __init__(self, component: str, where: str) -> None:
        self._component = component
        self._where = where
        self._max_values, self._max_paths_nbytes = bound(MAX_VALUES), bound(MAX_PATHS_NBYTES)
        self.specs: dict[str, TensorSpec] = {}
        self.places: dict[str, TensorLocation] = {}
        self.left_out: list[LeftOut] = []
        self.num_more_out = 0
        self._keys: dict[Any, str] = {}
        self._shared: dict[int, _Shared | None] = {}  # None: not finished
        self._kept: list[Any] = []  # of which ids are remembered
        self._weight = 0
        self._num_tensors = 0
        self._paths_nbytes = 0

    def position(self, key: str) -> tuple[int, int]:
        place = self.places[key]
        return (place.data.start if isinstance(place.data, Span) else -1, place.offset)

    def build_tree(self, value: Any, path: _Path, level: int) -> Any:
        """The typed tree of a description, or `_OUT` where it is left out."""
        self._spend(1)
        kind = type(value)
        if kind in _PLAIN:
            return self._build_plain(value, path)
        convert = _CONVERTERS.get(kind)
        if convert is not None:
            if kind in _CONTAINERS:
                return self._container(convert, value, path, level)
            return convert(self, value, path, level)
        if isinstance(value, np.generic):
            return value
        reason = _REASONS.get(kind, lambda value: f"{kind.__name__}: the format has no such value")
        return self._out(path, reason(value), lost=value)

    def _spend(self, weight: int) -> None:
        self._weight += weight
        if self._weight > self._max_values:
            raise LimitExceeded(
                f"{self._where}: more than {MAX_VALUES:,} values, shared ones counted for each "
                f"use; {LIFTED}"
            )

    def _join_path(self, path: _Path) -> str:
        """Join a path, which is charged for."""
        names = []
        while path is not None:
            path, name = path
            names.append(str(name))
        text = ".".join(reversed(names))
        self._spend_paths(len(text))
        return text

    def _spend_paths(self, nbytes: int) -> None:
        self._paths_nbytes += nbytes
        if self._paths_nbytes > self._max_paths_nbytes:
            raise LimitExceeded(f"{self._where}: the paths of its tensors are too long; {LIFTED}")

    def _out(self, path: _Path, why: str, *, lost: Any = None) -> Any:
        """Leave a value out; `lost` is its description, or the one that its name leads to."""
        of = self._component if self._has_tensors(lost) else ""
        # Lost tensors are recorded also behind many values without any.
        if len(self.left_out) < (2 * MAX_LEFT_OUT if of else MAX_LEFT_OUT):
            text = self._join_path(path)
            self.left_out.append(
                LeftOut(join_path(self._where, text) if text else self._where, why, of)
            )
        else:
            self.num_more_out += 1
        return _OUT

    def _has_tensors(self, value: Any) -> bool:
        waiting, seen, kept = [value], set(), []  # kept: so that no id is used twice
        while waiting:
            found = waiting.pop()
            if isinstance(found, TensorView | ArrayValue | Storage):
                return True
            if isinstance(found, Refusal) and found.is_tensor:
                return True
            if isinstance(found, Unknown):
                found = (found.args, found.state)
            if isinstance(found, Mapping | list | tuple) and id(found) not in seen:
                seen.add(id(found))
                kept.append(found)
                self._spend(len(found))
                waiting += found.values() if isinstance(found, Mapping) else found
        return False

    def _build_plain(self, value: Any, path: _Path) -> Any:
        if type(value) in (str, bytes) and len(value) > MAX_TEXT:
            return self._out(path, f"{len(value):,} characters or bytes in one value")
        try:
            WRITERS[type(value)](value)
        except ValueError as err:
            return self._out(path, str(err))
        return value

    # Containers.

    def _container(self, convert: Any, value: Any, path: _Path, level: int) -> Any:
        identity = id(value)
        if identity in self._shared:
            return self._again(self._shared[identity], path)
        if level > MAX_LEVEL:
            return self._out(path, "nested too deeply", lost=value)
        self._shared[identity] = None
        before = self._weight, self._num_tensors, self._paths_nbytes
        made = convert(self, value, path, level)
        weight, num_tensors, nbytes = self._weight, self._num_tensors, self._paths_nbytes
        self._shared[identity] = _Shared(
            made, weight - before[0], num_tensors - before[1], nbytes - before[2]
        )
        return made

    def _again(self, found: _Shared | None, path: _Path) -> Any:
        if found is None:
            return self._out(path, "a container that contains itself")
        self._spend(found.weight)
        if found.num_tensors:
            self._spend_paths(found.paths_nbytes + found.num_tensors * len(self._join_path(path)))
            self._num_tensors += found.num_tensors
        return found.value

    def _items(self, value: Any, path: _Path, level: int) -> Any:
        """The items of a list or a tuple; without one of them the others would be misplaced."""
        made = [self.build_tree(item, (path, n), level + 1) for n, item in enumerate(value)]
        if not any(item is _OUT for item in made):
            return made
        others = [item for item, one in zip(value, made, strict=True) if one is not _OUT]
        if self._has_tensors(others):
            self._out(path, "a sequence with an item that is left out", lost=others)
        return _OUT

    def _tuple(self, value: Any, path: _Path, level: int) -> Any:
        made = self._items(value, path, level)
        return made if made is _OUT else tuple(made)

    def _build_set(self, value: Any, path: _Path, level: int) -> Any:
        made = [self._build_key(item, path, level + 1, item) for item in value]
        if any(item is _OUT for item in made):
            return _OUT
        return type(value)(made)

    def _build_items(self, value: Mapping[Any, Any], path: _Path, level: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in value.items():
            known = self._build_key(key, path, level + 1, item)
            if known is _OUT:
                continue
            inner = self.build_tree(item, (path, _format_path_key(key)), level + 1)
            if inner is not _OUT:
                made[known] = inner
        return made

    def _build_key(self, key: Any, path: _Path, level: int, lost: Any = None) -> Any:
        if type(key) is str:
            if len(key) > MAX_KEY:
                why = f"an item under a key of {len(key):,} characters"
                return self._out(path, why, lost=lost)
            if key.isascii() or _is_unicode(key):
                return key
            return self._out(path, f"an item under {ascii(key)[:80]}, not Unicode", lost=lost)
        if isinstance(key, TensorView | ArrayValue | Generator):
            return self._out(path, "a tensor, an array or a generator as a key", lost=lost)
        return self.build_tree(key, (path, _format_path_key(key)), level)

    def _ordered(self, value: Any, path: _Path, level: int) -> Any:
        return OrderedDict(self._build_items(value, path, level))

    def _build_counter(self, value: Any, path: _Path, level: int) -> Any:
        made: Counter[Any] = Counter()
        dict.update(made, self._build_items(value, path, level))
        return made

    def _default(self, value: Any, path: _Path, level: int) -> Any:
        self._out(path, "the factory of a defaultdict; its items are kept as a dict")
        return self._build_items(value, path, level)

    def _namespace(self, value: Any, path: _Path, level: int) -> Any:
        self._out(path, "the class of a namespace; its attributes are kept as a dict")
        return self._build_items(value, path, level)

    # Tensors, arrays and generators.

    def _build_tensor(self, value: TensorView, path: _Path, level: int) -> Any:
        if value.storage.data is None:
            return self._out(path, "a tensor whose bytes are not in the file", lost=value)
        key = self._placed(
            (id(value.storage), value.dtype, value.offset, value.shape, value.strides),
            path,
            value,
            TensorLocation(value.storage.data, value.offset, value.strides),
            kept=value.storage,
        )
        order = memory_order(value.shape, value.strides)
        return TensorRef(key, value.storage.device, value.grad, value.parameter, order)

    def _build_array(self, value: ArrayValue, path: _Path, level: int) -> Any:
        if value.refusal:
            return self._out(path, value.refusal, lost=value)
        strides = row_major(value.shape, is_fortran=value.is_fortran)
        key = self._placed(
            id(value), path, value, TensorLocation(value.data, 0, strides), kept=value
        )
        return TensorRef(key) if value.is_tensor else ArrayRef(key)

    def _placed(
        self,
        who: Any,
        path: _Path,
        value: TensorView | ArrayValue,
        place: TensorLocation,
        *,
        kept: Any,
    ) -> str:
        """The key of a tensor: the first path at which it is."""
        self._spend(7)
        self._num_tensors += 1
        text = self._join_path(path) or "tensor"
        found = self._keys.get(who)
        if found is not None:
            return found
        self._kept.append(kept)
        key, number = text, 1
        while key in self.specs:
            number += 1
            key = f"{text}~{number}"
        self._keys[who] = key
        self.specs[key] = TensorSpec(key, value.dtype, value.shape)
        self.places[key] = place
        return key

    def _build_generator(self, value: Generator, path: _Path, level: int) -> Any:
        if level > MAX_LEVEL:
            return self._out(path, "nested too deeply")
        if "state" not in value.members:
            return self._out(path, "a random generator without its state")
        members = self._build_items(value.members, path, level)
        return GeneratorState(value.kind, members) if "state" in members else _OUT

    # What is left out.

    def _unknown(self, value: Unknown, path: _Path, level: int) -> Any:
        member = enumerated(value)
        if member is not None:
            inner = self.build_tree(member.value, path, level + 1)
            return inner if inner is _OUT else EnumValue(member.type, None, inner)
        return self._out(path, f"an object of {value.name}, which is not carried over", lost=value)


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_path_key(key: Any) -> Any:
    """Return the text that stands for a key in a path."""
    if type(key) is str or (type(key) is int and key.bit_length() <= 64):
        return key
    return f"<{type(key).__name__}>"


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions from the outermost to the innermost; empty if row-major, or not dense."""
    if is_row_major(shape, strides) or 0 in shape:
        return ()
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim], dim))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return ()
        expected *= shape[dim]
    return () if order == [*range(len(shape))] else tuple(order)


def check_claims(converted: Mapping[str, Converted], *, file_nbytes: int, what: str) -> None:
    """Refuse a file whose tensors are many times as large as itself, which views make possible."""
    claimed = sum(
        math.prod(spec.shape) * ITEM_NBYTES[spec.dtype]
        for one in converted.values()
        for spec in one.part.specs.values()
    )
    if claimed > bound(max(8 * file_nbytes, 64 << 20)):
        raise LimitExceeded(
            f"{what}: {file_nbytes:,} bytes claim to be tensors of {claimed:,} bytes; {LIFTED}"
        )


_PLAIN = frozenset(
    (
        type(None),
        *(bool, int, float, str, bytes),
        *(datetime.timedelta, datetime.datetime, pathlib.PosixPath, pathlib.WindowsPath),
        *(DtypeName, DeviceName, SizeTuple),
    )
)
_CONTAINERS = frozenset(
    (list, tuple, set, frozenset, dict, OrderedItems, CountedItems, DefaultItems, NamespaceItems)
)
_CONVERTERS: dict[type, Any] = {
    list: _Builder._items,
    tuple: _Builder._tuple,
    set: _Builder._build_set,
    frozenset: _Builder._build_set,
    dict: _Builder._build_items,
    OrderedItems: _Builder._ordered,
    CountedItems: _Builder._build_counter,
    DefaultItems: _Builder._default,
    NamespaceItems: _Builder._namespace,
    TensorView: _Builder._build_tensor,
    ArrayValue: _Builder._build_array,
    Generator: _Builder._build_generator,
    Unknown: _Builder._unknown,
}
_REASONS: dict[type, Callable[[Any], str]] = {
    Global: lambda value: f"the class or function {value.name}",
    Refusal: lambda value: str(value.why),
    Span: lambda value: f"{value.nbytes:,} bytes in one value; put such data into a tensor",
    ByteArray: lambda value: "a bytearray",
    Storage: lambda value: "a storage without a tensor",
    StorageKind: lambda value: "a storage without a tensor",
}
"""Why descriptions of these kinds are left out."""
