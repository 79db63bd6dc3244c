"""Mirrors the checkpoints of a local root to a remote one, beside training (design.md, rule 9).

Owns when something is sent, and what follows; what that is, is in `care.backlog`, and how one
checkpoint is sent in `engine.tiers.upload`.
All that talks to the remote tier happens in one thread of its own. A failure there is told and
tried again, and holds back nothing but the deletion of what is not sent yet.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

from holdfast.care.backlog import Backlog
from holdfast.care.housekeeping import Housekeeper
from holdfast.care.mend import mend
from holdfast.care.retention import candidate
from holdfast.care.uploads import Uploads
from holdfast.engine.claims.claim import Claim, expect_claim, is_closed, nothing_arrives
from holdfast.engine.claims.notes import annotate
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.roots.commit import check_fence, mark_aborted, remove_files, settle
from holdfast.engine.sealed.sealing import SealedStore
from holdfast.engine.tiers.catalog import TieredCatalog
from holdfast.engine.tiers.claims import TieredOwnership
from holdfast.engine.tiers.pieces import length
from holdfast.engine.tiers.telling import remote_emitter
from holdfast.engine.tiers.tiered import Rules, Tiered, TieredOptions
from holdfast.engine.tiers.upload import Cost, Interrupted, Sender
from holdfast.engine.workers import Workers
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
from holdfast.format.manifest import Timestamp
from holdfast.format.records import UploadState
from holdfast.policy.retention import Candidate, Rule
from holdfast.store.base import Store

BACKOFF_S = 1.0
"""The pause after a first failure; it doubles with each that follows."""
BACKOFF_MAX_S = 60.0
_RANDOM = random.Random()  # of our own: that of the module is part of the run's state
_NOTE_EVERY_S = 2.0
_BLOCK_TIMEOUT_S = 600.0
_END_S = 5.0
"""How long `close` waits, beyond its deadline, for the blocks that are on their way."""


class _RemoteSide:
    """The ownership of a run as the chores in the remote tier see it."""

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


class _Notes:
    """Pins and tags of the local tier, which copies in the remote one get too."""

    def __init__(self, backlog: Backlog, local: Store, remote: Store) -> None:
        self._backlog = backlog
        self._local = local
        self._remote = remote

    def holds(self, entry: Entry) -> str:
        """Why the remote copy must not be deleted yet: its pins may not have come along. Or it was
        pinned here since by the command line, which knows one tier."""
        if self._backlog.waits(entry):
            return "its upload has not ended"
        marks = Catalog(self._local).marks(entry.folder)
        if not (marks.pinned or marks.tags):
            return ""
        self.copy(entry)
        return "it is pinned or tagged in the local tier"

    def copy(self, entry: Entry) -> None:
        """Add pins and tags that were given locally before the checkpoint was in the remote tier.

        Whoever pins does so in the local tier first and then looks whether the remote one has it,
        so that one of both sees the other. A pin that only the remote copy has stays.
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
            annotate(self._remote, copy, pinned=True)  # what tags keep is kept, without the words


