"""`holdfast log`: the sessions of a run, what each has changed and what became of its saves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Literal

import msgspec

from holdfast.cli import options
from holdfast.cli.documents import (
    Document,
    Ending,
    Unopened,
    UnreadableCheckpoint,
    split_unread,
    unread_line,
)
from holdfast.cli.options import command, flag
from holdfast.cli.output import Answer, TextTable, format_nbytes, format_time
from holdfast.cli.target import open_root
from holdfast.encryption.store import bare
from holdfast.errors import FormatError, NotFound, SealError
from holdfast.format import layout
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.records import UploadRecord, WriterRecord
from holdfast.maintenance.recorded_costs import ending_of
from holdfast.policy.clock import span
from holdfast.policy.costs import SaveCost
from holdfast.policy.rules import recorded_time
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.history import HistorySave, read_history
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused

ENDINGS: Mapping[Ending, str] = {
    "failed": "crashed or killed",
    "continued": "continued by the same process",
}
"""Texts for people of endings whose words alone do not say what happened."""
_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
"""The default label of a checkpoint."""


class RecordedSaveCost(Document, frozen=True):
    """Durations and bytes of a save; null: not recorded."""

    stall_s: float | None
    """Seconds that training stood still, to capture and copy the state."""
    write_s: float | None
    """Seconds from then until every file was on stable storage; beside training."""
    durable_s: float | None
    """Both together: until the state could not be lost any more, but for the commit."""
    upload_s: float | None
    """Seconds from the commit to the end of its upload, of a root with a remote tier."""
    upload: str | None
    """State of its upload, as for `uploads`; null: nothing is noted here."""
    nbytes: int
    """Bytes of its files as stored."""
    plain_nbytes: int
    """Bytes of all files before they were compressed."""
    linked_nbytes: int | None
    """Bytes of files that it shares with an earlier checkpoint that is left; null without
    `--saves`."""
    new_nbytes: int | None
    """Bytes of all others, which were written; null likewise."""


class LoggedSave(Document, frozen=True, kw_only=True):
    """A save of a run, and what became of it."""

    folder: str
    """Its folder."""
    step: int | None
    """Completed optimizer windows; null where neither the manifest nor the label says it."""
    save_class: str | None = msgspec.field(default=None, name="class")
    """`permanent` or `ephemeral`; null where its manifest is gone, like the next two."""
    reason: str | None = None
    """Why it was saved: `interval`, `manual` and so on."""
    created: str | None = None
    """When it was saved, in UTC."""
    state: Literal["kept", "left behind", "deleted", "aborted", "not committed"]
    """`left behind`: a rollback went on from an earlier one. `aborted`: gc has given it up."""
    why: str | None = None
    """Why it was deleted or aborted, and by whom; null where no record of that is left."""
    deleted: str | None = None
    """When it was deleted, in UTC; null where it was not, or no record of that is left."""
    cost: RecordedSaveCost | None = None
    """What it took; null where its manifest is gone."""


class LoggedSession(Document, frozen=True):
    """Time in which one process owned a run."""

    epoch: int
    """Number of its claim."""
    began: str | None
    """UTC time of the claim; null where the claim is lost, as the next two."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process there."""
    resumed_from: str | None
    """Folder that it went on from."""
    rollback: bool
    """Whether a person chose that by name."""
    takeover: bool
    """Whether it took the run from a process that was not known to be dead."""
    purpose: str | None
    """What a person claimed it for, such as a deletion and its reason; null for a training."""
    from_step: int | None
    """First step; null where not known."""
    to_step: int | None
    """Last step known of it."""
    num_checkpoints: int
    """How many of its checkpoints exist."""
    reason: str | None
    """Why its newest checkpoint was saved."""
    ending: Ending
    """How it ended; `continued`: by the same process; `closed`: also after an error or Ctrl-C."""
    changes: Sequence[str]
    """What had changed since the session before."""
    saves: Sequence[LoggedSave]
    """Its saves, oldest first."""


