"""Imports folders that `dcp.save` wrote as checkpoints, and exports checkpoints as such folders.

Nothing in a folder is trusted: its `.metadata` is a pickle, of which only the classes of DCP's
metadata are read, and its tensors are read as torch reads weights.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import FormatError, StoreError, UnsupportedState, UsageError
from holdfast.interop.dcp.reader import HoldfastReader, StoredState, refuse_pickles
from holdfast.interop.dcp.writer import HoldfastWriter
from holdfast.interop.exporting.torchfile import PlacedTensor, Values
from holdfast.interop.reading import read_whole
from holdfast.interop.source import Source
from holdfast.keys import Encryption
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.shards import Box
from holdfast.store.base import Store

METADATA = ".metadata"
MAX_METADATA_NBYTES = 1 << 30
AHEAD_NBYTES = 32 << 20
"""Most bytes of tensors that an export reads at a time, unless one tensor has more."""


@check_arguments()
def import_folder(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str] | Store,
    *,
    step: int,
    label: str | None = None,
    unsafe_pickle: bool = False,
) -> Checkpoint:
    """Save the content of a DCP folder as a new checkpoint of a run.

    Keeps at most one file's tensors, 4 GiB, in memory. Runs nothing that is in the folder.

    Raises:
        FormatError: the folder is damaged, or its metadata holds more than metadata.
        UnsupportedState: a value in it is no typed tree; `unsafe_pickle` keeps its pickle.
    """
    source = DcpFolder(Path(folder))
    writer = HoldfastWriter(root, step=step, unsafe_pickle=unsafe_pickle)
    try:
        writer.reset(label)
        writer.set_up_storage_writer(True)
        plan = SavePlan([*_write_items(source.metadata)], planner_data=source.metadata.planner_data)
        [central] = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
        planner = _Planner(source, plan.items, ahead_nbytes=0)
        results = writer.write_data(central, planner).value()
        writer.finish(source.metadata, [results])
    finally:
        writer.close()
    store, entry = writer.saved()
    return build_checkpoint(store, entry)


@check_arguments()
def export_folder(
    source: str | os.PathLike[str] | Store,
    folder: str | os.PathLike[str],
    *,
    unsafe_pickle: bool = False,
    encrypt: Encryption | None = None,
) -> Checkpoint:
    """Write a checkpoint as a folder that `dcp.load` reads.

    `source` and `encrypt` are what `HoldfastReader` takes. Reads tensor by tensor, each checked.
    Generators of a manager are left out, and what is `PerRank` with a warning: DCP has no form for
    what differs by rank. Values that were saved as pickles are refused, as `dcp.load` runs what is
    in them; `unsafe_pickle` writes them.

    Raises:
        UsageError: the folder exists and is not empty, or a value is a pickle.
        CorruptData: the checkpoint is damaged.
        StoreError: a file cannot be written.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise UsageError(f"{os.fspath(folder)}: not empty; give a folder that does not exist yet")
    reader = HoldfastReader(source, encrypt=encrypt)
    try:
        state = reader.open()
        if not unsafe_pickle:
            refuse_pickles(
                (item for item, _ in state.items.values()),
                "export with unsafe_pickle=True or --unsafe-pickle",
            )
        if state.by_rank:
            warnings.warn(
                f"not exported, as each rank has its own: {', '.join(state.by_rank)}", stacklevel=2
            )
        _write_folder(state, folder)
    finally:
        reader.close()
    return build_checkpoint(state.store, state.entry)


def export_source(source: Source, folder: str | os.PathLike[str]) -> SourceState:
    """Write an open file or folder of any known format as a folder that `dcp.load` reads.

    Each component is a dict of its own, as in `dcp.load({"model": model.state_dict()}, …)`. Reads
    tensor by tensor. Returns the state, with notes on what is in another form than in the source.
    """
    state = SourceState(source)
    _write_folder(state, folder)
    return state


def _write_folder(state: StoredState | SourceState, folder: str | os.PathLike[str]) -> None:
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    # In the order in which DCP asks for them where there is a device.
    items = sorted(_write_items(state.metadata), key=lambda one: one.tensor_storage_size() or 0)
    plan = writer.prepare_local_plan(SavePlan(items))
    [central] = writer.prepare_global_plan([plan])
    planner = _Planner(state, items, ahead_nbytes=AHEAD_NBYTES)
    try:
        results = writer.write_data(central, planner).value()
        writer.finish(state.metadata, [results])
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter
        raise StoreError(
            f"{os.fspath(folder)}: DCP could not write it; is there room? {error}"
        ) from error


def _write_items(metadata: Metadata) -> Iterator[WriteItem]:
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            continue
        for number, chunk in enumerate(found.chunks):
            yield WriteItem(
                MetadataIndex(name, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, found.properties, found.size),
            )


