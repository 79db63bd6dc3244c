"""`holdfast rm` and `holdfast thin`: delete one checkpoint, or components of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.documents import expect_something_opened
from holdfast.cli.options import command, flag, option, several
from holdfast.cli.output import Answer, Code, emitter, format_nbytes, printable
from holdfast.cli.target import open_root, open_root_store, unlocked
from holdfast.errors import FormatError, NoCheckpoint, SealError, UsageError, listing
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Deleted
from holdfast.maintenance.delete import (
    DeletionPlan,
    already_dropped,
    complete_deletion,
    delete_as_planned,
    examine,
)
from holdfast.root.address import split_folder, split_source
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import Store

_MOST_REASON = 1000
"""Most characters of a reason, which claims and marks record."""
_STEP = re.compile(r"step=(\d{1,18})", re.ASCII)


class RemovedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast rm` and `holdfast thin`."""

    root: str
    """Path or URL of the run."""
    folder: str
    """The checkpoint's folder."""
    step: int | None
    """Completed optimizer windows; null where an earlier `rm` has deleted its manifest."""
    drop: tuple[str, ...]
    """Components that were dropped, or are to be; empty for `rm`, which deletes all."""
    dry_run: bool
    """Whether nothing was deleted."""
    done: bool
    """Whether it is deleted, or the components are."""
    kept_because: str | None = None
    """Why nothing was deleted, or null."""
    nbytes: int = 0
    """Bytes that were freed, or would be."""
    reason: str = ""
    """The reason, which is recorded in the claim and printed by `log`, unless it is encrypted."""
    resumes_from: str | None = None
    """Folder of the checkpoint from which the run resumes afterwards; null: there is none."""
    warnings: tuple[str, ...] = ()
    """Warnings, such as of files of others that were left; they go to standard error, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Options of a deletion: the reason, allowed exceptions and the confirmation."""

    reason: str
    even_pinned: bool
    even_latest: bool
    dry_run: bool
    yes: bool


_LEAVE = (
    option(
        "--reason",
        "TEXT",
        "Reason to record for `holdfast log`. On a terminal, rm asks for it.",
        default="",
        show_default=False,
    ),
    flag("--even-pinned", "Allow deleting a pinned or tagged checkpoint."),
    flag("--even-latest", "Allow deleting the checkpoint from which the run would resume."),
    options.dry_run,
    flag("--yes", "Do not ask for confirmation."),
)


@command("rm", options.one, *_LEAVE, answer=RemovedAnswer)
def rm(target: str, **given: Any) -> Answer:
    """Delete one checkpoint, and record the reason.

    Nothing is deleted if the checkpoint is pinned or tagged, if the run would resume from it, if it
    is being read or uploaded, or if a live process owns the run. First, the checkpoint from which
    the run would resume is verified. With --yes, name a step or a folder, not latest.
    """
    leave = Leave(**given)
    store, which = _open_target(target)
    if which == "latest" and leave.yes:
        raise UsageError(
            f"{target!r}: nothing was deleted. With --yes name the step or the folder: given "
            "twice, this would delete two checkpoints"
        )
    try:
        entry = _only(store, which)
    except NoCheckpoint:
        left = _tombstone(store, which)
        if left is None:
            raise
        warnings: list[str] = []
        if not leave.dry_run:
            complete_deletion(store, left, emit=emitter(warnings))
        return _finished(store, left, warnings, dry_run=leave.dry_run)
    return _carried_out(store, examine(store, entry), leave, command="rm")


@command(
    "thin",
    options.one,
    several(
        "--drop", "components", "COMPONENT", "Component to drop, such as optimizer.", required=True
    ),
    *_LEAVE,
    answer=RemovedAnswer,
)
def thin(target: str, components: Sequence[str], **given: Any) -> Answer:
    """Delete components of a checkpoint, such as the optimizer.

    The other components are kept, but a run can no longer resume from it.
    """
    leave = Leave(**given)
    store, which = _open_target(target)
    entry = _only(store, which)
    wanted = tuple(dict.fromkeys(components))
    if already_dropped(store, entry, wanted):
        document = RemovedAnswer(
            root=store.url,
            folder=entry.folder,
            step=entry.step,
            drop=wanted,
            dry_run=leave.dry_run,
            done=True,
        )
        return Answer(document=document, parts=[f"{entry.folder}: dropped before"])
    return _carried_out(store, examine(store, entry, wanted), leave, command="thin")


def _open_target(target: str) -> tuple[Store, str]:
    """Open the store of a target that names one checkpoint; return it and the name."""
    root, which = split_source(target)
    parent, folder = split_folder(root) if which is None else ("", "")
    if folder:
        return unlocked(open_root_store(parent)), folder
    if which is None:
        raise UsageError(
            f"{target!r}: nothing was deleted. Name one checkpoint, as {target}@step=1000; "
            "`holdfast prune` deletes by a rule"
        )
    if any(letter in which for letter in "*?[],") or ".." in which:
        raise UsageError(
            f"{which!r}: nothing was deleted. This takes one checkpoint at a time; `holdfast "
            "prune` deletes by a rule"
        )
    return open_root(root), which


def _only(store: Store, which: str) -> Entry:
    """Find the one checkpoint that `which` names, in any branch; raises if none or several."""
    catalog = Catalog(store)
    if layout.parse_attempt(which) is not None or which == "latest":
        return catalog.find_checkpoint(which)
    entries, unread = catalog.survey()
    expect_something_opened(entries, unread)
    step = _STEP.fullmatch(which)
    found = [
        entry
        for entry in entries
        if (step is not None and entry.step == int(step[1]))
        or which in (*entry.tags, entry.name.label)
    ]
    if len(found) > 1:
        raise UsageError(
            f"{store.url}: nothing was deleted, because {which!r} names several checkpoints. Name "
            "the folder of one:\n" + listing([_describe_entry(entry) for entry in found])
        )
    return found[0] if found else catalog.find_checkpoint(which)


