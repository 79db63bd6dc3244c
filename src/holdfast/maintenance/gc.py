"""Garbage collection: removes saves that never committed, and leftovers of deletions.

An attempt is the folder of one save. Before gc removes an uncommitted one, it puts an abort
marker under its manifest's key, so that a paused writer cannot commit it (docs/design.md, rule 1).
tests/protocol runs gc beside writers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import (
    AccessDenied,
    FormatError,
    HoldfastError,
    SealError,
    StoreError,
    UnsupportedStore,
    UnsupportedVersion,
    some_of,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Deleted, Manifest
from holdfast.format.records import Alive, AnswerRecord
from holdfast.ownership.claim import ends_with_its_put, is_live, nothing_in_flight
from holdfast.ownership.leases import find_leases
from holdfast.ownership.process import Liveness, is_this_process, liveness
from holdfast.root.attempts import EndedAttempts, known_ended
from holdfast.root.catalog import Catalog, Register
from holdfast.root.commit import kept_of_others, mark_aborted, remove_files, remove_scratch
from holdfast.root.documents import (
    holds_own_files,
    is_own_mark,
    is_there,
    read_if_there,
    was_made_by,
)
from holdfast.root.upload_records import host_of
from holdfast.store.base import Store

Outcome = Literal["remove", "mark", "keep"]


@dataclass(slots=True, kw_only=True)
class GcReport:
    """Result of a garbage collection or its dry run: (folder, why) of each, and bytes freed."""

    removed: list[tuple[str, str]] = field(default_factory=list)
    marked: list[tuple[str, str]] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Folders among the `failed` whose manifest is damaged or lost."""
    markers: dict[int, int] = field(default_factory=dict)
    """Counts, by writer epoch, of markers and tombstones kept until a user declares it dead."""
    bare: list[str] = field(default_factory=list)
    """Folders that contained only the marker."""
    foreign: list[str] = field(default_factory=list)
    """Warnings about things in the place of Holdfast's own, which were left alone."""
    nbytes: int = 0


def collect_garbage(
    store: Store,
    *,
    dry_run: bool = False,
    dead_epochs: Collection[int] = (),
    own_epoch: int | None = None,
    spared: Collection[str] = (),
    is_sent_to: bool = True,
    emit: Emitter | None = None,
) -> GcReport:
    """Remove uncommitted attempts and leftovers of deletions; keep committed checkpoints.

    Attempts of a live writer, the caller's own too, are left alone. `dead_epochs` are epochs that
    a person declares dead. `own_epoch` is the caller's claim: it has no other work in flight but
    the folders in `spared`, which it is going to commit. `is_sent_to`: whether the root may be
    the remote tier of a run, where uploads put manifests.
    A failure is reported and does not stop the rest.
    """
    report = GcReport()
    is_put_once = ends_with_its_put(store, is_sent_to=is_sent_to)
    judge = _Judge(store, frozenset(dead_epochs), own_epoch, is_put_once, emit or Emitter())
    with_uploads = _find_open_uploads(store, report)
    catalog = Catalog(store)
    attempts = catalog.attempts()
    ended = known_ended(store)
    unproven: list[str] = []
    visited: list[AttemptName] = []
    for name in dict.fromkeys((*attempts, *with_uploads)):
        folder = str(name)
        if own_epoch is not None and ended.is_listed(folder) and name not in with_uploads:
            continue  # an earlier owner found only its marker; `holdfast gc` looks again
        if folder in spared:
            report.kept.append((folder, "it is being sent"))
        else:
            visited.append(name)
    registers = catalog.read_each([str(name) for name in visited])
    for name, register in zip(visited, registers, strict=True):
        folder = str(name)
        if register is None and own_epoch is None and (host := host_of(store)):
            why = f"this is the disk of {host}, and another host may have its manifest"
            report.kept.append((folder, why))
            continue
        try:
            has_uploads = name in with_uploads
            if not _visit(
                store, name, register, judge, report, has_uploads=has_uploads, dry_run=dry_run
            ):
                unproven.append(folder)
            if has_uploads and not dry_run and _may_be_committed(store, folder):
                with suppress(AccessDenied, UnsupportedStore):
                    store.abort_uploads(folder)  # committed: all of its files exist
            if ended.is_listed(folder) and not dry_run:
                _drop_stale_record(store, folder, ended, report)
        except (StoreError, FormatError) as error:
            report.failed.append((folder, str(error)))
            if isinstance(error, FormatError) and not isinstance(error, UnsupportedVersion):
                report.damaged.append(folder)
    if unproven:
        report.foreign.append(
            f"{store.url}: {some_of(unproven)}: named like unfinished saves, but "
            "no record in the root shows that Holdfast made them, so they are left alone. Move "
            "your own folders out of the root; delete those of earlier versions by hand"
        )
    if own_epoch is not None and not dry_run:
        with _recording_failure("ended attempts", report):
            listed = (str(name) for name in attempts if ended.is_listed(str(name)))
            ended.write_ended_record(store, own_epoch, {*listed, *report.bare})
            _sweep_heartbeats(store, own_epoch)
    with _recording_failure(layout.REQUESTS, report):
        _sweep_answers(store, judge, report, own_epoch=own_epoch, dry_run=dry_run)
    with _recording_failure(layout.READERS, report):
        _sweep_leases(store, report, dry_run=dry_run)
    with _recording_failure("root", report):
        _sweep_temporary(store, judge, report, own_epoch=own_epoch, dry_run=dry_run)
    return report


