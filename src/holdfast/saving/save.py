"""Writes and commits one staged state: blocks in parallel, then the index, then the manifest.

The order is invariant 2: every file durable and of its planned size before the manifest is put.
tests/crash/test_write_order.py checks it on the system calls of real saves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from holdfast.encryption.store import sealed
from holdfast.errors import (
    CommitConflict,
    HoldfastError,
    NotFound,
    NotShared,
    OutcomeUnknown,
    StoreError,
)
from holdfast.format import blocks, layout
from holdfast.format.codec import CodecName, Compression, Encoding
from holdfast.format.index import StoredBlocks, TensorTable, encode_index
from holdfast.format.index_parts import check_num_files, encode_in_parts
from holdfast.format.manifest import (
    Change,
    ComponentEntry,
    FileEntry,
    FrozenEntry,
    Manifest,
    RunPolicy,
    Timestamp,
    WatchedMetric,
)
from holdfast.format.objects import decode_frozen
from holdfast.format.records import Process
from holdfast.format.tensors import TensorFile, count_record_nbytes
from holdfast.ownership.claim import Claim, expect_claim
from holdfast.ownership.owner import Ownership
from holdfast.ownership.process import utc_text
from holdfast.results import SavePhase
from holdfast.root.commit import (
    SaveAttempt,
    abandon,
    commit,
    create_attempt,
    mark_aborted,
    remove_files,
)
from holdfast.saving.compression import Compressing
from holdfast.saving.links import Links, LinkSource
from holdfast.saving.participants import Gathered, OwnFile, OwnPart, SaveParticipant
from holdfast.saving.write_files import FileToWrite, write_files
from holdfast.staging.interfaces import BytesContent, Content, KnownFile, Staged
from holdfast.store.base import Store
from holdfast.threads.workers import Workers

if TYPE_CHECKING:
    from holdfast.saving.distributed import FollowingSave, LeadingSave
    from holdfast.staging.guard import Overlapped


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
    best: tuple[WatchedMetric, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    policy: RunPolicy | None = None
    timings: dict[str, float] = field(default_factory=dict)


class StagedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record that one rank has staged a save whole: the arenas next to it hold its tensor files."""

    process: Process
    root: str
    """Path of the root; empty if the save can be finished by its own process only."""
    part: OwnPart
    request: SaveRequest
    files: dict[str, tuple[str, ...]]
    """Names of the tensor files of each component."""
    trees: dict[str, bytes]
    kinds: dict[str, str]
    by_rank: tuple[str, ...]
    compressions: dict[str, Compression]


STAGED_RECORDS = msgspec.msgpack.Decoder(StagedRecord)


