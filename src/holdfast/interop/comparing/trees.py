"""Compares two typed trees: lists values that differ, and pairs of tensors to compare."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import msgspec
import numpy as np

from holdfast.format.nodes import ArrayRef, EnumValue, GeneratorState, TensorRef
from holdfast.format.objects import DequeItems, join_path

SHOWN_LENGTH = 60
"""Most characters of a value in a report."""


class ValueDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A plain value, or a part of a tree, that differs."""

    path: str
    """Component and path, such as "optimizer:param_groups.0.lr"."""
    a: str | None
    """The value as Python writes it, shortened; null where only the other side has one."""
    b: str | None
    """The same of the second."""


class GeneratorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A random generator whose state differs."""

    path: str
    """Component and path, such as "rng:python"."""
    kind: str
    """`python`, `numpy`, `numpy-legacy` or `torch`."""


class Pair(msgspec.Struct, frozen=True):
    """Two tensors at one path; a key is empty where only the other side has a tensor."""

    path: str
    a: str
    b: str
    generator: GeneratorDifference | None = None
    """Generator whose state differs if these two do."""


Found: TypeAlias = ValueDifference | GeneratorDifference | Pair


def differences(a: Any, b: Any, path: str, ignores: Callable[[str], bool]) -> Iterator[Found]:
    """Compare two trees; yield every pair of tensors, and every value that differs.

    Not compared are a tensor's device and flags, and whether a dict is an OrderedDict: they say
    how a value was held. Numbers of another type differ, and so do a list and a tuple. Paths for
    which `ignores` returns True are left out, with all below them.
    """
    if ignores(path):
        return
    if _is_leaf(a) and _is_leaf(b):
        yield Pair(path, a.key, b.key)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _of_mappings(a, b, path, ignores)
    elif isinstance(a, list | tuple) and type(a) is type(b):
        yield from _of_mappings(_by_place(a), _by_place(b), path, ignores)
    elif isinstance(a, GeneratorState) and isinstance(b, GeneratorState) and a.kind == b.kind:
        yield from _of_generators(a, b, path, ignores)
    elif not is_identical(a, b):
        a, b = _pruned(a, path, ignores), _pruned(b, path, ignores)
        yield ValueDifference(path=_strip_colon(path), a=format_value(a), b=format_value(b))
        yield from _alone(a, path, is_a=True)
        yield from _alone(b, path, is_a=False)


def _by_place(items: list[Any] | tuple[Any, ...]) -> dict[Any, Any]:
    of_deque = {"maxlen": items.maxlen} if isinstance(items, DequeItems) else {}
    return {**dict(enumerate(items)), **of_deque}


def format_value(value: Any) -> str:
    """Format a value for a report, shortened; a container of tensors as their count."""
    if _is_leaf(value):
        return "a tensor"
    if isinstance(value, Mapping) and value and all(map(_is_leaf, value.values())):
        return f"{len(value)} tensors"
    text = repr(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…"


def is_identical(a: Any, b: Any) -> bool:
    """Whether two plain values are the same, in type and in every bit."""
    if type(a) is not type(b):
        return isinstance(a, Mapping) and isinstance(b, Mapping) and not a and not b
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, EnumValue):
        return a.type == b.type and a.name == b.name and is_identical(a.value, b.value)
    if isinstance(a, AbstractSet):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return bool(a == b)


def _of_mappings(
    a: Mapping[Any, Any], b: Mapping[Any, Any], path: str, ignores: Callable[[str], bool]
) -> Iterator[Found]:
    for name, value in a.items():
        inner = _inside(path, name)
        if name in b:
            yield from differences(value, b[name], inner, ignores)
        elif not ignores(inner):
            yield from _iterate_one_sided(_pruned(value, inner, ignores), inner, is_a=True)
    for name in b:
        inner = _inside(path, name)
        if name not in a and not ignores(inner):
            yield from _iterate_one_sided(_pruned(b[name], inner, ignores), inner, is_a=False)


def _pruned(value: Any, path: str, ignores: Callable[[str], bool]) -> Any:
    """Return a value that has no counterpart, without what is ignored in it."""
    if isinstance(value, Mapping):
        inner = {name: _inside(path, name) for name in value}
        kept = [name for name in value if not ignores(inner[name])]
        return {name: _pruned(value[name], inner[name], ignores) for name in kept}
    if type(value) in (list, tuple):
        places = [(one, _inside(path, number)) for number, one in enumerate(value)]
        return type(value)(_pruned(one, at, ignores) for one, at in places if not ignores(at))
    return value


def _of_generators(
    a: GeneratorState, b: GeneratorState, path: str, ignores: Callable[[str], bool]
) -> Iterator[Found]:
    """Compare two states of a generator, of which only whether they differ has a meaning."""
    whole = GeneratorDifference(path=path, kind=a.kind)
    for found in _of_mappings(a.members, b.members, path, ignores):
        yield Pair(found.path, found.a, found.b, whole) if isinstance(found, Pair) else whole


def _iterate_one_sided(value: Any, path: str, *, is_a: bool) -> Iterator[ValueDifference | Pair]:
    """Yield what only one side has: each tensor, and all else as one value."""
    tensors = [*_alone(value, path, is_a=is_a)]
    if not tensors:
        text = format_value(value)
        yield ValueDifference(
            path=_strip_colon(path), a=text if is_a else None, b=None if is_a else text
        )
    yield from tensors


def _alone(value: Any, path: str, *, is_a: bool) -> Iterator[Pair]:
    if _is_leaf(value):
        yield Pair(path, value.key, "") if is_a else Pair(path, "", value.key)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _alone(inner, _inside(path, name), is_a=is_a)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _alone(inner, _inside(path, number), is_a=is_a)
    elif isinstance(value, GeneratorState):
        yield from _alone(value.members, path, is_a=is_a)


def _inside(path: str, name: object) -> str:
    return path + str(name) if path.endswith(":") else join_path(path, name)


def _strip_colon(path: str) -> str:
    return path.removesuffix(":")


def _is_leaf(value: Any) -> bool:
    return isinstance(value, TensorRef | ArrayRef)
