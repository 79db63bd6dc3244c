"""One tensor file in memory, and what is known of its bytes.

An image stays from one save to the next. Where the live bytes equal those that are there, nothing
is copied, and the digest of the block stays known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from holdfast.engine.arena import Arena
from holdfast.engine.device import pin
from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorFile

LARGE_NBYTES = 1 << 20
"""Tensors of this size and more are copied one by one; the rest of a file in one call."""

_libc = ctypes.CDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int
_memcpy = _libc.memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


class Image:
    """The memory of one tensor file: a view for each tensor, and what is known of each block."""

    def __init__(self, file: TensorFile, *, is_apart: bool = False) -> None:
        """Take the memory.

        Raises:
            OutOfMemory: the system refuses.
        """
        self.file = file
        self.is_apart = is_apart
        self.arena = Arena(file.nbytes)
        self.arena.memory[: len(file.header)] = file.header
        self.views = tuple(self.arena.tensors(file.specs, file.starts))
        self.digests: list[bytes | None] = [None] * blocks.num_blocks(file.nbytes)
        """By block: the digest of what the arena holds, where it is known."""
        self.differs = False
        """Whether bytes were seen to differ from those that the last commit had."""
        self.changed: set[str] = set()
        """Keys of the tensors of which that was seen."""
        self.large = [i for i, spec in enumerate(file.specs) if spec.nbytes >= LARGE_NBYTES]
        """Positions of the tensors that are copied one by one."""
        small = [i for i, spec in enumerate(file.specs) if spec.nbytes < LARGE_NBYTES]
        self._small = small
        self._small_keys = [file.specs[i].key for i in small]
        self._small_views = [self.views[i] for i in small]
        self._small_blocks = sorted({number for i in small for number in self.blocks_of(i)})
        self._is_pinned: bool | None = None
        self._committed: list[bytes | None] | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._committed_versions: dict[int, tuple[int, int]] = {}
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.memory))

    def block(self, number: int) -> memoryview:
        """The memory of a block."""
        return self.arena.memory[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def blocks_of(self, position: int) -> range:
        """The blocks in which the tensor at `position` of the file has bytes."""
        start = self.file.starts[position]
        stop = start + max(self.file.specs[position].nbytes, 1)
        return range(start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES))

    def update(self, key: str, number: int, start: int, source: int, nbytes: int) -> None:
        """Make the bytes from `start`, inside one block, equal to those at address `source`."""
        target = self._address + start
        if _memcmp(target, source, nbytes):
            self.digests[number] = None
            self.differs = True
            self.changed.add(key)
            _memcpy(target, source, nbytes)

    def overwrite_small(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all small tensors in one call, but those on a CUDA device."""
        self._versions = {}
        sources = [tensors[key] for key in self._small_keys]
        if sources:
            self.forget(self._small_blocks)
            views = self._small_views
            if any(source.is_cuda for source in sources):
                pairs = zip(views, sources, strict=True)
                here = [(view, source) for view, source in pairs if not source.is_cuda]
                views, sources = [view for view, _ in here], [source for _, source in here]
            if views:
                torch._foreach_copy_(views, sources)

    def overwritten_by_device(self, position: int, source: Tensor) -> tuple[Tensor, Tensor]:
        """The copy, (to, from), of a tensor that a device will make."""
        if self._is_pinned is None:
            self._is_pinned = pin(torch.frombuffer(self.arena.memory, dtype=torch.uint8), self)
        if self.file.specs[position].nbytes >= LARGE_NBYTES:
            self._note_version(position, source)
        self.forget(self.blocks_of(position))
        return self.views[position], source

    def overwrite(self, position: int, source: Tensor) -> None:
        """Copy a tensor of any strides, on any device."""
        self._note_version(position, source)
        self.forget(self.blocks_of(position))
        self.views[position].copy_(source)

    def _note_version(self, position: int, source: Tensor) -> None:
        version = -1 if source.is_inference() else source._version
        self._versions[position] = (source.data_ptr(), version)

    def forget(self, numbers: Iterable[int]) -> None:
        """Something was, or will be, copied into these blocks."""
        for number in numbers:
            self.digests[number] = None

    def digest(self, number: int) -> bytes:
        """The digest of a block, computed unless it is known."""
        digests = self.digests
        known = digests[number]
        if known is None:
            known = digests[number] = blocks.block_digest(self.block(number))
        return known

    def doubt(self) -> None:
        """A save failed: nothing is known, also when one of its threads should still go on."""
        self.digests = [None] * len(self.digests)
        self.differs = True

    def all_digests(self) -> bytes:
        """The digests of all blocks, one after the other; every one must be known."""
        return b"".join(digest for digest in self.digests if digest is not None)

    def committed(self) -> frozenset[str] | None:
        """A checkpoint holds these bytes now. Keys of what changed since the one before, or None.

        What was compared in place is known; the rest is told by its blocks. A large tensor that
        has no block of its own is believed to be as it was when its version is, but not where it
        was put apart for that: there the bytes have to bear it out.
        """
        before, self._committed = self._committed, list(self.digests)
        changed, self.changed, self.differs = self.changed, set(), False
        versions, self._committed_versions = self._committed_versions, self._versions
        if before is None:
            return None
        moved = {
            n for n, pair in enumerate(zip(before, self.digests, strict=True)) if len({*pair}) > 1
        }
        for position in self._small if moved else ():
            if not moved.isdisjoint(self.blocks_of(position)):
                changed.add(self.file.specs[position].key)
        for position, version in self._versions.items():
            is_still = version == versions.get(position) and not self.is_apart
            inside = self._own_blocks(position)
            if not moved.isdisjoint(inside or (() if is_still else self.blocks_of(position))):
                changed.add(self.file.specs[position].key)
        return frozenset(changed)

    def _own_blocks(self, position: int) -> range:
        """The blocks that hold nothing but this tensor."""
        start = self.file.starts[position]
        stop = start + self.file.specs[position].nbytes
        return range(-(-start // BLOCK_NBYTES), stop // BLOCK_NBYTES)