class Mirror(Uploads):
    """Sends what a rule wants to have in the remote tier, and does the chores there."""

    def __init__(
        self,
        owner: TieredOwnership,
        rule: Rule,
        options: TieredOptions,
        emit: Emitter,
        *,
        replaces: bool,
        timeout_s: float,
    ) -> None:
        """`rule` is that of the remote tier, in which `replaces` is as for `Housekeeper`;
        `timeout_s` bounds the waits of callers."""
        super().__init__()
        self._owner = owner
        self._catalog = owner.catalog
        self._local, self._remote = self._catalog.store, self._catalog.remote.store
        self._options = options
        self._emit = emit
        self._timeout_s = timeout_s
        self._told = remote_emitter(emit, self._remote.url)
        self._backlog = Backlog(self._local, self._remote.url, rule, emit, replaces=replaces)
        self._changed = self._backlog.changed
        self._notes = _Notes(self._backlog, self._local, self._remote)
        self._housekeeper = Housekeeper(
            self._remote,
            _RemoteSide(owner),
            rule,
            Emitter((self._heard,)),
            replaces=replaces,
            waiting=self._notes,
        )
        self._sender = Sender(
            self._local,
            self._remote,
            num_threads=options.threads,
            timeout_s=_BLOCK_TIMEOUT_S,
            reads_back=options.reads_back,
        )
        self._workers = Workers(1, "holdfast-mirror")
        self._stop = threading.Event()
        self._job: Future[None] | None = None
        self._is_dirty = self._is_running = False
        self._is_paused = True
        self._may_mend = False
        self._forget_all()
        owner.before_take = self._pause
        owner.after_take = self._go_on

    def _forget_all(self) -> None:
        """What is known of both tiers, which another process may change until the next claim."""
        self._backlog.clear()
        self._is_behind = True
        """Whether there was no moment yet since the claim when nothing waited."""
        self._begun: set[str] = set()
        """Folders of which something may be in the remote tier that is not committed."""
        self._num_failures = 0
        self._failure: HoldfastError | None = None
        self._is_refusal = False
        """Whether `_failure` is one that no later upload makes good."""
        self._lost: OwnershipError | None = None
        self._is_lost_told = False

    # From the threads that train and save

    def committed(self) -> None:
        """See `Uploads.committed`."""
        try:
            self._backlog.refresh()
        except Exception as error:  # noqa: BLE001 - the save stands; nothing is deleted meanwhile
            self._backlog.doubt()
            self._emit("housekeeping_failed", f"queue of uploads: {error!r}")
        self._wake()

    def holds(self, entry: Entry) -> str:
        """See `Uploads.holds`."""
        claim = self._owner.claim
        return self._backlog.holds(entry, epoch=None if claim is None else claim.epoch)

    def mend_now(self) -> None:
        """See `Uploads.mend_now`."""
        self._may_mend = True
        self._wake()

    def expect_room(self, now: Timestamp) -> None:
        """See `Uploads.expect_room`."""
        if self._options.max_lag is None:
            return
        end = time.monotonic() + self._timeout_s
        with self._held(self._timeout_s):
            while self._is_too_far_behind(now):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._remote.url} is further behind than max_lag allows, and did not "
                        f"catch up in {self._timeout_s:.0f} s: {self._backlog}"
                    ) from self._failure
                self._changed.wait(left_s)

    def raise_failure(self) -> None:
        """See `Uploads.raise_failure`."""
        if self._lost is not None:
            self._is_lost_told = True
            raise self._lost
        failure = self._failure
        if failure is not None and self._options.on_upload_failure == "raise":
            self._failure, self._is_refusal = None, False
            raise failure

    def settle(self, timeout_s: float) -> None:
        """See `Uploads.settle`."""
        end = time.monotonic() + timeout_s
        with self._held(timeout_s):
            if not self._changed.wait_for(self._is_settled, max(end - time.monotonic(), 0)):
                raise DeadlineExceeded(
                    f"{self._remote.url}: not all was sent after {timeout_s:.0f} s: {self._backlog}"
                ) from self._failure
            job = self._job
        if job is not None and job.done():
            job.result()

    @contextmanager
    def _held(self, timeout_s: float) -> Iterator[None]:
        """With the queue held, which another thread may have that waits for a disk or for a key.

        Raises:
            DeadlineExceeded: it has it for `timeout_s` seconds.
        """
        if not self._changed.acquire(timeout=timeout_s):
            raise DeadlineExceeded(
                f"{self._local.url}: the queue of uploads is still being read after "
                f"{timeout_s:.0f} s; its storage, or what opens its keys, hangs"
            )
        try:
            yield
        finally:
            self._changed.release()

    def _is_settled(self) -> bool:
        must_tell = self._failure is not None and self._options.on_upload_failure == "raise"
        return not self._is_running or must_tell

    def close(self, timeout_s: float) -> None:
        """See `Uploads.close`."""
        limit_s = min(timeout_s, self._options.close_timeout_s)
        end = time.monotonic() + limit_s
        try:
            try:
                with self._held(limit_s + _END_S):
                    left_s = max(end - time.monotonic(), 0)
                    self._changed.wait_for(lambda: not self._is_running, left_s)
            finally:
                self._pause(_END_S)
        except DeadlineExceeded as error:
            self._emit("housekeeping_failed", str(error), tier="remote")
        self._sender.close()
        self._workers.close()
        if self._lost is not None and not self._is_lost_told:
            raise self._lost
        if self._backlog.folders:
            self._tell_left()

    def _tell_left(self) -> None:
        text = (
            f"{self._remote.url}: not sent: {self._backlog}. It stays in {self._local.url}; the "
            "next process that resumes there sends what can be sent"
        )
        self._emit("upload_failed", text, tier="remote", waiting=len(self._backlog.folders))
        if self._options.on_upload_failure == "raise":
            raise UploadFailed(text) from self._failure

    def _is_too_far_behind(self, now: Timestamp) -> bool:
        lag = self._options.max_lag
        if lag is None or self._lost is not None:
            return False
        return self._backlog.is_too_far_behind(now, lag)

    # The thread

    def _go_on(self) -> None:
        self._forget_all()
        self._stop.clear()
        self._sender.start()
        self._sender.proceed()
        self._is_paused = False
        self._wake()

    def _pause(self, timeout_s: float | None = None) -> None:
        """Return when nothing of this is under way.

        Raises:
            DeadlineExceeded: a call of the remote tier hangs.
        """
        self._is_paused = True
        self._stop.set()
        self._sender.interrupt()
        job = self._job
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if job is not None and wait([job], timeout=limit_s).not_done:
            self._owner.remote_is_clean = False
            raise DeadlineExceeded(
                f"{self._remote.url}: an upload does not end after {limit_s:.0f} s"
            )
        if not self._backlog.is_sure or any(map(self._is_ours, self._backlog.waiting)):
            # Whoever sends it later commits in an epoch that must not be thought to be over.
            self._owner.remote_is_clean = False

    def _is_ours(self, entry: Entry) -> bool:
        claim = self._owner.claim
        return claim is not None and entry.name.epoch == claim.epoch

    def _wake(self) -> None:
        with self._changed:
            self._is_dirty = True
            if not self._is_running and not self._is_paused and self._lost is None:
                self._is_running = True
                self._job = self._workers.submit(self._work)

    def _work(self) -> None:
        try:
            while self._has_work():
                self._try_round()
        except BaseException:
            self._rest()
            raise

    def _has_work(self) -> bool:
        with self._changed:
            if self._is_paused or not self._is_dirty or self._lost is not None:
                self._rest()
                return False
            self._is_dirty = False
            return True

    def _rest(self) -> None:
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _try_round(self) -> None:
        try:
            self._round()
        except Interrupted:
            # Only `_pause` does that. What was being sent is still noted as waiting (see `_send`),
            # and what has arrived of it stays: the next claim goes on there, in whatever process.
            pass
        except OwnershipError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - it is told, and tried again
            self._fail(error, None)

    def _round(self) -> None:
        """Send all that waits."""
        if not self._backlog.has_seen:
            self._begin()
        while not self._stop.is_set():
            entry = self._backlog.next(tries=self._options.tries)
            if entry is None:
                break
            self._upload(entry)
        if not self._stop.is_set():
            self._clear_away()
        if self._may_mend and not self._stop.is_set():
            self._mend()
        if self._is_behind and not self._stop.is_set():
            self._is_behind = False
            self.caught_up()

    def _begin(self) -> None:
        """Once after each claim: claim the remote tier too, and see what it has."""
        self._backlog.note_tiers(epoch=self._epoch_there)
        self._owner.attach()
        self._backlog.note_tiers(epoch=self._epoch_there)
        self._catalog.look_again()
        # First: what is opened here need not be opened there, where keys may be changed later.
        here = {entry.folder: entry for entry in Catalog(self._local).checkpoints()}
        entries, unread = self._catalog.remote.survey()
        there = {entry.folder: candidate(self._remote, entry) for entry in entries}
        lineage = {name.order for name in self._catalog.lineage()}
        for entry in entries:
            if entry.folder in here:
                settle(self._remote, entry.folder)
                self._notes.copy(entry)
                self._backlog.found(entry, suspect=self._what_lacks(entry, there[entry.folder]))
        for folder, error in unread:
            if folder in here and is_damage(error):
                self._told("warning", str(error), step=here[folder].step, folder=folder)
                self._backlog.found(here[folder], suspect=str(error))
        with self._changed:
            self._backlog.see(there, lineage)
            attempts = map(str, self._catalog.remote.attempts())
            self._begun = {*attempts}.intersection(self._backlog.folders)
        with self._owner.remote_scratch():
            self._housekeeper.after_claim(spared=self._backlog.spared)
        self._housekeeper.retain()

    def _what_lacks(self, entry: Entry, found: Candidate) -> str:
        """The local copy does not go because of one there that lacks files."""
        wrong: list[str] = []
        if not (found.dropped or found.begun):
            sizes = {info.key: info.nbytes for info in self._remote.list(f"{entry.folder}/")}
            wrong += [
                name
                for name, file in entry.manifest.files.items()
                if sizes.get(f"{entry.folder}/{name}") != length(file)
            ]
        if isinstance(self._remote, SealedStore):
            wrong += self._remote.lost_keys(entry.folder)
        if not wrong:
            return ""
        text = f"{self._remote.url}/{entry.folder} lacks {', '.join(wrong)}"
        self._told("warning", text, step=entry.step, folder=entry.folder)
        return text

    def _upload(self, entry: Entry) -> None:
        claim = self._owner.attach()
        if not self._backlog.begin(entry):
            return
        try:
            self._send(entry, claim)
        finally:
            self._backlog.end()

    def _send(self, entry: Entry, claim: Claim) -> None:
        folder = entry.folder
        retries = self._backlog.tried(entry)
        self._backlog.note(entry, "sending")
        try:
            expect_claim(self._remote, claim)
            self._expect_open(entry, claim)
            self._begun.add(folder)
            cost = self._sender.send(
                folder,
                epoch=claim.epoch,
                told=self._progress_of(entry),
                unclear=self._owner.remote_unclear,
            )
            self._notes.copy(entry)
        except NoCheckpoint as error:
            if self._backlog.waits(entry):
                text = f"{folder} is not sent: {error}"
                self._told("warning", text, step=entry.step, folder=folder)
            self._backlog.give_up(folder)
            self._end(entry)
        except (CommitConflict, FormatError, NotSealed) as error:
            self._refuse(entry, error)
        except (Interrupted, OwnershipError):
            self._backlog.note(entry, "waiting")
            raise
        except Exception as error:  # noqa: BLE001 - it is told, and tried again
            if self._backlog.waits(entry):
                self._fail(error, entry)
        else:
            self._arrived(entry, claim)
            self._follow_up(entry, cost, retries=retries)

    def _expect_open(self, entry: Entry, claim: Claim) -> None:
        """Raise `NoCheckpoint` where the epoch of what a forerunner saved was closed there: then
        markers of that epoch may have gone, and nothing may be committed in it any more."""
        epoch = entry.name.epoch
        if epoch != claim.epoch and is_closed(self._remote, epoch):
            raise NoCheckpoint(
                f"writer {epoch} has ended there, and did not want it sent by then; it stays in "
                "the local tier"
            )

    def _progress_of(self, entry: Entry) -> Callable[[Cost], None]:
        lock, last_s = threading.Lock(), [time.monotonic()]

        def tell(cost: Cost) -> None:
            if time.monotonic() - last_s[0] < _NOTE_EVERY_S or not lock.acquire(blocking=False):
                return
            try:
                self._backlog.note(entry, "sending", sent_nbytes=cost.nbytes)
                last_s[0] = time.monotonic()
            finally:
                lock.release()

        return tell

    def _arrived(self, entry: Entry, claim: Claim) -> None:
        is_good = not (entry.manifest.lacks or entry.manifest.unhealthy)
        with self._changed:
            self._backlog.arrived(entry)
            if is_good and entry.name.epoch == claim.epoch:
                self._owner.remote_has_committed = True
            self._end(entry)
        self._catalog.look_again()  # it can be reached, whatever a reader has met

    def _end(self, entry: Entry) -> None:
        """It is there now, or is not to be sent any more."""
        self._begun.discard(entry.folder)
        with self._changed:
            self._num_failures = 0
            if not self._is_refusal:
                self._failure = None
            self._changed.notify_all()

    def _follow_up(self, entry: Entry, cost: Cost, *, retries: int) -> None:
        """What a commit in the remote tier brings with it; none of it takes the commit back."""
        self._told(
            "uploaded",
            f"{entry.folder} is there",
            step=entry.step,
            folder=entry.folder,
            nbytes=entry.manifest.nbytes,
            sent_nbytes=cost.nbytes,
            requests=cost.requests,
            retries=retries,
            upload_s=cost.seconds,
        )
        self._backlog.note_tiers(epoch=self._epoch_there, entry=entry, cost=cost)
        self._housekeeper.trust(entry)
        newest = max((there.order for there in self._backlog.resumable_there), default=entry.order)
        if self._backlog.is_on_line(entry) and entry.order >= newest:
            self._housekeeper.after_commit(entry)
        else:
            self._housekeeper.retain()  # `latest` moves forward only, and on the run's own line
        self.uploaded(entry, cost.is_all)
        self._backlog.refresh()

    def _clear_away(self) -> None:
        """Remove what was sent of checkpoints that are not wanted there any more."""
        claim = self._owner.attach()
        for folder in sorted(self._begun.difference(self._backlog.folders)):
            self._begun.discard(folder)
            self._backlog.give_up(folder)
            name = layout.parse_attempt(folder)
            by = f"writer {claim.epoch}"
            # Who owns the run by now may want it, and could not commit it any more.
            check_fence(self._remote, claim.epoch, committed=False)
            if name is None or not mark_aborted(
                self._remote, folder, by=by, reason="not wanted there before all was sent"
            ):
                continue
            whole = self._owner.is_remote_over and nothing_arrives(
                self._remote, name.epoch, own=claim.epoch
            )
            remove_files(self._remote, folder, whole=whole)

    def _mend(self) -> None:
        self._may_mend = False
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

    # What goes wrong

    def _fail(self, error: BaseException, entry: Entry | None) -> None:
        """Tell, wait, and have it tried again."""
        if isinstance(error, OutcomeUnknown | DeadlineExceeded):
            self._owner.remote_is_clean = False
        self._num_failures += 1
        pause_s = min(BACKOFF_S * 2 ** min(self._num_failures - 1, 10), BACKOFF_MAX_S)
        pause_s *= _RANDOM.uniform(0.5, 1.0)  # many machines must not come back in step
        what = "the remote tier" if entry is None else entry.folder
        text = f"{what}: {error}" if isinstance(error, HoldfastError) else f"{what}: {error!r}"
        if self._num_failures >= self._options.tries:
            self._remember(text, error)
        self._told(
            "upload_failed",
            f"{text}; tried again in {pause_s:.0f} s",
            step=None if entry is None else entry.step,
            tries=self._num_failures,
            retry_in_s=pause_s,
        )
        self._record_failure(entry, text, "failed")
        with self._changed:
            self._is_dirty = True
        self._stop.wait(pause_s)

    def _refuse(self, entry: Entry, error: HoldfastError) -> None:
        """It cannot be sent, and the local copy stays for somebody to look at."""
        self._backlog.refuse(entry)
        text = f"{entry.folder} cannot be sent: {error}"
        self._remember(text, error)
        self._is_refusal = True
        self._told("upload_failed", text, step=entry.step, folder=entry.folder)
        self._record_failure(entry, str(error), "refused")

    def _remember(self, text: str, error: BaseException) -> None:
        failure = UploadFailed(f"{self._remote.url}: {text}. The checkpoint is in the local tier")
        failure.__cause__ = error
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _lose(self, error: OwnershipError) -> None:
        """The run is another process's; nothing is sent any more."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()
        self._told("upload_failed", f"nothing is sent any more: {error}")

    def _record_failure(self, entry: Entry | None, text: str, state: UploadState) -> None:
        if entry is not None:
            self._backlog.note(entry, state, error=text)
        self._backlog.note_tiers(epoch=self._epoch_there, error=text)

    @property
    def _epoch_there(self) -> int | None:
        claim = self._owner.remote_claim
        return None if claim is None else claim.epoch

    def _heard(self, event: Event) -> None:
        """What the chores in the remote tier tell."""
        if event.kind == "retracted":
            self._backlog.gone(str(event.fields.get("folder")))
        self._told(event.kind, event.message, step=event.step, **event.fields)


def ownership(
    root: object,
    catalog: Catalog,
    rules: Rules,
    emit: Emitter,
    *,
    takeover: bool,
    replaces: bool,
    timeout_s: float,
) -> tuple[Ownership, Uploads]:
    """Who holds the claim on a root, or on both of its tiers, and what sends from one to the other.

    `rules` are those of the tiers; the rest is as for `Mirror`.
    """
    if not (isinstance(root, Tiered) and isinstance(catalog, TieredCatalog)):
        return Ownership(catalog.store, takeover=takeover, emit=emit), Uploads()
    owner = TieredOwnership(catalog, takeover=takeover, emit=emit)
    mirror = Mirror(owner, rules.remote, root.options, emit, replaces=replaces, timeout_s=timeout_s)
    return owner, mirror
