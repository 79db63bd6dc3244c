"""`holdfast log`: list the lives of a run, what each has changed and what became of its saves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.history import Log, LoggedSave, RecordedSaveCost
from holdfast.cli.costs import costs_of
from holdfast.cli.documents import unread_documents, unread_line
from holdfast.cli.options import command, flag
from holdfast.cli.output import Answer, TextTable, format_nbytes
from holdfast.cli.target import open_root
from holdfast.errors import FormatError, HoldfastError, SealError
from holdfast.format import layout
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.records import WriterRecord
from holdfast.maintenance.recorded_costs import Ending, ending_of
from holdfast.policy.clock import span
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused

ENDINGS: Mapping[Ending, str] = {
    "failed": "crashed or killed",
    "continued": "continued by the same process",
}
"""Texts for people of endings whose words alone do not say what happened."""
_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
"""The default label of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """Part of a run that one process made, between its claim and its end: a life of the run."""

    epoch: int
    claim: WriterRecord | None
    """None: the claim is lost or damaged."""
    start: int | None
    """Step at which it went on; None: not known."""
    steps: Sequence[int]
    """Steps of its checkpoints that exist or are known from later claims, in order."""
    num_checkpoints: int
    reason: str
    """Why its newest checkpoint was saved, if that exists."""
    ending: Ending
    changes: Sequence[str]
    saves: Sequence[LoggedSave]


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
    step from which it resumed, its last save, how many of its checkpoints still exist, and how it
    ended. Reasons of deletions and changes of arguments, data and versions are listed below.
    """
    store = open_root(root)
    catalog = Catalog(store)
    entries, unread = catalog.survey()
    lives = [*_lives(store, catalog, entries, costs_of(store, entries, linked=saves))]
    document = {"root": store.url, "lives": [_encode_life(life) for life in lives]}
    return Answer(
        document=make_answer(Log, {**document, **unread_documents(unread)}),
        parts=_format_lives(store, lives, unread, saves=saves),
    )


def _lives(
    store: Store,
    catalog: Catalog,
    entries: Sequence[Entry],
    costs: Mapping[str, RecordedSaveCost],
) -> Iterator[_Life]:
    epochs = sorted({*catalog.epochs(), *(entry.name.epoch for entry in entries)})
    claims = {epoch: _read_claim(catalog, epoch) for epoch in epochs}
    steps: dict[str, int | None] = {entry.folder: entry.step for entry in entries}
    points = [claim.resumed_from for claim in claims.values() if claim is not None]
    for point in points:
        if point is not None:
            steps.setdefault(point.folder, _step_of(point.folder))
    logged = _saves(catalog, entries, claims, costs)
    changes = {life.epoch: life for entry in reversed(entries) for life in entry.manifest.changes}
    for epoch, claim in claims.items():
        own = [entry for entry in entries if entry.name.epoch == epoch]
        reached = {entry.step for entry in own}
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
        yield _Life(
            epoch=epoch,
            claim=claim,
            start=start,
            steps=sorted(reached),
            num_checkpoints=len(own),
            reason=own[0].manifest.reason if own else "",
            ending="unknown" if claim is None else ending_of(store, claim, following),
            changes=() if changed is None else changed.what,
            saves=logged.get(epoch, ()),
        )


def _saves(
    catalog: Catalog,
    entries: Sequence[Entry],
    claims: Mapping[int, WriterRecord | None],
    costs: Mapping[str, RecordedSaveCost],
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
    found: dict[int, list[LoggedSave]] = {}
    for name in sorted(names):
        entry = by_folder.get(str(name))
        if entry is None:
            saved = _ended_save(catalog, str(name), is_point=name not in there)
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
        why=None,
        cost=cost,
    )


def _ended_save(catalog: Catalog, folder: str, *, is_point: bool) -> LoggedSave | None:
    """Describe a save without a manifest; None for a damaged one, which is listed elsewhere.

    `is_point`: it has no folder any more, and a later claim names it.
    """
    state: Literal["deleted", "aborted", "not committed"] = "not committed"
    why = None
    if is_point:
        state = "deleted"
    else:
        try:
            register = catalog.read(folder)
        except (FormatError, SealError):
            return None
        if isinstance(register, Aborted | Deleted):
            state = "deleted" if isinstance(register, Deleted) else "aborted"
            why = f"{register.reason} ({register.by})"
    return LoggedSave(
        folder=folder,
        step=_step_of(folder),
        save_class=None,
        reason=None,
        created=None,
        state=state,
        why=why,
        cost=None,
    )


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


def _encode_life(life: _Life) -> dict[str, Any]:
    claim = life.claim
    return {
        "epoch": life.epoch,
        "began": None if claim is None else claim.created,
        "host": None if claim is None else claim.process.host,
        "pid": None if claim is None else claim.process.pid,
        "resumed_from": _resumed_from(claim),
        "rollback": claim is not None and claim.rollback,
        "takeover": claim is not None and claim.takeover,
        "purpose": None if claim is None else claim.purpose or None,
        "from_step": life.start,
        "to_step": life.steps[-1] if life.steps else None,
        "num_checkpoints": life.num_checkpoints,
        "reason": life.reason or None,
        "ending": life.ending,
        "changes": list(life.changes),
        "saves": msgspec.to_builtins(life.saves),
    }


def _resumed_from(claim: WriterRecord | None) -> str | None:
    return None if claim is None or claim.resumed_from is None else claim.resumed_from.folder


def _format_lives(
    store: Store,
    lives: Sequence[_Life],
    unread: Sequence[tuple[str, HoldfastError]],
    *,
    saves: bool,
) -> list[str | TextTable]:
    table = TextTable(
        columns=("session", "began (UTC)", "where", "resumed from", "last save", "kept", "ending"),
        rows=[_row(life) for life in lives],
        right=frozenset({0, 4, 5}),
        whole=frozenset({0, 3, 4}),
    )
    lines = [f"session {life.epoch} changed {change}" for life in lives for change in life.changes]
    purposes = ((life.epoch, life.claim.purpose) for life in lives if life.claim is not None)
    lines += [f"session {epoch} {purpose}" for epoch, purpose in purposes if purpose]
    more = [_table_of_saves(lives)] if saves else []
    return [
        store.url,
        table,
        *lines,
        *more,
        *(unread_line(folder, error) for folder, error in unread),
    ]


def _table_of_saves(lives: Sequence[_Life]) -> TextTable:
    return TextTable(
        columns=(
            *("session", "step", "folder", "saved (UTC)", "class", "reason"),
            *("stall", "write", "upload", "new", "linked", "now"),
        ),
        rows=[
            (
                str(life.epoch),
                _format_step(saved.step),
                saved.folder,
                (saved.created or "?")[:19].replace("T", " "),
                saved.save_class or "?",
                saved.reason or "?",
                *_cost_cells(saved.cost),
                saved.state + (f": {saved.why}" if saved.why else ""),
            )
            for life in lives
            for saved in life.saves
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


def _row(life: _Life) -> tuple[str, ...]:
    claim = life.claim
    where = "claim lost" if claim is None else f"{claim.process.host}:{claim.process.pid}"
    how = "" if claim is None or not claim.rollback else " (rollback)"
    taken = "" if claim is None or not claim.takeover else ", taken over"
    return (
        str(life.epoch),
        "" if claim is None else claim.created[:19].replace("T", " "),
        f"{where}{taken}",
        f"{_origin(life)}{how}",
        str(life.steps[-1]) if life.steps else "–",
        str(life.num_checkpoints),
        ENDINGS.get(life.ending, life.ending),
    )


def _origin(life: _Life) -> str:
    folder = _resumed_from(life.claim)
    if folder is None:
        return "the beginning" if life.claim is not None else "?"
    return folder if life.start is None else f"step {life.start}"


def _format_step(step: int | None) -> str:
    return "?" if step is None else str(step)
