"""Writing one staged state: blocks in parallel, then the index, then the commit.

The order is invariant 2: every file durable and of its planned size before the manifest is put.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from holdfast.engine.claim import Claim, expect_claim
from holdfast.engine.commit import Attempt, abandon, begin, commit
from holdfast.engine.known import KnownFile
from holdfast.engine.links import Links
from holdfast.engine.process import utc_now
from holdfast.engine.staged import Staged
from holdfast.engine.workers import Workers
from holdfast.engine.writing import Document, FileToWrite, Phase, write_files
from holdfast.errors import HoldfastError, OutcomeUnknown, StoreError
from holdfast.format import blocks, layout
from holdfast.format.index import encode_index
from holdfast.format.manifest import (
    ComponentEntry,
    FileEntry,
    Manifest,
    Timestamp,
)
from holdfast.store.base import Store, abort_uploads


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a save records beside the state: everything but bytes and identity."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files of an attempt that are durable: their entries and block digests."""

    entries: Mapping[str, FileEntry]
    digests: Mapping[str, bytes]


def digest_staged(staged: Staged, workers: Workers, *, timeout_s: float) -> dict[str, bytes]:
    """Block digests of every file that a save of `staged` would write, but the index."""
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
    links: Links,
    workers: Workers,
    writers: Workers,
    phase: Phase,
    timeout_s: float,
    unclear: set[str],
    expect_staged: Callable[[], None] = lambda: None,
) -> tuple[Attempt, Manifest]:
    """Write and commit one checkpoint.

    `expect_staged` is called before the commit, and raises unless the copy is that of one state.
    The folder is added to `unclear` when a copy of the manifest's put may still arrive, also where
    the save fails.

    A failure before the manifest put removes what was written; after it, the outcome is known or
    the error says that it is not.

    Raises:
        Superseded, CommitConflict, OutcomeUnknown: as `engine.commit.commit`.
        StoreError, DeadlineExceeded: a file could not be written.
    """
    phase.text = "making the folder"
    expect_claim(store, request.claim)
    attempt = begin(
        store, label=request.label, epoch=request.claim.epoch, sequence=request.sequence
    )
    try:
        began = time.perf_counter()
        written = _write_files(store, attempt, staged, links, workers, writers, phase, timeout_s)
        request.timings["write_s"] = time.perf_counter() - began
        request.timings["stage_s"] += staged.now_s
        phase.text = "waiting for the copy"
        expect_staged()
        manifest = _manifest(attempt, staged, request, written)
        phase.text = f"committing {attempt.folder}"
        commit(store, attempt, manifest)
    except BaseException as error:
        _clean_up(store, attempt, error)
        if isinstance(error, OutcomeUnknown) and not attempt.put_sent:
            # Unclear is only what became of a file; the checkpoint certainly did not commit.
            raise StoreError(str(error)) from error
        raise
    finally:
        if attempt.is_unclear:
            unclear.add(attempt.folder)
    return attempt, manifest


def _clean_up(store: Store, attempt: Attempt, error: BaseException) -> None:
    """Give the space back; a failure here must not hide why the save failed."""
    if not isinstance(error, Exception):
        return  # the process is being taken down: gc finds the folder
    try:
        abandon(store, attempt)
    except HoldfastError as leftover:
        error.__context__ = leftover


def _write_files(
    store: Store,
    attempt: Attempt,
    staged: Staged,
    links: Links,
    workers: Workers,
    writers: Workers,
    phase: Phase,
    timeout_s: float,
) -> Written:
    links.begin()
    files = _files(attempt, staged, links, workers, timeout_s)
    found = write_files(
        store, files, workers=workers, writers=writers, phase=phase, timeout_s=timeout_s
    )
    digests = {key.rpartition("/")[2]: digest for key, digest in found.items()}
    for known in staged.all_files:
        if known.file.name not in digests:  # it was linked
            digests[known.file.name] = known.all_digests()
    nbytes = staged.sizes
    plans = {name: [known.file for known in files] for name, files in staged.files.items()}
    index = encode_index(plans, digests)
    phase.text = f"writing {attempt.folder}/{layout.INDEX}"
    store.put(f"{attempt.folder}/{layout.INDEX}", index)
    digests[layout.INDEX], nbytes[layout.INDEX] = blocks.digest_blocks(index), len(index)
    with suppress(StoreError):  # a try whose reply was lost; gc finds what this leaves
        abort_uploads(store, attempt.folder)
    phase.text = f"checking sizes in {attempt.folder}"
    _check_sizes(store, attempt, nbytes)
    entries = {
        name: FileEntry(nbytes=nbytes[name], digest=blocks.file_digest(nbytes[name], digests[name]))
        for name in nbytes
    }
    return Written(entries=entries, digests=digests)


def _files(
    attempt: Attempt, staged: Staged, links: Links, workers: Workers, timeout_s: float
) -> Iterator[FileToWrite]:
    """What is to be written; a file of which not one byte has changed is shared instead."""
    for component, tree in staged.trees.items():
        key = f"{attempt.folder}/{layout.tree_file(component)}"
        yield FileToWrite(key=key, content=Document(tree))
    for known in staged.all_files:
        if not _link(attempt, staged, known, links, workers, timeout_s):
            key = f"{attempt.folder}/{known.file.name}"
            yield FileToWrite(key=key, content=staged.content(known, timeout_s))
    staged.finish()


def _link(
    attempt: Attempt,
    staged: Staged,
    known: KnownFile,
    links: Links,
    workers: Workers,
    timeout_s: float,
) -> bool:
    name, nbytes = known.file.name, known.file.nbytes
    if not links.may_have(name, nbytes) or not staged.is_unchanged(known, timeout_s):
        return False
    digests = staged.digest(known, workers, timeout_s)
    entry = FileEntry(nbytes=nbytes, digest=blocks.file_digest(nbytes, digests))
    return links.link(name, attempt.folder, entry, digests)


def _check_sizes(store: Store, attempt: Attempt, nbytes: Mapping[str, int]) -> None:
    found = {info.key: info.nbytes for info in store.list(f"{attempt.folder}/")}
    for name, planned in nbytes.items():
        there = found.get(f"{attempt.folder}/{name}")
        if there != planned:
            raise StoreError(
                f"{store.url}/{attempt.folder}/{name}: {planned} bytes were written and the "
                f"store now has {there}; this save is not committed"
            )


def _manifest(attempt: Attempt, staged: Staged, request: SaveRequest, written: Written) -> Manifest:
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
            name: _component(name, kind, staged, written) for name, kind in staged.kinds.items()
        },
        block_nbytes=layout.BLOCK_NBYTES,
        files=written.entries,
        numerics=request.numerics,
        environment=request.environment,
        timings=request.timings,
        savers=request.savers,
        left_out=request.left_out,
        unhealthy=request.unhealthy,
    )


def _component(name: str, kind: str, staged: Staged, written: Written) -> ComponentEntry:
    tensor_files = staged.files.get(name, ())
    files = (layout.tree_file(name), *(known.file.name for known in tensor_files))
    return ComponentEntry(
        kind=kind,
        files=files,
        nbytes=sum(written.entries[file].nbytes for file in files),
        num_tensors=sum(len(known.file.specs) for known in tensor_files),
    )
