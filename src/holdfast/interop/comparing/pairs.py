"""Differences of two typed trees, and of pairs of their tensors, piece by piece in constant memory.

Sums are in float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from holdfast.format.nodes import ArrayRef, EnumValue, GeneratorState, TensorRef
from holdfast.format.objects import DequeItems, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.numbers import (
    CHUNK,
    floats,
    number_nbytes,
    numbers_of_element,
    sum_of_squares,
)

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


_SMALL_NBYTES = 16 << 10
"""Fewer bytes are compared by Python, which takes a tenth of a call of numpy. Tensors of fewer
bytes are compared many at a time."""
NUM_TOGETHER = 1 << 14
"""Most numbers of small tensors that are compared at a time, for the processor's cache."""
_EXCEPT = frozenset({"I64", "U64", "F4_X2"})
"""dtypes whose numbers are rounded in float64, or packed."""

What = Literal["values", "dtype", "shape", "only in a", "only in b"]


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Two differing tensors of a path, with figures of finite positions; or one alone."""

    tensor: str
    """Component and path, such as "model:h.0.weight"."""
    what: What
    """`values`, or the first of these that differs: presence, shape, dtype."""
    a: str | None
    """dtype and shape, such as "F32 768×768"; null where only b has it."""
    b: str | None
    """The same of the second."""
    count: int = 0
    """Numbers that were compared; a complex element is two."""
    different: int = 0
    """Numbers that differ in a bit; of two dtypes, in value."""
    max_abs: float | None = None
    """Largest absolute difference."""
    relative_norm: float | None = None
    """Norm of the difference over the norm of a."""
    cosine: float | None = None
    """Cosine of the angle between both."""
    non_finite_a: int = 0
    """Numbers of a that are NaN or infinite."""
    non_finite_b: int = 0
    """The same of the second."""
    unmatched: int = 0
    """Positions at which one is NaN or infinite and the other is not the same."""

    def is_within(self, limit: float) -> bool:
        """Whether shapes agree and no number differs by more than `limit`."""
        is_measured = self.what in ("values", "dtype") and not self.unmatched
        return is_measured and (self.max_abs or 0.0) <= limit


def describe_spec(spec: TensorSpec) -> str:
    """Return a tensor's dtype and shape as text, such as "F32 768×768"."""
    return f"{spec.dtype} {'×'.join(map(str, spec.shape)) or 'scalar'}"


