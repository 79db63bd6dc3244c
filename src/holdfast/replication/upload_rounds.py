"""Rounds of uploads: upload queued checkpoints, prune the remote tier, repair the local one.

`replication.mirror` decides when a round is due and talks to the training threads; the queue is in
`replication.queue`, and the upload of one checkpoint in `replication.upload`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.encryption.store import sealed
from holdfast.errors import (
    CommitConflict,
    DeadlineExceeded,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotSealed,
    OutcomeUnknown,
    OwnershipError,
    UploadFailed,
    is_damage,
)
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.records import UploadState
from holdfast.maintenance.housekeeping import Housekeeper
from holdfast.maintenance.retention import candidate
from holdfast.maintenance.verify import verify
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import Claim, expect_claim, is_closed, nothing_arrives
from holdfast.ownership.tiered import TieredOwnership
from holdfast.ownership.tiered_catalog import remote_emitter
from holdfast.ownership.tiered_options import TieredOptions, TierRules
from holdfast.policy.rule import Candidate
from holdfast.replication.queue import UploadQueue
from holdfast.replication.repair import mend
from holdfast.replication.upload import Cost, Sender, UploadInterrupted
from holdfast.root.byte_ranges import get_stored_length
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import (
    check_ownership,
    kept_of_others,
    mark_aborted,
    remove_files,
    sync_checkpoint,
)
from holdfast.threads.workers import Background

BACKOFF_S = 1.0
"""Pause after a first failure; it doubles with each further failure."""
BACKOFF_MAX_S = 60.0
_RANDOM = random.Random()  # not the module's generator, which is part of the run's state
_NOTE_EVERY_S = 2.0
_BLOCK_TIMEOUT_S = 600.0


class _RemoteSide:
    """Adapter that gives the housekeeping of the remote tier the run's claim on that tier."""

    def __init__(self, owner: TieredOwnership) -> None:
        self._owner = owner

    @property
    def claim(self) -> Claim | None:
        return self._owner.remote_claim

    @property
    def has_committed(self) -> bool:
        return self._owner.remote_has_committed

    @property
    def unclear(self) -> Collection[str]:
        return self._owner.remote_unclear


@dataclass(slots=True, kw_only=True)
class Failures:
    """Upload failures since the run was claimed; guarded by the lock of the backlog."""

    count: int = 0
    """Failures in a row."""
    last: UploadFailed | None = None
    """Failure that callers must see; None: none, or a later upload has succeeded."""
    is_refusal: bool = False
    """Whether `last` stays, also after later uploads succeed."""
    lost: OwnershipError | None = None
    """Why uploads have stopped: another process owns the run."""
    is_lost_told: bool = False


