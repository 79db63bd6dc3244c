"""Repair of damaged local checkpoints with the same files from the remote tier."""

from __future__ import annotations

from holdfast.encryption.files import boxes_of
from holdfast.encryption.store import bare, sealed, vouched
from holdfast.errors import CorruptData, FormatError, NoCheckpoint, NotSealed
from holdfast.format import layout
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Manifest
from holdfast.maintenance.encrypted import put_box
from holdfast.maintenance.verify import verify
from holdfast.replication.upload import Sender
from holdfast.root.byte_ranges import Listing, decode_listing, read_listing
from holdfast.root.catalog import Catalog
from holdfast.root.commit import check_ownership
from holdfast.root.documents import is_of_others
from holdfast.store.base import Store
from holdfast.threads.workers import Background

_NUM_THREADS = 4
_BLOCK_TIMEOUT_S = 600.0


def mend(
    local: Store, remote: Store, folder: str, *, epoch: int, background: Background | None = None
) -> tuple[str, ...]:
    """Replace damaged and missing files of a local checkpoint; return the names of those replaced.

    Replaces only the manifest, files listed in it, and lost keys of an encrypted checkpoint, and
    files only by bytes with the recorded digests. A file is fetched whole before the damaged one
    is deleted. `epoch` is the caller's claim; `background` has threads to fetch with.
    """
    bare_local, bare_remote = bare(local), bare(remote)
    data = vouched(remote, folder)
    listing = decode_listing(data, what=f"{bare_remote.url}/{folder}/{layout.MANIFEST}")
    if not isinstance(listing, Manifest | Visible):
        raise NoCheckpoint(f"{bare_remote.url}/{folder}: not committed")
    _expect_same(listing, folder, where=bare_remote.url)
    sender = Sender(
        remote, local, num_threads=_NUM_THREADS, timeout_s=_BLOCK_TIMEOUT_S, background=background
    )
    pieces_of_file = sender.list_pieces(folder, listing)
    mended = _mend_keys(local, remote, folder, listing, epoch)
    if _mend_manifest(local, folder, data, epoch):
        mended.append(layout.MANIFEST)
    problems = verify(bare_local, folder).problems
    for name in dict.fromkeys(p.file for p in problems if p.file in listing.files):
        nbytes = listing.files[name].stored_nbytes
        sender.replace_file(f"{folder}/{name}", nbytes, pieces_of_file(name), epoch=epoch)
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


def _mend_keys(local: Store, remote: Store, folder: str, listing: Listing, epoch: int) -> list[str]:
    """Write a box with the run's current keys for a local checkpoint if no other can be read."""
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
