"""Statistics of tensors, gathered piece by piece in constant memory. Sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from holdfast.interop.comparing.tallies import TensorTally, tallies
from holdfast.interop.reading import in_batches
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


def stats_of(
    source: Source, wanted: Iterable[tuple[str, str]], *, num_threads: int | None = None
) -> Iterator[TensorStats]:
    """Read tensors, given as (component, key), and yield the statistics of each.

    At most `num_threads` threads compute at a time, by default one for each core.
    """
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
