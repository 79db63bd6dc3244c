"""`holdfast forecast`: what retention deletes at the coming saves, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from holdfast.care.forecast import Forecast, Wishes, forecast
from holdfast.cli.answers import retention
from holdfast.cli.answers.base import Unopened, Unread, of
from holdfast.cli.documents import expect_something_opened, unread_documents, unread_line
from holdfast.cli.output import Answer, TextTable, size
from holdfast.cli.target import open_root
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.policy.retention import Decision
from holdfast.policy.rule import Rule
from holdfast.policy.rules import best_rules, parse_rule
from holdfast.policy.savers import SavePolicy


def foretell(
    root: str, *, number: int, keep: str | None, every: str | None, metrics: Sequence[str]
) -> Answer:
    """Foretell retention for the next `number` saves of a run."""
    wishes = Wishes(
        rule=None if keep is None else parse_rule(keep),
        every=None if every is None else SavePolicy(permanent=every),
        number=number,
        metrics=dict(map(_metric, metrics)),
    )
    store = open_root(root)
    entries, unread = Catalog(store).survey()
    expect_something_opened(entries, unread)
    if not entries:
        raise NoCheckpoint(f"{store.url}: no checkpoints yet")
    found = forecast(store, entries, wishes)
    _expect_asked(found.rule, wishes.metrics or {})
    unread_members = unread_documents(unread)
    document = retention.Forecast(
        root=store.url,
        keep=str(found.rule),
        recorded_by=found.recorded_by,
        running=found.is_running,
        assumptions=[*found.assumptions],
        checkpoints=[*_followed(found)],
        saves=[*_coming(found)],
        damaged=[of(Unread, one) for one in unread_members["damaged"]],
        unopened=[of(Unopened, one) for one in unread_members["unopened"]],
    )
    lines = [f"kept, {unread_line(folder, error)}" for folder, error in unread]
    return Answer(document=document, parts=[*_parts(document), *lines])


def _metric(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (name and equals) or (math.isnan(number) and value.strip().lower() != "nan"):
        raise UsageError(f"--metric={text!r}: expected NAME=VALUE, such as loss=0.1")
    return name, number


def _expect_asked(rule: Rule, given: Mapping[str, float]) -> None:
    asked = sorted({best.metric for best in best_rules(rule)})
    unknown = [name for name in given if name not in asked]
    if unknown:
        has = ", ".join(asked) or "no metric"
        raise UsageError(
            f"--metric: the rule {rule} does not ask for {', '.join(unknown)}, but for {has}"
        )


def _followed(found: Forecast) -> Iterator[retention.Foretold]:
    """Follow each checkpoint through the coming saves."""
    decisions = [{made.entry.order: made for made in save.decisions} for save in found.saves]
    done = [{made.entry.order for made in save.done} for save in found.saves]
    for entry in found.entries:
        order, held = entry.order, found.held.get(entry.order)
        seen = [(n, made[order]) for n, made in enumerate(decisions) if order in made]
        acted = [
            (n, made)
            for n, made in seen
            if order in done[n] or (held and (made.drop or not made.keep))
        ]
        yield _foretold(entry, [made for _, made in seen], acted, held)


def _foretold(
    entry: Entry, seen: Sequence[Decision], acted: Sequence[tuple[int, Decision]], held: str | None
) -> retention.Foretold:
    """Describe what becomes of a checkpoint; `acted`: by which save, from 0, and why."""
    deletion = next((item for item in acted if not item[1].keep), None)
    end = deletion or (acted[0] if acted else None)
    keeping = [made.reason for made in seen if made.keep]
    action: Literal["keep", "delete", "thin", "wait"] = "keep"
    if end is not None:
        action = "wait" if held else "delete" if deletion else "thin"
    return retention.Foretold(
        folder=entry.folder,
        step=entry.step,
        action=action,
        save=None if end is None else end[0] + 1,
        drop=sorted({name for _, made in acted for name in made.drop}) if action == "thin" else [],
        keeps=keeping[-1] if keeping else None,
        why=None if end is None else end[1].reason,
        waits_for=held if action == "wait" else None,
        nbytes=seen[0].entry.nbytes,
    )


def _coming(found: Forecast) -> Iterator[retention.ComingSave]:
    folders = {entry.order: entry.folder for entry in found.entries}
    numbers = {save.save.order: number for number, save in enumerate(found.saves, 1)}
    for number, save in enumerate(found.saves, 1):
        gone = [
            retention.Gone(
                folder=folders.get(made.entry.order),
                save=numbers.get(made.entry.order),
                step=made.entry.timestamp.step,
                drop=[*made.drop],
                why=made.reason,
                nbytes=save.freed_nbytes[made.entry.order],
            )
            for made in reversed(save.done)
        ]
        nbytes = sum(one.nbytes for one in gone)
        deleted = sum(not made.keep for made in save.done)
        yield retention.ComingSave(
            save=number,
            step=save.save.timestamp.step,
            save_class=save.save.save_class,
            savers=[*save.save.savers],
            metrics=dict(save.save.metrics),
            gone=gone,
            nbytes=nbytes,
            left=len(save.decisions) - deleted,
            left_nbytes=sum(made.entry.nbytes for made in save.decisions) - nbytes,
        )


def _parts(document: retention.Forecast) -> list[str | TextTable]:
    source = document.recorded_by
    said = "given" if source is None else f"recorded by {source}"
    checkpoints = TextTable(
        columns=("step", "folder", "size", "what", "why"),
        rows=[_row(one, document) for one in document.checkpoints],
        right=frozenset({0, 2}),
        whole=frozenset({0, 1, 2}),
    )
    saves = TextTable(
        columns=("save", "at step", "deletes", "gives back", "left"),
        rows=[
            (
                str(save.save),
                f"{save.step}{' (ephemeral)' if save.save_class == 'ephemeral' else ''}"
                f"{' by ' + ', '.join(save.savers) if save.savers else ''}",
                ", ".join(map(_gone_text, save.gone)) or "nothing",
                size(save.nbytes) if save.nbytes else "",
                f"{save.left}, {size(save.left_nbytes)}",
            )
            for save in document.saves
        ],
        right=frozenset({0, 3}),
        whole=frozenset({0}),
    )
    return [
        f"rule: {document.keep} ({said})",
        checkpoints,
        saves,
        *(f"assumed: {text}" for text in document.assumptions),
    ]


def _row(one: retention.Foretold, document: retention.Forecast) -> tuple[str, ...]:
    at = "" if one.save is None else f"at save {one.save}, step {document.saves[one.save - 1].step}"
    what = {
        "keep": "stays",
        "delete": f"goes {at}",
        "thin": f"loses {', '.join(one.drop)} {at}",
        "wait": f"would go {at}; {one.waits_for}",
    }[one.action]
    why = one.keeps if one.why is None else one.why
    before = f"; until then: {one.keeps}" if one.why and one.keeps and one.action != "thin" else ""
    return (str(one.step), one.folder, size(one.nbytes), what, f"{why}{before}")


def _gone_text(gone: retention.Gone) -> str:
    what = f"step {gone.step}" if gone.save is None else f"step {gone.step} (save {gone.save})"
    return f"{', '.join(gone.drop)} of {what}" if gone.drop else what
