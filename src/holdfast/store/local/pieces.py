"""Cache of a remote store's bytes, in a folder that the processes of one host share.

A copy holds one *piece* of an object. One process at a time fetches a piece, under a lock that the
kernel releases when that process dies, and the copy gets its name when it is complete. This module
handles pieces and their lengths, not stores or what the bytes mean. Nothing is synced, so the
caller checks each copy that it reads, and calls `remove_copies` on a wrong one.

The cache is never required: any failure here ends in a plain fetch.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.errors import CorruptData
from holdfast.events import logger
from holdfast.store.base import Seen
from holdfast.store.local import reads
from holdfast.store.local.folders import NOFOLLOW, READ, write_all
from holdfast.store.local.reads import OpenFile
from holdfast.system import (
    CLOSED_ON_EXEC,
    at_fork,
    boot_id,
    bytes_at,
    try_lock,
    unlock,
    user_number,
)

Fetch = Callable[[int, memoryview, Seen], None]
"""Callback that fills the memory from a byte of the object on, and reports each filled part."""

PIECE_NBYTES = 8 * 1024 * 1024
"""Most bytes of one piece."""

_PAGE = 4096
_DRAFT = ".part"
_COPY = re.compile(r"[0-9a-f]{16}/(?:[^/]+/){1,2}[0-9]{8}(\.part)?", re.ASCII)
_WRITE = os.O_RDWR | NOFOLLOW | CLOSED_ON_EXEC
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_COUNT_WAIT_S = 10.0
"""Longest wait for another process that counts copies or removes old ones."""
_CLEARED_SHARE = 10
"""Each removal of old copies frees a tenth of the limit, as listing them all takes longer than
removing one."""

_forking = threading.RLock()
"""Lock held during forks, and while a descriptor that may have a file lock is opened or closed."""
_lockable: set[int] = set()
"""Open descriptors that may have a file lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of an object: its range of bytes, and the path of its copy in the cache."""

    place: str
    """Path of the copy inside the folder: 16 hex digits, 1 or 2 names, a number of 8 digits."""
    start: int
    """First byte of the piece in the object."""
    nbytes: int
    """Length of the piece, at most `PIECE_NBYTES`."""


class LocalPieces:
    """Cache of pieces in a folder. Threads and processes may share it, and may crash.

    Args:
        folder: where the copies are; made with the first one. Other files in it are kept.
        max_nbytes: the most that the copies may take together, in bytes on the disk.
        wait_s: how long one process waits for another that fetches the same piece.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_nbytes: int, wait_s: float) -> None:
        # A subfolder for this user, in which only what has the path of a copy is removed.
        name = f"holdfast-cache-{user_number()}"
        self._folder = os.path.join(os.path.abspath(os.fspath(folder)), name)
        self._max_nbytes = max_nbytes
        self._wait_s = wait_s
        self._keeps_copies = True

    def read_piece(
        self, piece: Piece, start: int, memory: memoryview, fetch: Fetch, *, seen: Seen
    ) -> None:
        """Fill `memory`, which lies in the piece, from a copy, or one that `fetch` makes."""
        done = self._read_copy(piece, start, memory, seen)
        end, pause_s = time.monotonic() + self._wait_s, _FIRST_PAUSE_S
        while not done:
            with self._locked_draft(piece) as draft:
                # The copy may be complete by now. A draft without an owner is now ours.
                done = self._read_copy(piece, start, memory, seen)
                if draft is not None and not done:
                    self._fetch(piece, start, memory, fetch, seen, draft)
                    return
            if not self._keeps_copies or time.monotonic() > end:
                break
            if not done:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if done < len(memory):
            fetch(start + done, memory[done:], seen)

    def remove_copies(self, place: str) -> None:
        """Remove the copies at and below the path `place` in the folder; errors are ignored."""
        if _COPY.fullmatch(place):
            path = self._place_path(place)
            with suppress(OSError):
                (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
            return
        for path, _ in self._iterate_copies(place):
            with suppress(OSError):
                os.unlink(path)
            self._remove_empty(os.path.dirname(path))

    def _place_path(self, place: str) -> str:
        return os.path.join(self._folder, place)

    def _read_copy(self, piece: Piece, start: int, memory: memoryview, seen: Seen) -> int:
        """Fill `memory` from a copy; return the number of filled bytes, 0 if there is none."""
        path = self._place_path(piece.place)
        done = 0

        def count(part: memoryview) -> None:
            nonlocal done
            seen(part)
            done += len(part)

        try:
            if not self._is_usable():
                return 0
            file = OpenFile(os.open(path, READ))
        except OSError:
            return 0
        try:
            with suppress(OSError):
                os.utime(file.fd)  # so that it is among the last to be removed
            reads.fill_from_file(
                file, memory, start - piece.start, what=path, seen=count, direct=True, afresh=False
            )
        except (OSError, CorruptData):
            self.remove_copies(piece.place)  # the missing bytes are read from the store
        finally:
            file.close()
        return done

    def _fetch(
        self,
        piece: Piece,
        start: int,
        memory: memoryview,
        fetch: Fetch,
        seen: Seen,
        draft: _PieceFile,
    ) -> None:
        whole = memory
        if len(memory) == piece.nbytes:
            fetch(start, memory, seen)
        else:
            whole = memoryview(bytearray(piece.nbytes))
            fetch(piece.start, whole, lambda _: None)
            first = start - piece.start
            memory[:] = whole[first : first + len(memory)]
            seen(memory)
        self._keep(piece, whole, draft)

    def _keep(self, piece: Piece, whole: memoryview, draft: _PieceFile) -> None:
        try:
            draft.write_whole_piece(whole)
            with self._count_copy(piece.nbytes) as has_room:
                if has_room:
                    draft.rename(self._place_path(piece.place))
        except FileNotFoundError:
            pass  # another process emptied the folder meanwhile
        except OSError as error:
            self._stop_keeping(error)

    # Drafts

    @contextmanager
    def _locked_draft(self, piece: Piece) -> Iterator[_PieceFile | None]:
        """Create and lock a piece's draft; None if another process has it or none is kept."""
        draft = None
        try:
            if self._keeps_copies and self._is_usable():
                draft = _lock_draft(self._place_path(piece.place) + _DRAFT)
        except OSError as error:
            self._stop_keeping(error)
        try:
            yield draft
        finally:
            if draft is not None:
                draft.discard_draft()

    def _is_usable(self) -> bool:
        """Whether the folder exists, or can be made, and belongs to this user alone."""
        # Checked each time: it may be removed at any time, and made again by another user.
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            found = os.lstat(self._folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_number():
                raise PermissionError("it belongs to another user")
        except OSError as error:
            self._stop_keeping(error)
            return False
        return True

    def _stop_keeping(self, error: OSError) -> None:
        if self._keeps_copies:
            self._keeps_copies = False
            logger.warning(
                "%s: no more copies are kept here; files without a copy are read from their "
                "source: %s",
                self._folder,
                error,
            )

    # Space

    @contextmanager
    def _count_copy(self, nbytes: int) -> Iterator[bool]:
        """Count a new copy under the lock; yield whether it fits after removing the oldest copies.

        Copies get their names only within this block, so that the count misses none. They are
        counted first, so that a process that dies in between leaves a count that is too high.
        """
        needed = _on_disk(nbytes)
        fd = _open_lockable(self._place_path("count"), _WRITE | os.O_CREAT)
        try:
            end = time.monotonic() + _COUNT_WAIT_S
            while not try_lock(fd):
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has counted for {_COUNT_WAIT_S:.0f} s")
                time.sleep(_FIRST_PAUSE_S)
            count = _parse_count(bytes_at(fd, 100, 0))
            if count is None or count + needed > self._max_nbytes:
                count = self._clear(self._max_nbytes - needed)
            has_room = count + needed <= self._max_nbytes
            write_all(
                fd, memoryview(b"%020d %s" % (count + needed * has_room, boot_id().encode())), 0
            )
            yield has_room
        finally:
            _unlock(fd)

    def _clear(self, limit: int) -> int:
        """Remove the least recently used copies down to `limit` bytes; return the bytes kept."""
        copies, total = [], 0
        for path, found in self._iterate_copies():
            if path.endswith(_DRAFT):
                _remove_stale_draft(path)
            else:
                copies.append((found.st_mtime_ns, path, _on_disk(found.st_size)))
                total += copies[-1][2]
        if total <= limit:
            return total
        for _, path, nbytes in sorted(copies):
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= nbytes
            self._remove_empty(os.path.dirname(path))
            if total <= limit - self._max_nbytes // _CLEARED_SHARE:
                break
        return total

    def _iterate_copies(self, place: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Yield path and status of every copy and every draft below `place`."""
        for folder, _, names in os.walk(self._place_path(place)):
            for name in names:
                path = os.path.join(folder, name)
                if not _COPY.fullmatch(os.path.relpath(path, self._folder)):
                    continue
                with suppress(FileNotFoundError):
                    found = os.lstat(path)
                    if stat.S_ISREG(found.st_mode) and found.st_size <= PIECE_NBYTES:
                        yield path, found

    def _remove_empty(self, folder: str) -> None:
        with suppress(OSError):
            while folder != self._folder:
                os.rmdir(folder)
                folder = os.path.dirname(folder)


class _PieceFile:
    """Locked draft of a copy. Only the lock's owner may write, rename or remove it."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def write_whole_piece(self, data: memoryview) -> None:
        """Write the bytes of the whole piece."""
        write_all(self._fd, data, 0)

    def rename(self, path: str) -> None:
        """Rename the draft to the copy's path."""
        os.rename(self._path, path)
        self._path = ""

    def discard_draft(self) -> None:
        """Remove the draft unless it was renamed, and release the lock."""
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)
        _unlock(self._fd)


def _lock_draft(path: str) -> _PieceFile | None:
    """Create and lock the draft at a path; None if another process has it, or on a race."""
    try:
        fd = _open_lockable(path, _WRITE | os.O_CREAT)
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return None  # the caller tries again: an empty folder may be removed at any time
    try:
        if try_lock(fd) and _is_at(fd, path):
            os.ftruncate(fd, 0)  # left by a process that died
            draft, fd = _PieceFile(fd, path), -1
            return draft
        return None
    finally:
        if fd >= 0:
            _unlock(fd)


def _remove_stale_draft(path: str) -> None:
    """Remove a draft whose process has died; no-op if it is locked."""
    try:
        fd = _open_lockable(path, _WRITE)
    except FileNotFoundError:
        return
    try:
        if try_lock(fd) and _is_at(fd, path):
            os.unlink(path)
    finally:
        _unlock(fd)


def _open_lockable(path: str, flags: int) -> int:
    """Open a descriptor that may be locked; `_unlock` closes it."""
    with _forking:
        fd = os.open(path, flags, 0o600)
        _lockable.add(fd)
    return fd


def _unlock(fd: int) -> None:
    with _forking:
        if fd not in _lockable:
            return  # it belongs to the process that this one was forked from
        _lockable.discard(fd)
        try:
            unlock(fd)  # children forked by other than Python hold it too
        finally:
            os.close(fd)


def _close_inherited_locks() -> None:
    """Close inherited lock descriptors in a forked child, or it would hold its parent's locks."""
    while _lockable:
        os.close(_lockable.pop())
    _forking.release()


at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_inherited_locks
)


def _is_at(fd: int, path: str) -> bool:
    """Whether a path is still that of an open file; a lock on a renamed file is useless."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _parse_count(text: bytes) -> int | None:
    """Parse the count; None if of an earlier boot, as a power failure may leave an old one."""
    number, _, boot = text.partition(b" ")
    return (
        int(number) if re.fullmatch(rb"[0-9]{20}", number) and boot == boot_id().encode() else None
    )
