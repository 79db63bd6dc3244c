"""Reads the archives of Composer: one file of `torch.save` in a tar, compressed or not.

The member is written to a file without a name, within the room that there is. No name in the
archive is used as one of a file.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError
from holdfast.interop.files import LocalFile, first_bytes
from holdfast.interop.sources.torchfile import TorchFile

MEMBER = "composer_states.pt"
"""Name of the member that Composer writes."""
MAX_RATIO = 200
"""Most times that a compressed file may grow; weights rarely shrink to a half."""
MAX_SMALL_NBYTES = 64 << 20
"""Bytes to which any file may grow."""
MAX_MEMBERS = 100
_BLOCK = 512
_MAX_EXTENDED_NBYTES = 64 << 10
_PIECE_NBYTES = 1 << 20
_ROOM_LEFT_NBYTES = 64 << 20
_LZMA_MEMORY = 128 << 20
_ZSTD_WINDOW = 1 << 27

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gz"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x5d\x00\x00", "lzma"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x28\xb5\x2f\xfd", "zst"),
)


def recognises(path: Path) -> bool:
    """Whether a file is a tar, or compressed in one of the ways that Composer knows."""
    return _kind(path) is not None


def _kind(path: Path) -> str | None:
    first = first_bytes(path, 512)
    if first[257:262] == b"ustar":
        return "tar"
    found = next((kind for sign, kind in _SIGNATURES if first.startswith(sign)), None)
    return None if found == "lzma" and path.suffix != ".lzma" else found


def open_archive(path: Path) -> TorchFile:
    """Open the file of `torch.save` in an archive."""
    kind = _kind(path)
    with path.open("rb") as packed, tempfile.TemporaryFile() as unpacked:
        bound = _Bound(path, os.fstat(packed.fileno()).st_size)
        with _refusing(path):
            reader = packed if kind == "tar" else _READERS[str(kind)](packed)
            _unpack(path, reader, unpacked, bound)
        unpacked.flush()
        file = LocalFile(os.dup(unpacked.fileno()), str(path))
    return TorchFile(path, file=file)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, lzma.LZMAError, OverflowError) as err:
        if isinstance(err, UsageError):
            raise
        raise CorruptData(f"{path}: the archive is damaged: {str(err)[:200]}") from err
    except (OSError, RuntimeError) as err:
        raise CorruptData(f"{path}: the archive cannot be read: {str(err)[:200]}") from err


class _Bound:
    """Bytes that may still be unpacked."""

    def __init__(self, path: Path, nbytes: int) -> None:
        free = shutil.disk_usage(tempfile.gettempdir()).free - _ROOM_LEFT_NBYTES
        self._path = path
        self._limit = max(MAX_RATIO * nbytes, MAX_SMALL_NBYTES)
        self._free = free
        self._done = 0

    def spend(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done > self._limit:
            raise LimitExceeded(
                f"{self._path}: unpacks to more than {self._limit:,} bytes, more than any weights "
                "need"
            )
        if self._done > self._free:
            raise LimitExceeded(
                f"{self._path}: needs more room than {tempfile.gettempdir()} has; set TMPDIR to a "
                "folder with more"
            )


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted as they are unpacked."""

    def __init__(self, stream: Any, bound: _Bound) -> None:
        self._stream = stream
        self._bound = bound

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        data: bytes = self._stream.read(len(buffer))
        self._bound.spend(len(data))
        buffer[: len(data)] = data
        return len(data)


def _unpack(path: Path, reader: Any, target: IO[bytes], bound: _Bound) -> None:
    """Write the wanted member to `target`, or the whole content if it is not a tar."""
    stream = io.BufferedReader(_Counted(reader, bound), _PIECE_NBYTES)
    if stream.peek(512)[257:262] != b"ustar":
        shutil.copyfileobj(stream, target, _PIECE_NBYTES)
        return
    for number, (name, kind, nbytes) in enumerate(_members(stream)):
        if number >= MAX_MEMBERS:
            raise LimitExceeded(f"{path}: more than {MAX_MEMBERS} members")
        is_wanted = name.rpartition("/")[2] == MEMBER
        if is_wanted and kind not in (b"0", b"\0"):
            raise FormatError(f"{path}: {MEMBER} is not a regular file in the archive")
        _copy_member(stream, target if is_wanted else None, nbytes)
        if is_wanted:
            return
        _copy_member(stream, None, -nbytes % _BLOCK)
    raise FormatError(f"{path}: no {MEMBER} in the archive, so Composer did not write it")


