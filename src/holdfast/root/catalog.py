"""Reads a run's root: attempts, manifests, claims, and which checkpoint a resume continues from.

This module knows the order of epochs and saves (docs/design.md, section 3) and nothing about
tensors. It never writes and never claims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import msgspec

from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotSealed,
    NoUsableCheckpoint,
    SealError,
    StoreError,
    UnsupportedVersion,
    UsageError,
    listing,
)
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    Manifest,
    Reference,
    decode_register,
)
from holdfast.format.records import Notes, Rejected, TiersRecord, WriterRecord
from holdfast.policy.rule import MAIN
from holdfast.root.attempts import Evidence, known_ended, latest_of
from holdfast.root.best import best_of, means_best
from holdfast.root.documents import holds_own_files, is_own_mark, read_if_there, was_made_by
from holdfast.store.base import ObjectInfo, Store

Register = Manifest | Aborted | Deleted
T = TypeVar("T")
U = TypeVar("U")
_MAX_LOST = 1000
"""Largest number of missing claims between existing ones; more mean a forged epoch number."""
_READERS = 16
"""Threads that read manifests from a store whose reads wait for a network, if it has as many."""
_STEP = re.compile(r"step=(\d{1,18})", re.ASCII)
_NO_NOTES = Notes(tags=(), pinned=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks that sidecar files add to a checkpoint: deletion, rejection, and notes."""

    retired_by: tuple[int, ...] = ()
    """The writer epochs that began to delete it."""
    thinned_by: tuple[tuple[str, int], ...] = ()
    """(component, writer epoch that began to drop it)."""
    rejected: tuple[str, ...] = ()
    notes: Notes = _NO_NOTES
    notes_number: int = 0
    """Number of the newest notes, also of unreadable ones; 0 if there are none."""

    @property
    def pinned(self) -> bool:
        """Whether the checkpoint is pinned."""
        return self.notes.pinned

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags given later."""
        return self.notes.tags

    @property
    def retired(self) -> bool:
        """Whether a writer began to delete the checkpoint."""
        return bool(self.retired_by)

    @property
    def thinned(self) -> tuple[str, ...]:
        """The components that writers began to drop, without repeats."""
        return tuple(dict.fromkeys(name for name, _ in self.thinned_by))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Committed checkpoint in the catalog: its name, its manifest, its marks."""

    name: AttemptName
    folder: str
    """Its folder inside the root; a copy of one checkpoint may have any name."""
    manifest: Manifest
    marks: Marks

    @property
    def step(self) -> int:
        """Completed optimizer windows."""
        return self.manifest.timestamp.step

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, sequence), by which checkpoints are sorted."""
        return self.name.order

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags given at the save and later, without repeats."""
        return tuple(dict.fromkeys(self.manifest.tags + self.marks.tags))

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics given at the save, and those measured later, which take precedence."""
        return {**self.manifest.metrics, **self.marks.notes.metrics}

    @property
    def reference(self) -> Reference:
        """The reference by which records name this checkpoint."""
        return Reference(
            epoch=self.name.epoch,
            sequence=self.name.sequence,
            save_id=self.manifest.save_id,
            folder=self.folder,
        )


class Catalog:
    """Reader of the attempts, manifests, claims and marks in one root; each query reads anew."""

    def __init__(self, store: Store, *, claims: dict[int, WriterRecord] | None = None) -> None:
        """Use `claims` as a cache of claims by epoch, and fill it; only for the run's owner."""
        # Earlier claims do not change while it owns the run, and there may be many.
        self.store = store
        self._known_claims = claims if claims is not None else {}
        self._keeps_claims = claims is not None
        self._skips_ended = True
        self._known_evidence: Evidence | None = None
        self.vanished = ""
        """Folder of the newest rollback's checkpoint, if `lineage` found that it no longer exists.

        The lineage is then what that rollback had left behind; see `expect_rollback_target`.
        Otherwise empty.
        """
        self.files: Mapping[str, Sequence[ObjectInfo]] = {}
        """Files of each checkpoint as the last `survey` of a store without folders listed them."""
        self.unread = 0
        """The newest epoch without a commit whose claim `lineage` could not read; otherwise 0."""
        self._fresh_epoch = 0

    def find_store(self, folder: str) -> Store:
        """Return the store that a checkpoint is read from: one of the tiers, if there are two."""
        return self.store

    def switch_tier(self, folder: str) -> bool:
        """Read a damaged checkpoint from the other tier from now on; False if that has no copy."""
        return False

    def copies(self, entry: Entry) -> Iterator[tuple[Store, Entry]]:
        """Yield each store that holds a copy of a checkpoint, with its entry in that store."""
        yield self.store, entry

    def look_again(self) -> None:
        """Begin a new query: clear caches, and retry a tier that could not be reached before."""
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._known_evidence = None
        if not self._keeps_claims:
            self._known_claims.clear()

    def attempts(self) -> tuple[AttemptName, ...]:
        """List every attempt, newest first, from the folder names alone; clears caches."""
        self._clear_caches()
        names = self.store.children()
        known_ended(self.store).read_new_records(self.store, names)
        parsed = (layout.parse_attempt(name[:-1]) for name in names if name.endswith("/"))
        return tuple(sorted((name for name in parsed if name is not None), reverse=True))

    def open_attempts(self) -> tuple[AttemptName, ...]:
        """List the attempts, newest first, without those known to be aborted or deleted."""
        found, known = self.attempts(), known_ended(self.store)
        return tuple(n for n in found if str(n) not in known) if self._skips_ended else found

    def has_skipped(self) -> bool:
        """Whether `open_attempts` skipped any before this call; make it skip none from now on.

        For callers that found nothing: a user may have restored one of them.
        """
        is_first, self._skips_ended = self._skips_ended, False
        known = known_ended(self.store)
        return is_first and bool(known.aborted or known.deleted)

    def read(self, folder: str) -> Register | None:
        """Read an attempt's register: its manifest, marker or tombstone; None if it is absent.

        None also for a folder that nothing shows to be Holdfast's.

        Raises:
            FormatError: it is not a valid document; or it is missing, and other records show that
                a manifest was committed.
        """
        try:
            return self._read_own(folder)
        except UnsupportedVersion:
            raise
        except FormatError:
            name = layout.parse_attempt(folder)
            if name is None or self._is_own(name):
                raise
            return None

    def _is_own(self, name: AttemptName) -> bool:
        claim = self._claim_or_none(name.epoch)
        is_made = claim is not None and was_made_by(name, claim.nonce)
        return is_made or holds_own_files(self.store, str(name))

    def _read_own(self, folder: str) -> Register | None:
        register = self._read_register(folder)
        name = layout.parse_attempt(folder) if register is None else None
        why = self._evidence().of_commit(name) if name is not None else ""
        if why:
            register = self._read_register(
                folder
            )  # it may have been put since, before those records
            if register is None:
                raise CorruptData(
                    f"{self.store.url}/{folder}/{layout.MANIFEST} is missing, though it was "
                    f"committed: {why}. The other files are kept: put a copy of the manifest "
                    "back, or look at the folder with `holdfast gc ROOT --damaged FOLDER`, which "
                    "can delete it"
                )
        return register

    def _read_register(self, folder: str) -> Register | None:
        key = f"{folder}/{layout.MANIFEST}"
        register = read_if_there(self.store, key, decode_register, max_nbytes=MAX_MANIFEST_NBYTES)
        if isinstance(register, Manifest):
            _check_place(register, folder)
        elif register is not None:
            known_ended(self.store).add_attempt(folder, register)
        return register

    def expect_own(self, manifest: Manifest, folder: str) -> None:
        """Raise `FormatError` unless a manifest was saved under this run's claim of its epoch."""
        claim = self._claim_or_none(manifest.epoch) if manifest.writer is not None else None
        if claim is not None and claim.nonce != manifest.writer:
            raise FormatError(
                f"{self.store.url}/{folder} was copied here from another run: it was not saved by "
                f"writer {claim.epoch} of this one. Move it out of this root. It can be resumed in "
                "a root that no run has been started in"
            )

    def _evidence(self) -> Evidence:
        """Return the cached `Evidence` of the current query; `attempts` drops it."""
        if self._known_evidence is None:
            self._known_evidence = Evidence(self.store)
        return self._known_evidence

    def marks(self, folder: str) -> Marks:
        """Read the marks of a checkpoint from its sidecar files; damaged ones are skipped."""
        return self._marks(folder, self.find_store(folder).children(folder))

    def _marks(self, folder: str, names: tuple[str, ...]) -> Marks:
        notes, number = self._newest_notes(folder, names)
        return Marks(
            retired_by=self._own(folder, names, layout.parse_retired),
            thinned_by=self._own(folder, names, layout.parse_thinned),
            rejected=self._reasons(folder) if layout.REJECTED in names else (),
            notes=notes,
            notes_number=number,
        )

    def _own(
        self, folder: str, names: tuple[str, ...], parse: Callable[[str], T | None]
    ) -> tuple[T, ...]:
        """Parse the names of marks; skips users' files with such names."""
        marks = {name: parse(name) for name in names}
        return tuple(
            mark
            for name, mark in marks.items()
            if mark is not None and is_own_mark(self.find_store(folder), f"{folder}/{name}")
        )

    def entry(
        self,
        name: AttemptName,
        *,
        known: Manifest | None = None,
        names: tuple[str, ...] | None = None,
    ) -> Entry | None:
        """Read the checkpoint in an attempt's folder; None if it is not committed.

        `known` is its manifest as read before, which is read again only if the names in the folder
        show that its deletion may have begun since. `names` are those names, if already listed.

        Raises:
            FormatError: the manifest is damaged, or that of another run.
        """
        folder = str(name)
        if known is not None:
            names = names if names is not None else self.find_store(folder).children(folder)
            marks = self._marks(folder, names)
            # A deleter leaves its mark before the tombstone, and removes the index before the mark.
            if not marks.retired and {layout.MANIFEST, layout.INDEX} <= {*names}:
                return Entry(name=name, folder=folder, manifest=known, marks=marks)
        manifest = self.read(folder)
        if not isinstance(manifest, Manifest):
            return None
        self.expect_own(manifest, folder)
        marks = self.marks(folder) if names is None else self._marks(folder, names)
        return Entry(name=name, folder=folder, manifest=manifest, marks=marks)

    def checkpoints(self, *, known: Mapping[str, Manifest] | None = None) -> tuple[Entry, ...]:
        """List every committed checkpoint whose manifest can be read and decrypted, newest first.

        `known`: folder → manifest, as for `entry`.
        """
        return self.survey(known=known)[0]

    def survey(
        self, *, known: Mapping[str, Manifest] | None = None
    ) -> tuple[tuple[Entry, ...], tuple[tuple[str, HoldfastError], ...]]:
        """List checkpoints, and (folder, `SealError` or `FormatError`) of unreadable manifests."""
        manifests = known if known is not None else {}
        attempts = self.open_attempts()
        files = self._list_together(attempts)

        def read(name: AttemptName) -> Entry | tuple[str, HoldfastError] | None:
            folder = str(name)
            names = tuple(info.key for info in files[folder]) if folder in files else None
            try:
                return self.entry(name, known=manifests.get(folder), names=names)
            except (FormatError, SealError) as error:
                return folder, error

        found = [*self._map(read, attempts)]
        entries = tuple(one for one in found if isinstance(one, Entry))
        self.files = {entry.folder: files[entry.folder] for entry in entries if files}
        return entries, tuple(one for one in found if isinstance(one, tuple))

    def read_each(self, folders: Sequence[str]) -> Iterator[Register | HoldfastError | None]:
        """Read the registers of many attempts in order, each as `read`, or yield its error."""

        def read(folder: str) -> Register | HoldfastError | None:
            try:
                return self.read(folder)
            except (StoreError, FormatError, SealError) as error:
                return error

        return self._map(read, folders)

    def _map(self, read: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
        """Call `read` for each item, in threads if reads of the store wait for a network."""
        if self.store.has_folders or len(items) < _READERS:
            yield from map(read, items)
            return
        with ThreadPoolExecutor(_READERS, "holdfast-catalog") as pool:
            try:
                futures = [pool.submit(read, item) for item in items]
            except RuntimeError:  # the interpreter is shutting down and takes no more jobs
                pool.shutdown(cancel_futures=True)
                yield from map(read, items)
                return
            yield from (future.result() for future in futures)

    def _list_together(self, attempts: Sequence[AttemptName]) -> dict[str, list[ObjectInfo]]:
        """List the files of these attempts by folder, each named inside its folder.

        One recursive listing takes as many requests as there are pages, and a listing of each
        folder at least one. Empty if the store has folders, which are listed at no cost.
        """
        if len(attempts) < 2 or self.store.has_folders:
            return {}
        found: dict[str, list[ObjectInfo]] = {str(name): [] for name in attempts}
        for info in self.store.list():
            folder, _, name = info.key.partition("/")
            if name and folder in found:
                found[folder].append(replace(info, key=name))
        return found

    def highest_epoch(self) -> int:
        """Return the epoch of the newest claim, even of a lost one; 0 if there is none."""
        return max(self.epochs(), default=0)

    def writer(self, epoch: int) -> WriterRecord | None:
        """Read the claim of an epoch; None if there is none.

        Raises:
            FormatError: the record is damaged.
        """
        return read_if_there(self.store, layout.writer_key(epoch), WriterRecord.decode)

    def claims(self) -> tuple[int, ...]:
        """List the epochs that have a claim, newest first.

        A listing may lag, so the epochs after the highest listed one are read by name.
        """
        return self._claimed(layout.parse_writer)

    def epochs(self, attempts: Collection[AttemptName] | None = None) -> tuple[int, ...]:
        """List claimed epochs, newest first, also of lost claims that other records show.

        A lost claim counts if a later claim or its heartbeat or close exists, or if `latest` names
        a checkpoint of its epoch. `attempts`: the attempts of this root, if already listed.
        """
        known = self._claimed(layout.parse_writer, layout.parse_alive, layout.parse_closed)
        claimed = known
        if known and known[0] - known[-1] < len(known) + _MAX_LOST:  # else a number was made up
            claimed = tuple(range(known[0], known[-1] - 1, -1))  # each is one above the last
        found = attempts if attempts is not None else self.attempts()
        if not claimed or {name.epoch for name in found} <= {*claimed}:
            return claimed
        latest = layout.parse_attempt(latest_of(self.store))
        if latest is None or not self._has_manifest(latest):
            return claimed
        return tuple(sorted({*claimed, latest.epoch}, reverse=True))

    def _claimed(self, *parsers: Callable[[str], int | None]) -> tuple[int, ...]:
        names = self.store.children(layout.WRITERS)
        found = {parse(name) for name in names for parse in parsers}
        epochs = {epoch for epoch in found if epoch is not None}
        following = max(epochs, default=0) + 1
        while self._has_claim(following):
            epochs.add(following)
            following += 1
        return tuple(sorted(epochs, reverse=True))

    def lineage(self, *, below: int | None = None) -> Iterator[AttemptName]:
        """Yield the attempts that resume may use, newest first, down the chain of claims.

        Their registers are not read: attempts without a commit are among them, but none after the
        newest commit of the newest epoch with one. With `below`, the lineage as it was before that
        epoch's claim. Claims without a commit are mostly skipped (docs/design.md, rule 2).
        """
        attempts = self.open_attempts()
        epochs, first = self._epochs(attempts, below)
        by_epoch: dict[int, list[AttemptName]] = {}
        for name in attempts:
            by_epoch.setdefault(name.epoch, []).append(name)
        oldest = min(by_epoch, default=1)
        epoch, last = self._lineage_start(by_epoch, epochs, first)
        while epoch >= max(oldest, 1):  # below that there are no attempts
            for name in by_epoch.get(epoch, ()):
                if last is None or name.sequence <= last:
                    yield name
            claim = self._claim_or_none(epoch)
            point = self._parent(by_epoch.get(epoch, ())) if claim is None else claim.resumed_from
            if claim is not None and point is None:
                self._fresh_epoch = self._fresh_start(e for e in epochs if oldest <= e <= epoch)
                return
            if point is None or point.epoch >= epoch:
                epoch, last = max((e for e in epochs if e < epoch), default=0), None
            else:
                epoch, last = point.order

    def fresh_epoch(self, *, anew: bool = True) -> int:
        """Return the epoch of the fresh start with which the lineage begins; 0 if there was none.

        A fresh start is a rollback to nothing. Checkpoints of earlier epochs are of another run,
        which stays: they count neither for a resume nor for retention. Without `anew`, only return
        what the last whole `lineage` found.
        """
        for _ in self.lineage() if anew else ():
            pass
        return self._fresh_epoch

    def _fresh_start(self, epochs: Iterable[int]) -> int:
        """Return the first of `epochs` that is a fresh start, if only claims of nothing precede."""
        for epoch in epochs:
            claim = self._claim_or_none(epoch)
            if claim is None or claim.resumed_from is not None:
                return 0
            if claim.rollback:
                return epoch
        return 0

    def expect_rollback_target(self, *, anew: bool = True) -> None:
        """Check that the checkpoint exists to which the run was last rolled back by name.

        Without `anew`, only evaluate what the last `lineage` found.
        """
        if anew:
            next(self.lineage(), None)
        if not self.vanished:
            return
        target = layout.parse_attempt(self.vanished)
        lines = [
            f"step={entry.step} ({entry.folder})"
            + (", which was left behind" if target and entry.order > target.order else "")
            for entry in self.checkpoints()
        ]
        raise NoUsableCheckpoint(
            f"{self.store.url}: the run was rolled back to {self.vanished} by name, and it is "
            "missing now: it was moved, renamed or deleted. Nothing was changed. Put it back, or "
            "choose another one with resume(…):\n" + listing(lines)
        )

    def head(self) -> Entry | None:
        """Return the newest committed checkpoint of the lineage with a sound manifest, or None."""
        return next(self.lineage_entries(), None)

    def lineage_entries(self, *, opens_all: bool = True) -> Iterator[Entry]:
        """Yield the lineage's committed checkpoints with sound manifests, newest first.

        With encryption, unencrypted ones are skipped: anybody may have put them there. Without
        `opens_all`, so are those encrypted with other keys: for searches for an older checkpoint
        than the newest, or by name.
        """
        for name in self.lineage():
            try:
                entry = self.entry(name)
            except (FormatError, NotSealed):
                continue
            except SealError:
                if opens_all:
                    raise
                continue
            if entry is not None:
                yield entry

    def latest(self, entries: Iterable[Entry] | None = None) -> Entry | None:
        """Find the checkpoint that a run would resume from, among those with sound manifests.

        That is the newest of the lineage (or of `entries`, newest first) that holds the whole
        state and is not avoided, else the newest that holds it, else the newest not avoided.
        """
        best: Entry | None = None
        best_rank = (True, True)
        for entry in self.lineage_entries() if entries is None else entries:
            rank = (bool(entry.manifest.lacks), self.is_avoided(entry))
            if rank == (False, False):
                return entry
            if best is None or rank < best_rank:
                best, best_rank = entry, rank
        return best

    def best(self, entries: Iterable[Entry]) -> Entry | None:
        """Find the checkpoint that "best" names among those of the lineage, newest first."""
        with suppress(NoCheckpoint, UsageError):
            return self._search("best", [*entries])
        return None

    def newest(self, *, but: Collection[str] = ()) -> Entry | None:
        """Find the `latest` outside the folders `but`; raise if a newer manifest is damaged."""
        self.expect_rollback_target()
        entry = self.latest(entry for entry in self.lineage_entries() if entry.folder not in but)
        self._expect_readable_after(entry)
        return entry

    def removed_latest(self, newest: Entry | None) -> str:
        """Return the folder to which `latest` points, if it is newer than `newest` and missing.

        Empty otherwise. Retention never deletes what `latest` names, so a user has moved, renamed
        or removed it.
        """
        folder = latest_of(self.store)
        name = layout.parse_attempt(folder)
        if name is None or (newest is not None and newest.order >= name.order):
            return ""
        is_there = any((n.order, n.id8) == (name.order, name.id8) for n in self.attempts())
        return "" if is_there or folder in known_ended(self.store).deleted else folder

    def is_avoided(self, entry: Entry) -> bool:
        """Whether a checkpoint's state was unhealthy, and no run was rolled back to it by name."""
        if not entry.manifest.unhealthy:
            return False
        claims = (self._claim_or_none(epoch) for epoch in self.claims())
        points = (claim.resumed_from for claim in claims if claim is not None and claim.rollback)
        return all(point is None or point.folder != entry.folder for point in points)

    def find_checkpoint(self, which: str | int = "latest") -> Entry:
        """Find the checkpoint that `which` names in the current lineage.

        `which` is "latest" (see `newest`: if it is damaged, nothing older takes its place),
        "step=1000" (or an int), a folder's name, a tag, or a label; a folder's name is also found
        outside the lineage. "best", if nothing has that tag or label, is the best by the metric of
        the run's rule `Best`, "best:METRIC" or "best:METRIC:max" by that metric.

        Raises:
            UsageError: "step=" with something that is no number, or "best:" with a metric of which
                it is not known whether low or high values are good.
            NoCheckpoint: no checkpoint matches; the message lists those that exist.
            SealError: the match, or a checkpoint that may match, is encrypted with other keys.
            FormatError: the manifest of the named folder, or of the latest, is damaged or lost.
        """
        if isinstance(which, int) and which < 0:
            raise UsageError(f"which={which}: a step is a whole number, at least 0")
        wanted = f"step={which}" if isinstance(which, int) else which
        is_pattern = any(letter in wanted for letter in "*?[")
        if wanted.startswith("step=") and not (is_pattern or _STEP.fullmatch(wanted)):
            raise UsageError(f"{wanted!r}: a step is a whole number, as in 'step=1000'")
        exact = layout.parse_attempt(wanted)
        entry = self.entry(exact) if exact is not None else self._search(wanted)
        if entry is None and exact is None and self.has_skipped():
            entry = self._search(wanted)
        if entry is None:
            self._expect_all_opened()
            raise NoCheckpoint(self._nothing_matches(wanted))
        return entry

    def ever_committed(self, *, by_main: bool = False) -> bool:
        """Whether anything was committed since the last fresh start, so that another is a mistake.

        With `by_main`, saves of side savers do not count: neither manifests of parts, nor deleted
        checkpoints, whose saver is unknown; a run that resumed from a checkpoint is known by its
        claim.

        Raises:
            SealError: a manifest encrypted with other keys was found first; or there are only
                unencrypted ones, with encryption on.
        """
        unsealed: NotSealed | None = None
        fresh_epoch = cache(self.fresh_epoch)  # it reads the lineage: only if something is found
        for name in self.open_attempts():
            try:
                register = self.read(str(name))
            except FormatError:
                register = None  # damaged, so it was committed
            except NotSealed as error:
                unsealed = error
                continue
            else:
                if not isinstance(register, Manifest):
                    continue
            if register is not None and by_main and _is_by_side_savers(register):
                continue
            if name.epoch >= fresh_epoch():
                return True
        if not by_main and self._has_deleted(since=fresh_epoch()):
            return True
        for claim in map(self._claim_or_none, self.claims()):
            if claim is None or claim.resumed_from is None:
                continue
            if claim.epoch >= fresh_epoch():
                return True
        if self.uploaded_to():
            return True
        if unsealed is not None:
            raise unsealed
        return False

    def uploaded_to(self) -> str:
        """Return the remote tier to which a checkpoint of this run was uploaded from here.

        Empty if none was: then nothing is in the remote tier alone.
        """
        tiers = None
        with suppress(FormatError):
            tiers = read_if_there(self.store, layout.TIERS, TiersRecord.decode)
        name = None if tiers is None else layout.parse_attempt(tiers.folder or "")
        is_of_this_run = name is not None and name.epoch >= self.fresh_epoch()
        return tiers.remote if tiers is not None and is_of_this_run else ""

    def _has_deleted(self, *, since: int) -> bool:
        """Whether any attempt of epoch `since` or later is known to have been deleted."""
        names = map(layout.parse_attempt, known_ended(self.store).deleted)
        return any(name is not None and name.epoch >= since for name in names)

    def _epochs(
        self, attempts: tuple[AttemptName, ...], below: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Return the epochs of this run, newest first, and the epoch of its first claim.

        They are those claimed, and those of attempts from before the first claim. Other attempts
        were copied from another run.
        """
        claimed = self.epochs(attempts)
        newest = max((name.epoch for name in attempts), default=0)
        first = min(claimed, default=newest + 1)
        earlier = {name.epoch for name in attempts if name.epoch < first}
        epochs = sorted({*claimed, *earlier}, reverse=True)
        return tuple(epoch for epoch in epochs if below is None or epoch < below), first

    def _lineage_start(
        self, attempts: Mapping[int, Sequence[AttemptName]], epochs: tuple[int, ...], first: int
    ) -> tuple[int, int | None]:
        """Return the epoch with which the lineage begins, and the sequence of its newest commit.

        It is the newest with a commit, or with a rollback to a checkpoint that exists; then the
        sequence is None. A claim that cannot be read may have been a rollback: then the next
        writer's starting point decides. Claims begin with epoch `first`. (0, None) if none fits,
        or if a fresh start is newer than all commits.
        """
        self.vanished, self.unread, self._fresh_epoch = "", 0, 0
        later: WriterRecord | None = None
        for epoch in epochs:
            newest = next(filter(self._has_manifest, attempts.get(epoch, ())), None)
            if newest is not None:
                return epoch, newest.sequence
            claim = self._claim_or_none(epoch)
            if claim is None and epoch < first:
                continue
            if claim is None:
                self.unread = self.unread or epoch
            elif claim.rollback and claim.resumed_from is None:
                self._fresh_epoch = epoch
                return 0, None
            is_rollback = claim is None or claim.rollback
            later = claim or later
            point = later.resumed_from if later is not None and is_rollback else None
            if later is None or point is None:
                continue
            if any(map(self._has_manifest, _named_by(point, attempts.get(point.epoch, ())))):
                return later.epoch, None
            if claim is not None:  # else the claim is damaged, and a warning says so
                self.vanished = self.vanished or point.folder
        return 0, None

    def _parent(self, attempts: Iterable[AttemptName]) -> Reference | None:
        """Return the checkpoint that a writer resumed from, as a manifest of its attempts says."""
        for name in attempts:
            with suppress(FormatError, SealError):
                register = self.read(str(name))
                if isinstance(register, Manifest):
                    return register.parent
        return None

    def _search(self, wanted: str, entries: Sequence[Entry] | None = None) -> Entry | None:
        """Find what `wanted` names in the lineage, or among `entries`, newest first."""
        if wanted == "latest":
            return self.newest()
        by_label: Entry | None = None
        for entry in self.lineage_entries(opens_all=False) if entries is None else entries:
            if _has_step_or_tag(entry, wanted):
                return entry
            if by_label is None and wanted == entry.name.label:
                by_label = entry
        if by_label is not None or not means_best(wanted):
            return by_label
        return self._best(wanted, entries)

    def _best(self, wanted: str, entries: Sequence[Entry] | None) -> Entry:
        found = [
            entry
            for entry in (self.lineage_entries(opens_all=False) if entries is None else entries)
            if not (entry.marks.rejected or entry.marks.retired)
        ]
        measured = [
            msgspec.structs.replace(entry.manifest, metrics=dict(entry.metrics)) for entry in found
        ]
        return found[best_of(measured, wanted, where=self.store.url)]

    def _expect_readable_after(self, entry: Entry | None) -> None:
        for name in self.lineage():
            if entry is not None and name.order <= entry.order:
                return
            try:
                self.entry(name)
            except UnsupportedVersion:
                raise
            except NotSealed:
                continue  # unencrypted, so not trusted: an older one serves
            except FormatError as error:
                older = "none before it is whole"
                if entry is not None:
                    older = f"for the one before it, name {entry.folder} or step={entry.step}"
                raise CorruptData(
                    f"the newest checkpoint cannot be read: {error}. Only resume() skips it; "
                    f"{older}"
                ) from error

    def _expect_all_opened(self) -> None:
        """Raise the first `SealError` from reading the lineage's manifests, newest first."""
        for name in self.lineage():
            with suppress(FormatError):
                self.entry(name)

    def _nothing_matches(self, wanted: str) -> str:
        entries, unread = self.survey()
        lines = [f"{entry.folder} (step {entry.step})" for entry in entries]
        for folder, error in unread:
            what = "encrypted for others" if isinstance(error, SealError) else "manifest damaged"
            lines.append(f"{folder} ({'not encrypted' if isinstance(error, NotSealed) else what})")
        if not lines:
            return f"{self.store.url}: no checkpoints"
        # The lineage has none of that name.
        left = [e for e in entries if _has_step_or_tag(e, wanted) or wanted == e.name.label]
        if left:
            return (
                f"{self.store.url}: no checkpoint for {wanted!r} in this run as it is now: "
                f"{left[0].folder} was left behind by a rollback, when the run resumed from an "
                "earlier one. To use it, pass the name of that folder"
            )
        return (
            f"{self.store.url}: no checkpoint for {wanted!r} in this run. There are:\n"
            + listing(lines)
        )

    def _newest_notes(self, folder: str, names: tuple[str, ...]) -> tuple[Notes, int]:
        """Return a checkpoint's newest notes, and the highest number of such a file.

        If the newest cannot be read, they are those before it and a pin: a checkpoint that the
        newest pinned or tagged must not be deleted.
        """
        parsed = (layout.parse_notes(name) for name in names)
        numbers = sorted((number for number in parsed if number is not None), reverse=True)
        for number in numbers:
            notes = None
            with suppress(FormatError):
                key = f"{folder}/{layout.notes_name(number)}"
                notes = read_if_there(self.find_store(folder), key, Notes.decode)
            if notes is not None:
                if number != numbers[0]:
                    notes = msgspec.structs.replace(notes, pinned=True)
                return notes, numbers[0]
        return Notes(tags=(), pinned=True) if numbers else _NO_NOTES, max(numbers, default=0)

    def _reasons(self, folder: str) -> tuple[str, ...]:
        try:
            key = f"{folder}/{layout.REJECTED}"
            record = read_if_there(self.find_store(folder), key, Rejected.decode)
        except FormatError:
            record = None
        return record.reasons if record is not None else ("rejected",)

    def _has_claim(self, epoch: int) -> bool:
        try:
            return self.writer(epoch) is not None
        except FormatError:
            return True

    def _claim_or_none(self, epoch: int) -> WriterRecord | None:
        known = self._known_claims
        if epoch in known:
            return known[epoch]
        try:
            claim = self.writer(epoch)
        except FormatError:
            return None
        if claim is not None:
            known[epoch] = claim
        return claim

    def _has_manifest(self, name: AttemptName) -> bool:
        """Whether an attempt's register holds a manifest, also a damaged or encrypted one."""
        try:
            return isinstance(self.read(str(name)), Manifest)
        except (FormatError, SealError):
            return True


def _has_step_or_tag(entry: Entry, wanted: str) -> bool:
    """Whether `wanted` is the step or a tag of a checkpoint; its label is not compared."""
    step = _STEP.fullmatch(wanted)
    return wanted in entry.tags or (step is not None and entry.step == int(step[1]))


def _named_by(point: Reference, attempts: Iterable[AttemptName]) -> Iterator[AttemptName]:
    """Yield the attempts that are the checkpoint `point`, even if their folder's label changed."""
    return (n for n in attempts if n.order == point.order and n.id8 == point.save_id[:8])


def _is_by_side_savers(manifest: Manifest) -> bool:
    return bool(manifest.lacks and manifest.savers) and MAIN not in manifest.savers


def is_root(store: Store) -> bool:
    """Whether a store holds a run: a claim or an attempt."""
    names = store.children()
    return f"{layout.WRITERS}/" in names or any(
        layout.parse_attempt(name.rstrip("/")) is not None for name in names
    )


def standalone(store: Store, folder: str) -> Entry:
    """Read the checkpoint in a folder of any name, such as a copy made by `cp -r`."""
    register = read_if_there(
        store, f"{folder}/{layout.MANIFEST}", decode_register, max_nbytes=MAX_MANIFEST_NBYTES
    )
    if register is None:
        register = Catalog(store).read(folder)
    if not isinstance(register, Manifest):
        hint = ". Name the folder of one, not the root of a run" if store.reads_only else ""
        raise NoCheckpoint(f"{store.url}/{folder}: no committed checkpoint{hint}")
    return Entry(
        name=AttemptName(
            epoch=register.epoch,
            sequence=register.sequence,
            id8=register.save_id[:8],
            label=register.label,
        ),
        folder=folder,
        manifest=register,
        marks=Catalog(store).marks(folder),
    )


def with_tags(entry: Entry, tags: tuple[str, ...]) -> Entry:
    """Return a copy of the entry with `tags` added to its marks."""
    notes = msgspec.structs.replace(entry.marks.notes, tags=entry.marks.tags + tags)
    return replace(entry, marks=replace(entry.marks, notes=notes))


def _check_place(manifest: Manifest, folder: str) -> None:
    name = layout.parse_attempt(folder)
    if name is None or (manifest.epoch, manifest.sequence, manifest.save_id[:8]) != (
        name.epoch,
        name.sequence,
        name.id8,
    ):
        raise CorruptData(
            f"{folder}: the manifest belongs to another folder "
            f"({manifest.epoch}-{manifest.sequence}-{manifest.save_id[:8]})"
        )
