"""Uploads checkpoints of a local root to a remote one in the background (design.md, rule 9).

Owns the upload thread, the only one that makes requests to the remote tier, and the interface of
the training threads to it. A round of that thread uploads the queued checkpoints, prunes the remote
tier, and repairs the local one. A failed upload is logged and retried; it delays only the deletion
of checkpoints that are not uploaded yet. tests/crash/test_tiers.py fails every single request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from holdfast.encryption.files import boxes_of
from holdfast.encryption.store import bare, read_stored_manifest, sealed
from holdfast.errors import (
    CommitConflict,
    CorruptData,
    DeadlineExceeded,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotSealed,
    OutcomeUnknown,
    OwnershipError,
    is_damage,
    some_of,
    time_limit,
)
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Manifest, Timestamp
from holdfast.format.records import UploadState
from holdfast.maintenance.encrypted import put_box
from holdfast.maintenance.housekeeping import Housekeeper, IdleHousekeeper, UploadQueries
from holdfast.maintenance.retention import Deleter, candidate
from holdfast.maintenance.verify import verify
from holdfast.ownership.annotations import copy_marks, copy_metrics
from holdfast.ownership.claim import Choice, Claim, expect_claim, is_closed, nothing_arrives
from holdfast.ownership.owner import Following, Ownership
from holdfast.ownership.tiered import TieredOwnership
from holdfast.ownership.tiered_catalog import TieredCatalog
from holdfast.ownership.tiered_options import Tiered, TieredOptions, TierRules
from holdfast.policy.rule import Candidate
from holdfast.replication.queue import UploadQueue
from holdfast.replication.upload import Cost, Sender, UploadInterrupted, describe_files
from holdfast.replication.upload_thread import LOOK_S, UploadThread
from holdfast.root.byte_ranges import Listing, decode_listing, read_listing
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import (
    check_ownership,
    kept_of_others,
    mark_aborted,
    remove_files,
    sync_checkpoint,
)
from holdfast.root.documents import is_of_others
from holdfast.root.history_writer import copy_segments, list_merged, list_segments
from holdfast.store.base import Store
from holdfast.threads.workers import Background

if TYPE_CHECKING:
    from holdfast.replication.hosts import HostOrders

_NOTE_EVERY_S = 2.0


class Mirror(UploadThread):
    """Uploads to the remote tier, and runs retention there, in its own thread."""

    def __init__(
        self,
        owner: TieredOwnership,
        rules: TierRules,
        options: TieredOptions,
        emit: Emitter,
        *,
        replaces: bool,
        timeout_s: float,
        hosts: HostOrders | None = None,
    ) -> None:
        """Create a mirror, paused until `resume_uploads`. `replaces` is as for `Deleter`; callers
        wait at most `timeout_s`; `hosts` are the ranks of a run with a disk on each host."""
        self._owner = owner
        self._hosts = hosts
        self._catalog = owner.catalog
        local, remote = self._catalog.store, self._catalog.remote.store
        self._queue = UploadQueue(local, remote.url, rules.remote, emit, owner, replaces=replaces)
        super().__init__(
            local, remote, options, emit, changed=self._queue.changed, timeout_s=timeout_s
        )
        deleter = Deleter(
            self._local, rules.local, emit, replaces=replaces, is_sent_to=False, waiting=self._queue
        )
        self._deleter = deleter
        self.chores = self._make_chores(owner, deleter)
        deleter = Deleter(
            self._remote,
            rules.remote,
            Emitter((self._forward_event,)),
            replaces=replaces,
            waiting=self,
        )
        self._remote_chores = Housekeeper(owner.remote, deleter)
        self._segments: set[str] | None = None
        """Segments of the history that the local tier had; None: those of the remote tier were not
        copied there yet, after the claim."""
        self._undecided: tuple[str, ...] = ()
        """Folders of saves of which no host knows whether they were committed."""
        self._may_repair = False
        """Whether the next round repairs damaged checkpoints of the local tier."""
        self._clear_cached_facts()

    def _make_chores(self, owner: Ownership, deleter: Deleter) -> Housekeeper:
        if self._hosts is None:
            return Housekeeper(owner, deleter)
        from holdfast.replication.hosts import LeadingHousekeeper

        return LeadingHousekeeper(owner, deleter, self._hosts, self)

    @override
    def _clear_cached_facts(self) -> None:
        self._queue.clear()
        self._segments = None
        self._is_behind = True
        """Whether the queue was never empty since the claim, so that local retention is due."""
        self._may_release = False
        """Whether the load after the claim has ended, so that it reads no local copy any more."""
        self._begun: set[str] = set()
        """Folders that may have uncommitted files in the remote tier."""

    # Called by the threads that train and save

    @override
    def queue_new_uploads(self) -> None:
        try:
            self._queue.refresh()
        except Exception as error:  # noqa: BLE001 - the save stands; nothing is deleted meanwhile
            self._queue.mark_unsure()
            self._emit("housekeeping_failed", f"queue of uploads: {error!r}")
        self._may_release = True
        self._wake()

    @override
    def list_uploads(self) -> Sequence[str]:
        with self._changed:
            if not self._queue.is_sure:  # right after a claim
                self._queue.refresh()
            waiting = sorted(self._queue.waiting, key=lambda entry: entry.order, reverse=True)
            folders = [entry.folder for entry in waiting]
            self._begun.update(folders)
            if self._queue.sending and self._queue.sending not in folders:
                folders.append(self._queue.sending)  # not wanted any more, and sent to its end
        return folders

    @override
    def request_repairs(self) -> None:
        self._may_repair = self._may_release = True
        self._wake()

    @override
    def expect_room(
        self, now: Timestamp, waits: Callable[[], None], gives_up: Callable[[], bool]
    ) -> None:
        lag = self._options.max_lag
        if lag is None:
            return
        end = time.monotonic() + self._timeout_s
        has_told = False
        with self._locked(self._timeout_s):
            while self._failures.lost is None and self._queue.is_too_far_behind(now, lag):
                if gives_up():
                    return
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._remote.url} is further behind than max_lag allows, and did not "
                        f"catch up in {time_limit(self._timeout_s)}: {self._queue}"
                    ) from self._failures.last
                if not has_told:
                    has_told = True
                    waits()
                self._changed.wait(min(left_s, LOOK_S))

    @override
    def _describe_queue(self) -> str:
        return str(self._queue) if self._queue.folders else ""

    @override
    def unsent(self) -> str:
        if not self._queue.folders:
            return ""
        return (
            f"{self._remote.url}: not uploaded: {self._queue}. They are in {self._local.url}; "
            "run the program again to upload them, also after training has ended. "
            f"`holdfast uploads {self._local.url}` lists what is missing"
        )

    # The thread

    @override
    def resume_uploads(self) -> None:
        if self._hosts is not None:
            names = self._sender.hosts = self._hosts.names
            self._queue.host = "" if names is None else names.own
            self._queue.note_tiers(epoch=None)
            incomplete = self._find_incomplete(self._hosts)
            self._queue.incomplete = self._deleter.incomplete = incomplete
            self._note_undecided(self._hosts)
        super().resume_uploads()

    def _note_undecided(self, hosts: HostOrders) -> None:
        """Warn of saves that may be committed, on a disk that takes no part; they stay for now."""
        claim = self._owner.claim
        self._undecided = () if claim is None else (*hosts.records.list_undecided(claim),)
        if self._undecided:
            self._emit(
                "warning",
                f"whether {some_of(self._undecided)} was committed is recorded on the disk of a "
                "host that is not in this run. To use it, start the run again with that host "
                "before the next save. Its files stay until a session resumes from a newer "
                "checkpoint",
            )

    def _find_incomplete(self, hosts: HostOrders) -> dict[str, str]:
        """Map checkpoints of which no host has some file to texts on those files."""
        entries = Catalog(self._local).checkpoints()
        lost = {entry.folder: hosts.records.list_lost(entry) for entry in entries}
        return {
            entry.folder: describe_files(entry.manifest, lost[entry.folder])
            for entry in entries
            if lost[entry.folder]
        }

    @override
    def pause(self, timeout_s: float | None = None) -> None:
        try:
            super().pause(timeout_s)
        except DeadlineExceeded:
            self._owner.remote.is_clean = False
            raise
        if not self._queue.is_sure or any(map(self._is_ours, self._queue.waiting)):
            # A later upload commits in this epoch, so the epoch must not be recorded as ended.
            self._owner.remote.is_clean = False

    def _is_ours(self, entry: Entry) -> bool:
        claim = self._owner.claim
        return claim is not None and entry.name.epoch == claim.epoch

    @override
    def _run_uploads(self) -> None:
        """Upload waiting checkpoints, remove partial uploads, and repair local checkpoints."""
        background = self._background
        if not self._queue.has_seen:
            self._claim_remote()
        while not background.is_stopping:
            entry = self._queue.next(tries=self._options.tries)
            if entry is None:
                break
            self._upload(entry)
        if not background.is_stopping:
            self._clear_away()
        if not background.is_stopping:
            self._copy_history()
        if self._may_repair and not background.is_stopping:
            self._repair_local()
        if self._is_behind and self._may_release and not background.is_stopping:
            # Checkpoints that an earlier process kept for upload may be uploaded already; then no
            # upload follows after which local retention would run.
            self._is_behind = False
            self.chores.retain()
            self._release_rest()

    def _copy_history(self) -> None:
        """Copy the history to the remote tier, and after a claim first what the local one lacks."""
        if sealed(self._local) is not None:
            return
        try:
            if self._segments is None:
                copy_segments(self._remote, self._local)
                self._segments = {*list_segments(self._local)}
            found = copy_segments(self._local, self._remote)
            gone = sorted(self._segments.difference(found))
            merged = list_merged(gone, self._remote, into=self._local)
            self._remote.delete_many(merged)
            if len(merged) < len(gone):  # someone has removed them from the local tier
                copy_segments(self._remote, self._local)
            self._segments = {*list_segments(self._local)} if gone else {*found}
        except Exception as error:  # noqa: BLE001 - the next upload tries again
            self._emit_remote("housekeeping_failed", f"the history of metrics: {error!r}")

    def holds(self, entry: Entry) -> str:
        """Return why the remote copy must stay: pins in the local tier, which are copied now."""
        if self._queue.waits(entry):
            return "its upload has not ended"
        marks = Catalog(self._local).marks(entry.folder)
        has_new = not {*marks.notes.metrics} <= {*entry.marks.notes.metrics}
        if not (marks.pinned or marks.tags or has_new):
            return ""
        copy_marks(self._local, self._remote, entry.name)
        return "it is pinned or tagged in the local tier, or has new metrics there"

    def _claim_remote(self) -> None:
        """Claim the remote tier and list its checkpoints; called once after each claim."""
        self._queue.note_tiers(epoch=self._remote_epoch)
        self._owner.attach()
        self._queue.note_tiers(epoch=self._remote_epoch)
        self._catalog.look_again()
        # Local first: what is decrypted here need not be in the remote tier, where keys may lag.
        local = {entry.folder: entry for entry in Catalog(self._local).checkpoints()}
        entries, unread = self._catalog.remote.survey()
        remote = {entry.folder: candidate(self._remote, entry) for entry in entries}
        lineage = {name.order for name in self._catalog.lineage()}
        for entry in entries:
            if entry.folder in local:
                sync_checkpoint(self._remote, entry.folder)
                copy_marks(self._local, self._remote, entry.name)
                copy_metrics(entry.marks, self._local, entry.name)
                self._queue.record_uploaded(
                    entry, suspect=self._what_lacks(entry, remote[entry.folder])
                )
        for folder, error in unread:
            if folder in local and is_damage(error):
                self._emit_remote("warning", str(error), step=local[folder].step, folder=folder)
                self._queue.record_uploaded(local[folder], suspect=str(error))
        with self._changed:
            self._queue.record_listing(remote, lineage)
            attempts = map(str, self._catalog.remote.attempts())
            self._begun |= {*attempts}.intersection(self._queue.folders)
        for folder, lost in self._queue.incomplete.items():
            if folder not in remote:
                text = f"{folder} cannot be uploaded, as no host of this run has {lost}"
                self._emit_remote("warning", text, folder=folder)
        with self._owner.remote_scratch():
            self._remote_chores.remove_unfinished(spared=(*self._queue.spared, *self._undecided))
        self._remote_chores.retain()

    def _what_lacks(self, entry: Entry, copy: Candidate) -> str:
        """Return, and log, what a remote copy lacks: then it justifies no deletion."""
        wrong: list[str] = []
        if not (copy.dropped or copy.begun):
            sizes = {info.key: info.nbytes for info in self._remote.list(f"{entry.folder}/")}
            wrong += [
                name
                for name, file in entry.manifest.files.items()
                if sizes.get(f"{entry.folder}/{name}") != file.stored_nbytes
            ]
        if (remote := sealed(self._remote)) is not None:
            wrong += remote.lost_keys(entry.folder)
        if not wrong:
            return ""
        text = f"{self._remote.url}/{entry.folder} lacks {', '.join(wrong)}"
        self._emit_remote("warning", text, step=entry.step, folder=entry.folder)
        return text

    def _upload(self, entry: Entry) -> None:
        claim = self._owner.attach()
        if not self._queue.start_upload(entry):
            return
        try:
            self._upload_entry(entry, claim)
        finally:
            self._queue.finish_upload()

    def _upload_entry(self, entry: Entry, claim: Claim) -> None:
        folder = entry.folder
        retries = self._queue.count_try(entry)
        self._queue.record_upload_state(entry, "sending")
        try:
            expect_claim(self._remote, claim)
            self._expect_open(entry, claim)
            self._begun.add(folder)
            cost = self._sender.upload_checkpoint(
                folder,
                epoch=claim.epoch,
                on_progress=self._progress_of(entry),
                unclear=self._owner.remote.unclear,
            )
            copy_marks(self._local, self._remote, entry.name)
        except NoCheckpoint as error:
            if self._queue.waits(entry):
                text = f"{folder} is not sent: {error}"
                self._emit_remote("warning", text, step=entry.step, folder=folder)
            self._queue.give_up(folder)
            self._finish_upload(entry)
        except (CommitConflict, FormatError, NotSealed) as error:
            self._queue.skip_upload(entry)
            self._refuse_upload(entry, error)
        except (UploadInterrupted, OwnershipError):
            self._queue.record_upload_state(entry, "waiting")
            raise
        except Exception as error:  # noqa: BLE001 - it is logged and retried
            if self._queue.waits(entry):
                self._handle_upload_failure(error, entry)
        else:
            self._arrived(entry, claim)
            self._follow_up(entry, cost, retries=retries)

    def _expect_open(self, entry: Entry, claim: Claim) -> None:
        """Raise `NoCheckpoint` if the epoch is closed remotely, as its markers may be gone."""
        epoch = entry.name.epoch
        if epoch != claim.epoch and is_closed(self._remote, epoch):
            raise NoCheckpoint(
                f"writer {epoch} closed the remote tier without uploading it; it stays in the "
                "local tier"
            )

    def _progress_of(self, entry: Entry) -> Callable[[Cost], None]:
        lock, last_s = threading.Lock(), [time.monotonic()]

        def note_progress(cost: Cost) -> None:
            if time.monotonic() - last_s[0] < _NOTE_EVERY_S or not lock.acquire(blocking=False):
                return
            try:
                self._queue.record_upload_state(entry, "sending", sent_nbytes=cost.nbytes)
                last_s[0] = time.monotonic()
            finally:
                lock.release()

        return note_progress

    def _arrived(self, entry: Entry, claim: Claim) -> None:
        is_good = not (entry.manifest.lacks or entry.manifest.unhealthy)
        with self._changed:
            self._queue.record_arrival(entry)
            if is_good and entry.name.epoch == claim.epoch:
                self._owner.remote.has_committed = True
            self._finish_upload(entry)
        self._catalog.look_again()  # the remote tier is reachable, whatever a reader has met

    def _finish_upload(self, entry: Entry) -> None:
        """Record that an upload is over: committed, or given up."""
        self._begun.discard(entry.folder)
        self._count_success()

    def _follow_up(self, entry: Entry, cost: Cost, *, retries: int) -> None:
        """Log a finished upload and run retention in both tiers; failures do not undo it."""
        self._emit_remote(
            "uploaded",
            f"{entry.folder} is there",
            step=entry.step,
            folder=entry.folder,
            root=self._remote.url,
            nbytes=entry.manifest.nbytes,
            sent_nbytes=cost.nbytes,
            requests=cost.requests,
            retries=retries,
            upload_s=cost.seconds,
        )
        self._queue.note_tiers(epoch=self._remote_epoch, entry=entry, cost=cost)
        self._remote_chores.trust(entry)
        newest = max((copy.order for copy in self._queue.resumable_there), default=entry.order)
        self._send_metrics()
        if self._queue.is_on_line(entry) and entry.order >= newest:
            self._remote_chores.apply_retention(entry)
        else:
            self._remote_chores.retain()  # `latest` moves forward only, and in the run's lineage
        for there in self._remote_chores.list_judged():
            copy_metrics(there.marks, self._local, there.name)
        if cost.is_all or self._hosts is not None:
            # Every byte of the local copy was read and found right, or is in the remote tier.
            self.chores.trust(entry)
        self.chores.retain()
        if self._options.keep_local == 0 and self._may_release:
            self.chores.delete_local_copy(entry.folder)
        self._queue.refresh()

    def _send_metrics(self) -> None:
        """Copy metrics that were added in the local tier since the last upload."""
        sent = self._queue.sent_metrics
        for entry in self.chores.list_judged():
            names = {*entry.marks.notes.metrics}
            if not (names <= sent.get(entry.folder, set()) or self._queue.waits(entry)):
                copy_metrics(entry.marks, self._remote, entry.name)
                sent[entry.folder] = names

    def _release_rest(self) -> None:
        """With `keep_local=0`, delete local copies whose earlier uploads are read back whole."""
        if self._options.keep_local != 0:
            return
        for entry in Catalog(self._local).checkpoints():
            is_wanted = entry.marks.pinned or entry.tags or self._queue.holds(entry)
            if is_wanted or Catalog(self._remote).entry(entry.name) is None:
                continue
            if self._background.is_stopping:
                return
            report = verify(self._remote, entry.folder)
            if report.ok:
                self.chores.delete_local_copy(entry.folder)
            else:
                text = f"{entry.folder} stays in the local tier: {report.problems[0]}"
                self._emit_remote("warning", text, step=entry.step, folder=entry.folder)

    def _clear_away(self) -> None:
        """Remove partial uploads of checkpoints that the remote tier is no longer to keep."""
        claim = self._owner.attach()
        for folder in sorted(self._begun.difference(self._queue.folders)):
            self._begun.discard(folder)
            self._queue.give_up(folder)
            name = layout.parse_attempt(folder)
            if self._hosts is not None and not self._remote.children(folder):
                continue  # no host has begun
            by = f"writer {claim.epoch}"
            # A new owner of the run may want the checkpoint, and could not commit it any more.
            check_ownership(self._remote, claim.epoch, committed=False)
            if name is None or not mark_aborted(
                self._remote, folder, by=by, reason="not wanted there before all was sent"
            ):
                continue
            whole = self._owner.remote.is_over and nothing_arrives(
                self._remote, name.epoch, own=claim.epoch
            )
            if left := remove_files(self._remote, folder, whole=whole):
                self._emit("warning", kept_of_others(self._remote, folder, left))

    def _repair_local(self) -> None:
        self._may_repair = False
        claim = self._owner.claim
        for folder in sorted(self._catalog.turned):
            if claim is None:
                return
            try:
                files = repair_checkpoint(
                    self._local,
                    self._remote,
                    folder,
                    epoch=claim.epoch,
                    background=self._sender.background,
                )
            except UploadInterrupted:
                raise
            except HoldfastError as error:
                self._emit("housekeeping_failed", f"mending {folder}: {error}", folder=folder)
                continue
            self._catalog.turned.discard(folder)
            if files:
                text = f"repaired {', '.join(files)} of {folder} from {self._remote.url}"
                self._emit("mended", text, folder=folder, files=files)

    # Failures

    @override
    def _handle_upload_failure(self, error: BaseException, entry: Entry | None) -> None:
        if isinstance(error, OutcomeUnknown | DeadlineExceeded):
            self._owner.remote.is_clean = False
        super()._handle_upload_failure(error, entry)

    @override
    def _record_failure(self, entry: Entry | None, text: str, state: UploadState) -> None:
        if entry is not None:
            self._queue.record_upload_state(entry, state, error=text)
        self._queue.note_tiers(epoch=self._remote_epoch, error=text)

    @property
    def _remote_epoch(self) -> int | None:
        claim = self._owner.remote.claim
        return None if claim is None else claim.epoch

    def _forward_event(self, event: Event) -> None:
        """Callback that forwards events of the remote tier's housekeeping."""
        if event.kind == "retracted":
            self._queue.record_deletion(str(event.fields.get("folder")))
        self._emit_remote(event.kind, event.message, step=event.step, **event.fields)


