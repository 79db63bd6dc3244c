"""Writes and commits one staged state: blocks in parallel, then the index, then the manifest.

The order is invariant 2: every file durable and of its planned size before the manifest is put.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from holdfast.engine.checkpoint import Phase
from holdfast.engine.claims.claim import Claim, expect_claim
from holdfast.engine.claims.process import utc_now
from holdfast.engine.roots.commit import SaveAttempt, abandon, begin, commit
from holdfast.engine.saving.compressing import Compressing
from holdfast.engine.saving.links import Links
from holdfast.engine.saving.writing import FileToWrite, WrittenFile, write_files
from holdfast.engine.staging.guard import Overlapped
from holdfast.engine.staging.image import KnownFile
from holdfast.engine.staging.staged import BytesContent, Content, Staged
from holdfast.engine.workers import Workers
from holdfast.errors import HoldfastError, OutcomeUnknown, StoreError
from holdfast.format import blocks, layout
from holdfast.format.codec import CodecName, Encoding
from holdfast.format.index import StoredBlocks, encode_index
from holdfast.format.manifest import (
    ComponentEntry,
    FileEntry,
    Manifest,
    Timestamp,
)
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Metadata of a save for its manifest, such as label, claim, timestamp, tags and metrics."""

    label: str
    claim: Claim
    sequence: int
    timestamp: Timestamp
    save_class: Literal["permanent", "ephemeral"]
    reason: str
    tags: tuple[str, ...]
    metrics: Mapping[str, float]
    numerics: Mapping[str, object]
    environment: Mapping[str, object]
    savers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)


def digest_staged(staged: Staged, workers: Workers, *, timeout_s: float) -> dict[str, bytes]:
    """Compute the block digests of every file of a save except the index, by file name."""
    digests = {
        known.file.name: staged.digest(known, workers, timeout_s) for known in staged.all_files
    }
    for component, tree in staged.trees.items():
        digests[layout.tree_file(component)] = blocks.digest_blocks(tree)
    return digests


def write(
    store: Store,
    staged: Staged,
    request: SaveRequest,
    *,
    compressing: Compressing,
    links: Links,
    workers: Workers,
    writers: Workers,
    phase: Phase,
    timeout_s: float,
    unclear: set[str],
    overlapped: Overlapped | None = None,
) -> tuple[SaveAttempt, Manifest]:
    """Write a staged state as a new checkpoint, and commit it.

    The end of an `overlapped` copy is awaited before the commit.
    The folder is added to `unclear` if a repeated put of the manifest may still arrive, also when
    the save fails.

    A failure before the put of the manifest removes the written files; after it, the outcome is
    known or the error says that it is not.

    Raises:
        Superseded, CommitConflict, OutcomeUnknown: as `engine.roots.commit.commit`.
        StoreError, DeadlineExceeded: a file could not be written.
    """
    phase.text = "making the folder"
    expect_claim(store, request.claim)
    attempt = begin(
        store, label=request.label, epoch=request.claim.epoch, sequence=request.sequence
    )
    try:
        began = time.perf_counter()
        compressing.begin()
        point = request.claim.resumed_from
        links.begin(
            staged.kinds,
            is_healthy=not request.unhealthy,
            resumed_from=None if point is None else point.folder,
        )
        files = _AttemptFiles(attempt, staged, compressing, links, workers, timeout_s)
        _write_files(store, files, writers, phase, compressing)
        request.timings["write_s"] = time.perf_counter() - began
        request.timings["stage_s"] += staged.transfer.waited_s
        phase.text = "waiting for the copy"
        if overlapped is not None:
            overlapped.expect_copied("the save", timeout_s)
        manifest = _manifest(attempt, staged, request, files)
        phase.text = f"committing {attempt.folder}"
        commit(store, attempt, manifest)
    except BaseException as error:
        _clean_up(store, attempt, error)
        if isinstance(error, OutcomeUnknown) and not attempt.put_sent:
            # Only a file's outcome is unknown; the checkpoint certainly did not commit.
            raise StoreError(str(error)) from error
        raise
    finally:
        if attempt.is_unclear:
            unclear.add(attempt.folder)
    links.committed(attempt.folder, manifest, files.stored)
    compressing.committed(files.nbytes_written, request.timings["write_s"])
    return attempt, manifest


