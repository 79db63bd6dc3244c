"""Reads folders of PyTorch Distributed Checkpoint (DCP), also those of OLMo-core and Megatron Core.

Their tensors are read where they lie, and put together from their chunks. Nothing in a folder is
run, and no file outside of it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format import strictjson
from holdfast.format.tensors import ITEM_NBYTES, MAX_HEADER_NBYTES, TensorSpec
from holdfast.interop.boxes import row_major
from holdfast.interop.files import LocalFile
from holdfast.interop.layouts import ComponentLayout, dcp_layout, megatron_layout, olmo_layout
from holdfast.interop.pickles.parts import TensorLocation
from holdfast.interop.pickles.values import (
    ArrayValue,
    Generator,
    PickleBudget,
    Refusal,
    Span,
    Storage,
    TensorView,
    Unknown,
)
from holdfast.interop.sources.dcpchunks import (
    MAX_FILES,
    METADATA,
    ChunkedTensor,
    Chunks,
    FolderFiles,
    FolderMetadata,
    ItemPlace,
    Region,
    check_tiling,
    expect_inside,
    read_metadata,
)
from holdfast.interop.sources.safetensors import read_header
from holdfast.interop.sources.torchfile import ConvertedSource, gather_place, read_saved

OLMO_ITEMS = "model_and_optim"
OLMO_TRAINER = "train/rank0.pt"
MEGATRON_COMMON = "common.pt"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
MAX_LEVEL = 48
"""Most keys that lead to an item."""


def recognises(path: Path) -> bool:
    """Whether a folder, or the one inside that it names as its latest, has DCP's metadata."""
    found = (_latest_of_megatron(path), path / OLMO_ITEMS)
    return any((one / METADATA).is_file() for one in found) or recognises_sharded(path)


def _latest_of_megatron(path: Path) -> Path:
    """The folder of the iteration that a root of Megatron names as its latest, else the path."""
    try:
        with (path / MEGATRON_LATEST).open("rb") as file:
            text = file.read(20).strip()
    except OSError:
        return path
    return path / f"iter_{int(text):07d}" if text.isdigit() else path


class DcpSource(ConvertedSource):
    """A folder of DCP as components, by the keys of the state that was saved."""

    _keeps_empty = False

    def __init__(self, path: Path) -> None:
        """Read everything except the tensors."""
        folder = _latest_of_megatron(path)
        self.url = str(folder)
        is_olmo = (folder / OLMO_ITEMS / METADATA).is_file()
        metadata = _read_metadata(folder, OLMO_ITEMS if is_olmo else "")
        beside = OLMO_TRAINER if is_olmo else MEGATRON_COMMON
        has_beside = (folder / beside).is_file()
        self._files = FolderFiles(folder, [*metadata.files, *([beside] if has_beside else [])])
        self._chunks = Chunks(self._files)
        self._budget = PickleBudget()
        with self.closing_on_error():
            items = self._describe(metadata)
            number = len(metadata.files)
            rest = None
            if has_beside:
                nbytes = (folder / beside).stat().st_size
                rest = self._read_item(ItemPlace(number, 0, nbytes))
            self._convert(_layout(folder, metadata, items, rest, is_olmo=is_olmo))

    def _describe(self, metadata: FolderMetadata) -> dict[str, Any]:
        """Return the descriptions of all items, by DCP's names."""
        items: dict[str, Any] = {
            name: Refusal(why, is_tensor=True) for name, why in metadata.unreadable.items()
        }
        for name, place in metadata.places():
            self._files.check_item_place(name, place)
        for name, tensor in metadata.tensors.items():
            items[name] = Refusal(tensor.refusal, True) if tensor.refusal else _view(tensor)
        for name, place in metadata.values.items():
            try:
                items[name] = self._read_item(place)
            except FormatError as err:
                raise type(err)(f"{self.url}: {name!r:.200}: {err}") from err
        order = {**metadata.paths, **items}
        return {name: items[name] for name in order if name in items}

    def _read_item(self, place: ItemPlace) -> Any:
        with self._files.open_numbered(place.file) as file:
            region = Region(file, place.start, place.nbytes)
            value = read_saved(region, self._budget)
        anchor_spans([value], place.file, place.start)
        return value

    @override
    def _read_place(
        self, spec: TensorSpec, place: TensorLocation, start: int, memory: memoryview
    ) -> None:
        if isinstance(place.data, _ChunkSpan):
            self._chunks.read_into(place.data.tensor, start, memory)
        elif isinstance(place.data, FileSpan):
            with self._files.open_numbered(place.data.file) as file:
                gather_place(file, spec, place, start, memory)
        else:
            gather_place(None, spec, place, start, memory)

    @override
    def close(self) -> None:
        self._files.close_all_files()


