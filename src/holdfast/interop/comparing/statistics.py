"""Statistics of tensors, gathered piece by piece in constant memory. Sums are in float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.numbers import (
    CHUNK,
    CHUNK_OF_FLOAT32,
    chunks,
    floats,
    number_nbytes,
    numbers_of_element,
    sum_of_squares,
)
from holdfast.interop.source import Source, TensorPiece, in_batches


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the finite numbers of a tensor; complex elements count as two."""

    tensor: str
    """Component and path, such as "model:h.0.weight"."""
    also: tuple[str, ...] = ()
    """Further paths of the same tensor: it is tied."""
    dtype: str
    """Name of the type, as in a safetensors file."""
    shape: tuple[int, ...]
    """Its sizes."""
    nbytes: int
    """Bytes."""
    norm: float
    """Root of the sum of squares."""
    mean: float | None
    """Mean of the finite numbers; null without any."""
    min: float | None
    """Least finite number; null without any."""
    max: float | None
    """Largest finite number; null without any."""
    zeros: int
    """Numbers that are zero."""
    nan: int
    """Numbers that are NaN."""
    infinite: int
    """Numbers that are infinite, of either sign."""
    dead_rows: int | None
    """Rows (first dimension) of zeros only; null for tensors of fewer than two dimensions."""
    exponents: dict[int, int]
    """Exponent → how many finite numbers x other than zero have 2**exponent <= |x| < twice that."""


def stats_of(
    source: Source, wanted: Iterable[tuple[str, str]], *, num_threads: int | None = None
) -> Iterator[TensorStats]:
    """Read tensors by (component, key) and yield their statistics, in one thread for each core."""
    chosen = [*wanted]
    paths: dict[tuple[str, str], list[str]] = {}
    for component in {component for component, _ in chosen}:
        for path, ref in source.parts[component].leaves.items():
            paths.setdefault((component, ref.key), []).append(f"{component}:{path}")
    whole: TensorTally | None = None
    batches = in_batches(source, chosen, partial(tallies, source), num_at_once=num_threads)
    for batch in batches:
        for component, key, tally in batch:
            whole = tally if whole is None else whole.merged(tally)
            if whole.is_whole:
                first, *also = paths.get((component, key), [f"{component}:{key}"])
                yield figures_of(whole, first, also)
                whole = None


def figures_of(tally: TensorTally, tensor: str, also: Iterable[str]) -> TensorStats:
    """Return the statistics of a tensor that was added whole, under its paths."""
    spec, has_finite = tally.spec, tally.count > 0
    return TensorStats(
        tensor=tensor,
        also=tuple(also),
        dtype=spec.dtype,
        shape=spec.shape,
        nbytes=spec.nbytes,
        norm=math.sqrt(tally.squares),
        mean=tally.sum / tally.count if has_finite else None,
        min=tally.min if has_finite else None,
        max=tally.max if has_finite else None,
        zeros=tally.zeros,
        nan=tally.nan,
        infinite=tally.infinite,
        dead_rows=tally.rows.num_dead,
        exponents=dict(sorted(tally.exponents.items())),
    )


_NUM_TOGETHER = 1 << 15
"""Most numbers of small tensors that are computed with at a time."""
_SMALL_NBYTES = 16 << 10
"""Most bytes of a small tensor."""
_NUM_CODES = 1 << 18
"""Codes that are counted at a time."""
_NUM_WIDE = 1 << 16
"""Numbers that are made float64 at a time: they fit the processor's cache."""
_FLOAT4 = "F4_X2"


