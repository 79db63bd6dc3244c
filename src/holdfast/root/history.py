"""Reads the history of a run: the metrics of all steps, saves, deletions, and rollbacks.

The history outlives the checkpoints (docs/format.md, section 7). Reads only, without torch.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from holdfast.errors import FormatError, NotFound, SealError
from holdfast.format import layout
from holdfast.format.history import MAX_SEGMENT_NBYTES, HistoryEvent, HistorySegment, HistorySession
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Reference
from holdfast.format.records import WriterRecord
from holdfast.root.documents import read_document, read_if_there
from holdfast.store.base import Store

_READERS = 16
_STEP = re.compile(r"step-(\d{1,18})\b", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCurve:
    """Values of one metric, by ascending step."""

    steps: Sequence[int]
    times: Sequence[float]
    """Seconds since 1970 (UTC) at which each value was recorded."""
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Steps of a session that a rollback, or the resume after a crash, has left behind."""

    epoch: int
    from_step: int
    """The last step that it shares with the run as it is now."""
    curves: Mapping[str, HistoryCurve]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStart:
    """Start of a session that recorded something, or that has a claim."""

    epoch: int
    step: int
    """Step from which it resumed; 0 in a new run."""
    resumed_from: str | None
    """Folder of that checkpoint."""
    is_in_lineage: bool
    """Whether the run as it is now continues from steps of this session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySave:
    """A save that committed, and the deletion of its checkpoint."""

    folder: str
    epoch: int
    step: int | None
    saved_s: float | None
    """Seconds since 1970 (UTC); None, like the next two, if only its deletion was recorded."""
    reason: str
    save_class: str
    nbytes: int
    deleted_s: float | None = None
    """Seconds since 1970 (UTC); None: no deletion was recorded."""
    deleted_why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSave:
    """A save that failed."""

    epoch: int
    step: int | None
    failed_s: float
    """Seconds since 1970 (UTC)."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """Metrics, saves and deletions of a run since its first step."""

    curves: Mapping[str, HistoryCurve]
    """By metric, the values of the run as it is now: of each session up to the step from which
    the next one resumed."""
    branches: tuple[Branch, ...] = ()
    """What was left behind, oldest first."""
    starts: tuple[HistoryStart, ...] = ()
    """Sessions, oldest first."""
    saves: tuple[HistorySave, ...] = ()
    """In the order of commits."""
    failures: tuple[FailedSave, ...] = ()
    every: int = 1
    """In the oldest part, at least one row of so many is left; 1: all are there."""
    unread: tuple[tuple[str, str], ...] = ()
    """(key, why) of segments that cannot be read; their values are missing."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded, as by earlier releases."""
        return not (self.curves or self.branches or self.saves or self.failures)


def read_history(store: Store) -> RunHistory:
    """Read the history of the run in a root; empty if there is none.

    Raises:
        StoreError: the store cannot be read.
    """
    return HistoryReader(store).read_history()


