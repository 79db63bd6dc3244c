"""Sharing of unchanged files with an earlier checkpoint by hard links (docs/decisions/0014).

The newest two checkpoints never share a file. A file is read back before it is shared
(tests/test_links.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import msgspec

from holdfast.errors import FormatError, HoldfastError, SealError, StoreError
from holdfast.events import Emitter
from holdfast.format import blocks, layout
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, FileEntry
from holdfast.format.strictjson import digest_of
from holdfast.loading.block_reader import FileBlocks, read_block
from holdfast.root.catalog import Catalog
from holdfast.root.commit import SaveAttempt
from holdfast.root.documents import read_if_there
from holdfast.saving.participants import OwnFile
from holdfast.store.base import Store, is_one_file
from holdfast.threads.buffers import allocate_pages

_MOST_REMEMBERED = 16
_MIN_SHARED_NBYTES = 1 << 20
"""Smaller files are not shared: writing them takes less time than the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """A committed file that a later save may link instead of writing it, and its folder."""

    folder: str
    name: str
    entry: FileEntry
    stored: StoredBlocks | None
    is_verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    """A checkpoint that this process committed; `files` by plain name."""

    folder: str
    digest: str
    """Digest of its manifest."""
    files: dict[str, _Origin]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Components and health of a checkpoint; files are shared only where both are equal."""

    components: frozenset[str]
    is_healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A file linked from an earlier checkpoint: stored name, manifest entry and stored blocks."""

    name: str
    entry: FileEntry
    stored: StoredBlocks | None


class LinkSource(msgspec.Struct, frozen=True, array_like=True):
    """Checkpoints with which a save may share files, or must not."""

    folder: str = ""
    """Folder of the checkpoint whose files may be shared; empty: none."""
    excluded: tuple[str, ...] = ()
    """Folders of the checkpoints with which no file may be shared."""


