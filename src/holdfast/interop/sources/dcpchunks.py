"""Reads items of PyTorch Distributed Checkpoint where they lie: chunks of tensors, and values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from holdfast.errors import CorruptData, FormatError
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.boxes import gather_strided, overlaps, row_major
from holdfast.interop.files import LocalFile
from holdfast.interop.pickles.values import PickleBudget, Span, TensorView
from holdfast.interop.sources.dcpmetadata import ChunkedTensor, ItemPlace
from holdfast.interop.sources.safetensors import read_header
from holdfast.interop.sources.torchfile import read_saved

RANGE_NBYTES = 8 << 20
"""Most bytes of a tensor that are put together at once."""
SMALL_NBYTES = 32 << 10
"""An item up to this length is read at once: most reads of a zip file are of a few bytes."""
MAX_OPEN_FILES = 256
"""Files that stay open; of more, each is opened for each read."""


class Region(LocalFile):
    """A part of an open file, as a file of its own."""

    def __init__(self, whole: LocalFile, start: int, nbytes: int) -> None:
        self.name = whole.name
        self.nbytes = nbytes
        self._whole = whole
        self._start = start
        small = nbytes <= SMALL_NBYTES and start + nbytes <= whole.nbytes
        self._data = memoryview(whole.read(start, nbytes)) if small else None

    @override
    def read_into(self, start: int, memory: memoryview) -> None:
        if start + memory.nbytes > self.nbytes:
            raise CorruptData(f"{self.name}: an item ends at byte {self._start + self.nbytes:,}")
        if self._data is not None:
            memory[:] = self._data[start : start + memory.nbytes]
        else:
            self._whole.read_into(self._start + start, memory)

    @override
    def close(self) -> None:
        """No-op: whoever opened the whole file closes it."""


def expect_inside(folder: Path, path: Path) -> Path:
    """Return the path of a file, if no link in it leads out of the folder."""
    inside, real = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([inside, real]) != inside:
        raise FormatError(f"{path}: leads out of the folder, to {real}")
    return path


class FolderFiles:
    """The files of a folder, by number. None of them lies outside of it. Thread-safe."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Look at each file, and open the first ones."""
        self._paths = [folder / name for name in names]
        for path in self._paths:
            expect_inside(folder, path)
        missing = [path for path in self._paths if not path.is_file()]
        if missing:
            raise CorruptData(
                f"{missing[0]}: is missing{f', and {len(missing) - 1:,} more' * (len(missing) > 1)}"
            )
        self._nbytes = [path.stat().st_size for path in self._paths]
        self._open: list[LocalFile] = []
        with ExitStack() as stack:
            for path in self._paths[:MAX_OPEN_FILES]:
                self._open.append(stack.enter_context(LocalFile.open_regular(path)))
            self._stack = stack.pop_all()

    @contextmanager
    def open_numbered(self, number: int) -> Iterator[LocalFile]:
        """Give a file to read from."""
        if number < len(self._open):
            yield self._open[number]
            return
        with LocalFile.open_regular(self._paths[number]) as file:
            yield file

    def check_item_place(self, name: str, place: ItemPlace) -> None:
        """Check that an item lies in its file."""
        nbytes = self._nbytes[place.file]
        if place.start + place.nbytes > nbytes:
            raise CorruptData(
                f"{self._paths[place.file]}: has {nbytes:,} bytes; {name!r:.200} ends at byte "
                f"{place.start + place.nbytes:,}"
            )

    def close_all_files(self) -> None:
        """Close all of them."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _Laid:
    """Place of a chunk's elements in its file."""

    start: int
    """First byte of its storage."""
    offset: int
    """Elements of the storage before it."""
    strides: tuple[int, ...]


