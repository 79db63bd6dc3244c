"""`holdfast prune`: apply a retention rule; report the action and reason per checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.retention import Prune
from holdfast.cli.documents import (
    expect_something_opened,
    nbytes_left,
    origin_document,
    origin_marks,
    unread_documents,
    unread_line,
)
from holdfast.cli.options import command, option
from holdfast.cli.output import Answer, Code, TextTable, emitter, format_nbytes
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint
from holdfast.maintenance.delete import preview, prune_checkpoints
from holdfast.maintenance.retention import PlannedDecision, Pruned
from holdfast.policy.rules import parse_rule
from holdfast.root.catalog import Catalog, Entry

_OTHER_RUN = "copied here from another run, which this one does not judge"


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
    checkpoints = []
    for item in report.planned:
        action, made = _action(item, report, dry_run=dry_run), item.decision
        described = _encode_decision(item.entry, action, made.reason, made.entry.nbytes, made.drop)
        checkpoints.append((item.entry, described))
    checkpoints += [
        (entry, _encode_decision(entry, "keep", _OTHER_RUN, nbytes_left(store, entry)))
        for entry in entries
        if entry.folder not in judged
    ]
    nbytes = sum(item.nbytes for item in report.planned if dry_run or _is_done(item, report))
    document = {
        "root": store.url,
        "dry_run": dry_run,
        "keep": str(rule),
        "checkpoints": [described for _, described in checkpoints],
        "deleted": report.deleted,
        "thinned": report.thinned,
        "failed": [{"folder": folder, "why": why} for folder, why in report.failed],
        "postponed": [{"folder": folder, "why": why} for folder, why in report.postponed],
        **unread_documents(unread),
        "warnings": warnings,
        "nbytes": nbytes,
    }
    table = TextTable(
        columns=("step", "folder", "size", "what", "why"),
        rows=[_row(entry, described) for entry, described in checkpoints],
        right=frozenset({0, 2}),
        whole=frozenset({0, 1, 2, 3}),
    )
    lines = [f"kept, {unread_line(folder, error)}" for folder, error in unread]
    lines += [f"kept, {why}: {folder}" for folder, why in report.postponed]
    lines += [f"FAILED {folder}: {why}" for folder, why in report.failed]
    lines.append(f"{format_nbytes(nbytes)} {'would be ' if dry_run else ''}freed")
    code = Code.FOUND if report.failed else Code.OK
    return Answer(document=make_answer(Prune, document), parts=[table, *lines], code=code)


def _is_done(item: PlannedDecision, report: Pruned) -> bool:
    return item.entry.folder in (report.thinned if item.decision.keep else report.deleted)


def _action(item: PlannedDecision, report: Pruned, *, dry_run: bool) -> str:
    """Return the action taken or planned; "kept" if a decided deletion did not happen."""
    if item.decision.keep and not item.decision.drop:
        return "keep"
    if not dry_run and not _is_done(item, report):
        return "kept"
    return "thin" if item.decision.keep else "delete"


def _encode_decision(
    entry: Entry, action: str, why: str, nbytes: int, drop: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "folder": entry.folder,
        "step": entry.step,
        "action": action,
        "drop": list(drop),
        "why": why,
        "nbytes": nbytes,
        **origin_document(entry.manifest),
    }


def _row(entry: Entry, document: Mapping[str, Any]) -> tuple[str, ...]:
    action = document["action"]
    what = f"drop {', '.join(document['drop'])}" if action == "thin" else action
    why = "; ".join([document["why"], *origin_marks(entry.manifest)])
    return (str(entry.step), entry.folder, format_nbytes(document["nbytes"]), what, why)
