"""Staging: one consistent host copy of the state, in memory laid out as the files will be.

An arena is the image of one tensor file: header first, then every tensor in its place. It is
kept between saves while the structure of the state is the same, so that later saves copy into
memory that is already there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from holdfast.engine.workers import Workers, gather
from holdfast.errors import FormatError, OutOfMemory
from holdfast.format.layout import tree_file
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out
from holdfast.state.capture import Captured, CapturedComponent
from holdfast.state.dtypes import TORCH_DTYPES

LARGE_NBYTES = 1 << 20
"""Tensors of this size and more are copied by the workers."""
PIECE_NBYTES = 16 << 20
"""What one worker copies at a time."""


class Arena:
    """Page-aligned private memory that forked children do not inherit."""

    def __init__(self, nbytes: int) -> None:
        """Take the memory.

        Raises:
            OutOfMemory: the system refuses.
        """
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(f"{nbytes} bytes of memory are not to be had: {error}") from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                _advise(self._map, getattr(mmap, advice))
        self.memory = memoryview(self._map)[:nbytes]

    def tensors(self, specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[torch.Tensor]:
        """Views of the arena with the specs' dtypes and shapes, at the given bytes.

        They keep the memory alive.

        Raises:
            FormatError: a start is not a multiple of its item size; in our own files it always
                is, because data starts on a page and items come in descending size.
        """
        with torch.inference_mode(False):
            return self._tensors(specs, starts)

    def _tensors(self, specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[torch.Tensor]:
        base = torch.frombuffer(self._map, dtype=torch.uint8)
        views: list[torch.Tensor] = []
        for run in _runs(specs, starts):
            views += self._split(base, specs[run.start : run.stop], starts[run.start])
        return views

    def _split(
        self, base: torch.Tensor, specs: Sequence[TensorSpec], start: int
    ) -> list[torch.Tensor]:
        """Views of tensors of one dtype that lie one after the other; one call for all of them."""
        dtype = TORCH_DTYPES[specs[0].dtype]
        if start % dtype.itemsize:
            raise FormatError(f"tensor {specs[0].key!r} starts at byte {start}, not aligned")
        sizes = [spec.nbytes // dtype.itemsize for spec in specs]
        whole = base[start : start + sum(sizes) * dtype.itemsize].view(dtype)
        pieces = whole.split_with_sizes(sizes)
        return [
            piece if len(spec.shape) == 1 else piece.view(spec.shape)
            for piece, spec in zip(pieces, specs, strict=True)
        ]


def _runs(specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[range]:
    """Positions of neighbours that have one dtype and no gap between them."""
    runs: list[range] = []
    first, expected = 0, 0
    for position, (spec, start) in enumerate(zip(specs, starts, strict=True)):
        follows = start == expected and spec.dtype == specs[first].dtype
        if position and not follows:
            runs.append(range(first, position))
            first = position
        expected = start + spec.nbytes
    if specs:
        runs.append(range(first, len(specs)))
    return runs


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        # Only advice: a kernel without it keeps ordinary pages and copies on fork.
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One tensor file with its memory and a view for each tensor, in file order."""

    file: TensorFile
    arena: Arena
    views: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The host copy of one state: images of the tensor files, and the trees as bytes."""

    images: Mapping[str, tuple[Image, ...]]
    trees: Mapping[str, bytes]
    kinds: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file but the index."""
        tensors = {i.file.name: i.file.nbytes for images in self.images.values() for i in images}
        return tensors | {tree_file(name): len(tree) for name, tree in self.trees.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the index."""
        return sum(self.sizes.values())


class Stager:
    """Copies captured states into arenas that it keeps. Not thread-safe; one copy at a time."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._images: dict[str, tuple[Image, ...]] = {}

    def stage(self, captured: Captured, workers: Workers, *, timeout_s: float) -> Staged:
        """A copy of the state as it is now. The arenas are overwritten by the next call.

        Those of components that are not in it are kept, for a save that has them again.

        Raises:
            DeadlineExceeded: the copy was not done in time.
        """
        components = captured.components
        for component in components.values():
            self._fit(component)
        for name, component in components.items():
            _copy(self._images[name], component.tensors, workers, timeout_s)
        return Staged(
            images={name: self._images[name] for name in components},
            trees={name: component.tree for name, component in components.items()},
            kinds={name: component.kind for name, component in components.items()},
        )

    def _fit(self, component: CapturedComponent) -> None:
        """Make arenas for a component whose structure is new."""
        if self._specs.get(component.name) == component.specs:
            return
        self._images.pop(component.name, None)
        self._specs.pop(component.name, None)  # there may be no memory for new ones
        self._images[component.name] = tuple(
            _new_image(file) for file in lay_out(component.name, component.specs)
        )
        self._specs[component.name] = component.specs


def _new_image(file: TensorFile) -> Image:
    arena = Arena(file.nbytes)
    arena.memory[: len(file.header)] = file.header
    return Image(file=file, arena=arena, views=tuple(arena.tensors(file.specs, file.starts)))


def _copy(
    images: Sequence[Image],
    tensors: Mapping[str, torch.Tensor],
    workers: Workers,
    timeout_s: float,
) -> None:
    """Copy every tensor to its place: large ones in pieces on the workers, the rest in one call.

    torch's own parallel copy waits at barriers, for threads that a busy machine has taken away.
    """
    jobs: list[Future[None]] = []
    with torch.inference_mode(False), torch.no_grad():
        for image in images:
            small: list[tuple[torch.Tensor, torch.Tensor]] = []
            for spec, start, view in zip(
                image.file.specs, image.file.starts, image.views, strict=True
            ):
                source = tensors[spec.key]
                if _is_plain_and_large(source):
                    place = image.arena.memory[start : start + spec.nbytes]
                    jobs += [workers.submit(job) for job in _pieces(place, source)]
                else:
                    small.append((view, source))
            if small:
                views, sources = zip(*small, strict=True)
                torch._foreach_copy_(list(views), list(sources))
    gather(jobs, timeout_s=timeout_s, what="staging")


def _is_plain_and_large(source: torch.Tensor) -> bool:
    is_large = source.numel() * source.element_size() >= LARGE_NBYTES
    return is_large and source.device.type == "cpu" and source.is_contiguous()


def _pieces(place: memoryview, source: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Jobs that copy the bytes of a contiguous tensor."""
    target = np.frombuffer(place, dtype=np.uint8)
    data = source.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(data), PIECE_NBYTES):
        piece = slice(start, start + PIECE_NBYTES)
        yield partial(np.copyto, target[piece], data[piece])
