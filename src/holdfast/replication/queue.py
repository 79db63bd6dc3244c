"""Queue of checkpoints to upload to the remote tier; computed from the contents of both tiers.

Makes no request to the remote tier, and records upload states in the local one. `holds` keeps a
local copy from deletion while its upload is due (tests/replication/test_mirror.py).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from msgspec import structs

from holdfast.errors import HoldfastError
from holdfast.events import Emitter
from holdfast.format.manifest import Manifest, Timestamp
from holdfast.format.records import TiersRecord, UploadRecord, UploadState
from holdfast.maintenance.retention import candidate
from holdfast.ownership.owner import Ownership
from holdfast.ownership.process import utc_text
from holdfast.ownership.tiered_options import Lag
from holdfast.policy.retention import decide
from holdfast.policy.rule import Candidate, Rule
from holdfast.replication.upload import Cost
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import MAX_ERROR_CHARS, Ledger
from holdfast.store.base import Store

_MAX_NAMED = 10


class UploadQueue:
    """Checkpoints that a local root has yet to upload. Thread-safe; notifies `changed`."""

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
        """Create an empty queue; `refresh` fills it.
        `where` is the URL of the remote tier and `rule` its retention; `owner` holds the claim on
        both tiers; `replaces` is as for `policy.retention.decide`."""
        self.changed = threading.Condition()
        self._local = local
        self._where = where
        self._rule = rule
        self._emit = emit
        self._owner = owner
        self._replaces = replaces
        self._ledger = Ledger(local)
        self.host = ""
        """Name of the host that the local root is a disk of; empty: it has all files."""
        self.incomplete: Mapping[str, str] = {}
        """By folder, which files no host has, so that the checkpoint cannot be uploaded."""
        self.clear()

    def clear(self) -> None:
        """Drop all cached state of both tiers, because another process may have changed them."""
        self._remote: dict[str, Candidate] | None = None
        """Checkpoints of the remote tier, by folder; None: not listed yet."""
        self._lineage: set[tuple[int, int]] = set()
        self._waiting: dict[str, Entry] = {}
        self._unread: set[str] = set()
        """Folders that cannot be read now: damaged, or encrypted for other keys. Their notes stay,
        and nothing is decided about them."""
        self.is_sure = False
        """Whether the queue was computed from everything that the local root has."""
        self._refused: set[str] = set()
        self._suspect: dict[str, str] = {}
        """Why the remote copy must not be relied on, by folder."""
        self.sent_metrics: dict[str, set[str]] = {}
        """Names of later metrics that were copied to the remote tier, by folder."""
        self.sending = ""
        """The folder that is being uploaded. It is kept even if no longer wanted: where saves come
        faster than uploads end, no upload would ever end."""
        self._given_up: set[str] = set()
        """Folders whose upload was given up; their local copies may be deleted."""
        self._states: dict[str, UploadState] | None = None
        """Upload states recorded in the local root, by folder; None: not read yet."""
        self._manifests: dict[str, Manifest] = {}
        self._tries: dict[str, int] = {}

    # What the remote tier has

    @property
    def has_seen(self) -> bool:
        """Whether the remote tier has been listed since the last `clear`."""
        return self._remote is not None

    def record_listing(
        self, remote: Mapping[str, Candidate], lineage: Collection[tuple[int, int]]
    ) -> None:
        """Store the listing of the remote tier and the run's `lineage`, and recompute the queue."""
        with self.changed:
            self._remote, self._lineage = dict(remote), {*lineage}
            self.refresh()

    def record_uploaded(self, entry: Entry, *, suspect: str) -> None:
        """Record that the remote tier has a checkpoint; if `suspect`, the local copy stays."""
        if suspect:
            self._suspect[entry.folder] = suspect
            self.record_upload_state(entry, "refused", error=suspect)
        elif not self._was_sent(entry):
            self.record_upload_state(entry, "uploaded", sent_nbytes=entry.manifest.nbytes)

    def record_deletion(self, folder: str) -> None:
        """Record that retention has deleted a folder in the remote tier."""
        with self.changed:
            if self._remote is not None:
                self._remote.pop(folder, None)

    @property
    def resumable_there(self) -> list[Candidate]:
        """Checkpoints of the remote tier, in the run's lineage, that the run could resume from."""
        remote = (self._remote or {}).values()
        return [one for one in remote if one.is_resumable and one.order in self._lineage]

    def is_on_line(self, entry: Entry) -> bool:
        """Whether a checkpoint is in the run's lineage, as it was last listed."""
        return entry.order in self._lineage

    # What is queued

    def refresh(self) -> None:
        """Recompute the queue from what both tiers have, and update the notes on disk."""
        with self.changed:
            entries, unread = Catalog(self._local).survey(known=self._manifests)
            self._manifests = {entry.folder: entry.manifest for entry in entries}
            self._unread = {folder for folder, _ in unread}
            local = {entry.folder: entry for entry in entries}
            noted = {f: state for f, state in self._read_states().items() if f not in self._unread}
            self._waiting = {folder: local[folder] for folder in self._to_upload(local)}
            self.is_sure = True
            for folder in [f for f in noted if f not in local]:
                self._remove_note(folder)
            for folder in [f for f, state in noted.items() if state != "uploaded"]:
                if folder not in self._waiting and folder not in self._suspect:
                    self._remove_note(folder)
            for folder, entry in self._waiting.items():
                if folder not in noted:
                    self.record_upload_state(entry, "waiting")
            self.changed.notify_all()

    def mark_unsure(self) -> None:
        """Block local deletion until the next `refresh`: the queue could not be computed."""
        self.is_sure = False

    def _to_upload(self, local: Mapping[str, Entry]) -> list[str]:
        """List folders that the remote tier lacks and would keep; or more, never fewer."""
        remote = self._remote or {}
        new = {
            folder: candidate(self._local, entry)
            for folder, entry in local.items()
            if folder not in remote
            and folder not in self.incomplete
            and folder not in self._given_up
            and not self._was_sent(entry)
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
        """Checkpoints in the upload queue."""
        return tuple(self._waiting.values())

    @property
    def folders(self) -> tuple[str, ...]:
        """Folder names of the queued checkpoints."""
        return tuple(self._waiting)

    @property
    def spared(self) -> tuple[str, ...]:
        """Folders queued now, or by a note that cannot be read: remote gc must skip them."""
        notes = self._read_states()
        others = (f for f in self._unread if notes.get(f, "uploaded") != "uploaded")
        return (*self._waiting, *others)

    def waits(self, entry: Entry) -> bool:
        """Whether a checkpoint is still queued; if not, local retention may have deleted it."""
        with self.changed:
            return entry.folder in self._waiting

    def holds(self, entry: Entry) -> str:
        """Return why the local copy of a checkpoint must not be deleted yet; empty if it may be."""
        claim = self._owner.claim
        with self.changed:
            # Under this claim no other process has uploaded or deleted anything.
            is_ours = claim is not None and entry.name.epoch == claim.epoch
            # A past upload is no proof: the remote copy may have lost files since.
            if not self.is_sure or not (self.has_seen or is_ours):
                return f"the content of {self._where} is not known yet"
            if entry.folder in self._waiting or entry.folder == self.sending:
                return f"it waits for its upload to {self._where}"
            if not {*entry.marks.notes.metrics} <= self.sent_metrics.get(entry.folder, set()):
                return f"its later metrics are not in {self._where} yet"
            return self._suspect.get(entry.folder, "")

    def is_too_far_behind(self, now: Timestamp, lag: Lag) -> bool:
        """Whether the remote tier lags the run, which is at `now`, by more than `lag` allows."""
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
        names = [
            f"step {entry.step} ({entry.folder})"
            for entry in sorted(waiting, key=lambda entry: entry.order)
        ]
        more = f", and {len(names) - _MAX_NAMED} older" if len(names) > _MAX_NAMED else ""
        listed = ", ".join(names[-_MAX_NAMED:]) or "nothing"
        return f"{len(waiting)} checkpoints ({nbytes} bytes): {listed}{more}"

    # What is being uploaded

    def next(self, *, tries: int) -> Entry | None:
        """Return the next checkpoint to upload: fewest failed rounds of `tries`, then newest."""
        with self.changed:
            waiting = self._sendable()
            rounds = {e.folder: self._tries.get(e.folder, 0) // tries for e in waiting}
            newest_first = sorted(waiting, key=lambda entry: entry.order, reverse=True)
            return min(newest_first, key=lambda entry: rounds[entry.folder], default=None)

    def start_upload(self, entry: Entry) -> bool:
        """Keep a checkpoint, as being uploaded, until `finish_upload`. False: not queued."""
        with self.changed:
            if entry.folder not in self._waiting:
                return False
            self.sending = entry.folder
            return True

    def finish_upload(self) -> None:
        """Mark that nothing is being uploaded."""
        self.sending = ""

    def count_try(self, entry: Entry) -> int:
        """Count one more upload attempt of a checkpoint; return the number before it."""
        before = self._tries.get(entry.folder, 0)
        self._tries[entry.folder] = before + 1
        return before

    def record_arrival(self, entry: Entry) -> None:
        """Record a finished upload and take the checkpoint off the queue."""
        with self.changed:
            assert self._remote is not None, "nothing is sent before the remote tier was seen"
            self.record_upload_state(entry, "uploaded", sent_nbytes=entry.manifest.nbytes)
            self._remote[entry.folder] = candidate(self._local, entry)
            if entry.order in {name.order for name in Catalog(self._local).lineage()}:
                self._lineage.add(entry.order)
            self._tries.pop(entry.folder, None)
            self._suspect.pop(entry.folder, None)
            self._drop_upload(entry.folder)

    def give_up(self, folder: str) -> None:
        """Take a checkpoint off the queue for good; its local copy may then be deleted."""
        with self.changed:
            self._given_up.add(folder)
            self._remove_note(folder)
            self._drop_upload(folder)

    def skip_upload(self, entry: Entry) -> None:
        """Skip a checkpoint that cannot be uploaded; it stays queued for a person to look at."""
        self._refused.add(entry.folder)

    def _sendable(self) -> list[Entry]:
        return [entry for name, entry in self._waiting.items() if name not in self._refused]

    def _drop_upload(self, folder: str) -> None:
        self._waiting.pop(folder, None)
        self.sending = ""
        self.changed.notify_all()

    # Notes on disk. On a full disk they cannot be written; that is no error, as uploads make room.

    def record_upload_state(
        self, entry: Entry, state: UploadState, *, sent_nbytes: int = 0, error: str = ""
    ) -> None:
        """Record the upload state of a checkpoint in the local root."""
        record = UploadRecord(
            remote=self._where,
            state=state,
            nbytes=entry.manifest.nbytes,
            changed=utc_text(),
            sent_nbytes=sent_nbytes,
            tries=self._tries.get(entry.folder, 0),
            error=error[:MAX_ERROR_CHARS] or None,
        )
        try:
            self._ledger.put_note(entry.folder, record)
        except HoldfastError as error:
            self._log_failure(error)
        else:
            self._read_states()[entry.folder] = state

    def note_tiers(
        self,
        *,
        epoch: int | None,
        entry: Entry | None = None,
        cost: Cost | None = None,
        error: str = "",
    ) -> None:
        """Record the remote tier, and the last upload's cost if given, in the local root."""
        before = self._ledger.tiers()
        if before is None or before.remote != self._where:
            before = TiersRecord(remote=self._where, changed="")
        record = structs.replace(
            before,
            changed=utc_text(),
            host=self.host,
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
        try:
            self._ledger.note_tiers(record)
        except HoldfastError as error:
            self._log_failure(error)

    def _was_sent(self, entry: Entry) -> bool:
        """Whether the recorded state of a checkpoint is `uploaded`."""
        return self._read_states().get(entry.folder) == "uploaded"

    def _read_states(self) -> dict[str, UploadState]:
        if self._states is None:
            notes = self._ledger.read_notes().items()
            self._states = {
                folder: note.state if note is not None and note.remote == self._where else "waiting"
                for folder, note in notes
            }
        return self._states

    def _remove_note(self, folder: str) -> None:
        try:
            self._ledger.remove_note(folder)
        except HoldfastError as error:
            self._log_failure(error)
        else:
            self._read_states().pop(folder, None)

    def _log_failure(self, error: HoldfastError) -> None:
        """Log that an upload state could not be recorded, instead of raising the error."""
        self._emit("housekeeping_failed", f"notes on uploads: {error}")
