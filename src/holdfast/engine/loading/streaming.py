"""Stored tensors straight into live ones, a block at a time. Each is checked before it is copied;
or while it is, where it is cached.

Needs memory for 16 blocks, and at a time for some of the tensors that cannot take bytes as they
are read, however large the state is. When a block proves damaged, others may have been copied
already; so either all of them are checked before (`verify_all`), or whoever loads takes it upon him
that the state is undefined until a whole load succeeds.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.loading.blockreading import FileBlocks, cached_block
from holdfast.engine.loading.load import Opened, begin_checked, check_size
from holdfast.engine.loading.tables import DIRECT_NBYTES, IMAGE_NBYTES, Run, UnreadTensors
from holdfast.engine.loading.wanted import Wanted, wanted_by_file
from holdfast.engine.memory import Buffers
from holdfast.engine.staging.arena import Arena
from holdfast.engine.staging.device import pin
from holdfast.engine.threads import Threads, Use
from holdfast.state.copying import bytes_of, copy_tensors, is_plain
from holdfast.state.unread import Unread
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a block, from `start` on, and where they go."""

    start: int
    target: Any
    """A numpy array of bytes, or a tensor of bytes on a device."""


@dataclass(slots=True)
class _Block:
    """What is wanted of one block."""

    parts: list[_Part] = field(default_factory=list)
    copying: threading.Lock = field(default_factory=threading.Lock)


class _Pinned:
    """Memory from which a device fetches by itself. It stays until the device has forgotten it."""

    def __init__(self, buffer: memoryview, device: torch.device) -> None:
        self._buffer = buffer
        pin(torch.frombuffer(buffer, dtype=torch.uint8), self, device)


_Blocks = Mapping[tuple[str, int], _Block]
"""By file and number."""
_Goal = tuple[Tensor, Unread, Any]
"""A live tensor, what goes into it, and its memory as bytes where these can be read into it."""

_NUM_KEPT = 4
"""Blocks that are kept after a tensor was read by itself: the next ones are often in them too."""
_NUM_ALONE = 2
"""The most blocks of a tensor for which that is done."""
_ALIGNMENT = 64
_PART_NBYTES_MIN = 16 * 1024
"""Of the parts of a block, on average, that are read one by one."""