class MirroredOwnership(TieredOwnership):
    """Ownership of a run in two tiers that pauses uploads while the run is being claimed."""

    def __init__(
        self,
        catalog: TieredCatalog,
        rules: TierRules,
        options: TieredOptions,
        emit: Emitter,
        *,
        takeover: bool,
        replaces: bool,
        timeout_s: float,
        hosts: HostOrders | None,
    ) -> None:
        super().__init__(catalog, takeover=takeover, emit=emit)
        self.mirror = Mirror(
            self, rules, options, emit, replaces=replaces, timeout_s=timeout_s, hosts=hosts
        )

    @override
    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        self.mirror.pause()
        super().claim_ownership(choices)
        self.mirror.resume_uploads()


def make_ownership(
    root: object,
    catalog: Catalog,
    rules: TierRules,
    emit: Emitter,
    *,
    takeover: bool,
    replaces: bool,
    timeout_s: float,
    leads: bool = True,
    hosts: HostOrders | None = None,
) -> tuple[Ownership, UploadQueries, Housekeeper]:
    """Create the ownership, uploads and local housekeeping of a root with one or two tiers.

    With one tier, uploads are a no-op, and in a rank that does not lead all three are, unless each
    of the `hosts` has a disk.
    """
    if not leads:
        idle = Deleter(catalog.store, rules.local, emit, is_sent_to=False)
        if hosts is not None and isinstance(root, Tiered) and isinstance(catalog, TieredCatalog):
            from holdfast.replication.hosts import follow_hosts

            remote = catalog.remote.store
            return follow_hosts(
                hosts, catalog.store, remote, root.options, idle, emit, timeout_s=timeout_s
            )
        follower = Following(catalog.store, takeover=takeover, emit=emit)
        return follower, UploadQueries(), IdleHousekeeper(follower, idle)
    if not (isinstance(root, Tiered) and isinstance(catalog, TieredCatalog)):
        owner = Ownership(catalog.store, takeover=takeover, emit=emit)
        deleter = Deleter(catalog.store, rules.local, emit, replaces=replaces, is_sent_to=False)
        return owner, UploadQueries(), Housekeeper(owner, deleter)
    both = MirroredOwnership(
        catalog,
        rules,
        root.options,
        emit,
        takeover=takeover,
        replaces=replaces,
        timeout_s=timeout_s,
        hosts=hosts,
    )
    return both, both.mirror, both.mirror.chores


