"""Reading a checkpoint: documents first, then the needed blocks, in parallel and verified.

Nothing here changes live state. What comes back is memory of its own, so that applying it can
wait until every check has passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.engine.arena import Arena
from holdfast.engine.workers import Workers, gather
from holdfast.errors import CorruptData, FormatError, LimitExceeded, NotFound
from holdfast.format import blocks, layout
from holdfast.format.index import Index, TensorEntry, decode_index
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.tensors import TensorSpec
from holdfast.state.apply import StoredComponent
from holdfast.store.base import ReadsInto, Store, ignore

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
    tree = _read_file(store, folder, layout.tree_file(name), manifest, verify=verify)
    specs = {
        key: TensorSpec(key=key, dtype=entry.dtype, shape=entry.shape)
        for key, entry in index.components[name].items()
    }
    kind = manifest.components[name].kind
    return StoredComponent(name=name, kind=kind, tree=tree, tensors=specs)


def _read_file(store: Store, folder: str, name: str, manifest: Manifest, *, verify: bool) -> bytes:
    """A whole small file, checked against the digest that the manifest has for it."""
    key, entry = f"{folder}/{name}", manifest.files.get(name)
    if entry is None:
        raise CorruptData(f"{store.url}/{folder}: the manifest lists no {name}")
    if entry.nbytes > MAX_DOCUMENT_NBYTES:
        raise LimitExceeded(f"{store.url}/{key}: {entry.nbytes} bytes are too many for a document")
    check_size(store, key, entry)
    data = store.get(key, 0, entry.nbytes)
    digest = blocks.file_digest(len(data), blocks.digest_blocks(data, manifest.block_nbytes))
    if verify and digest != entry.digest:
        raise CorruptData(f"{store.url}/{key}: digest is {digest}, expected {entry.digest}")
    return data


def check_size(store: Store, key: str, entry: FileEntry) -> None:
    """Raise `CorruptData` unless the object is there with the recorded length."""
    try:
        found = store.head(key).nbytes
    except NotFound as error:
        raise CorruptData(f"{store.url}/{key}: the file is missing") from error
    if found != entry.nbytes:
        raise CorruptData(f"{store.url}/{key}: {found} bytes, expected {entry.nbytes}")


Tensors = Mapping[str, Mapping[str, torch.Tensor]]


def read_tensors(
    store: Store,
    opened: Opened,
    needed: Mapping[str, Iterable[str]],
    *,
    workers: Workers,
    timeout_s: float,
    verify: bool = True,
) -> Tensors:
    """The needed tensors by component and key, in memory of their own, every block checked.

    Reads only the blocks that hold needed tensors.

    Raises:
        CorruptData: names file, block and the tensors in it.
    """
    by_file: dict[str, list[tuple[str, TensorEntry]]] = defaultdict(list)
    for component, keys in needed.items():
        for key in keys:
            entry = opened.index.components[component][key]
            if len(entry.shards) != 1 or entry.shards[0].offsets is not None:
                raise FormatError(f"{component}.{key}: sharded tensors need a newer Holdfast")
            by_file[entry.shards[0].file].append((component, entry))
    result: dict[str, dict[str, torch.Tensor]] = {component: {} for component in needed}
    arenas = {file: _prepare_file(store, opened, file) for file in by_file}
    jobs = [
        workers.submit(partial(_read_block, store, opened, file, arenas[file], number, verify))
        for file, tensors in by_file.items()
        for number in _blocks_of(tensors, opened.index.block_nbytes)
    ]
    gather(jobs, timeout_s=timeout_s, what=f"reading {store.url}/{opened.folder}")
    for file, tensors in by_file.items():
        entries = [entry for _, entry in tensors]
        for (component, entry), view in zip(tensors, _views(arenas[file], entries), strict=True):
            result[component][entry.key] = view
    return result


def _prepare_file(store: Store, opened: Opened, file: str) -> Arena:
    """Memory for a file, made only after its length was seen; untouched pages cost nothing."""
    entry = opened.manifest.files[file]
    check_size(store, f"{opened.folder}/{file}", entry)
    return Arena(entry.nbytes)


def _blocks_of(tensors: Sequence[tuple[str, TensorEntry]], block_nbytes: int) -> list[int]:
    numbers: set[int] = set()
    for _, entry in tensors:
        shard = entry.shards[0]
        if shard.nbytes:
            last = (shard.start + shard.nbytes - 1) // block_nbytes
            numbers.update(range(shard.start // block_nbytes, last + 1))
    return sorted(numbers)


def _read_block(
    store: Store, opened: Opened, file: str, arena: Arena, number: int, verify: bool
) -> None:
    start = number * opened.index.block_nbytes
    memory = arena.memory[start : start + opened.index.block_nbytes]
    digest = opened.index.blocks[file][32 * number : 32 * (number + 1)]
    key = f"{opened.folder}/{file}"
    if not verify:
        _fill(store, key, start, memory, seen=ignore)
        return
    if _read_digest(store, key, start, memory) == digest:
        return
    # One more read: a transient error on the way must not condemn a sound checkpoint.
    if _read_digest(store, key, start, memory, afresh=True) != digest:
        names = tensors_in(opened.index, file, start, start + len(memory))
        raise CorruptData(
            f"{store.url}/{key}: block {number} (bytes {start} to {start + len(memory)}) is not "
            f"what was written; it holds {', '.join(names[:5]) or 'the header'}"
            + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        )


def _read_digest(
    store: Store, key: str, start: int, memory: memoryview, *, afresh: bool = False
) -> bytes:
    """Fill the memory; the digest is of what is in it."""
    hasher = blocks.block_hasher()
    _fill(store, key, start, memory, seen=hasher.update, afresh=afresh)
    return hasher.digest()


def _fill(
    store: Store,
    key: str,
    start: int,
    memory: memoryview,
    *,
    seen: Callable[[memoryview], object],
    afresh: bool = False,
) -> None:
    if isinstance(store, ReadsInto):
        store.read_into(key, start, memory, seen=seen, afresh=afresh)
    else:
        memory[:] = store.get(key, start, len(memory))
        seen(memory)


def tensors_in(index: Index, file: str, start: int, stop: int) -> list[str]:
    """`component.key` of every tensor with bytes in [start, stop) of a file."""
    return [
        f"{component}.{key}"
        for component, entries in index.components.items()
        for key, entry in entries.items()
        for shard in entry.shards
        if shard.file == file and shard.start < stop and shard.start + shard.nbytes > start
    ]


def _views(arena: Arena, entries: Sequence[TensorEntry]) -> list[torch.Tensor]:
    specs = [TensorSpec(key=e.key, dtype=e.dtype, shape=e.shape) for e in entries]
    return arena.tensors(specs, [entry.shards[0].start for entry in entries])
