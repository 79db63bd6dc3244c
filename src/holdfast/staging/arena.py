"""Host memory laid out as a tensor file, and kept between saves with the digests of its blocks.

Where the live bytes equal those in memory, nothing is copied, and the block's digest is reused. A
state that is staged in waves has only the digests (`KnownFile`), no memory (`FileImage`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import FormatError
from holdfast.format import blocks
from holdfast.format.boxes import Column
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import ITEM_NBYTES, TensorFile, TensorSpec
from holdfast.staging.device import pin
from holdfast.staging.interfaces import LARGE_NBYTES, KnownFile
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.system import C_LIBRARY
from holdfast.threads.buffers import allocate_pages

_LARGEST_ITEM_NBYTES = max(ITEM_NBYTES.values())


class Arena:
    """Page-aligned memory; what is not given is private, and zeroed in forked children."""

    def __init__(self, nbytes: int, pages: mmap.mmap | None = None) -> None:
        """Allocate the memory, or use `pages`."""
        self.nbytes = nbytes
        self._map = allocate_pages(nbytes) if pages is None else pages
        self.memory = memoryview(self._map)[:nbytes]

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def make_tensor_views(
        self,
        specs: Sequence[TensorSpec],
        starts: Sequence[int] | Column,
        nbytes: Column | None = None,
    ) -> list[torch.Tensor]:
        """Create views of the arena, which keep it alive, with the specs' dtypes and shapes."""
        if not len(specs):
            return []
        # One view for each run of equal dtype, split in one call: a call of torch takes longer than
        # all else that is done for a small tensor.
        start = np.asarray(starts, np.int64)
        if nbytes is None:
            nbytes = np.fromiter((spec.nbytes for spec in specs), np.int64, len(specs))
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            base = torch.frombuffer(self._map, dtype=torch.uint8)
            runs = pairwise([0, *_run_starts(specs, start, nbytes), len(specs)])
            return [
                view
                for first, stop in runs
                for view in _split_views(
                    base, specs[first:stop], int(start[first]), nbytes[first:stop]
                )
            ]


def check_aligned(specs: Sequence[TensorSpec], start: Column) -> None:
    """Check the alignment of tensors before any view of them is made."""
    # Few starts are unaligned for the largest item; only these are checked for their own.
    for number in np.flatnonzero(start % _LARGEST_ITEM_NBYTES).tolist():
        _check_aligned(specs[number], int(start[number]))


def _check_aligned(spec: TensorSpec, start: int) -> None:
    if start % ITEM_NBYTES[spec.dtype]:
        raise FormatError(f"tensor {spec.key!r} starts at byte {start}, not aligned")


def _run_starts(specs: Sequence[TensorSpec], start: Column, nbytes: Column) -> list[int]:
    """Return the numbers of tensors, after 0, that follow a gap or one of another dtype."""
    begins = start[1:] != (start + nbytes)[:-1]
    dtypes = [spec.dtype for spec in specs]
    if len(names := {*dtypes}) > 1:
        numbers = {name: number for number, name in enumerate(names)}
        column = np.fromiter(map(numbers.__getitem__, dtypes), np.int64, len(dtypes))
        begins |= column[1:] != column[:-1]
    starts: list[int] = (np.flatnonzero(begins) + 1).tolist()
    return starts