def have_as_many(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether an element of both is as many numbers, so that they can be compared."""
    return numbers_of_element(a.dtype) == numbers_of_element(b.dtype)


class PairTally:
    """Differences of two tensors of one shape, of the numbers added so far. Sums are in float64."""

    def __init__(self, a: TensorSpec, b: TensorSpec) -> None:
        self._specs = (a, b)
        self._is_one_dtype = a.dtype == b.dtype
        self.sizes = (number_nbytes(a.dtype), number_nbytes(b.dtype))
        """Bytes of a number of each."""
        self.num_left = a.nbytes // self.sizes[0]
        self.is_equal = self._is_one_dtype
        """Whether both have one dtype, and no bit differs so far."""
        self._count = 0
        self._different = 0
        self._unmatched = 0
        self._non_finite = [0, 0]
        self._max = 0.0
        self._num_finite = 0
        self._squares = [0.0, 0.0, 0.0]
        """Of a, of b, and of the difference."""

    def add_numbers(self, a: memoryview, b: memoryview) -> None:
        """Add the next numbers of both tensors, equally many of each."""
        raw_a, raw_b = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
        num = len(raw_a) // self.sizes[0]
        self.num_left -= num
        self._count += num
        is_only_piece = not self.num_left and self._count == num
        if self._is_one_dtype and is_only_piece and _are_equal(a, b):
            return  # nothing more is asked of equal tensors
        for start in range(0, num, CHUNK):
            stop = min(start + CHUNK, num)
            self._tally_numbers(
                raw_a[start * self.sizes[0] : stop * self.sizes[0]],
                raw_b[start * self.sizes[1] : stop * self.sizes[1]],
            )

    def set_finite(self, num_other: int, squares: Sequence[float], largest: float) -> None:
        """Set what was found of the whole tensors, of which all numbers are finite."""
        self._count, self.num_left = self.num_left, 0
        self._num_finite = self._count
        self.is_equal = not num_other
        self._different = num_other
        self._squares = [*squares]
        self._max = largest

    def difference(self, path: str) -> TensorDifference:
        """Return what was found, under the path of the tensors."""
        a, b = self._specs
        squares_a, squares_b, squares = self._squares
        scale = math.sqrt(squares_a) * math.sqrt(squares_b)
        dot = (squares_a + squares_b - squares) / 2
        return TensorDifference(
            tensor=path,
            what="values" if self._is_one_dtype else "dtype",
            a=describe_spec(a),
            b=describe_spec(b),
            count=self._count,
            different=self._different,
            max_abs=self._max if self._num_finite else None,
            relative_norm=math.sqrt(squares / squares_a) if squares_a else None,
            cosine=max(-1.0, min(1.0, dot / scale)) if scale else None,
            non_finite_a=self._non_finite[0],
            non_finite_b=self._non_finite[1],
            unmatched=self._unmatched,
        )

    def _tally_numbers(self, raw_a: Any, raw_b: Any) -> None:
        a, b = (
            floats(raw, spec.dtype).astype(np.float64, copy=False)
            for raw, spec in zip((raw_a, raw_b), self._specs, strict=True)
        )
        num_other = self._num_other_bits(raw_a, raw_b) if self._is_one_dtype else None
        self.is_equal = self.is_equal and num_other == 0
        with np.errstate(invalid="ignore", over="ignore"):
            squares = _squares(a, b, is_equal=num_other == 0)
            if not all(map(math.isfinite, squares)):
                a, b = self._matched(a, b)
                squares = _squares(a, b, is_equal=num_other == 0)
            self._num_finite += len(a)
            if num_other == 0:
                self._add_squares(*squares, 0.0)
                return
            apart = a - b
            self._add_squares(*squares, sum_of_squares(apart))
        self._different += int(np.count_nonzero(apart)) if num_other is None else num_other
        if len(a):
            self._max = max(self._max, self._largest(apart, raw_a, raw_b))

    def _add_squares(self, *found: float) -> None:
        self._squares = [known + new for known, new in zip(self._squares, found, strict=True)]

    def _num_other_bits(self, raw_a: Any, raw_b: Any) -> int:
        kind = f"<u{self.sizes[0]}"
        return int(np.count_nonzero(raw_a.view(kind) != raw_b.view(kind)))

    def _matched(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Count NaN and infinite numbers; return the numbers at positions where both are finite."""
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        self._non_finite[0] += int(np.count_nonzero(~finite_a))
        self._non_finite[1] += int(np.count_nonzero(~finite_b))
        both = finite_a & finite_b
        is_same = both | (a == b) | (np.isnan(a) & np.isnan(b))
        num_unmatched = int(np.count_nonzero(~is_same))
        self._unmatched += num_unmatched
        if not self._is_one_dtype:
            self._different += num_unmatched
        return a[both], b[both]

    def _largest(self, apart: Any, raw_a: Any, raw_b: Any) -> float:
        """Return the largest absolute difference; 64-bit integers are not rounded first."""
        kind = {"I64": "<i8", "U64": "<u8"}.get(self._specs[0].dtype)
        if kind is None or not self._is_one_dtype:
            return max(float(apart.max()), -float(apart.min()))
        a, b = raw_a.view(kind), raw_b.view(kind)
        return float((np.maximum(a, b).view("<u8") - np.minimum(a, b).view("<u8")).max())


@dataclass(frozen=True, slots=True)
class SmallPair:
    """Two small tensors of one shape and dtype."""

    a: TensorSpec
    b: TensorSpec
    bytes_a: bytes
    bytes_b: bytes


def is_small(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors of one shape can be a `SmallPair`."""
    return a.dtype == b.dtype and a.dtype not in _EXCEPT and 0 < a.nbytes < _SMALL_NBYTES


def compared(pairs: Sequence[SmallPair]) -> list[PairTally]:
    """Compare small tensors, all of one dtype, together: to compare one takes long to begin."""
    tallies = [PairTally(pair.a, pair.b) for pair in pairs]
    if not pairs:
        return tallies
    dtype, size = pairs[0].a.dtype, tallies[0].sizes[0]
    raw_a = np.frombuffer(b"".join([pair.bytes_a for pair in pairs]), np.uint8)
    raw_b = np.frombuffer(b"".join([pair.bytes_b for pair in pairs]), np.uint8)
    lengths = np.array([tally.num_left for tally in tallies])
    starts = np.cumsum(lengths) - lengths
    differ = raw_a.view(f"<u{size}") != raw_b.view(f"<u{size}")
    others = np.add.reduceat(differ, starts, dtype=np.intp).tolist()
    columns = _figures(raw_a, raw_b, dtype, starts)
    for pair, tally, num_other, squares, largest in zip(
        pairs, tallies, others, zip(*columns[:3], strict=True), columns[3], strict=True
    ):
        if num_other and all(map(math.isfinite, squares)):
            tally.set_finite(num_other, squares, largest)
        else:
            tally.add_numbers(memoryview(pair.bytes_a), memoryview(pair.bytes_b))
    return tallies


def _figures(raw_a: Any, raw_b: Any, dtype: str, starts: Any) -> list[list[float]]:
    """Return for each tensor the squares of a, of b, of the difference, and its largest number."""
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = (floats(raw, dtype).astype(np.float64, copy=False) for raw in (raw_a, raw_b))
        apart = a - b
        sums = [np.add.reduceat(one * one, starts).tolist() for one in (a, b, apart)]
        return [*sums, np.maximum.reduceat(np.abs(apart), starts).tolist()]


def _are_equal(a: memoryview, b: memoryview) -> bool:
    if a.nbytes < _SMALL_NBYTES:
        return a.tobytes() == b.tobytes()
    return bool(np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)))


def _squares(a: Any, b: Any, *, is_equal: bool) -> tuple[float, float]:
    square = sum_of_squares(a)
    return square, square if is_equal else sum_of_squares(b)