class Log(Document, frozen=True):
    """Answer of `log`."""

    root: str
    """Path or URL of the root."""
    sessions: Sequence[LoggedSession]
    """Sessions of the run, oldest first."""
    damaged: Sequence[UnreadableCheckpoint]
    """As for `ls`."""
    unopened: Sequence[Unopened]
    """As for `ls`."""


@command(
    "log",
    options.root,
    flag("--saves", "Also list each save: its reason, its cost, and whether it still exists."),
    answer=Log,
)
@collector_paused()
def log_root(root: str, *, saves: bool = False) -> Answer:
    """List the sessions of a run, oldest first.

    A session is the time in which one process owns the run. Shown are its host and process, the
    step from which it resumed, its last save, how many of its checkpoints still exist, and whether
    it was closed (also by an error), or crashed or killed. Deletions with their reasons, and
    changes of arguments, data and versions are listed below.
    """
    store = open_root(root)
    catalog = Catalog(store)
    entries, unread = catalog.survey()
    recorded = {save.folder: save for save in read_history(store).saves}
    costs = _costs_of(store, entries, linked=saves)
    sessions = [*_sessions(store, catalog, entries, costs, recorded)]
    damaged, unopened = split_unread(unread)
    document = Log(root=store.url, sessions=sessions, damaged=damaged, unopened=unopened)
    lines = [unread_line(folder, error) for folder, error in unread]
    return Answer(document=document, parts=[*_format_sessions(document, saves=saves), *lines])


def _sessions(
    store: Store,
    catalog: Catalog,
    entries: Sequence[Entry],
    costs: Mapping[str, RecordedSaveCost],
    recorded: Mapping[str, HistorySave],
) -> Iterator[LoggedSession]:
    epochs = sorted({*catalog.epochs(), *(entry.name.epoch for entry in entries)})
    claims = {epoch: _read_claim(catalog, epoch) for epoch in epochs}
    steps: dict[str, int | None] = {entry.folder: entry.step for entry in entries}
    points = [claim.resumed_from for claim in claims.values() if claim is not None]
    for point in points:
        if point is not None:
            steps.setdefault(point.folder, _step_of(point.folder))
    logged = _saves(catalog, entries, claims, costs, recorded)
    changes = {
        session.epoch: session for entry in reversed(entries) for session in entry.manifest.changes
    }
    for epoch, claim in claims.items():
        own = [entry for entry in entries if entry.name.epoch == epoch]
        reached = {entry.step for entry in own}
        reached |= {
            save.step for save in recorded.values() if save.epoch == epoch and save.step is not None
        }
        reached |= {
            step
            for point in points
            if point is not None
            and point.epoch == epoch
            and (step := steps[point.folder]) is not None
        }
        changed = changes.get(epoch)
        following = next((found for at, found in claims.items() if at > epoch and found), None)
        start = changed.step if changed is not None else _format_start(claim, steps)
        yield LoggedSession(
            epoch=epoch,
            began=None if claim is None else claim.created,
            host=None if claim is None else claim.process.host,
            pid=None if claim is None else claim.process.pid,
            resumed_from=_resumed_from(claim),
            rollback=claim is not None and claim.rollback,
            takeover=claim is not None and claim.takeover,
            purpose=None if claim is None else claim.purpose or None,
            from_step=start,
            to_step=max(reached, default=None),
            num_checkpoints=len(own),
            reason=own[0].manifest.reason or None if own else None,
            ending="unknown" if claim is None else ending_of(store, claim, following),
            changes=() if changed is None else changed.what,
            saves=logged.get(epoch, ()),
        )