@contextmanager
def _recording_failure(what: str, report: GcReport) -> Iterator[None]:
    """Record a store error of the `with` block in the report, and continue after the block."""
    try:
        yield
    except StoreError as error:
        report.failed.append((what, str(error)))


def _find_open_uploads(store: Store, report: GcReport) -> tuple[AttemptName, ...]:
    """List attempts with unfinished multipart uploads; they may have no other files."""
    try:
        folders = {key.partition("/")[0] for key in store.uploads()}
    except StoreError as error:
        report.failed.append(("uploads", f"unfinished uploads cannot be listed: {error}"))
        return ()
    return tuple(filter(None, map(layout.parse_attempt, sorted(folders))))


class _Judge:
    """Decides whether the writer of an epoch is live or dead; caches the answers."""

    def __init__(
        self,
        store: Store,
        dead_epochs: frozenset[int],
        own_epoch: int | None,
        is_put_once: bool,
        emit: Emitter,
    ) -> None:
        self._store = store
        self.declared_dead, self._own = dead_epochs, own_epoch
        self._is_put_once = is_put_once
        self._emit = emit
        self._newest = Catalog(store).highest_epoch()
        self._dead: dict[int, bool] = dict.fromkeys(dead_epochs, True)
        self._live: dict[int, bool] = dict.fromkeys(dead_epochs, False)
        self._nonces: dict[int, str | None] = {}

    def is_dead(self, epoch: int) -> bool:
        """Whether no store request of that epoch's writer can be in flight."""
        if epoch not in self._dead:
            self._dead[epoch] = nothing_in_flight(self._store, epoch)
        return self._dead[epoch]

    def is_attempt_closed(self, epoch: int, register: Register | None) -> bool:
        """Whether no writer or uploader can still add files to an attempt of that epoch."""
        if epoch in self.declared_dead or (isinstance(register, Deleted) and self._is_put_once):
            return True
        if not self._are_dead(epoch, max(epoch, self._newest)):
            return False
        # Look again: a whole removal leaves no marker, and there may be a newer claim by now.
        before = self._newest
        while is_there(self._store, layout.writer_key(self._newest + 1)):
            self._newest += 1
        return self._are_dead(before + 1, self._newest)

    def _are_dead(self, first: int, last: int) -> bool:
        epochs = range(first, last + 1)
        return all(self.is_dead(number) for number in epochs if number != self._own)

    def is_made_by_its_writer(self, name: AttemptName) -> bool:
        """Whether the folder's name proves that the claim of its epoch has made it."""
        if name.epoch not in self._nonces:
            writer = None
            with suppress(FormatError):
                writer = Catalog(self._store).writer(name.epoch)
            self._nonces[name.epoch] = None if writer is None else writer.nonce
        return was_made_by(name, self._nonces[name.epoch])

    def is_live(self, epoch: int) -> bool:
        """Whether the epoch owns the run and its process is alive."""
        if epoch not in self._live:
            self._live[epoch] = not self.is_dead(epoch) and self._owner_lives(epoch)
        return self._live[epoch]

    def _owner_lives(self, epoch: int) -> bool:
        if epoch < self._newest:
            return False
        try:
            writer = Catalog(self._store).writer(epoch)
        except FormatError:
            return False
        if writer is None:
            return False
        if is_live(self._store, writer, emit=self._emit):
            return True
        # A manager of this very process does not count as another owner, but it may be writing.
        return is_this_process(writer.process)


