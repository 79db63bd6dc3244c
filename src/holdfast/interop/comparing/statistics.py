"""Statistics of a tensor, gathered piece by piece in constant memory. Sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.numbers import chunks, numbers_of_element, sum_of_squares
from holdfast.interop.reading import pieces
from holdfast.interop.source import Source


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the numbers of a tensor.

    Of complex elements the real and the imaginary part count as two numbers. Figures are of the
    finite numbers; they are null where there are none.
    """

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


class Tally:
    """Statistics of the pieces of one tensor that were added so far, in order."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._rows = _Rows(spec)
        self._sum = 0.0
        self._squares = 0.0
        self._count = 0
        self._zeros = 0
        self._nan = 0
        self._infinite = 0
        self._min = math.inf
        self._max = -math.inf
        self._exponents: dict[int, int] = {}

    def add(self, memory: memoryview) -> None:
        """Add the bytes that follow those added before."""
        for numbers in chunks(memory, self._spec.dtype):
            self._add(numbers)

    def stats(self, tensor: str, also: Iterable[str] = ()) -> TensorStats:
        """Return the statistics of all that was added."""
        return TensorStats(
            tensor=tensor,
            also=tuple(also),
            dtype=self._spec.dtype,
            shape=self._spec.shape,
            nbytes=self._spec.nbytes,
            norm=math.sqrt(self._squares),
            mean=self._sum / self._count if self._count else None,
            min=self._min if self._count else None,
            max=self._max if self._count else None,
            zeros=self._zeros,
            nan=self._nan,
            infinite=self._infinite,
            dead_rows=self._rows.num_dead,
            exponents=dict(sorted(self._exponents.items())),
        )

    def _add(self, numbers: Any) -> None:
        num_tiny, num_odd = self._count_exponents(numbers)
        num_zeros = int(np.count_nonzero(numbers == 0)) if num_tiny else 0
        self._zeros += num_zeros
        self._rows.add(numbers, has_zeros=num_zeros > 0)
        if num_tiny > num_zeros:
            self._count_subnormals(numbers)
        if num_odd:
            num_nan = int(np.count_nonzero(np.isnan(numbers)))
            self._nan += num_nan
            self._infinite += num_odd - num_nan
            numbers = numbers[np.isfinite(numbers)]
        if len(numbers):
            self._add_finite(numbers)

    def _add_finite(self, numbers: Any) -> None:
        self._min = min(self._min, float(numbers.min()))
        self._max = max(self._max, float(numbers.max()))
        wide = numbers.astype(np.float64, copy=False)
        self._count += len(wide)
        self._sum += float(wide.sum())
        with np.errstate(over="ignore"):
            self._squares += sum_of_squares(wide)

    def _count_exponents(self, numbers: Any) -> tuple[int, int]:
        """Count the exponents; return how many numbers have the smallest one, and the largest."""
        bits, num_bits, bias = (
            (numbers.view(np.uint32), 8, 127)
            if numbers.dtype == np.float32
            else (numbers.view(np.uint64), 11, 1023)
        )
        fields = (bits >> bits.dtype.type(8 * bits.itemsize - 1 - num_bits)).astype(np.intp)
        counts = np.bincount(fields, minlength=2 << num_bits)
        both_signs = counts[: 1 << num_bits] + counts[1 << num_bits :]
        for field in np.flatnonzero(both_signs[1:-1]).tolist():
            exponent = field + 1 - bias
            known = self._exponents.get(exponent, 0)
            self._exponents[exponent] = known + int(both_signs[field + 1])
        return int(both_signs[0]), int(both_signs[-1])

    def _count_subnormals(self, numbers: Any) -> None:
        tiny = np.abs(numbers[numbers != 0])
        tiny = tiny[tiny < np.finfo(numbers.dtype).tiny]
        values, counts = np.unique(np.frexp(tiny)[1], return_counts=True)
        for exponent, count in zip((values - 1).tolist(), counts.tolist(), strict=True):
            self._exponents[exponent] = self._exponents.get(exponent, 0) + count


class _Rows:
    """Counts rows of zeros only, whichever way the pieces cut them."""

    def __init__(self, spec: TensorSpec) -> None:
        self._length = math.prod(spec.shape[1:]) * numbers_of_element(spec.dtype)
        counts = len(spec.shape) > 1
        self.num_dead: int | None = 0 if counts else None
        self._filled = 0
        """Numbers of the row in progress that were added."""
        self._is_alive = False
        """Whether one of them is not zero."""

    def add(self, numbers: Any, *, has_zeros: bool) -> None:
        if self.num_dead is None or not self._length:
            return
        if not has_zeros:
            self._is_alive = True
            self._filled = (self._filled + len(numbers)) % self._length
            self._is_alive = self._filled > 0
            return
        first = (self._length - self._filled) % self._length
        starts = np.arange(first, len(numbers), self._length)
        if first:
            starts = np.concatenate([[0], starts])
        alive = np.logical_or.reduceat(numbers != 0, starts)
        alive[0] |= self._filled > 0 and self._is_alive
        end = self._filled + len(numbers)
        self._filled = end % self._length
        num_ended = end // self._length
        self.num_dead += int(np.count_nonzero(~alive[:num_ended]))
        self._is_alive = bool(alive[-1]) if self._filled else False


def stats_of(source: Source, wanted: Iterable[tuple[str, str]]) -> Iterator[TensorStats]:
    """Read tensors, given as (component, key), and yield the statistics of each.

    Raises:
        CorruptData, StoreError: as `Source.read_into`.
    """
    chosen = [*wanted]
    paths: dict[tuple[str, str], list[str]] = {}
    for component in {component for component, _ in chosen}:
        for path, ref in source.parts[component].leaves.items():
            paths.setdefault((component, ref.key), []).append(f"{component}:{path}")
    tally: Tally | None = None
    for piece in pieces(source, chosen):
        spec = source.parts[piece.component].specs[piece.key]
        if not piece.start:
            tally = Tally(spec)
        assert tally is not None
        tally.add(piece.memory)
        if piece.start + piece.memory.nbytes == spec.nbytes:
            at = (piece.component, piece.key)
            first, *also = paths.get(at, [f"{piece.component}:{piece.key}"])
            yield tally.stats(first, also)
