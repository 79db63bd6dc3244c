"""`holdfast forecast`: the deletions at the coming saves, and why."""

from __future__ import annotations

from collections.abc import Mapping

import click

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.retention import ComingSave, Forecast, Gone, Kept
from holdfast.cli.documents import expect_something_opened, unread_documents, unread_line
from holdfast.cli.options import command, option
from holdfast.cli.output import Answer, TextTable, format_nbytes
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint
from holdfast.maintenance.forecast import AssumedSave, forecast_retention
from holdfast.policy.rules import parse_rule
from holdfast.root.catalog import Catalog


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
    members = {
        "root": store.url,
        "keep": str(found.rule),
        "recorded_by": found.recorded_by,
        "assumptions": found.assumptions,
        "saves": [_coming_save(save, folders, numbers) for save in found.saves],
        "kept": [
            Kept(
                folder=folders[order],
                step=made.entry.timestamp.step,
                why=made.reason,
                nbytes=made.entry.nbytes,
            )
            for order, made in found.saves[-1].left.items()
            if order in folders
        ],
        **unread_documents(unread),
    }
    document = make_answer(Forecast, members)
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
