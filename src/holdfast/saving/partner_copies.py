"""Second copies of a save's files on the disk of the next host (decision 0068).

Each rank sends the files that it has written, block by block, from memory if they are still there
as they were written, and writes those of the ranks whose partner it is. All ranks do so at the same
point of a save. Blocks are read, sent and written at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.errors import HoldfastError, StoreError
from holdfast.format import blocks, layout
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.ranks.coordinator import Exchange, RankTransfer, decode_message
from holdfast.ranks.hosts import Hosts
from holdfast.saving.participants import OwnFile
from holdfast.staging.interfaces import Content
from holdfast.store.base import BlockWriter, Store
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import Workers, cancel, gather_results

_HEAD_NBYTES = 8
_NUM_AT_ONCE = 4
"""Most blocks of a rank that are read ahead; of each other rank, that are received or written."""


class _SentFile(msgspec.Struct, frozen=True):
    """A file that a rank sends: its stored length, and the digests of its pieces, joined."""

    name: str
    nbytes: int
    digests: bytes

    def list_pieces(self) -> list[_Piece]:
        """List the pieces in which the file is sent."""
        spans = blocks.list_blocks(self.nbytes)
        return [_Piece(self, n, start, stop - start) for n, (start, stop) in enumerate(spans)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a file that is sent."""

    file: _SentFile
    number: int
    start: int
    nbytes: int

    def read_into(self, store: Store, folder: str, memory: memoryview) -> None:
        """Read the piece from the disk, and check it."""
        store.read_into(f"{folder}/{self.file.name}", self.start, memory)
        self.expect_right(memory, f"{store.url}/{folder}")

    def expect_right(self, memory: memoryview, where: str) -> None:
        """Raise `CorruptData` unless the memory has what was written."""
        size = blocks.DIGEST_NBYTES
        expected = self.file.digests[size * self.number : size * (self.number + 1)]
        blocks.check_block(memory, expected, what=f"{where}/{self.file.name}: block {self.number}")


@dataclass(frozen=True, slots=True)
class PartnerCopies:
    """Exchange of the copies of one manager, in the save thread."""

    exchange: Exchange
    timeout_s: float

    def copy_files(
        self,
        hosts: Hosts,
        store: Store,
        folder: str,
        files: Sequence[OwnFile],
        held: Mapping[str, Content],
        writers: Workers,
    ) -> None:
        """Send this rank's durable files, and write those of others durably to this disk.

        Takes part to the end also after an error, so that no rank waits for this one.

        Args:
            held: files whose bytes are in memory, by name; others are read from the disk.

        Raises:
            Disconnected: a partner was lost.
            CorruptData: a file is not what was written, or did not arrive so.
        """
        errors: list[HoldfastError] = []
        others = range(len(hosts.of_rank))
        sources = [rank for rank in others if hosts.partner_of(rank) == hosts.rank]
        end = time.monotonic() + self.timeout_s
        turn = _Turn(self.exchange, hosts.partner_of(hosts.rank), end, errors)
        sent = list[_SentFile]()
        with _noting(errors):
            sent = [_describe_file(store, folder, file) for file in files]
        listed = turn.exchange_texts(msgspec.msgpack.encode(sent), sources)
        copies: dict[int, _CopyWriter] = {}
        for source, text in listed.items():
            with _noting(errors):
                found = decode_message(text, list[_SentFile], f"files of rank {source}")
                copies[source] = _CopyWriter(store, folder, found, writers, end)
        own = _OwnPieces(store, folder, sent, held, writers, end)
        try:
            under_way: deque[tuple[_Transfer, int]] = deque()
            for number in range(max([own.num_pieces, *(len(c.pieces) for c in copies.values())])):
                piece = own.next_piece(errors)
                parts = {
                    source: one.memory_of(number)
                    for source, one in copies.items()
                    if number < len(one.pieces)
                }
                under_way.append((turn.start_transfer(piece, parts), number))
                if len(under_way) == 2:
                    _complete(*under_way.popleft(), copies, errors)
            while under_way:
                _complete(*under_way.popleft(), copies, errors)
            for copy in copies.values() if not errors else ():
                with _noting(errors):
                    copy.finish_files()
        finally:
            for copy in copies.values():
                copy.abort_files()
        if errors:
            raise errors[0]