class Chunks:
    """Reads tensors from their chunks, any range of them and in bounded memory. Thread-safe."""

    def __init__(self, files: FolderFiles) -> None:
        self._files = files
        self._laid: dict[tuple[str, int], _Laid] = {}
        self._headers: dict[int, tuple[dict[str, TensorSpec], dict[str, int]]] = {}

    def read_into(self, tensor: ChunkedTensor, start: int, memory: memoryview) -> None:
        """Fill `memory` with row-major bytes of a tensor from its byte `start` on."""
        for begin in range(0, memory.nbytes, RANGE_NBYTES):
            self._read_range(tensor, start + begin, memory[begin : begin + RANGE_NBYTES])

    def _read_range(self, tensor: ChunkedTensor, start: int, memory: memoryview) -> None:
        if len(tensor.places) == 1:
            self.read_chunk(tensor, 0, start, memory)
            return
        item = ITEM_NBYTES[tensor.dtype]
        low, high = start // item, -(-(start + memory.nbytes) // item)
        if (high - low) * item != memory.nbytes:  # it begins or ends inside an element
            whole = memoryview(bytearray((high - low) * item))
            self._read_range(tensor, low * item, whole)
            memory[:] = whole[start - low * item :][: memory.nbytes]
            return
        target = np.frombuffer(memory, np.uint8)
        numbers = np.arange(len(tensor.places))
        for part in overlaps(tensor.shape, numbers, tensor.boxes, low, high):
            if part.is_run:
                place = memory[part.at * item :][: part.num_elements * item]
                self.read_chunk(tensor, part.shard, part.first * item, place)
                continue
            read = np.empty(part.length * item, np.uint8)
            self.read_chunk(tensor, part.shard, part.first * item, memoryview(read.data))
            part.copy_range(read, target, item)

    def read_chunk(
        self, tensor: ChunkedTensor, number: int, start: int, memory: memoryview
    ) -> None:
        """Fill `memory` with row-major bytes of one chunk from its byte `start` on."""
        place = tensor.places[number]
        item = ITEM_NBYTES[tensor.dtype]
        sizes = _sizes(tensor, number)
        with self._files.open_numbered(place.file) as file:
            laid = self._laid.get((tensor.name, number)) or self._find_elements(
                file, tensor, number
            )

            def read(at: int, into: memoryview) -> None:
                file.read_into(laid.start + at, into)

            gather_strided(
                read,
                sizes,
                laid.strides,
                offset=laid.offset,
                item_nbytes=item,
                start=start,
                memory=memory,
            )

    def _find_elements(self, file: LocalFile, tensor: ChunkedTensor, number: int) -> _Laid:
        """Find the elements of a chunk: in a file of `torch.save`, or of safetensors."""
        place = tensor.places[number]
        what = f"{file.name}: {tensor.name!r:.200}"
        if file.read(0, min(9, file.nbytes))[8:] == b"{":
            laid = self._find_in_header(file, tensor, number, what)
        else:
            laid = _find_saved(file, place, tensor.dtype, _sizes(tensor, number), what)
        self._laid[tensor.name, number] = laid
        return laid

    def _find_in_header(
        self, file: LocalFile, tensor: ChunkedTensor, number: int, what: str
    ) -> _Laid:
        place = tensor.places[number]
        header = self._headers.get(place.file)
        if header is None:
            specs, starts, _ = read_header(file, what=file.name)
            header = self._headers[place.file] = specs, starts
        specs, starts = header
        sizes = _sizes(tensor, number)
        if specs.get(tensor.name) != TensorSpec(tensor.name, tensor.dtype, sizes):
            raise FormatError(f"{what}: not in the file as {tensor.dtype} of {list(sizes)}")
        return _Laid(starts[tensor.name], 0, row_major(sizes))


def _sizes(tensor: ChunkedTensor, number: int) -> tuple[int, ...]:
    if not tensor.shape:
        return ()
    return tuple((tensor.boxes[number, 1] - tensor.boxes[number, 0]).tolist())


def _find_saved(
    file: LocalFile, place: ItemPlace, dtype: str, sizes: tuple[int, ...], what: str
) -> _Laid:
    region = Region(file, place.start, place.nbytes)
    try:
        view = read_saved(region, PickleBudget(operations=10_000, nbytes=1 << 20))
    except FormatError as error:
        raise type(error)(f"{what}: no tensor: {error}") from error
    if type(view) is not TensorView or not isinstance(view.storage.data, Span):
        raise FormatError(f"{what}: no tensor where the metadata has one")
    if (view.dtype, view.shape) != (dtype, sizes):
        raise FormatError(
            f"{what}: {view.dtype} of {list(view.shape)}, but the metadata has {dtype} of "
            f"{list(sizes)}"
        )
    return _Laid(place.start + view.storage.data.start, view.offset, view.strides)