@dataclass(slots=True, eq=False, kw_only=True)
class _ChunkSpan(Span):
    """Stands for the bytes of a tensor that is stored in chunks."""

    tensor: ChunkedTensor


@dataclass(slots=True, eq=False, kw_only=True)
class FileSpan(Span):
    """Bytes of one of the folder's files."""

    file: int


def _read_metadata(folder: Path, below: str) -> FolderMetadata:
    """Read what a folder, or the one `below` it, holds; its files are named from `folder` on."""
    path = folder / below / METADATA
    if recognises_sharded(folder) and not path.exists():
        return read_sharded(folder)
    found = read_metadata(expect_inside(folder, path))
    found.files = [f"{below}/{name}" if below else name for name in found.files]
    return found


def _view(tensor: ChunkedTensor) -> TensorView:
    first = tensor.places[0]
    nbytes = ITEM_NBYTES[tensor.dtype]
    for size in tensor.shape:
        nbytes *= size
    # Positions by file, as tensors are read in their order.
    span = _ChunkSpan(start=(first.file << 48) + first.start, nbytes=nbytes, tensor=tensor)
    storage = Storage(tensor.dtype, "cpu", nbytes, span)
    return TensorView(storage, tensor.dtype, 0, tensor.shape, row_major(tensor.shape))


def anchor_spans(values: Iterable[Any], file: int, start: int) -> None:
    """Convert the positions of tensors and arrays in an item to positions in its file."""
    waiting, seen = [*values], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Generator):
            waiting.append(value.members)
        elif isinstance(value, Unknown):
            waiting += [value.args, value.state]
        elif isinstance(value, TensorView):
            waiting.append(value.storage)
        elif isinstance(value, Storage | ArrayValue):
            data = value.data
            if isinstance(data, Span):
                value.data = FileSpan(start=start + data.start, nbytes=data.nbytes, file=file)
        else:
            continue
        seen.add(id(value))


def _layout(
    folder: Path, metadata: FolderMetadata, items: Mapping[str, Any], rest: Any, *, is_olmo: bool
) -> ComponentLayout:
    if is_olmo:
        expect_inside(folder, folder / "config.json")
        return olmo_layout(folder, nest(items, metadata.paths, what=str(folder)), rest)
    if rest is not None:
        return megatron_layout(items, rest)
    return dcp_layout(nest(items, metadata.paths, what=str(folder)))


class _Branch(dict[Any, Any]):
    """Items under common keys."""


def nest(
    items: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], *, what: str
) -> dict[str | int, Any]:
    """Put items into dicts and lists, where their paths lead."""
    root = _Branch()
    for name, item in items.items():
        path = paths.get(name, (name,))
        if len(path) > MAX_LEVEL:
            raise FormatError(
                f"{what}: {name!r:.200}: {len(path):,} keys lead to it; at most {MAX_LEVEL} may"
            )
        node: Any = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch()) if type(node) is _Branch else None
        if type(node) is not _Branch or path[-1] in node:
            raise FormatError(f"{what}: {name!r:.200}: lies where another item is")
        node[path[-1]] = item
    return {key: _grown(value) for key, value in root.items()}


