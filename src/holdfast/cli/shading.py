"""Tables of shades, as PNG or SVG drawn by matplotlib, and as text of block characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError

_SUFFIXES = (".png", ".svg")
_BLOCKS = " ░▒▓█"
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_TICKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Shades:
    """Rows and columns of values that are drawn as shades."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    """One row each; None is left blank."""
    label: str
    """What a value is."""
    below: str
    """What the columns are."""
    is_logarithmic: bool = False


def expect_drawable(plot: Path) -> None:
    """Raise `UsageError` unless the file can be drawn, before anything is read."""
    if plot.suffix not in _SUFFIXES:
        raise UsageError(f"--plot={str(plot)!r}: the name must end in .png or .svg")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            f"--plot={str(plot)!r}: needs matplotlib: pip install 'holdfast-torch[demo]'"
        ) from None


def write_shades(shades: Shades, plot: Path) -> None:
    """Draw a table of shades into a file.

    Raises:
        UsageError: it cannot be written.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    num_rows, num_columns = len(shades.rows), len(shades.columns)
    canvas = Figure(figsize=(10, 2 + num_rows / 4), layout="constrained")
    axis = canvas.subplots()
    known = [value for row in shades.values for value in row if value is not None and value > 0]
    if num_rows and num_columns:
        norm = None
        if shades.is_logarithmic and known:
            norm = LogNorm(min(known), max(known) if max(known) > min(known) else 2 * max(known))
        cells = [[math.nan if value is None else value for value in row] for row in shades.values]
        drawn = axis.imshow(cells, aspect="auto", cmap="viridis", norm=norm)
        canvas.colorbar(drawn, label=shades.label)
    step = -(-num_columns // _MOST_TICKS) or 1
    axis.set_xticks(range(0, num_columns, step), shades.columns[::step], fontsize=7)
    axis.set_yticks(range(num_rows), [name[-60:] for name in shades.rows], fontsize=7)
    axis.set_xlabel(shades.below)
    axis.set_title(shades.title[-100:], fontsize=8)
    try:
        canvas.savefig(plot)
    except OSError as error:
        raise UsageError(f"--plot={str(plot)!r}: {error.strerror or error}") from error


def logarithmic_block(value: float | None, known: Iterable[float]) -> str:
    """Return a block character for a value, by its place between the extremes of known ones.

    >>> "".join(logarithmic_block(value, [0.001, 1.0]) for value in (0.0, 0.001, 0.1, 1.0))
    ' ░▓█'
    """
    above = [one for one in known if one > 0]
    if value is None or not value > 0 or not above:
        return _BLOCKS[0]
    low, high = math.log(min(above)), math.log(max(above))
    share = 1.0 if high <= low else (math.log(value) - low) / (high - low)
    return _BLOCKS[1 + round(min(max(share, 0.0), 1.0) * (len(_BLOCKS) - 2))]


def bars(counts: Sequence[int]) -> str:
    """Return a bar of block characters for each count, the largest one full.

    >>> bars([0, 1, 50, 100])
    ' ▁▄█'
    """
    largest = max(counts, default=0)
    return "".join(_BARS[-(-8 * count // largest)] if count else " " for count in counts)