class Stream:
    """The tensor files of one checkpoint. `TensorSource` for tensors that are yet to be read."""

    def __init__(
        self,
        store: Store,
        opened: Opened,
        *,
        threads: Threads,
        timeout_s: float,
        verify: bool = True,
    ) -> None:
        self._store = store
        self._opened = opened
        self._threads = threads
        self._timeout_s = timeout_s
        self._verify = verify
        self._buffers = Buffers()
        self._pinned: dict[int, _Pinned] = {}
        """Buffers by their ids."""
        self._device: torch.device | None = None
        """One to which copies go, if any do."""
        self._block_nbytes = opened.index.block_nbytes
        self._kept: dict[tuple[str, int], memoryview] = {}
        self._files: dict[str, FileBlocks] = {}
        self._wanted: dict[str, Wanted] = {}
        self.failure: BaseException | None = None
        """Why a read failed, the last time that one did."""

    def tensors(self, needed: Mapping[str, Iterable[str]]) -> dict[str, UnreadTensors]:
        """The needed tensors by component and key, once their files are there in full length.

        Raises:
            CorruptData: a file is missing, or has another length.
        """
        opened, parts = self._opened, {name: dict[str, Wanted]() for name in needed}
        for name, wanted in wanted_by_file(opened.index, needed).items():
            entry = opened.manifest.files[name]
            check_size(self._store, f"{opened.folder}/{name}", entry)
            self._wanted[name] = wanted
            self._files[name] = FileBlocks.of(opened.folder, name, entry, opened.index)
            parts[wanted.component][name] = wanted
        return {name: UnreadTensors(self, of_name) for name, of_name in parts.items()}

    def verify_all(self) -> None:
        """Read every block that is wanted, and keep nothing of it.

        Raises:
            CorruptData: names file, block and the tensors in it.
        """
        self._read(
            {
                (name, number): _Block()
                for name, wanted in self._wanted.items()
                for number in wanted.blocks(self._block_nbytes)
            }
        )

    def copy(self, pairs: Sequence[tuple[Tensor, Unread]]) -> None:
        """Read the second of each pair into the first; see `TensorSource`.

        Large tensors take their bytes from the blocks themselves, others from memory in which only
        they are kept, many at a time.

        Raises:
            CorruptData: names file, block and the tensors in it; some may be copied already.
        """
        # Threads copy, not on the caller's stream: what still uses the live tensors comes first.
        for device in {live.device for live, _ in pairs if live.is_cuda}:
            torch.cuda.synchronize(device)
            self._device = device
        for batch in _batches(pairs):
            self._copy_batch(batch)

    def read_runs(self, runs: Sequence[Run], memory: Any) -> None:
        """Fill memory with stretches of the files; see `Files`.

        Raises:
            CorruptData: names file, block and the tensors in it.
        """
        blocks: defaultdict[tuple[str, int], _Block] = defaultdict(_Block)
        for run in runs:
            self._part(run.file, run.start, memory[run.at : run.at + run.nbytes], blocks)
        self._read(blocks)

    def _buffer(self) -> memoryview:
        """Memory for a block, from which a device may fetch while other blocks are read."""
        buffer = self._buffers.take(self._block_nbytes)
        if self._device is not None and id(buffer) not in self._pinned:
            self._pinned[id(buffer)] = _Pinned(buffer, self._device)
        return buffer

    def _copy_batch(self, batch: Sequence[_Goal]) -> None:
        blocks: defaultdict[tuple[str, int], _Block] = defaultdict(_Block)
        others: list[tuple[Tensor, Unread]] = []
        for live, unread, target in batch:
            if target is None:
                others.append((live, unread))
                continue
            self._part(unread.file, unread.start, target, blocks)
            # Neither numpy nor a copy into a view of bytes tells autograd that a tensor changes,
            # which it may also do when not all of it can be read.
            torch.autograd.graph.increment_version(live)
        values = self._image([unread for _, unread in others], blocks)
        self._read(blocks)
        copy_tensors([(live, value) for (live, _), value in zip(others, values, strict=True)])

    def _image(
        self, unread_ones: Sequence[Unread], blocks: defaultdict[Any, _Block]
    ) -> list[Tensor]:
        """Tensors in memory of their own, into which these are read with the blocks."""
        runs, starts = _packed(unread_ones)
        arena = Arena(runs[-1].at + runs[-1].nbytes if runs else 0)
        memory = np.frombuffer(arena.memory, np.uint8)
        for run in runs:
            self._part(run.file, run.start, memory[run.at : run.at + run.nbytes], blocks)
        return arena.tensors(
            [unread.spec for unread in unread_ones],
            starts,
            np.array([unread.nbytes for unread in unread_ones], np.int64),
        )

    def _part(self, file: str, start: int, target: Any, blocks: defaultdict[Any, _Block]) -> None:
        """Note what each block brings of `target`, which begins at byte `start` of the file."""
        done = 0
        while done < len(target):
            number, offset = divmod(start + done, self._block_nbytes)
            nbytes = min(self._block_nbytes - offset, len(target) - done)
            blocks[file, number].parts.append(_Part(offset, target[done : done + nbytes]))
            done += nbytes

    def _read(self, blocks: _Blocks) -> None:
        given_up = threading.Event()
        # In the order of the files, in which a disk is read fastest.
        places = [place for place in sorted(blocks) if not self._is_copied(place, blocks[place])]
        is_alone = len(places) <= _NUM_ALONE
        what = f"reading {self._store.url}/{self._opened.folder}"
        try:
            with self._store.keeping_open():
                self._threads.read_all(
                    [
                        partial(self._begin_block, place, blocks[place], given_up, keeps=is_alone)
                        for place in places
                    ],
                    timeout_s=self._timeout_s,
                    what=what,
                )
        except BaseException as error:
            self.failure = error
            # A read that hangs may come back much later; it finds that nobody waits for it.
            given_up.set()
            for block in blocks.values():
                with block.copying:
                    continue
            raise
        while len(self._kept) > _NUM_KEPT:
            self._buffers.give_back(self._kept.pop(next(iter(self._kept))))

    def _is_copied(self, place: tuple[str, int], block: _Block) -> bool:
        """Copy from a block that was kept, if it was."""
        kept = self._kept.get(place)
        if kept is not None:
            _copy(kept, block.parts)
        return kept is not None

    def _begin_block(
        self, place: tuple[str, int], block: _Block, given_up: threading.Event, *, keeps: bool
    ) -> Use | None:
        """Wait for a block; what this gives copies it to where it is wanted."""
        if given_up.is_set():
            return None
        name, number = place
        start = number * self._block_nbytes
        nbytes = min(self._block_nbytes, self._opened.manifest.files[name].nbytes - start)
        buffer = self._buffer()
        use: Use | None = None
        try:
            memory = buffer[:nbytes]
            if keeps or not self._is_read_in_place(place, block, memory, given_up):
                fill = begin_checked(
                    self._store,
                    self._opened,
                    self._files[name],
                    memory,
                    number,
                    verify=self._verify,
                    buffers=self._buffers,
                )
                use = partial(self._use, place, block, given_up, buffer, fill, keeps=keeps)
        finally:
            if use is None:
                self._buffers.give_back(buffer)
        return use

    def _use(
        self,
        place: tuple[str, int],
        block: _Block,
        given_up: threading.Event,
        buffer: memoryview,
        fill: Use,
        *,
        keeps: bool,
    ) -> None:
        is_kept = False
        try:
            fill()
            with block.copying:
                if not given_up.is_set():
                    _copy(buffer, block.parts)
                    if keeps:
                        self._kept[place], is_kept = buffer, True
        finally:
            if not is_kept:
                self._buffers.give_back(buffer)

    def _is_read_in_place(
        self,
        place: tuple[str, int],
        block: _Block,
        memory: memoryview,
        given_up: threading.Event,
    ) -> bool:
        """Have the bytes of a block copied once, to where they are wanted, if they are at hand;
        `memory`, which has the length of the block, takes those that nobody wants."""
        name, number = place
        targets = _targets(block.parts, memory)
        if targets is None:
            return False
        fill = cached_block(self._store, self._files[name], number, len(memory))
        if fill is None:
            return False
        with block.copying:
            # Nothing in here may hang: a load that is given up waits for it.
            return given_up.is_set() or fill(targets, self._verify)