def _visit(
    store: Store,
    name: AttemptName,
    found: Register | HoldfastError | None,
    judge: _Judge,
    report: GcReport,
    *,
    has_uploads: bool,
    dry_run: bool,
) -> bool:
    """Visit one attempt; return False, without a change, if no record shows that it is one."""
    folder = str(name)
    register = None if isinstance(found, HoldfastError) else found
    if isinstance(found, HoldfastError) and not isinstance(found, SealError):
        raise found
    is_committed = isinstance(found, Manifest | SealError)  # that: encrypted for other keys
    if is_committed:
        for key in _marks_of_dead(store, folder, register, judge.declared_dead):
            if not dry_run:
                store.delete(key)
            report.removed.append((key, "the mark of a deletion that its writer will not end"))
        return True
    if register is None and judge.is_live(name.epoch):
        report.kept.append((folder, f"writer {name.epoch} is alive"))
        return True
    is_proven = judge.is_made_by_its_writer(name) or (
        # A person named the writer, whose claim may be lost: then the content is the proof.
        name.epoch in judge.declared_dead and holds_own_files(store, folder)
    )
    if register is None and not is_proven:
        report.kept.append((folder, f"writer {name.epoch} is not known to have made it"))
        return False
    there = [*store.list(f"{folder}/")]
    nbytes = sum(info.nbytes for info in there)
    whole = judge.is_attempt_closed(name.epoch, register)
    why = _why(register is None, name.epoch, whole)
    if not dry_run:
        if register is None and not mark_aborted(store, folder, by="gc", reason="not committed"):
            return True
        if register is not None and len(there) == 1 and not (whole or has_uploads):
            report.bare.append(folder)
        elif left := remove_files(store, folder, whole=whole):
            report.kept.append((folder, f"it contains other files: {some_of(left)}"))
            if register is None:
                report.foreign.append(kept_of_others(store, folder, left))
            return True
    if whole:
        report.removed.append((folder, why))
    elif store.children(folder) != (layout.MANIFEST,) or register is None:
        report.marked.append((folder, why))
    if not whole and not judge.is_live(name.epoch):
        report.markers[name.epoch] = report.markers.get(name.epoch, 0) + 1
    report.nbytes += nbytes
    return True


def _marks_of_dead(
    store: Store, folder: str, register: Register | None, dead_epochs: frozenset[int]
) -> list[str]:
    """List marks of deletions by dead writers in which no file is deleted, if that is known."""
    names = store.children(folder) if dead_epochs else ()
    dead = [name for name in names if layout.parse_retired(name) in dead_epochs]
    for name in names:
        thinned = layout.parse_thinned(name)
        if thinned and thinned[1] in dead_epochs and isinstance(register, Manifest):
            component = register.components.get(thinned[0])
            if component is not None and {*component.files} <= {*names}:
                dead.append(name)
    return [key for name in dead if is_own_mark(store, key := f"{folder}/{name}")]


def _drop_stale_record(store: Store, folder: str, ended: EndedAttempts, report: GcReport) -> None:
    """Remove the record of ended attempts if it lists a committed or a just removed folder."""
    if _may_be_committed(store, folder):
        report.kept.append((folder, "committed, although recorded as ended: it was restored"))
    elif not any(folder == removed for removed, _ in report.removed[-1:]):
        return
    ended.clear_records(store)


def _sweep_heartbeats(store: Store, own_epoch: int) -> None:
    """Remove the heartbeats of earlier epochs, except of processes that may be finishing a save."""
    names = store.children(layout.WRITERS)
    epochs = (layout.parse_alive(name) for name in names)
    old = [layout.alive_key(epoch) for epoch in epochs if epoch is not None and epoch < own_epoch]
    store.delete_many([key for key in old if _is_old_heartbeat(store, key)])


def _is_old_heartbeat(store: Store, key: str) -> bool:
    try:
        found = read_if_there(store, key, Alive.decode)
    except FormatError:
        return False
    if found is None:
        return False
    return found.process is None or liveness(found.process) in ("ours", "dead")