def _grown(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    made = {key: _grown(inner) for key, inner in value.items()}
    if {*made} == {*range(len(made))}:
        return [made[number] for number in range(len(made))]
    return made


_PATTERN = "shard-*-model-*.safetensors"
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_MAX_INT = 2**53


def recognises_sharded(folder: Path) -> bool:
    """Whether a folder has files that are named as shards are."""
    return folder.is_dir() and any(True for _ in folder.glob(_PATTERN))


def read_sharded(folder: Path) -> FolderMetadata:
    """Find the chunks of all tensors in a folder, and check that they tile them."""
    found = FolderMetadata(files=sorted(path.name for path in folder.glob(_PATTERN)))
    if len(found.files) > MAX_FILES:
        raise LimitExceeded(f"{folder}: more than {MAX_FILES:,} files")
    _check_numbers(folder, found.files)
    chunks: dict[str, list[_Chunk]] = {}
    for number, name in enumerate(found.files):
        with LocalFile.open_regular(expect_inside(folder, folder / name)) as file:
            for key, chunk in _chunks_of(file, number).items():
                chunks.setdefault(key, []).append(chunk)
    found.tensors = {key: _join_chunks(folder, key, several) for key, several in chunks.items()}
    check_tiling(str(folder), [*found.tensors.values()])
    return found


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Expect shards 1 to the last that exists; no file records how many there were."""
    numbers = {int(text) for name in names if (text := name.split("-")[1]).isdigit()}
    missing = sorted({*range(1, len(numbers) + 1)} - numbers)
    if missing:
        raise CorruptData(
            f"{folder}: the file of shard {missing[0]} is missing, but later ones exist"
        )


_Chunk = tuple[str, tuple[int, ...], tuple[int, ...], ItemPlace]
"""Dtype, first coordinates, sizes and place of a chunk."""


def _chunks_of(file: LocalFile, number: int) -> dict[str, _Chunk]:
    specs, _, metadata = read_header(file, what=file.name)
    text = metadata.get(_SHARDING) if isinstance(metadata, dict) else None
    if type(text) is not str:
        raise FormatError(f"{file.name}: no {_SHARDING}, which torch's writer of shards adds")
    sharding = strictjson.loads(
        text.encode(), what=file.name, max_nbytes=MAX_HEADER_NBYTES, max_values=2_000_000
    )
    found: dict[str, _Chunk] = {}
    for key, spec in specs.items():
        said = sharding.get(key) if isinstance(sharding, dict) else None
        offsets = said.get(_OFFSETS) if isinstance(said, dict) else None
        if type(offsets) is not list or len(offsets) != len(spec.shape):
            raise FormatError(f"{file.name}: no offsets for {key!r:.200}")
        if any(type(one) is not int or not 0 <= one < _MAX_INT for one in offsets):
            raise FormatError(f"{file.name}: {key!r:.200}: its offsets are invalid")
        found[key] = spec.dtype, tuple(offsets), spec.shape, ItemPlace(number, 0, spec.nbytes)
    return found


def _join_chunks(folder: Path, key: str, chunks: list[_Chunk]) -> ChunkedTensor:
    dtypes = {dtype for dtype, _, _, _ in chunks}
    dims = {len(sizes) for _, _, sizes, _ in chunks}
    if len(dtypes) != 1 or len(dims) != 1:
        raise FormatError(f"{folder}: {key!r:.200}: its chunks differ in dtype or dimensions")
    boxes = [
        (offsets or (0,), tuple(a + b for a, b in zip(offsets, sizes, strict=True)) or (1,))
        for _, offsets, sizes, _ in chunks
    ]
    shape = tuple(max(stop) for stop in zip(*(stops for _, stops in boxes), strict=True))
    places = [place for _, _, _, place in chunks]
    [dtype], [num_dims] = dtypes, dims
    return ChunkedTensor(key, dtype, shape if num_dims else (), np.array(boxes, np.int64), places)
