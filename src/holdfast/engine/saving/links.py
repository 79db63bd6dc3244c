"""Files of the checkpoint before that a new one can share (docs/decisions/0014)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from holdfast.engine.loading.blockreading import FileBlocks, read_block
from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.staging.arena import Arena
from holdfast.errors import HoldfastError, NotFound
from holdfast.format import blocks
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import BLOCK_NBYTES, component_of, plain_file
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.store.base import LinksFiles, Store, uncached

MAX_SHARING = 8
"""An unchanged file is written in full every so many saves."""
MIN_NBYTES = 1 << 20
"""What is smaller is written sooner than looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """A committed file: where it is, and how many checkpoints before shared it."""

    folder: str
    name: str
    """As it lies there."""
    entry: FileEntry
    stored: StoredBlocks | None
    age: int
    is_verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A file that is shared: its name as it lies there, and how it is stored."""

    name: str
    entry: FileEntry
    stored: StoredBlocks | None


class Links:
    """Remembers the files of the newest commits, by name. Not thread-safe."""

    def __init__(self, store: Store, *, kept: int | None, failed: Callable[[str], None]) -> None:
        """`kept` is how many checkpoints stay at most; None: any number."""
        self._store = store
        self._sharing = MAX_SHARING if kept is None else min(MAX_SHARING, kept - 1)
        self._failed = failed
        self._origins: dict[str, _Origin] = {}
        self._linked: dict[str, _Origin] = {}
        self._holders: dict[str, list[str]] = {}
        """By component: a file of it in each checkpoint that holds it, oldest first."""

    def may_have(self, name: str, nbytes: int) -> bool:
        """Whether a file of this name and length could be shared, if the bytes are the same."""
        origin = self._origins.get(name)
        return (
            nbytes >= MIN_NBYTES
            and isinstance(self._store, LinksFiles)
            and origin is not None
            and origin.entry.nbytes == nbytes
            and origin.age + 1 < self._sharing
        )

    def link(self, name: str, folder: str, entry: FileEntry, digests: bytes) -> Linked | None:
        """Give the file before a second name in `folder`, if its plain bytes are those of `entry`
        and it is sound. It stays stored as it was, whatever would be chosen for it now.

        Otherwise the file has to be written, and nothing is left of it.

        Raises:
            StoreError: what was begun did not become durable.
        """
        origin = self._origins.get(name)
        if origin is None or msgspec.structs.replace(origin.entry, stored=None) != entry:
            return None
        if not self._is_standing(origin):
            return None
        if origin.age + 1 >= self._num_holders(component_of(name)):
            return None  # those that are there must not all share one file
        if not origin.is_verified:
            if not self._is_sound(origin, digests):
                del self._origins[name]
                return None
            origin = self._origins[name] = replace(origin, is_verified=True)
        assert isinstance(self._store, LinksFiles)
        if not self._store.link(f"{origin.folder}/{origin.name}", f"{folder}/{origin.name}"):
            return None
        self._linked[name] = replace(origin, folder=folder, age=origin.age + 1)
        return Linked(name=origin.name, entry=origin.entry, stored=origin.stored)

    def look_ahead(self, name: str, digests: bytes) -> None:
        """Read a file back that was just committed, because the next save will share it."""
        origin = self._origins.get(name)
        if origin is None or origin.is_verified or not self.may_have(name, origin.entry.nbytes):
            return
        if self._is_sound(origin, digests):
            self._origins[name] = replace(origin, is_verified=True)
        else:
            del self._origins[name]

    def begin(self) -> None:
        """A save begins."""
        self._linked.clear()

    def committed(
        self, folder: str, manifest: Manifest, stored: Mapping[str, StoredBlocks]
    ) -> None:
        """A save was committed: its files are what the next one may share."""
        for component, part in manifest.components.items():
            largest = max(part.files, key=lambda name: manifest.files[name].nbytes)
            self._holders.setdefault(component, []).append(f"{folder}/{largest}")
        for name, entry in manifest.files.items():
            written = _Origin(
                folder=folder,
                name=name,
                entry=entry,
                stored=stored.get(name),
                age=0,
                is_verified=False,
            )
            plain = plain_file(name)
            self._origins[plain] = self._linked.get(plain, written)
        self._linked.clear()

    def _num_holders(self, component: str) -> int:
        """How many checkpoints of this process hold the component still; eight are enough."""
        found: list[str] = []
        for key in self._holders[component]:
            with suppress(NotFound):
                self._store.head(key)
                found.append(key)
        self._holders[component] = found[-MAX_SHARING:]
        return len(found)

    def _is_standing(self, origin: _Origin) -> bool:
        """Whether the checkpoint is still there and nobody found fault with it."""
        catalog = Catalog(self._store)
        try:
            marks, register = catalog.marks(origin.folder), catalog.read(origin.folder)
        except HoldfastError:
            return False
        return isinstance(register, Manifest) and not (marks.rejected or marks.retired)

    def _is_sound(self, origin: _Origin, digests: bytes) -> bool:
        """Read the file that would be shared, against the digests of the staged bytes."""
        where = f"{self._store.url}/{origin.folder}/{origin.name}"
        try:
            fault = self._fault(origin, digests)
        except HoldfastError as error:
            self._failed(f"{where} cannot be read, and is written anew: {error}")
            return False
        if fault:
            self._failed(f"{where}: {fault}; the file is written anew. That checkpoint is damaged")
        return not fault

    def _fault(self, origin: _Origin, digests: bytes) -> str:
        """What is wrong with the first block that is not as it was staged."""
        file = FileBlocks(
            key=f"{origin.folder}/{origin.name}", block_nbytes=BLOCK_NBYTES, digests=digests
        )
        if origin.stored is not None:
            file = file.made_by(origin.entry, origin.stored)
        store, nbytes = uncached(self._store), origin.entry.nbytes
        buffer = Arena(min(nbytes, BLOCK_NBYTES)).memory  # on a page, as direct reads want it
        for number, (start, stop) in enumerate(blocks.split(nbytes)):
            fault = read_block(store, file, number, buffer[: stop - start])
            if fault:
                return f"block {number} {fault}"
        return ""
