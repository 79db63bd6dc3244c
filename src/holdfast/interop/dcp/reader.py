"""DCP's storage reader: what a planner asks for, from boxes of a checkpoint, checked."""

from __future__ import annotations

import io
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import FormatError, NoCheckpoint, UsageError
from holdfast.format.boxes import Column
from holdfast.format.tensors import TensorSpec
from holdfast.interop.dcp.items import Item, items_of, pickled
from holdfast.interop.roots import expect_path, written_root
from holdfast.keys import Encryption
from holdfast.loading.open import Opened, open_checkpoint
from holdfast.loading.tensor_reader import TensorReader
from holdfast.ownership.access import locate_with_lease
from holdfast.ownership.claim import dropped
from holdfast.root.address import split_source
from holdfast.root.catalog import Entry
from holdfast.state.capture.byrank import BY_RANK
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.shards import Box, LocalShards
from holdfast.state.trees import decode_skeleton, keys_in
from holdfast.store.base import Store
from holdfast.threads.workers import Threads

BATCH_NBYTES = 4 << 30
"""Most bytes of tensors that are read before any of them is copied to its destination."""


class StoredState:
    """A checkpoint as DCP sees it: its items, and readers of them."""

    def __init__(self, store: Store, opened: Opened, entry: Entry, timeout_s: float) -> None:
        self.store = store
        self.opened = opened
        self.entry = entry
        self.items: dict[str, tuple[Item, Any]] = {}
        """Item and node by DCP's name."""
        self.is_flat = True
        kinds = {name: component.kind for name, component in opened.components.items()}
        self.by_rank = sorted(name for name in opened.by_rank if kinds[name] not in BY_RANK)
        """Components that are left out, beside generators: each rank has its own."""
        self._threads = Threads()
        self._tensors = TensorReader(store, opened, threads=self._threads, timeout_s=timeout_s)
        for name, component in opened.components.items():
            if component.kind in BY_RANK or name in opened.by_rank:
                continue  # DCP has no form for what differs by rank
            what = f"{opened.folder}: {name}'s tree"
            value = decode_skeleton(component.tree, component.tensors, what=what).value
            found, is_flat = items_of(name, component.tree, value)
            self.is_flat = self.is_flat and is_flat
            for item, node in found.items():
                if item.name in self.items:
                    raise FormatError(f"{what}: DCP would call two of its items {item.name!r}")
                self.items[item.name] = (item, node)

    @property
    def metadata(self) -> Metadata:
        """DCP's metadata of the state."""
        return Metadata(
            state_dict_metadata={
                name: self._tensor_metadata(name) if item.is_tensor else BytesStorageMetadata()
                for name, (item, _) in self.items.items()
            },
            planner_data=(
                {name: item.full_path for name, (item, _) in self.items.items()}
                if self.is_flat
                else None
            ),
        )

    def _tensor_metadata(self, name: str) -> TensorStorageMetadata:
        component, key = self._find_key(name)
        table = self.opened.index.components[component]
        return tensor_metadata(
            table.specs[key].dtype, table.specs[key].shape, table.boxes_of(key)[1]
        )

    def nbytes(self, name: str) -> int:
        """Return the bytes of a whole tensor."""
        component, key = self._find_key(name)
        return self.opened.index.components[component].specs[key].nbytes

    def read_boxes(self, wanted: Mapping[str, list[Box]]) -> dict[str, list[Tensor]]:
        """Read boxes of tensors, by DCP's names, as views of fresh memory."""
        boxes_by_key: dict[tuple[str, str], list[Box]] = {}  # tied tensors have one key
        first: dict[str, int] = {}
        for name, boxes in wanted.items():
            known = boxes_by_key.setdefault(self._find_key(name), [])
            first[name] = len(known)
            known += boxes
        needed: dict[str, list[str]] = {}
        shards: dict[str, dict[str, LocalShards]] = {}
        for (component, key), boxes in boxes_by_key.items():
            needed.setdefault(component, []).append(key)
            shape = self.opened.index.components[component].specs[key].shape
            shards.setdefault(component, {})[key] = _place_boxes(shape, boxes)
        read = self._tensors.read_tensors(needed, shards)
        found = {}
        for name, boxes in wanted.items():
            component, key = self._find_key(name)
            places = shards[component][key].places[first[name] :][: len(boxes)]
            found[name] = [_view(read[component][key], place) for place in places]
        return found

    def _find_key(self, name: str) -> tuple[str, str]:
        item, node = self.items[name]
        return item.component, node.key

    def pickled(self, name: str) -> io.BytesIO:
        """Return an item that is no tensor, as DCP pickles it."""
        item, node = self.items[name]
        if item.is_pickled:
            return io.BytesIO(node)
        keys = keys_in(node)
        tensors = self._tensors.read_tensors({item.component: keys})[item.component] if keys else {}
        return pickled(node, tensors)

    def stop_threads(self) -> None:
        """End the threads."""
        self._threads.close_pools()


