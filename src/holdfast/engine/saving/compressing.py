"""The compression of each file of a save, from what the user asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias

from holdfast.engine.saving.choosing import Chooser, Throughput
from holdfast.engine.saving.packing import Pieces
from holdfast.errors import UsageError
from holdfast.events import Emitter
from holdfast.format.blocks import num_blocks
from holdfast.format.codec import CODECS, CodecName, Compression, Encoding
from holdfast.format.layout import BLOCK_NBYTES, component_of
from holdfast.format.tensors import ITEM_NBYTES, TensorFile

MIN_TREE_NBYTES = 1 << 20
"""Shorter trees are stored plain, so that people can read them."""

Auto = Literal["auto"]
Choice: TypeAlias = Compression | CodecName | Auto | None
"""How a component may be compressed, as given by the user; None: not at all."""
Compress: TypeAlias = Choice | Mapping[str, Choice]


def check_choices(asked: Compress) -> None:
    """Check what can be checked without the components of a state.

    Raises:
        UsageError: no such codec, or a package is missing.
    """
    for choice in asked.values() if isinstance(asked, Mapping) else (asked,):
        _compression(choice)


def choices(asked: Compress, components: Collection[str]) -> dict[str, Compression | Auto]:
    """The compression of each component that is to be compressed.

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
    if choice not in CODECS:
        names = (*CODECS, "auto")
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
        """Start a save. Memory of a failed save may still be read, so it is not used again."""
        self.store = Throughput()
        if not self._is_settled:
            self.pieces = Pieces()
        self._is_settled = False
        self._written: tuple[int, float] | None = None
        self._chooser.begin()

    def of_tensors(self, file: TensorFile) -> Encoding | None:
        """How a tensor file is compressed; None: it is stored plain."""
        compression = self._of(component_of(file.name))
        return None if compression is None else Encoding(compression, item_sizes(file))

    def of_tree(self, component: str, nbytes: int) -> Encoding | None:
        """How the tree of a component is compressed; None: it is stored plain."""
        compression = self._of(component)
        if compression is None or nbytes < MIN_TREE_NBYTES:
            return None
        return Encoding(compression, [1] * num_blocks(nbytes))

    def observer(self, file: TensorFile) -> Callable[[int, memoryview], None] | None:
        """A function to call with each block of a plain tensor file; None: no need."""
        return self._chooser.observer(component_of(file.name), item_sizes(file))

    def committed(self, nbytes: int, spent_s: float) -> None:
        """Note that the save was committed, with its plain bytes and the seconds it took."""
        self._written = (nbytes, spent_s)
        self._is_settled = True

    def learn(self) -> None:
        """Choose compressions for "auto" from the committed save. Takes a while."""
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