@contextmanager
def _noting(errors: list[HoldfastError]) -> Iterator[None]:
    """Add an error to a list in place of raising it."""
    try:
        yield
    except HoldfastError as error:
        errors.append(error)


class _Turn:
    """Transfers of one save between partners, all of them in one order on all ranks."""

    def __init__(
        self, exchange: Exchange, to: int, end: float, errors: list[HoldfastError]
    ) -> None:
        self._exchange = exchange
        self._to = to
        self._end = end
        self._errors = errors

    def exchange_texts(self, said: bytes, sources: Sequence[int]) -> dict[int, bytes]:
        """Send a text, and receive one of each source."""
        heads = {source: memoryview(bytearray(_HEAD_NBYTES)) for source in sources}
        self.transfer(memoryview(bytearray(len(said).to_bytes(_HEAD_NBYTES, "little"))), heads)
        nbytes = {source: int.from_bytes(head, "little") for source, head in heads.items()}
        texts = {source: memoryview(bytearray(length)) for source, length in nbytes.items()}
        self.transfer(memoryview(bytearray(said)), {s: text for s, text in texts.items() if text})
        return {source: bytes(text) for source, text in texts.items()}

    def transfer(self, piece: memoryview, parts: Mapping[int, memoryview]) -> None:
        """Send one buffer, and receive others."""
        self.start_transfer(piece, parts).wait_until_done()

    def start_transfer(
        self, piece: memoryview | None, parts: Mapping[int, memoryview]
    ) -> _Transfer:
        """Begin to send one buffer, and to receive others."""
        sends = [] if piece is None else [(self._to, piece)]
        transfer = _Transfer(parts, self._end, self._errors)
        with _noting(self._errors):
            transfer.begun = self._exchange.start_exchange(sends, [*parts.items()])
        return transfer


@dataclass(slots=True)
class _Transfer:
    """Transfer under way."""

    parts: Mapping[int, memoryview]
    """Memory of the block of each source."""
    end: float
    errors: list[HoldfastError]
    begun: RankTransfer | None = None

    def wait_until_done(self) -> None:
        """Wait for the transfer; note an error."""
        if self.begun is not None:
            with _noting(self.errors):
                self.begun.wait_until_done(max(self.end - time.monotonic(), 0.0))


def _complete(
    transfer: _Transfer,
    number: int,
    copies: Mapping[int, _CopyWriter],
    errors: list[HoldfastError],
) -> None:
    """Wait for a transfer, and begin to write what has come, if it is still wanted."""
    transfer.wait_until_done()
    for source, part in transfer.parts.items():
        with _noting(errors):
            copies[source].write_part(number, part, is_wanted=not errors)


class _OwnPieces:
    """Blocks of the files of this rank, in order, in memory or read ahead from the disk."""

    def __init__(
        self,
        store: Store,
        folder: str,
        files: Sequence[_SentFile],
        held: Mapping[str, Content],
        readers: Workers,
        end: float,
    ) -> None:
        pieces = [piece for file in files for piece in file.list_pieces()]
        self.num_pieces = len(pieces)
        self._store = store
        self._folder = folder
        self._held = held
        self._readers = readers
        self._end = end
        self._left = iter(pieces)
        self._ahead: deque[tuple[memoryview, Future[None] | None]] = deque()
        for _ in range(_NUM_AT_ONCE):
            self._read_ahead()

    def _read_ahead(self) -> None:
        piece = next(self._left, None)
        if piece is None:
            return
        content = self._held.get(piece.file.name)
        if content is not None:
            memory = content.block(piece.number, max(self._end - time.monotonic(), 0.0))
            self._ahead.append((memory, None))
            return
        memory = memoryview(bytearray(piece.nbytes))
        job = partial(piece.read_into, self._store, self._folder, memory)
        self._ahead.append((memory, self._readers.submit(job)))

    def next_piece(self, errors: list[HoldfastError]) -> memoryview | None:
        """Return the next block, undefined bytes after an error; None after the last one."""
        if not self._ahead:
            return None
        memory, reading = self._ahead.popleft()
        self._read_ahead()
        if reading is not None:
            with _noting(errors):
                left_s = max(self._end - time.monotonic(), 0.0)
                gather_results([reading], timeout_s=left_s, what="reading a file to copy it")
        return memory