class UploadWorker:
    """Runs uploads, housekeeping and repairs of two tiers, in the thread of the mirror."""

    def __init__(
        self,
        owner: TieredOwnership,
        rules: TierRules,
        options: TieredOptions,
        emit: Emitter,
        *,
        replaces: bool,
    ) -> None:
        """Start no thread yet (`proceed` does). `replaces` is as for `Housekeeper`."""
        self._owner = owner
        self._catalog = owner.catalog
        self._local, self._remote = self._catalog.store, self._catalog.remote.store
        self._options = options
        self._emit = emit
        self._emit_remote = remote_emitter(emit, self._remote.url)
        self.background = Background("holdfast-mirror")
        """Thread that runs the rounds; a request to stop ends the present round."""
        self.backlog = UploadQueue(
            self._local, self._remote.url, rules.remote, emit, owner, replaces=replaces
        )
        self._changed = self.backlog.changed
        self.chores = Housekeeper(
            self._local,
            owner,
            rules.local,
            emit,
            replaces=replaces,
            is_sent_to=False,
            waiting=self.backlog,
        )
        """Housekeeping of the local tier."""
        self._remote_chores = Housekeeper(
            self._remote,
            _RemoteSide(owner),
            rules.remote,
            Emitter((self._forward_event,)),
            replaces=replaces,
            waiting=self,
        )
        self._sender = Sender(
            self._local,
            self._remote,
            num_threads=options.threads,
            timeout_s=_BLOCK_TIMEOUT_S,
            reads_back=options.reads_back,
        )
        self.may_mend = False
        """Whether the next round repairs damaged checkpoints of the local tier."""
        self._must_retry = False
        self.clear_cached_facts()

    def clear_cached_facts(self) -> None:
        """Discard cached facts about both tiers, since other processes may change them."""
        self.backlog.clear()
        self._is_behind = True
        """Whether the queue was never empty since the claim, so that local retention is due."""
        self.may_release = False
        """Whether the load after the claim has ended, so that it reads no local copy any more."""
        self._begun: set[str] = set()
        """Folders that may have uncommitted files in the remote tier."""
        self.failures = Failures()

    def interrupt(self) -> None:
        """Ask the upload under way to stop soon."""
        self._sender.interrupt()

    def proceed(self) -> None:
        """Undo `interrupt`, and start the upload threads."""
        self._sender.start()
        self._sender.proceed()

    def stop_uploads(self) -> None:
        """Stop the upload threads."""
        self._sender.stop_sending()

    def holds(self, entry: Entry) -> str:
        """Return why the remote copy must not be deleted yet, and copy pins to it; else empty.

        Its pins may not be copied yet, or it was pinned since by the command line, which knows
        only the local tier.
        """
        if self.backlog.waits(entry):
            return "its upload has not ended"
        marks = Catalog(self._local).marks(entry.folder)
        if not (marks.pinned or marks.tags):
            return ""
        self._copy_pins(entry)
        return "it is pinned or tagged in the local tier"

    def round(self) -> bool:
        """Run a round of uploads and upkeep, log its errors; return whether a retry is needed."""
        self._must_retry = False
        try:
            self._round()
        except UploadInterrupted:
            # The run is being claimed, or the process closes. The interrupted upload is recorded as
            # waiting (see `_upload_entry`), and its uploaded parts stay: the next claim continues
            # it, in whatever process.
            pass
        except OwnershipError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - it is logged and retried
            self._handle_upload_failure(error, None)
        return self._must_retry

    def _round(self) -> None:
        """Upload waiting checkpoints, remove partial uploads, and repair local checkpoints."""
        background = self.background
        if not self.backlog.has_seen:
            self._claim_remote()
        while not background.is_stopping:
            entry = self.backlog.next(tries=self._options.tries)
            if entry is None:
                break
            self._upload(entry)
        if not background.is_stopping:
            self._clear_away()
        if self.may_mend and not background.is_stopping:
            self._mend()
        if self._is_behind and self.may_release and not background.is_stopping:
            # Checkpoints that an earlier process kept for upload may be uploaded already; then no
            # upload follows after which local retention would run.
            self._is_behind = False
            self.chores.retain()
            self._release_rest()

    def _claim_remote(self) -> None:
        """Claim the remote tier and list its checkpoints; called once after each claim."""
        self.backlog.note_tiers(epoch=self._remote_epoch)
        self._owner.attach()
        self.backlog.note_tiers(epoch=self._remote_epoch)
        self._catalog.look_again()
        # Local first: what is decrypted here need not be in the remote tier, where keys may lag.
        local = {entry.folder: entry for entry in Catalog(self._local).checkpoints()}
        entries, unread = self._catalog.remote.survey()
        remote = {entry.folder: candidate(self._remote, entry) for entry in entries}
        lineage = {name.order for name in self._catalog.lineage()}
        for entry in entries:
            if entry.folder in local:
                sync_checkpoint(self._remote, entry.folder)
                self._copy_pins(entry)
                self.backlog.record_uploaded(
                    entry, suspect=self._what_lacks(entry, remote[entry.folder])
                )
        for folder, error in unread:
            if folder in local and is_damage(error):
                self._emit_remote("warning", str(error), step=local[folder].step, folder=folder)
                self.backlog.record_uploaded(local[folder], suspect=str(error))
        with self._changed:
            self.backlog.see(remote, lineage)
            attempts = map(str, self._catalog.remote.attempts())
            self._begun = {*attempts}.intersection(self.backlog.folders)
        with self._owner.remote_scratch():
            self._remote_chores.remove_unfinished(spared=self.backlog.spared)
        self._remote_chores.retain()

    def _what_lacks(self, entry: Entry, copy: Candidate) -> str:
        """Return what a remote copy lacks, and log a warning; empty if it is complete.

        A local copy is not deleted because of a remote one that lacks files.
        """
        wrong: list[str] = []
        if not (copy.dropped or copy.begun):
            sizes = {info.key: info.nbytes for info in self._remote.list(f"{entry.folder}/")}
            wrong += [
                name
                for name, file in entry.manifest.files.items()
                if sizes.get(f"{entry.folder}/{name}") != get_stored_length(file)
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
        if not self.backlog.start_upload(entry):
            return
        try:
            self._upload_entry(entry, claim)
        finally:
            self.backlog.finish_upload()

    def _upload_entry(self, entry: Entry, claim: Claim) -> None:
        folder = entry.folder
        retries = self.backlog.tried(entry)
        self.backlog.record_upload_state(entry, "sending")
        try:
            expect_claim(self._remote, claim)
            self._expect_open(entry, claim)
            self._begun.add(folder)
            cost = self._sender.upload_checkpoint(
                folder,
                epoch=claim.epoch,
                told=self._progress_of(entry),
                unclear=self._owner.remote_unclear,
            )
            self._copy_pins(entry)
        except NoCheckpoint as error:
            if self.backlog.waits(entry):
                text = f"{folder} is not sent: {error}"
                self._emit_remote("warning", text, step=entry.step, folder=folder)
            self.backlog.give_up(folder)
            self._finish_upload(entry)
        except (CommitConflict, FormatError, NotSealed) as error:
            self._give_up_upload(entry, error)
        except (UploadInterrupted, OwnershipError):
            self.backlog.record_upload_state(entry, "waiting")
            raise
        except Exception as error:  # noqa: BLE001 - it is logged and retried
            if self.backlog.waits(entry):
                self._handle_upload_failure(error, entry)
        else:
            self._arrived(entry, claim)
            self._follow_up(entry, cost, retries=retries)

    def _expect_open(self, entry: Entry, claim: Claim) -> None:
        """Raise `NoCheckpoint` if the remote tier has closed the epoch of an earlier writer.

        Markers of that epoch may have been removed then, so nothing may be committed in it.
        """
        epoch = entry.name.epoch
        if epoch != claim.epoch and is_closed(self._remote, epoch):
            raise NoCheckpoint(
                f"writer {epoch} has ended there, and did not want it sent by then; it stays in "
                "the local tier"
            )

    def _progress_of(self, entry: Entry) -> Callable[[Cost], None]:
        lock, last_s = threading.Lock(), [time.monotonic()]

        def note_progress(cost: Cost) -> None:
            if time.monotonic() - last_s[0] < _NOTE_EVERY_S or not lock.acquire(blocking=False):
                return
            try:
                self.backlog.record_upload_state(entry, "sending", sent_nbytes=cost.nbytes)
                last_s[0] = time.monotonic()
            finally:
                lock.release()

        return note_progress

    def _arrived(self, entry: Entry, claim: Claim) -> None:
        is_good = not (entry.manifest.lacks or entry.manifest.unhealthy)
        with self._changed:
            self.backlog.arrived(entry)
            if is_good and entry.name.epoch == claim.epoch:
                self._owner.remote_has_committed = True
            self._finish_upload(entry)
        self._catalog.look_again()  # the remote tier is reachable, whatever a reader has met

    def _finish_upload(self, entry: Entry) -> None:
        """Record that an upload is over: committed, or given up."""
        self._begun.discard(entry.folder)
        with self._changed:
            self.failures.count = 0
            if not self.failures.is_refusal:
                self.failures.last = None
            self._changed.notify_all()

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
        self.backlog.note_tiers(epoch=self._remote_epoch, entry=entry, cost=cost)
        self._remote_chores.trust(entry)
        newest = max((copy.order for copy in self.backlog.resumable_there), default=entry.order)
        if self.backlog.is_on_line(entry) and entry.order >= newest:
            self._remote_chores.apply_retention(entry)
        else:
            self._remote_chores.retain()  # `latest` moves forward only, and in the run's lineage
        if cost.is_all:  # then every byte of the local copy was read and found right
            self.chores.trust(entry)
        self.chores.retain()
        if self._options.keep_local == 0 and self.may_release:
            self.chores.delete_local_copy(entry.folder)
        self.backlog.refresh()

    def _release_rest(self) -> None:
        """With `keep_local=0`, delete local copies that an earlier process has uploaded.

        The remote copies are read back first: this process has not seen them arrive.
        """
        if self._options.keep_local != 0:
            return
        for entry in Catalog(self._local).checkpoints():
            is_wanted = entry.marks.pinned or entry.tags or self.backlog.holds(entry)
            if is_wanted or Catalog(self._remote).entry(entry.name) is None:
                continue
            if self.background.is_stopping:
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
        for folder in sorted(self._begun.difference(self.backlog.folders)):
            self._begun.discard(folder)
            self.backlog.give_up(folder)
            name = layout.parse_attempt(folder)
            by = f"writer {claim.epoch}"
            # A new owner of the run may want the checkpoint, and could not commit it any more.
            check_ownership(self._remote, claim.epoch, committed=False)
            if name is None or not mark_aborted(
                self._remote, folder, by=by, reason="not wanted there before all was sent"
            ):
                continue
            whole = self._owner.is_remote_over and nothing_arrives(
                self._remote, name.epoch, own=claim.epoch
            )
            if left := remove_files(self._remote, folder, whole=whole):
                self._emit("warning", kept_of_others(self._remote, folder, left))

    def _mend(self) -> None:
        self.may_mend = False
        claim = self._owner.claim
        for folder in sorted(self._catalog.turned):
            if claim is None:
                return
            try:
                files = mend(self._local, self._remote, folder, epoch=claim.epoch)
            except HoldfastError as error:
                self._emit("housekeeping_failed", f"mending {folder}: {error}", folder=folder)
                continue
            self._catalog.turned.discard(folder)
            if files:
                text = f"mended {', '.join(files)} of {folder} from {self._remote.url}"
                self._emit("mended", text, folder=folder, files=files)

    def _copy_pins(self, entry: Entry) -> None:
        """Copy a checkpoint's local pins and tags to its remote copy, if that exists.

        A pin is set in the local tier first, and then in the remote one if that has a copy, so
        that either the pin or the upload sees the other. Pins of the remote copy alone stay.
        """
        marks = Catalog(self._local).marks(entry.folder)
        copy = Catalog(self._remote).entry(entry.name) if marks.pinned or marks.tags else None
        if copy is None:
            return
        if copy.marks.pinned >= marks.pinned and {*copy.marks.tags} >= {*marks.tags}:
            return
        try:
            annotate(self._remote, copy, add_tags=marks.tags, pinned=marks.pinned or None)
        except NotSealed:
            annotate(self._remote, copy, pinned=True)  # a pin keeps what the tags would keep

    # Failures

    def _handle_upload_failure(self, error: BaseException, entry: Entry | None) -> None:
        """Log an upload failure, pause, and request a retry."""
        if isinstance(error, OutcomeUnknown | DeadlineExceeded):
            self._owner.remote_is_clean = False
        self.failures.count += 1
        pause_s = min(BACKOFF_S * 2 ** min(self.failures.count - 1, 10), BACKOFF_MAX_S)
        pause_s *= _RANDOM.uniform(0.5, 1.0)  # many machines must not retry at once
        what = "the remote tier" if entry is None else entry.folder
        text = f"{what}: {error}" if isinstance(error, HoldfastError) else f"{what}: {error!r}"
        if self.failures.count >= self._options.tries:
            self._remember(text, error)
        self._emit_remote(
            "upload_failed",
            f"{text}; tried again in {pause_s:.0f} s",
            step=None if entry is None else entry.step,
            tries=self.failures.count,
            retry_in_s=pause_s,
        )
        self._record_failure(entry, text, "failed")
        self._must_retry = True
        self.background.sleep(pause_s)

    def _give_up_upload(self, entry: Entry, error: HoldfastError) -> None:
        """Give up a checkpoint that can never be uploaded; keep the local copy for the user."""
        self.backlog.skip_upload(entry)
        text = f"{entry.folder} cannot be sent: {error}"
        self._remember(text, error)
        self.failures.is_refusal = True
        self._emit_remote("upload_failed", text, step=entry.step, folder=entry.folder)
        self._record_failure(entry, str(error), "refused")

    def _remember(self, text: str, error: BaseException) -> None:
        failure = UploadFailed(f"{self._remote.url}: {text}. The checkpoint is in the local tier")
        failure.__cause__ = error
        with self._changed:
            self.failures.last = failure
            self._changed.notify_all()

    def _lose(self, error: OwnershipError) -> None:
        """Log that another process owns the run, and stop uploading."""
        with self._changed:
            self.failures.lost = error
            self._changed.notify_all()
        self._emit_remote("upload_failed", f"nothing is sent any more: {error}")

    def _record_failure(self, entry: Entry | None, text: str, state: UploadState) -> None:
        if entry is not None:
            self.backlog.record_upload_state(entry, state, error=text)
        self.backlog.note_tiers(epoch=self._remote_epoch, error=text)

    @property
    def _remote_epoch(self) -> int | None:
        claim = self._owner.remote_claim
        return None if claim is None else claim.epoch

    def _forward_event(self, event: Event) -> None:
        """Callback that forwards events of the remote tier's housekeeping."""
        if event.kind == "retracted":
            self.backlog.gone(str(event.fields.get("folder")))
        self._emit_remote(event.kind, event.message, step=event.step, **event.fields)
