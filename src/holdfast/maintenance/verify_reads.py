"""Reads of a checkpoint's files for verification, a few blocks at a time, with one retry.

Bytes are read around the page cache where possible, because it hides damage of the disk. Result
records of verification come first: problems found, reports of a checkpoint and of a root.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from holdfast.errors import (
    CorruptData,
    DeadlineExceeded,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotFound,
    SealError,
    StoreError,
    is_damage,
)
from holdfast.format import layout
from holdfast.format.blocks import block_digest
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    FileEntry,
    Manifest,
    decode_register,
)
from holdfast.format.tensors import header_nbytes
from holdfast.loading.block_reader import FileBlocks, decode_block, read_blocks
from holdfast.root.catalog import Catalog
from holdfast.root.documents import is_own_mark, read_document
from holdfast.store.base import Store
from holdfast.threads.buffers import Buffers
from holdfast.threads.workers import NUM_AHEAD, Threads

T = TypeVar("T")
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a folder, the bytes checked so far and the bytes to check, in the caller's thread."""
READ_TIMEOUT_S = 600.0
"""Longest wait for one block: a network file system that hangs must not hang the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem with a file, or with one block of it: damaged, missing or unreadable."""

    file: str
    message: str
    block: int | None = None
    start: int | None = None
    """Offset of the first damaged byte, where it is known."""
    nbytes: int | None = None
    tensors: tuple[str, ...] = ()
    """Keys of the tensors that have bytes in the damaged part."""
    expected: str = ""
    found: str = ""
    is_damage: bool = True
    """Whether bytes are wrong or lost (`errors.is_damage`). False: they could not be read now, or
    not by this version, and may be intact."""

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (byte {self.start})"
        against = f": expected {self.expected}, found {self.found}" if self.expected else ""
        shown = ", ".join(self.tensors[:3])
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        tensors = f"; tensors: {shown}{more}" if self.tensors else ""
        return f"{self.file}{place}: {self.message}{against}{tensors}"


