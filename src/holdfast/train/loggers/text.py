"""Texts about a training for people: its model, its saves, numbers and times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.checkpoints import Checkpoints
from holdfast.ownership.tiered_options import Tiered
from holdfast.train.callbacks.measuring import parts_of

MAX_ROWS = 12
"""Most modules that a summary lists."""


def summary(model: nn.Module, checkpoints: Checkpoints) -> list[str]:
    """Describe a model by its parts, and what will be saved where, when and for how long."""
    return [*_model_lines(model), _saves_line(checkpoints)]


def _model_lines(model: nn.Module) -> list[str]:
    children = dict(model.named_children())
    parts = {name: _count_parameters(weights) for name, weights in parts_of(model).items()}
    total, trained = (sum(sizes[at] for sizes in parts.values()) for at in (0, 1))
    lines = [f"{type(model).__name__}: {total:,} parameters, {trained:,} trainable"]
    rows = [
        (name, type(children[name]).__name__ if name in children else "", *sizes)
        for name, sizes in parts.items()
    ]
    shown = rows[:MAX_ROWS]
    if len(shown) > 1 or any(kind for _, kind, *_ in shown):
        names, kinds = (max(len(str(row[at])) for row in shown) for at in (0, 1))
        digits = max(len(f"{row[2]:,}") for row in shown)
        for name, kind, num, num_trained in shown:
            note = "" if num == num_trained else f"  {num_trained:,} trainable"
            lines.append(f"  {name:{names}}  {kind:{kinds}}  {num:>{digits},}{note}".rstrip())
    if len(rows) > MAX_ROWS:
        rest = sum(row[2] for row in rows[MAX_ROWS:])
        lines.append(f"  and {len(rows) - MAX_ROWS} more  {rest:,}")
    return lines


def _count_parameters(weights: Sequence[nn.Parameter]) -> tuple[int, int]:
    made = [weight for weight in weights if not is_lazy(weight)]
    trained = [weight.numel() for weight in made if weight.requires_grad]
    return sum(weight.numel() for weight in made), sum(trained)


def _saves_line(checkpoints: Checkpoints) -> str:
    if checkpoints.root is None:
        return "saves: none (checkpoints=None)"
    every, keep = checkpoints.every, checkpoints.keep
    when = "at the end" if every is None else f"{_when(every)}, and at the end"
    kept = "all are kept" if keep is None else f"kept: {keep}"
    others = "".join(f"; saver {saver.name}" for saver in checkpoints.savers)
    return f"saves: to {_describe_root(checkpoints.root)} {when}; {kept}{others}"


def _when(every: Any) -> str:
    if isinstance(every, str):
        return "at intervals that are measured" if every == "auto" else f"every {every}"
    if callable(every):
        return f"when {getattr(every, '__name__', type(every).__name__)} says so"
    return str(every)


def _describe_root(root: Any) -> str:
    if isinstance(root, Tiered):
        return f"{_describe_root(root.local)}, then {_describe_root(root.remote)}"
    if isinstance(root, str | os.PathLike):
        return os.fspath(root)
    return str(getattr(root, "url", root))


def short(value: float) -> str:
    """Format a count for people: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def format_nbytes(nbytes: float) -> str:
    """Format a number of bytes for people."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a duration for people: 0:07, 12:34, 3:02:01, 2d 3:02:01."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    head = f"{days}d " if days else ""
    return f"{head}{hours}:{minutes:02}:{rest:02}" if head or hours else f"{minutes}:{rest:02}"