def _clean_up(store: Store, attempt: SaveAttempt, error: BaseException) -> None:
    """Remove the files of a failed attempt; an error in that becomes the context of `error`."""
    if not isinstance(error, Exception):
        return  # the process is exiting: gc removes the folder later
    try:
        abandon(store, attempt)
    except HoldfastError as leftover:
        error.__context__ = leftover


class _AttemptFiles:
    """The files of one save attempt, written or linked from an earlier checkpoint."""

    def __init__(
        self,
        attempt: SaveAttempt,
        staged: Staged,
        compressing: Compressing,
        links: Links,
        workers: Workers,
        timeout_s: float,
    ) -> None:
        self.attempt = attempt
        self.staged = staged
        self.workers = workers
        self.timeout_s = timeout_s
        self.names: dict[str, str] = {}
        """Stored name of each file, by plain name."""
        self.entries: dict[str, FileEntry] = {}
        """Manifest entries of the durable files, by stored name."""
        self.stored: dict[str, StoredBlocks] = {}
        """Stored blocks of the compressed files, by stored name."""
        self.digests: dict[str, bytes] = {}
        self._compressing = compressing
        self._links = links
        self._codecs: dict[str, CodecName] = {}
        self.nbytes_written = 0
        """Plain bytes of the files that were written, not linked."""

    def to_write(self) -> Iterator[FileToWrite]:
        """Yield the files to write, and link unchanged ones from an earlier checkpoint."""
        for component, tree in self.staged.trees.items():
            encoding = self._compressing.of_tree(component, len(tree))
            yield self._file(layout.tree_file(component), BytesContent(tree), encoding)
        for known in self.staged.all_files:
            if not self._link(known):
                encoding = self._compressing.of_tensors(known.file)
                content = self.staged.transfer.content(known)
                file = self._file(known.file.name, content, encoding)
                yield replace(file, observer=self._compressing.observer(known.file))
        self.staged.transfer.finish()

    def _file(
        self, plain: str, content: Content | BytesContent, encoding: Encoding | None
    ) -> FileToWrite:
        name = plain if encoding is None else layout.stored_file(plain, encoding.compression.codec)
        self.names[plain] = name
        if encoding is not None:
            self._codecs[name] = encoding.compression.codec
        return FileToWrite(
            key=f"{self.attempt.folder}/{name}",
            content=content,
            encoding=encoding,
        )

    def _link(self, known: KnownFile) -> bool:
        name, nbytes = known.file.name, known.file.nbytes
        if not self._links.may_have(name, nbytes):
            return False
        if not self.staged.transfer.content(known).is_unchanged(self.timeout_s):
            return False
        digests = self.staged.digest(known, self.workers, self.timeout_s)
        entry = FileEntry(nbytes=nbytes, digest=blocks.file_digest(nbytes, digests))
        linked = self._links.link(name, self.attempt.folder, entry, digests)
        if linked is None:
            return False
        self.names[name] = linked.name
        self._add(linked.name, linked.entry, digests, linked.stored)
        return True

    def written(self, durable: Mapping[str, WrittenFile]) -> None:
        """Record entries, digests and stored blocks of files that are written and durable."""
        sizes, linked = self.staged.sizes, self.digests
        plain_names = {name: plain for plain, name in self.names.items()}
        self.digests = {}
        for key, file in durable.items():
            name = key.rpartition("/")[2]
            nbytes = sizes[plain_names[name]]
            self.nbytes_written += nbytes
            digest = blocks.file_digest(nbytes, file.digests)
            stored = None if file.stored is None else file.stored.entry(self._codecs[name])
            entry = FileEntry(nbytes=nbytes, digest=digest, stored=stored)
            self._add(name, entry, file.digests, file.stored)
        self.digests |= linked
        self.entries = {self.names[plain]: self.entries[self.names[plain]] for plain in sizes}

    def _add(
        self, name: str, entry: FileEntry, digests: bytes, stored: StoredBlocks | None
    ) -> None:
        self.entries[name] = entry
        self.digests[name] = digests
        if stored is not None:
            self.stored[name] = stored

    def index(self) -> bytes:
        """Encode the checkpoint's index document, which lists tensors and block digests."""
        plans = {
            component: [
                msgspec.structs.replace(known.file, name=self.names[known.file.name])
                for known in files
            ]
            for component, files in self.staged.files.items()
        }
        return encode_index(plans, self.digests, stored=self.stored)


