"""Checking a sealed checkpoint without its keys: the stored bytes against the stored digests.

Finds what the storage spoiled. Whether somebody changed bytes and digests together, only a key
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from holdfast.care.findings import Problem, Report
from holdfast.care.reading import READ_TIMEOUT_S, FolderReader
from holdfast.engine.roots.documents import read_document
from holdfast.engine.workers import Workers, gather
from holdfast.errors import FormatError, NotFound, StoreError
from holdfast.format import layout
from holdfast.format.blocks import block_digest, file_digest, split
from holdfast.format.envelope import (
    MAX_MARK_NBYTES,
    Visible,
    check_mark,
    decode_box,
    decode_visible,
    is_mark,
)
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, FileEntry
from holdfast.format.sealed import MAX_SEALED_NBYTES
from holdfast.store.base import Store

NOTE = "sealed, and no key was given: compared as it is stored, not opened"
_NUM_THREADS = 4


def scrub(
    store: Store, folder: str, *, progress: Callable[[str, int, int], None] | None = None
) -> Report:
    """Compare every stored byte of a sealed checkpoint with its digests.

    Raises:
        DeadlineExceeded: the storage did not answer for `READ_TIMEOUT_S`.
        FormatError: its manifest is damaged.
    """
    data = read_document(store, f"{folder}/{layout.MANIFEST}", max_nbytes=MAX_MANIFEST_NBYTES)
    visible = decode_visible(data, what=layout.MANIFEST)
    names = FolderReader(store, folder).names()
    dropped = any(layout.parse_thinned(name) is not None for name in names)
    problems, notes = [*_sidecars(store, folder, names)], [NOTE]
    if dropped:
        notes.append("retention has dropped components of it, and which files these had is sealed")
    nbytes, total = 0, sum(entry.nbytes for entry in visible.files.values())
    workers = Workers(_NUM_THREADS, "holdfast-scrub")
    try:
        for name, entry in visible.files.items():
            found = _file(store, f"{folder}/{name}", name, entry, workers, may_be_gone=dropped)
            problems += found
            nbytes += entry.nbytes
            if progress is not None:
                progress(folder, nbytes, total)
    finally:
        workers.close()
    notes += [f"{name} is not listed in the manifest" for name in _unlisted(visible, names)]
    return Report(
        folder=folder,
        step=None,
        problems=tuple(problems),
        notes=tuple(notes),
        nbytes=nbytes,
        num_files=len(visible.files),
        num_tensors=0,
    )


def _file(
    store: Store, key: str, name: str, entry: FileEntry, workers: Workers, *, may_be_gone: bool
) -> list[Problem]:
    try:
        nbytes = store.head(key).nbytes
        if nbytes != entry.nbytes:
            expected, found = f"{entry.nbytes} bytes", f"{nbytes} bytes"
            return [Problem(file=name, message="wrong length", expected=expected, found=found)]
        digest = _digest(store, key, nbytes, workers)
        if digest != entry.digest:
            # Once more: a passing error on the way is not damage.
            digest = _digest(store, key, nbytes, workers)
    except NotFound:
        return [] if may_be_gone else [Problem(file=name, message="is missing")]
    except (StoreError, FormatError) as error:
        return [Problem(file=name, message=str(error), is_damage=False)]
    if digest == entry.digest:
        return []
    message = "other bytes than written"
    return [Problem(file=name, message=message, expected=entry.digest, found=digest)]


def _digest(store: Store, key: str, nbytes: int, workers: Workers) -> str:
    def one(start: int, stop: int) -> bytes:
        return block_digest(store.get(key, start, stop - start))

    jobs = [workers.submit(partial(one, start, stop)) for start, stop in split(nbytes)]
    digests = gather(jobs, timeout_s=READ_TIMEOUT_S, what=f"reading {store.url}/{key}")
    return file_digest(nbytes, b"".join(digests))


def _sidecars(store: Store, folder: str, names: tuple[str, ...]) -> Iterator[Problem]:
    boxes = [name for name in names if layout.parse_keys(name) is not None]
    if not boxes:
        yield Problem(file=layout.keys_name(1), message="is missing: nothing opens this checkpoint")
    for name in (*boxes, *filter(layout.is_sidecar, names)):
        try:
            data = read_document(store, f"{folder}/{name}", max_nbytes=MAX_MARK_NBYTES)
            if name in boxes:
                decode_box(data[: MAX_SEALED_NBYTES + 1], what=name)
            elif is_mark(data) or layout.parse_notes(name) is not None:
                check_mark(data, name, what=name)
        except NotFound:
            continue
        except (FormatError, StoreError) as error:
            yield Problem(file=name, message=str(error).removeprefix(f"{name}: "))


def _unlisted(visible: Visible, names: tuple[str, ...]) -> list[str]:
    known = {layout.MANIFEST, *visible.files}
    return [
        name
        for name in names
        if name not in known and not layout.is_sidecar(name) and layout.parse_keys(name) is None
    ]
