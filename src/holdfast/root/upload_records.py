"""Records of pending and finished uploads, kept in the local root for later processes.

Which checkpoints to upload follows from the two roots: those committed only locally. The notes
record which wait, so that nobody deletes them; which were uploaded, so that they are not uploaded
again after a remote deletion; and the progress, for people.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.errors import FormatError, StoreError, UsageError
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.format.records import TiersRecord, UploadRecord
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.documents import is_of_others, read_if_there
from holdfast.store.base import Store

MAX_ERROR_CHARS = 2000


class Ledger:
    """Reads and writes the notes on uploads in one local root, one small object for each."""

    def __init__(self, local: Store) -> None:
        self._local = local

    def waiting(self) -> dict[str, UploadRecord | None]:
        """Read the notes of checkpoints that are not yet uploaded, as `read_notes` does."""
        notes = self.read_notes().items()
        return {name: note for name, note in notes if note is None or note.state != "uploaded"}

    def read_notes(self) -> dict[str, UploadRecord | None]:
        """Read all notes: folder → its note, oldest first; None for a damaged note."""
        names = map(layout.parse_upload, self._local.children(layout.UPLOADS))
        folders = [str(name) for name in sorted(name for name in names if name is not None)]
        found = ((folder, self._read_upload_record(folder)) for folder in folders)
        return {folder: note for folder, (exists, note) in found if exists}

    def tiers(self) -> TiersRecord | None:
        """Read the record of this root's remote tier; None if there is none or it is damaged."""
        try:
            return read_if_there(self._local, layout.TIERS, TiersRecord.decode)
        except FormatError:
            return None

    def put_note(self, folder: str, record: UploadRecord) -> None:
        """Put or replace the note on the upload of a checkpoint."""
        self._put_record(layout.upload_key(folder), record.encode())

    def remove_note(self, folder: str) -> None:
        """Remove the note on a checkpoint that will not be uploaded, or has no local copy."""
        key = layout.upload_key(folder)
        if not is_of_others(self._local, key):
            self._local.delete(key)

    def note_tiers(self, record: TiersRecord) -> None:
        """Put or replace the record of the remote tier of this root."""
        self._put_record(layout.TIERS, record.encode())

    def _put_record(self, key: str, data: bytes) -> None:
        self._local.make_folder(layout.UPLOADS)
        if is_of_others(self._local, key):
            raise StoreError(
                f"{self._local.url}/{key}: not written by Holdfast, so it is left alone, and "
                "nothing is recorded here. Move it out of the root"
            )
        self._local.put(key, data)

    def _read_upload_record(self, folder: str) -> tuple[bool, UploadRecord | None]:
        try:
            record = read_if_there(self._local, layout.upload_key(folder), UploadRecord.decode)
        except FormatError:
            return True, None
        return record is not None, record


def host_of(store: Store) -> str:
    """Return the host that a local root is a disk of; empty if the root has all files."""
    tiers = Ledger(store).tiers()
    return "" if tiers is None else tiers.host


def find_elsewhere(
    store: Store, manifest: Manifest, here: Collection[str]
) -> Mapping[str, tuple[str, ...]]:
    """Map other hosts to their files of a checkpoint that this host's root lacks.

    `here` are the names in its folder. Empty for a root that has all files: there they are missing.
    """
    own = host_of(store) if manifest.hosts else ""
    if not own:
        return {}
    lacking = {
        host: tuple(name for name in names if name not in here)
        for host, names in manifest.hosts.items()
        if host != own
    }
    return {host: names for host, names in lacking.items() if names}


def expect_all_files_here(store: Store) -> None:
    """Raise `UsageError` if a local root has only one host's files of the run's checkpoints."""
    tiers = Ledger(store).tiers()
    if tiers is None or not tiers.host:
        return
    if any({*entry.manifest.hosts} - {tiers.host} for entry in Catalog(store).checkpoints()):
        raise UsageError(
            f"{store.url}: nothing was deleted. This is the disk of {tiers.host}, and other hosts "
            "have the rest of its checkpoints. Pass keep_local= to the run, which deletes on all "
            f"hosts, or delete in {tiers.remote}"
        )


def expect_leading_disk(store: Store) -> None:
    """Raise `UsageError` if the run reads no marks in this root: another host led its last save."""
    tiers = Ledger(store).tiers()
    if tiers is None or not tiers.host:
        return
    newest = next(iter(Catalog(store).checkpoints()), None)
    leader = "" if newest is None else next(iter(newest.manifest.hosts), "")
    if leader and leader != tiers.host:
        raise UsageError(
            f"{store.url}: this is the disk of {tiers.host}. The run reads pins, tags and metrics "
            f"from the disk of {leader} and from {tiers.remote}; use these"
        )


class NotedUploads:
    """Guard against deletion of checkpoints not yet uploaded, for processes that do not upload."""

    def __init__(self, local: Store) -> None:
        self._notes = Ledger(local).waiting()

    def holds(self, entry: Entry) -> str:
        """Explain why a checkpoint must not be deleted yet; empty if it may be."""
        if entry.folder not in self._notes:
            return ""
        note = self._notes[entry.folder]
        return f"it waits for its upload to {note.remote}" if note else "it waits for its upload"
