"""Repair of damaged local checkpoints with the same files from the remote tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from holdfast.encryption.manifests import boxes_of
from holdfast.encryption.store import bare, sealed, vouched
from holdfast.errors import CorruptData, FormatError, NoCheckpoint, NotSealed, StoreError
from holdfast.format import layout
from holdfast.format.blocks import (
    block_digest,
    check_block,
    digest_blocks,
    file_digest,
    list_blocks,
)
from holdfast.format.envelope import Visible
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.maintenance.rotate_keys import put_box
from holdfast.maintenance.verify import verify
from holdfast.root.byte_ranges import (
    FilePiece,
    Listing,
    decode_listing,
    get_stored_length,
    groups_of,
    pieces_of,
    pieces_of_sealed,
    read_listing,
)
from holdfast.root.catalog import Catalog
from holdfast.root.commit import check_ownership, remove_scratch
from holdfast.root.documents import is_of_others, read_document
from holdfast.store.base import Store


def mend(local: Store, remote: Store, folder: str, *, epoch: int) -> tuple[str, ...]:
    """Replace damaged and missing files of a local checkpoint; return the names of those replaced.

    Replaces only the manifest, files listed in it, and lost keys of an encrypted checkpoint, and
    files only by bytes with the recorded digests. A file is fetched whole before the damaged one
    is deleted. `epoch` is the caller's claim.
    """
    bare_local, bare_remote = bare(local), bare(remote)
    data = vouched(remote, folder)
    listing = decode_listing(data, what=f"{bare_remote.url}/{folder}/{layout.MANIFEST}")
    if not isinstance(listing, Manifest | Visible):
        raise NoCheckpoint(f"{bare_remote.url}/{folder}: not committed")
    _expect_same(listing, folder, where=bare_remote.url)
    plain = {} if isinstance(listing, Visible) else _pieces_of_plain(bare_remote, folder, listing)
    mended = _mend_keys(local, remote, folder, listing, epoch)
    if _mend_manifest(local, folder, data, epoch):
        mended.append(layout.MANIFEST)
    problems = verify(bare_local, folder).problems
    for name in dict.fromkeys(p.file for p in problems if p.file in listing.files):
        file, key = listing.files[name], f"{folder}/{name}"
        pieces = plain[name] if plain else _pieces_of_sealed(bare_remote, key, file)
        _replace_file(bare_local, bare_remote, key, get_stored_length(file), pieces, epoch)
        mended.append(name)
    if mended:
        # The rejection was because of the damage.
        _delete_own(bare_local, f"{folder}/{layout.REJECTED}")
    return tuple(mended)


def _delete_own(local: Store, key: str) -> None:
    if not is_of_others(local, key):
        local.delete(key)


def _expect_same(listing: Listing, folder: str, *, where: str) -> None:
    """Raise `CorruptData` if the manifest in a folder is that of another checkpoint."""
    name = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
    if str(name) != folder:
        raise CorruptData(f"{where}/{folder}: the manifest there is of {name}")


def _pieces_of_sealed(remote: Store, key: str, file: FileEntry) -> tuple[FilePiece, ...]:
    """Read all of an encrypted remote file to compute the ranges and digests of its pieces."""
    spans = list_blocks(file.nbytes)
    digests = (block_digest(remote.get(key, start, stop - start)) for start, stop in spans)
    return pieces_of_sealed(file, digests, what=f"{remote.url}/{key}")


def _pieces_of_plain(
    remote: Store, folder: str, manifest: Manifest
) -> Mapping[str, tuple[FilePiece, ...]]:
    what = f"{remote.url}/{folder}/{layout.INDEX}"
    entry = manifest.files[layout.INDEX]
    data = read_document(remote, f"{folder}/{layout.INDEX}", max_nbytes=layout.MAX_INDEX_NBYTES)
    if file_digest(len(data), digest_blocks(data, manifest.block_nbytes)) != entry.digest:
        raise CorruptData(f"{what}: not what was written")
    return pieces_of(manifest, data, what=what)


def _mend_keys(local: Store, remote: Store, folder: str, listing: Listing, epoch: int) -> list[str]:
    """Write a new key box for an encrypted local checkpoint if none of its boxes can be read.

    The box is for the run's current keys: boxes of the remote tier may be for keys that were
    since changed in the local tier.
    """
    sealing_store = sealed(remote)
    if not isinstance(listing, Visible) or sealing_store is None:
        return []
    bare_local = bare(local)
    names = bare_local.children(folder)
    unreadable = [name for name in names if layout.parse_keys(name) is not None]
    try:
        boxes_of(bare_local, folder, listing)
    except FormatError:
        box = sealing_store.new_box(folder)
        _expect_committed(bare_local, folder)
        check_ownership(bare_local, epoch, committed=True)
        newest = max((layout.parse_keys(name) or 0 for name in unreadable), default=0)
        number = put_box(bare_local, folder, newest, box)
        for name in unreadable:
            _delete_own(bare_local, f"{folder}/{name}")
        return [layout.keys_name(number)]
    return []


def _expect_committed(local: Store, folder: str) -> None:
    try:
        listing = read_listing(local, folder)
    except FormatError:
        return  # the manifest is repaired next
    if not isinstance(listing, Manifest | Visible):
        raise NoCheckpoint(f"{local.url}/{folder}: not committed any more")


def _mend_manifest(local: Store, folder: str, data: bytes, epoch: int) -> bool:
    """Rewrite the local manifest if it cannot be read; return whether that was needed."""
    try:
        register = Catalog(local).read(folder)
    except (FormatError, NotSealed):
        check_ownership(local, epoch, committed=True)
        bare(local).put(f"{folder}/{layout.MANIFEST}", data)
        return True
    if not isinstance(register, Manifest):
        raise NoCheckpoint(f"{local.url}/{folder}: not committed any more")
    return False


def _replace_file(
    local: Store, remote: Store, key: str, nbytes: int, pieces: tuple[FilePiece, ...], epoch: int
) -> None:
    if len(pieces) <= 1:
        content = b"".join(_fetch(remote, key, piece) for piece in pieces)
        check_ownership(local, epoch, committed=True)
        local.put(key, content)
        return
    if not local.has_links:
        raise StoreError(f"{local.url}/{key}: this store cannot replace a large file")
    scratch = layout.sending_folder(os.urandom(8))
    aside = f"{scratch}/{key.rpartition('/')[2]}"
    local.make_folder(scratch, exclusive=True)
    try:
        writer = local.create(aside, nbytes)
        try:
            for group in groups_of(pieces):
                first = group.pieces[0].start
                data = b"".join(_fetch(remote, key, piece) for piece in group.pieces)
                writer.write(
                    group.start, memoryview(data)[group.start - first : group.stop - first]
                )
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        check_ownership(local, epoch, committed=True)
        local.delete(key)
        if not local.link(aside, key):
            raise StoreError(f"{local.url}/{aside}: cannot be given its name {key}")
    finally:
        with suppress(StoreError):  # gc removes it
            remove_scratch(local, scratch)


def _fetch(remote: Store, key: str, piece: FilePiece) -> bytes:
    data = remote.get(key, piece.start, piece.stop - piece.start)
    check_block(data, piece.digest, what=f"{remote.url}/{key}, bytes {piece.start} on")
    return data
