"""The coordinator's plan of one save: who writes which boxes into which files, and the writing.

Tensors are resolved one by one, and written in waves of a few blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from holdfast.errors import UnsupportedState, UsageError
from holdfast.format.boxes import Unfit, check_boxes, key_of_box
from holdfast.format.index import Places, TensorTable
from holdfast.format.layout import number_of_file, tensor_file
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.interop.dcp.items import Item, paths_of, placed
from holdfast.root.commit import SaveAttempt
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.save import AttemptFiles, Tools
from holdfast.staging.interfaces import KnownFile, Staged
from holdfast.staging.waves import WaveContent, WaveTransfer
from holdfast.state.leaves import DTYPE_NAMES, plain_name
from holdfast.threads.buffers import LimitedBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBox:
    """A box of a tensor that one rank writes."""

    component: str
    tensor: TensorSpec
    """The whole tensor, by its key in the component."""
    offsets: tuple[int, ...]
    stored: TensorSpec
    """The box, by its key in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """A part and where it was written."""

    part: WrittenBox
    file: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Boxes and values that one rank writes, and the numbers of its files."""

    write_items: Sequence[WriteItem]
    parts: Mapping[MetadataIndex, WrittenBox]
    """The boxes of the rank; those without elements are written by nobody."""
    values: Mapping[str, Item]
    first: Mapping[str, int]
    """Number of the rank's first tensor file of each component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Message of the coordinator to one rank, in the plan of a save."""

    folder: str
    save_id: str
    tasks: Mapping[str | None, Task]
    """Items that the rank writes, by the cache of the planner; see `whole_plans`."""

    def cache_of(self, planner: SavePlanner) -> str | None:
        """Return the name in `tasks` of what a rank with this planner writes."""
        return None if None in self.tasks else getattr(planner, "_cached_plans_key", None)


