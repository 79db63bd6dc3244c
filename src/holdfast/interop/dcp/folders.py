"""Imports folders that `dcp.save` wrote as checkpoints, and exports checkpoints as such folders.

Nothing in a folder is trusted: it is read by the readers of files of other libraries, and values
that are no tensors as torch reads weights.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import FormatError, StoreError, UnsupportedState, UsageError
from holdfast.interop.dcp.items import Path as ItemPath
from holdfast.interop.dcp.items import flatten
from holdfast.interop.dcp.reader import (
    HoldfastReader,
    StoredState,
    refuse_pickles,
    tensor_metadata,
    whole_metadata,
)
from holdfast.interop.dcp.writer import HoldfastWriter
from holdfast.interop.exporting.torchfile import PlacedTensor, Values
from holdfast.interop.pickles.values import trusting
from holdfast.interop.source import Source, read_whole
from holdfast.interop.sources.dcpchunks import METADATA, Chunks, FolderFiles, read_metadata
from holdfast.keys import Encryption
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.shards import Box
from holdfast.store.base import Store

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
        source.close_files()
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
        UsageError: the folder exists and is not empty, a value is a pickle, or parameters were
            saved by digest.
        CorruptData: the checkpoint is damaged.
        StoreError: a file cannot be written.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise UsageError(f"{os.fspath(folder)}: not empty; give a folder that does not exist yet")
    reader = HoldfastReader(source, encrypt=encrypt)
    try:
        state = reader.open()
        parts = state.entry.manifest.components
        if frozen := [name for name, part in parts.items() if part.frozen is not None]:
            raise UsageError(
                f"{state.entry.folder}: frozen parameters of {', '.join(frozen)} were saved by "
                "digest, so the folder would lack them. Resume the run with its base model, save "
                "a checkpoint without frozen=, and export that"
            )
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


class _Planner(DefaultSavePlanner):
    """DCP planner that saves a state read from elsewhere, a few items at a time."""

    def __init__(
        self,
        source: DcpFolder | StoredState | SourceState,
        write_items: Sequence[WriteItem],
        *,
        ahead_nbytes: int,
    ) -> None:
        super().__init__()
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


def _box(write_item: WriteItem) -> Box:
    assert write_item.tensor_data is not None, "an item of a tensor"
    chunk = write_item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


class DcpFolder:
    """A folder that DCP has written, with its metadata checked. Nothing in it is run."""

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        if not path.is_file():
            raise FormatError(f"{path}: is missing: not a complete checkpoint of DCP")
        with trusting():
            found = read_metadata(path)
        if found.has_other_plan:
            raise UsageError(
                f"{path}: planner_data does not hold the path of each item. Nothing was loaded; "
                "save with DefaultSavePlanner"
            )
        lost = {name: tensor.refusal for name, tensor in found.tensors.items() if tensor.refusal}
        if lost or found.unreadable:
            raise UnsupportedState([*{**found.unreadable, **lost}.items()])
        self._found, self._files = found, FolderFiles(folder, found.files)
        for name, place in found.places():
            self._files.check_item_place(name, place)
        self._chunks = Chunks(self._files)
        kinds = {
            name: tensor_metadata(tensor.dtype, tensor.shape, tensor.boxes)
            for name, tensor in found.tensors.items()
        } | dict.fromkeys(found.values, _BYTES)
        self.metadata = Metadata(
            {name: kinds[name] for name in {**found.paths, **kinds} if name in kinds},
            planner_data=found.paths or None,
        )

    def read_boxes(self, wanted: dict[str, list[Box]]) -> dict[str, list[Tensor]]:
        """Read chunks of tensors as they were saved, by DCP's names."""
        return {
            name: [self._read_chunk(name, box) for box in boxes] for name, boxes in wanted.items()
        }

    def _read_chunk(self, name: str, box: Box) -> Tensor:
        tensor = self._found.tensors[name]
        starts = tensor.boxes[:, 0].tolist()
        number = starts.index([*box.offsets]) if tensor.shape else 0
        made = torch.empty(box.sizes, dtype=TORCH_DTYPES[tensor.dtype])
        if made.numel():
            raw: Any = made.reshape(-1).view(torch.uint8).numpy()
            self._chunks.read_chunk(tensor, number, 0, memoryview(raw))
        return made

    def pickled(self, name: str) -> io.BytesIO:
        """Return the pickle of an item that is no tensor."""
        place = self._found.values[name]
        with self._files.open_numbered(place.file) as file:
            return io.BytesIO(file.read(place.start, place.nbytes))

    def close_files(self) -> None:
        """Close its files."""
        self._files.close_all_files()


class SourceState:
    """The components of a source as the items of one state; tensors are read when asked for."""

    def __init__(self, source: Source) -> None:
        """Name all values, as DCP flattens a dict."""
        self._source = source
        self.notes: list[str] = []
        """Values in another form than in the source."""
        values = Values(source, self.notes)
        self._items: dict[str, tuple[ItemPath, Any]] = {}
        state = {name: values.read_component(name) for name in source.parts}
        for path, value in flatten(state, (), tensor=PlacedTensor, keeps_empty=False):
            name = ".".join(map(str, path))
            if name in self._items:
                raise FormatError(f"{source.url}: DCP would name two values {name!r:.200}")
            self._items[name] = path, value

    @property
    def metadata(self) -> Metadata:
        """DCP's metadata of the state."""
        return Metadata(
            state_dict_metadata={
                name: whole_metadata(value.spec) if isinstance(value, PlacedTensor) else _BYTES
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