class HoldfastReader(StorageReader):
    """Storage of `dcp.load`: reads checkpoints of `HoldfastWriter` and of a `CheckpointManager`.

        dcp.load(state, storage_reader=HoldfastReader(root))

    Any number of ranks may load. Every block that is read is checked; up to `BATCH_NBYTES` of a
    rank's tensors are checked before the first of them changes, larger states are read twice. What
    this process saves through DCP afterwards goes on from the checkpoint that it has loaded.

    Args:
        root: path or URL of the run, `root@which`, or the folder of one checkpoint.
        unsafe_pickle: load values that were saved as pickles, which runs what is in them.
        encrypt: the keys of encrypted checkpoints.
        timeout_s: longest time that one read of all tensors may take.
    """

    @check_arguments()
    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        unsafe_pickle: bool = False,
        encrypt: Encryption | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._where = root
        self._which: str | None = None
        self._unsafe_pickle = unsafe_pickle
        self._encrypt = encrypt
        self._timeout_s = timeout_s
        self._close: Callable[[], object] | None = None
        """Lets go of the checkpoint that is being read."""
        self._state: StoredState | None = None

    def __getstate__(self) -> dict[str, Any]:
        expect_path(self._where)
        return {**self.__dict__, "_close": None, "_state": None}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load of the checkpoint whose label, step or tag `checkpoint_id` ends with."""
        self.close()
        self._which = None
        if checkpoint_id is not None:
            self._which = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2]

    @override
    def read_metadata(self, *args: Any) -> Metadata:
        """Find the checkpoint, keep it from deletion during the load, and read what it holds."""
        try:
            return self.open().metadata
        except BaseException:
            self._which = None
            raise

    def open(self) -> StoredState:
        """Find the checkpoint, and keep it from deletion until `close`."""
        self.close()
        source = self._where
        if self._which is not None and not isinstance(source, Store):
            source, which = f"{split_source(source)[0]}@{self._which}", None
        else:
            which = self._which
        held = ExitStack()
        # Also at exit: DCP does not tell a reader that the load has failed.
        self._close = weakref.finalize(self, held.close)
        store, kept = held.enter_context(
            locate_with_lease(source, which=which, encrypt=self._encrypt)
        )
        try:
            entry = kept.entry
            gone = dropped(store, entry.folder, entry.manifest, entry.marks)
            opened = open_checkpoint(
                store,
                entry.folder,
                entry.manifest,
                components=[name for name in entry.manifest.components if name not in gone],
            )
            self._state = StoredState(store, opened, entry, self._timeout_s)
        except BaseException:
            self.close()
            raise
        held.callback(self._state.stop_threads)
        return self._state

    @property
    def _loading(self) -> StoredState:
        assert self._state is not None, "DCP reads the metadata first"
        return self._state

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Forget the id after `read_metadata` has used it: DCP does not reset without an id."""
        self._which = None

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse what would run code, and tell the coordinator which checkpoint this rank reads."""
        state = self._loading
        if not self._unsafe_pickle:
            asked = (state.items[one.storage_index.fqn][0] for one in plan.items)
            refuse_pickles(asked, "pass HoldfastReader(…, unsafe_pickle=True)")
        return replace(plan, storage_data=state.entry.reference)

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Expect that all ranks have found the same checkpoint."""
        found = {plan.storage_data.folder for plan in plans}
        if len(found) > 1:
            raise NoCheckpoint(
                f"the ranks found different checkpoints: {', '.join(sorted(found))}. One was "
                "committed in the meantime, or they do not have the same storage; name one by "
                "checkpoint_id"
            )
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and check all that the plan asks for, and give it to the planner."""
        state = self._loading
        try:
            values = [
                (read_item, state.pickled(read_item.storage_index.fqn))
                for read_item in plan.items
                if read_item.type == LoadItemType.BYTE_IO
            ]
            self._read_tensors(state, plan, planner)
            for read_item, value in values:
                planner.load_bytes(read_item, value)
            where = self._where if isinstance(self._where, Store) else state.store.url
            written_root(where).loaded = state.entry.reference
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, state: StoredState, plan: LoadPlan, planner: LoadPlanner) -> None:
        batches = [*_batch_reads(state, plan.items)]
        if len(batches) > 1:
            for batch in batches:
                state.read_boxes({name: [box for _, box in asked] for name, asked in batch.items()})
        cast: list[str] = []
        for batch in batches:
            found = state.read_boxes(
                {name: [box for _, box in asked] for name, asked in batch.items()}
            )
            for name, asked in batch.items():
                for (read_item, _), tensor in zip(asked, found[name], strict=True):
                    if _give(planner, read_item, tensor):
                        cast.append(name)
        if cast:
            warnings.warn(
                f"{len({*cast})} tensors were loaded into another dtype, first {cast[0]!r}",
                stacklevel=2,
            )

    def close(self) -> None:
        """End reading the checkpoint, which may then be deleted. The reader stays usable."""
        self._state = None
        if self._close is not None:
            self._close()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can name a checkpoint."""
        return bool(os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2])


