"""Preflight: checks before the first save whether saves would work, and reports every problem.

Tries the operations of a save on a few bytes instead of trusting what a file system claims to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.roots.commit import put_once
from holdfast.engine.sealed.sealing import sealed
from holdfast.engine.workers import Workers, gather
from holdfast.errors import (
    AlreadyExists,
    CommitConflict,
    CorruptData,
    DeadlineExceeded,
    FormatError,
    OutcomeUnknown,
    PreflightFailed,
    StoreError,
)
from holdfast.format import layout
from holdfast.store.base import FreeSpace, Store

_FIRST, _SECOND = b"first", b"second"
_PIECE = b"holdfast" * 512
# A file takes whole blocks of the file system, and a save has small records beside its files.
_ROUNDING_NBYTES = 4096
_RECORDS_PER_SAVE = 4
_RACERS, _RACES = 8, 6
"""Threads and rounds of the test of concurrent puts. Where puts are not atomic, three rounds of
four show more than one winner among eight threads."""
_RACE_TIMEOUT_S = 120.0


def preflight(
    store: Store, *, nbytes_per_save: int, saves_kept: int | None, num_files: int
) -> str | None:
    """Check free space, the store's operations and the encryption keys before a first save.

    `saves_kept` is how many checkpoints retention keeps at most, beside the one being written;
    None when there is no limit, and then space for one save is required. `num_files` is the
    number of files of a save. Creates the root if it is missing, and a scratch folder that is
    removed again; other contents of the root are ignored. Returns how large files will be written
    from now on, where the store chooses that by trying.

    Raises:
        PreflightFailed: lists every problem that was found.
    """
    problems = [
        *_lack_of_room(store, nbytes_per_save, saves_kept, num_files),
        *_refusals(store),
    ]
    if (sealing_store := sealed(store)) is not None:
        problems += (f"keys: {problem}" for problem in sealing_store.useless_keys())
    chosen = ""
    if not problems:
        try:
            chosen = store.probe()
        except StoreError as error:
            problems.append(f"trying how to write: {error}")
    if problems:
        raise PreflightFailed(problems)
    return chosen or None


def _lack_of_room(
    store: Store, nbytes_per_save: int, saves_kept: int | None, num_files: int
) -> Iterator[str]:
    try:
        free = store.free_space()
        if free == FreeSpace(None, None):
            return
        held_nbytes, held_files = _held(store)
    except StoreError as error:
        yield f"room: {error}"
        return
    kept = saves_kept or 0
    files = num_files + _RECORDS_PER_SAVE
    nbytes = nbytes_per_save + files * _ROUNDING_NBYTES
    saves = f"a save of {nbytes_per_save} bytes in {num_files} files, and {kept} kept beside it"
    for unit, one, held, left in (
        ("bytes", nbytes, held_nbytes, free.nbytes),
        ("inodes", files, held_files, free.inodes),
    ):
        needed = one + max(kept * one - held, 0)
        if left is not None and left < needed:
            yield f"room: {store.url} needs {needed} more {unit} ({saves}); {left} are free"


def _held(store: Store) -> tuple[int, int]:
    """Count the bytes and files of attempts that have not ended: retention will free them."""
    nbytes = num_files = 0
    for name in Catalog(store).open_attempts():
        with suppress(StoreError):  # a symbolic link: retention frees nothing there
            for info in store.list(f"{name}/"):
                nbytes += info.nbytes
                num_files += 1
    return nbytes, num_files


def _refusals(store: Store) -> Iterator[str]:
    """Try the operations of a save, a load and a deletion in a scratch folder; yield problems."""
    folder = layout.scratch_folder(os.urandom(8))
    try:
        store.make_folder(folder, exclusive=True)
    except StoreError as error:
        yield f"making a folder: {error}"
        return
    try:
        refusals = [*_register_refusals(store, f"{folder}/register")]
        if not refusals and not store.has_folders:
            refusals += _race_refusals(store, folder)
        yield from refusals
        yield from _file_refusals(store, f"{folder}/file")
    finally:
        left = _removal_refusal(store, folder)
    if left:
        yield left


def _register_refusals(store: Store, key: str) -> Iterator[str]:
    """Check that a put with `if_absent` fails on an existing key, and that a put replaces it."""
    try:
        put_once(store, key, _FIRST)
    except (StoreError, CommitConflict) as error:
        yield f"putting an object that is not there yet: {error}"
        return
    try:
        store.put(key, _SECOND, if_absent=True)
    except (AlreadyExists, OutcomeUnknown):
        yield from _read_refusals(store, key, _FIRST)
    except StoreError as error:
        yield f"putting over a taken key: refused with the wrong error: {error}"
    else:
        yield (
            f"{store.url} replaced an object that was to be put only if absent: "
            "two writers would destroy each other's checkpoints here"
        )
    try:
        store.put(key, _SECOND)
    except StoreError as error:
        yield f"replacing an object: {error}"
    else:
        yield from _read_refusals(store, key, _SECOND)


def _read_refusals(store: Store, key: str, expected: bytes) -> Iterator[str]:
    try:
        found = store.get(key)
    except (StoreError, FormatError) as error:
        yield f"reading back: {error}"
        return
    if found != expected:
        yield f"reading back: other bytes than were put: {store.url}"


def _race_refusals(store: Store, folder: str) -> Iterator[str]:
    """Check that of several concurrent puts with `if_absent` exactly one succeeds.
    It fails on services that first check a key and then write it."""
    workers = Workers(_RACERS, "holdfast-preflight")
    try:
        for number in range(_RACES):
            key = f"{folder}/race-{number}"
            jobs = [workers.submit(partial(_wins, store, key, racer)) for racer in range(_RACERS)]
            won = sum(gather(jobs, timeout_s=_RACE_TIMEOUT_S, what="preflight: puts at once"))
            if won != 1:
                yield (
                    f"{store.url}: {won} of {_RACERS} puts of one key at once, each only if it is "
                    "absent, were told that they won: two writers would destroy each other's "
                    "checkpoints here"
                )
                return
    except (StoreError, FormatError, DeadlineExceeded) as error:
        yield f"putting one object from several threads: {error}"
    finally:
        workers.close()


def _wins(store: Store, key: str, racer: int) -> bool:
    ours = b"%d" % racer
    try:
        put_once(store, key, ours)  # a lost reply may be the winner's
    except CommitConflict:
        return False
    return True


def _file_refusals(store: Store, key: str) -> Iterator[str]:
    """Check that a file can be written in pieces, in any order."""
    try:
        writer = store.create(key, 2 * len(_PIECE))
    except StoreError as error:
        yield f"creating a file: {error}"
        return
    try:
        writer.write(len(_PIECE), memoryview(_PIECE))
        writer.write(0, memoryview(_PIECE))
        writer.finish()
    except StoreError as error:
        writer.abort()
        yield f"writing a file: {error}"
        return
    refusals = [*_read_refusals(store, key, _PIECE + _PIECE)]
    yield from refusals or _range_refusals(store, key, _PIECE + _PIECE)


def _range_refusals(store: Store, key: str, expected: bytes) -> Iterator[str]:
    """Check that a range of a file is read exactly, and that reading past its end fails."""
    middle = len(expected) // 2 - 3
    try:
        if store.get(key, middle, 100) != expected[middle : middle + 100]:
            yield f"reading a part of a file: other bytes came than were asked for: {store.url}"
        store.get(key, len(expected) - 1, 2)
    except CorruptData:
        return
    except StoreError as error:
        yield f"reading a part of a file: {error}"
    else:
        yield f"reading past the end of a file: was not refused: {store.url}"


def _removal_refusal(store: Store, folder: str) -> str:
    try:
        store.delete(f"{folder}/")
        left = store.children(folder)
    except StoreError as error:
        return f"deleting: {error}"
    return f"deleting: {left[0]} of {folder} is still there: {store.url}" if left else ""
