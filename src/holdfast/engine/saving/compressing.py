"""Compression of the files of a save, by component."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias, get_args

from holdfast.engine.saving.choosing import Chooser
from holdfast.engine.saving.packing import Pieces
from holdfast.engine.saving.throughput import Throughput
from holdfast.errors import UsageError
from holdfast.events import Emitter
from holdfast.format.blocks import num_blocks
from holdfast.format.codec import Codec, Compression, Encoding
from holdfast.format.layout import BLOCK_NBYTES, component_of
from holdfast.format.tensors import ITEM_NBYTES, TensorFile

MIN_TREE_NBYTES = 1 << 20
"""Shorter trees stay readable."""

Auto = Literal["auto"]
Choice: TypeAlias = Compression | Codec | Auto | None
"""What may be asked for: None is as it is."""
Compress: TypeAlias = Choice | Mapping[str, Choice]


def choices(asked: Compress, components: Collection[str]) -> dict[str, Compression | Auto]:
    """Convert the `compress` option to a compression for each component that has one.

    Raises:
        UsageError: an unknown codec or component, or a package is missing.
    """
    if not isinstance(asked, Mapping):
        asked = dict.fromkeys(components, asked)
    elif unknown := sorted(set(asked) - set(components)):
        raise UsageError(
            f"compress: no component {unknown[0]!r}; there are {', '.join(sorted(components))}"
        )
    compressions = {name: _compression(choice) for name, choice in asked.items()}
    return {name: choice for name, choice in compressions.items() if choice is not None}


def _compression(choice: Choice) -> Compression | Auto | None:
    if choice is None or choice == "auto" or isinstance(choice, Compression):
        return choice
    if choice not in get_args(Codec):
        names = (*get_args(Codec), "auto")
        raise UsageError(f"compress={choice!r} must be one of {names}, or a Compression")
    return Compression(codec=choice)


class Compressing:
    """Compression of each component's files. One save at a time."""

    def __init__(self, chosen: Mapping[str, Compression | Auto], emit: Emitter) -> None:
        self._fixed = {
            name: choice for name, choice in chosen.items() if isinstance(choice, Compression)
        }
        self._emit = emit
        self._chooser = Chooser(chosen.keys() - self._fixed.keys(), emit)
        self._is_settled = False
        self.begin()

    def begin(self) -> None:
        """Begin a save. Memory of a failed one may still be read, and is not reused."""
        self.store = Throughput()
        if not self._is_settled:
            self.pieces = Pieces()
        self._is_settled = False
        self._written: tuple[int, float] | None = None
        self._chooser.begin()

    def of_tensors(self, file: TensorFile) -> Encoding | None:
        """Return the encoding of a tensor file; None: it is not compressed."""
        compression = self._of(component_of(file.name))
        return None if compression is None else compression.encoding(item_sizes(file))

    def of_tree(self, component: str, nbytes: int) -> Encoding | None:
        """Return the encoding of a component's tree; None: it is not compressed."""
        compression = self._of(component)
        if compression is None or nbytes < MIN_TREE_NBYTES:
            return None
        return compression.encoding([1] * num_blocks(nbytes))

    def observer(self, file: TensorFile) -> Callable[[int, memoryview], None] | None:
        """Return a callback for the blocks of an uncompressed tensor file; None if not needed."""
        return self._chooser.observer(component_of(file.name), item_sizes(file))

    def committed(self, nbytes: int, spent_s: float) -> None:
        """Record that the save was committed: `nbytes` plain bytes in `spent_s`."""
        self._written = (nbytes, spent_s)
        self._is_settled = True

    def learn(self) -> None:
        """Choose codecs for "auto" components after a commit. Takes a while."""
        if self._written is None:
            return
        try:
            self._chooser.learn(*self._written, self.store)
        except Exception as error:  # noqa: BLE001 - it is told, and the commit stands
            self._emit("warning", f"what was to be chosen for compression was not: {error!r}")
        self._written = None

    def _of(self, component: str) -> Compression | None:
        return self._fixed.get(component) or self._chooser.compression(component)


def item_sizes(file: TensorFile) -> list[int]:
    """Return the item size in the middle of each block of a tensor file."""
    middles = range(BLOCK_NBYTES // 2, file.nbytes + BLOCK_NBYTES // 2, BLOCK_NBYTES)
    at = [bisect_right(file.starts, min(middle, file.nbytes - 1)) - 1 for middle in middles]
    return [ITEM_NBYTES[file.specs[max(position, 0)].dtype] for position in at]