_NUM_THREADS = 4
_BLOCK_TIMEOUT_S = 600.0


def repair_checkpoint(
    local: Store, remote: Store, folder: str, *, epoch: int, background: Background | None = None
) -> tuple[str, ...]:
    """Replace damaged and missing files of a local checkpoint; return the names of those replaced.

    Replaces only the manifest, files listed in it, and lost keys of an encrypted checkpoint, and
    files only by bytes with the recorded digests. A file is fetched whole before the damaged one
    is deleted. `epoch` is the caller's claim; `background` has threads to fetch with.
    """
    bare_local, bare_remote = bare(local), bare(remote)
    data = read_stored_manifest(remote, folder)
    listing = decode_listing(data, what=f"{bare_remote.url}/{folder}/{layout.MANIFEST}")
    if not isinstance(listing, Manifest | Visible):
        raise NoCheckpoint(f"{bare_remote.url}/{folder}: not committed")
    _expect_same(listing, folder, where=bare_remote.url)
    sender = Sender(
        remote, local, num_threads=_NUM_THREADS, timeout_s=_BLOCK_TIMEOUT_S, background=background
    )
    pieces_of_file = sender.list_pieces(folder, listing)
    repaired = _repair_keys(local, remote, folder, listing, epoch)
    if _repair_manifest(local, folder, data, epoch):
        repaired.append(layout.MANIFEST)
    problems = verify(bare_local, folder).problems
    for name in dict.fromkeys(p.file for p in problems if p.file in listing.files):
        nbytes = listing.files[name].stored_nbytes
        sender.replace_file(f"{folder}/{name}", nbytes, pieces_of_file(name), epoch=epoch)
        repaired.append(name)
    if repaired:
        # The rejection was because of the damage.
        _delete_own(bare_local, f"{folder}/{layout.REJECTED}")
    return tuple(repaired)