class TensorTally:
    """Figures of the finite numbers in a run of a tensor's; tallies of threads can be merged."""

    def __init__(self, spec: TensorSpec, start: int = 0) -> None:
        """Begin with byte `start` of the tensor."""
        self.spec = spec
        self.stop = start
        """Byte of the tensor after the last one added."""
        self.rows = Rows(spec, start // number_nbytes(spec.dtype))
        self.sum = 0.0
        self.squares = 0.0
        self.count = 0
        self.zeros = 0
        self.nan = 0
        self.infinite = 0
        self.min = math.inf
        self.max = -math.inf
        self.exponents: dict[int, int] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the last byte of the tensor was added."""
        return self.stop >= self.spec.nbytes

    def add_bytes(self, memory: memoryview) -> None:
        """Add the bytes that follow those added before."""
        self.stop += memory.nbytes
        nbytes, dtype = number_nbytes(self.spec.dtype), self.spec.dtype
        if nbytes <= 2 and dtype != _FLOAT4 and memory.nbytes >> (8 * nbytes) >= nbytes:
            self._add_codes(memory)
            return
        for numbers in chunks(memory, dtype):
            self._tally_numbers(numbers)

    def merged(self, later: TensorTally) -> TensorTally:
        """Add the run that follows this one; return this tally, which begins with the tensor."""
        self.stop = later.stop
        self.rows.extend(later.rows)
        self.sum += later.sum
        self.squares += later.squares
        self.count += later.count
        self.zeros += later.zeros
        self.nan += later.nan
        self.infinite += later.infinite
        self.min = min(self.min, later.min)
        self.max = max(self.max, later.max)
        for exponent, count in later.exponents.items():
            self._add_exponent(exponent, count)
        return self

    def _add_exponent(self, exponent: int, count: int) -> None:
        self.exponents[exponent] = self.exponents.get(exponent, 0) + count

    def _tally_numbers(self, numbers: Any) -> None:
        bias = _exponent_bits(numbers)[1]
        counts = _exponents(numbers)
        found = np.flatnonzero(counts[1:-1]) + 1
        for field, count in zip(found.tolist(), counts[found].tolist(), strict=True):
            self._add_exponent(field - bias, count)
        num_zeros = 0
        if counts[0]:
            is_nonzero = numbers != 0
            num_zeros = len(numbers) - int(np.count_nonzero(is_nonzero))
        self.zeros += num_zeros
        if num_zeros:
            self.rows.add_numbers(is_nonzero)
        else:
            self.rows.add_nonzero(len(numbers))
        if counts[0] > num_zeros:
            self._count_subnormals(numbers)
        if num_odd := int(counts[-1]):
            num_nan = int(np.count_nonzero(np.isnan(numbers)))
            self.nan += num_nan
            self.infinite += num_odd - num_nan
            numbers = numbers[np.isfinite(numbers)]
        if len(numbers):
            self._add_finite(numbers)

    def _add_finite(self, numbers: Any) -> None:
        self.count += len(numbers)
        self.min = min(self.min, float(numbers.min()))
        self.max = max(self.max, float(numbers.max()))
        with np.errstate(over="ignore"):
            for start in range(0, len(numbers), _NUM_WIDE):
                part = numbers[start : start + _NUM_WIDE]
                wide = _MEMORY.wide[: len(part)]
                np.copyto(wide, part)
                self.sum += float(wide.sum())
                self.squares += sum_of_squares(wide)

    def _count_subnormals(self, numbers: Any) -> None:
        tiny = np.abs(numbers[numbers != 0])
        tiny = tiny[tiny < np.finfo(numbers.dtype).tiny]
        values, counts = np.unique(np.frexp(tiny)[1], return_counts=True)
        for exponent, count in zip((values - 1).tolist(), counts.tolist(), strict=True):
            self._add_exponent(exponent, count)

    def _add_codes(self, memory: memoryview) -> None:
        """Add many numbers of one or two bytes."""
        nbytes, known = number_nbytes(self.spec.dtype), _codes(self.spec.dtype)
        codes = np.frombuffer(memory, f"<u{nbytes}")
        counts = np.zeros(1 << (8 * nbytes), np.intp)
        for start in range(0, len(codes), _NUM_CODES):
            counts += np.bincount(codes[start : start + _NUM_CODES], minlength=len(counts))
        num_zeros = int(counts[known.is_zero].sum())
        if num_zeros and self.rows.are_counted:
            for start in range(0, len(codes), _NUM_CODES):
                self.rows.add_numbers(~known.is_zero.take(codes[start : start + _NUM_CODES]))
        else:
            self.rows.add_nonzero(len(codes))
        self.zeros += num_zeros
        num_nan = int(counts[np.isnan(known.values)].sum())
        self.nan += num_nan
        self.infinite += int(counts[~known.is_finite].sum()) - num_nan
        self._add_counts(known, counts)

    def _add_counts(self, known: _Codes, counts: Any) -> None:
        used = np.flatnonzero((counts > 0) & known.is_finite)
        if not len(used):
            return
        counts, values = counts[used], known.values[used]
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))
        self.count += int(counts.sum())
        self.sum += float((values * counts).sum())
        self.squares += float((values * values * counts).sum())
        is_nonzero = ~known.is_zero[used]
        exponents = np.frexp(values[is_nonzero])[1] - 1
        if len(exponents):
            least = int(exponents.min())
            sums = np.bincount(exponents - least, weights=counts[is_nonzero])
            for number in np.flatnonzero(sums).tolist():
                self._add_exponent(least + number, int(sums[number]))


@dataclass(frozen=True, slots=True)
class _Codes:
    """Table of the numbers that the codes of a type of one or two bytes stand for."""

    values: Any
    is_zero: Any
    is_finite: Any


@cache
def _codes(dtype: str) -> _Codes:
    nbytes = number_nbytes(dtype)
    codes = np.arange(1 << (8 * nbytes)).astype(f"<u{nbytes}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = floats(codes.view(np.uint8), dtype).astype(np.float64)
    return _Codes(values, values == 0, np.isfinite(values))


class _Memory(threading.local):
    """Memory of a thread for intermediate numbers: new memory takes as long as the computation."""

    def __init__(self) -> None:
        self.fields: Any = np.empty(CHUNK_OF_FLOAT32 // 2, np.intp)
        self.bytes: Any = np.empty(CHUNK_OF_FLOAT32, np.uint8)
        self.wide: Any = np.empty(_NUM_WIDE, np.float64)


_MEMORY = _Memory()


def _exponent_bits(numbers: Any) -> tuple[int, int]:
    """Return the number of bits of the exponents of float32 or float64 numbers, and their bias."""
    return (8, 127) if numbers.dtype == np.float32 else (11, 1023)


def _exponents(numbers: Any) -> Any:
    """Count float32 or float64 numbers by the bits of their exponents."""
    num = 1 << _exponent_bits(numbers)[0]
    if num == 1 << 8 and len(numbers) > CHUNK:
        return _exponents_by_pairs(numbers)
    return np.bincount(_fields(numbers), minlength=num)


def _exponents_by_pairs(numbers: Any) -> Any:
    """Count many float32 numbers, two at a time: to count takes longer than all else."""
    num, half = len(numbers), (len(numbers) + 1) // 2
    fields = _MEMORY.bytes[: 2 * half]
    np.right_shift(numbers.view(np.uint32), 23, out=fields[:num], casting="unsafe")
    least = int(fields[:num].min())
    fields[num:] = least
    fields -= least  # makes the table of pairs short
    pairs = _MEMORY.fields[:half]
    np.copyto(pairs, fields.view(np.uint16))
    counts = np.bincount(pairs)
    table = np.concatenate([counts, np.zeros(-len(counts) % 256, counts.dtype)]).reshape(-1, 256)
    found = np.zeros(256, np.intp)
    found[least:] = table.sum(axis=0)[: 256 - least]
    found[least : least + len(table)] += table.sum(axis=1)
    found[least] -= 2 * half - num
    return found


def _fields(numbers: Any) -> Any:
    """Return the bits of the exponents of float32 or float64 numbers; valid until the next call."""
    bits = numbers.view(f"u{numbers.itemsize}")
    num_bits = _exponent_bits(numbers)[0]
    fields = _MEMORY.fields[: len(numbers)]
    np.copyto(
        fields, bits >> bits.dtype.type(8 * numbers.itemsize - 1 - num_bits), casting="unsafe"
    )
    fields &= (1 << num_bits) - 1
    return fields


def tallies(source: Source, batch: Sequence[TensorPiece]) -> list[tuple[str, str, TensorTally]]:
    """Return component, key and figures of each piece."""
    found: list[tuple[str, str, TensorTally]] = []
    planned = ((piece, source.parts[piece.component].specs[piece.key]) for piece in batch)
    for dtype, group in groupby(planned, lambda one: _dtype_if_small(*one)):
        pieces = [*group]
        if dtype is not None and len(pieces) > 1:
            tallied = _together(pieces, dtype)
        else:
            tallied = [_one(piece, spec) for piece, spec in pieces]
        found += [
            (piece.component, piece.key, tally)
            for (piece, _), tally in zip(pieces, tallied, strict=True)
        ]
    return found


_Piece = tuple[TensorPiece, TensorSpec]


def _dtype_if_small(piece: TensorPiece, spec: TensorSpec) -> str | None:
    """Return the dtype of a small tensor, else None."""
    nbytes = piece.memory.nbytes
    is_small = 0 < nbytes <= _SMALL_NBYTES and nbytes == spec.nbytes
    return spec.dtype if is_small else None


def _one(piece: TensorPiece, spec: TensorSpec) -> TensorTally:
    tally = TensorTally(spec, piece.start)
    tally.add_bytes(piece.memory)
    return tally


def _together(pieces: Sequence[_Piece], dtype: str) -> list[TensorTally]:
    """Return the figures of small tensors of one dtype, computed together."""
    found: list[TensorTally] = []
    group: list[_Piece] = []
    num = 0
    for piece, spec in pieces:
        num_here = spec.nbytes // number_nbytes(dtype) * (2 if dtype == _FLOAT4 else 1)
        if num + num_here > _NUM_TOGETHER:
            found += _group(group, dtype)
            group, num = [], 0
        group.append((piece, spec))
        num += num_here
    return found + _group(group, dtype)


def _group(pieces: Sequence[_Piece], dtype: str) -> list[TensorTally]:
    raws = [np.frombuffer(piece.memory, np.uint8) for piece, _ in pieces]
    numbers = floats(np.concatenate(raws), dtype)
    nbytes = np.array([len(raw) for raw in raws])
    lengths = nbytes * len(numbers) // int(nbytes.sum())
    starts = np.cumsum(lengths) - lengths
    counts = _exponents_of_each(numbers, lengths)
    zeros = np.add.reduceat(numbers == 0, starts, dtype=np.intp)
    is_plain = (counts[:, -1] == 0) & (counts[:, 0] == zeros)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = numbers.astype(np.float64)
        columns = [
            np.add.reduceat(wide, starts),
            np.add.reduceat(wide * wide, starts),
            np.minimum.reduceat(wide, starts),
            np.maximum.reduceat(wide, starts),
        ]
    bias = _exponent_bits(numbers)[1]
    rows, fields = np.nonzero(counts[:, 1:-1])
    stops = np.searchsorted(rows, np.arange(len(pieces)), side="right").tolist()
    exponents, of_each = (fields + 1 - bias).tolist(), counts[rows, fields + 1].tolist()
    found = []
    at = 0
    for (piece, spec), stop, plain, num_zeros, num, *figures in zip(
        pieces,
        stops,
        is_plain.tolist(),
        zeros.tolist(),
        lengths.tolist(),
        *(column.tolist() for column in columns),
        strict=True,
    ):
        tally = TensorTally(spec)
        if plain and not (num_zeros and tally.rows.are_counted):
            tally.stop, tally.count, tally.zeros = spec.nbytes, num, num_zeros
            tally.sum, tally.squares, tally.min, tally.max = figures
            tally.exponents = dict(zip(exponents[at:stop], of_each[at:stop], strict=True))
        else:
            tally.add_bytes(piece.memory)
        found.append(tally)
        at = stop
    return found


def _exponents_of_each(numbers: Any, lengths: Any) -> Any:
    """Count the exponents of each tensor: a row of counts by the bits of the exponent."""
    num = 1 << _exponent_bits(numbers)[0]
    fields = _fields(numbers)
    fields += np.repeat(np.arange(len(lengths)) * num, lengths)
    return np.bincount(fields, minlength=num * len(lengths)).reshape(-1, num)


class Rows:
    """Counts rows of zeros in a run; the first once the run before is known, see `extend`."""

    def __init__(self, spec: TensorSpec, first: int) -> None:
        """Count from number `first` of the tensor on."""
        self._length = math.prod(spec.shape[1:]) * numbers_of_element(spec.dtype)
        self.num_dead: int | None = 0 if len(spec.shape) > 1 else None
        """Rows of zeros that begin and end in the run; None where there are no rows."""
        self._filled = first % self._length if self._length else 0
        """Numbers of the row in progress that were added, or came before the run."""
        self._is_alive = False
        """Whether one of them that was added is not zero."""
        self._is_continued = self._filled > 0
        self._first: bool | None = None
        """Whether the end of a row that began before the run has a number that is not zero."""

    @property
    def are_counted(self) -> bool:
        """Whether the tensor has rows of numbers."""
        return self.num_dead is not None and self._length > 0

    def add_nonzero(self, num: int) -> None:
        """Add numbers of which none is zero."""
        if not self.are_counted:
            return
        end = self._filled + num
        if self._is_continued and self._first is None and end >= self._length:
            self._first = True
        self._filled = end % self._length
        self._is_alive = self._filled > 0

    def add_numbers(self, is_nonzero: Any) -> None:
        """Add numbers, given as which of them are not zero."""
        if self.num_dead is None or not self._length:
            return
        starts = np.arange(-self._filled % self._length, len(is_nonzero), self._length)
        if self._filled:
            starts = np.concatenate([[0], starts])
        alive = np.logical_or.reduceat(is_nonzero, starts)
        alive[0] |= self._is_alive
        num_ended, self._filled = divmod(self._filled + len(is_nonzero), self._length)
        ended = alive[:num_ended]
        if num_ended and self._is_continued and self._first is None:
            self._first, ended = bool(ended[0]), ended[1:]
        self.num_dead += int(np.count_nonzero(~ended))
        self._is_alive = bool(alive[-1]) if self._filled else False

    def extend(self, later: Rows) -> None:
        """Add the rows of the run that follows this one; this one begins with the tensor."""
        if self.num_dead is None or later.num_dead is None:
            return
        is_open = later._is_continued and later._first is None
        if later._first is not None:
            self.num_dead += not (self._is_alive or later._first)
        self.num_dead += later.num_dead
        self._is_alive = later._is_alive or (is_open and self._is_alive)
        self._filled = later._filled