def _split_views(
    base: torch.Tensor, specs: Sequence[TensorSpec], start: int, nbytes: Column
) -> list[torch.Tensor]:
    """Create the views of adjacent tensors of one dtype by one call of torch."""
    dtype = TORCH_DTYPES[specs[0].dtype]
    _check_aligned(specs[0], start)
    whole = base[start : start + int(nbytes.sum())].view(dtype)
    pieces = whole.split_with_sizes((nbytes // dtype.itemsize).tolist())
    return [
        piece if len(spec.shape) == 1 else piece.view(spec.shape)
        for piece, spec in zip(pieces, specs, strict=True)
    ]


_libc = ctypes.CDLL(C_LIBRARY)
_memcmp = _libc.memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int
# PyDLL keeps the interpreter's lock, CDLL releases it for the call: then another thread may keep it
# for 5 ms, which only a long compare is worth.
_memcmp_quick = ctypes.PyDLL(C_LIBRARY).memcmp
_memcmp_quick.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp_quick.restype = ctypes.c_int
_memcpy = _libc.memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p

_IS_CUDA = attrgetter("is_cuda")


class FileImage(KnownFile):
    """Host memory of one tensor file, with a view of each tensor."""

    def __init__(
        self, file: TensorFile, *, is_apart: bool = False, pages: mmap.mmap | None = None
    ) -> None:
        """Allocate the memory, or use `pages`."""
        super().__init__(file, is_apart=is_apart)
        self.arena = Arena(file.nbytes, pages)
        self.arena.memory[: len(file.header)] = file.header
        self.views = tuple(self.arena.make_tensor_views(file.specs, file.starts))
        self.large_keys = [(i, file.specs[i].key) for i in self.large]
        """Position in the file and key of each tensor that is copied one by one."""
        self._small_keys = [file.specs[i].key for i in self.small]
        self._small_views = [self.views[i] for i in self.small]
        self._small_blocks = sorted({number for i in self.small for number in self.blocks_of(i)})
        self._is_pinned: bool | None = None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.memory))

    def get_block_memory(self, number: int) -> memoryview:
        """Return the memory of a block."""
        return self.arena.memory[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def update_block(self, key: str, number: int, start: int, source: int, nbytes: int) -> None:
        """Copy bytes of one block, to `start` from address `source`, unless they are equal."""
        target = self._address + start
        # Changed bytes mostly differ within the first page, found without releasing the lock.
        if _memcmp_quick(target, source, min(nbytes, 4096)) or _memcmp(target, source, nbytes):
            self.digests[number] = None
            self.differs = True
            self.changed.add(key)
            _memcpy(target, source, nbytes)

    def address_of(self, position: int) -> int:
        """Return the memory address of the tensor at `position` of the file."""
        return self._address + int(self.file.starts[position])

    def clear_for_staging(self) -> None:
        """Clear versions, and digests of blocks with small tensors, at the start of a staging."""
        # Small tensors are not compared: that would take longer than to copy all of them.
        self.clear_versions()
        self.clear_digests(self._small_blocks)

    def overwrite_small(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all small tensors in one call, except those on a CUDA device."""
        sources = [tensors[key] for key in self._small_keys]
        if sources:
            views = self._small_views
            if any(map(_IS_CUDA, sources)):
                pairs = zip(views, sources, strict=True)
                on_host = [(view, source) for view, source in pairs if not source.is_cuda]
                views, sources = [view for view, _ in on_host], [source for _, source in on_host]
            if views:
                torch._foreach_copy_(views, sources)

    def overwritten_by_device(self, position: int, source: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare the copy of a tensor from its CUDA device; returns the pair (to, from)."""
        # Not before a device needs it: to pin memory touches every page of it.
        if self._is_pinned is None:
            memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
            self._is_pinned = pin(memory, self, source.device)
        if self.file.specs[position].nbytes >= LARGE_NBYTES:
            self.note_version(position, source)
        self.clear_digests(self.blocks_of(position))
        return self.views[position], source

    def overwrite(self, position: int, source: Tensor) -> None:
        """Copy a tensor, on any device and with any strides, into the image, without comparing."""
        self.note_version(position, source)
        self.clear_digests(self.blocks_of(position))
        self.views[position].copy_(source)

    def digest_block(self, number: int) -> bytes:
        """Return the digest of a block, computed unless it is cached."""
        digests = self.digests
        known = digests[number]
        if known is None:
            known = digests[number] = blocks.block_digest(self.get_block_memory(number))
        return known