def _delete_own(local: Store, key: str) -> None:
    if not is_of_others(local, key):
        local.delete(key)


def _expect_same(listing: Listing, folder: str, *, where: str) -> None:
    """Raise `CorruptData` if the manifest in a folder is that of another checkpoint."""
    name = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
    if str(name) != folder:
        raise CorruptData(f"{where}/{folder}: the manifest there belongs to {name}")


def _repair_keys(
    local: Store, remote: Store, folder: str, listing: Listing, epoch: int
) -> list[str]:
    """Write a box with the run's current keys for a local checkpoint if no other can be read."""
    sealing_store = sealed(remote)
    if not isinstance(listing, Visible) or sealing_store is None:
        return []
    bare_local = bare(local)
    names = bare_local.children(folder)
    unreadable = [name for name in names if layout.parse_keys(name) is not None]
    try:
        boxes_of(bare_local, folder, listing)
    except FormatError:
        box = sealing_store.new_box(folder)
        _expect_committed(bare_local, folder)
        check_ownership(bare_local, epoch, committed=True)
        newest = max((layout.parse_keys(name) or 0 for name in unreadable), default=0)
        number = put_box(bare_local, folder, newest, box)
        for name in unreadable:
            _delete_own(bare_local, f"{folder}/{name}")
        return [layout.keys_name(number)]
    return []


def _expect_committed(local: Store, folder: str) -> None:
    try:
        listing = read_listing(local, folder)
    except FormatError:
        return  # the manifest is repaired next
    if not isinstance(listing, Manifest | Visible):
        raise NoCheckpoint(f"{local.url}/{folder}: not committed any more")


def _repair_manifest(local: Store, folder: str, data: bytes, epoch: int) -> bool:
    """Rewrite the local manifest if it cannot be read; return whether that was needed."""
    try:
        register = Catalog(local).read(folder)
    except (FormatError, NotSealed):
        check_ownership(local, epoch, committed=True)
        bare(local).put(f"{folder}/{layout.MANIFEST}", data)
        return True
    if not isinstance(register, Manifest):
        raise NoCheckpoint(f"{local.url}/{folder}: not committed any more")
    return False
