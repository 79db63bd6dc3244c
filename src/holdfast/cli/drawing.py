"""Line plots with marks, as SVG, as HTML around it, as PNG, and as text for terminals.

Knows nothing of runs: draws panels of series over one common axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from holdfast.cli.output import one_line
from holdfast.errors import UsageError

Point = tuple[float, float]

WIDTH, HEIGHT = 860, 220
"""Pixels of a panel's area for its axes."""
_LEFT, _TOP, _GAP = 80, 40, 50
_COLORS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")
_MAX_POINTS = 2_000
"""Most points of a series that are drawn; of more, the extremes of each stretch are."""
_TEXT_ROWS = 9
_LABEL = 11
"""Characters of the labels at the left of a plot of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one quantity over steps."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Series that share an axis."""

    title: str
    series: Sequence[Series]

    @property
    def points(self) -> list[Point]:
        """All points with a finite value."""
        return [point for one in self.series for point in one.points if math.isfinite(point[1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Steps at which something happened, drawn in all panels."""

    name: str
    steps: Sequence[float]
    color: str
    letter: str
    """Its sign in a plot of text."""
    is_line: bool
    """Whether it is a line across the panel, not a tick at its foot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels one above the other, and marks."""

    title: str
    panels: Sequence[Panel]
    marks: Sequence[Mark]

    @property
    def span(self) -> tuple[float, float]:
        """First and last step, of points and marks."""
        steps = [x for panel in self.panels for x, _ in panel.points]
        steps += [x for mark in self.marks for x in mark.steps]
        return (min(steps), max(steps)) if steps else (0.0, 1.0)


def write(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the name's ending says."""
    kinds = {".svg": svg, ".html": html}
    try:
        if path.suffix == ".png":
            _write_png(figure, path)
        elif path.suffix in kinds:
            path.write_text(kinds[path.suffix](figure), encoding="utf-8")
        else:
            raise UsageError(f"--output={str(path)!r}: must end in .svg, .html or .png")
    except OSError as error:
        raise UsageError(f"--output={str(path)!r}: {error.strerror or error}") from error


def html(figure: Figure) -> str:
    """Return a page with the figure."""
    title = escape(figure.title)
    return (
        f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body>\n{svg(figure)}</body></html>\n"
    )


def svg(figure: Figure) -> str:
    """Return the figure as SVG."""
    height = _TOP + len(figure.panels) * (HEIGHT + _GAP) + 20
    width = _LEFT + WIDTH + 20
    body = "".join(
        _panel(panel, figure, _TOP + number * (HEIGHT + _GAP))
        for number, panel in enumerate(figure.panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(figure.title)}</text>\n'
        f"{body}{_key(figure.marks, height - 12)}</svg>\n"
    )


def _panel(panel: Panel, figure: Figure, top: float) -> str:
    x_range = figure.span
    y_range = _range(panel.points)

    def x_at(value: float) -> float:
        return _LEFT + WIDTH * _fraction(value, x_range)

    def y_at(value: float) -> float:
        return top + HEIGHT * (1 - _fraction(value, y_range))

    lines = [
        f'<rect x="{_LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
    ]
    for value in ticks(*y_range):
        lines.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + WIDTH}" y1="{y_at(value):.1f}" '
            f'y2="{y_at(value):.1f}" stroke="#eee"/>'
            f'<text x="{_LEFT - 6}" y="{y_at(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    for value in ticks(*x_range):
        lines.append(
            f'<text x="{x_at(value):.1f}" y="{top + HEIGHT + 15}" text-anchor="middle">'
            f"{value:.10g}</text>"
        )
    for mark in figure.marks:
        for step in mark.steps:
            upper = top if mark.is_line else top + HEIGHT - 8
            dashes = ' stroke-dasharray="4 3"' if mark.is_line else ""
            lines.append(
                f'<line x1="{x_at(step):.1f}" x2="{x_at(step):.1f}" y1="{upper}" '
                f'y2="{top + HEIGHT}" stroke="{mark.color}"{dashes}>'
                f"<title>{escape(mark.name)} at step {step:.10g}</title></line>"
            )
    at = float(_LEFT)
    for number, one in enumerate(panel.series):
        color = _COLORS[number % len(_COLORS)]
        for stretch in _stretches(thinned(one.points)):
            where = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in stretch)
            lines.append(f'<polyline points="{where}" fill="none" stroke="{color}"/>')
            if len(stretch) == 1:
                x, y = stretch[0]
                lines.append(
                    f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2" fill="{color}"/>'
                )
        lines.append(f'<text x="{at}" y="{top - 6}" fill="{color}">{escape(one.name)}</text>')
        at += 12 + 7 * len(one.name)
    return "\n".join(lines) + "\n"


def _key(marks: Sequence[Mark], y: float) -> str:
    at, found = float(_LEFT), []
    for mark in marks:
        if mark.steps:
            text = f"{mark.name} ({len(mark.steps)})"
            found.append(f'<text x="{at}" y="{y}" fill="{mark.color}">| {escape(text)}</text>\n')
            at += 30 + 7 * len(text)
    return "".join(found)


def text(figure: Figure, width: int) -> Iterator[str]:
    """Yield the lines of a plot of characters, `width` of them wide."""
    num_columns = max(width - _LABEL - 2, 10)
    span = figure.span

    def column(step: float) -> int:
        return round(_fraction(step, span) * (num_columns - 1))

    for panel in figure.panels:
        yield ", ".join(one_line(one.name, width) for one in panel.series)
        yield from _rows(panel, column, num_columns)
        for mark in figure.marks:
            if mark.steps:
                row = [" "] * num_columns
                for step in mark.steps:
                    row[column(step)] = mark.letter
                yield f"{mark.name[:_LABEL]:>{_LABEL}}  {''.join(row)}".rstrip()
        first, last = f"{span[0]:.10g}", f"{span[1]:.10g}"
        yield f"{'step':>{_LABEL}}  {first}{last:>{max(num_columns - len(first), 0)}}"
        yield ""


def _rows(panel: Panel, column: Callable[[float], int], num_columns: int) -> Iterator[str]:
    low, high = y_range = _range(panel.points)
    grid = [[" "] * num_columns for _ in range(_TEXT_ROWS)]
    for number, one in enumerate(panel.series):
        for x, y in one.points:
            if math.isfinite(y):
                row = _TEXT_ROWS - 1 - round(_fraction(y, y_range) * (_TEXT_ROWS - 1))
                grid[row][column(x)] = "·+×o"[number % 4]
    labels: Mapping[int, float] = {0: high, _TEXT_ROWS // 2: (low + high) / 2, _TEXT_ROWS - 1: low}
    for row, cells in enumerate(grid):
        label = f"{labels[row]:.4g}" if row in labels else ""
        yield f"{label:>{_LABEL}} |{''.join(cells)}".rstrip()


def _write_png(figure: Figure, path: Path) -> None:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UsageError(
            f"--output={str(path)!r}: PNG needs matplotlib: pip install 'holdfast-torch[demo]', "
            "or give a name that ends in .svg or .html"
        ) from None
    canvas = Canvas(figsize=(10, 3 * len(figure.panels)), layout="constrained")
    canvas.suptitle(figure.title)
    axes = canvas.subplots(len(figure.panels), sharex=True, squeeze=False)[:, 0]
    for panel, axis in zip(figure.panels, axes, strict=True):
        for one in panel.series:
            axis.plot(*zip(*thinned(one.points), strict=True), label=one.name)
        for mark in figure.marks:
            for step in mark.steps:
                axis.axvline(step, 0, 1 if mark.is_line else 0.04, color=mark.color, linestyle="--")
        axis.legend()
    canvas.savefig(path)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from `low` to `high`, at most so many.

    >>> ticks(0, 950)
    [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    size = (high - low) / (most - 1)
    if not size > 0 or not math.isfinite(size):
        return [low]
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = _MAX_POINTS) -> list[Point]:
    """Return the points, or of many the lowest and the highest of each stretch, in order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        found += sorted({lowest, highest})
    return found


def _stretches(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield runs of points without a gap by a value that is not finite."""
    stretch: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            stretch.append(point)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _range(points: Sequence[Point]) -> tuple[float, float]:
    values = [y for _, y in points] or [0.0]
    low, high = min(values), max(values)
    if low < high:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _fraction(value: float, span: tuple[float, float]) -> float:
    low, high = span
    if math.isinf(high - low):
        value, low, high = value / 2, low / 2, high / 2
    return 0.5 if high <= low else (value - low) / (high - low)
