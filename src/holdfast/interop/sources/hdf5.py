"""Reads datasets and attributes of an HDF5 file, and nothing that leads out of the file.

The HDF5 library only says where things are. Bytes of datasets are read and decoded here, so that no
filter of the library and no plug-in is ever used.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError
from holdfast.interop.files import LocalFile

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_ATTRIBUTE_NBYTES = 64 << 20
MAX_OBJECTS = 200_000
MAX_CHUNK_NBYTES = 64 << 20
MAX_BAND_NBYTES = 128 << 20
"""Most bytes of the chunks that lie beside each other: those with the same rows of a tensor."""
_MAX_CHUNKS = 4_000_000
_MAX_DEPTH = 32

_GZIP, _LZ4 = 1, 32_004
_FILTERS = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    32_000: "lzf",
    32_004: "LZ4",
}

_Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contiguous:
    """A dataset whose bytes are one after the other; `start` is the first in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """A dataset that is stored in chunks of one shape, each compressed alone."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    codec: int | None
    """Number of the filter; None for chunks as they are."""
    start: _Integers
    """First byte of each chunk in the file, in row-major order of the chunks."""
    nbytes: _Integers
    is_plain: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether the filter was left out for a chunk."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dimension."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))


Dataset = Contiguous | Chunked


class Hdf5:
    """An HDF5 file that is open for looking into. Use it in a `with` statement, in one thread."""

    def __init__(self, file: LocalFile) -> None:
        """Open the file."""
        self._file = file
        self._h5py = _library("h5py", "HDF5 files need")
        self._num_seen = 0
        with _without_plugins(self._h5py), self._reading("the file"):
            plist = self._h5py.h5p.create(self._h5py.h5p.FILE_ACCESS)
            plist.set_driver_sec2() if hasattr(plist, "set_driver_sec2") else plist.set_fapl_sec2()
            self._id = self._h5py.h5f.open(
                str(Path(file.name)).encode(), self._h5py.h5f.ACC_RDONLY, fapl=plist
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._id.close()

    def attributes(self, name: str | None = None) -> list[str]:
        """Return the names of the attributes of the file, or of a dataset."""
        with self._reading(f"the attributes of {name or 'the file'}"):
            place = self._open_root_group() if name is None else self._find(name)
            found: list[bytes] = []
            self._h5py.h5a.iterate(place, found.append)  # an error in there is not passed on
            return [name.decode() for name in found]

    def attribute(self, attribute: str, name: str | None = None) -> Any:
        """Return a number, a truth value, a text or bytes; None for anything else."""
        what = f"attribute {attribute!r} of {name or 'the file'}"
        with self._reading(what):
            place = self._open_root_group() if name is None else self._find(name)
            return self._read_attribute(self._h5py.h5a.open(place, attribute.encode()), what)

    def json(self, attribute: str) -> Any:
        """Return the JSON value in a text attribute of the file."""
        text = self.attribute(attribute)
        try:
            return json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"{self._file.name}: attribute {attribute!r} is not JSON: {error}"
            ) from error

    def dataset(self, name: str) -> Dataset:
        """Return where the bytes of a dataset are; reads none of them."""
        what = f"dataset {name!r}"
        with self._reading(what):
            found = self._find(name)
            if not isinstance(found, self._h5py.h5d.DatasetID):
                raise FormatError(f"{self._file.name}: {name!r} is not a dataset")
            plist = found.get_create_plist()
            if plist.get_external_count():
                raise self._wrong(what, "its bytes are in another file")
            if plist.get_layout() == self._h5py.h5d.VIRTUAL:
                raise self._wrong(what, "virtual, from datasets of other files")
            dtype, shape = self._dtype(found, what), found.shape
            nbytes = math.prod(shape) * dtype.itemsize
            h5d = self._h5py.h5d
            if nbytes == 0:
                return Contiguous(dtype=dtype, shape=shape, start=0)
            if plist.get_layout() == h5d.CHUNKED:
                return self._chunked(found, plist, dtype, what)
            start = found.get_offset()
            if plist.get_layout() != h5d.CONTIGUOUS or start is None:
                raise self._wrong(what, "it was never written, or is compact")
            if start + nbytes > self._file.nbytes:
                raise self._short(what, nbytes)
            return Contiguous(dtype=dtype, shape=shape, start=start)

    def list_datasets(self) -> list[str]:
        """Return the names of all datasets; a name of one in a group is `group/name`."""
        with self._reading("its names"):
            self._num_seen = 0
            return [*self._names_in(self._open_root_group(), "", 0)]

    def _names_in(self, group: Any, prefix: str, depth: int) -> Iterator[str]:
        if depth > _MAX_DEPTH:
            raise LimitExceeded(f"{self._file.name}: groups are deeper than {_MAX_DEPTH}")
        for raw in [*group]:
            name = raw.decode()
            found = self._open_plain_link(group, name, f"{prefix}{name}")
            self._num_seen += 1  # groups may hold each other
            if self._num_seen > MAX_OBJECTS:
                raise LimitExceeded(f"{self._file.name}: more than {MAX_OBJECTS:,} objects")
            if isinstance(found, self._h5py.h5g.GroupID):
                yield from self._names_in(found, f"{prefix}{name}/", depth + 1)
            elif isinstance(found, self._h5py.h5d.DatasetID):
                yield f"{prefix}{name}"

    def _open_root_group(self) -> Any:
        return self._h5py.h5g.open(self._id, b"/")

    def _find(self, name: str) -> Any:
        """Open an object by its name; every part of the name must be a plain link."""
        found = self._open_root_group()
        for part in name.split("/"):
            if not isinstance(found, self._h5py.h5g.GroupID) or part in ("", "."):
                raise FormatError(f"{self._file.name}: {name!r} is not there")
            found = self._open_plain_link(found, part, name)
        return found

    def _open_plain_link(self, group: Any, part: str, name: str) -> Any:
        kind = group.links.get_info(part.encode()).type
        if kind != self._h5py.h5l.TYPE_HARD:
            h5l = self._h5py.h5l
            names = {h5l.TYPE_SOFT: "a soft", h5l.TYPE_EXTERNAL: "an external"}
            raise FormatError(
                f"{self._file.name}: {name!r} is {names.get(kind, 'another')} link; links "
                "are not followed"
            )
        return self._h5py.h5o.open(group, part.encode())

    def _wrong(self, what: str, why: str) -> FormatError:
        return FormatError(f"{self._file.name}: {what}: {why}")

    def _dtype(self, dataset: Any, what: str) -> np.dtype[Any]:
        stored, h5t = dataset.get_type(), self._h5py.h5t
        if stored.get_class() not in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.COMPOUND):
            raise self._wrong(what, "not of numbers")
        dtype: np.dtype[Any] = stored.dtype
        is_same = dtype.kind in "biufc" and stored.equal(h5t.py_create(dtype, logical=True))
        if not is_same or dtype != dtype.newbyteorder("<"):
            raise self._wrong(what, "numbers of a type that is not known")
        return dtype

    def _chunked(self, dataset: Any, plist: Any, dtype: np.dtype[Any], what: str) -> Chunked:
        shape, chunk = dataset.shape, plist.get_chunk()
        grid = tuple(-(-size // step) for size, step in zip(shape, chunk, strict=True))
        chunk_nbytes, count = math.prod(chunk) * dtype.itemsize, math.prod(grid)
        band_nbytes = math.prod(shape[1:]) * chunk[0] * dtype.itemsize
        if chunk_nbytes > MAX_CHUNK_NBYTES or count > _MAX_CHUNKS or band_nbytes > MAX_BAND_NBYTES:
            raise LimitExceeded(
                f"{self._file.name}: {what}: {count:,} chunks of {chunk_nbytes:,} bytes, "
                f"{band_nbytes:,} in one row; at most {_MAX_CHUNKS:,}, "
                f"{MAX_CHUNK_NBYTES:,} and {MAX_BAND_NBYTES:,}"
            )
        codec = self._codec(plist, what)
        # Before arrays of this length are made: each chunk has more than 8 bytes in the file.
        if dataset.get_num_chunks() != count or count > self._file.nbytes // 8:
            raise CorruptData(f"{self._file.name}: {what}: {count:,} chunks, and some are missing")
        start, nbytes, mask = (np.full(count, -1, np.int64) for _ in range(3))

        def note(info: Any) -> None:
            at = tuple(
                offset // step for offset, step in zip(info.chunk_offset, chunk, strict=True)
            )
            number = int(np.ravel_multi_index(at, grid))
            start[number], nbytes[number] = info.byte_offset, info.size
            mask[number] = info.filter_mask

        dataset.chunk_iter(note)
        most = 2 * chunk_nbytes + 4096
        is_wrong = (start < 0) | (nbytes < 0) | (nbytes > most)
        if (is_wrong | (start > self._file.nbytes - nbytes)).any():
            raise self._short(what, int(nbytes.sum()))
        return Chunked(
            dtype=dtype,
            shape=shape,
            chunk=chunk,
            codec=codec,
            start=start,
            nbytes=nbytes,
            is_plain=(mask & 1).astype(np.bool_),
        )

    def _codec(self, plist: Any, what: str) -> int | None:
        numbers = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
        if not numbers or numbers in ([_GZIP], [_LZ4]):
            return numbers[0] if numbers else None
        names = ", ".join(_FILTERS.get(number, f"filter {number}") for number in numbers)
        raise self._wrong(what, f"compressed by {names}; LZ4 and gzip are known, each alone")

    def _read_attribute(self, attribute: Any, what: str) -> Any:
        stored, h5t, shape = attribute.get_type(), self._h5py.h5t, attribute.shape
        if attribute.get_space().get_simple_extent_type() == self._h5py.h5s.NULL:
            return None
        # The library reserves what the file claims, before it reads.
        nbytes = math.prod(shape) * stored.get_size()
        if nbytes > MAX_ATTRIBUTE_NBYTES or attribute.get_storage_size() > MAX_ATTRIBUTE_NBYTES:
            raise LimitExceeded(
                f"{self._file.name}: {what}: {nbytes:,} bytes, over {MAX_ATTRIBUTE_NBYTES:,}"
            )
        if stored.get_class() == h5t.OPAQUE:
            return None
        if shape not in ((), (1,)) or stored.get_class() not in (
            *(h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.STRING),
        ):
            return None
        array = np.empty(shape, stored.dtype)
        attribute.read(array)
        value = array.reshape(-1)[0]
        if isinstance(value, bytes):
            return value.decode()
        return value.item() if isinstance(value, np.generic) else value

    def _short(self, what: str, nbytes: int) -> CorruptData:
        return CorruptData(
            f"{self._file.name}: {what}: {nbytes:,} bytes, some of them beyond the end of the file"
        )

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn the library's errors into ours."""
        try:
            yield
        except (CorruptData, FormatError, LimitExceeded):
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeError) as error:
            raise CorruptData(f"{self._file.name}: {what} cannot be read: {error}") from error
        except MemoryError as error:
            raise LimitExceeded(f"{self._file.name}: {what} needs too much memory") from error


