"""Choice of the best checkpoint by a recorded metric: `best`, `best:val/loss`, `best:val/acc:max`.

A pure function of manifests. Which metric is meant, and whether low or high values are good, is
what the run's newest checkpoint records of its rules `Best`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import NoCheckpoint
from holdfast.format.manifest import Manifest, Mode, WatchedMetric
from holdfast.policy.direction import mode_for

BEST = "best"
_PREFIX = f"{BEST}:"
_DEFAULT = "val/loss"
_MAX_NAMES = 10


def means_best(which: str) -> bool:
    """Whether a text names the best checkpoint: `best`, `best:METRIC` or `best:METRIC:max`."""
    return which == BEST or (which.startswith(_PREFIX) and len(which) > len(_PREFIX))


def best_of(newest_first: Sequence[Manifest], which: str, *, where: str) -> int:
    """Return the position of the best healthy checkpoint, of whole states if any has the metric."""
    watched = watched_for(newest_first, which, where=where)
    sign = 1 if watched.mode == "min" else -1
    ranked = [
        (bool(manifest.lacks), sign * value, manifest.order, position)
        for position, manifest in enumerate(newest_first)
        if math.isfinite(value := manifest.metrics.get(watched.metric, math.nan))
        and not manifest.unhealthy
    ]
    if not ranked:
        raise NoCheckpoint(
            f"{where}: no checkpoint for {which!r} in this run: none has the metric "
            f"{watched.metric!r}{_recorded(newest_first)}"
        )
    return min(ranked)[3]


def watched_for(newest_first: Sequence[Manifest], which: str, *, where: str) -> WatchedMetric:
    """Return the metric that `which` means, and its direction; see `best_of` for errors."""
    recorded = next((manifest.best for manifest in newest_first if manifest.best), ())
    if which == BEST:
        if recorded:
            return recorded[0]
        if any(_DEFAULT in manifest.metrics for manifest in newest_first):
            return WatchedMetric(metric=_DEFAULT, mode="min")
        raise NoCheckpoint(
            f"{where}: no checkpoint for {which!r} in this run. None has the tag 'best': "
            "`holdfast tag ROOT@step=N best` gives it to one. None records which metric "
            f"is meant: name one, as in best:METRIC:max{_recorded(newest_first)}"
        )
    metric, mode = _parsed(which)
    if mode is None:
        mode = next((watched.mode for watched in recorded if watched.metric == metric), None)
    mode = mode_for(metric, mode, what=repr(which), say=f"say {which}:max or {which}:min")
    return WatchedMetric(metric=metric, mode=mode)


def _parsed(which: str) -> tuple[str, Mode | None]:
    text = which.removeprefix(_PREFIX)
    metric, colon, mode = text.rpartition(":")
    if colon and metric and mode in ("min", "max"):
        return metric, "min" if mode == "min" else "max"
    return text, None


def _recorded(newest_first: Sequence[Manifest]) -> str:
    names = sorted({name for manifest in newest_first for name in manifest.metrics})
    if not names:
        return " (no checkpoint has any metric)"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f" (recorded: {', '.join(map(repr, names[:_MAX_NAMES]))}{more})"