def digest_staged(staged: Staged, workers: Workers, *, timeout_s: float) -> dict[str, bytes]:
    """In the save thread: compute the block digests of every file except the index."""
    digests = {
        known.file.name: staged.compute_digests(known, workers, timeout_s)
        for known in staged.all_files
    }
    for component, tree in staged.trees.items():
        digests[layout.tree_file(component)] = blocks.digest_blocks(tree)
    return digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Store, threads and caches that all saves of a manager are written with."""

    store: Store
    owner: Ownership
    compressing: Compressing
    links: Links
    workers: Workers
    writers: Workers
    timeout_s: float


def write(
    tools: Tools,
    staged: Staged,
    request: SaveRequest,
    joint: SaveParticipant,
    *,
    overlapped: Overlapped | None = None,
) -> tuple[SaveAttempt, Manifest]:
    """Write a staged state as a new checkpoint, and commit it, together with the other ranks.

    Runs in the save thread, in the phases of `joint.progress`; other threads write the blocks.
    The end of an `overlapped` copy is awaited before the commit.
    The folder is added to the owner's `unclear` if a repeated put of the manifest may still arrive,
    also when the save fails.

    A failure before the put of the manifest removes the written files; after it, the outcome is
    known or the error says that it is not.
    """
    # Casts, because these classes need torch, and an import of foreign files does not.
    if not joint.leads:
        following = cast("FollowingSave", joint)
        return _write_as_follower(tools, staged, request, following, overlapped)
    leading = None if joint.world_size == 1 else cast("LeadingSave", joint)
    store, progress = tools.store, joint.progress
    progress.enter(SavePhase.FOLDER)
    if leading is not None:
        check_num_files(
            leading.num_files,
            is_compressed=tools.compressing.is_possible,
            is_encrypted=sealed(store) is not None,
        )
    expect_claim(store, request.claim)
    attempt = create_attempt(
        store,
        label=request.label,
        epoch=request.claim.epoch,
        nonce=request.claim.nonce,
        sequence=request.sequence,
    )
    began = time.perf_counter()
    try:
        files = AttemptFiles(attempt, staged, tools, joint)
        links = files.find_link_source(request)
        if leading is not None:
            leading.announce_folder(store, attempt, staged, links)
            _write_own(files, request, links, files.iterate_tensor_files(), overlapped)
            leading.copy_to_partner(store, attempt, files.own, files.held, tools.writers)
            progress.enter(SavePhase.GATHERING, attempt.folder)
            gathered = leading.collect_written(files.own, staged)
            files.add_gathered(gathered)
            files.write_attempt_files(files.trees(gathered.trees))
        else:
            contents = chain(files.trees(staged.trees), files.iterate_tensor_files())
            _write_own(files, request, links, contents, overlapped)
        write_index(files)
        request.timings["write_s"] = time.perf_counter() - began
        manifest = manifest_of(attempt, staged.kinds, request, files, joint.world_size)
        progress.enter(SavePhase.COMMITTING, attempt.folder)
        commit(store, attempt, manifest)
    except BaseException as error:
        clean_up(store, attempt, error, is_alone=joint.world_size == 1)
        if leading is not None:
            # After a conflict the register certainly holds something else.
            leading.is_in_doubt = attempt.put_sent and not isinstance(error, CommitConflict)
        if isinstance(error, OutcomeUnknown) and not attempt.put_sent:
            # Only a file's outcome is unknown; the checkpoint certainly did not commit.
            raise StoreError(str(error)) from error
        raise
    finally:
        if attempt.is_unclear:
            tools.owner.unclear.add(attempt.folder)
    if leading is not None:
        leading.succeed(store, attempt, manifest)
    files.record_commit(request, is_healthy=not manifest.unhealthy)
    return attempt, manifest


def _write_as_follower(
    tools: Tools,
    staged: Staged,
    request: SaveRequest,
    joint: FollowingSave,
    overlapped: Overlapped | None,
) -> tuple[SaveAttempt, Manifest]:
    """In the save thread: write this rank's files into the leader's folder; wait for the commit."""
    attempt = joint.hear_folder(tools.store)
    began = time.perf_counter()
    files = AttemptFiles(attempt, staged, tools, joint)
    try:
        _write_own(files, request, joint.links, files.iterate_tensor_files(), overlapped)
        if joint.is_apart:
            check_sizes(files)
        joint.copy_to_partner(tools.store, attempt, files.own, files.held, tools.writers)
    except HoldfastError as error:
        joint.raise_leader_failure(tools.store, attempt)
        joint.remove_host_files(tools.store, attempt, error)
        if joint.is_apart or not isinstance(error, NotFound):
            raise
        raise NotShared(
            f"{tools.store.url}/{attempt.folder}: the leader has made this folder, and this rank "
            f"does not see it: {error}. {NotShared.ADVICE}"
        ) from error
    request.timings["write_s"] = time.perf_counter() - began
    joint.post_files(files.own, staged)
    manifest = joint.wait_for_outcome(tools.store, attempt)
    files.record_commit(request, is_healthy=not manifest.unhealthy)
    return attempt, manifest


def _write_own(
    files: AttemptFiles,
    request: SaveRequest,
    links: LinkSource,
    contents: Iterable[FileToWrite],
    overlapped: Overlapped | None,
) -> None:
    """In the save thread: write this rank's files; wait until all is copied and durable."""
    files.tools.compressing.prepare_save()
    files.tools.links.prepare_links(links)
    files.write_attempt_files(contents)
    request.timings["stage_s"] += files.staged.transfer.waited_s
    files.progress.enter(SavePhase.COPYING)
    if overlapped is not None:
        overlapped.expect_copied(files.tools.timeout_s)


