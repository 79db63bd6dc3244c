"""Stored tensors straight into live ones, a block at a time, each checked before it is copied.

Needs memory for a few blocks, however large the state is. When a block proves damaged, others may
have been copied already; so either all of them are checked before (`verify_all`), or whoever loads
takes it upon him that the state is undefined until a whole load succeeds.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.loading.blockreading import FileBlocks
from holdfast.engine.loading.load import Opened, check_size, read_checked
from holdfast.engine.loading.wanted import Wanted, wanted_by_file
from holdfast.engine.staging.arena import Arena
from holdfast.engine.staging.memory import Buffers
from holdfast.engine.workers import Workers, gather
from holdfast.state.copying import LARGE_NBYTES, bytes_of, copy_tensors, is_plain
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


_Blocks = Mapping[tuple[str, int], _Block]
"""By file and number."""


class Stream:
    """The tensor files of one checkpoint. `Source` for tensors that are yet to be read."""

    def __init__(
        self,
        store: Store,
        opened: Opened,
        *,
        workers: Workers,
        timeout_s: float,
        verify: bool = True,
    ) -> None:
        self._store = store
        self._opened = opened
        self._workers = workers
        self._timeout_s = timeout_s
        self._verify = verify
        self._buffers = Buffers()
        self._block_nbytes = opened.index.block_nbytes
        self._files: dict[str, FileBlocks] = {}
        self._wanted: dict[str, Wanted] = {}

    def tensors(self, needed: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Unread]]:
        """The needed tensors by component and key, once their files are there in full length.

        Raises:
            CorruptData: a file is missing, or has another length.
        """
        opened, found = self._opened, {name: dict[str, Unread]() for name in needed}
        for name, wanted in wanted_by_file(opened.index, needed).items():
            entry = opened.manifest.files[name]
            check_size(self._store, f"{opened.folder}/{name}", entry)
            self._wanted[name] = wanted
            self._files[name] = FileBlocks.of(opened.folder, name, entry, opened.index)
            starts, nbytes = wanted.start.tolist(), wanted.nbytes.tolist()
            found[wanted.component].update(
                (spec.key, Unread(source=self, spec=spec, file=name, start=start, nbytes=size))
                for spec, start, size in zip(wanted.specs, starts, nbytes, strict=True)
            )
        return found

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
        """Read the second of each pair into the first; see `Source`.

        Large tensors take their bytes from the blocks themselves, small ones all at once from
        memory in which only they are kept.

        Raises:
            CorruptData: names file, block and the tensors in it; some may be copied already.
        """
        blocks: defaultdict[tuple[str, int], _Block] = defaultdict(_Block)
        small: defaultdict[str, list[tuple[Tensor, Unread]]] = defaultdict(list)
        large: list[Tensor] = []
        for live, unread in pairs:
            target = _target(live) if unread.nbytes >= LARGE_NBYTES else None
            if target is not None:
                self._part(unread.file, unread.start, target, blocks)
                large.append(live)
            elif unread.nbytes:
                small[unread.file].append((live, unread))
        images = {name: self._image(name, of_file, blocks) for name, of_file in small.items()}
        self._read(blocks)
        for live in large:
            # Neither numpy nor a copy into a view of bytes tells autograd that a tensor changed.
            torch.autograd.graph.increment_version(live)
        for name, of_file in small.items():
            unread_ones = [unread for _, unread in of_file]
            values = images[name].tensors(
                [unread.spec for unread in unread_ones],
                [unread.start for unread in unread_ones],
                np.array([unread.nbytes for unread in unread_ones], np.int64),
            )
            copy_tensors([(live, value) for (live, _), value in zip(of_file, values, strict=True)])

    def _image(
        self, name: str, pairs: list[tuple[Tensor, Unread]], blocks: defaultdict[Any, _Block]
    ) -> Arena:
        """Memory in which each of a file's small tensors gets its own place, and nothing else."""
        arena = Arena(self._opened.manifest.files[name].nbytes, huge=False)
        memory = np.frombuffer(arena.memory, np.uint8)
        pairs.sort(key=lambda pair: pair[1].start)
        for start, stop in _runs([(unread.start, unread.nbytes) for _, unread in pairs]):
            self._part(name, start, memory[start:stop], blocks)
        return arena

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
        jobs = [
            self._workers.submit(partial(self._read_block, *place, blocks[place], given_up))
            for place in sorted(blocks)
        ]
        what = f"reading {self._store.url}/{self._opened.folder}"
        try:
            gather(jobs, timeout_s=self._timeout_s, what=what)
        except BaseException:
            # A read that hangs may come back much later; it finds that nobody waits for it.
            given_up.set()
            for block in blocks.values():
                with block.copying:
                    continue
            raise

    def _read_block(self, name: str, number: int, block: _Block, given_up: threading.Event) -> None:
        if given_up.is_set():
            return
        start = number * self._block_nbytes
        nbytes = min(self._block_nbytes, self._opened.manifest.files[name].nbytes - start)
        buffer = self._buffers.take(self._block_nbytes)
        try:
            memory = buffer[:nbytes]
            read_checked(
                self._store,
                self._opened,
                self._files[name],
                memory,
                number,
                verify=self._verify,
                buffers=self._buffers,
            )
            with block.copying:
                if not given_up.is_set():
                    _copy(memory, block.parts)
        finally:
            self._buffers.give_back(buffer)


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


def _runs(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of what lies side by side; `places` are (start, length), rising."""
    runs: list[tuple[int, int]] = []
    for start, nbytes in places:
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], start + nbytes))
        else:
            runs.append((start, start + nbytes))
    return runs


def _copy(memory: memoryview, parts: Sequence[_Part]) -> None:
    source = np.frombuffer(memory, np.uint8)
    for part in parts:
        values = source[part.start : part.start + len(part.target)]
        if isinstance(part.target, Tensor):
            part.target.copy_(torch.from_numpy(values))
        else:
            np.copyto(part.target, values)