class _Planner(SavePlanner):
    """DCP planner that saves a state read from elsewhere, a few items at a time."""

    def __init__(
        self,
        source: DcpFolder | StoredState | SourceState,
        write_items: Sequence[WriteItem],
        *,
        ahead_nbytes: int,
    ) -> None:
        self._source = source
        self._write_items = [item for item in write_items if item.tensor_data is not None]
        self._positions = {item.index: place for place, item in enumerate(self._write_items)}
        self._ahead_nbytes = ahead_nbytes
        self._read: dict[MetadataIndex, Tensor] = {}

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return self._source.pickled(write_item.index.fqn)
        if write_item.index not in self._read:
            self._read_from(self._positions[write_item.index])
        return self._read.pop(write_item.index)

    def _read_from(self, place: int) -> None:
        """Read an item, and those behind it that are small: each read has a cost of its own."""
        some: list[WriteItem] = []
        nbytes = 0
        for number in range(place, len(self._write_items)):
            item = self._write_items[number]
            nbytes += item.tensor_storage_size() or 0
            if some and nbytes > self._ahead_nbytes:
                break
            some.append(item)
        wanted: dict[str, list[Box]] = {}
        for item in some:
            wanted.setdefault(item.index.fqn, []).append(_box(item))
        found = {name: iter(tensors) for name, tensors in self._source.read_boxes(wanted).items()}
        self._read = {item.index: next(found[item.index.fqn]) for item in some}

    @override
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the plan is made without it")

    @override
    def create_local_plan(self) -> SavePlan:
        raise AssertionError("the plan is made without it")

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("the plan is made without it")

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise AssertionError("the plan is made without it")


def _box(write_item: WriteItem) -> Box:
    assert write_item.tensor_data is not None, "an item of a tensor"
    chunk = write_item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