def read_band(file: LocalFile, dataset: Chunked, number: int, what: str) -> memoryview:
    """Read the rows of a dataset in the chunks at one position of the first dimension."""
    first = number * dataset.chunk[0]
    rows = min(dataset.chunk[0], dataset.shape[0] - first)
    band = np.empty((rows, *dataset.shape[1:]), dataset.dtype)
    rest = dataset.grid[1:]
    in_band = math.prod(rest)
    for within in range(in_band):
        at = (0, *(int(one) for one in np.unravel_index(within, rest))) if rest else (0,)
        chunk = _read_chunk(file, dataset, number * in_band + within, what)
        places = tuple(
            slice(one * step, min((one + 1) * step, size))
            for one, step, size in zip(at, dataset.chunk, band.shape, strict=True)
        )
        band[places] = chunk[tuple(slice(place.stop - place.start) for place in places)]
    return memoryview(band.reshape(-1).view(np.uint8).data)


def _read_chunk(
    file: LocalFile, dataset: Chunked, number: int, what: str
) -> np.ndarray[Any, np.dtype[Any]]:
    data = file.read(int(dataset.start[number]), int(dataset.nbytes[number]))
    nbytes = math.prod(dataset.chunk) * dataset.dtype.itemsize
    codec = None if dataset.is_plain[number] else dataset.codec
    if codec == _LZ4:
        data = _from_lz4(data, nbytes, f"{file.name}: {what}")
    elif codec == _GZIP:
        try:
            data = zlib.decompressobj().decompress(data, nbytes + 1)
        except zlib.error as error:
            raise CorruptData(f"{file.name}: {what}: a damaged chunk: {error}") from error
    if len(data) != nbytes:
        raise CorruptData(f"{file.name}: {what}: a chunk of {len(data):,} bytes, not {nbytes:,}")
    return np.frombuffer(data, dataset.dtype).reshape(dataset.chunk)