def clean_up(store: Store, attempt: SaveAttempt, error: BaseException, *, is_alone: bool) -> None:
    """Remove the files of a failed attempt; an error in that becomes the context of `error`.

    In the save thread. With several ranks the abort marker stays: others may still write into the
    folder, and gc removes what they leave.
    """
    if not isinstance(error, Exception):
        return  # the process is exiting: gc removes the folder later
    try:
        if is_alone:
            abandon(store, attempt)
        elif not attempt.put_sent and mark_aborted(
            store, attempt.folder, by="the leader", reason=str(error)[:500]
        ):
            remove_files(store, attempt.folder, whole=False)
    except HoldfastError as leftover:
        error.__context__ = leftover


class AttemptFiles:
    """The files of one save attempt, written or linked from an earlier checkpoint."""

    hosts: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Host → the files that its ranks have written to its own disk, if there are several disks."""
    elsewhere: Mapping[str, int] = MappingProxyType({})
    """Lengths, by key, of the files that are on the disks of other hosts."""

    def __init__(
        self, attempt: SaveAttempt, staged: Staged, tools: Tools, joint: SaveParticipant
    ) -> None:
        self.attempt = attempt
        self.staged = staged
        self.tools = tools
        self.progress = joint.progress
        self._sealed = sealed(tools.store)
        if self._sealed is not None:
            self._sealed.join_attempt(attempt.folder, joint.rank, joint.world_size)
        self.names: dict[str, str] = {}
        """Stored name of each file, by plain name."""
        self.entries: dict[str, FileEntry] = {}
        """Manifest entries of the durable files, by stored name."""
        self.stored: dict[str, StoredBlocks] = {}
        """Stored blocks of the compressed files, by stored name."""
        self.digests: dict[str, bytes] = {}
        self.own: list[OwnFile] = []
        self.of_others: set[str] = set()
        """Stored names of the files that other ranks have written."""
        self._tables: Mapping[str, TensorTable] | None = None
        """Where the tensors of all ranks are; None: in the files of this one."""
        self._writers: Mapping[str, Sequence[int]] | None = None
        """Files of each rank, by component; None: the index is one document."""
        self._sizes: dict[str, int] = {}
        """Length of each file by plain name, in the order of the manifest."""
        self._codecs: dict[str, CodecName] = {}
        self._frozen: dict[str, FrozenEntry | None] = {}
        """Parameters of each component that are recorded by digest."""
        self._nbytes_written = 0
        """Plain bytes of the files that were written, not linked."""

    def find_link_source(self, request: SaveRequest) -> LinkSource:
        """In the save thread: find the checkpoint whose unchanged files may be linked."""
        point = request.claim.resumed_from
        return self.tools.links.find_source(
            self.staged.kinds,
            is_healthy=not request.unhealthy,
            resumed_from=None if point is None else point.folder,
        )

    def trees(self, trees: Mapping[str, bytes]) -> Iterator[FileToWrite]:
        """Yield the files of the components' trees."""
        for component, tree in trees.items():
            self._frozen[component] = _count_frozen(tree, what=layout.tree_file(component))
            encoding = self.tools.compressing.of_tree(component, len(tree))
            yield self._file(layout.tree_file(component), BytesContent(tree), encoding)

    def iterate_tensor_files(self) -> Iterator[FileToWrite]:
        """In the save thread: yield the tensor files to write; link unchanged ones instead."""
        compressing = self.tools.compressing
        for known in self.staged.all_files:
            if not self._link_unchanged(known):
                encoding = compressing.of_tensors(known.file)
                content = self.staged.transfer.content(known)
                file = self._file(known.file.name, content, encoding)
                yield replace(file, observer=compressing.observer(known.file))
        self.staged.transfer.release_waiters()

    @property
    def held(self) -> dict[str, Content]:
        """The own tensor files whose bytes are in memory as they were written, by stored name."""
        known = {known.file.name: known for known in self.staged.all_files}
        plain = [file for file in self.own if file.stored is None and file.plain in known]
        return {file.name: self.staged.transfer.content(known[file.plain]) for file in plain}

    def _file(
        self, plain: str, content: Content | BytesContent, encoding: Encoding | None
    ) -> FileToWrite:
        name = plain if encoding is None else layout.stored_file(plain, encoding.compression.codec)
        self.names[plain], self._sizes[plain] = name, content.nbytes
        if encoding is not None:
            self._codecs[name] = encoding.compression.codec
        return FileToWrite(key=f"{self.attempt.folder}/{name}", content=content, encoding=encoding)

    def _link_unchanged(self, known: KnownFile) -> bool:
        name, nbytes = known.file.name, known.file.nbytes
        links = self.tools.links
        if not links.may_have(name, nbytes):
            return False
        if not self.staged.transfer.content(known).is_unchanged(self.tools.timeout_s):
            return False
        digests = self.staged.compute_digests(known, self.tools.workers, self.tools.timeout_s)
        entry = FileEntry(nbytes=nbytes, digest=blocks.file_digest(nbytes, digests))
        linked = links.link_earlier_file(name, self.attempt.folder, entry, digests)
        if linked is None:
            return False
        self.names[name], self._sizes[name] = linked.name, nbytes
        self._record_own_file(name, linked.name, linked.entry, digests, linked.stored)
        return True

    def write_attempt_files(self, files: Iterable[FileToWrite]) -> None:
        """Write files, wait until they are durable, and record them. In the save thread."""
        tools = self.tools
        found = write_files(
            tools.store,
            files,
            workers=tools.workers,
            writers=tools.writers,
            progress=self.progress,
            timeout_s=tools.timeout_s,
            throughput=tools.compressing.store,
            pieces=tools.compressing.pieces,
        )
        plain_names = {name: plain for plain, name in self.names.items()}
        for key, file in found.items():
            name = key.rpartition("/")[2]
            plain = plain_names[name]
            nbytes = self._sizes[plain]
            self._nbytes_written += nbytes
            digest = blocks.file_digest(nbytes, file.digests)
            stored = None if file.stored is None else file.stored.entry(self._codecs[name])
            entry = FileEntry(nbytes=nbytes, digest=digest, stored=stored)
            self._record_own_file(plain, name, entry, file.digests, file.stored)

    def _record_own_file(
        self, plain: str, name: str, entry: FileEntry, digests: bytes, stored: StoredBlocks | None
    ) -> None:
        how = (
            None
            if self._sealed is None
            else self._sealed.describe_sealing(self.attempt.folder, name)
        )
        self._record(
            OwnFile(plain=plain, name=name, entry=entry, digests=digests, stored=stored, sealed=how)
        )

    def _record(self, file: OwnFile) -> None:
        self.own.append(file)
        self.names[file.plain] = file.name
        self.entries[file.name] = file.entry
        self.digests[file.name] = file.digests
        if file.stored is not None:
            self.stored[file.name] = file.stored

    def add_gathered(self, gathered: Gathered) -> None:
        """Add what the other ranks have written."""
        own = {file.name for file in self.own}
        for file in gathered.files:
            if file.name not in own:
                self._record(file)
                self.of_others.add(file.name)
                if self._sealed is not None and file.sealed is not None:
                    self._sealed.include(self.attempt.folder, file.name, file.sealed)
        self._tables, self._writers = gathered.tables, gathered.writers
        self.hosts = gathered.hosts
        self.elsewhere = {
            f"{self.attempt.folder}/{name}": self.entries[name].stored_nbytes
            for name in gathered.elsewhere
        }

    def encode_index_documents(self) -> dict[str, bytes]:
        """Encode the checkpoint's index, which lists tensors and block digests: files by name.

        In the save thread.
        """
        plans: Mapping[str, Sequence[TensorFile] | TensorTable]
        if self._tables is None:
            plans = {
                component: [
                    msgspec.structs.replace(known.file, name=self.names[known.file.name])
                    for known in files
                ]
                for component, files in self.staged.files.items()
            }
        else:
            plans = tables = {n: table.stored_as(self.names) for n, table in self._tables.items()}
            if self._writers is not None:
                lengths = {name: entry.nbytes for name, entry in self.entries.items()}
                return encode_in_parts(
                    tables, self.digests, lengths, self._writers, stored=self.stored
                )
        return {layout.INDEX: encode_index(plans, self.digests, stored=self.stored)}

    @property
    def is_sharded(self) -> bool:
        """Whether a tensor is in several boxes, or a component has a state for each rank."""
        tables, by_rank = self._tables or {}, self.staged.by_rank
        return any(tables[name].boxes is not None or name in by_rank for name in tables)

    def make_entry(self, name: str, kind: str) -> ComponentEntry:
        """Make the manifest's entry of a component."""
        tree = layout.tree_file(name)
        own = sorted(plain for plain in self.names if layout.component_of(plain) == name)
        names = [self.names[plain] for plain in (tree, *(plain for plain in own if plain != tree))]
        table = None if self._tables is None else self._tables[name]
        tensor_files = self.staged.files.get(name, ())
        return ComponentEntry(
            kind=kind,
            files=tuple(names),
            nbytes=sum(self.entries[name].nbytes for name in names),
            num_tensors=(
                sum(len(known.file.specs) for known in tensor_files)
                if table is None
                else len(table)
            ),
            frozen=self._frozen.get(name),
        )

    def record_commit(self, request: SaveRequest, *, is_healthy: bool) -> None:
        """In the save thread: remember the committed files for links, and the speed of writing."""
        own = [file for file in self.own if file.name not in self.of_others]
        kinds, links = self.staged.kinds, self.tools.links
        links.record_linkable_files(self.attempt, own, kinds, is_healthy=is_healthy)
        self.tools.compressing.record_commit(self._nbytes_written, request.timings["write_s"])


