"""Verification: reads every byte of a checkpoint and compares it with the recorded digests.

Finds all damage, not only the first; writes nothing, claims nothing, and holds no more than 16
blocks (and eight decoded ones) and one document in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from holdfast.encryption.store import sealed
from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    MissingKey,
    NoCheckpoint,
    NotFound,
    SealError,
    StoreError,
    UnsupportedVersion,
    some_of,
)
from holdfast.format import layout
from holdfast.format.blocks import DIGEST_NBYTES, digest_blocks, file_digest, list_blocks
from holdfast.format.boxes import key_of_box
from holdfast.format.envelope import MAX_MARK_NBYTES, check_mark, decode_box, is_mark
from holdfast.format.index import Index, ShardEntry
from holdfast.format.index_parts import open_index
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.objects import decode_tree
from holdfast.format.records import Alive, Closed, Notes, Rejected, Retired, Thinned, WriterRecord
from holdfast.format.tensors import TensorSpec, in_header, parse_header
from holdfast.loading.block_reader import FileBlocks
from holdfast.maintenance.encrypted import scrub
from holdfast.maintenance.verify_reads import (
    NOT_HERE,
    BlockToCheck,
    CheckedBlock,
    CheckedBytes,
    FolderReader,
    Problem,
    Progress,
    RootReport,
    VerifyReport,
    again,
    look_at,
    problem_of,
    transient_note,
)
from holdfast.ownership.leases import leased
from holdfast.root.catalog import Catalog
from holdfast.root.remaining import Parts, parts_of
from holdfast.root.upload_records import find_elsewhere
from holdfast.store.base import Store

_MAX_RECORD_NBYTES = 65536
_SIDECARS: tuple[tuple[Callable[[str], object], Callable[..., object]], ...] = (
    (layout.parse_notes, Notes.decode),
    (layout.parse_retired, Retired.decode),
    (layout.parse_thinned, Thinned.decode),
    (layout.parse_keys, decode_box),
)


def _sidecar_decoder(name: str) -> Callable[..., object] | None:
    """Return the decoder of a sidecar by its name; None for other files."""
    for parse, decode in _SIDECARS:
        if parse(name) is not None:
            return decode
    return Rejected.decode if name == layout.REJECTED else None


def _unless_mark(decode: Callable[..., object], data: bytes, *, what: str) -> None:
    if is_mark(data):  # beside a manifest that cannot be decrypted
        check_mark(data, what, what=what)
    else:
        decode(data, what=what)


def verify(
    store: Store, folder: str, *, progress: Progress | None = None, decode: bool = True
) -> VerifyReport:
    """Check every byte of the checkpoint in `folder`.

    Compressed blocks are compared as stored and, unless `decode` is False, decompressed too; a
    missing codec package is a note in the report. A block that differs is read a second time; if
    it is right then, the report only notes it. It also notes components that retention has
    deleted. Of an encrypted checkpoint, without a key, the stored bytes are compared.

    Raises:
        NoCheckpoint: the folder holds no committed checkpoint, or no longer does.
        SealError: the store's keys do not decrypt it.
        DeadlineExceeded: the storage did not answer for `READ_TIMEOUT_S`.
    """
    store = store.uncached()  # a cached copy proves nothing about the store
    while True:
        inspection = _Inspection(store, folder, progress, decode=decode)
        try:
            report = inspection.inspect_checkpoint()
        except MissingKey:
            return scrub(store, folder, progress=progress)
        # Components that retention deleted meanwhile are not damaged: check again without them.
        if report.ok or not inspection.lost_parts():
            return report


def verify_kept(
    store: Store, folder: str, *, progress: Progress | None = None, decode: bool = True
) -> VerifyReport:
    """Verify a checkpoint under a lease, so that retention does not delete it meanwhile."""
    with ExitStack() as stack:
        # A checkpoint whose deletion has begun is read as long as it exists.
        with suppress(NoCheckpoint):
            stack.enter_context(leased(store, folder))
        return verify(store, folder, progress=progress, decode=decode)


def verify_root(
    store: Store,
    *,
    progress: Progress | None = None,
    keeps: bool = False,
    decode: bool = True,
    known: Mapping[str, VerifyReport] | None = None,
    told: Callable[[VerifyReport], object] | None = None,
) -> RootReport:
    """Check every committed checkpoint of a root, and its claims.

    With `keeps` each has a lease while it is read; otherwise nothing is written. Checkpoints that
    the store's keys do not decrypt are listed, and do not stop the rest. `known` has reports by
    folder, which are taken over unread; `told` is called with each
    new report.
    """
    names = [layout.parse_attempt(name.rstrip("/")) for name in store.children()]
    reports: list[VerifyReport] = []
    notes: list[str] = []
    unopened: list[tuple[str, SealError]] = []
    problems: list[Problem] = []
    for name in sorted((name for name in names if name is not None), reverse=True):
        try:
            if known is not None and str(name) in known and _is_committed(store, str(name)):
                reports.append(known[str(name)])
                continue
            check = verify_kept if keeps else verify
            reports.append(check(store, str(name), progress=progress, decode=decode))
            if told is not None:
                told(reports[-1])
        except NoCheckpoint as error:
            notes.append(str(error))
        except SealError as error:
            unopened.append((str(name), error))
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            problems.append(problem_of(str(name), error))  # a symbolic link in its place
    return RootReport(
        checkpoints=tuple(reports),
        problems=(*problems, *_check_claims(store)),
        notes=tuple(notes),
        unopened=tuple(unopened),
    )


def _is_committed(store: Store, folder: str) -> bool:
    """Whether a folder's manifest can be read; raise `NoCheckpoint` if it was deleted."""
    try:
        FolderReader(store, folder).manifest()
    except SealError:
        return True
    except FormatError:
        return False
    return True


