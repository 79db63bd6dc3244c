"""Evaluations of a run's checkpoints by any number of processes: each measures one at a time.

A process that measures a metric of a checkpoint holds a lease on it, and names the lease in the
checkpoint's notes. Notes are put if absent, so one of several processes is first; the others skip
the checkpoint until it has a value, or until the lease has ended (docs/design.md, rule 12).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec

from holdfast.errors import AccessDenied, NoCheckpoint, SealError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.ownership.annotations import annotate, put_notes, read_marks
from holdfast.ownership.leases import FoundLease, Readers, leased
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.store.base import Store


class Evaluations:
    """The checkpoints of a run that lack a value of a metric, as one process measures them."""

    def __init__(self, store: Store, metric: str, emit: Emitter) -> None:
        self._store = store
        self._metric = metric
        self._emit = emit
        self._readers = Readers(store)
        self._manifests: dict[str, Manifest] = {}
        self._reported: set[str] = set()

    def list_unmeasured(self) -> list[Entry]:
        """List the checkpoints without a value, oldest first: retention deletes the oldest next.

        Skips those that no rule and no name `best` counts: unhealthy, rejected, or left behind by a
        rollback. Warns once of each that cannot be read.

        Raises:
            SealError: no checkpoint can be decrypted with the keys.
        """
        catalog = Catalog(self._store)
        entries, unread = catalog.survey(known=self._manifests)
        for folder, error in unread:
            if isinstance(error, SealError) and not entries:
                raise error
            if folder not in self._reported:
                self._reported.add(folder)
                self._emit("warning", f"{folder} is not evaluated: {error}", folder=folder)
        self._manifests = {entry.folder: entry.manifest for entry in entries}
        lineage = {name.order for name in catalog.lineage()}
        return [
            entry
            for entry in reversed(entries)
            if entry.order in lineage
            and self._metric not in entry.metrics
            and not (entry.manifest.unhealthy or entry.marks.rejected or entry.marks.retired)
        ]

    def find_holder(self, folder: str, marks: Marks) -> FoundLease | None:
        """Return the lease of the process that measures a checkpoint; None if none does."""
        nonce = marks.notes.evaluating.get(self._metric)
        if nonce is None:
            return None
        key = layout.lease_key(folder, nonce)
        return next((one for one in self._readers.find_leases(folder) if one.key == key), None)

    @contextmanager
    def claim_checkpoint(self, entry: Entry) -> Iterator[bool]:
        """Try to claim a checkpoint while the block lasts; yield False if others have done so.

        While it is claimed, retention does not delete it. The claim ends with this process.

        Raises:
            AccessDenied: no lease can be put here, so that others could not see the claim.
        """
        nonce = os.urandom(16).hex()
        with ExitStack() as stack:
            try:
                lease = leased(self._store, entry.folder, emit=self._emit, nonce=nonce)
                refused = stack.enter_context(lease)
                if refused:
                    raise AccessDenied(
                        f"{self._store.url}: cannot be evaluated from here: {refused}"
                    )
                has_claimed = self._put_claim(entry, nonce[:16])
            except NoCheckpoint:  # its deletion has begun
                has_claimed = False
            yield has_claimed

    def _put_claim(self, entry: Entry, nonce: str) -> bool:
        for marks in read_marks(self._store, entry):
            notes = marks.notes
            if self._metric in notes.metrics or self.find_holder(entry.folder, marks) is not None:
                return False
            claims = {**notes.evaluating, self._metric: nonce}
            changed = msgspec.structs.replace(notes, evaluating=claims)
            if put_notes(self._store, entry, marks, changed):
                return True
        return False

    def record_metrics(self, entry: Entry, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a checkpoint, which end its claim; raises as `annotate`."""
        annotate(self._store, entry, metrics=metrics)
