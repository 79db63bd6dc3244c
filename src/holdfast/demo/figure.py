"""Plot of the demo: the loss curves of both runs, and the steps of the killed run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.demo.record import DemoRecord, ProcessRecord, RunRecord
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHING = 0.9
_CALM, _DARK, _RED, _GREEN = "#9ecae1", "#08306b", "#cb181d", "#238b45"


def check_library() -> None:
    """Raise `UsageError` if matplotlib is missing; called before the demo trains."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("the demo draws with matplotlib: pip install 'holdfast[demo]'") from error


def draw(record: DemoRecord, path: Path) -> None:
    """Write the plot to `path`, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[1.0, 1.1])
    _draw_losses(above, record)
    _draw_progress(below, record.killed)
    verdict = "the same run, bit for bit" if record.is_identical else "THE RUNS DIFFER"
    figure.suptitle(f"Killed and resumed {record.killed.num_kills} times: {verdict}")
    figure.savefig(path)


def _draw_losses(axes: Axes, record: DemoRecord) -> None:
    styles = ((record.undisturbed, _CALM, 5.0), (record.killed, _DARK, 1.2))
    for run, color, width in styles:
        steps = sorted(run.losses)
        losses = _smoothed([run.losses[step] for step in steps])
        axes.plot(steps, losses, label=run.name, color=color, linewidth=width)
    for number, life in enumerate(_killed(record.killed), start=1):
        axes.axvline(life.reached, color=_RED, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"kill {number}" + (" (in a save)" if life.killed_in_save is not None else ""),
            (life.reached, 1.0 - 0.08 * number),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=_RED,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte (smoothed)")
    axes.set_xlim(left=0)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.8), frameon=False)


def _draw_progress(axes: Axes, run: RunRecord) -> None:
    """Draw the step over time: it climbs, falls back at each resume, and climbs again."""
    begin_s = run.lives[0].began_s
    for life in run.lives:
        climb = [(life.steps[0][0], life.began_at), *((at, step) for at, step, _ in life.steps)]
        axes.plot([at - begin_s for at, _ in climb], [s for _, s in climb], color=_DARK)
        saves = [(at - begin_s, step) for at, step in life.saves]
        axes.plot(*_columns(saves), "o", color=_DARK, markersize=4)
    ends = [(life.steps[-1][0] - begin_s, life.reached) for life in _killed(run)]
    starts = [(life.steps[0][0] - begin_s, life.began_at) for life in run.lives[1:]]
    for end, start in zip(ends, starts, strict=True):
        axes.annotate("", start, end, arrowprops={"arrowstyle": "->", "color": _RED})
    axes.plot([], [], "o-", color=_DARK, markersize=4, label="training, and its checkpoints")
    axes.plot(*_columns(ends), "X", color=_RED, markersize=11, label="SIGKILL")
    axes.plot(*_columns(starts), "^", color=_GREEN, markersize=9, label="resumed here")
    for life, (at, step) in zip(run.lives[1:], starts, strict=True):
        note = f"step {life.began_at}"
        if life.rejected:
            note += f"\n{len(life.rejected)} rejected:\na bit was flipped"
        axes.annotate(note, (at, step), xytext=(8, -4), textcoords="offset points", va="top")
    axes.set_xlabel("seconds, starts of processes included")
    axes.set_ylabel("step")
    axes.margins(x=0.06)
    axes.legend(loc="upper left", frameon=False)


def _columns(points: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [at for at, _ in points], [step for _, step in points]


def _killed(run: RunRecord) -> list[ProcessRecord]:
    return [life for life in run.lives if life.was_killed]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Compute an exponential moving average, corrected for its start at zero."""
    smooth, weight, result = 0.0, 0.0, []
    for value in values:
        smooth = _SMOOTHING * smooth + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(smooth / weight)
    return result