class Links:
    """Shares unchanged files with this process's earlier commits, by hard links. Not thread-safe.

    A save shares files only with the second newest valid commit of its kind. It shares none that
    the newest commit of any kind has, nor one of the checkpoint that the run resumed from: so the
    newest two checkpoints never share a file.
    """

    def __init__(self, store: Store, emit: Emitter) -> None:
        self._store = store
        self._emit = emit
        self._commits: dict[_Kind, list[_Commit]] = {}
        """Commits of each kind, oldest first."""
        self._source: dict[str, _Origin] = {}
        """Files that the current save may share, by plain name."""
        self._excluded: tuple[str, ...] = ()
        """Folders with which the current save must not share a file."""
        self._newest: _Kind | None = None
        self._linked: dict[str, _Origin] = {}

    def find_source(
        self, components: Iterable[str], *, is_healthy: bool, resumed_from: str | None
    ) -> LinkSource:
        """Find what a save of these components may share, in a run that resumed from a folder."""
        if not self._store.has_links:
            return LinkSource()
        try:
            valid = {kind: self._newest_valid(kind) for kind in self._commits}
        except StoreError:
            return LinkSource()  # unknown which commits are the newest: share nothing
        excluded = [] if resumed_from is None else [resumed_from]
        excluded += [commit.folder for found in valid.values() for commit in found[-1:]]
        found = valid.get(_Kind(frozenset(components), is_healthy), [])
        return LinkSource(found[-2].folder if len(found) > 1 else "", tuple(excluded))

    def prepare_links(self, source: LinkSource) -> None:
        """Begin a save, which may share what this process has recorded of the source."""
        self._linked.clear()
        self._source, self._excluded = {}, source.excluded
        for commit in chain.from_iterable(self._commits.values()):
            if self._store.has_links and commit.folder == source.folder:
                self._source = commit.files

    def may_have(self, name: str, nbytes: int) -> bool:
        """Whether the earlier checkpoint has a file of this name and length, worth sharing."""
        origin = self._source.get(name)
        return origin is not None and origin.entry.nbytes == nbytes and self._is_large(origin)

    def link_earlier_file(
        self, name: str, folder: str, entry: FileEntry, digests: bytes
    ) -> Linked | None:
        """Link the earlier file, after verifying it, if its plain bytes are those of `entry`."""
        origin = self._source.get(name)
        if origin is None or msgspec.structs.replace(origin.entry, stored=None) != entry:
            return None
        if any(map(partial(self._is_one_file, origin), self._excluded)):
            return None
        origin = self._verified(self._source, name, digests)
        if origin is None:
            return None
        if not self._store.link(f"{origin.folder}/{origin.name}", f"{folder}/{origin.name}"):
            return None
        self._linked[name] = replace(origin, folder=folder)
        return Linked(name=origin.name, entry=origin.entry, stored=origin.stored)

    def look_ahead(self, digests: Mapping[str, bytes]) -> None:
        """Verify files of the newest commit that a later save may share; plain name → digest."""
        if self._newest is None or not digests or not self._store.has_links:
            return
        try:
            valid = self._newest_valid(self._newest)
        except StoreError:
            return
        if len(valid) < 2:
            return
        files = valid[-1].files
        for name, known in digests.items():
            if name in files and self._is_large(files[name]):
                self._verified(files, name, known)

    def record_linkable_files(
        self,
        attempt: SaveAttempt,
        own: Iterable[OwnFile],
        kinds: Iterable[str],
        *,
        is_healthy: bool,
    ) -> None:
        """Record a committed save and the files of this rank, which a later save may share."""
        files: dict[str, _Origin] = {}
        for file in own:
            written = _Origin(
                folder=attempt.folder,
                name=file.name,
                entry=file.entry,
                stored=file.stored,
                is_verified=False,
            )
            files[file.plain] = self._linked.get(file.plain, written)
        self._linked.clear()
        self._newest = _Kind(frozenset(kinds), is_healthy)
        commits = self._commits.setdefault(self._newest, [])
        commits.append(_Commit(folder=attempt.folder, digest=attempt.digest, files=files))
        del commits[:-_MOST_REMEMBERED]

    def _is_large(self, origin: _Origin) -> bool:
        return origin.entry.nbytes >= _MIN_SHARED_NBYTES

    def _newest_valid(self, kind: _Kind) -> list[_Commit]:
        """Return the newest two complete commits of a kind, older first; forget newer others."""
        commits = self._commits.get(kind, [])
        found: list[_Commit] = []
        for commit in reversed(commits[:]):
            if len(found) == 2:
                break
            if self._is_valid(commit):
                found.append(commit)
            else:
                commits.remove(commit)
        return found[::-1]

    def _is_valid(self, commit: _Commit) -> bool:
        key = f"{commit.folder}/{layout.MANIFEST}"
        try:
            marks = Catalog(self._store).marks(commit.folder)
            found = read_if_there(self._store, key, digest_of, max_nbytes=MAX_MANIFEST_NBYTES)
        except (FormatError, SealError):
            return False
        return found == commit.digest and not (marks.rejected or marks.retired or marks.thinned)

    def _is_one_file(self, origin: _Origin, folder: str) -> bool:
        """Whether a folder has, or may have, `origin` as a hard link to the same file on disk."""
        keys = (f"{origin.folder}/{origin.name}", f"{folder}/{origin.name}")
        try:
            return is_one_file(self._store, *keys)
        except StoreError:
            return True

    def _verified(self, files: dict[str, _Origin], name: str, digests: bytes) -> _Origin | None:
        """Return the named file if it is intact, read at most once; else drop it from `files`."""
        origin = files[name]
        if not origin.is_verified:
            if not self._is_intact(origin, digests):
                del files[name]
                return None
            origin = files[name] = replace(origin, is_verified=True)
        return origin

    def _is_intact(self, origin: _Origin, digests: bytes) -> bool:
        """Whether the file on disk matches the digests of the staged bytes; if not, warn."""
        where = f"{self._store.url}/{origin.folder}/{origin.name}"
        try:
            fault = self._find_fault(origin, digests)
        except HoldfastError as error:
            self._emit("warning", f"{where} cannot be read, so it is rewritten: {error}")
            return False
        if fault:
            self._emit(
                "warning", f"{where}: {fault}; the file is rewritten. That checkpoint is damaged"
            )
        return not fault

    def _find_fault(self, origin: _Origin, digests: bytes) -> str:
        """Describe the first block that differs from the staged bytes; empty if none does."""
        file = FileBlocks(
            key=f"{origin.folder}/{origin.name}", block_nbytes=BLOCK_NBYTES, digests=digests
        )
        if origin.stored is not None:
            file = file.made_by(origin.entry, origin.stored)
        store, nbytes = self._store.uncached(), origin.entry.nbytes
        buffer = memoryview(
            allocate_pages(min(nbytes, BLOCK_NBYTES))
        )  # page-aligned for direct reads
        for number, (start, stop) in enumerate(blocks.list_blocks(nbytes)):
            fault = read_block(store, file, number, buffer[: stop - start])
            if fault:
                return f"block {number} {fault}"
        return ""
