"""Reads items of PyTorch Distributed Checkpoint: its `.metadata`, chunks of tensors, and values.

`.metadata` is a pickle of a few classes, which are described by name and never imported. Members
that are not known here are ignored, as newer versions of torch add some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format.boxes import Boxes, Column, Ragged, Unfit, check_boxes
from holdfast.format.nodes import DtypeName, SizeTuple
from holdfast.format.tensors import INDEX_NAMES, ITEM_NBYTES, MAX_DIMS, TensorSpec
from holdfast.interop.boxes import gather_strided, overlaps, row_major
from holdfast.interop.files import LocalFile
from holdfast.interop.pickles.values import PickleBudget, PickledObject, Span, TensorView
from holdfast.interop.sources.safetensors import read_header
from holdfast.interop.sources.torchfile import read_pickle, read_saved

METADATA = ".metadata"
MAX_NBYTES = 1 << 30
MAX_FILES = 100_000
_MAX_INT = 2**62
_OF_METADATA = "torch.distributed.checkpoint.metadata."
_OF_FILES = (
    "torch.distributed.checkpoint.filesystem.",
    "olmo_core.distributed.checkpoint.filesystem.",
)
_RECORDS = (
    *(
        f"{_OF_METADATA}{name}"
        for name in (
            *("Metadata", "MetadataIndex", "BytesStorageMetadata", "TensorStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties"),
        )
    ),
    *(f"{module}_StorageInfo" for module in _OF_FILES),
)


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Bytes of one saved item: a chunk of a tensor, or a value."""

    file: int
    """Number of the file in `FolderMetadata.files`."""
    start: int
    nbytes: int
    refusal: str = ""
    """Why it cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedTensor:
    """A tensor that is stored in chunks, which tile it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Column
    """First coordinates and those behind the last of each chunk; a 0-d tensor has one dimension."""
    places: Sequence[ItemPlace]

    @property
    def refusal(self) -> str:
        """Why one of the chunks cannot be read; empty if all can."""
        return next((place.refusal for place in self.places if place.refusal), "")


@dataclass(slots=True)
class FolderMetadata:
    """Contents of a folder, by DCP's names of the items."""

    files: list[str] = field(default_factory=list)
    tensors: dict[str, ChunkedTensor] = field(default_factory=dict)
    values: dict[str, ItemPlace] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Items that cannot be given, and why."""
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Keys and positions that lead to an item in the state that was saved."""
    has_other_plan: bool = False
    """Whether the planner recorded something else than such paths."""

    def places(self) -> Iterator[tuple[str, ItemPlace]]:
        """Yield the places of all items by DCP's names: of each chunk, and of each value."""
        for name, tensor in self.tensors.items():
            yield from ((name, place) for place in tensor.places)
        yield from self.values.items()


def read_metadata(path: Path) -> FolderMetadata:
    """Read the `.metadata` of a folder, and check all of it."""
    with LocalFile.open_regular(path) as file:
        if file.nbytes > MAX_NBYTES:
            raise LimitExceeded(f"{path}: {file.nbytes:,} bytes; at most {MAX_NBYTES:,} are read")
        # As many items as a checkpoint with 100,000 chunks has, each of some 60 operations.
        budget = PickleBudget(operations=12_000_000, nbytes=192 << 20)
        root = read_pickle(file, budget=budget, records=_RECORDS)
    return _Checked(str(path), root).found


