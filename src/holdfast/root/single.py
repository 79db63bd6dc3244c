"""Checkpoint of a root that cannot be listed, as a read-only root of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count

from typing_extensions import override

from holdfast.errors import AccessDenied, FormatError, MissingKey, NotFound, UnsupportedStore
from holdfast.format import layout
from holdfast.format.envelope import decode_visible
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Aborted, Deleted, decode_register
from holdfast.root.documents import is_there
from holdfast.store.base import ObjectInfo, Seen, Store, WrappedStore, check_folder, ignore

_NO_FILE = "no-such-file"
_MAX_GAP = 3
"""Boxes of keys in a row that may be missing: a new box replaces an old one, which is deleted."""


def alone(store: Store, folder: str) -> Store:
    """Return a store whose root can be listed: `store` itself, or one of this checkpoint alone."""
    return SingleCheckpoint(store, folder) if store.reads_only else store


class SingleCheckpoint(WrappedStore):
    """Root of one checkpoint, whose files are those that its manifest lists.

    Sidecars and claims are looked for by their names. Marks of retention have the epoch of an
    unknown later writer in their names: they are not found, and what was dropped is missing.
    """

    reads_origin = True

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self._folder = folder

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        check_folder(folder)
        if not folder:
            return (f"{self._folder}/", f"{layout.WRITERS}/")
        if folder == layout.WRITERS:
            return self._claims
        return self._object_names if folder == self._folder else ()

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for folder in (self._folder, layout.WRITERS):
            for name in self.children(folder):
                key = f"{folder}/{name}"
                if key.startswith(prefix):
                    with suppress(NotFound):
                        yield self.head(key)

    @override
    def head(self, key: str) -> ObjectInfo:
        with self._optional(key):
            return self.inner.head(key)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with self._optional(key):
            return self.inner.get(key, start, nbytes)

    @override
    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        with self._optional(key):
            return self.inner.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        self.inner.read_into(key, start, buffer, seen=seen, afresh=afresh)

    @contextmanager
    def _optional(self, key: str) -> Iterator[None]:
        """Raise `NotFound` for `AccessDenied` of a key that need not exist.

        A bucket that anybody may read and nobody may list answers so for what is missing.
        """
        try:
            yield
        except AccessDenied as error:
            folder, _, name = key.partition("/")
            if folder == self._folder and (name == layout.MANIFEST or layout.is_data_name(name)):
                raise
            raise NotFound(f"{self.url}/{key}: refused, as if it were missing: {error}") from error

    @cached_property
    def _claims(self) -> tuple[str, ...]:
        """Names of the claims up to the one under which the checkpoint was saved."""
        epoch = layout.parse_attempt(self._folder)
        keys = [layout.writer_key(number + 1) for number in range(epoch.epoch if epoch else 0)]
        return tuple(key.partition("/")[2] for key in keys if self._is_there(key))

    @cached_property
    def _object_names(self) -> tuple[str, ...]:
        files = self._list_files()
        found = [*files, *self._find_existing([layout.REJECTED])]
        found += self._find_existing(map(layout.notes_name, count(1)))
        if any(map(layout.is_stored_name, files)):
            boxes = map(layout.keys_name, range(1, layout.MAX_BOX_NUMBER))
            found += self._find_existing(boxes, gap=_MAX_GAP)
        return tuple(sorted(found))

    def _find_existing(self, names: Iterable[str], *, gap: int = 1) -> Iterator[str]:
        """Yield those that exist, up to `gap` names in a row that do not."""
        num_missing = 0
        for name in names:
            if self._is_there(f"{self._folder}/{name}"):
                yield name
                num_missing = 0
            elif (num_missing := num_missing + 1) == gap:
                return

    def _is_there(self, key: str) -> bool:
        return is_there(self, key) and self._tells_missing

    @cached_property
    def _tells_missing(self) -> bool:
        """True: the server answers otherwise for files that do not exist."""
        key = f"{self._folder}/{_NO_FILE}"
        if is_there(self, key):
            raise UnsupportedStore(
                f"{self.url}/{key}: the server has a page for a file that does not exist. Let it "
                "answer 404 for the folder (nginx: try_files $uri =404), or download the folder"
            )
        return True

    def _list_files(self) -> tuple[str, ...]:
        """Names of the manifest and its files; of the manifest alone if it is damaged or ended."""
        key = f"{self._folder}/{layout.MANIFEST}"
        try:
            data = self.inner.get_whole(key, max_nbytes=MAX_MANIFEST_NBYTES)
            register = decode_register(data, what=key)
            files = {} if isinstance(register, Aborted | Deleted) else register.files
        except NotFound:
            return ()
        except MissingKey:
            files = decode_visible(data, what=key).files
        except FormatError:
            files = {}
        return (layout.MANIFEST, *files)