def _targets(parts: Sequence[_Part], memory: memoryview) -> list[memoryview] | None:
    """Where the bytes of a block go, in their order; `memory` takes those that nobody wants. None
    where some are wanted twice, or on a device, or in so many places that it takes longer."""
    if len(parts) * _PART_NBYTES_MIN > len(memory) + _PART_NBYTES_MIN:
        return None
    targets: list[memoryview] = []
    done = 0
    for part in sorted(parts, key=attrgetter("start")):
        if part.start < done or isinstance(part.target, Tensor):
            return None
        targets += [memory[done : part.start], memoryview(part.target)]
        done = part.start + len(part.target)
    return [*targets, memory[done:]]


def _batches(pairs: Iterable[tuple[Tensor, Unread]]) -> Iterator[list[_Goal]]:
    """What is copied at a time, in the order of the files."""
    batch: list[_Goal] = []
    image_nbytes = 0
    for live, unread in sorted(pairs, key=lambda pair: (pair[1].file, pair[1].start)):
        if not unread.nbytes:
            continue
        target = _target(live) if unread.nbytes >= DIRECT_NBYTES else None
        taken = unread.nbytes if target is None else 0
        if batch and image_nbytes + taken > IMAGE_NBYTES:
            yield batch
            batch, image_nbytes = [], 0
        batch.append((live, unread, target))
        image_nbytes += taken
    if batch:
        yield batch


def _target(live: Tensor) -> Any | None:
    """The memory of a live tensor as bytes, where a stretch of it is a stretch of the file's."""
    if is_plain(live):
        return bytes_of(live)
    if (
        live.device.type == "cuda"
        and live.is_contiguous()
        and not (live.is_neg() or live.is_conj())
    ):
        return live.detach().reshape(-1).view(torch.uint8)
    return None


def _packed(unread_ones: Iterable[Unread]) -> tuple[list[Run], list[int]]:
    """Places without gaps for tensors in the order of their files: as runs, and of each tensor."""
    runs: list[Run] = []
    starts: list[int] = []
    for unread in unread_ones:
        run = runs[-1] if runs else Run("", 0, 0, 0)
        if run.file != unread.file or unread.start > run.start + run.nbytes:
            end = run.at + run.nbytes
            # Aligned as in the file, so that it shows when it was not.
            run = Run(unread.file, unread.start, 0, end + (unread.start - end) % _ALIGNMENT)
            runs.append(run)
        run.nbytes = max(run.nbytes, unread.start + unread.nbytes - run.start)
        starts.append(run.at + unread.start - run.start)
    return runs, starts


def _copy(memory: memoryview, parts: Sequence[_Part]) -> None:
    source = np.frombuffer(memory, np.uint8)
    for part in parts:
        values = source[part.start : part.start + len(part.target)]
        if isinstance(part.target, Tensor):
            part.target.copy_(torch.from_numpy(values))
        else:
            np.copyto(part.target, values)