def _from_lz4(data: bytes, nbytes: int, what: str) -> bytes:
    """Decode a chunk of the LZ4 filter: its length, that of a block, and blocks with lengths."""
    lz4 = _library("lz4.block", "chunks that LZ4 has compressed need")
    total, block = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:12], "big")
    if total != nbytes or not block:
        raise CorruptData(f"{what}: a chunk of {total:,} bytes, not {nbytes:,}")
    position, left, parts = 12, total, []
    while left:
        length = int.from_bytes(data[position : position + 4], "big")
        part = data[position + 4 : position + 4 + length]
        size = min(block, left)
        if len(part) != length or not length:
            raise CorruptData(f"{what}: a chunk is cut short")
        if length != size:  # else the block is stored as it is
            try:
                part = lz4.decompress(part, uncompressed_size=size)
            except Exception as error:
                raise CorruptData(f"{what}: a damaged chunk: {error}") from error
        if len(part) != size:
            raise CorruptData(f"{what}: a block of {len(part):,} bytes, not {size:,}")
        parts.append(part)
        position, left = position + 4 + length, left - size
    return b"".join(parts)


@contextmanager
def _without_plugins(h5py: Any) -> Iterator[None]:
    """Turn off HDF5's search for plug-ins, which a file could name."""
    h5pl = h5py.h5pl
    paths = [h5pl.get(number) for number in range(h5pl.size())]
    for _ in paths:
        h5pl.remove(0)
    try:
        yield
    finally:
        for path in paths:
            h5pl.append(path)


def _library(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{what} the package {name.partition('.')[0]}: pip install 'holdfast-torch[convert]'"
        ) from error