def problem_of(file: str, what: str | HoldfastError, **more: Any) -> Problem:
    """Build the `Problem` of a file from a text, or from the error that reading it raised."""
    message = str(what).removeprefix(f"{file}: ")
    damage = isinstance(what, str) or is_damage(what)
    return Problem(file=file, message=message, is_damage=damage, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of verifying one checkpoint. `nbytes` counts the bytes that were read and compared."""

    folder: str
    step: int | None
    """Step of the checkpoint; None where the manifest cannot be read."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    nbytes: int
    num_files: int
    num_tensors: int

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems

    @property
    def of_state(self) -> tuple[Problem, ...]:
        """Problems of the saved state: not those of sidecars, whose names others may use, too."""
        return tuple(one for one in self.problems if not layout.is_sidecar(one.file))


NOT_HERE = "not read, as they are only on the disk of"
"""Begin of a note on files that other hosts have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootReport:
    """Result of verifying a root: its checkpoints newest first, and its claims."""

    checkpoints: tuple[VerifyReport, ...]
    problems: tuple[Problem, ...]
    """Damaged records in `writers/`."""
    notes: tuple[str, ...]
    unopened: tuple[tuple[str, SealError], ...] = ()
    """(folder, why) of checkpoints that the given keys do not decrypt; these were not checked."""

    @property
    def ok(self) -> bool:
        """Whether everything was read and nothing is damaged."""
        is_whole = all(report.ok for report in self.checkpoints)
        return is_whole and not self.problems and not self.unopened


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockToCheck:
    """A stored block to verify. `expected` is its digest, empty where the index is lost."""

    file: str
    number: int
    start: int
    """Offset of the block's first byte in the stored file; `stop` is behind the last one."""
    stop: int
    expected: bytes
    plain: tuple[int, int]
    """Offsets, in the decompressed file, of the block's first byte and behind its last."""
    made_by: FileBlocks | None = None
    """Codec and index to decompress the block with; None: the block is not decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBlock:
    """Outcome of reading a block: its digest or an error, and whether only a retry succeeded."""

    block: BlockToCheck
    digest: bytes = b""
    error: HoldfastError | None = None
    was_transient: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the block was read and has the expected digest, if the index names one."""
        return self.error is None and self.block.expected in (b"", self.digest)


class CheckedBytes:
    """Counts checked bytes and reports them to a progress callback."""

    def __init__(self, folder: str, progress: Progress | None, *, total: int = 0) -> None:
        self._folder = folder
        self._progress = progress
        self.total = total
        self.nbytes = 0

    def count_checked(self, nbytes: int) -> None:
        """Add `nbytes` to the checked bytes, and call the progress callback."""
        self.nbytes += nbytes
        if self._progress is not None:
            self._progress(self._folder, self.nbytes, self.total)


class FolderReader:
    """Reads the files of one checkpoint, retrying once, with a line in `notes`. Thread-safe."""

    def __init__(self, store: Store, folder: str, notes: list[str] | None = None) -> None:
        self._store = store
        self._folder = folder
        self._notes = notes if notes is not None else []
        self._buffers = Buffers()

    def list_names(self) -> tuple[str, ...]:
        """Return the names in the folder; those of folders end with a slash."""
        return again(lambda: self._store.children(self._folder))

    def is_of_user(self, name: str) -> bool:
        """Whether a file has the name of a mark and was not written by Holdfast."""
        is_mark = layout.parse_retired(name) is not None or layout.parse_thinned(name) is not None
        return is_mark and not again(lambda: is_own_mark(self._store, f"{self._folder}/{name}"))

    def measure_file(self, file: str) -> int:
        """Return the length of a file in bytes."""
        return again(lambda: self._store.head(f"{self._folder}/{file}").nbytes)

    def read_decoded(self, file: str, max_nbytes: int, decode: Callable[..., T]) -> T:
        """Read a file and return `decode(data, what=file)`; on failure, retry both once."""

        def read() -> T:
            key = f"{self._folder}/{file}"
            data = read_document(self._store, key, max_nbytes=max_nbytes, afresh=True)
            return decode(data, what=file)

        try:
            return read()
        except NotFound:
            raise
        except (FormatError, StoreError):
            value = read()
        self._notes.append(transient_note(file))
        return value

    def problems(
        self, file: str, max_nbytes: int, decode: Callable[..., object]
    ) -> Iterator[Problem]:
        """Yield the problem with a document, if any; nothing if the document does not exist."""
        try:
            self.read_decoded(file, max_nbytes, decode)
        except NotFound:
            return
        except (FormatError, StoreError) as error:
            yield problem_of(file, error)

    def manifest(self) -> Manifest:
        """Read and decode the manifest."""
        try:
            register = self.read_decoded(layout.MANIFEST, MAX_MANIFEST_NBYTES, decode_register)
        except NotFound:
            again(lambda: Catalog(self._store).read(self._folder))
            raise NoCheckpoint(f"{self._folder}: not committed") from None
        if not isinstance(register, Manifest):
            state = "given up" if isinstance(register, Aborted) else "deleted"
            raise NoCheckpoint(f"{self._folder}: {state} ({register.reason})")
        return register

    def header(self, file: str, listed: FileEntry, made_by: FileBlocks | None) -> bytes:
        """Read the header of a tensor file: all bytes before the data."""
        first = self.beginning(file, 8, listed, made_by)
        nbytes = header_nbytes(first, file_nbytes=listed.nbytes, what=file)
        return self.beginning(file, nbytes, listed, made_by)

    def beginning(
        self, file: str, nbytes: int, listed: FileEntry, made_by: FileBlocks | None
    ) -> bytes:
        """Read the first `nbytes` of a file, decompressed if a codec wrote it."""
        nbytes = min(nbytes, listed.nbytes)
        if made_by is None:
            data = bytearray(nbytes)
            self._store.read_into(f"{self._folder}/{file}", 0, memoryview(data), afresh=True)
            return bytes(data)
        size = made_by.block_nbytes
        whole = min(-(-nbytes // size) * size, listed.nbytes)
        return read_blocks(self._store, made_by, whole, what=file)[:nbytes]

    def read_block(self, block: BlockToCheck) -> Callable[[], CheckedBlock]:
        """Read a block; return a callback that checks it, and rereads it if the check fails."""
        start, nbytes = block.start, block.stop - block.start
        # Start at a page boundary, because direct reads require that.
        skipped = start % mmap.PAGESIZE
        buffer = self._buffers.acquire_buffer(max(skipped + nbytes, BLOCK_NBYTES))
        memory = buffer[: skipped + nbytes]

        def read() -> HoldfastError | None:
            key = f"{self._folder}/{block.file}"
            try:
                self._store.read_into(key, start - skipped, memory, afresh=True)
            except (StoreError, FormatError) as error:
                return error
            return None

        error = read()

        def look() -> CheckedBlock:
            try:
                seen = self._check_block(block, memory[skipped:], error)
                if seen.is_right:
                    return seen
                had_bytes = seen.error is None
                seen = self._check_block(block, memory[skipped:], read())
                if not seen.is_right and not had_bytes and seen.error is None:
                    seen = self._check_block(block, memory[skipped:], read())
                return replace(seen, was_transient=True) if seen.is_right else seen
            finally:
                self._buffers.release_buffer(buffer)

        return look

    def _check_block(
        self, block: BlockToCheck, data: memoryview, error: HoldfastError | None
    ) -> CheckedBlock:
        if error is not None:
            return CheckedBlock(block=block, error=error)
        digest, made_by = block_digest(data), block.made_by
        if made_by is not None and digest == block.expected:
            nbytes = block.plain[1] - block.plain[0]
            plain = self._buffers.acquire_buffer(max(nbytes, BLOCK_NBYTES))
            try:
                if fault := decode_block(made_by, block.number, data, plain[:nbytes]):
                    return CheckedBlock(block=block, digest=digest, error=CorruptData(fault))
            finally:
                self._buffers.release_buffer(plain)
        return CheckedBlock(block=block, digest=digest)


def again(read: Callable[[], T]) -> T:
    """Call `read`, and retry once on a format or store error."""
    try:
        return read()
    except NotFound:
        raise
    except (FormatError, StoreError):
        return read()


def transient_note(file: str, what: str = "it was") -> str:
    """Build the report's note on a file, or a part of it, that only a retry read correctly."""
    return (
        f"{file}: {what} read incorrectly once, and then correctly: check this machine's memory, "
        "disk or network"
    )


def look_at(reader: FolderReader, blocks: Iterable[BlockToCheck]) -> Iterator[CheckedBlock]:
    """Read and check blocks, at most 16 at a time, in parallel; yield the outcomes in order."""
    threads = Threads()
    waiting: deque[tuple[BlockToCheck, Future[CheckedBlock]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, threads.submit_read(partial(reader.read_block, block))))
            plain = block.plain[1] - block.plain[0]
            nbytes = max(BLOCK_NBYTES, block.stop - block.start, plain)
            while len(waiting) * nbytes >= NUM_AHEAD * BLOCK_NBYTES:
                yield _wait_for_check(*waiting.popleft())
        while waiting:
            yield _wait_for_check(*waiting.popleft())
    finally:
        for _, future in waiting:
            future.cancel()
        threads.close_pools()


def _wait_for_check(block: BlockToCheck, future: Future[CheckedBlock]) -> CheckedBlock:
    try:
        return future.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(
            f"{block.file}: reading block {block.number} took longer than {READ_TIMEOUT_S:.0f} s"
        ) from None
