"""Reading a checkpoint: documents first, then the needed blocks, in parallel and verified.

Nothing here changes live state. What comes back is memory of its own, so that applying it can
wait until every check has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.engine.loading.blockreading import FileBlocks, begin_block, read_block
from holdfast.engine.loading.tables import ReadTensors
from holdfast.engine.loading.wanted import Wanted, wanted_by_file
from holdfast.engine.memory import Buffers
from holdfast.engine.staging.arena import Arena
from holdfast.engine.threads import Threads
from holdfast.errors import CorruptData, LimitExceeded, NotFound, Tampered
from holdfast.format import blocks, layout
from holdfast.format.index import Index, decode_index
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.state.apply import StoredComponent
from holdfast.store.base import Store

MAX_DOCUMENT_NBYTES = 64 * 1024 * 1024
"""The largest index and the largest tree (docs/format.md, section 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint whose documents were read and found sound."""

    folder: str
    manifest: Manifest
    index: Index
    components: Mapping[str, StoredComponent]


def open_checkpoint(
    store: Store,
    folder: str,
    manifest: Manifest,
    *,
    components: Collection[str] | None = None,
    verify: bool = True,
) -> Opened:
    """Read the index, and the trees of `components` (None: of all).

    Raises:
        CorruptData: a document is missing, cut or changed.
    """
    data = _read_file(store, folder, layout.INDEX, manifest, verify=verify)
    index = decode_index(data, files=manifest.files, what=f"{store.url}/{folder}/{layout.INDEX}")
    if set(index.components) != set(manifest.components):
        raise CorruptData(f"{folder}: index and manifest list different components")
    if index.block_nbytes != manifest.block_nbytes:
        raise CorruptData(f"{folder}: index and manifest differ in the size of blocks")
    wanted = manifest.components if components is None else components
    stored = {
        name: _stored(store, folder, name, manifest, index, verify=verify)
        for name in wanted
        if name in manifest.components
    }
    return Opened(folder=folder, manifest=manifest, index=index, components=stored)


def _stored(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool
) -> StoredComponent:
    component = manifest.components[name]
    tree = component.files[0]
    if manifest.files[tree].stored is None:
        data = _read_file(store, folder, tree, manifest, verify=verify)
    else:
        data = _decode_file(store, folder, tree, manifest, index, verify=verify)
    tensors = index.components[name].specs
    return StoredComponent(name=name, kind=component.kind, tree=data, tensors=tensors)


def _read_file(store: Store, folder: str, name: str, manifest: Manifest, *, verify: bool) -> bytes:
    """A whole small file, checked against the digest that the manifest has for it.

    One that is wrong is read once more, as blocks are.
    """
    key, entry = f"{folder}/{name}", _document_entry(store, folder, name, manifest)
    data, digest = bytearray(entry.nbytes), ""
    for afresh in (False, True):
        store.read_into(key, 0, memoryview(data), afresh=afresh)
        digest = blocks.file_digest(len(data), blocks.digest_blocks(data, manifest.block_nbytes))
        if digest == entry.digest or not verify:
            return bytes(data)
    raise CorruptData(f"{store.url}/{key}: digest is {digest}, expected {entry.digest}")


def _decode_file(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool
) -> bytes:
    """The same of a file that a codec made."""
    entry = _document_entry(store, folder, name, manifest)
    file = FileBlocks.of(folder, name, entry, index)
    data = bytearray(entry.nbytes)
    for number, (start, stop) in enumerate(blocks.split(entry.nbytes, index.block_nbytes)):
        fault = read_block(store, file, number, memoryview(data)[start:stop], verify=verify)
        if fault:
            raise CorruptData(f"{store.url}/{file.key}: block {number} {fault}")
    return bytes(data)


def _document_entry(store: Store, folder: str, name: str, manifest: Manifest) -> FileEntry:
    """What the manifest says of a document; its length was looked at, and is not too large."""
    key, entry = f"{folder}/{name}", manifest.files.get(name)
    if entry is None:
        raise CorruptData(f"{store.url}/{folder}: the manifest lists no {name}")
    if entry.nbytes > MAX_DOCUMENT_NBYTES:
        raise LimitExceeded(f"{store.url}/{key}: {entry.nbytes} bytes are too many for a document")
    check_size(store, key, entry)
    return entry


def check_size(store: Store, key: str, entry: FileEntry) -> None:
    """Raise `CorruptData` unless the object is there with the recorded length."""
    try:
        found = store.head(key).nbytes
    except NotFound as error:
        raise CorruptData(f"{store.url}/{key}: the file is missing") from error
    if found != entry.stored_nbytes:
        raise CorruptData(f"{store.url}/{key}: {found} bytes, expected {entry.stored_nbytes}")


Tensors = Mapping[str, Mapping[str, torch.Tensor]]


def read_tensors(
    store: Store,
    opened: Opened,
    needed: Mapping[str, Iterable[str]],
    *,
    threads: Threads,
    timeout_s: float,
    verify: bool = True,
) -> Tensors:
    """The needed tensors by component and key, in memory of their own, every block checked.

    Reads only the blocks that hold needed tensors.

    Raises:
        CorruptData: names file, block and the tensors in it.
    """
    by_file = wanted_by_file(opened.index, needed)
    arenas = {file: _prepare_file(store, opened, file) for file in by_file}
    buffers = Buffers()
    files = {
        file: FileBlocks.of(opened.folder, file, opened.manifest.files[file], opened.index)
        for file in by_file
    }
    reads = [
        partial(_begin, store, opened, files[file], arenas[file], number, verify, buffers)
        for file, wanted in by_file.items()
        for number in wanted.blocks(opened.index.block_nbytes)
    ]
    with store.keeping_open():
        what = f"reading {store.url}/{opened.folder}"
        threads.read_all(reads, timeout_s=timeout_s, what=what)
    parts: dict[str, list[tuple[Wanted, Arena]]] = {component: [] for component in needed}
    for file, wanted in by_file.items():
        parts[wanted.component].append((wanted, arenas[file]))
    return {component: ReadTensors(found) for component, found in parts.items()}


def _prepare_file(store: Store, opened: Opened, file: str) -> Arena:
    """Memory for a file, made only after its length was seen; untouched pages cost nothing."""
    entry = opened.manifest.files[file]
    check_size(store, f"{opened.folder}/{file}", entry)
    return Arena(entry.nbytes)


def _begin(
    store: Store,
    opened: Opened,
    file: FileBlocks,
    arena: Arena,
    number: int,
    verify: bool,
    buffers: Buffers,
) -> Callable[[], None]:
    start = number * opened.index.block_nbytes
    memory = arena.memory[start : start + opened.index.block_nbytes]
    return begin_checked(store, opened, file, memory, number, verify=verify, buffers=buffers)


def begin_checked(
    store: Store,
    opened: Opened,
    file: FileBlocks,
    memory: memoryview,
    number: int,
    *,
    verify: bool,
    buffers: Buffers,
) -> Callable[[], None]:
    """Wait for a block; what this gives fills `memory`, which has its length, with the plain bytes.

    Raises:
        CorruptData, Tampered: it is not what was written; names file, block and tensors.
        StoreError: it cannot be read.
    """
    start = number * opened.index.block_nbytes
    stop = start + len(memory)
    with _telling_what_it_holds(opened, file, start, stop):
        check = begin_block(store, file, number, memory, verify=verify, buffers=buffers)

    def fill() -> None:
        with _telling_what_it_holds(opened, file, start, stop):
            fault = check()
        if fault:
            raise CorruptData(
                f"{store.url}/{file.key}: block {number} (bytes {start} to {stop}) {fault}; "
                f"{_held(opened, file, start, stop)}"
            )

    return fill


@contextmanager
def _telling_what_it_holds(
    opened: Opened, file: FileBlocks, start: int, stop: int
) -> Iterator[None]:
    """What was tampered with may show when it is read, or when it is checked."""
    try:
        yield
    except Tampered as error:
        raise Tampered(f"{error}; {_held(opened, file, start, stop)}") from error


def _held(opened: Opened, file: FileBlocks, start: int, stop: int) -> str:
    """What lies in a stretch of a file, for messages."""
    name = file.key.rpartition("/")[2]
    names = tensors_in(opened.index, name, start, stop)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5]) or 'the header'}{more}"


def tensors_in(index: Index, file: str, start: int, stop: int) -> list[str]:
    """`component.key` of every tensor with bytes in [start, stop) of a file."""
    return [
        f"{component}.{key}"
        for component, entries in index.components.items()
        for key, entry in entries.items()
        for shard in entry.shards
        if shard.file == file and shard.start < stop and shard.start + shard.nbytes > start
    ]
