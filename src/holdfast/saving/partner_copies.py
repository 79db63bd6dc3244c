"""Second copies of a save's files on the disk of the next host (decision 0068).

Each rank sends the files that it has written, block by block, as they are on its disk, and writes
those of the ranks whose partner it is. All ranks do so at the same point of a save.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import msgspec

from holdfast.errors import HoldfastError, StoreError
from holdfast.format import blocks, layout
from holdfast.ranks.coordinator import Exchange, decode_message
from holdfast.ranks.hosts import Hosts
from holdfast.saving.participants import OwnFile
from holdfast.store.base import BlockWriter, Store

_HEAD_NBYTES = 8


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

    def copy_files(self, hosts: Hosts, store: Store, folder: str, files: Sequence[OwnFile]) -> None:
        """Send this rank's durable files, and write those of others durably to this disk.

        Takes part to the end also after an error, so that no rank waits for this one.

        Raises:
            Disconnected: a partner was lost.
            CorruptData: a file is not what was written, or did not arrive so.
        """
        errors: list[HoldfastError] = []
        others = range(len(hosts.of_rank))
        sources = [rank for rank in others if hosts.partner_of(rank) == hosts.rank]
        to = hosts.partner_of(hosts.rank)
        turn = _Turn(self.exchange, to, time.monotonic() + self.timeout_s, errors)
        sent = list[_SentFile]()
        with _noting(errors):
            sent = [_describe_file(store, folder, file) for file in files]
        listed = turn.exchange_texts(msgspec.msgpack.encode(sent), sources)
        copies: dict[int, _CopyWriter] = {}
        for source, text in listed.items():
            with _noting(errors):
                found = decode_message(text, list[_SentFile], f"files of rank {source}")
                copies[source] = _CopyWriter(store, folder, found)
        pieces = [piece for file in sent for piece in file.list_pieces()]
        for number in count():
            piece = None
            if number < len(pieces):
                piece = memoryview(bytearray(pieces[number].nbytes))
                with _noting(errors):
                    pieces[number].read_into(store, folder, piece)
            parts = {
                source: memoryview(bytearray(one.pieces[number].nbytes))
                for source, one in copies.items()
                if number < len(one.pieces)
            }
            if piece is None and not parts:
                break
            turn.transfer(piece, parts)
            for source, part in parts.items():
                with _noting(errors):
                    copies[source].write_part(number, part, is_wanted=not errors)
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

    def transfer(self, piece: memoryview | None, parts: Mapping[int, memoryview]) -> None:
        """Send one buffer, and receive others."""
        sends = [] if piece is None else [(self._to, piece)]
        with _noting(self._errors):
            transfer = self._exchange.start_exchange(sends, [*parts.items()])
            transfer.wait_until_done(max(self._end - time.monotonic(), 0.0))


def _describe_file(store: Store, folder: str, file: OwnFile) -> _SentFile:
    """Describe a file by the digests of its pieces; those of a plain one are known already."""
    nbytes, digests = file.entry.stored_nbytes, file.digests
    if file.stored is not None:
        spans = blocks.list_blocks(nbytes)
        read = (store.get(f"{folder}/{file.name}", start, stop - start) for start, stop in spans)
        digests = b"".join(map(blocks.block_digest, read))
    return _SentFile(file.name, nbytes, digests)


class _CopyWriter:
    """Writes the files of one other rank as their pieces come."""

    def __init__(self, store: Store, folder: str, files: Sequence[_SentFile]) -> None:
        self._store = store
        self._folder = folder
        for file in files:
            layout.check_file_name(file.name)
        self.pieces = [piece for file in files for piece in file.list_pieces()]
        self._writer: BlockWriter | None = None

    def write_part(self, number: int, part: memoryview, *, is_wanted: bool) -> None:
        """Check and write a piece that has come; the last one of a file makes it durable."""
        piece = self.pieces[number]
        key = f"{self._folder}/{piece.file.name}"
        if not is_wanted:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.abort()
            return
        piece.expect_right(part, f"{self._store.url}/{self._folder}, received")
        if self._writer is None:
            self._writer = self._store.create(key, piece.file.nbytes)
        self._writer.write(piece.start, part)
        if piece.start + piece.nbytes == piece.file.nbytes:
            writer, self._writer = self._writer, None
            writer.finish()
            if self._store.head(key).nbytes != piece.file.nbytes:
                raise StoreError(f"{self._store.url}/{key}: the copy has another length")
