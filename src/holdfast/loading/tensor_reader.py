"""Reads of the tensors of one checkpoint, into fresh memory or into live tensors.

Fresh memory holds the whole state once more, and no live tensor changes until all of it is checked.
Live tensors are filled block by block, as each is checked, which needs memory for a few blocks and
for the tensors that cannot be filled directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.format.boxes import Column
from holdfast.format.index import Places
from holdfast.loading.assembly import Assembly, FreshTensors, UnreadTensors
from holdfast.loading.open import Opened
from holdfast.loading.pipeline import ReadPipeline
from holdfast.loading.plan import (
    DIRECT_NBYTES,
    BlockTurn,
    Packed,
    ReadPlan,
    Sharing,
    Wanted,
    batches,
    wanted_by_file,
)
from holdfast.loading.staged_blocks import StagedBlocks
from holdfast.staging.arena import Arena
from holdfast.state.planning.copying import Stored, UnreadTensor, bytes_of, copy_tensors, is_plain
from holdfast.state.shards import LocalShards
from holdfast.store.base import Store
from holdfast.threads.workers import Threads

Held: TypeAlias = Mapping[str, Mapping[str, LocalShards]]
"""By component and key the boxes of a tensor that are needed."""
NONE_HELD: Held = MappingProxyType({})


class TensorReader:
    """Reader of the tensors of one checkpoint; also the `PackedSource` of its unread tensors."""

    def __init__(
        self,
        store: Store,
        opened: Opened,
        *,
        threads: Threads,
        timeout_s: float,
        verify: bool = True,
        sharing: Sharing | None = None,
    ) -> None:
        """Make the reader; with `sharing` other ranks read some of the blocks for this one."""
        self._opened = opened
        self._pipeline = ReadPipeline(
            store, opened, threads=threads, timeout_s=timeout_s, verify=verify, sharing=sharing
        )
        self._unread: dict[str, Wanted] = {}

    def use_staged_blocks(self, staged: StagedBlocks) -> None:
        """Read the blocks that are in shared memory there."""
        self._pipeline.staged = staged

    @property
    def failure(self) -> BaseException | None:
        """Error of the last read that failed; None if none did."""
        return self._pipeline.failure

    def read_tensors(
        self, needed: Mapping[str, Iterable[str]], shards: Held = NONE_HELD
    ) -> dict[str, Mapping[str, Tensor]]:
        """Read the needed tensors, by component and key, into fresh memory.

        Of tensors in `shards` it reads and returns only those boxes. Takes further memory, for a
        short time, for 64 MiB or one stored box of tensors whose boxes are put together.
        """
        whole, boxed = self._split_needed(needed, shards)
        assembly = Assembly(self._opened.index, boxed)
        by_component = self._group_by_file(whole)
        known = {file for parts in by_component.values() for file in parts}
        for file in assembly.tensor_files:
            if file not in known:
                self._pipeline.register_file(file)
        plan = self._plan()
        tables: dict[str, Mapping[str, Tensor]] = {}
        for component, parts in by_component.items():
            # As large as the files. Pages of blocks that are not needed are never touched, and so
            # cost nothing.
            arenas = [Arena(self._opened.manifest.files[file].nbytes) for file in parts]
            for (file, wanted), arena in zip(parts.items(), arenas, strict=True):
                plan.plan_arena_reads(file, wanted, arena)
            tables[component] = FreshTensors(parts, arenas)
        for component, tensors in assembly.allocate().items():
            tables[component] = {**tables[component], **tensors}
        self._assemble(plan, assembly)
        # The caller keeps this reader until all is applied, and with it the buffers.
        self._pipeline.drop_buffers()
        return tables

    def unread(
        self, needed: Mapping[str, Iterable[str]], shards: Held = NONE_HELD
    ) -> dict[str, Mapping[str, Stored]]:
        """Return placeholders of the needed tensors, by component and key: read when copied.

        Components with a tensor whose bytes do not follow each other in one file are read into
        fresh memory at once, and so are files that come from other ranks; see `read_tensors`.
        """
        lists = {name: [*keys] for name, keys in needed.items()}
        index, held = self._opened.index, {name: shards.get(name, {}) for name in lists}
        boxed = {
            name: {key: held[name].get(key) for key in keys}
            for name, keys in lists.items()
            if held[name] or index.components[name].has_boxes
        }
        adjacent = Assembly(index, boxed).find_adjacent()
        for parts in adjacent.values():
            for file in parts:
                self._pipeline.register_file(file)
        whole = {name: keys for name, keys in lists.items() if name not in boxed}
        found = self._group_by_file(whole) | adjacent
        own: dict[str, dict[str, Wanted]] = {}
        apart = {name: keys for name, keys in lists.items() if name not in found}
        for name, parts in found.items():
            own[name] = {file: of for file, of in parts.items() if self._pipeline.is_own(file)}
            self._unread.update(own[name])
            others = [of for file, of in parts.items() if file not in own[name]]
            if others:
                apart[name] = [spec.key for of in others for spec in of.specs]
        tables: dict[str, Mapping[str, Stored]] = {
            name: UnreadTensors(self, parts) for name, parts in own.items()
        }
        for name, tensors in (self.read_tensors(apart, shards) if apart else {}).items():
            tables[name] = {**tables[name], **tensors} if own.get(name) else tensors
        return tables

    def verify_all(self) -> None:
        """Read and check every block that the `unread` tensors need, without any copy."""
        plan = self._plan()
        for file, wanted in self._unread.items():
            plan.plan_checked_reads(file, wanted)
        self._pipeline.run(plan)

    def read_for_others(self, turns: Sequence[BlockTurn]) -> None:
        """Read blocks that only other ranks need, and send them."""
        self._pipeline.exchange_blocks(turns, {})

    def read_pairs(self, pairs: Sequence[tuple[Tensor, UnreadTensor]]) -> None:
        """Read the stored tensor of each pair into the live one; see `TensorSource`."""
        # Threads copy, not on the caller's stream: pending uses of the live tensors must end first.
        for device in {live.device for live, _ in pairs if live.is_cuda}:
            torch.cuda.synchronize(device)
            self._pipeline.pin_for(device)
        pairs = [(live, unread) for live, unread in pairs if unread.nbytes]
        targets = [
            _view_memory(live) if unread.nbytes >= DIRECT_NBYTES else None for live, unread in pairs
        ]
        places = _make_columns([unread for _, unread in pairs])
        is_packed = np.fromiter((target is None for target in targets), np.bool_, len(targets))
        for numbers in batches(places, places.nbytes * is_packed):
            self._copy_batch(pairs, targets, places, numbers)

    def read_packed(self, packed: Packed) -> None:
        """Read tensors into packed memory; see `PackedSource`."""
        plan = self._plan()
        plan.copy_packed(packed)
        self._pipeline.run(plan)

    def _assemble(self, plan: ReadPlan, assembly: Assembly) -> None:
        """Execute a plan together with the first pieces of an assembly, then read the others."""
        places = assembly.places
        for numbers in batches(places, places.nbytes * ~assembly.is_run):
            is_run = assembly.is_run[numbers]
            for number in numbers[is_run].tolist():
                file, start = places.files[places.file[number]], int(places.start[number])
                plan.plan_copy(file, start, assembly.find_memory(number))
            packed = Packed(places.select_shards(numbers[~is_run]))
            plan.copy_packed(packed)
            self._pipeline.run(plan)
            assembly.scatter(numbers[~is_run], packed)
            plan = self._plan()
        self._pipeline.run(plan)

    def _copy_batch(
        self,
        pairs: Sequence[tuple[Tensor, UnreadTensor]],
        targets: Sequence[Any | None],
        places: Places,
        numbers: Column,
    ) -> None:
        plan = self._plan()
        others: list[int] = []
        for number in numbers.tolist():
            target, (live, unread) = targets[number], pairs[number]
            if target is None:
                others.append(number)
                continue
            plan.plan_copy(unread.file, unread.start, target)
            # Neither numpy nor a copy into a view of bytes tells autograd that a tensor changes.
            # It may change even if the read fails half-way.
            torch.autograd.graph.increment_version(live)
        packed = Packed(places.select_shards(np.array(others, np.int64)))
        plan.copy_packed(packed)
        self._pipeline.run(plan)
        values = packed.arena.make_tensor_views(
            [pairs[number][1].spec for number in others], packed.starts, packed.nbytes
        )
        lives = [pairs[number][0] for number in others]
        copy_tensors([*zip(lives, values, strict=True)])

    def _split_needed(
        self, needed: Mapping[str, Iterable[str]], shards: Held
    ) -> tuple[Mapping[str, Iterable[str]], dict[str, dict[str, LocalShards | None]]]:
        """Part the needed tensors: those stored whole and needed whole, and all others."""
        whole: dict[str, Iterable[str]] = {}
        boxed: dict[str, dict[str, LocalShards | None]] = {}
        for name, keys in needed.items():
            table, held = self._opened.index.components[name], shards.get(name, {})
            if not table.has_boxes and not held:
                whole[name] = keys
                continue
            whole[name] = of_whole = []
            of_boxed: dict[str, LocalShards | None] = {}
            for key in keys:
                local = held.get(key)
                if table.is_whole(key) and (local is None or local.is_whole):
                    of_whole.append(key)
                else:
                    of_boxed[key] = local
            if of_boxed:
                boxed[name] = of_boxed
        return whole, boxed

    def _group_by_file(self, needed: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Wanted]]:
        """Group the needed tensors by component and file, and check the lengths of the files."""
        by_component: dict[str, dict[str, Wanted]] = {name: {} for name in needed}
        for file, wanted in wanted_by_file(self._opened.index, needed).items():
            self._pipeline.register_file(file)
            by_component[wanted.component][file] = wanted
        return by_component

    def _plan(self) -> ReadPlan:
        return ReadPlan(self._opened.index.block_nbytes)


def _make_columns(tensors: Sequence[UnreadTensor]) -> Places:
    """Return the files and offsets of unread tensors as columns."""
    files = sorted({unread.file for unread in tensors})
    numbers = {file: number for number, file in enumerate(files)}
    rows = [(numbers[unread.file], unread.start, unread.nbytes) for unread in tensors]
    return Places(files, *np.array(rows, np.int64).reshape(-1, 3).T)


def _view_memory(live: Tensor) -> Any | None:
    """Return the memory of a live tensor as bytes; None if its layout is not the stored one."""
    if is_plain(live):
        return bytes_of(live)
    if (
        live.device.type == "cuda"
        and live.is_contiguous()
        and not (live.is_neg() or live.is_conj())
    ):
        return live.detach().reshape(-1).view(torch.uint8)
    return None