def _count_frozen(tree: bytes, what: str) -> FrozenEntry | None:
    """Count the parameters that a component's tree records by digest."""
    recorded = decode_frozen(tree, what=what)
    nbytes = sum(count_record_nbytes(text, what=what) for text in recorded.values())
    return FrozenEntry(num_tensors=len(recorded), nbytes=nbytes) if recorded else None


def write_index(files: AttemptFiles) -> None:
    """In the save thread: write the index of all files and its parts, and compare the sizes."""
    folder, store = files.attempt.folder, files.tools.store
    documents = files.encode_index_documents()
    files.progress.enter(SavePhase.WRITING, f"{folder}/{layout.INDEX}")
    for name, data in documents.items():
        store.put(f"{folder}/{name}", data)
        digest = blocks.file_digest(len(data), blocks.digest_blocks(data))
        files.entries[name] = FileEntry(nbytes=len(data), digest=digest)
    with suppress(StoreError):  # uploads whose reply was lost; gc removes the rest
        store.abort_uploads(folder)
    files.progress.enter(SavePhase.CHECKING, folder)
    check_sizes(files)


def check_sizes(files: AttemptFiles) -> None:
    """In the save thread: compare the sizes of all files that are on this host's disk."""
    store, folder = files.tools.store, files.attempt.folder
    sizes = {**files.elsewhere, **{one.key: one.nbytes for one in store.list(f"{folder}/")}}
    for name, entry in files.entries.items():
        nbytes = sizes.get(f"{folder}/{name}")
        if nbytes is None and name in files.of_others:
            raise NotShared(
                f"{store.url}/{folder}/{name}: another rank has written this file, and the "
                f"leader does not see it. {NotShared.ADVICE}"
            )
        if nbytes != entry.stored_nbytes:
            raise StoreError(
                f"{store.url}/{folder}/{name}: {entry.stored_nbytes} bytes were written "
                f"and the store now has {nbytes}; this save is not committed"
            )


