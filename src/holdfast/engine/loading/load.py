"""Opening of a checkpoint: its index and its components' trees are read and checked.

Every document is small and read whole. The tensors are read later, by `tensors.TensorReader`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.engine.loading.blockreading import FileBlocks, read_block
from holdfast.errors import CorruptData, NotFound
from holdfast.format import blocks, layout
from holdfast.format.index import Index, decode_index
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.state.byrank import part_of
from holdfast.state.components import StoredComponent
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint whose index and trees were read and checked."""

    folder: str
    manifest: Manifest
    index: Index
    components: Mapping[str, StoredComponent]
    by_rank: frozenset[str] = frozenset()
    """Components of which each rank has its own state."""


def open_checkpoint(
    store: Store,
    folder: str,
    manifest: Manifest,
    *,
    components: Collection[str] | None = None,
    verify: bool = True,
    rank: int = 0,
    world_size: int | None = None,
) -> Opened:
    """Read and check a checkpoint's index, and the trees of `components` (None: of all).

    Of components of which each rank has its own state it gives the part of `rank`.

    Raises:
        CorruptData: a document is missing, cut or changed.
        MismatchError: such a component cannot be given to `world_size` ranks.
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
    tables = dict(index.components)
    by_rank = set()
    for name, component in stored.items():
        part = part_of(component, rank, world_size)
        if part is not None:
            by_rank.add(name)
            stored[name], keys = part
            tables[name] = tables[name].part(keys)
    index = msgspec.structs.replace(index, components=tables)
    return Opened(
        folder=folder,
        manifest=manifest,
        index=index,
        components=stored,
        by_rank=frozenset(by_rank),
    )


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
    """Read a small file and check its digest against the manifest; retry once if it differs."""
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
    """Read and decompress a small file, checking it block by block."""
    entry = _document_entry(store, folder, name, manifest)
    file = FileBlocks.of(folder, name, entry, index)
    data = bytearray(entry.nbytes)
    for number, (start, stop) in enumerate(blocks.split(entry.nbytes, index.block_nbytes)):
        fault = read_block(store, file, number, memoryview(data)[start:stop], verify=verify)
        if fault:
            raise CorruptData(f"{store.url}/{file.key}: block {number} {fault}")
    return bytes(data)


def _document_entry(store: Store, folder: str, name: str, manifest: Manifest) -> FileEntry:
    """Return the manifest's entry of a small file, after checking the file's length."""
    key, entry = f"{folder}/{name}", manifest.files.get(name)
    if entry is None:
        raise CorruptData(f"{store.url}/{folder}: the manifest lists no {name}")
    # Before memory is allocated: a damaged manifest may claim any number of bytes.
    check_size(store, key, entry)
    return entry


def check_size(store: Store, key: str, entry: FileEntry) -> None:
    """Raise `CorruptData` unless a file exists with the length that the manifest records."""
    try:
        nbytes = store.head(key).nbytes
    except NotFound as error:
        raise CorruptData(f"{store.url}/{key}: the file is missing") from error
    if nbytes != entry.stored_nbytes:
        raise CorruptData(f"{store.url}/{key}: {nbytes} bytes, expected {entry.stored_nbytes}")
