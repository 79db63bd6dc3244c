"""Verification of an encrypted checkpoint without its keys: stored bytes against stored digests.

Finds damage by the storage. Changes of both bytes and digests can only be found with a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from holdfast.errors import FormatError, HoldfastError, MissingKey, NotFound, StoreError
from holdfast.format import layout
from holdfast.format.blocks import file_digest, list_blocks
from holdfast.format.envelope import (
    MAX_MARK_NBYTES,
    Visible,
    check_mark,
    decode_box,
    decode_visible,
    is_mark,
)
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, FileEntry
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.maintenance.verify_reads import (
    BlockToCheck,
    CheckedBytes,
    FolderReader,
    Problem,
    Progress,
    VerifyReport,
    look_at,
    problem_of,
)
from holdfast.store.base import Store

NOTE = "sealed, and no key was given: compared as it is stored, not opened"


def scrub(store: Store, folder: str, *, progress: Progress | None = None) -> VerifyReport:
    """Compare every stored byte of an encrypted checkpoint with its digests, without a key."""
    reader = FolderReader(store, folder)
    while True:
        names = reader.list_names()
        with suppress(MissingKey):
            reader.manifest()
        report = _scrubbed(reader, folder, names, progress)
        # Files that retention deleted meanwhile are not damaged: check again without them.
        if report.ok or not _has_lost_components(reader, names):
            return report


def _has_lost_components(reader: FolderReader, names: Sequence[str]) -> bool:
    with suppress(MissingKey):
        reader.manifest()
    return _dropped(reader, reader.list_names()) != _dropped(reader, names)


def _dropped(reader: FolderReader, names: Sequence[str]) -> set[str]:
    return {name for name in names if layout.parse_thinned(name) and not reader.is_of_user(name)}


def _scrubbed(
    reader: FolderReader, folder: str, names: tuple[str, ...], progress: Progress | None
) -> VerifyReport:
    visible = reader.read_decoded(layout.MANIFEST, MAX_MANIFEST_NBYTES, decode_visible)
    dropped = bool(_dropped(reader, names))
    problems, notes = [*_sidecars(reader, names)], [NOTE]
    if dropped:
        notes.append("retention has dropped components of it, and which files these had is sealed")
    total = sum(entry.nbytes for entry in visible.files.values())
    tally = CheckedBytes(folder, progress, total=total)
    problems += _check_files(reader, visible.files, tally, may_be_gone=dropped)
    notes += [f"{name} is not listed in the manifest" for name in _find_unlisted(visible, names)]
    return VerifyReport(
        folder=folder,
        step=None,
        problems=tuple(problems),
        notes=tuple(notes),
        nbytes=total,
        num_files=len(visible.files),
        num_tensors=0,
    )


def _check_files(
    reader: FolderReader, files: Mapping[str, FileEntry], tally: CheckedBytes, *, may_be_gone: bool
) -> Iterator[Problem]:
    """Compare each file with its length and digest in the manifest; yield the problems."""
    whole: dict[str, FileEntry] = {}
    for name, entry in files.items():
        try:
            nbytes = reader.measure_file(name)
        except (StoreError, FormatError) as error:
            yield from _unread(name, error, may_be_gone=may_be_gone)
        else:
            if nbytes == entry.nbytes:
                whole[name] = entry
                continue
            expected, found = f"{entry.nbytes} bytes", f"{nbytes} bytes"
            yield Problem(file=name, message="wrong length", expected=expected, found=found)
        tally.count_checked(entry.nbytes)
    looks = _digests(reader, whole, tally)
    # Read files that differ a second time: a transient error is not damage.
    other = {name: whole[name] for name, look in looks.items() if _differs(look, whole[name])}
    looks |= _digests(reader, other, CheckedBytes("", None))
    for name, look in looks.items():
        if isinstance(look, HoldfastError):
            yield from _unread(name, look, may_be_gone=may_be_gone)
        elif _differs(look, whole[name]):
            message = "other bytes than written"
            yield Problem(file=name, message=message, expected=whole[name].digest, found=look)


def _differs(look: str | HoldfastError, entry: FileEntry) -> bool:
    return isinstance(look, str) and look != entry.digest


def _unread(name: str, error: HoldfastError, *, may_be_gone: bool) -> Iterator[Problem]:
    if not isinstance(error, NotFound):
        yield problem_of(name, error)
    elif not may_be_gone:
        yield Problem(file=name, message="is missing")


def _digests(
    reader: FolderReader, files: Mapping[str, FileEntry], tally: CheckedBytes
) -> dict[str, str | HoldfastError]:
    """Compute the digest of each stored file, or the error that reading it gave."""
    digests = {name: bytearray() for name in files}
    failed: dict[str, HoldfastError] = {}

    def blocks() -> Iterator[BlockToCheck]:
        for name, entry in files.items():
            for number, (start, stop) in enumerate(list_blocks(entry.nbytes)):
                if name in failed:
                    tally.count_checked(entry.nbytes - start)
                    break
                plain = start, stop
                yield BlockToCheck(
                    file=name, number=number, start=start, stop=stop, expected=b"", plain=plain
                )

    for seen in look_at(reader, blocks()):
        name = seen.block.file
        tally.count_checked(seen.block.stop - seen.block.start)
        digests[name] += seen.digest
        if seen.error is not None:
            failed.setdefault(name, seen.error)
    return {
        name: failed.get(name) or file_digest(entry.nbytes, bytes(digests[name]))
        for name, entry in files.items()
    }


def _sidecars(reader: FolderReader, names: tuple[str, ...]) -> Iterator[Problem]:
    boxes = [name for name in names if layout.parse_keys(name) is not None]
    if not boxes:
        yield Problem(file=layout.keys_name(1), message="is missing: nothing opens this checkpoint")
    for name in (*boxes, *filter(layout.is_sidecar, names)):
        check = _check_box if name in boxes else _check_sidecar
        yield from reader.problems(name, MAX_MARK_NBYTES, check)


def _check_box(data: bytes, *, what: str) -> None:
    decode_box(data[: MAX_CHECKED_NBYTES + 1], what=what)


def _check_sidecar(data: bytes, *, what: str) -> None:
    if is_mark(data) or layout.parse_notes(what) is not None:
        check_mark(data, what, what=what)


def _find_unlisted(visible: Visible, names: tuple[str, ...]) -> list[str]:
    known = {layout.MANIFEST, *visible.files}
    return [
        name
        for name in names
        if name not in known and not layout.is_sidecar(name) and layout.parse_keys(name) is None
    ]