def _check_claims(store: Store) -> Iterator[Problem]:
    reader = FolderReader(store, layout.WRITERS)
    for name in reader.list_names():
        if layout.parse_writer(name) is not None:
            decode: Callable[..., object] = WriterRecord.decode
        elif name.endswith(".closed.json"):
            decode = Closed.decode
        elif name.endswith(".alive.json"):
            decode = Alive.decode
        else:
            continue
        # A heartbeat is deleted when its epoch closes.
        for problem in reader.problems(name, _MAX_RECORD_NBYTES, decode):
            yield replace(problem, file=f"{layout.WRITERS}/{name}")


class _OtherBytes(CorruptData):
    """A file's digest is not the recorded one; `digest` is that of the file."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


class _Inspection:
    """Inspection of one checkpoint, and the problems found so far."""

    def __init__(
        self, store: Store, folder: str, progress: Progress | None, *, decode: bool
    ) -> None:
        self._store = store
        self._decode = decode
        self._made_by: dict[str, FileBlocks] = {}
        """Decoders of compressed files, by file; empty where nothing is to be decompressed."""
        self._folder = folder
        self._notes: list[str] = []
        self._reader = FolderReader(store, folder, self._notes)
        self._tally = CheckedBytes(folder, progress)
        self._problems: list[Problem] = []
        self._here: Manifest | None = None
        """The manifest without the components that retention deleted."""
        self._index_found: Index | None = None

    def inspect_checkpoint(self) -> VerifyReport:
        manifest = self._manifest()
        index: Index | None = None
        if manifest is not None:
            self._check_place(manifest)
            here = self._here = self._without_dropped(manifest)
            self._tally.total = here.nbytes
            index = self._index(manifest)
            self._index_found = index
            damaged = self._contents(here, index)
            if index is not None:
                self._check_documents(here, index, damaged)
        self._check_sidecars(manifest)
        if self._problems and manifest is not None:
            self._manifest()  # What was deleted meanwhile is not damaged: NoCheckpoint.
        components = () if self._here is None else self._here.components
        tensors = {} if index is None else index.components
        return VerifyReport(
            folder=self._folder,
            step=None if manifest is None else manifest.timestamp.step,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
            nbytes=self._tally.nbytes,
            num_files=0 if self._here is None else len(self._here.files),
            num_tensors=sum(len(tensors.get(name, ())) for name in components),
        )

    def lost_parts(self) -> bool:
        """Whether retention has deleted components since this inspection began."""
        if self._here is None:
            return False
        manifest = self._manifest()
        return manifest is not None and self._read_parts(manifest).whole != tuple(
            self._here.components
        )

    def _without_dropped(self, manifest: Manifest) -> Manifest:
        """Return the manifest without components deleted by retention; add notes on those."""
        parts = self._read_parts(manifest)
        dropped = (*parts.begun, *parts.gone)
        self._notes += [f"component {name} was dropped by retention" for name in dropped]
        self._notes += [f"component {name} was not to be saved" for name in manifest.left_out]
        self._notes += [f"the state was not healthy: {reason}" for reason in manifest.unhealthy]
        lost = {file for name in dropped for file in manifest.components[name].files}
        lost |= self._find_elsewhere(manifest, lost)
        whole = {name: manifest.components[name] for name in parts.whole}
        return msgspec.structs.replace(
            manifest,
            components={
                name: msgspec.structs.replace(
                    part, files=tuple(file for file in part.files if file not in lost)
                )
                for name, part in whole.items()
            },
            files={file: entry for file, entry in manifest.files.items() if file not in lost},
        )

    def _find_elsewhere(self, manifest: Manifest, dropped: Collection[str]) -> set[str]:
        """Return the files that are only on the disks of other hosts; add notes on those."""
        if not manifest.hosts:
            return set()
        names = {*self._reader.list_names(), *dropped}
        elsewhere = again(lambda: find_elsewhere(self._store, manifest, names))
        for host, files in elsewhere.items():
            self._notes.append(f"{NOT_HERE} {host}: {some_of(files, 3)}")
        return {file for files in elsewhere.values() for file in files}

    def _read_parts(self, manifest: Manifest) -> Parts:
        marks = again(lambda: Catalog(self._store).marks(self._folder))
        return again(lambda: parts_of(self._store, self._folder, manifest, marks))

    def _manifest(self) -> Manifest | None:
        try:
            return self._reader.manifest()
        except (FormatError, StoreError) as error:
            self._problem(layout.MANIFEST, error)
            return None

    def _check_place(self, manifest: Manifest) -> None:
        name = layout.parse_attempt(self._folder)
        recorded = layout.attempt_name(
            manifest.label, manifest.epoch, manifest.sequence, manifest.save_id
        )
        if name is None:
            self._notes.append(f"a copy of {recorded} under another name")
        elif name != recorded:
            self._problem(
                layout.MANIFEST,
                "belongs to another folder",
                expected=self._folder,
                found=str(recorded),
            )
        else:
            try:
                again(lambda: Catalog(self._store).expect_own(manifest, self._folder))
            except FormatError as error:
                self._problem(layout.MANIFEST, error)

    def _index(self, manifest: Manifest) -> Index | None:
        """Read and decode the index with all its parts; None where any of it is damaged."""
        documents = {
            name: self._read_of_index(name, manifest)
            for name in manifest.files
            if layout.is_index_name(name)
        }
        found = {name: data for name, data in documents.items() if data is not None}
        if len(found) < len(documents):
            return None
        try:
            index = open_index(
                found[layout.INDEX],
                found.__getitem__,
                files=manifest.files,
                what=layout.INDEX,
            )
            for table in index.components.values():
                _ = table.shards
        except FormatError as error:
            self._problem(layout.INDEX, error)
            return None
        return index

    def _read_of_index(self, name: str, manifest: Manifest) -> bytes | None:
        """Read a document of the index; None where it is damaged."""
        listed = manifest.files[name]

        def check_digest(data: bytes, *, what: str) -> bytes:
            found = file_digest(len(data), digest_blocks(data, manifest.block_nbytes))
            if found != listed.digest:
                raise _OtherBytes(found)
            return data

        try:
            return self._reader.read_decoded(name, layout.MAX_INDEX_NBYTES, check_digest)
        except NotFound:
            self._problem(name, "is missing")
        except _OtherBytes as error:
            what, found = "other bytes than written", error.digest
            self._problem(name, what, expected=listed.digest, found=found)
        except (FormatError, StoreError) as error:
            self._problem(name, error)
        finally:
            self._tally.count_checked(listed.nbytes)
        return None

    def _contents(self, manifest: Manifest, index: Index | None) -> set[str]:
        """Compare the bytes of every file but the index; return the names of damaged files."""
        num_before = len(self._problems)
        files = {
            file: entry for file, entry in manifest.files.items() if not layout.is_index_name(file)
        }
        if index is not None and self._decode:
            self._made_by = self._decoders(files, index)
        jobs: list[BlockToCheck] = []
        for file, listed in files.items():
            jobs += self._blocks_to_read(file, listed, index, manifest.block_nbytes)
        found = {file: bytearray() for file in files}
        for seen in look_at(self._reader, jobs):
            self._record(seen)
            found[seen.block.file] += seen.digest
        damaged = {problem.file for problem in self._problems[num_before:]}
        if index is None:
            for file in files.keys() - damaged:
                damaged |= self._check_whole(file, files[file], jobs, bytes(found[file]))
        return damaged

    def _decoders(self, files: Mapping[str, FileEntry], index: Index) -> dict[str, FileBlocks]:
        found: dict[str, FileBlocks] = {}
        missing: dict[str, str] = {}
        for file, listed in files.items():
            if listed.stored is not None:
                try:
                    found[file] = FileBlocks.from_entries(self._folder, file, listed, index)
                except UnsupportedVersion as error:
                    missing[listed.stored.codec] = str(error)
        self._notes += [f"not decoded: {text}" for text in missing.values()]
        return found

    def _check_whole(
        self, file: str, listed: FileEntry, jobs: list[BlockToCheck], digests: bytes
    ) -> set[str]:
        """Compare a file with its digest in the manifest, without the index; return it if bad."""
        if listed.stored is not None:
            return {file}  # without the index, block offsets are unknown
        digest = file_digest(listed.nbytes, digests)
        if digest != listed.digest:
            # It is not known which block differs, so all of them are read again.
            blocks = (block for block in jobs if block.file == file)
            digests = b"".join(seen.digest for seen in look_at(self._reader, blocks))
            digest = file_digest(listed.nbytes, digests)
            if digest == listed.digest:
                self._notes.append(transient_note(file))
        if digest == listed.digest:
            return set()
        self._problem(file, "other bytes than written", expected=listed.digest, found=digest)
        return {file}

    def _blocks_to_read(
        self, file: str, listed: FileEntry, index: Index | None, block_nbytes: int
    ) -> list[BlockToCheck]:
        """List the blocks that lie wholly inside the file as it is now."""
        nbytes = self._check_length(file, listed, index, block_nbytes)
        if listed.stored is None:
            spans = list_blocks(min(nbytes, listed.nbytes), block_nbytes)
            whole = spans if nbytes >= listed.nbytes else spans[: nbytes // block_nbytes]
            digests = b"" if index is None else index.blocks[file]
        elif index is None:
            whole, digests = [], b""  # without the index, block offsets are unknown
        else:
            spans, digests = index.stored[file].spans(), index.stored[file].digests
            whole = spans[: sum(stop <= nbytes for _, stop in spans)]
        blocks = [
            BlockToCheck(
                file=file,
                number=number,
                start=start,
                stop=stop,
                expected=digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
                plain=(number * block_nbytes, min((number + 1) * block_nbytes, listed.nbytes)),
                made_by=self._made_by.get(file),
            )
            for number, (start, stop) in enumerate(whole)
        ]
        self._tally.count_checked(listed.stored_nbytes - (blocks[-1].stop if blocks else 0))
        return blocks

    def _check_length(
        self, file: str, listed: FileEntry, index: Index | None, block_nbytes: int
    ) -> int:
        """Return the present length of a file and record problems with it; 0 if unreadable."""
        try:
            nbytes = self._reader.measure_file(file)
        except NotFound:
            self._problem(file, "is missing", tensors=self._find_tensors(file, 0, listed.nbytes))
            return 0
        except StoreError as error:
            self._problem(file, error, tensors=self._find_tensors(file, 0, listed.nbytes))
            return 0
        if nbytes != listed.stored_nbytes:
            lost_from = nbytes // block_nbytes * block_nbytes
            if listed.stored is not None and index is not None:
                spans = index.stored[file].spans()
                lost_from = block_nbytes * sum(stop <= nbytes for _, stop in spans)
            self._problem(
                file,
                "wrong length",
                expected=f"{listed.stored_nbytes} bytes",
                found=f"{nbytes} bytes",
                tensors=self._find_tensors(file, lost_from, listed.nbytes)
                if nbytes < listed.stored_nbytes
                else (),
            )
        return nbytes

    def _record(self, seen: CheckedBlock) -> None:
        block = seen.block
        self._tally.count_checked(block.stop - block.start)
        if seen.was_transient:
            what = f"bytes {block.start} to {block.stop} were"
            self._notes.append(transient_note(block.file, what))
        if seen.is_right:
            return
        self._problem(
            block.file,
            seen.error or "other bytes than written",
            block=block.number,
            start=block.start,
            nbytes=block.stop - block.start,
            tensors=self._find_tensors(block.file, *block.plain),
            expected="" if seen.error else block.expected.hex(),
            found=seen.digest.hex(),
        )

    def _check_documents(self, manifest: Manifest, index: Index, damaged: set[str]) -> None:
        """Check that state trees and tensor headers match the index; skip damaged files."""
        for name, component in manifest.components.items():
            tensors: Collection[str] = index.components.get(name, ())
            if len(tensors) != component.num_tensors:
                self._problem(
                    layout.INDEX,
                    f"the number of tensors of component {name} differs from the manifest",
                    expected=str(component.num_tensors),
                    found=str(len(tensors)),
                )
            for file in component.files:
                listed = manifest.files[file]
                if file in damaged or (listed.stored is not None and file not in self._made_by):
                    continue
                found = self._inspect(name, file, listed, index)
                if found:
                    found = self._inspect(name, file, listed, index)
                    if not found:
                        self._notes.append(transient_note(file))
                self._problems += found

    def _inspect(self, component: str, file: str, listed: FileEntry, index: Index) -> list[Problem]:
        """List the problems in the tree or the header of a file."""
        look = self._tree if layout.plain_file(file).endswith(".json") else self._header
        try:
            return list(look(component, file, listed, index))
        except (FormatError, StoreError) as error:
            return [problem_of(file, error)]

    def _tree(
        self, component: str, file: str, listed: FileEntry, index: Index
    ) -> Iterator[Problem]:
        wanted: set[str] = set()

        def note_key(node: Any) -> Any:
            if isinstance(node, TensorRef | ArrayRef):
                wanted.add(node.key)
            return node

        data = self._reader.beginning(file, listed.nbytes, listed, self._made_by.get(file))
        decode_tree(data, lift=note_key, what=file)
        unknown = sorted(wanted - set(index.components.get(component, ())))
        if unknown:
            yield problem_of(file, "names tensors that the index lacks", tensors=tuple(unknown))

    def _header(
        self, component: str, file: str, listed: FileEntry, index: Index
    ) -> Iterator[Problem]:
        head = self._reader.header(file, listed, self._made_by.get(file))
        found = parse_header(head, file_nbytes=listed.nbytes, what=file)
        expected = _expected_header(index, file)
        for key in sorted({*found, *expected}):
            if found.get(key) != expected.get(key):
                yield problem_of(
                    file,
                    "header and index disagree",
                    tensors=(key,),
                    expected=str(expected.get(key, "nothing")),
                    found=str(found.get(key, "nothing")),
                )

    def _check_sidecars(self, manifest: Manifest | None) -> None:
        """Check the sidecars, and note files that the manifest does not list."""
        for name in self._reader.list_names():
            decode = None if self._reader.is_of_user(name) else _sidecar_decoder(name)
            is_box = layout.parse_keys(name) is not None
            if decode is not None and not (is_box and sealed(self._store) is None):
                check = partial(_unless_mark, decode)
                self._problems += self._reader.problems(name, MAX_MARK_NBYTES, check)
            elif manifest is not None and name not in (layout.MANIFEST, *manifest.files):
                self._notes.append(f"{name} is not listed in the manifest")

    def _find_tensors(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the keys of the tensors with bytes in [start, stop) of a file."""
        return tuple(
            spec.key
            for spec, shard in _shards_in(self._index_found, file)
            if shard.start < stop and shard.start + shard.nbytes > start
        )

    def _problem(self, file: str, what: str | HoldfastError, **more: Any) -> None:
        self._problems.append(problem_of(file, what, **more))


def _shards_in(index: Index | None, file: str) -> Sequence[tuple[TensorSpec, ShardEntry]]:
    """List the shards in a file, each with its tensor, in the order of their bytes."""
    component = layout.component_of(file)
    if index is None or component not in index.components:
        return ()
    return index.components[component].shards_in(file)


def _expected_header(index: Index, file: str) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Compute the expected header of a tensor file, in the form of `parse_header`."""
    expected: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for spec, shard in _shards_in(index, file):
        dtype, shape = in_header(spec.dtype, spec.shape if shard.sizes is None else shard.sizes)
        stop = shard.start + shard.nbytes
        expected[_name_in_header(spec, shard)] = (dtype, shape, shard.start, stop)
    return expected


def _name_in_header(spec: TensorSpec, shard: ShardEntry) -> str:
    if shard.offsets is None or shard.sizes is None or shard.sizes == spec.shape:
        return spec.key
    return key_of_box(spec.key, shard.offsets, shard.sizes)