def _sweep_answers(
    store: Store, judge: _Judge, report: GcReport, *, own_epoch: int | None, dry_run: bool
) -> None:
    """Remove answers to save requests whose process is dead, or unknown in a root without owner."""
    for name in filter(layout.is_answer, store.children(layout.REQUESTS)):
        key = layout.request_key(name)
        try:
            asker = _asker(store, key)
            if asker is None:
                continue  # not an answer
            if asker == "dead" or (asker == "unknown" and not _is_owned(store, judge, own_epoch)):
                if not dry_run:
                    store.delete(key)
                report.removed.append((key, "an answer that nobody waits for"))
        except StoreError as error:
            report.failed.append((key, str(error)))


def _asker(store: Store, key: str) -> Liveness | None:
    """Say whether the process that an answer is for lives; None: it cannot be read as an answer."""
    try:
        answer = read_if_there(store, key, AnswerRecord.decode)
    except FormatError:
        return None
    if answer is None:
        return None
    return "unknown" if answer.asker is None else liveness(answer.asker)


def _is_owned(store: Store, judge: _Judge, own_epoch: int | None) -> bool:
    """Whether another live process owns the root."""
    owner = Catalog(store).highest_epoch()
    return owner not in (0, own_epoch) and judge.is_live(owner)


def _sweep_leases(store: Store, report: GcReport, *, dry_run: bool) -> None:
    """Remove leases of dead processes, and leases on deleted checkpoints; others may be read."""
    for lease in find_leases(store):
        why = "a lease of a process that is gone" if lease.state == "dead" else ""
        if not why and lease.lease is not None and not _may_be_committed(store, lease.folder):
            why = "a lease on a checkpoint that is gone"
        if why and not dry_run:
            store.delete(lease.key)
        target = report.removed if why else report.kept
        target.append((lease.key, why or f"{lease.who} reads {lease.folder}, or may"))


def _is_sent_now(store: Store, name: str, own_epoch: int | None) -> bool:
    """Whether a temporary folder is of an upload by another host under the caller's claim."""
    with suppress(FormatError):
        own = None if own_epoch is None else Catalog(store).writer(own_epoch)
        return own is not None and layout.is_sent_under(name, own.nonce)
    return False


def _may_be_committed(store: Store, folder: str) -> bool:
    """Whether a folder has a manifest, also one that is damaged or has unknown keys."""
    try:
        return isinstance(Catalog(store).read(folder), Manifest)
    except (FormatError, SealError):
        return True


def _why(uncommitted: bool, epoch: int, whole: bool) -> str:
    what = "never committed" if uncommitted else "deleted or aborted"
    if whole:
        return f"{what}; writer {epoch} is gone"
    return f"{what}; writer {epoch} may still be paused somewhere, so its marker stays"


def _sweep_temporary(
    store: Store, judge: _Judge, report: GcReport, *, own_epoch: int | None, dry_run: bool
) -> None:
    """Remove temporary files of killed preflights and puts unless another process owns the root."""
    names = [name for key in store.children() if layout.is_scratch(name := key.rstrip("/"))]
    # To find out who owns the root may take half a minute.
    if (dry_run and not names) or _is_owned(store, judge, own_epoch):
        return
    for name in names:
        if _is_sent_now(store, name, own_epoch):
            continue
        with _recording_failure(name, report):
            if not dry_run:
                remove_scratch(store, name)
            what = "a preflight" if layout.is_preflight(name) else "an upload"
            report.removed.append((name, f"{what} that did not end"))
    if dry_run or not store.has_folders:
        return
    # The caller's own heartbeat may be in flight among the claims, and requests of others to it.
    claims = [layout.WRITERS, layout.REQUESTS] if own_epoch is None else []
    for folder in ("", layout.HISTORY, *claims):
        with _recording_failure(folder or "root", report):
            store.sweep(folder)
    # A reader may be renewing its lease among the others.
    with _recording_failure(layout.READERS, report):
        if not any(find_leases(store)):
            store.sweep(layout.READERS)
    for folder in map(str, Catalog(store).open_attempts()):
        with _recording_failure(folder, report):
            if _may_be_committed(store, folder):
                store.sweep(folder)