def _saves(
    catalog: Catalog,
    entries: Sequence[Entry],
    claims: Mapping[int, WriterRecord | None],
    costs: Mapping[str, RecordedSaveCost],
    recorded: Mapping[str, HistorySave],
) -> dict[int, list[LoggedSave]]:
    """Find the saves of each epoch, oldest first, also those of which only a record is left."""
    by_folder = {entry.folder: entry for entry in entries}
    lineage = {str(name) for name in catalog.lineage()}
    there = {*catalog.attempts()}
    names = {*there}
    for claim in claims.values():
        point = claim.resumed_from if claim is not None else None
        name = layout.parse_attempt(point.folder) if point is not None else None
        names |= {name} if name is not None else set()
    names |= {name for name in map(layout.parse_attempt, recorded) if name is not None}
    found: dict[int, list[LoggedSave]] = {}
    for name in sorted(names):
        entry = by_folder.get(str(name))
        if entry is None:
            saved = _ended_save(catalog, str(name), recorded, is_gone=name not in there)
        else:
            saved = _present_save(entry, costs[entry.folder], is_in_lineage=entry.folder in lineage)
        if saved is not None:
            found.setdefault(name.epoch, []).append(saved)
    return found


def _present_save(entry: Entry, cost: RecordedSaveCost, *, is_in_lineage: bool) -> LoggedSave:
    manifest = entry.manifest
    return LoggedSave(
        folder=entry.folder,
        step=entry.step,
        save_class=manifest.save_class,
        reason=manifest.reason,
        created=manifest.created,
        state="kept" if is_in_lineage else "left behind",
        cost=cost,
    )


def _ended_save(
    catalog: Catalog, folder: str, recorded: Mapping[str, HistorySave], *, is_gone: bool
) -> LoggedSave | None:
    """Describe a save without a manifest; None for a damaged one, which is listed elsewhere.

    `is_gone`: it has no folder any more, and only the history or a later claim names it.
    """
    state: Literal["deleted", "aborted", "not committed"] = "not committed"
    why = None
    if is_gone:
        state = "deleted"
    else:
        try:
            register = catalog.read(folder)
        except (FormatError, SealError):
            return None
        if isinstance(register, Aborted | Deleted):
            state = "deleted" if isinstance(register, Deleted) else "aborted"
            why = f"{register.reason} ({register.by})"
    known = recorded.get(folder)
    if known is None:
        return LoggedSave(folder=folder, step=_step_of(folder), state=state, why=why)
    return LoggedSave(
        folder=folder,
        step=known.step,
        save_class=known.save_class or None,
        reason=known.reason or None,
        created=_utc(known.saved_s),
        state=state,
        why=why or known.deleted_why or None,
        deleted=_utc(known.deleted_s),
    )


def _utc(time_s: float | None) -> str | None:
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")


def _read_claim(catalog: Catalog, epoch: int) -> WriterRecord | None:
    try:
        return catalog.writer(epoch)
    except FormatError:
        return None


def _format_start(claim: WriterRecord | None, steps: Mapping[str, int | None]) -> int | None:
    if claim is None:
        return None
    return 0 if claim.resumed_from is None else steps[claim.resumed_from.folder]


def _step_of(folder: str) -> int | None:
    """Read the step of a deleted checkpoint from its label, if that is the default one."""
    name = layout.parse_attempt(folder)
    found = None if name is None else _STEP.fullmatch(name.label)
    return None if found is None else int(found[1])


def _resumed_from(claim: WriterRecord | None) -> str | None:
    return None if claim is None or claim.resumed_from is None else claim.resumed_from.folder


def _format_sessions(document: Log, *, saves: bool) -> list[str | TextTable]:
    sessions = document.sessions
    table = TextTable(
        columns=("session", "began (UTC)", "where", "resumed from", "last save", "kept", "ending"),
        rows=[_row(session) for session in sessions],
        right=frozenset({0, 4, 5}),
        whole=frozenset({0, 3, 4}),
    )
    lines = [
        f"session {session.epoch} changed {change}"
        for session in sessions
        for change in session.changes
    ]
    lines += [
        f"session {session.epoch} {session.purpose}" for session in sessions if session.purpose
    ]
    return [document.root, table, *lines, *([_table_of_saves(sessions)] if saves else [])]


