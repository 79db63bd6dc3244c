"""Reads a checkpoint of this library, from any store: its trees, and its tensors by ranges.

Every block is checked against its digest before a byte of it is given out. A few checked blocks
are kept, so that threads that read one range after the other read each block once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from holdfast.errors import CorruptData, DeadlineExceeded, Tampered
from holdfast.format import layout
from holdfast.format.blocks import DIGEST_NBYTES
from holdfast.format.index import TensorTable
from holdfast.format.manifest import Manifest
from holdfast.format.objects import decode_frozen, decode_tree
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.boxes import SharedBox as BoxPart
from holdfast.interop.boxes import overlaps
from holdfast.interop.files import copy_bytes, first_bytes
from holdfast.interop.source import BlockDigests, LeftOut, Source, SourceComponent
from holdfast.interop.sources.web import names_checkpoint
from holdfast.keys import Encryption
from holdfast.loading.block_reader import FileBlocks, begin_block, check_size, read_index, read_tree
from holdfast.ownership.access import locate_with_lease
from holdfast.root.address import split_folder, split_source
from holdfast.root.catalog import is_root
from holdfast.root.remaining import parts_of
from holdfast.store import is_web, open_store
from holdfast.store.base import Store
from holdfast.threads.buffers import Buffers

_MARK = re.compile(rb'\s*\{\s*"holdfast"')
"""Beginning of each manifest of this library."""


def recognises(text: str) -> bool:
    """Whether a text names a checkpoint: `ROOT@which`, a root, a checkpoint's folder, or a URL."""
    if is_web(text):
        return names_checkpoint(text)
    if "://" in text:
        return True
    if os.path.isfile(text):
        return False
    root, which = split_source(text)
    if which is not None:
        return True
    parent, folder = split_folder(root)
    if folder:
        return layout.parse_attempt(folder) is not None or _is_ours(os.path.join(parent, folder))
    return os.path.isdir(root) and is_root(open_store(root))


