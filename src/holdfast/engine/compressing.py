"""Which files of a save are compressed, and how."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import TypeAlias, get_args

from holdfast.errors import UsageError
from holdfast.format.blocks import num_blocks
from holdfast.format.codec import Codec, Compression, Encoding
from holdfast.format.layout import BLOCK_NBYTES, component_of
from holdfast.format.tensors import ITEM_NBYTES, TensorFile

MIN_TREE_NBYTES = 1 << 20
"""Shorter trees stay readable."""

Choice: TypeAlias = Compression | Codec | None
"""What may be asked for: None is as it is."""
Compress: TypeAlias = Choice | Mapping[str, Choice]


def choices(asked: Compress, components: Collection[str]) -> dict[str, Compression]:
    """The compression of each component that is to have one.

    Raises:
        UsageError: no such codec or component, or a package is missing.
    """
    if isinstance(asked, Mapping):
        if unknown := sorted(set(asked) - set(components)):
            raise UsageError(
                f"compress: no component {unknown[0]!r}; there are {', '.join(sorted(components))}"
            )
        by_component = asked
    else:
        by_component = dict.fromkeys(components, asked)
    found = {name: _compression(choice) for name, choice in by_component.items()}
    return {name: choice for name, choice in found.items() if choice is not None}


def _compression(choice: Choice) -> Compression | None:
    if choice is None or isinstance(choice, Compression):
        return choice
    if choice not in get_args(Codec):
        raise UsageError(f"compress={choice!r} must be one of {get_args(Codec)}, or a Compression")
    return Compression(codec=choice)


class Compressing:
    """The compression of each component's files."""

    def __init__(self, chosen: Mapping[str, Compression]) -> None:
        self._chosen = chosen

    def of_tensors(self, file: TensorFile) -> Encoding | None:
        """How a tensor file is stored; None: as it is."""
        compression = self._chosen.get(component_of(file.name))
        return None if compression is None else compression.encoding(item_sizes(file))

    def of_tree(self, component: str, nbytes: int) -> Encoding | None:
        """The same for a component's tree."""
        compression = self._chosen.get(component)
        if compression is None or nbytes < MIN_TREE_NBYTES:
            return None
        return compression.encoding([1] * num_blocks(nbytes))


def item_sizes(file: TensorFile) -> list[int]:
    """The size of the items in each block of a tensor file, as its middle has them."""
    middles = range(BLOCK_NBYTES // 2, file.nbytes + BLOCK_NBYTES // 2, BLOCK_NBYTES)
    found = [bisect_right(file.starts, min(middle, file.nbytes - 1)) - 1 for middle in middles]
    return [ITEM_NBYTES[file.specs[max(position, 0)].dtype] for position in found]