class HistoryReader:
    """Reader of one run's history, which reads again only what has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[int, HistorySegment | str]] = {}
        """Segment or error, by key, with the length at which it was read: an open one grows."""
        self._claims: dict[int, WriterRecord | None] = {}

    def read_segments(self) -> dict[str, HistorySegment | str]:
        """Read all segments by name, or the reason why one cannot be read."""
        prefix = f"{layout.HISTORY}/"
        listed = {
            info.key: info.nbytes
            for info in self._store.list(prefix)
            if layout.parse_history(info.key.removeprefix(prefix)) is not None
        }
        for key in [key for key in self._known if key not in listed]:
            del self._known[key]
        changed = [key for key in listed if self._known.get(key, (-1,))[0] != listed[key]]
        for key, found in zip(changed, self._read_each(changed), strict=True):
            if found is not None:
                self._known[key] = listed[key], found
        return {key.removeprefix(prefix): found for key, (_, found) in self._known.items()}

    def read_history(self) -> RunHistory:
        """Read the history as it is now; empty if there is none.

        Raises:
            StoreError: the store cannot be read.
        """
        segments = self.read_segments()
        recorded: dict[int, _Recorded] = {}
        unread: list[tuple[str, str]] = []
        for name in sorted(segments):
            segment = segments[name]
            if isinstance(segment, str):
                unread.append((f"{layout.HISTORY}/{name}", segment))
                continue
            for session in segment.sessions:
                recorded.setdefault(session.epoch, _Recorded()).add_session(session)
        for event in [event for one in recorded.values() for event in one.events]:
            of = layout.parse_attempt(event.folder) if event.metrics else None
            if of is not None and of.epoch in recorded:
                recorded[of.epoch].add_later_metrics(event)
        saves = _collect_saves(recorded)
        starts = self._find_starts(recorded, {save.folder: save for save in saves})
        ends = _find_lineage(starts)
        curves = {epoch: one.curves() for epoch, one in recorded.items()}
        return RunHistory(
            curves=_join_curves(curves, ends),
            branches=tuple(_find_branches(curves, starts, ends)),
            starts=tuple(
                HistoryStart(
                    epoch=epoch,
                    step=step,
                    resumed_from=None if point is None else point.folder,
                    is_in_lineage=epoch in ends,
                )
                for epoch, (step, point) in starts.items()
            ),
            saves=tuple(saves),
            failures=tuple(
                FailedSave(epoch=epoch, step=event.step, failed_s=event.time, why=event.why)
                for epoch, of_epoch in sorted(recorded.items())
                for event in of_epoch.events
                if event.what == "failed"
            ),
            every=max((one.every for one in recorded.values()), default=1),
            unread=tuple(unread),
        )

    def _read_each(self, keys: Sequence[str]) -> Iterator[HistorySegment | str | None]:
        """Read segments, in threads if reads wait for a network; None: merged meanwhile."""
        if self._store.has_folders or len(keys) < 2:
            yield from map(self._read, keys)
            return
        with ThreadPoolExecutor(_READERS, "holdfast-history") as pool:
            yield from pool.map(self._read, keys)

    def _read(self, key: str) -> HistorySegment | str | None:
        try:
            data = read_document(self._store, key, max_nbytes=MAX_SEGMENT_NBYTES)
            return HistorySegment.decode(data, what=f"{self._store.url}/{key}")
        except NotFound:
            return None
        except (FormatError, SealError) as error:
            return str(error)

    def _find_starts(
        self, recorded: Mapping[int, _Recorded], saves: Mapping[str, HistorySave]
    ) -> dict[int, tuple[int, Reference | None]]:
        """Return step and checkpoint from which each session of a training began, oldest first.

        A session that has recorded nothing yet is known by its claim.
        """
        found = {
            epoch: (one.from_step, one.resumed_from)
            for epoch, one in recorded.items()
            if one.has_rows
        }
        names = self._store.children(layout.WRITERS)
        # Those of commands, such as a deletion, are closed.
        closed = {layout.parse_closed(name) for name in names}
        for name in names:
            epoch = layout.parse_writer(name)
            claim = None if epoch is None or epoch in found else self._claim(epoch)
            if claim is None or (epoch in closed and not claim.rollback):
                continue
            step = _step_of(claim.resumed_from, saves)
            if step is not None:
                found[claim.epoch] = (step, claim.resumed_from)
        return dict(sorted(found.items()))

    def _claim(self, epoch: int) -> WriterRecord | None:
        if epoch not in self._claims:
            try:
                found = read_if_there(self._store, layout.writer_key(epoch), WriterRecord.decode)
            except FormatError:
                found = None
            self._claims[epoch] = found
        return self._claims[epoch]


class _Recorded:
    """Rows and events of one epoch, from all segments."""

    def __init__(self) -> None:
        self.resumed_from: Reference | None = None
        self.from_step, self.every = 0, 1
        self._events: dict[tuple[str, str, float], HistoryEvent] = {}
        self._parts: dict[str, list[HistoryCurve]] = {}

    @property
    def has_rows(self) -> bool:
        """Whether a metric was recorded."""
        return bool(self._parts)

    @property
    def events(self) -> list[HistoryEvent]:
        """Saves and deletions, by time."""
        return sorted(self._events.values(), key=lambda event: event.time)

    def add_session(self, session: HistorySession) -> None:
        """Add what one segment has; it may be known from another one already."""
        self.resumed_from, self.from_step = session.resumed_from, session.from_step
        self.every = max(self.every, session.every)
        for event in session.events:
            self._events[event.what, event.folder, event.time] = event
        for rows in session.rows:
            for name, column in zip(rows.names, rows.values, strict=True):
                part = HistoryCurve(
                    steps=array("q", rows.steps),
                    times=array("d", rows.times),
                    values=array("d", map(float, column)),
                )
                self._parts.setdefault(name, []).append(part)

    def add_later_metrics(self, event: HistoryEvent) -> None:
        """Add the metrics that a deleted checkpoint of this epoch got after its save."""
        for name, value in event.metrics.items():
            part = HistoryCurve(
                steps=array("q", [event.step or 0]),
                times=array("d", [event.time]),
                values=array("d", [float(value)]),
            )
            self._parts.setdefault(name, []).append(part)

    def curves(self) -> dict[str, HistoryCurve]:
        """Join the parts of each metric; of values of one step, the last one counts."""
        return {name: _join_parts(parts) for name, parts in self._parts.items() if parts}


def _join_parts(parts: Sequence[HistoryCurve]) -> HistoryCurve:
    steps = np.concatenate([np.asarray(part.steps, np.int64) for part in parts])
    times = np.concatenate([np.asarray(part.times, np.float64) for part in parts])
    values = np.concatenate([np.asarray(part.values, np.float64) for part in parts])
    order = np.lexsort((times, steps))
    ordered = steps[order]
    last = order[np.diff(ordered, append=ordered[-1:] + 1) != 0]
    return HistoryCurve(
        steps=array("q", steps[last].tobytes()),
        times=array("d", times[last].tobytes()),
        values=array("d", values[last].tobytes()),
    )


def _find_lineage(starts: Mapping[int, tuple[int, Reference | None]]) -> dict[int, float]:
    """Return the epochs from whose steps the run continues, and the last such step of each."""
    ends: dict[int, float] = {}
    epoch, end = max(starts, default=0), math.inf
    while epoch in starts:
        ends[epoch] = end
        step, point = starts[epoch]
        if point is None or point.epoch >= epoch:
            break
        epoch, end = point.epoch, min(end, step)
    return ends


def _join_curves(
    curves: Mapping[int, Mapping[str, HistoryCurve]], ends: Mapping[int, float]
) -> dict[str, HistoryCurve]:
    parts: dict[str, list[HistoryCurve]] = {}
    for epoch in sorted(ends):
        for name, curve in curves.get(epoch, {}).items():
            cut = _cut_curve(curve, last=ends[epoch])
            if cut.steps:
                parts.setdefault(name, []).append(cut)
    return {name: _join_parts(found) for name, found in parts.items()}


def _find_branches(
    curves: Mapping[int, Mapping[str, HistoryCurve]],
    starts: Mapping[int, tuple[int, Reference | None]],
    ends: Mapping[int, float],
) -> Iterator[Branch]:
    for epoch, (start, _) in starts.items():
        shared = ends.get(epoch, start)
        left = {
            name: _cut_curve(curve, after=shared)
            for name, curve in sorted(curves.get(epoch, {}).items())
        }
        left = {name: curve for name, curve in left.items() if curve.steps}
        if left:
            yield Branch(epoch=epoch, from_step=int(shared), curves=left)


def _cut_curve(curve: HistoryCurve, *, after: float = -1, last: float = math.inf) -> HistoryCurve:
    part = slice(bisect_right(curve.steps, after), bisect_right(curve.steps, last))
    return HistoryCurve(steps=curve.steps[part], times=curve.times[part], values=curve.values[part])


def _collect_saves(recorded: Mapping[int, _Recorded]) -> list[HistorySave]:
    """Match saves and deletions by the folder; the epoch is that of the save."""
    found: dict[AttemptName, HistorySave] = {}
    events = [event for one in recorded.values() for event in one.events if not event.tier]
    for event in sorted(events, key=lambda event: event.what == "deleted"):
        name = layout.parse_attempt(event.folder)
        if name is None:
            continue
        is_saved = event.what == "saved"
        if is_saved or name not in found:
            found[name] = HistorySave(
                folder=event.folder,
                epoch=name.epoch,
                step=event.step,
                saved_s=event.time if is_saved else None,
                reason=event.why if is_saved else "",
                save_class=event.save_class,
                nbytes=event.nbytes,
            )
        if not is_saved:
            found[name] = replace(found[name], deleted_s=event.time, deleted_why=event.why)
    return [found[name] for name in sorted(found)]


def _step_of(point: Reference | None, saves: Mapping[str, HistorySave]) -> int | None:
    """Return the step of a checkpoint, as recorded or as its label says; None if neither does."""
    if point is None:
        return 0
    save = saves.get(point.folder)
    if save is not None and save.step is not None:
        return save.step
    named = _STEP.match(point.folder)
    return None if named is None else int(named[1])
