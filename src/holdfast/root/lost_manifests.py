"""Evidence that distinguishes a lost manifest from a save that never committed.

A missing register may mean either (docs/design.md, rule 7). Reads only.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from holdfast.errors import FormatError, NotFound, SealError
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, Reference, decode_register
from holdfast.format.records import WriterRecord
from holdfast.root.documents import is_there, read_document, read_if_there
from holdfast.store.base import Store


class Evidence:
    """Evidence in the records of one root about attempts that have no manifest.

    Each record is read once, when it is first needed, so use an instance for one query only.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._latest: str | None = None
        self._points: dict[str, int] = {}
        """Folder → an epoch whose writer resumed from it, of the claims that were read."""
        self._newest_tiered = 0
        """Newest epoch whose claim, of those read, was put in two roots or by a copy."""
        self._epochs: list[int] | None = None
        """Epochs whose claims were not read yet, oldest first; None: not listed yet."""
        self._closed_cleanly: dict[int, bool] = {}
        """Epoch → whether its writer recorded a clean close, in a run with one root."""
        self._uploads: Collection[str] | None = None
        """Names of the notes on uploads; None: not listed yet."""

    def of_commit(self, name: AttemptName) -> str:
        """Describe the evidence that an attempt without a manifest was committed; empty if none.

        `latest`, a note on its upload, or a pin or mark beside its files was put after the commit.
        Claims, manifests of later writers, and a clean close prove it only if no other file is
        missing, and only in a run with one root: both of two tiers have the claims, and one may
        have the files of a save that was never committed there. So may a root to which `holdfast
        cp` has copied checkpoints with their claims.
        """
        folder = str(name)
        names = self._store.children(folder)
        if not any(map(layout.is_data_name, names)):
            return ""  # deleted, or only begun
        sidecar = next(filter(layout.is_sidecar, names), None)
        if sidecar is not None:
            return f"{sidecar} was put beside it"
        if self._latest_folder() == folder:
            return f"{layout.LATEST!r} names it"
        if self._has_upload_note(folder):
            return "it was to be sent to the other tier"
        why = self._continuation(name)
        return why if why and self._has_all(folder, names) else ""

    def _continuation(self, name: AttemptName) -> str:
        """Describe the claim or clean close that shows an attempt was committed; empty if none."""
        epoch = self._resumed_by(name)
        if self._newest_tiered > name.epoch:
            return ""
        if epoch:
            return f"writer {epoch} resumed from it"
        if name.epoch not in self._closed_cleanly:
            is_closed = is_there(self._store, layout.closed_key(name.epoch))
            self._closed_cleanly[name.epoch] = is_closed and not self._is_tiered(name.epoch)
        is_ended = self._closed_cleanly[name.epoch]
        return "all of its files are there, and its writer has ended cleanly" if is_ended else ""

    def _has_upload_note(self, folder: str) -> bool:
        if self._uploads is None:
            self._uploads = frozenset(self._store.children(layout.UPLOADS))
        return layout.upload_key(folder).removeprefix(f"{layout.UPLOADS}/") in self._uploads

    def _is_tiered(self, epoch: int) -> bool:
        with suppress(FormatError):
            claim = read_if_there(self._store, layout.writer_key(epoch), WriterRecord.decode)
            return claim is not None and claim.tiered
        return False

    def _latest_folder(self) -> str:
        if self._latest is None:
            self._latest = latest_of(self._store)
        return self._latest

    def _resumed_by(self, name: AttemptName) -> int:
        """Return an epoch whose writer resumed from an attempt; 0 if there is none."""
        if self._epochs is None:
            claims = map(layout.parse_writer, self._store.children(layout.WRITERS))
            self._epochs = sorted({*filter(None, claims), *(n.epoch for n in self._attempts())})
        while self._epochs and self._epochs[-1] > name.epoch:
            epoch = self._epochs.pop()
            point = self._resumed_from(epoch)
            if point is not None:
                self._points.setdefault(point.folder, epoch)
        return self._points.get(str(name), 0)

    def _resumed_from(self, epoch: int) -> Reference | None:
        """Return the checkpoint that an epoch resumed from, by its claim or a manifest of it."""
        with suppress(FormatError):
            claim = read_if_there(self._store, layout.writer_key(epoch), WriterRecord.decode)
            if claim is not None and claim.tiered:
                self._newest_tiered = max(self._newest_tiered, epoch)
                return None
            if claim is not None:
                return claim.resumed_from
        for name in self._attempts():
            with suppress(FormatError, SealError, NotFound):
                if name.epoch == epoch:
                    key = f"{name}/{layout.MANIFEST}"
                    data = read_document(self._store, key, max_nbytes=MAX_MANIFEST_NBYTES)
                    register = decode_register(data, what=key)
                    if isinstance(register, Manifest):
                        return register.parent
        return None

    def _attempts(self) -> list[AttemptName]:
        listed = (layout.parse_attempt(name.rstrip("/")) for name in self._store.children())
        return [name for name in listed if name is not None]

    def _has_all(self, folder: str, names: Collection[str]) -> bool:
        """Whether an attempt has all files but the manifest; with a file of keys, True."""
        if any(layout.parse_keys(name) is not None for name in names):
            return True  # the keys are put right before the manifest
        from holdfast.format.index import files_of_index  # takes numpy

        if layout.INDEX not in names:
            return False
        key = f"{folder}/{layout.INDEX}"
        try:
            data = read_document(self._store, key, max_nbytes=layout.MAX_INDEX_NBYTES)
            return {*files_of_index(data, what=key)} <= {*names}
        except (FormatError, NotFound):
            return False


def latest_of(store: Store) -> str:
    """Return the name of the folder to which `latest` points; empty if there is no pointer."""
    try:
        return store.pointed(layout.LATEST) or ""
    except FormatError:
        return ""
