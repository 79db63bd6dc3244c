"""`holdfast cp`: copy checkpoints into another root, their digests checked on the way."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cli import options
from holdfast.cli.options import argument, command, flag
from holdfast.cli.output import Answer, Code, TextTable, emitter, format_nbytes, progress_bar
from holdfast.cli.target import names_one, open_root, open_root_store, open_target, unlocked
from holdfast.errors import CorruptData, HoldfastError, NoCheckpoint, SealError, UsageError
from holdfast.events import Emitter
from holdfast.replication.copy_checkpoints import Copied, PlannedCopy, copy_checkpoints, plan_copies
from holdfast.root.address import expect_writable, split_source
from holdfast.root.catalog import Catalog, is_root
from holdfast.store.base import Store


class CopiedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was copied, or is to be."""

    source: str
    """Path or URL of the root that it is copied from."""
    folder: str
    """Its folder, which has the same name in both roots."""
    step: int | None = None
    """Completed optimizer windows; null where it is encrypted and no key was given."""
    nbytes: int = 0
    """Bytes of its files, as stored."""
    sent_nbytes: int = 0
    """Bytes that were sent, or that a dry run would send."""
    outcome: str
    """`copied`, `to copy` (dry run), `already there`, `left out` (`--all`: it was thinned,
    or deleted in the other root), or `failed`."""
    why: str | None = None
    """Why it failed or was left out, or null."""


class CopyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast cp`."""

    root: str
    """Path or URL of the root that was copied to."""
    dry_run: bool
    """Whether nothing was written."""
    checkpoints: tuple[CopiedCheckpoint, ...]
    """The checkpoints in the order in which they are copied; none after a failure other than
    damage. With `--all`, what cannot be read or is left out comes first."""
    warnings: tuple[str, ...]
    """Warnings, such as of a foreign `latest` that was left; they go to standard error, too."""


@command(
    "cp",
    argument("sources", "ROOT@WHICH...", "Checkpoints; with --all, roots.", nargs=-1),
    argument("to", "ROOT", "The root to copy to; it need not exist."),
    flag("--all", "Copy all checkpoints of each root.", "whole"),
    options.dry_run,
    answer=CopyAnswer,
)
def copy_all(sources: Sequence[str], to: str, *, whole: bool, dry_run: bool) -> Answer:
    """Copy checkpoints to another root, in any store.

    Every digest is checked. Pins and tags are copied, and encrypted checkpoints remain encrypted.
    After an interruption, the same command continues. The copy is the same run: you can resume from
    it, but if training continues in both, another copy between them is refused.
    """
    target = _open_target_root(to)
    done: list[CopiedCheckpoint] = []
    found = _sources(sources, done, whole=whole)
    plans = [
        (store, _plan_root_copy(store, target, folders, done if whole else None))
        for store, folders in _grouped(found, target)
    ]
    warnings: list[str] = []
    emit = emitter(warnings)
    for store, planned in plans:
        if dry_run:
            done += [_to_copy(store, item) for item in planned]
        elif not _copied(store, target, planned, done, emit):
            break
    return _build_copy_answer(target, done, warnings, dry_run=dry_run)


def _open_target_root(to: str) -> Store:
    expect_writable(to)
    if names_one(to):
        raise UsageError(f"{to!r} names a checkpoint; the last argument is the root to copy to")
    store = unlocked(open_root_store(split_source(to)[0]))
    names = store.children()
    if names and not is_root(store):
        raise UsageError(
            f"{store.url} holds other files, such as {names[0]!r}, and no run. Nothing was "
            "copied; name a new or empty folder, or a root of Holdfast"
        )
    return store


def _sources(
    texts: Sequence[str], left: list[CopiedCheckpoint], *, whole: bool
) -> list[tuple[Store, str]]:
    """Find the checkpoints that the user named: (store, folder); add to `left` what stays."""
    found: list[tuple[Store, str]] = []
    for text in texts:
        if whole:
            store = open_root(text)
            folders, of_root = _all_of(store)
            if not folders and not of_root:
                raise NoCheckpoint(f"{store.url}: no checkpoints")
            found += [(store, folder) for folder in folders]
            left += of_root
        elif not names_one(text):
            raise UsageError(
                f"{text!r}: name one checkpoint, as {text}@latest, or copy all of the root: --all"
            )
        else:
            found.append(open_target(text))
    return found


def _all_of(store: Store) -> tuple[list[str], list[CopiedCheckpoint]]:
    """Return the folders of a root that can be copied, and what cannot, with the reason."""
    entries, unread = Catalog(store).survey()
    # Stored bytes are copied, so that no key is needed.
    folders = [folder for folder, error in unread if isinstance(error, SealError)]
    left = [
        CopiedCheckpoint(source=store.url, folder=folder, outcome="failed", why=str(error))
        for folder, error in unread
        if not isinstance(error, SealError)
    ]
    for entry in entries:
        if dropped := entry.marks.thinned:
            why = f"{', '.join(dropped)} was dropped from it, and only whole ones are copied"
            left.append(
                CopiedCheckpoint(
                    source=store.url,
                    folder=entry.folder,
                    step=entry.step,
                    outcome="left out",
                    why=why,
                )
            )
        else:
            folders.append(entry.folder)
    return folders, left


def _grouped(found: Sequence[tuple[Store, str]], target: Store) -> list[tuple[Store, list[str]]]:
    groups: dict[str, tuple[Store, list[str]]] = {}
    for store, folder in found:
        if store.url == target.url:
            raise UsageError(f"{store.url}: this root is both copied from and copied to")
        folders = groups.setdefault(store.url, (store, []))[1]
        if folder not in folders:
            folders.append(folder)
    return [*groups.values()]


def _plan_root_copy(
    store: Store, target: Store, folders: Sequence[str], left: list[CopiedCheckpoint] | None
) -> tuple[PlannedCopy, ...]:
    """Plan the copy of one root; add to `left` what was deleted, or differs in the target."""
    if left is None:
        return plan_copies(store, target, folders)

    def pass_over(folder: str, error: HoldfastError) -> None:
        outcome = "left out" if isinstance(error, NoCheckpoint) else "failed"
        why = str(error)
        left.append(CopiedCheckpoint(source=store.url, folder=folder, outcome=outcome, why=why))

    return plan_copies(store, target, folders, passed_over=pass_over)


def _copied(
    store: Store,
    target: Store,
    planned: Sequence[PlannedCopy],
    done: list[CopiedCheckpoint],
    emit: Emitter,
) -> bool:
    """Copy the checkpoints of one root, as far as possible; add the outcomes to `done`."""
    with progress_bar() as told:
        while planned:
            before = len(done)
            try:
                for item in copy_checkpoints(store, target, planned, emit=emit, on_progress=told):
                    done.append(_describe_copy(store, item))
                return True
            except HoldfastError as error:
                failed, *rest = planned[len(done) - before :] or (None,)
                goes_on = isinstance(error, CorruptData) and bool(rest)
                if failed is None or not (done or goes_on):
                    raise
                stays = _to_copy(store, failed)
                done.append(msgspec.structs.replace(stays, outcome="failed", why=str(error)))
                if not goes_on:
                    return isinstance(error, CorruptData)
                planned = rest
    return True


def _describe_copy(store: Store, item: Copied) -> CopiedCheckpoint:
    return CopiedCheckpoint(
        source=store.url,
        folder=item.folder,
        step=item.step,
        nbytes=item.nbytes,
        sent_nbytes=item.sent_nbytes,
        outcome="already there" if item.was_there else "copied",
    )


def _to_copy(store: Store, item: PlannedCopy) -> CopiedCheckpoint:
    return CopiedCheckpoint(
        source=store.url,
        folder=item.folder,
        step=item.completed_steps,
        nbytes=item.nbytes,
        sent_nbytes=item.missing_nbytes,
        outcome="already there" if item.was_there else "to copy",
    )


def _build_copy_answer(
    target: Store, done: Sequence[CopiedCheckpoint], warnings: Sequence[str], *, dry_run: bool
) -> Answer:
    table = TextTable(
        columns=("step", "folder", "size", "sent", "outcome"),
        rows=[
            (
                "?" if item.step is None else str(item.step),
                item.folder,
                format_nbytes(item.nbytes),
                format_nbytes(item.sent_nbytes),
                item.outcome,
            )
            for item in done
        ],
        right=frozenset({0, 2, 3}),
        whole=frozenset({0, 1, 2, 3, 4}),
    )
    lines = [
        f"{'FAILED' if item.outcome == 'failed' else 'skipped:'} {item.folder}: {item.why}"
        for item in done
        if item.why is not None
    ]
    sent = format_nbytes(sum(item.sent_nbytes for item in done))
    lines.append(f"{sent} {'to send' if dry_run else 'sent'} to {target.url}")
    document = CopyAnswer(
        root=target.url, dry_run=dry_run, checkpoints=tuple(done), warnings=tuple(warnings)
    )
    is_failed = any(item.outcome == "failed" for item in done)
    return Answer(
        document=document, parts=[table, *lines], code=Code.FOUND if is_failed else Code.OK
    )
