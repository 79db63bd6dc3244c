"""Writes the history of a run: the open segment of a claim, and merges of older segments.

Only the owner of a claim puts segments under its epoch. The open one is replaced whole, so none is
ever torn; the next number begins when it is large. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from holdfast.arguments import escaped
from holdfast.errors import FormatError, NotFound
from holdfast.format import layout
from holdfast.format.history import (
    MAX_SEGMENT_NBYTES,
    HistoryEvent,
    HistorySegment,
    HistorySession,
    MetricRows,
    Number,
    to_number,
)
from holdfast.format.manifest import Reference
from holdfast.root.documents import read_document
from holdfast.store.base import Store

OPEN_NBYTES = 256 * 1024
"""Length at which the next segment begins."""
MERGED_NBYTES = 3 * OPEN_NBYTES
"""Most bytes of a segment into which others were merged."""
MAX_SMALL = 32
"""Most segments of less than half of `MERGED_NBYTES`; more are merged."""
MAX_HISTORY_NBYTES = 64 * 1024 * 1024
"""Most bytes of all segments; beyond it every second row of the oldest half is dropped."""
MAX_WAITING = 200_000
"""Most rows that wait in memory while the storage fails; then the oldest are dropped."""
_ROW_NBYTES, _VALUE_NBYTES, _NAME_NBYTES = 40, 25, 6


@dataclass(slots=True)
class _OpenRows:
    """Columns of the rows with values for the same metrics."""

    names: tuple[str, ...]
    rest: tuple[str, ...] = ()
    """Names of the same row that did not fit into a segment with these."""
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[list[Number]] = field(default_factory=list)


class HistoryWriter:
    """Writer of what one claim records."""

    def __init__(
        self,
        store: Store,
        *,
        epoch: int,
        nonce: str,
        resumed_from: Reference | None,
    ) -> None:
        """Write under the claim of this epoch and nonce, which resumed from that checkpoint.

        The folder must exist.
        """
        self._store = store
        self._session = HistorySession(
            epoch=epoch, nonce=nonce, resumed_from=resumed_from, from_step=0
        )
        self.from_step = 0
        """Step of the checkpoint that the claim resumed from."""
        self._last_number = 0
        self._waiting: deque[tuple[int, float, Mapping[str, float]]] = deque(maxlen=MAX_WAITING)
        self._is_changed = False
        self._begin_segment()

    def add_row(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add the metrics of a step, recorded at `time_s` seconds since 1970."""
        self._waiting.append((step, time_s, values))

    @property
    def number(self) -> int:
        """Number of the open segment."""
        return self._number

    def add_event(self, event: HistoryEvent) -> None:
        """Add a save or a deletion."""
        self._events.append(event)
        self._nbytes += 100 + 6 * (len(event.folder) + len(event.why))
        self._is_changed = True

    def put_segments(self) -> None:
        """Put all that was added; after an error, a later call puts it.

        Raises:
            StoreError: a segment cannot be put.
        """
        self._fill_segment()
        while self._is_changed:
            session = msgspec.structs.replace(
                self._session,
                from_step=self.from_step,
                rows=_encode_rows(self._rows.values()),
                events=self._events,
            )
            self._put_segment(self._number, [session])
            self._is_changed = False
            if self._nbytes >= OPEN_NBYTES:
                self._begin_segment()
            self._fill_segment()

    def merge_segments(self) -> None:
        """Merge small segments and thin the oldest, if there are too many.

        The new segment is put before those that it replaces are deleted. After a kill between the
        two, readers find rows twice, which they join.

        Raises:
            StoreError: the store fails.
        """
        own = layout.history_key(self._session.epoch, self._number)
        sizes = list_segments(self._store, but=own)
        small = [key for key, nbytes in sizes.items() if nbytes < MERGED_NBYTES // 2]
        if len(small) > MAX_SMALL:
            for group in _group_keys(small, sizes):
                self._replace_segments(group)
            sizes = list_segments(self._store, but=own)
        excess_nbytes = sum(sizes.values()) + OPEN_NBYTES - MAX_HISTORY_NBYTES
        for key in self._list_oldest(sizes) if excess_nbytes > 0 else ():
            self._replace_segments([key], drops_half=True)
            excess_nbytes -= sizes[key] // 2
            if excess_nbytes < -MAX_HISTORY_NBYTES // 4:
                return

    def _begin_segment(self) -> None:
        self._number = self._take_number()
        self._rows: dict[tuple[str, ...], _OpenRows] = {}
        self._events: list[HistoryEvent] = []
        self._nbytes = 0

    def _take_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _fill_segment(self) -> None:
        """Move rows into the open segment until it is full."""
        while self._waiting and self._nbytes < OPEN_NBYTES:
            step, time_s, values = self._waiting.popleft()
            if (rows := self._rows.get(given := tuple(values))) is None:
                names, rest = _fit_names(given)
                rows = self._rows[given] = _OpenRows(names=names, rest=rest)
                rows.values = [[] for _ in names]
                self._nbytes += sum(map(len, names)) * _NAME_NBYTES
            if rows.rest:
                self._waiting.appendleft((step, time_s, {name: values[name] for name in rows.rest}))
            rows.steps.append(step)
            rows.times.append(round(time_s, 3))
            for column, name in zip(rows.values, rows.names, strict=True):
                column.append(to_number(values[name]))
            self._nbytes += _ROW_NBYTES + _VALUE_NBYTES * len(rows.names)
            self._is_changed = True

    def _put_segment(self, number: int, sessions: Sequence[HistorySession]) -> None:
        data = HistorySegment(sessions=sessions).encode()
        self._store.put(layout.history_key(self._session.epoch, number), data)

    def _replace_segments(self, keys: Sequence[str], *, drops_half: bool = False) -> None:
        """Put one segment in the place of others, with all of their rows or with half of them."""
        read = {key: found for key in keys if (found := _read_segment(self._store, key))}
        sessions = [session for segment in read.values() for session in segment.sessions]
        if drops_half:
            sessions = [_drop_half(session) for session in sessions]
        if len(read) > 1 or (read and drops_half):
            self._put_segment(self._take_number(), [*_join_sessions(sessions)])
            self._store.delete_many([*read])

    def _list_oldest(self, keys: Iterable[str]) -> list[str]:
        """Sort segments by what they hold, oldest first."""
        found = []
        for key in keys:
            if (segment := _read_segment(self._store, key)) is not None:
                found.append((min(map(_order, segment.sessions), default=(0, 0)), key))
        return [key for _, key in sorted(found)]


def list_segments(store: Store, *, but: str = "") -> dict[str, int]:
    """List the length of each segment by key."""
    prefix = f"{layout.HISTORY}/"
    return {
        info.key: info.nbytes
        for info in store.list(prefix)
        if layout.parse_history(info.key.removeprefix(prefix)) is not None and info.key != but
    }


def copy_segments(source: Store, target: Store) -> dict[str, int]:
    """Copy intact segments that another root lacks or has shorter; return those of the source.

    Raises:
        StoreError: one of the stores fails.
    """
    known, found = list_segments(target), list_segments(source)
    changed = [key for key, nbytes in found.items() if nbytes > known.get(key, -1)]
    if changed:
        target.make_folder(layout.HISTORY)
    for key in changed:
        segment = _read_segment(source, key)
        if segment is not None and _is_of_same_claim(segment, _read_segment(target, key)):
            target.put(key, read_document(source, key, max_nbytes=MAX_SEGMENT_NBYTES))
    return found


def list_merged(keys: Iterable[str], source: Store, *, into: Store) -> list[str]:
    """List those of these segments of `source` whose rows and events another root has."""
    segments = {key: found for key in keys if (found := _read_segment(source, key)) is not None}
    known: dict[str, set[tuple[object, ...]]] = {}
    thinned: dict[str, int] = {}
    for key in list_segments(into) if segments else ():
        found = _read_segment(into, key)
        for session in found.sessions if found is not None else ():
            known.setdefault(session.nonce, set()).update(_list_records(session))
            thinned[session.nonce] = max(session.every, thinned.get(session.nonce, 0))

    def is_merged(session: HistorySession) -> bool:
        is_thinned = thinned.get(session.nonce, 0) > session.every
        return is_thinned or known.get(session.nonce, set()).issuperset(_list_records(session))

    return [key for key, segment in segments.items() if all(map(is_merged, segment.sessions))]


def _list_records(session: HistorySession) -> Iterator[tuple[object, ...]]:
    for part in session.rows:
        yield from (
            (name, *at) for at in zip(part.steps, part.times, strict=True) for name in part.names
        )
    yield from ((event.what, event.folder, event.time) for event in session.events)


def _is_of_same_claim(segment: HistorySegment, other: HistorySegment | None) -> bool:
    """Whether a segment may take the place of another: two roots may be claimed apart."""
    nonces = {session.nonce for session in segment.sessions}
    return other is None or nonces >= {session.nonce for session in other.sessions}


def _read_segment(store: Store, key: str) -> HistorySegment | None:
    try:
        data = read_document(store, key, max_nbytes=MAX_SEGMENT_NBYTES)
        return HistorySegment.decode(data, what=f"{store.url}/{key}")
    except (FormatError, NotFound):
        return None


def _group_keys(keys: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Divide segments, in order, into groups that fit into a merged one."""
    group: list[str] = []
    for key in sorted(keys):
        if group and sum(sizes[one] for one in group) + sizes[key] > MERGED_NBYTES:
            yield group
            group = []
        group.append(key)
    yield group


def _join_sessions(sessions: Iterable[HistorySession]) -> Iterator[HistorySession]:
    """Join parts of one session, and in it rows of the same metrics."""
    by_epoch: dict[tuple[int, str, int], list[HistorySession]] = {}
    for session in sessions:
        by_epoch.setdefault((session.epoch, session.nonce, session.every), []).append(session)
    for parts in by_epoch.values():
        rows: dict[tuple[str, ...], _OpenRows] = {}
        for part in (rows_ for session in parts for rows_ in session.rows):
            joined = rows.get(part.names)
            if joined is None:
                joined = rows[part.names] = _OpenRows(names=part.names)
                joined.values = [[] for _ in part.names]
            joined.steps += part.steps
            joined.times += part.times
            for column, more in zip(joined.values, part.values, strict=True):
                column += more
        yield msgspec.structs.replace(
            parts[0],
            rows=_encode_rows(rows.values()),
            events=[e for one in parts for e in one.events],
        )


def _encode_rows(rows: Iterable[_OpenRows]) -> list[MetricRows]:
    return [
        MetricRows(names=one.names, steps=one.steps, times=one.times, values=one.values)
        for one in rows
    ]


def _fit_names(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the first names, as many as fit into a segment with one row, and the rest.

    Without those that no segment can hold: no text, no Unicode, or too long.
    """
    given = (name for name in names if isinstance(name, str) and escaped(name) == name)
    sizes = {name: _VALUE_NBYTES + _NAME_NBYTES * len(name) for name in given}
    known = [name for name, nbytes in sizes.items() if nbytes <= MERGED_NBYTES]
    totals = accumulate(sizes[name] for name in known)
    number = sum(total <= MERGED_NBYTES for total in totals)
    return tuple(known[:number]), tuple(known[number:])


def _drop_half(session: HistorySession) -> HistorySession:
    """Drop every second row, and the events of every second checkpoint."""
    folders = sorted({event.folder for event in session.events})[::2]
    return msgspec.structs.replace(
        session,
        every=2 * session.every,
        rows=[
            MetricRows(
                names=part.names,
                steps=part.steps[::2],
                times=part.times[::2],
                values=[column[::2] for column in part.values],
            )
            for part in session.rows
        ],
        events=[event for event in session.events if event.folder in folders],
    )


def _order(session: HistorySession) -> tuple[int, int]:
    return session.epoch, min((part.steps[0] for part in session.rows if part.steps), default=0)