def tensor_metadata(dtype: str, shape: tuple[int, ...], bounds: Column) -> TensorStorageMetadata:
    """Describe a tensor to DCP; `bounds`: the first and the last coordinates of each chunk."""
    starts, stops = bounds[:, 0, : len(shape)], bounds[:, 1, : len(shape)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[dtype]),
        size=torch.Size(shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in zip(starts.tolist(), (stops - starts).tolist(), strict=True)
        ],
    )


def whole_metadata(spec: TensorSpec) -> TensorStorageMetadata:
    """Describe a tensor that is one chunk to DCP."""
    return tensor_metadata(
        spec.dtype, spec.shape, np.array([[[0] * len(spec.shape), spec.shape]], np.int64)
    )


def refuse_pickles(items: Iterable[Item], remedy: str) -> None:
    """Raise `UsageError` if one of the items is a pickle."""
    unsafe = sorted({item.name for item in items if item.is_pickled})
    if unsafe:
        raise UsageError(
            f"{unsafe[0]!r}{f' and {len(unsafe) - 1} more' if len(unsafe) > 1 else ''}: saved as a "
            f"pickle, and loading it runs any code in it. If you trust who saved it, {remedy}"
        )


def _give(planner: LoadPlanner, read_item: ReadItem, tensor: Tensor) -> bool:
    """Copy a box to its destination; return whether that casts it."""
    target = planner.resolve_tensor(read_item).detach()
    if target.size() != tensor.size():
        raise UsageError(
            f"{read_item.dest_index.fqn!r}: the planner asks for {list(tensor.shape)} and gives "
            f"room for {list(target.shape)}"
        )
    target.copy_(tensor)
    planner.commit_tensor(read_item, target)
    return target.dtype != tensor.dtype


Asked = list[tuple[ReadItem, Box]]


def _batch_reads(state: StoredState, read_items: Iterable[ReadItem]) -> Iterator[dict[str, Asked]]:
    """Group the boxes that are asked for by tensor, and the tensors to batches."""
    by_name: dict[str, Asked] = {}
    for read_item in read_items:
        if read_item.type == LoadItemType.BYTE_IO:
            continue
        index = read_item.storage_index
        start = index.offset or (0,) * len(read_item.storage_offsets)
        offsets = tuple(a + b for a, b in zip(start, read_item.storage_offsets, strict=True))
        box = Box(offsets, tuple(read_item.lengths))
        by_name.setdefault(index.fqn, []).append((read_item, box))
    batch: dict[str, Asked] = {}
    taken = 0
    for name, asked in by_name.items():
        nbytes = state.nbytes(name)
        if batch and taken + nbytes > BATCH_NBYTES:
            yield batch
            batch, taken = {}, 0
        batch[name] = asked
        taken += nbytes
    if batch:
        yield batch


def _place_boxes(shape: tuple[int, ...], boxes: list[Box]) -> LocalShards:
    """Place boxes in a local tensor that spans the smallest box around all of them."""
    low = tuple(min(box.offsets[d] for box in boxes) for d in range(len(shape)))
    high = tuple(max(b.offsets[d] + b.sizes[d] for b in boxes) for d in range(len(shape)))
    places = tuple(
        Box(tuple(a - b for a, b in zip(box.offsets, low, strict=True)), box.sizes) for box in boxes
    )
    return LocalShards(
        shape=shape,
        boxes=tuple(boxes),
        places=places,
        views=(),
        local_shape=tuple(b - a for a, b in zip(low, high, strict=True)),
    )


def _view(tensor: Tensor, place: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(place.offsets, place.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