def manifest_of(
    attempt: SaveAttempt,
    kinds: Mapping[str, str],
    request: SaveRequest,
    files: AttemptFiles,
    world_size: int,
) -> Manifest:
    """In the save thread: make the manifest of a save whose files and index are written."""
    components = {name: files.make_entry(name, kind) for name, kind in kinds.items()}
    listed = [name for entry in components.values() for name in entry.files]
    listed += filter(layout.is_index_name, files.entries)
    return Manifest(
        save_id=attempt.save_id,
        label=request.label,
        epoch=request.claim.epoch,
        sequence=request.sequence,
        parent=request.claim.resumed_from,
        timestamp=request.timestamp,
        created=utc_text(),
        save_class=request.save_class,
        reason=request.reason,
        tags=request.tags,
        metrics=request.metrics,
        world_size=world_size,
        components=components,
        block_nbytes=layout.BLOCK_NBYTES,
        files={name: files.entries[name] for name in listed},
        numerics=request.numerics,
        environment=request.environment,
        timings=request.timings,
        writer=request.claim.nonce,
        savers=request.savers,
        left_out=request.left_out,
        unhealthy=request.unhealthy,
        sharded=files.is_sharded,
        best=request.best,
        config=request.config,
        changes=request.changes,
        policy=request.policy,
        hosts={**files.hosts},
    )