class DcpLayout:
    """Items, boxes and numbers of files of one save."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        names = [item.index.fqn for plan in plans for item in plan.items]
        tensors = {
            item.index.fqn: item.tensor_data
            for plan in plans
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO and item.tensor_data is not None
        }
        self.items = placed(paths_of(dict.fromkeys(names), _mappings(plans)), tensors)
        """The items of all ranks, by DCP's name."""
        self._specs = _make_specs(self.items, tensors)
        self._whole: set[str] = set()
        self.parts = [self._make_written_boxes(plan) for plan in plans]
        self.counts: dict[str, int] = dict.fromkeys(self.components, 0)
        """Number of tensor files of each component."""
        self.first = [self._assign_numbers(parts) for parts in self.parts]
        """Number of each rank's first tensor file of each component."""

    @property
    def components(self) -> dict[str, list[Item]]:
        """The items of each component."""
        found: dict[str, list[Item]] = {}
        for item in self.items.values():
            found.setdefault(item.component, []).append(item)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self._specs.values())

    @property
    def num_files(self) -> int:
        """Number of files, at least, of a checkpoint."""
        return sum(self.counts.values()) + len(self.counts) + 2

    def task(self, rank: int, plan: SavePlan) -> Task:
        """Return the task of one rank: what it writes."""
        names = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        return Task(
            write_items=plan.items,
            parts=self.parts[rank],
            values={name: self.items[name] for name in names},
            first=self.first[rank],
        )

    def _make_written_boxes(self, plan: SavePlan) -> dict[MetadataIndex, WrittenBox]:
        parts: dict[MetadataIndex, WrittenBox] = {}
        for write_item in plan.items:
            data = write_item.tensor_data
            if write_item.type == WriteItemType.BYTE_IO or data is None:
                continue
            item = self.items[write_item.index.fqn]
            box = self._box(item.name, data)
            if box is not None:
                parts[write_item.index] = self._make_written_box(item, *box)
        return parts

    def _box(
        self, name: str, data: TensorWriteData
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return offsets and sizes of a chunk; None if it has no elements, and others have."""
        offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        if math.prod(sizes):
            return offsets, sizes
        if math.prod(data.size) or name in self._whole:
            return None
        self._whole.add(name)
        return (0,) * len(data.size), tuple(data.size)

    def _make_written_box(
        self, item: Item, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> WrittenBox:
        spec = self._specs[item.name]
        key = spec.key if sizes == spec.shape else key_of_box(spec.key, offsets, sizes)
        return WrittenBox(
            component=item.component,
            tensor=spec,
            offsets=offsets,
            stored=TensorSpec(key, spec.dtype, sizes),
        )

    def _assign_numbers(self, parts: Mapping[MetadataIndex, WrittenBox]) -> dict[str, int]:
        first: dict[str, int] = {}
        for component, specs in specs_by_component(parts.values()).items():
            first[component] = self.counts[component]
            self.counts[component] += len(lay_out(component, specs, first_number=0))
        return first


def specs_by_component(parts: Iterable[WrittenBox]) -> dict[str, list[TensorSpec]]:
    """List the stored boxes of parts by component."""
    found: dict[str, list[TensorSpec]] = {}
    for part in parts:
        found.setdefault(part.component, []).append(part.stored)
    return found


def _mappings(plans: Sequence[SavePlan]) -> object:
    """Join the paths of items that the planners of all ranks know."""
    known = [plan.planner_data for plan in plans if plan.planner_data is not None]
    if all(isinstance(one, dict) for one in known):
        return {name: path for one in known for name, path in one.items()} if known else None
    return known[0]


def _make_specs(
    items: Mapping[str, Item], tensors: Mapping[str, TensorWriteData]
) -> dict[str, TensorSpec]:
    odd = [
        (name, f"dtype {plain_name(data.properties.dtype)} has no name in the format")
        for name, data in tensors.items()
        if data.properties.dtype not in DTYPE_NAMES
    ]
    if odd:
        raise UnsupportedState(odd)
    return {
        name: TensorSpec(
            items[name].tensor_key, DTYPE_NAMES[data.properties.dtype], tuple(data.size)
        )
        for name, data in tensors.items()
    }


def whole_plans(plans: list[SavePlan]) -> dict[str | None, list[SavePlan]]:
    """Return the plans with their items, also where a planner that caches has left them out.

    They are then in its cache, but the coordinator's storage is not told which planner it is: so
    all that it may be are returned, by their caches. Each rank knows the planner when it writes.
    """
    if all(getattr(plan, "usable", True) for plan in plans):
        return {None: plans}
    known = {
        name: list(cached)
        for name, cached in getattr(SavePlanner, "_cached_global_plan", {}).items()
        if len(cached) == len(plans)
        and all(one is plan for one, plan in zip(cached, plans, strict=True) if plan.usable)
    }
    if not known:
        raise UsageError(
            "the planner left out its plan (enable_plan_caching), and no planner of this process "
            f"has cached one for {len(plans)} ranks; this torch may keep it elsewhere. Turn the "
            "caching off"
        )
    return known


def tables_of(
    components: Sequence[str], placed_parts: Sequence[PlacedPart], counts: Mapping[str, int]
) -> dict[str, TensorTable]:
    """Make the tables of the index from what was written; `counts`: tensor files by component."""
    tables = {}
    by_component: dict[str, list[PlacedPart]] = {name: [] for name in components}
    for one in placed_parts:
        by_component[one.part.component].append(one)
    for component, own in by_component.items():
        specs = {one.part.tensor.key: one.part.tensor for one in own}
        numbers = {key: number for number, key in enumerate(specs)}
        own.sort(key=lambda one: (numbers[one.part.tensor.key], one.part.offsets))
        columns = [
            (numbers[one.part.tensor.key], one.file, one.start, one.part.stored.nbytes)
            for one in own
        ]
        tensor, file, start, nbytes = np.array(columns, np.int64).reshape(-1, 4).T
        files = [tensor_file(component, number) for number in range(counts[component])]
        table = tables[component] = TensorTable.of_boxes(
            specs,
            Places(files, file, start, nbytes),
            tensor,
            [one.part.offsets for one in own],
            [one.part.stored.shape for one in own],
        )
        if table.boxes is not None:
            try:
                check_boxes([spec.shape for spec in specs.values()], table.boxes)
            except Unfit as error:
                name = [*specs][error.tensor]
                raise UsageError(f"{component}.{name}: {error}") from error
    return tables


Resolve = Callable[[str, TensorSpec], Tensor]
"""Function that gives the tensor of a component with that spec."""


def write_tensors(
    attempt: SaveAttempt,
    specs: Mapping[str, Sequence[TensorSpec]],
    *,
    first: Mapping[str, int],
    resolve: Resolve,
    tools: Tools,
    pool: LimitedBuffers,
) -> AttemptFiles:
    """Write tensors by component into files numbered from `first`; wait until all are durable."""
    laid_out = {
        name: tuple(map(KnownFile, lay_out(name, some, first_number=first[name])))
        for name, some in specs.items()
    }
    staged = Staged(
        files=laid_out,
        trees={},
        kinds={},
        transfer=_Resolving(
            {
                known.file.name: _Tensors(known.file.specs, partial(resolve, name))
                for name, of_component in laid_out.items()
                for known in of_component
            },
            pool,
        ),
    )
    files = AttemptFiles(attempt, staged, tools, SaveParticipant())
    files.write_attempt_files(files.iterate_tensor_files())
    return files


def places_of(files: AttemptFiles) -> dict[tuple[str, str], tuple[int, int]]:
    """Return number of the file and first byte of each tensor, by component and key."""
    return {
        (name, spec.key): (number_of_file(known.file.name), start)
        for name, of_component in files.staged.files.items()
        for known in of_component
        for spec, start in zip(known.file.specs, known.file.starts, strict=True)
    }


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a file, of which the last one asked for is kept."""

    def __init__(
        self, specs: Sequence[TensorSpec], resolve: Callable[[TensorSpec], Tensor]
    ) -> None:
        self._specs = {spec.key: spec for spec in specs}
        self._resolve = resolve
        self._last: tuple[str, Tensor] | None = None

    @override
    def __getitem__(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._resolve(self._specs[key]))
        return self._last[1]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    @override
    def __len__(self) -> int:
        return len(self._specs)


class _Resolving(WaveTransfer):
    """Waves over tensors that exist only while their blocks are copied."""

    def __init__(self, tensors: Mapping[str, _Tensors], pool: LimitedBuffers) -> None:
        super().__init__(tensors, pool)
        self._by_file = tensors

    @override
    def content(self, known: KnownFile) -> WaveContent:
        return WaveContent(known, self._by_file[known.file.name], self)
