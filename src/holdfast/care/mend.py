"""Giving a local checkpoint back the bytes that it had, from the remote tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from holdfast.care.verify import verify
from holdfast.engine.catalog import Catalog
from holdfast.engine.commit import check_fence
from holdfast.engine.documents import read_document
from holdfast.engine.tiers.pieces import Piece, length, pieces_of
from holdfast.errors import CorruptData, FormatError, NoCheckpoint, StoreError
from holdfast.format import layout
from holdfast.format.blocks import check_block, digest_blocks, file_digest
from holdfast.format.manifest import (
    MAX_JSON_FILE_NBYTES,
    MAX_MANIFEST_NBYTES,
    Manifest,
    decode_register,
)
from holdfast.store.base import LinksFiles, Store, WritesBlocks, make_folder


def mend(local: Store, remote: Store, folder: str, *, epoch: int) -> tuple[str, ...]:
    """Replace the damaged and missing files of a checkpoint; gives their names.

    Only what the manifest lists is replaced, and only by bytes that have the digests recorded
    there. A file is fetched whole before the damaged one goes. `epoch` is the caller's claim.

    Raises:
        Superseded: a later writer owns the local root.
        NoCheckpoint: it is not committed in the remote tier any more.
        FormatError, StoreError: that one is damaged too, or a tier fails.
    """
    key = f"{folder}/{layout.MANIFEST}"
    data = read_document(remote, key, max_nbytes=MAX_MANIFEST_NBYTES)
    manifest = decode_register(data, what=f"{remote.url}/{key}")
    if not isinstance(manifest, Manifest):
        raise NoCheckpoint(f"{remote.url}/{folder}: not committed")
    pieces = _pieces(remote, folder, manifest)
    mended = [layout.MANIFEST] if _mend_manifest(local, folder, data, epoch) else []
    problems = verify(local, folder).problems
    for name in dict.fromkeys(p.file for p in problems if p.file in manifest.files):
        _replace(
            local, remote, f"{folder}/{name}", length(manifest.files[name]), pieces[name], epoch
        )
        mended.append(name)
    if mended:
        # Whoever could not use it has said so.
        local.delete(f"{folder}/{layout.REJECTED}")
    return tuple(mended)


def _pieces(remote: Store, folder: str, manifest: Manifest) -> Mapping[str, tuple[Piece, ...]]:
    what = f"{remote.url}/{folder}/{layout.INDEX}"
    entry = manifest.files[layout.INDEX]
    data = read_document(remote, f"{folder}/{layout.INDEX}", max_nbytes=MAX_JSON_FILE_NBYTES)
    if file_digest(len(data), digest_blocks(data, manifest.block_nbytes)) != entry.digest:
        raise CorruptData(f"{what}: not what was written")
    return pieces_of(manifest, data, what=what)


def _mend_manifest(local: Store, folder: str, data: bytes, epoch: int) -> bool:
    """Put the manifest back where it cannot be read; one that can be, or is gone, stays so."""
    try:
        register = Catalog(local).read(folder)
    except FormatError:
        check_fence(local, epoch, committed=True)
        local.put(f"{folder}/{layout.MANIFEST}", data)
        return True
    if not isinstance(register, Manifest):
        raise NoCheckpoint(f"{local.url}/{folder}: not committed any more")
    return False


def _replace(
    local: Store, remote: Store, key: str, nbytes: int, pieces: tuple[Piece, ...], epoch: int
) -> None:
    if len(pieces) <= 1:
        content = b"".join(_fetch(remote, key, piece) for piece in pieces)
        check_fence(local, epoch, committed=True)
        local.put(key, content)
        return
    if not (isinstance(local, WritesBlocks) and isinstance(local, LinksFiles)):
        raise StoreError(f"{local.url}/{key}: this store cannot replace a large file")
    scratch = layout.sending_folder(os.urandom(8))
    aside = f"{scratch}/{key.rpartition('/')[2]}"
    make_folder(local, scratch, exclusive=True)
    try:
        writer = local.create(aside, nbytes)
        try:
            for piece in pieces:
                writer.write(piece.start, memoryview(_fetch(remote, key, piece)))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        check_fence(local, epoch, committed=True)
        local.delete(key)
        if not local.link(aside, key):
            raise StoreError(f"{local.url}/{aside}: cannot be given its name {key}")
    finally:
        with suppress(StoreError):  # gc removes it
            local.delete(f"{scratch}/")


def _fetch(remote: Store, key: str, piece: Piece) -> bytes:
    data = remote.get(key, piece.start, piece.stop - piece.start)
    check_block(data, piece.digest, what=f"{remote.url}/{key}, bytes {piece.start} on")
    return data
