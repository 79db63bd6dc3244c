"""Staging: one consistent host copy of the state, in memory laid out as the files will be.

The images are kept between saves while the structure of the state is the same, so that later
saves copy into memory that is already there, and only what has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.engine.copying import Copying, Piece, pieces_of
from holdfast.engine.grouping import Grouping
from holdfast.engine.image import Image
from holdfast.format.layout import tree_file
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.state.capture import Captured, CapturedComponent

Path = tuple[str, str]
"""Component and key of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The host copy of one state: images of the tensor files, and the trees as bytes.

    A block is there when `copying` says so.
    """

    images: Mapping[str, tuple[Image, ...]]
    trees: Mapping[str, bytes]
    kinds: Mapping[str, str]
    copying: Copying

    @property
    def files(self) -> list[Image]:
        """The images of all components."""
        return [image for images in self.images.values() for image in images]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file but the index."""
        tensors = {image.file.name: image.file.nbytes for image in self.files}
        return tensors | {tree_file(name): len(tree) for name, tree in self.trees.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the index."""
        return sum(self.sizes.values())


class StagedImage:
    """An image as the content of a file that is written while it is staged."""

    def __init__(self, image: Image, copying: Copying) -> None:
        self._image = image
        self._copying = copying

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return self._image.file.nbytes

    def block(self, number: int, timeout_s: float) -> memoryview:
        """See `Content.block`."""
        self._copying.wait(self._image, number, timeout_s)
        return self._image.block(number)

    def digest(self, number: int) -> bytes:
        """See `Content.digest`."""
        return self._image.digest(number)

    def written(self, number: int) -> None:
        """See `Content.written`; the memory stays."""


class Stager:
    """Copies captured states into images that it keeps. Not thread-safe; one state at a time."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._groups: dict[str, Grouping] = {}
        self._images: dict[str, tuple[Image, ...]] = {}

    def prepare(self, captured: Captured, *, overlapped: Collection[Path] = ()) -> Staged:
        """Where the state goes; what is small is copied now, and `copying` does the rest.

        The images are overwritten by the next call. Those of components that are not in it are
        kept, for a save that has them again. Tensors in `overlapped` are copied by
        `Copying.run_later`, the others by `Copying.run_now`.

        Raises:
            OutOfMemory: there is no memory for a structure that is new.
        """
        components = captured.components
        for component in components.values():
            self._fit(component)
        now: list[Piece] = []
        later: list[Piece] = []
        with torch.inference_mode(False), torch.no_grad():
            for name, component in components.items():
                for image in self._images[name]:
                    image.overwrite_small(component.tensors)
                    for position in image.large:
                        key = image.file.specs[position].key
                        pieces = later if (name, key) in overlapped else now
                        pieces += pieces_of(image, position, component.tensors[key])
        return Staged(
            images={name: self._images[name] for name in components},
            trees={name: component.tree for name, component in components.items()},
            kinds={name: component.kind for name, component in components.items()},
            copying=Copying(now, later, [*_tensors(captured)]),
        )

    def committed(self, staged: Staged) -> None:
        """Learn from a save that was committed which tensors change from one to the next."""
        for name, images in staged.images.items():
            changed = [image.committed() for image in images]
            if None not in changed:
                self._groups[name].observe({key for keys in changed for key in keys or ()})

    def _fit(self, component: CapturedComponent) -> None:
        """Make images for a component whose structure, or whose grouping, is new."""
        name, specs = component.name, component.specs
        if self._specs.get(name) != specs:
            self._groups[name] = Grouping(specs)
        elif not self._groups[name].has_moved:
            return
        self._images.pop(name, None)
        self._specs.pop(name, None)  # there may be no memory for new ones
        apart = self._groups[name].settle()
        self._images[name] = tuple(
            Image(file, is_apart=file.specs[0].key in apart)
            for file in lay_out(name, specs, apart=apart)
        )
        self._specs[name] = specs


def _tensors(captured: Captured) -> Iterator[Tensor]:
    for component in captured.components.values():
        yield from component.tensors.values()