def _describe_file(store: Store, folder: str, file: OwnFile) -> _SentFile:
    """Describe a file by the digests of its pieces; those of a plain one are known already."""
    nbytes, digests = file.entry.stored_nbytes, file.digests
    if file.stored is not None:
        spans = blocks.list_blocks(nbytes)
        read = (store.get(f"{folder}/{file.name}", start, stop - start) for start, stop in spans)
        digests = b"".join(map(blocks.block_digest, read))
    return _SentFile(file.name, nbytes, digests)


class _CopyWriter:
    """Writes the files of one other rank as their blocks come."""

    def __init__(
        self, store: Store, folder: str, files: Sequence[_SentFile], writers: Workers, end: float
    ) -> None:
        self._store = store
        self._folder = folder
        for file in files:
            layout.check_file_name(file.name)
        self.pieces = [piece for file in files for piece in file.list_pieces()]
        self._writers = writers
        self._end = end
        self._memory = LimitedBuffers(_NUM_AT_ONCE, BLOCK_NBYTES)
        self._open: dict[str, tuple[_SentFile, BlockWriter]] = {}
        """Files that are being written, by key."""
        self._writes: list[Future[None]] = []

    def memory_of(self, number: int) -> memoryview:
        """Wait until there is memory for a block."""
        left_s = max(self._end - time.monotonic(), 0.0)
        return self._memory.acquire_buffer(left_s)[: self.pieces[number].nbytes]

    def write_part(self, number: int, part: memoryview, *, is_wanted: bool) -> None:
        """Begin to check and to write a block that has come."""
        if not is_wanted:
            self._release(part)
            return
        piece = self.pieces[number]
        key = f"{self._folder}/{piece.file.name}"
        if key not in self._open:
            self._open[key] = piece.file, self._store.create(key, piece.file.nbytes)
        job = partial(self._check_and_write, piece, part, self._open[key][1])
        self._writes.append(self._writers.submit(job))

    def _check_and_write(self, piece: _Piece, part: memoryview, writer: BlockWriter) -> None:
        """In a writer thread."""
        try:
            piece.expect_right(part, f"{self._store.url}/{self._folder}, received")
            writer.write(piece.start, part)
        finally:
            self._release(part)

    def _release(self, part: memoryview) -> None:
        # A view of a whole buffer, of which the pool has to get all.
        self._memory.release_buffer(memoryview(part.obj))

    def finish_files(self) -> None:
        """Wait until all files are on stable storage, with their lengths."""
        self._gather(self._writes)
        self._gather([self._writers.submit(writer.finish) for _, writer in self._open.values()])
        opened, self._open = self._open, {}
        for key, (file, _) in opened.items():
            if self._store.head(key).nbytes != file.nbytes:
                raise StoreError(f"{self._store.url}/{key}: the copy has another length")

    def _gather(self, futures: Sequence[Future[None]]) -> None:
        left_s = max(self._end - time.monotonic(), 0.0)
        gather_results(futures, timeout_s=left_s, what=f"copies in {self._folder}")

    def abort_files(self) -> None:
        """Stop writing the files that are not finished."""
        if self._open:
            cancel(self._writes, timeout_s=max(self._end - time.monotonic(), 0.0))
        for _, writer in self._open.values():
            writer.abort()