def _describe_entry(entry: Entry) -> str:
    return f"{entry.folder} (step {entry.step}, {entry.manifest.created})"


def _tombstone(store: Store, which: str) -> str | None:
    """Find the folder of a checkpoint that an interrupted `rm` has deleted, but not removed."""
    step = _STEP.fullmatch(which)
    label = f"step-{int(step[1]):08d}" if step is not None else which

    def is_meant(name: AttemptName) -> bool:
        return which == str(name) or name.label == label

    for name in filter(is_meant, Catalog(store).attempts()):
        try:
            if isinstance(Catalog(store).read(str(name)), Deleted):
                return str(name)
        except (FormatError, SealError):
            continue
    return None


def _finished(store: Store, folder: str, warnings: Sequence[str], *, dry_run: bool) -> Answer:
    document = RemovedAnswer(
        root=store.url,
        folder=folder,
        step=None,
        drop=(),
        dry_run=dry_run,
        done=True,
        warnings=tuple(warnings),
    )
    what = "only the files of others are" if warnings else "nothing of it is"
    return Answer(document=document, parts=[f"{folder}: deleted before; {what} left"])


def _carried_out(store: Store, asked: DeletionPlan, leave: Leave, *, command: str) -> Answer:
    if leave.dry_run:
        why = "; ".join(_objections(asked, leave)) or asked.waits_for
        return _build_removal_answer(store, asked, leave, kept_because=why or None)
    _expect_leave(asked, leave)
    if asked.waits_for:
        return _build_removal_answer(store, asked, leave, kept_because=asked.waits_for)
    reason = _reason(asked, leave, command=command)
    if not leave.yes and not click.confirm("Delete?", err=True):
        return _build_removal_answer(store, asked, leave, kept_because="you said no")
    leave = replace(leave, reason=reason)
    warnings: list[str] = []
    why = delete_as_planned(store, asked, reason=reason, emit=emitter(warnings))
    return _build_removal_answer(store, asked, leave, kept_because=why or None, warnings=warnings)


def _objections(asked: DeletionPlan, leave: Leave) -> list[str]:
    objections = [f"{why} (--even-pinned)" for why in asked.keeps if not leave.even_pinned]
    if asked.is_latest and not leave.even_latest:
        objections.append("the run would resume from it (--even-latest)")
    return objections


def _expect_leave(asked: DeletionPlan, leave: Leave) -> None:
    if objections := _objections(asked, leave):
        raise UsageError(
            f"{asked.entry.folder} (step {asked.entry.step}): not deleted: "
            f"{'; '.join(objections)}. Pass the option in parentheses to delete it anyway"
        )


def _reason(asked: DeletionPlan, leave: Leave, *, command: str) -> str:
    """Return the reason for the deletion; on a terminal, show what goes and ask for it."""
    is_asking = sys.stdin.isatty() and sys.stderr.isatty()
    if not leave.yes and not is_asking:
        raise UsageError(
            f"nothing was deleted, because there is no terminal for the question: add --yes, or "
            f"--dry-run to preview `{command}`"
        )
    if not leave.yes:
        for line in _format_deletion(asked):
            click.echo(printable(line), err=True)
    reason = leave.reason.strip()
    if len(reason) > _MOST_REASON:
        raise UsageError(f"nothing was deleted: --reason has more than {_MOST_REASON} characters")
    if not reason and command == "rm":
        if is_asking:
            reason = str(click.prompt("Why", err=True)).strip()
        if not reason:
            raise UsageError("nothing was deleted: say why, as --reason TEXT")
    return reason or "a person dropped it"


def _format_deletion(asked: DeletionPlan) -> list[str]:
    entry, after = asked.entry, asked.goes_on_from
    what = f"drops {', '.join(asked.components)} of" if asked.components else "deletes"
    marks = "; ".join(
        [*asked.keeps, *(["the run would resume from it"] if asked.is_latest else [])]
    )
    lines = [f"{what} {entry.folder}: step {entry.step}, {format_nbytes(asked.nbytes)}"]
    lines += [f"{marks}"] if marks else []
    if asked.is_latest:
        lines.append(
            f"afterwards the run resumes from {after.folder} (step {after.step})"
            if after is not None
            else "afterwards the run cannot resume from any checkpoint"
        )
    return lines


def _build_removal_answer(
    store: Store,
    asked: DeletionPlan,
    leave: Leave,
    *,
    kept_because: str | None,
    warnings: Sequence[str] = (),
) -> Answer:
    entry, after = asked.entry, asked.goes_on_from
    is_done = not leave.dry_run and kept_because is None
    document = RemovedAnswer(
        root=store.url,
        folder=entry.folder,
        step=entry.step,
        drop=asked.components,
        dry_run=leave.dry_run,
        done=is_done,
        kept_because=kept_because,
        nbytes=asked.nbytes if is_done or leave.dry_run else 0,
        reason=leave.reason,
        resumes_from=None if after is None else after.folder,
        warnings=tuple(warnings),
    )
    if is_done:
        end = f"done; {format_nbytes(asked.nbytes)} freed"
    elif kept_because is None:
        end = f"{format_nbytes(asked.nbytes)} would be freed; nothing was deleted"
    else:
        end = f"nothing was deleted: {kept_because}"
    is_kept = kept_because is not None
    return Answer(
        document=document,
        parts=[*_format_deletion(asked), end],
        code=Code.FOUND if is_kept else Code.OK,
    )
