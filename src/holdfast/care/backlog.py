"""The queue of uploads: decided from what both tiers have, noted in the local one.

Knows what is there and what waits; sends nothing, and asks the remote tier nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from holdfast.care.retention import candidate
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.claims.process import utc_now
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.tiers.ledger import MAX_ERROR_CHARS, Ledger
from holdfast.engine.tiers.tiered import Lag
from holdfast.engine.tiers.upload import Cost
from holdfast.errors import HoldfastError
from holdfast.events import Emitter
from holdfast.format.manifest import Manifest, Timestamp
from holdfast.format.records import TiersRecord, UploadRecord, UploadState
from holdfast.policy.retention import Candidate, Rule, decide
from holdfast.store.base import Store


class Backlog:
    """The queue of one local root. From any thread; `changed` is notified when it gets shorter or
    is decided anew."""

    def __init__(
        self,
        local: Store,
        where: str,
        rule: Rule,
        emit: Emitter,
        owner: Ownership,
        *,
        replaces: bool,
    ) -> None:
        """`where` is the URL of the remote tier and `rule` what that keeps; `owner` holds the claim
        on both; `replaces` is as for `policy.retention.decide`."""
        self.changed = threading.Condition()
        self._local = local
        self._where = where
        self._rule = rule
        self._emit = emit
        self._owner = owner
        self._replaces = replaces
        self._ledger = Ledger(local)
        self.clear()

    def clear(self) -> None:
        """Forget what is known of both tiers: another process may have changed it."""
        self._there: dict[str, Candidate] | None = None
        """By folder: what the remote tier has; None: not looked at yet."""
        self._lineage: set[tuple[int, int]] = set()
        self._waiting: dict[str, Entry] = {}
        self._unread: set[str] = set()
        """Folders that our keys do not open, or that are damaged, if only for a moment. Nothing is
        decided of them, and their notes stay."""
        self.is_sure = False
        """Whether the queue was decided with all that the local root has."""
        self._refused: set[str] = set()
        """Folders that cannot be sent at all."""
        self._suspect: dict[str, str] = {}
        """By folder: why what is there is not to be relied on."""
        self._sending = ""
        """The folder that is being sent. It stays, wanted or not: where saves come faster than
        uploads end, none would ever end."""
        self._over: set[str] = set()
        """Folders that are not to be sent any more, and are not needed for it."""
        self._noted: dict[str, UploadState] | None = None
        """By folder: what is noted in the local root; None: not read yet."""
        self._known: dict[str, Manifest] = {}
        self._tries: dict[str, int] = {}

    # What is there

    @property
    def has_seen(self) -> bool:
        """Whether the remote tier was looked at."""
        return self._there is not None

    def see(self, remote: Mapping[str, Candidate], lineage: Collection[tuple[int, int]]) -> None:
        """Take in what the remote tier has, by folder; `lineage` has the orders that the run is on.

        Raises:
            StoreError, FormatError: the local root cannot be read.
        """
        with self.changed:
            self._there, self._lineage = dict(remote), {*lineage}
            self.refresh()

    def found(self, entry: Entry, *, suspect: str) -> None:
        """Note that the remote tier has a local checkpoint too; `suspect` says why that copy is not
        to be relied on, so that the local one stays."""
        if suspect:
            self._suspect[entry.folder] = suspect
            self.note(entry, "refused", error=suspect)
        elif not self._was_sent(entry):
            self.note(entry, "uploaded", sent_nbytes=entry.manifest.nbytes)

    def gone(self, folder: str) -> None:
        """Note that retention has deleted one in the remote tier."""
        with self.changed:
            if self._there is not None:
                self._there.pop(folder, None)

    @property
    def resumable_there(self) -> list[Candidate]:
        """Checkpoints of the remote tier on the run's line from which it could go on."""
        remote = (self._there or {}).values()
        return [one for one in remote if one.is_resumable and one.order in self._lineage]

    def is_on_line(self, entry: Entry) -> bool:
        """Whether the run has gone through a checkpoint, as far as was seen."""
        return entry.order in self._lineage

    # What waits

    def refresh(self) -> None:
        """Decide anew what is to be sent, from what both tiers have.

        Raises:
            StoreError, FormatError: the local root cannot be read.
        """
        with self.changed:
            entries, unread = Catalog(self._local).survey(known=self._known)
            self._known = {entry.folder: entry.manifest for entry in entries}
            self._unread = {folder for folder, _ in unread}
            local = {entry.folder: entry for entry in entries}
            noted = {f: state for f, state in self._notes().items() if f not in self._unread}
            self._waiting = {folder: local[folder] for folder in self._wanted(local)}
            self.is_sure = True
            for folder in [f for f in noted if f not in local]:
                self._forget(folder)
            for folder in [f for f, state in noted.items() if state != "uploaded"]:
                if folder not in self._waiting and folder not in self._suspect:
                    self._forget(folder)
            for folder, entry in self._waiting.items():
                if folder not in noted:
                    self.note(entry, "waiting")
            self.changed.notify_all()

    def doubt(self) -> None:
        """Let nothing be deleted until the next `refresh`: the queue could not be decided."""
        self.is_sure = False

    def _wanted(self, local: Mapping[str, Entry]) -> list[str]:
        """Folders that only the local root has, that can be sent, and would be kept remotely.

        What is not known to be in the remote tier lets more be wanted, never less.
        """
        remote = self._there or {}
        new = {
            folder: candidate(self._local, entry)
            for folder, entry in local.items()
            if folder not in remote and folder not in self._over and not self._was_sent(entry)
        }
        new = {
            folder: one
            for folder, one in new.items()
            if one.is_usable and not one.begun and not one.dropped
        }
        folders = {one.order: folder for folder, one in new.items()}
        line = {name.order for name in Catalog(self._local).lineage()} | self._lineage
        decisions = decide(
            [*remote.values(), *new.values()], self._rule, lineage=line, replaces=self._replaces
        )
        return [
            folders[decision.entry.order]
            for decision in decisions
            if decision.keep and decision.entry.order in folders
        ]

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Checkpoints that only the local root has and the remote one is to have."""
        return tuple(self._waiting.values())

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of `waiting`."""
        return tuple(self._waiting)

    @property
    def spared(self) -> tuple[str, ...]:
        """Folders of which something may lie there that is yet to be committed: what waits, by its
        note also where it cannot be read now."""
        notes = self._notes()
        others = (f for f in self._unread if notes.get(f, "uploaded") != "uploaded")
        return (*self._waiting, *others)

    def waits(self, entry: Entry) -> bool:
        """Whether a checkpoint is still to be sent: local retention may have taken it if not."""
        with self.changed:
            return entry.folder in self._waiting

    def holds(self, entry: Entry) -> str:
        """Why the local copy must not be deleted yet; empty where it may be."""
        claim = self._owner.claim
        with self.changed:
            # Under this claim nobody else has sent or deleted anything.
            is_ours = claim is not None and entry.name.epoch == claim.epoch
            # That it was sent once is no proof: what was sent may have lost files since.
            if not self.is_sure or not (self.has_seen or is_ours):
                return f"what {self._where} has is not known yet"
            if entry.folder in self._waiting or entry.folder == self._sending:
                return f"it waits for its upload to {self._where}"
            return self._suspect.get(entry.folder, "")

    def is_too_far_behind(self, now: Timestamp, lag: Lag) -> bool:
        """Whether the remote tier lacks more than it may of a run at `now`."""
        waiting = self._sendable()
        if not waiting:
            return False
        newest = max(self.resumable_there, key=lambda copy: copy.order, default=None)
        oldest = min(waiting, key=lambda entry: entry.order)
        then = newest.timestamp if newest is not None else oldest.manifest.timestamp
        return lag.is_exceeded(now, then, sum(entry.manifest.nbytes for entry in waiting))

    def __str__(self) -> str:
        waiting = self.waiting
        nbytes = sum(entry.manifest.nbytes for entry in waiting)
        names = ", ".join(sorted(entry.folder for entry in waiting)) or "nothing"
        return f"{len(waiting)} checkpoints ({nbytes} bytes): {names}"

    # What is sent

    def next(self, *, tries: int) -> Entry | None:
        """The next to send: the newest, after those that have failed `tries` times less."""
        with self.changed:
            waiting = self._sendable()
            rounds = {e.folder: self._tries.get(e.folder, 0) // tries for e in waiting}
            newest_first = sorted(waiting, key=lambda entry: entry.order, reverse=True)
            return min(newest_first, key=lambda entry: rounds[entry.folder], default=None)

    def begin(self, entry: Entry) -> bool:
        """Begin to send a checkpoint, which then stays until `end`. False: it is not wanted."""
        with self.changed:
            if entry.folder not in self._waiting:
                return False
            self._sending = entry.folder
            return True

    def end(self) -> None:
        """Note that nothing is being sent."""
        self._sending = ""

    def tried(self, entry: Entry) -> int:
        """Count one more try; gives how many there were before."""
        before = self._tries.get(entry.folder, 0)
        self._tries[entry.folder] = before + 1
        return before

    def arrived(self, entry: Entry) -> None:
        """Note that the remote tier has a checkpoint, whole.

        Raises:
            StoreError, FormatError: the local root cannot be read.
        """
        with self.changed:
            assert self._there is not None, "nothing is sent before the remote tier was seen"
            self.note(entry, "uploaded", sent_nbytes=entry.manifest.nbytes)
            self._there[entry.folder] = candidate(self._local, entry)
            if entry.order in {name.order for name in Catalog(self._local).lineage()}:
                self._lineage.add(entry.order)
            self._tries.pop(entry.folder, None)
            self._suspect.pop(entry.folder, None)
            self._remove(entry.folder)

    def give_up(self, folder: str) -> None:
        """Send a checkpoint no more; its local copy is not needed for that."""
        with self.changed:
            self._over.add(folder)
            self._forget(folder)
            self._remove(folder)

    def refuse(self, entry: Entry) -> None:
        """Skip a checkpoint that cannot be sent; it waits for somebody to look at it."""
        self._refused.add(entry.folder)

    def _sendable(self) -> list[Entry]:
        return [entry for name, entry in self._waiting.items() if name not in self._refused]

    def _remove(self, folder: str) -> None:
        self._waiting.pop(folder, None)
        self._sending = ""
        self.changed.notify_all()

    # What is noted. On a full disk nothing can be, and uploads make room.

    def note(
        self, entry: Entry, state: UploadState, *, sent_nbytes: int = 0, error: str = ""
    ) -> None:
        """Write down how far the upload of a checkpoint is."""
        record = UploadRecord(
            remote=self._where,
            state=state,
            nbytes=entry.manifest.nbytes,
            changed=utc_now(),
            sent_nbytes=sent_nbytes,
            tries=self._tries.get(entry.folder, 0),
            error=error[:MAX_ERROR_CHARS] or None,
        )
        with self._noting():
            self._ledger.note(entry.folder, record)
            self._notes()[entry.folder] = state

    def note_tiers(
        self,
        *,
        epoch: int | None,
        entry: Entry | None = None,
        cost: Cost | None = None,
        error: str = "",
    ) -> None:
        """Write down the remote tier and how uploads went; without one, that of the last stays.
        `epoch` is a claim that stands there; None: none that is known."""
        before = self._ledger.tiers()
        if before is None or before.remote != self._where:
            before = TiersRecord(remote=self._where, changed="")
        record = structs.replace(
            before,
            changed=utc_now(),
            epoch=before.epoch if epoch is None else epoch,
            error=error[:MAX_ERROR_CHARS] or None,
        )
        if entry is not None and cost is not None:
            record = structs.replace(
                record,
                folder=entry.folder,
                nbytes=cost.nbytes,
                upload_s=cost.seconds,
                requests=cost.requests,
            )
        with self._noting():
            self._ledger.note_tiers(record)

    def _was_sent(self, entry: Entry) -> bool:
        """Whether it was in the remote tier once, as far as is noted."""
        return self._notes().get(entry.folder) == "uploaded"

    def _notes(self) -> dict[str, UploadState]:
        if self._noted is None:
            notes = self._ledger.notes().items()
            self._noted = {
                folder: note.state if note is not None and note.remote == self._where else "waiting"
                for folder, note in notes
            }
        return self._noted

    def _forget(self, folder: str) -> None:
        with self._noting():
            self._ledger.forget(folder)
            self._notes().pop(folder, None)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Log an error of a change of the notes instead of raising it."""
        try:
            yield
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"notes on uploads: {error}")
