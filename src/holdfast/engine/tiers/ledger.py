"""Notes on uploads in the local root, which outlive the process.

The truth is in the two roots: what is committed here and not there. The notes say what somebody
wants to be sent, so that nobody deletes it before; what was there once, so that it is not sent
again after somebody has deleted it there; and how all that goes, for people.
"""

from __future__ import annotations

from holdfast.engine.roots.catalog import Entry
from holdfast.engine.roots.documents import read_if_there
from holdfast.errors import FormatError
from holdfast.format import layout
from holdfast.format.records import TiersRecord, UploadRecord
from holdfast.store.base import Store

MAX_ERROR_CHARS = 2000


class Ledger:
    """The notes of one local root. Every method does a few small store operations."""

    def __init__(self, local: Store) -> None:
        self._local = local

    def waiting(self) -> dict[str, UploadRecord | None]:
        """The `notes` on what is not there yet."""
        notes = self.notes().items()
        return {name: note for name, note in notes if note is None or note.state != "uploaded"}

    def notes(self) -> dict[str, UploadRecord | None]:
        """Folder → its note, oldest first; None where that cannot be read, which counts as one."""
        names = map(layout.parse_upload, self._local.children(layout.UPLOADS))
        folders = [str(name) for name in sorted(name for name in names if name is not None)]
        found = ((folder, self._read(folder)) for folder in folders)
        return {folder: note for folder, (is_there, note) in found if is_there}

    def tiers(self) -> TiersRecord | None:
        """Where this root is mirrored to; None when it never was, or that cannot be read."""
        try:
            return read_if_there(self._local, layout.TIERS, TiersRecord.decode)
        except FormatError:
            return None

    def note(self, folder: str, record: UploadRecord) -> None:
        """Put or replace the note on a checkpoint."""
        self._put(layout.upload_key(folder), record.encode())

    def forget(self, folder: str) -> None:
        """Remove the note: it is not wanted there, or the local copy is gone."""
        self._local.delete(layout.upload_key(folder))

    def note_tiers(self, record: TiersRecord) -> None:
        """Put or replace what is said of both tiers."""
        self._put(layout.TIERS, record.encode())

    def _put(self, key: str, data: bytes) -> None:
        self._local.make_folder(layout.UPLOADS)
        self._local.put(key, data)

    def _read(self, folder: str) -> tuple[bool, UploadRecord | None]:
        try:
            record = read_if_there(self._local, layout.upload_key(folder), UploadRecord.decode)
        except FormatError:
            return True, None
        return record is not None, record


class NotedUploads:
    """Checkpoints that wait for their upload, as noted in the local root; for whoever has no part
    in the uploads."""

    def __init__(self, local: Store) -> None:
        self._notes = Ledger(local).waiting()

    def holds(self, entry: Entry) -> str:
        """Why it must not be deleted yet; empty where it may be."""
        if entry.folder not in self._notes:
            return ""
        note = self._notes[entry.folder]
        return f"it waits for its upload to {note.remote}" if note else "it waits for its upload"