class _Checked:
    def __init__(self, what: str, root: Any) -> None:
        self._what = what
        self.found = FolderMetadata()
        self._numbers: dict[str, int] = {}
        members = self._record(root, "Metadata")
        self._read_items(
            self._dict(members.get("state_dict_metadata"), "does not say what was saved"),
            self._read_places(self._dict(members.get("storage_data"), "does not say where")),
        )
        self._read_paths(members.get("planner_data"))

    def _wrong(self, why: str) -> FormatError:
        return FormatError(f"{self._what}: {why}")

    def _record(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is not PickledObject or value.name.rpartition(".")[2] != name:
            raise self._wrong(f"not the metadata of DCP: expected a {name}")
        return value.members

    def _dict(self, value: Any, why: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._wrong(why)
        return value

    # Places.

    def _read_places(
        self, storage: dict[Any, Any]
    ) -> dict[tuple[str, tuple[int, ...] | None], ItemPlace]:
        found: dict[tuple[str, tuple[int, ...] | None], ItemPlace] = {}
        for index, info in storage.items():
            members = self._record(index, "MetadataIndex")
            name, offset = members.get("fqn"), members.get("offset")
            if type(name) is not str or not (offset is None or type(offset) is SizeTuple):
                raise self._wrong("an item without a name")
            at = name, None if offset is None else offset.dims
            if at in found:
                raise self._wrong(f"{name!r:.200}: two chunks with the same offset in one tensor")
            found[at] = self._place(name, self._record(info, "_StorageInfo"))
        return found

    def _place(self, name: str, info: dict[str, Any]) -> ItemPlace:
        path, start, nbytes = (info.get(key) for key in ("relative_path", "offset", "length"))
        if type(path) is not str or type(start) is not int or type(nbytes) is not int:
            raise self._wrong(f"{name!r:.200}: no file, offset and length")
        if not 0 <= start < _MAX_INT or not 0 <= nbytes < _MAX_INT:
            raise self._wrong(f"{name!r:.200}: {nbytes:,} bytes at {start:,}, which no file has")
        number = self._numbers.get(path)
        if number is None:
            parts = PurePosixPath(path).parts
            if not parts or ".." in parts or path.startswith("/") or not path.isprintable():
                raise self._wrong(
                    f"{name!r:.200}: is in {path!r:.200}, which leads out of the folder"
                )
            number = self._numbers[path] = len(self.found.files)
            self.found.files.append(path)
            if number >= MAX_FILES:
                raise LimitExceeded(f"{self._what}: more than {MAX_FILES:,} files")
        changed = info.get("transform_descriptors")
        return ItemPlace(
            number, start, nbytes, "transformed by an extension of DCP" if changed else ""
        )

    # Items.

    def _read_items(
        self, items: dict[Any, Any], places: Mapping[tuple[str, tuple[int, ...] | None], ItemPlace]
    ) -> None:
        tensors: list[ChunkedTensor] = []
        for name, item in items.items():
            if type(name) is not str:
                raise self._wrong("an item whose name is not text")
            kind = item.name.rpartition(".")[2] if type(item) is PickledObject else ""
            if kind == "BytesStorageMetadata":
                self._add_value(name, places.get((name, None)))
            elif kind == "TensorStorageMetadata":
                tensor = self._tensor(name, item.members, places)
                if tensor is not None:
                    tensors.append(tensor)
            else:
                raise self._wrong(f"{name!r:.200}: neither a tensor nor bytes")
        check_tiling(self._what, tensors)
        self.found.tensors = {tensor.name: tensor for tensor in tensors}

    def _add_value(self, name: str, place: ItemPlace | None) -> None:
        if place is None:
            raise self._wrong(f"{name!r:.200}: the metadata does not say where it is")
        if place.refusal:
            self.found.unreadable[name] = place.refusal
        else:
            self.found.values[name] = place

    def _tensor(
        self,
        name: str,
        members: dict[str, Any],
        places: Mapping[tuple[str, tuple[int, ...] | None], ItemPlace],
    ) -> ChunkedTensor | None:
        shape = self._sizes(name, members.get("size"))
        chunks = members.get("chunks")
        if type(chunks) is not list or not chunks:
            raise self._wrong(f"{name!r:.200}: a tensor without chunks")
        dtype = self._dtype(name, members.get("properties"))
        if dtype not in INDEX_NAMES:
            self.found.unreadable[name] = (
                f"a tensor of torch.{dtype}, which this library does not read"
            )
            return None
        boxes, found = [], []
        for chunk in chunks:
            of_chunk = self._record(chunk, "ChunkStorageMetadata")
            offsets = self._sizes(name, of_chunk.get("offsets"))
            sizes = self._sizes(name, of_chunk.get("sizes"))
            place = places.get((name, offsets))
            if place is None:
                raise self._wrong(f"{name!r:.200}: does not say where the chunk at {offsets} is")
            if len(offsets) != len(sizes):
                raise self._wrong(
                    f"{name!r:.200}: a chunk whose offsets and sizes differ in number"
                )
            stops = tuple(a + b for a, b in zip(offsets, sizes, strict=True))
            boxes.append((offsets or (0,), stops or (1,)))
            self._check_claim(name, INDEX_NAMES[dtype], sizes, place)
            found.append(place)
        if any(len(low) != len(boxes[0][0]) for low, _ in boxes):
            raise self._wrong(f"{name!r:.200}: its chunks differ in their dimensions")
        return ChunkedTensor(name, INDEX_NAMES[dtype], shape, np.array(boxes, np.int64), found)

    def _dtype(self, name: str, properties: Any) -> str:
        state = properties.state if type(properties) is PickledObject else None
        found = state.get("dtype") if isinstance(state, dict) else (state or (None,))[0]
        if type(found) is not DtypeName:
            raise self._wrong(f"{name!r:.200}: a tensor without a dtype")
        return found.name

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not SizeTuple or len(value.dims) > MAX_DIMS:
            raise self._wrong(f"{name!r:.200}: a tensor without sizes")
        extent = 1
        for size in value.dims:
            extent *= max(size, 1)
            if size < 0 or extent > _MAX_INT:
                raise self._wrong(f"{name!r:.200}: sizes of {extent:,} elements")
        return value.dims

    def _check_claim(self, name: str, dtype: str, sizes: tuple[int, ...], place: ItemPlace) -> None:
        nbytes = ITEM_NBYTES[dtype]
        for size in sizes:
            nbytes *= size
        if nbytes > place.nbytes and not place.refusal:
            raise self._wrong(
                f"{name!r:.200}: a chunk of {nbytes:,} bytes in an item of {place.nbytes:,}"
            )

    # Paths.

    def _read_paths(self, planned: Any) -> None:
        """Read the paths that DCP's own planner records; other planners may record none."""
        self.found.has_other_plan = not isinstance(planned, dict | None)
        if not isinstance(planned, dict):
            return
        paths = {}
        for name, path in planned.items():
            if type(path) is not tuple or not path or {*map(type, path)} - {str, int}:
                self.found.has_other_plan = True
                return
            paths[name] = path
        self.found.paths = paths


def check_tiling(what: str, tensors: Sequence[ChunkedTensor]) -> None:
    """Check that the chunks of each tensor leave nothing out and do not overlap."""
    owners: list[int] = []
    offsets: list[list[int]] = []
    sizes: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        owners += [number] * len(tensor.boxes)
        offsets += tensor.boxes[:, 0].tolist()
        sizes += (tensor.boxes[:, 1] - tensor.boxes[:, 0]).tolist()
    boxes = Boxes(np.array(owners, np.int64), Ragged.from_lists(offsets), Ragged.from_lists(sizes))
    try:
        check_boxes([tensor.shape or (1,) for tensor in tensors], boxes)
    except Unfit as err:
        name = tensors[err.tensor].name
        why = str(err).replace("shard", "chunk")
        raise FormatError(f"{what}: {name!r:.200}: {why}") from err


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