def _table_of_saves(sessions: Sequence[LoggedSession]) -> TextTable:
    return TextTable(
        columns=(
            *("session", "step", "folder", "saved (UTC)", "class", "reason"),
            *("stall", "write", "upload", "new", "linked", "now"),
        ),
        rows=[
            (
                str(session.epoch),
                _format_step(saved.step),
                saved.folder,
                format_time(saved.created),
                saved.save_class or "?",
                saved.reason or "?",
                *_cost_cells(saved.cost),
                saved.state + (f": {saved.why}" if saved.why else ""),
            )
            for session in sessions
            for saved in session.saves
        ],
        right=frozenset({0, 1, *range(6, 11)}),
        whole=frozenset({0, 1, 2}),
    )


def _cost_cells(cost: RecordedSaveCost | None) -> tuple[str, ...]:
    if cost is None:
        return ("",) * 5
    linked = cost.linked_nbytes
    return (
        "?" if cost.stall_s is None else span(cost.stall_s),
        "?" if cost.write_s is None else span(cost.write_s),
        (cost.upload or "") if cost.upload_s is None else span(cost.upload_s),
        "" if cost.new_nbytes is None else format_nbytes(cost.new_nbytes),
        format_nbytes(linked) if linked else "",
    )


def _row(session: LoggedSession) -> tuple[str, ...]:
    where = "claim lost" if session.began is None else f"{session.host}:{session.pid}"
    origin = "?" if session.began is None else "the beginning"
    if session.resumed_from is not None:
        origin = session.resumed_from if session.from_step is None else f"step {session.from_step}"
    return (
        str(session.epoch),
        (session.began or "")[:19].replace("T", " "),
        f"{where}{', taken over' if session.takeover else ''}",
        f"{origin}{' (rollback)' if session.rollback else ''}",
        "–" if session.to_step is None else str(session.to_step),
        str(session.num_checkpoints),
        ENDINGS.get(session.ending, session.ending),
    )


def _format_step(step: int | None) -> str:
    return "?" if step is None else str(step)


# Costs of saves


def _costs_of(
    store: Store, entries: Sequence[Entry], *, linked: bool
) -> dict[str, RecordedSaveCost]:
    """Return what each checkpoint took, by folder; with `linked` also which bytes are new.

    Nothing is read but small records; `linked` looks at the length of each file.
    """
    notes = Ledger(store).read_notes()
    shared = _linked_nbytes(bare(store), entries) if linked else {}
    return {
        entry.folder: _cost(entry, notes.get(entry.folder), shared.get(entry.folder))
        for entry in entries
    }


def _cost(entry: Entry, note: UploadRecord | None, linked: int | None) -> RecordedSaveCost:
    manifest = entry.manifest
    cost = SaveCost.read(manifest.timings, is_first=False)
    write_s = None if cost is None else cost.write_s
    durable_s = None if cost is None or write_s is None else cost.stall_s + write_s
    return RecordedSaveCost(
        stall_s=None if cost is None else cost.stall_s,
        write_s=write_s,
        durable_s=durable_s,
        upload_s=_upload_s(manifest.created, note),
        upload=None if note is None else note.state,
        nbytes=manifest.nbytes,
        plain_nbytes=manifest.plain_nbytes,
        linked_nbytes=linked,
        new_nbytes=None if linked is None else max(manifest.nbytes - linked, 0),
    )


def _upload_s(created: str, note: UploadRecord | None) -> float | None:
    """Return how long after the commit a checkpoint had been uploaded, to a second."""
    if note is None or note.state != "uploaded":
        return None
    began, ended = recorded_time(created), recorded_time(note.changed)
    return None if began is None or ended is None else max((ended - began).total_seconds(), 0.0)


def _linked_nbytes(store: Store, entries: Sequence[Entry]) -> Mapping[str, int]:
    """Sum the bytes of files that a checkpoint has in common with an older one."""
    found = dict.fromkeys((entry.folder for entry in entries), 0)
    if not store.has_links:
        return found
    seen: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.order):
        for listed in store.list(f"{entry.folder}/"):
            with suppress(NotFound):  # deleted meanwhile
                info = store.head(listed.key)
                if info.identity in seen:
                    found[entry.folder] += info.nbytes
                elif info.identity:
                    seen.add(info.identity)
    return found