class DcpFolder:
    """A folder that DCP has written, with its metadata checked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.metadata = read_metadata(folder / METADATA)
        self._places: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data

    def read_boxes(self, wanted: dict[str, list[Box]]) -> dict[str, list[Tensor]]:
        """Read chunks of tensors as they were saved, by DCP's names."""
        return {
            name: [self._load_tensor(MetadataIndex(name, box.offsets), box) for box in boxes]
            for name, boxes in wanted.items()
        }

    def pickled(self, name: str) -> io.BytesIO:
        """Return the pickle of an item that is no tensor."""
        return self._bytes(MetadataIndex(name))

    def _load_tensor(self, index: MetadataIndex, box: Box) -> Tensor:
        try:
            found = torch.load(self._bytes(index), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise FormatError(f"{self._folder}: {index.fqn!r}: no tensor: {error}") from error
        if not isinstance(found, Tensor) or tuple(found.shape) != box.sizes:
            raise FormatError(f"{self._folder}: {index.fqn!r}: not a tensor of {list(box.sizes)}")
        return found

    def _bytes(self, index: MetadataIndex) -> io.BytesIO:
        place = self._places.get(index)
        if place is None:
            raise FormatError(f"{self._folder}: the metadata does not say where {index} is")
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedState([(index.fqn, "was transformed by an extension of DCP")])
        inside = os.path.realpath(self._folder)
        path = os.path.realpath(os.path.join(inside, place.relative_path))
        if os.path.commonpath([inside, path]) != inside:
            raise FormatError(f"{self._folder}: {place.relative_path!r} leads out of it")
        try:
            with open(path, "rb") as file:
                if file.seek(0, os.SEEK_END) < place.offset + place.length:
                    raise FormatError(f"{path}: ends before {index.fqn!r} does")
                file.seek(place.offset)
                return io.BytesIO(file.read(place.length))
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error}") from error


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a folder of DCP, and check it; runs no code in it."""
    try:
        if path.stat().st_size > MAX_METADATA_NBYTES:
            raise FormatError(f"{path}: more than {MAX_METADATA_NBYTES:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: not a folder that DCP has saved whole: {error}") from error
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        _check_metadata_types(metadata)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except Exception as error:
        raise FormatError(f"{path}: not the metadata of DCP: {error!r:.300}") from error
    return metadata


class _Properties:
    """Stand-in for `TensorProperties`, whose state has more members in newer torch."""

    dtype: torch.dtype


class _Encoding(int):
    """Stand-in for the enumeration of memory formats."""


def _layout(name: str) -> str:
    return name


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    _StorageInfo,
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _RECORDS},
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Encoding,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
}


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler that accepts only DCP's metadata; Python's own, as its opcodes can be replaced."""

    stack: list[Any]

    def load_build(self) -> None:
        """Set the members of a record, and of nothing else: a class would change for all."""
        made, state = self.stack[-2:]
        if type(made) is _Properties:
            made.dtype = state["dtype"] if isinstance(state, dict) else state[0]
        elif type(made) in _RECORDS and type(state) is dict:
            made.__dict__.update(state)
        else:
            raise FormatError(f"it sets members of a {type(made).__name__}, which is no metadata")
        self.stack.pop()

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
    }

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib" or module.startswith("pathlib."):
            if name.endswith("Path"):
                return pathlib.PurePosixPath
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        elif (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise FormatError(f"it holds {module}.{name}, which is no metadata, and was not loaded")


def _check_metadata_types(metadata: Any) -> None:
    """Check the types of all that is used of the metadata, and make its properties torch's own."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise FormatError("not the metadata of DCP")
    places = metadata.storage_data
    if not isinstance(places, dict) or not all(
        isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo)
        for index, place in places.items()
    ):
        raise FormatError("does not say where its items are, as DCP's own writer does")
    for place in places.values():
        numbers = (place.offset, place.length)
        if type(place.relative_path) is not str or not all(map(_is_natural, numbers)):
            raise FormatError("an item without a place")
    for name, found in metadata.state_dict_metadata.items():
        if type(name) is not str or not isinstance(
            found, TensorStorageMetadata | BytesStorageMetadata
        ):
            raise FormatError(f"{name!r:.80}: neither a tensor nor bytes")
        if isinstance(found, TensorStorageMetadata):
            _check_tensor(name, found)


def _check_tensor(name: str, found: TensorStorageMetadata) -> None:
    dtype = getattr(found.properties, "dtype", None)
    chunks_are = isinstance(found.chunks, list) and all(
        isinstance(chunk, ChunkStorageMetadata)
        and all(
            isinstance(of, torch.Size) and len(of) == len(found.size)
            for of in (chunk.offsets, chunk.sizes)
        )
        for chunk in found.chunks
    )
    if not isinstance(dtype, torch.dtype) or not isinstance(found.size, torch.Size):
        raise FormatError(f"{name!r:.80}: no dtype or no shape")
    if not chunks_are:
        raise FormatError(f"{name!r:.80}: its chunks are not boxes of it")
    found.properties = TensorProperties(dtype=dtype)


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


_Path = tuple[str | int, ...]


class SourceState:
    """The components of a source as the items of one state; tensors are read when asked for."""

    def __init__(self, source: Source) -> None:
        """Name all values, as DCP flattens a dict."""
        self._source = source
        self.notes: list[str] = []
        """What is in another form than in the source."""
        values = Values(source, self.notes)
        self._items: dict[str, tuple[_Path, Any]] = {}
        for path, value in _flatten_state(
            {name: values.read_component(name) for name in source.parts}, ()
        ):
            name = ".".join(map(str, path))
            if name in self._items:
                raise FormatError(f"{source.url}: DCP would call two of its values {name!r:.200}")
            self._items[name] = path, value

    @property
    def metadata(self) -> Metadata:
        """DCP's metadata of the state."""
        return Metadata(
            state_dict_metadata={
                name: _make_storage_metadata(value) if isinstance(value, PlacedTensor) else _BYTES
                for name, (_, value) in self._items.items()
            },
            planner_data={name: path for name, (path, _) in self._items.items()},
        )

    def read_boxes(self, wanted: Mapping[str, list[Box]]) -> dict[str, list[Tensor]]:
        """Read whole tensors, by DCP's names."""
        return {name: [self._read_placed_tensor(self._items[name][1])] for name in wanted}

    def pickled(self, name: str) -> io.BytesIO:
        """Return the pickle of an item that is no tensor."""
        found = io.BytesIO()
        torch.save(self._with_tensors(self._items[name][1]), found)
        found.seek(0)
        return found

    def _with_tensors(self, value: Any) -> Any:
        """Return a value with its tensors, which a tuple may hold."""
        if isinstance(value, PlacedTensor):
            return self._read_placed_tensor(value)
        if isinstance(value, Mapping):
            return {key: self._with_tensors(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(self._with_tensors, value))
        return value

    def _read_placed_tensor(self, one: PlacedTensor) -> Tensor:
        dtype, spec = TORCH_DTYPES[one.spec.dtype], one.spec
        found = torch.empty(spec.shape, dtype=dtype)
        if spec.nbytes:
            raw: Any = found.reshape(-1).view(torch.uint8).numpy()
            read_whole(self._source, one.component, spec.key, 0, memoryview(raw))
        return found


_BYTES = BytesStorageMetadata()


def _make_storage_metadata(one: PlacedTensor) -> TensorStorageMetadata:
    size = torch.Size(one.spec.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[one.spec.dtype]),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


def _flatten_state(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield the leaves of a state as DCP does since torch 2.4: by name, and an empty dict as none.

    Tuples are leaves, and so are lists without tensors and dicts.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten_state(inner, (*path, str(key)))
    elif isinstance(value, list) and not _is_leaf(value):
        for number, inner in enumerate(value):
            yield from _flatten_state(inner, (*path, number))
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_leaf, value))
    return not isinstance(value, Mapping | PlacedTensor)
