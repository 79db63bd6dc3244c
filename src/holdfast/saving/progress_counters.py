"""Training progress of a run: its counters and training time, continued at a resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from holdfast.errors import UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import MAX_COUNT, Manifest, Timestamp
from holdfast.policy.clock import Odometer
from holdfast.policy.schedule import SaveSchedule
from holdfast.root.catalog import Catalog, Entry

_COUNTERS = frozenset({"epoch", "cycle", "samples", "tokens"})
_TOTALS = ("step", *sorted(_COUNTERS))
Counters = Callable[[], Mapping[str, int | None]]
"""Callback that returns `epoch`, `cycle`, `samples` and `tokens` if a call does not give them."""


class ProgressClock:
    """Clock of one manager: counters and training time, continued from a checkpoint's record."""

    def __init__(
        self, catalog: Catalog, schedule: SaveSchedule, counters: Counters | None, emit: Emitter
    ) -> None:
        self._catalog = catalog
        self._emit = emit
        self._before: Timestamp | None = None
        self._has_warned = False
        self.unsaved: int | None = None
        """The newest step given to `now`, unless a save or a load came after it."""
        self._schedule = schedule
        self._counters: Counters = counters if counters is not None else dict
        self._odometer = Odometer()
        self._wall_before_s = 0.0
        self._started = time.monotonic()

    @property
    def newest_step(self) -> int:
        """The newest step that was given to `now` or resumed."""
        return 0 if self._before is None else self._before.step

    def now(
        self,
        step: int,
        *,
        epoch: int | None,
        cycle: int | None,
        samples: int | None,
        tokens: int | None,
    ) -> Timestamp:
        """Build the current timestamp: the counters, also those within the epoch and the cycle."""
        known = self._counters()
        if known:
            if not known.keys() <= _COUNTERS:
                wrong = sorted(known.keys() - _COUNTERS)
                raise UsageError(f"counters: {wrong} are none of {sorted(_COUNTERS)}")
            epoch = known.get("epoch") if epoch is None else epoch
            cycle = known.get("cycle") if cycle is None else cycle
            samples = known.get("samples") if samples is None else samples
            tokens = known.get("tokens") if tokens is None else tokens
        if not _is_count(step):
            raise _count_error("step", step)
        for value in (epoch, cycle, samples, tokens):
            if value is not None and not _is_count(value):
                given = {"epoch": epoch, "cycle": cycle, "samples": samples, "tokens": tokens}
                raise _count_error(next(n for n, v in given.items() if v is value), value)
        now = Timestamp(
            step=step,
            epoch=epoch,
            cycle=cycle,
            samples=samples,
            tokens=tokens,
            wall_s=self._wall_before_s + time.monotonic() - self._started,
        )
        if self._before is not None and not self._has_warned:
            self._warn_if_less(self._before, now)
        self._before, self.unsaved = now, step
        return self._odometer.count_within_rounds(now)

    def _warn_if_less(self, before: Timestamp, now: Timestamp) -> None:
        """Warn, once, if a counter decreased: each must be a total over the whole run."""
        for name in _TOTALS:
            was, is_ = getattr(before, name), getattr(now, name)
            if was is not None and is_ is not None and is_ < was:
                self._has_warned = True
                self._emit(
                    "warning",
                    f"{name}={is_} is less than {was}, the last value of the run: keep "
                    "counting from the value that resume() returns, over all epochs",
                )

    def continue_from_entry(self, entry: Entry) -> None:
        """Continue counters, training time and save intervals from a checkpoint."""
        now = entry.manifest.timestamp
        self._odometer.restore_counts(now)
        self._continue_from(now, (save.manifest for save in self._saves_up_to(entry)))

    def count_from(self, now: Timestamp) -> None:
        """Continue counters and training time from `now`, with no earlier saves in this root."""
        if now.step:  # at step 0 the new odometer is right already
            self._odometer.restore_counts(now)
        self._continue_from(now, ())

    def loaded(self) -> None:
        """Record that weights were loaded: even without a checkpoint, the run has started."""
        if self._before is None:
            self._continue_from(Timestamp(step=0), ())

    def _continue_from(self, now: Timestamp, saves: Iterable[Manifest]) -> None:
        self._before, self.unsaved = now, None
        self._schedule.resume_schedule(now, saves)
        self._wall_before_s, self._started = now.wall_s, time.monotonic()

    def _saves_up_to(self, entry: Entry) -> Iterable[Entry]:
        """Return a checkpoint and, if the schedule needs them, the older ones of the lineage."""
        if not self._schedule.needs_earlier_saves():
            return [entry]
        found = self._catalog.lineage_entries(opens_all=False)
        return [entry, *(before for before in found if before.order < entry.order)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_COUNT and not isinstance(value, bool)


def _count_error(name: str, value: object) -> UsageError:
    """Build the error of a value that is not a count."""
    is_large = isinstance(value, int) and value > MAX_COUNT
    most = f" and at most {MAX_COUNT}" if is_large else ""
    return UsageError(f"{name}={value!r} must be a whole number, at least 0{most}")
