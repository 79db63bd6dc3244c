"""`holdfast prune` and `forecast`: deletions by a retention rule, now and at coming saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import click

from holdfast.cli import options
from holdfast.cli.documents import (
    Document,
    Unopened,
    UnreadableCheckpoint,
    Why,
    expect_something_opened,
    list_reasons,
    nbytes_left,
    origin_marks,
    split_unread,
    unread_line,
)
from holdfast.cli.options import command, option
from holdfast.cli.output import Answer, Code, TextTable, emitter, format_nbytes
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint
from holdfast.format.manifest import Manifest
from holdfast.maintenance.delete import preview, prune_checkpoints
from holdfast.maintenance.forecast import AssumedSave, forecast_retention
from holdfast.maintenance.retention import PlannedDecision, Pruned
from holdfast.policy.rules import parse_rule
from holdfast.root.catalog import Catalog, Entry

Action: TypeAlias = Literal["keep", "delete", "thin", "kept"]
_OTHER_RUN = "copied here from another run, so the rule does not apply to it"


class Judged(Document, frozen=True):
    """Checkpoint of `prune`, and what the rule does with it."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    action: Action
    """What becomes of it; `kept`: its deletion was decided and did not happen."""
    drop: Sequence[str]
    """Components that are dropped."""
    why: str
    """Which rule keeps it, or why none does."""
    nbytes: int
    """Bytes that this gives back; of one of another run its size."""
    savers: Sequence[str]
    """Savers that asked for it."""
    left_out: Sequence[str]
    """Components that were not saved."""
    unhealthy: Sequence[str]
    """What was wrong with the state."""


class Prune(Document, frozen=True):
    """Answer of `prune`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    keep: str
    """The rule, in words."""
    checkpoints: Sequence[Judged]
    """All checkpoints."""
    deleted: Sequence[str]
    """Folders that were deleted."""
    thinned: Sequence[str]
    """Folders of which components were dropped."""
    failed: Sequence[Why]
    """What could not be done."""
    postponed: Sequence[Why]
    """What somebody reads, or waits for its upload."""
    damaged: Sequence[UnreadableCheckpoint]
    """As for `ls`."""
    unopened: Sequence[Unopened]
    """As for `ls`."""
    warnings: Sequence[str]
    """Warnings, such as of files of others that were left; they go to standard error, too."""
    nbytes: int
    """Bytes given back, or to give back."""


class Gone(Document, frozen=True):
    """Checkpoint, or parts of one, that a coming save deletes."""

    folder: str | None
    """Folder of the checkpoint; null: a coming save."""
    save: int | None
    """Number of that coming save; null: a checkpoint that exists."""
    step: int
    """Its step."""
    drop: Sequence[str]
    """Components that are dropped while the rest stays; empty: all is deleted."""
    why: str
    """Why it is deleted, or why the rest stays."""
    nbytes: int
    """Bytes that this frees."""


class ComingSave(Document, frozen=True, rename={"save_class": "class"}):
    """Assumed save, and the deletions after it."""

    save: int
    """Its number, from 1: the next save."""
    step: int
    """Its step."""
    save_class: str
    """`permanent` or `ephemeral`."""
    savers: Sequence[str]
    """Savers that ask for it; empty if there is only one."""
    gone: Sequence[Gone]
    """Deletions, oldest checkpoint first."""
    nbytes: int
    """Bytes that these free."""


class Kept(Document, frozen=True):
    """Checkpoint that exists and stays through all coming saves."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    why: str
    """Clause of the rule, pin or tag that keeps it after the last of these saves."""
    nbytes: int
    """Its bytes after the last of these saves."""