def _write_files(
    store: Store, files: _AttemptFiles, writers: Workers, phase: Phase, compressing: Compressing
) -> None:
    folder = files.attempt.folder
    found = write_files(
        store,
        files.to_write(),
        workers=files.workers,
        writers=writers,
        phase=phase,
        timeout_s=files.timeout_s,
        throughput=compressing.store,
        pieces=compressing.pieces,
    )
    files.written(found)
    index = files.index()
    phase.text = f"writing {folder}/{layout.INDEX}"
    store.put(f"{folder}/{layout.INDEX}", index)
    digest = blocks.file_digest(len(index), blocks.digest_blocks(index))
    files.entries[layout.INDEX] = FileEntry(nbytes=len(index), digest=digest)
    with suppress(StoreError):  # uploads whose reply was lost; gc removes the rest
        store.abort_uploads(folder)
    phase.text = f"checking sizes in {folder}"
    _check_sizes(store, files.attempt, files.entries)


def _check_sizes(store: Store, attempt: SaveAttempt, entries: Mapping[str, FileEntry]) -> None:
    sizes = {info.key: info.nbytes for info in store.list(f"{attempt.folder}/")}
    for name, entry in entries.items():
        nbytes = sizes.get(f"{attempt.folder}/{name}")
        if nbytes != entry.stored_nbytes:
            raise StoreError(
                f"{store.url}/{attempt.folder}/{name}: {entry.stored_nbytes} bytes were written "
                f"and the store now has {nbytes}; this save is not committed"
            )


def _manifest(
    attempt: SaveAttempt, staged: Staged, request: SaveRequest, files: _AttemptFiles
) -> Manifest:
    return Manifest(
        save_id=attempt.save_id,
        label=request.label,
        epoch=request.claim.epoch,
        sequence=request.sequence,
        parent=request.claim.resumed_from,
        timestamp=request.timestamp,
        created=utc_now(),
        save_class=request.save_class,
        reason=request.reason,
        tags=request.tags,
        metrics=request.metrics,
        world_size=1,
        components={
            name: _component(name, kind, staged, files) for name, kind in staged.kinds.items()
        },
        block_nbytes=layout.BLOCK_NBYTES,
        files=files.entries,
        numerics=request.numerics,
        environment=request.environment,
        timings=request.timings,
        writer=request.claim.nonce,
        savers=request.savers,
        left_out=request.left_out,
        unhealthy=request.unhealthy,
    )


def _component(name: str, kind: str, staged: Staged, files: _AttemptFiles) -> ComponentEntry:
    tensor_files = staged.files.get(name, ())
    plain = (layout.tree_file(name), *(known.file.name for known in tensor_files))
    names = tuple(map(files.names.__getitem__, plain))
    return ComponentEntry(
        kind=kind,
        files=names,
        nbytes=sum(files.entries[name].nbytes for name in names),
        num_tensors=sum(len(known.file.specs) for known in tensor_files),
    )
