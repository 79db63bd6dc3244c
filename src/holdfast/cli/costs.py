"""Costs of each save of a root: stall, writing, upload, and bytes that are new or linked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from holdfast.cli.answers import history
from holdfast.encryption.store import bare
from holdfast.errors import NotFound
from holdfast.format.records import UploadRecord
from holdfast.policy.costs import SaveCost
from holdfast.policy.rules import recorded_time
from holdfast.root.catalog import Entry
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store


def costs_of(
    store: Store, entries: Sequence[Entry], *, linked: bool
) -> dict[str, history.RecordedSaveCost]:
    """Return what each checkpoint took, by folder; with `linked` also which bytes are new.

    Nothing is read but small records; `linked` looks at the length of each file.
    """
    notes = Ledger(store).read_notes()
    shared = _linked_nbytes(bare(store), entries) if linked else {}
    return {
        entry.folder: _cost(entry, notes.get(entry.folder), shared.get(entry.folder))
        for entry in entries
    }


def _cost(entry: Entry, note: UploadRecord | None, linked: int | None) -> history.RecordedSaveCost:
    manifest = entry.manifest
    cost = SaveCost.read(manifest.timings, is_first=False)
    write_s = None if cost is None else cost.write_s
    durable_s = None if cost is None or write_s is None else cost.stall_s + write_s
    return history.RecordedSaveCost(
        stall_s=None if cost is None else cost.stall_s,
        write_s=write_s,
        durable_s=durable_s,
        upload_s=_upload_s(manifest.created, note),
        upload=None if note is None else note.state,
        nbytes=manifest.nbytes,
        plain_nbytes=manifest.plain_nbytes,
        linked_nbytes=linked,
        new_nbytes=None if linked is None else max(manifest.nbytes - linked, 0),
    )


def _upload_s(created: str, note: UploadRecord | None) -> float | None:
    """Return how long after the commit a checkpoint had been uploaded, to a second."""
    if note is None or note.state != "uploaded":
        return None
    began, ended = recorded_time(created), recorded_time(note.changed)
    return None if began is None or ended is None else max((ended - began).total_seconds(), 0.0)


def _linked_nbytes(store: Store, entries: Sequence[Entry]) -> Mapping[str, int]:
    """Sum the bytes of files that a checkpoint has in common with an older one."""
    found = dict.fromkeys((entry.folder for entry in entries), 0)
    if not store.has_links:
        return found
    seen: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.order):
        for listed in store.list(f"{entry.folder}/"):
            with suppress(NotFound):  # deleted meanwhile
                info = store.head(listed.key)
                if info.identity in seen:
                    found[entry.folder] += info.nbytes
                elif info.identity:
                    seen.add(info.identity)
    return found