def _is_ours(folder: str) -> bool:
    return _MARK.match(first_bytes(Path(folder, layout.MANIFEST), 64)) is not None


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of the bytes of a tensor that is stored in one piece."""

    file: str
    start: int


class CheckpointSource(Source):
    """Checkpoint, kept from deletion; a component of each rank is the list of their trees."""

    format = "holdfast"

    def __init__(
        self,
        source: str | os.PathLike[str] | Store,
        *,
        which: int | str | None = None,
        encrypt: Encryption | None = None,
    ) -> None:
        """Open a checkpoint; the arguments are those of `load_weights`."""
        with ExitStack() as stack:
            store, kept = stack.enter_context(
                locate_with_lease(source, which=which, encrypt=encrypt)
            )
            stack.enter_context(store.keeping_open())
            entry = kept.entry
            self.folder = entry.folder
            self.url = f"{store.url}/{entry.folder}"
            self.step = entry.step
            self.notes = kept.notes
            """Why it may be deleted while it is read, if so."""
            left = parts_of(store, entry.folder, entry.manifest, entry.marks)
            self.left_out = [
                LeftOut(name, "retention has dropped it") for name in (*left.begun, *left.gone)
            ]
            self._index = read_index(store, entry.folder, entry.manifest)
            self._places: dict[str, dict[str, _Place]] = {}
            self.parts = {
                name: self._read_component(store, entry.manifest, name) for name in left.whole
            }
            self._blocks = self._checked_blocks(store, entry.manifest)
            self._stack = stack.pop_all()

    def _read_component(self, store: Store, manifest: Manifest, name: str) -> SourceComponent:
        data = read_tree(store, self.folder, name, manifest, self._index)
        table = self._index.components[name]
        specs, self._places[name] = _ordered(table)
        what = f"{self.url}, the tree of {name!r}"
        entry = manifest.components[name]
        part = SourceComponent(
            kind=entry.kind,
            tree=decode_tree(data, what=what),
            specs=specs,
            frozen={} if entry.frozen is None else decode_frozen(data, what=what),
        )
        missing = sorted({ref.key for ref in part.leaves.values()} - specs.keys())
        if missing:
            raise CorruptData(
                f"{self.url}: the tree of {name!r} names {len(missing)} tensors that the index "
                f"lacks, such as {missing[0]!r}"
            )
        return part

    def _checked_blocks(self, store: Store, manifest: Manifest) -> CheckedBlocks:
        files: dict[str, FileBlocks] = {}
        for name in self.parts:
            for file in self._index.components[name].shards.files:
                entry = manifest.files[file]
                check_size(store, f"{self.folder}/{file}", entry)
                files[file] = FileBlocks.from_entries(self.folder, file, entry, self._index)
        nbytes = {file: manifest.files[file].nbytes for file in files}
        return CheckedBlocks(store, files, nbytes, self._index.block_nbytes)

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        with _naming(component, key):
            place = self._places[component].get(key)
            if place is not None:
                self._blocks.fill_memory(place.file, place.start + start, memory)
            else:
                self._assemble(component, key, start, memory)

    @override
    def nbytes_lent(self, component: str, key: str, start: int) -> int:
        place = self._places[component].get(key)
        if place is None:
            return 0
        nbytes = self._blocks.nbytes_lent(place.start + start)
        return nbytes - nbytes % ITEM_NBYTES[self.parts[component].specs[key].dtype]

    @override
    @contextmanager
    def lent(self, component: str, key: str, start: int, nbytes: int) -> Iterator[memoryview]:
        place = self._places[component][key]
        with (
            _naming(component, key),
            self._blocks.lent(place.file, place.start + start, nbytes) as memory,
        ):
            yield memory

    @override
    def fingerprint(self, component: str, key: str) -> object | None:
        place = self._places[component].get(key)
        if place is None:
            return None
        size, nbytes = self._index.block_nbytes, self.parts[component].specs[key].nbytes
        first, stop = place.start // size, -(-(place.start + nbytes) // size)
        digests = self._index.blocks[place.file]
        starts = range(DIGEST_NBYTES * first, DIGEST_NBYTES * stop, DIGEST_NBYTES)
        return BlockDigests(
            size, place.start % size, tuple(digests[at : at + DIGEST_NBYTES] for at in starts)
        )

    @override
    def close(self) -> None:
        self._stack.close()

    def _assemble(self, component: str, key: str, start: int, memory: memoryview) -> None:
        """Put bytes of a tensor together from the boxes in which it is stored."""
        table = self._index.components[component]
        spec = table.specs[key]
        item = ITEM_NBYTES[spec.dtype]
        first, stop = start // item, -(-(start + memory.nbytes) // item)
        if first * item != start or stop * item != start + memory.nbytes:
            whole = memoryview(bytearray((stop - first) * item))
            self._assemble(component, key, first * item, whole)
            memory[:] = whole[start - first * item :][: memory.nbytes]
            return
        target = np.frombuffer(memory, np.uint8)
        for part in overlaps(spec.shape, *table.boxes_of(key), first, stop):
            self._copy_part(table, part, item, target)

    def _copy_part(self, table: TensorTable, part: BoxPart, item: int, target: Any) -> None:
        at = table.shards
        file, start = at.files[at.file[part.shard]], int(at.start[part.shard])
        if part.is_run:
            run = target[part.at * item :][: part.num_elements * item]
            self._blocks.fill_memory(file, start + part.first * item, memoryview(run))
            return
        read: Any = np.empty(part.length * item, np.uint8)
        self._blocks.fill_memory(file, start + part.first * item, memoryview(read))
        part.copy_range(read, target, item)


@contextmanager
def _naming(component: str, key: str) -> Iterator[None]:
    """Name a tensor in errors about its bytes."""
    try:
        yield
    except (CorruptData, Tampered) as error:
        raise type(error)(f"{error}; it holds {component}:{key}") from error


def _ordered(table: TensorTable) -> tuple[dict[str, TensorSpec], dict[str, _Place]]:
    """Return the tensors in the order of their bytes, and where those in one piece lie."""
    at, keys = table.shards, [*table.specs]
    numbers = np.arange(len(keys))
    first = numbers if table.boxes is None else np.searchsorted(table.boxes.tensor, numbers)
    order = np.lexsort((at.start[first], at.file[first])).tolist()
    specs = {keys[number]: table.specs[keys[number]] for number in order}
    columns = at.file[first].tolist(), at.start[first].tolist()
    places = {
        key: _Place(at.files[file], start)
        for key, file, start in zip(keys, *columns, strict=True)
        if table.is_whole(key)
    }
    return specs, places


KEPT_NBYTES = 64 << 20
"""Most bytes of blocks that are kept while nobody reads from them: more than `reading.pieces` reads
ahead, so that a thread that lags behind still finds its block."""
READ_TIMEOUT_S = 600.0
"""Longest wait for a block that another thread reads."""

_BlockId: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Held:
    """A block that is being read, or was read and checked."""

    memory: memoryview
    """A pooled buffer; the block is its beginning."""
    nbytes: int
    read: Future[None] = field(default_factory=Future)
    num_users: int = 1


class CheckedBlocks:
    """Reads ranges of a checkpoint's files by whole blocks, each checked. Thread-safe."""

    def __init__(
        self,
        store: Store,
        files: Mapping[str, FileBlocks],
        nbytes: Mapping[str, int],
        block_nbytes: int,
    ) -> None:
        """Read `files` of `store`, by name; `nbytes` has their decompressed lengths."""
        self._store = store
        self._files = files
        self._nbytes = nbytes
        self._block_nbytes = block_nbytes
        self._buffers = Buffers()
        self._stored = Buffers()
        self._lock = threading.Lock()
        self._held: dict[_BlockId, _Held] = {}
        """The blocks by the time of their last use."""

    def fill_memory(self, file: str, start: int, memory: memoryview) -> None:
        """Fill `memory` from byte `start` of a file."""
        size, done = self._block_nbytes, 0
        while done < memory.nbytes:
            number, skipped = divmod(start + done, size)
            count = min(size - skipped, memory.nbytes - done)
            with self._hold_block(file, number) as plain:
                copy_bytes(plain[skipped : skipped + count], memory[done : done + count])
            done += count

    def nbytes_lent(self, start: int) -> int:
        """Return the most bytes from byte `start` of a file on that can be lent at once."""
        return self._block_nbytes - start % self._block_nbytes

    @contextmanager
    def lent(self, file: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of one block of a file where they lie; they stay until the `with` ends."""
        number, skipped = divmod(start, self._block_nbytes)
        with self._hold_block(file, number) as plain:
            yield plain[skipped : skipped + nbytes]

    @contextmanager
    def _hold_block(self, file: str, number: int) -> Iterator[memoryview]:
        held, is_mine = self._hold((file, number))
        try:
            if is_mine:
                self._read_checked_block(file, number, held)
            _wait_for_read(held.read, f"{self._store.url}/{self._files[file].key}: block {number}")
            yield held.memory[: held.nbytes]
        finally:
            self._release_block(held)

    def _hold(self, block: _BlockId) -> tuple[_Held, bool]:
        """Return a block that stays until it is released, and whether the caller must read it."""
        with self._lock:
            held = self._held.pop(block, None)
            if held is not None:
                held.num_users += 1
                self._held[block] = held
                return held, False
            file, number = block
            nbytes = min(self._block_nbytes, self._nbytes[file] - number * self._block_nbytes)
            held = self._held[block] = _Held(
                self._buffers.acquire_buffer(self._block_nbytes), nbytes
            )
            return held, True

    def _read_checked_block(self, file: str, number: int, held: _Held) -> None:
        blocks = self._files[file]
        try:
            check = begin_block(
                self._store,
                blocks,
                number,
                held.memory[: held.nbytes],
                verify=True,
                buffers=self._stored,
            )
            if fault := check():
                raise CorruptData(f"{self._store.url}/{blocks.key}: block {number} {fault}")
        except BaseException as error:
            with self._lock:
                self._held.pop((file, number), None)  # the next who needs it reads it again
            held.read.set_exception(error)
            raise
        held.read.set_result(None)

    def _release_block(self, held: _Held) -> None:
        with self._lock:
            held.num_users -= 1
            unused = [block for block, one in self._held.items() if not one.num_users]
            num_excess = len(unused) - max(1, KEPT_NBYTES // self._block_nbytes)
            for block in unused[: max(num_excess, 0)]:
                self._buffers.release_buffer(self._held.pop(block).memory)


def _wait_for_read(read: Future[None], what: str) -> None:
    try:
        read.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(f"{what} was not read within {READ_TIMEOUT_S:.0f} s") from None