class Forecast(Document, frozen=True):
    """Answer of `forecast`."""

    root: str
    """Path or URL of the root."""
    keep: str
    """The rule, in words."""
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; null: `--keep` gave it."""
    assumptions: Sequence[str]
    """Assumptions of the forecast."""
    saves: Sequence[ComingSave]
    """Coming saves, the next one first."""
    kept: Sequence[Kept]
    """Checkpoints that stay, newest first."""
    damaged: Sequence[UnreadableCheckpoint]
    """As for `ls`; they stay."""
    unopened: Sequence[Unopened]
    """As for `ls`; they stay."""


@command(
    "prune",
    options.root,
    option("--keep", "RULE", "Retention rule, such as last:3,best:loss:min:2.", required=True),
    options.dry_run,
    answer=Prune,
)
def prune_root(root: str, *, keep: str, dry_run: bool) -> Answer:
    """Delete the checkpoints that a retention rule does not keep.

    The reason is printed for each. NAME=RULE is a rule for one saver; a saver without a rule keeps
    everything. The command is refused while a live process owns the run. Checkpoints that are being
    read or wait for an upload are kept.
    """
    rule = parse_rule(keep)
    store = open_root(root)
    entries, unread = Catalog(store).survey()
    expect_something_opened(entries, unread)
    if not entries and not unread:
        raise NoCheckpoint(f"{store.url}: no checkpoints yet")
    warnings: list[str] = []
    report = (
        Pruned(planned=preview(store, rule, known={e.folder: e.manifest for e in entries}))
        if dry_run
        else prune_checkpoints(store, rule, emit=emitter(warnings))
    )
    judged = {item.entry.folder for item in report.planned}
    checkpoints = [
        _judge(
            item.entry,
            _action(item, report, dry_run=dry_run),
            item.decision.reason,
            item.decision.entry.nbytes,
            item.decision.drop,
        )
        for item in report.planned
    ]
    checkpoints += [
        _judge(entry, "keep", _OTHER_RUN, nbytes_left(store, entry))
        for entry in entries
        if entry.folder not in judged
    ]
    damaged, unopened = split_unread(unread)
    document = Prune(
        root=store.url,
        dry_run=dry_run,
        keep=str(rule),
        checkpoints=checkpoints,
        deleted=report.deleted,
        thinned=report.thinned,
        failed=list_reasons(report.failed),
        postponed=list_reasons(report.postponed),
        damaged=damaged,
        unopened=unopened,
        warnings=warnings,
        nbytes=sum(item.nbytes for item in report.planned if dry_run or _is_done(item, report)),
    )
    manifests = {entry.folder: entry.manifest for entry in entries}
    manifests |= {item.entry.folder: item.entry.manifest for item in report.planned}
    table = TextTable(
        columns=("step", "folder", "size", "what", "why"),
        rows=[_row(one, manifests[one.folder]) for one in checkpoints],
        right=frozenset({0, 2}),
        whole=frozenset({0, 1, 2, 3}),
    )
    lines = [f"kept, {unread_line(folder, error)}" for folder, error in unread]
    lines += [f"kept, {why}: {folder}" for folder, why in report.postponed]
    lines += [f"FAILED {folder}: {why}" for folder, why in report.failed]
    lines.append(f"{format_nbytes(document.nbytes)} {'would be ' if dry_run else ''}freed")
    code = Code.FOUND if report.failed else Code.OK
    return Answer(document=document, parts=[table, *lines], code=code)


def _is_done(item: PlannedDecision, report: Pruned) -> bool:
    return item.entry.folder in (report.thinned if item.decision.keep else report.deleted)


def _action(item: PlannedDecision, report: Pruned, *, dry_run: bool) -> Action:
    """Return the action taken or planned; "kept" if a decided deletion did not happen."""
    if item.decision.keep and not item.decision.drop:
        return "keep"
    if not dry_run and not _is_done(item, report):
        return "kept"
    return "thin" if item.decision.keep else "delete"


def _judge(entry: Entry, action: Action, why: str, nbytes: int, drop: Sequence[str] = ()) -> Judged:
    manifest = entry.manifest
    return Judged(
        folder=entry.folder,
        step=entry.step,
        action=action,
        drop=drop,
        why=why,
        nbytes=nbytes,
        savers=manifest.savers,
        left_out=manifest.left_out,
        unhealthy=manifest.unhealthy,
    )


def _row(one: Judged, manifest: Manifest) -> tuple[str, ...]:
    what = f"drop {', '.join(one.drop)}" if one.action == "thin" else one.action
    why = "; ".join([one.why, *origin_marks(manifest)])
    return (str(one.step), one.folder, format_nbytes(one.nbytes), what, why)


# The coming saves


@command(
    "forecast",
    options.root,
    option(
        "--saves",
        "N",
        "Number of saves to look ahead.",
        type=click.IntRange(min=1, max=1000),
        default=10,
    ),
    option("--keep", "RULE", "Retention rule. [default: the rule recorded by the run]"),
    answer=Forecast,
)
def forecast_deletions(root: str, *, saves: int = 10, keep: str | None = None) -> Answer:
    """List the deletions at the next saves, with reasons.

    The rule and the intervals are those that the run recorded; the assumptions are printed.
    """
    rule = None if keep is None else parse_rule(keep)
    store = open_root(root)
    entries, unread = Catalog(store).survey()
    expect_something_opened(entries, unread)
    if not entries:
        raise NoCheckpoint(f"{store.url}: no checkpoints yet")
    found = forecast_retention(store, entries, keep=rule, number=saves)
    folders = {entry.order: entry.folder for entry in entries}
    numbers = {one.save.order: place for place, one in enumerate(found.saves, 1)}
    damaged, unopened = split_unread(unread)
    document = Forecast(
        root=store.url,
        keep=str(found.rule),
        recorded_by=found.recorded_by,
        assumptions=found.assumptions,
        saves=[_coming_save(save, folders, numbers) for save in found.saves],
        kept=[
            Kept(
                folder=folders[order],
                step=made.entry.timestamp.step,
                why=made.reason,
                nbytes=made.entry.nbytes,
            )
            for order, made in found.saves[-1].left.items()
            if order in folders
        ],
        damaged=damaged,
        unopened=unopened,
    )
    lines = [f"kept, {unread_line(folder, error)}" for folder, error in unread]
    return Answer(document=document, parts=[*_format_forecast(document), *lines])


def _coming_save(
    one: AssumedSave,
    folders: Mapping[tuple[int, int], str],
    numbers: Mapping[tuple[int, int], int],
) -> ComingSave:
    gone = [
        Gone(
            folder=folders.get(order),
            save=numbers.get(order),
            step=made.entry.timestamp.step,
            drop=[*made.drop],
            why=made.reason,
            nbytes=made.entry.nbytes - (one.left[order].entry.nbytes if made.keep else 0),
        )
        for order, made in one.deletions.items()
    ]
    return ComingSave(
        save=numbers[one.save.order],
        step=one.save.timestamp.step,
        save_class=one.save.save_class,
        savers=[*one.save.savers],
        gone=gone,
        nbytes=sum(item.nbytes for item in gone),
    )


def _format_forecast(document: Forecast) -> list[str | TextTable]:
    source = document.recorded_by
    said = "given" if source is None else f"recorded by {source}"
    saves = TextTable(
        columns=("save", "at step", "deletes", "frees", "why"),
        rows=[row for save in document.saves for row in _make_deletion_rows(save)],
        right=frozenset({0, 1, 3}),
        whole=frozenset({0, 1, 2, 3}),
    )
    kept = TextTable(
        columns=("step", "stays", "size", "why"),
        rows=[
            (str(one.step), one.folder, format_nbytes(one.nbytes), one.why) for one in document.kept
        ],
        right=frozenset({0, 2}),
        whole=frozenset({0, 1, 2}),
    )
    assumed = (f"assumed: {text}" for text in document.assumptions)
    return [f"rule: {document.keep} ({said})", saves, *([kept] if document.kept else []), *assumed]


def _make_deletion_rows(save: ComingSave) -> list[tuple[str, ...]]:
    """Make one row for each deletion of a save, or one without a deletion."""
    at = f"{save.step} (ephemeral)" if save.save_class == "ephemeral" else str(save.step)
    rows: list[tuple[str, ...]] = []
    for one in save.gone:
        which = f"step {one.step}" if one.save is None else f"step {one.step} (save {one.save})"
        which = f"{', '.join(one.drop)} of {which}" if one.drop else which
        rows.append((str(save.save), at, which, format_nbytes(one.nbytes), one.why))
    return rows or [(str(save.save), at, "nothing", "", "")]
