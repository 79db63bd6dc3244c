"""Documents of a checkpoint, its index and its trees: read whole, and checked; without torch."""

from __future__ import annotations

from holdfast.errors import CorruptData, NotFound
from holdfast.format import blocks, layout
from holdfast.format.index import Index, decode_index
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.loading.block_reader import FileBlocks, read_block
from holdfast.store.base import Store


def read_index(store: Store, folder: str, manifest: Manifest, *, verify: bool = True) -> Index:
    """Read and check the index of a checkpoint."""
    data = read_file(store, folder, layout.INDEX, manifest, verify=verify)
    index = decode_index(data, files=manifest.files, what=f"{store.url}/{folder}/{layout.INDEX}")
    if set(index.components) != set(manifest.components):
        raise CorruptData(f"{folder}: index and manifest list different components")
    if index.block_nbytes != manifest.block_nbytes:
        raise CorruptData(f"{folder}: index and manifest differ in the size of blocks")
    return index


def read_tree(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool = True
) -> bytes:
    """Read and check the tree of a component, as the bytes of its document."""
    tree = manifest.components[name].files[0]
    if manifest.files[tree].stored is None:
        return read_file(store, folder, tree, manifest, verify=verify)
    return decode_file(store, folder, tree, manifest, index, verify=verify)


def read_file(store: Store, folder: str, name: str, manifest: Manifest, *, verify: bool) -> bytes:
    """Read a small file and check its digest against the manifest; retry once if it differs."""
    key, entry = f"{folder}/{name}", _document_entry(store, folder, name, manifest)
    data, digest = bytearray(entry.nbytes), ""
    for afresh in (False, True):
        store.read_into(key, 0, memoryview(data), afresh=afresh)
        digest = blocks.file_digest(len(data), blocks.digest_blocks(data, manifest.block_nbytes))
        if digest == entry.digest or not verify:
            return bytes(data)
    raise CorruptData(f"{store.url}/{key}: digest is {digest}, expected {entry.digest}")


def decode_file(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool
) -> bytes:
    """Read and decompress a small file, checking it block by block."""
    entry = _document_entry(store, folder, name, manifest)
    file = FileBlocks.from_entries(folder, name, entry, index)
    data = bytearray(entry.nbytes)
    for number, (start, stop) in enumerate(blocks.list_blocks(entry.nbytes, index.block_nbytes)):
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