def _copy_member(stream: io.BufferedReader[Any], target: IO[bytes] | None, nbytes: int) -> None:
    while nbytes:
        data = stream.read(min(nbytes, _PIECE_NBYTES))
        if not data:
            raise EOFError(f"it ends {nbytes:,} bytes too early")
        if target is not None:
            target.write(data)
        nbytes -= len(data)


def _members(stream: io.BufferedReader[Any]) -> Iterator[tuple[str, bytes, int]]:
    """The members of a tar: name, kind and length; whoever asks has read what lies between.

    Of extended headers only the length is used, which does not fit the plain one above 8 GiB.
    """
    longer: int | None = None
    while True:
        head = stream.read(_BLOCK)
        if not head.strip(b"\0"):
            return
        nbytes = _checked_length(head)
        kind = head[156:157]
        if kind in (b"x", b"g", b"L", b"K"):
            if nbytes > _MAX_EXTENDED_NBYTES:
                raise LimitExceeded(f"an extended header of {nbytes:,} bytes in a tar")
            data = stream.read(nbytes + -nbytes % _BLOCK)[:nbytes]
            longer = _extended_length(data) if kind == b"x" else longer
            continue
        name = head[:100].partition(b"\0")[0].decode("utf-8", "replace")
        yield name, kind, nbytes if longer is None else longer
        longer = None


def _checked_length(head: bytes) -> int:
    if len(head) != _BLOCK:
        raise EOFError("it ends inside a header")
    blank = head[:148] + b" " * 8 + head[156:]
    if sum(blank) != int(head[148:156].strip(b" \0") or b"0", 8):
        raise ValueError("a header of a tar with a wrong checksum")
    field = head[124:136]
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _extended_length(data: bytes) -> int | None:
    """The `size` of a pax header, whose lines are "<length> <name>=<value>"."""
    found = None
    while data:
        length, _, _ = data[:20].partition(b" ")
        line, data = data[: int(length)], data[max(int(length), 1) :]
        name, _, value = line[len(length) + 1 :].rstrip(b"\n").partition(b"=")
        if name == b"size":
            found = int(value)
            if found < 0:
                raise ValueError("a negative length")
    return found


class _Lzma(io.RawIOBase):
    """Unpacks xz and lzma with a limit on memory."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._machine = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)

    @override
    def read(self, size: int = -1) -> bytes:
        while not self._machine.eof:
            raw = self._packed.read(_PIECE_NBYTES) if self._machine.needs_input else b""
            if self._machine.needs_input and not raw:
                raise EOFError("the compressed data ends too early")
            data = self._machine.decompress(raw, size)
            if data:
                return data
        return b""


def _zst(packed: BinaryIO) -> Any:
    import zstandard

    machine = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return _Checked(machine.stream_reader(packed, read_across_frames=True), zstandard.ZstdError)


def _lz4(packed: BinaryIO) -> Any:
    try:
        import lz4.frame
    except ImportError as err:
        raise UsageError(
            f"this archive needs lz4: pip install 'holdfast-torch[convert]' ({err})"
        ) from err
    return lz4.frame.LZ4FrameFile(packed)


class _Checked:
    """Stream that raises `ValueError` in place of the errors of a decompression library."""

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self._stream = stream
        self._error = error

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except self._error as err:
            raise ValueError(str(err)) from err
        return data


_READERS: dict[str, Callable[[BinaryIO], Any]] = {
    "gz": lambda packed: gzip.GzipFile(fileobj=packed, mode="rb"),
    "bz2": bz2.BZ2File,
    "xz": _Lzma,
    "lzma": _Lzma,
    "lz4": _lz4,
    "zst": _zst,
}
