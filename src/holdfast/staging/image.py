"""Host memory for a tensor file, kept between saves, with the digests of its blocks.

Where the live bytes equal those in memory, nothing is copied, and the block's digest is reused. A
state that is staged in waves has only the digests (`KnownFile`), no memory (`FileImage`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorFile
from holdfast.staging.arena import Arena
from holdfast.staging.device import pin
from holdfast.staging.layout import LARGE_NBYTES, KnownFile
from holdfast.system import C_LIBRARY

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

    def __init__(self, file: TensorFile, *, is_apart: bool = False) -> None:
        """Allocate the memory."""
        super().__init__(file, is_apart=is_apart)
        self.arena = Arena(file.nbytes)
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
