"""Writers of remote objects: they take pieces from threads, and upload them.

Pieces are copied to bounded memory as they come, so that callers can reuse theirs at once. They
are sent in order, in parts of a size that suits the network. All uploads of a store run in one
event loop on one thread.
"""

from __future__ import annotations

import asyncio
import enum
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from holdfast.errors import HoldfastError, StoreError, TransientStoreError
from holdfast.store.base import BlockWriter, expect_inside, final_nbytes, flatten_buffer
from holdfast.store.remote.api import Api, Patience, RateLimit, is_own_process
from holdfast.store.remote.opening import RemoteOptions
from holdfast.system import private_memory

PART_NBYTES = 16 * 1024 * 1024
"""Objects up to this length are sent in one request, longer ones in parts of it."""
COPY_NBYTES = 8 * 1024 * 1024
"""Most bytes of one copy in memory; none crosses a multiple of it. If many objects are begun at
once it is also the length of parts: then each copy is sent by itself, and no object keeps memory
that others wait for."""
_MAX_PARTS = 10_000
_POLL_S = 1.0
_ABORT_S = 10.0


class UploadResources:
    """Event loop and memory for copies, shared by all uploads of one store."""

    def __init__(self, api: Api, options: RemoteOptions, pace: RateLimit) -> None:
        self.api = api
        self.pace = pace
        # Reentrant: a finalizer may return memory at any point of the program.
        self.changed = threading.Condition(threading.RLock())
        self._num_buffers = options.concurrency * PART_NBYTES // COPY_NBYTES + 2
        self._num_taken = 0
        self._free: list[mmap.mmap] = []
        self._most_in_large_parts = max(1, options.concurrency // 2)
        self._begun: weakref.WeakSet[MultipartPut] = weakref.WeakSet()
        self._sending: set[MultipartPut] = set()
        self._admitted: weakref.ref[MultipartPut] | None = None
        self._patience_s = (
            options.timeout_s + options.retry_s + pace.compute_seconds(2 * COPY_NBYTES)
        )
        self._progress_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    def create_writer(self, key: str, nbytes: int, *, at_most: bool) -> BlockWriter:
        """Return a writer of a new object: one request, or a multipart upload if it is long."""
        self._started()
        writer = SinglePut if nbytes <= PART_NBYTES else MultipartPut
        return writer(self, key, nbytes, at_most=at_most)

    def start_upload(self, upload: Coroutine[Any, Any, None]) -> Future[None]:
        """Start an upload's coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(upload, self._started())

    def schedule_call(self, callback: Callable[[], None]) -> None:
        """Schedule a callback in the event loop. From any thread."""
        self._started().call_soon_threadsafe(callback)

    def has_room(self) -> bool:
        """Whether there is memory for a copy; the caller holds `changed`."""
        return self._num_taken < self._num_buffers

    def admits(self) -> bool:
        """Whether the piece that an object has to send next may exceed the memory limit.

        One at a time may, until it is passed to the upload or its object has ended. Besides it, an
        object with long parts may keep an incomplete one. The caller holds `changed`.
        """
        admitted = self._admitted() if self._admitted is not None else None
        return not self.is_sending() and (admitted is None or admitted.has_upload_ended())

    def admit(self, writer: MultipartPut | None) -> None:
        """Record whose piece exceeds the memory limit; None: it was passed to the upload."""
        self._admitted = None if writer is None else weakref.ref(writer)

    def is_admitted(self, writer: MultipartPut) -> bool:
        """Whether the piece that exceeds the memory limit is one of this object's."""
        return self._admitted is not None and self._admitted() is writer

    def register_object(self, writer: MultipartPut) -> int:
        """Register an object at its first piece; return its part length. Caller holds `changed`."""
        others = sum(not other.has_come() for other in self._begun)
        self._begun.add(writer)
        return PART_NBYTES if others < self._most_in_large_parts else COPY_NBYTES

    def record_sending(self, writer: MultipartPut, *, is_sending: bool) -> None:
        """Record whether an object is sending; the caller holds `changed`."""
        (self._sending.add if is_sending else self._sending.discard)(writer)

    def is_sending(self) -> bool:
        """Whether any object is sending; the caller holds `changed`."""
        return bool(self._sending)

    def acquire_copy_memory(self) -> mmap.mmap:
        """Take memory for a copy, of `COPY_NBYTES`; the caller holds `changed`."""
        # Mapped in huge pages, and reused: that costs few page faults, and it is freed as a whole.
        buffer = self._free.pop() if self._free else private_memory(COPY_NBYTES)
        self._num_taken += 1
        return buffer

    def release_copy_memory(self, buffer: mmap.mmap) -> None:
        """Return memory whose bytes were sent or are not needed any more. From any thread."""
        with self.changed:
            self._num_taken -= 1
            self._free.append(buffer)
            if not self._num_taken:
                self._free.clear()
            self.progress()

    def progress(self) -> None:
        """Record progress, and wake all waiting threads; the caller holds `changed`."""
        self._progress_at = time.monotonic()
        self.changed.notify_all()

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until `is_done()`, with `changed` held; raises if there is no progress."""
        self._progress_at = max(self._progress_at, time.monotonic())
        while not is_done():
            self.changed.wait(_POLL_S)
            self._expect_progress(what)

    def wait_for_upload(self, upload: Future[None], what: str) -> None:
        """Wait for the end of an upload; raises its error, or if there is no progress."""
        with self.changed:
            self._progress_at = time.monotonic()
        while True:
            try:
                return upload.result(timeout=_POLL_S)
            except FutureTimeout:
                if upload.done():
                    raise  # an error of the upload itself
                self._expect_progress(what)

    def _expect_progress(self, what: str) -> None:
        silent_s = time.monotonic() - self._progress_at
        if silent_s > self._patience_s:
            raise TransientStoreError(f"{what}: no byte was sent for {silent_s:.0f} s")

    def _started(self) -> asyncio.AbstractEventLoop:
        # Once, and early: the interpreter starts no thread once it has begun to exit.
        with self.changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_event_loop, args=(self._loop,), name="holdfast-uploads", daemon=True
                ).start()
                stop = weakref.finalize(self, _stop_event_loop, self._loop)
                stop.atexit = False  # a save may still be on its way
            return self._loop


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between views of bytes of the same length, while other threads run.

    An assignment would block them, for long with new memory: the first touch of a page takes longer
    than its copy.
    """
    import numpy as np  # here, because commands that read documents do without

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _run_event_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop_event_loop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


class _UploadState(enum.Enum):
    WRITING = enum.auto()
    FINISHED = enum.auto()
    ABORTED = enum.auto()


class _Writer:
    """Base of both writers: their common checks and state."""

    def __init__(self, uploads: UploadResources, key: str, nbytes: int, *, at_most: bool) -> None:
        self._uploads = uploads
        self._key = key
        self._nbytes = nbytes
        """Most bytes that the object may have."""
        self._length = None if at_most else nbytes
        """Length of the object; None until `finish` gives it."""
        self._written_nbytes = 0
        self._state = _UploadState.WRITING

    def _checked(self, start: int, data: memoryview) -> memoryview:
        piece = flatten_buffer(data)
        expect_inside(self._key, start, len(piece), self._nbytes)
        return piece

    def _check_open(self, operation: str) -> None:
        if self._state is not _UploadState.WRITING:
            raise StoreError(
                f"{operation} {self._key}: the write has already been finished or aborted"
            )

    def _check_complete(self, nbytes: int | None) -> None:
        self._check_open("finish")
        is_open_end = self._length is None
        length = final_nbytes(nbytes, self._nbytes, at_most=is_open_end, what=self._key)
        if self._written_nbytes != length:
            raise StoreError(
                f"finish {self._key}: {length - self._written_nbytes} of {length} bytes were not "
                "written"
            )
        self._length = length

    def _raise_unless_stored(self, error: Exception) -> None:
        """Raise a failed upload's error unless the object exists: no one else writes this key."""
        api = self._uploads.api
        with suppress(HoldfastError):
            if self._length is not None and api.has(self._key, self._length):
                return
        if isinstance(error, HoldfastError):
            raise error
        raise api.translate_error("create", self._key, error) from error


class SinglePut(_Writer):
    """Writer of a short object: gathers the pieces, and sends them in one request."""

    def __init__(self, uploads: UploadResources, key: str, nbytes: int, *, at_most: bool) -> None:
        super().__init__(uploads, key, nbytes, at_most=at_most)
        self._lock = threading.Lock()
        self._gathered: memoryview | None = None
        self._was_sent = self._is_stored = False

    def write(self, start: int, data: memoryview) -> None:
        """Copy a piece; the last one sends the object, if its length is known by then."""
        piece = self._checked(start, data)
        with self._lock:
            self._check_open("write")
            self._written_nbytes += len(piece)
            if len(piece) == self._length:
                whole = piece
            else:
                if self._gathered is None:
                    self._gathered = memoryview(bytearray(self._nbytes))
                self._gathered[start : start + len(piece)] = piece
                whole = self._gathered
            if self._written_nbytes != self._length or not self._nbytes:
                return
            self._was_sent = True
        self._send(whole)
        self._gathered = None
        self._is_stored = True

    def finish(self, nbytes: int | None = None) -> None:
        """Send the object in one request, unless the last `write` has done that."""
        with self._lock:
            self._check_complete(nbytes)
            if self._was_sent and not self._is_stored:
                raise StoreError(f"finish {self._key}: it was not stored; an earlier write failed")
            self._state = _UploadState.FINISHED
        if not self._was_sent:  # no write knew that it was the last
            gathered = memoryview(b"") if self._gathered is None else self._gathered
            self._send(gathered[: self._length])
            self._gathered = None

    def abort(self) -> None:
        """Discard the pieces, and delete the object if it was sent already."""
        with self._lock:
            if self._state is not _UploadState.WRITING:
                return
            self._state = _UploadState.ABORTED
            self._gathered = None
        if self._was_sent:
            self._uploads.api.delete_quietly(self._key)

    def _send(self, whole: memoryview) -> None:
        try:
            self._uploads.api.put_object(self._key, whole)
        except Exception as error:  # noqa: BLE001 - raised again unless the object exists
            self._raise_unless_stored(error)


class _UploadAborted(Exception):
    """Raised inside an upload to abort it."""


class MultipartPut(_Writer):
    """Writer of a long object: sends its bytes in order, while later ones are being written."""

    def __init__(self, uploads: UploadResources, key: str, nbytes: int, *, at_most: bool) -> None:
        super().__init__(uploads, key, nbytes, at_most=at_most)
        self._pieces: dict[int, memoryview] = {}
        """Copies that are still to be sent, by first byte."""
        self._position = 0
        """All bytes before this one were passed to the upload."""
        self._in_flight_nbytes = 0
        """Bytes that were passed to the upload and are not sent yet."""
        self._part_nbytes = PART_NBYTES
        self._upload: Future[None] | None = None
        self._arrived = asyncio.Event()
        self._aborted = asyncio.Event()

    def write(self, start: int, data: memoryview) -> None:
        """Copy a piece, which is uploaded in the background; waits while the memory is full."""
        piece = self._checked(start, data)
        self._uploads.api.expect_own_process()
        self._check_open("write")
        while piece:
            length = COPY_NBYTES - start % COPY_NBYTES
            self._copy_for_upload(start, piece[:length])
            start, piece = start + length, piece[length:]

    def finish(self, nbytes: int | None = None) -> None:
        """Wait for the upload to end; after a failure, check whether the object exists."""
        self._uploads.api.expect_own_process()
        with self._uploads.changed:
            self._check_complete(nbytes)
        if self._upload is None:  # it became empty
            self._uploads.api.put_object(self._key, memoryview(b""))
            self._state = _UploadState.FINISHED
            return
        self._uploads.schedule_call(self._arrived.set)  # the upload may wait for more
        try:
            self._uploads.wait_for_upload(self._upload, f"finish {self._key}")
        except Exception as error:  # noqa: BLE001 - raised again unless the object exists
            self._raise_unless_stored(error)
        self._state = _UploadState.FINISHED

    def abort(self) -> None:
        """Abort the upload, and wait some seconds until the service has ended it."""
        if not is_own_process():
            return  # the upload is that of the process that this one was forked from
        with self._uploads.changed:
            if self._state is not _UploadState.WRITING:
                return
            self._state = _UploadState.ABORTED
            self._pieces.clear()
            self._uploads.progress()
        if self._upload is None:
            return
        self._uploads.schedule_call(self._arrived.set)
        self._uploads.schedule_call(self._aborted.set)
        try:
            self._upload.result(timeout=_ABORT_S)
        except Exception:  # noqa: BLE001 - it ended without an object, or will, or gc ends it
            return
        self._uploads.api.delete_quietly(self._key)

    def _copy_for_upload(self, start: int, piece: memoryview) -> None:
        """Copy a piece into memory for the upload; waits for memory if needed."""
        uploads = self._uploads
        with uploads.changed:
            try:
                uploads.wait_for(lambda: self._may_copy(start), f"write {self._key}")
            except TransientStoreError as error:
                self._check_next_was_written(start, error)
                raise
            self._check_open("write")
            self._check_upload_runs()
            if not uploads.has_room():
                uploads.admit(self)
            buffer = uploads.acquire_copy_memory()
            if self._upload is None:
                least = uploads.register_object(self)
                num_parts = -(-self._nbytes // least)
                self._part_nbytes = least * -(-num_parts // _MAX_PARTS)
                self._upload = uploads.start_upload(self._send())
        copy = self._buffer_piece(piece, buffer)
        with uploads.changed:
            self._check_open("write")
            self._pieces[start] = copy
            self._written_nbytes += len(piece)
        uploads.schedule_call(self._arrived.set)

    def _check_next_was_written(self, start: int, error: TransientStoreError) -> None:
        """Raise a final error if the next byte was not written; `changed` is held."""
        has_come = start == self._position or self._position in self._pieces
        if not has_come and not self._uploads.is_sending():
            raise StoreError(
                f"write {self._key}: byte {self._position} is missing, and the memory for copies "
                "is full of later bytes. Write pieces in order, or from so many threads that none "
                "waits for another"
            ) from error

    def _may_copy(self, start: int) -> bool:
        if self.has_upload_ended() or self._uploads.has_room():
            return True
        # All memory may be held by copies that are sent after this piece: so it may exceed the
        # limit, unless any object is sending a whole part, which frees some memory.
        return start == self._position and self._uploads.admits()

    def has_upload_ended(self) -> bool:
        """Whether the upload has ended, so that it takes no more pieces."""
        has_ended = self._upload is not None and self._upload.done()
        return has_ended or self._state is not _UploadState.WRITING

    def has_come(self) -> bool:
        """Whether all bytes were passed to the upload, or it has ended."""
        return self.has_upload_ended() or self._position == self._length

    def _record_sending(self) -> None:
        """Record whether a whole part, or the rest, is being sent; the caller holds `changed`."""
        nbytes = self._in_flight_nbytes
        # Pieces do not cross the end of a part, so what waits for more is less than a part.
        is_end = self._position == self._length and nbytes > 0
        self._uploads.record_sending(self, is_sending=nbytes >= self._part_nbytes or is_end)

    def _check_upload_runs(self) -> None:
        if self._upload is None or not self._upload.done():
            return
        error = self._upload.exception()
        if isinstance(error, Exception):
            raise self._uploads.api.translate_error("create", self._key, error) from error
        raise StoreError(f"write {self._key}: the object is already complete")

    async def _send(self) -> None:
        patience = Patience(self._uploads.api.options)
        while True:
            try:
                return await self._uploads.api.stream(self._key, self, self._part_nbytes)
            except _UploadAborted:
                raise
            except Exception as error:
                # obstore does not retry the begin of an upload; no byte was sent yet.
                refused = self._uploads.api.translate_error("create", self._key, error)
                is_transient = isinstance(refused, TransientStoreError)
                if self._position or not is_transient or patience.is_used_up():
                    raise
            await asyncio.sleep(patience.next_pause_s())

    def __aiter__(self) -> MultipartPut:
        return self

    async def __anext__(self) -> memoryview:
        """Return the next piece in order to obstore, once it was written and the rate allows it."""
        while True:
            self._arrived.clear()
            with self._uploads.changed:
                if self._state is _UploadState.ABORTED:
                    raise _UploadAborted
                if self._position == self._length:
                    raise StopAsyncIteration
                copy = self._pieces.pop(self._position, None)
            if copy is not None:
                break
            await self._arrived.wait()
        delay_s = self._uploads.pace.reserve(len(copy))
        if delay_s > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._aborted.wait(), delay_s)
                raise _UploadAborted
        with self._uploads.changed:
            self._position += len(copy)
            self._in_flight_nbytes += len(copy)
            self._record_sending()
            if self._uploads.is_admitted(self):
                self._uploads.admit(None)
            self._uploads.progress()
        return copy

    def _sent(self, buffer: mmap.mmap, nbytes: int) -> None:
        if not is_own_process():
            return  # a thread of the parent may have held the lock when this process was forked
        with self._uploads.changed:
            self._in_flight_nbytes -= nbytes
            self._record_sending()
            self._uploads.release_copy_memory(buffer)

    def _buffer_piece(self, piece: memoryview, buffer: mmap.mmap) -> memoryview:
        """Copy a piece into `buffer`; releasing the copy, once it is sent, frees the buffer."""
        copy = memoryview(buffer)[: len(piece)]
        released = weakref.finalize(copy, self._sent, buffer, len(piece))
        released.atexit = False
        copy_bytes(copy, piece)
        return copy
