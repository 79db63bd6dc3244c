"""The seam of all tools: a checkpoint or a file of weights of any format, opened for reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import Self

from holdfast.errors import FormatError, UsageError, listing
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.tensors import TensorSpec


class LeftOut(msgspec.Struct, frozen=True):
    """A value of a source that cannot be carried over, and why."""

    path: str
    """Where it is in the source, such as "training_args.bin" or "trainer.callbacks.EMA"."""
    why: str
    """The reason."""
    tensors_of: str = ""
    """Component of which tensors are lost with it; empty if the value holds none. Reading or
    converting such a source is an error unless the caller allows the loss."""


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """Digests of the blocks of a tensor, which prove equality; the outer ones may hold others."""

    block_nbytes: int
    offset: int
    """Where in its first block the tensor begins."""
    digests: tuple[bytes, ...]

    def edges(self, other: object, nbytes: int) -> list[tuple[int, int]] | None:
        """Return the ranges in outer blocks if all between are equal; else None."""
        if not isinstance(other, BlockDigests) or len(self.digests) < 3:
            return None
        if (self.block_nbytes, self.offset) != (other.block_nbytes, other.offset):
            return None
        if self.digests[1:-1] != other.digests[1:-1]:
            return None
        first = self.block_nbytes - self.offset
        last = first + (len(self.digests) - 2) * self.block_nbytes
        return [(0, first), (last, nbytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComponent:
    """A component of a source: its typed tree, and the tensors that the tree names.

    `kind`, and what the tree looks like, are those of docs/format.md, section 6. `specs` are by key
    and in the order of their bytes in the source, so that reading in this order is sequential.
    """

    kind: str
    tree: Any
    specs: Mapping[str, TensorSpec]
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Path of each parameter of which the source has only a digest -> dtype, sizes and digest."""

    @property
    def leaves(self) -> dict[str, TensorRef | ArrayRef]:
        """The tensors and arrays of the tree by path, in the tree's order.

        A path joins keys and positions by dots; where two would be alike, the dots in the keys of
        the later one are written as slashes. Tied tensors have several paths and one key.
        """
        found: dict[str, TensorRef | ArrayRef] = {}
        for path, ref in _leaves(self.tree, ()):
            name = ".".join(path)
            if name in found:
                name = ".".join(part.replace(".", "/") for part in path)
            while name in found:
                name += "'"
            found[name] = ref
        return found


class Source(ABC):
    """A checkpoint or a file of weights, opened for reading. Use it in a `with` statement.

    Nothing in it is trusted, and no code in it is run. Several threads may call `read_into`.
    """

    format: str
    """Name of the format, such as "safetensors"."""
    url: str
    """Path or URL that was opened, for messages."""
    parts: Mapping[str, SourceComponent]
    left_out: Sequence[LeftOut] = ()
    step: int | None = None
    """Completed optimizer steps, if the source tells."""

    @abstractmethod
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of a tensor, from its byte `start` on.

        The bytes are those of the contiguous row-major tensor, little-endian. Of a checkpoint of
        this library every byte is checked first.

        Raises:
            CorruptData: the bytes are damaged, or the file ends before them.
            StoreError: they cannot be read.
        """

    def nbytes_lent(self, component: str, key: str, start: int) -> int:
        """Return how many bytes `lent` gives of a tensor from `start` on; 0 if only by copies."""
        return 0

    def lent(
        self, component: str, key: str, start: int, nbytes: int
    ) -> AbstractContextManager[memoryview]:
        """Yield up to `nbytes_lent` bytes where they lie, until the `with` ends."""
        raise NotImplementedError

    def fingerprint(self, component: str, key: str) -> object | None:
        """Return digests that only equal tensors share, or None if reading is needed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close files and threads; the source cannot be read any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the source if what is done in the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def get_component(self, component: str) -> SourceComponent:
        """Return a component."""
        found = self.parts.get(component)
        if found is None:
            has = ", ".join(map(repr, self.parts)) or "none"
            raise UsageError(f"{self.url}: no component {component!r}; it has {has}")
        return found


def expect_none_wrong(what: str, wrong: Sequence[str]) -> None:
    """Raise `FormatError` with all that is wrong in a file or folder, if anything is."""
    if wrong:
        raise FormatError(f"{what}:\n{listing(wrong)}")


def lost_tensors(source: Source, components: Collection[str] = ()) -> list[LeftOut]:
    """Return the values with tensors that these components, all if empty, lack."""
    return [
        left
        for left in source.left_out
        if left.tensors_of and (not components or left.tensors_of in components)
    ]


def lost_parameters(source: Source, components: Collection[str] = ()) -> list[LeftOut]:
    """Return the parameters of these components, all if empty, that have only a digest."""
    return [
        LeftOut(path=f"{name}.{path}", why="only its digest was saved", tensors_of=name)
        for name in components or source.parts
        for path in source.get_component(name).frozen
    ]


def expect_no_loss(
    source: Source, components: Collection[str], *, allow_loss: bool, needs_frozen: bool = True
) -> None:
    """Raise `UsageError` if a tensor of these components, or any, is left out, unless allowed."""
    digests = lost_parameters(source, components) if needs_frozen else []
    if digests and not allow_loss:
        raise UsageError(
            f"{source.url}: {len(digests)} frozen parameters were saved by digest, such as "
            f"{digests[0].path}. Write the adapter with --to peft, all weights with --to hf --base "
            "FOLDER, or skip them with --allow-loss (allow_loss=True). Or make the model on the "
            "same base, call holdfast.load_weights(ROOT, model), and save the model, with PEFT by "
            "model.merge_and_unload().save_pretrained(FOLDER)"
        )
    lost = lost_tensors(source, components)
    if lost and not allow_loss:
        raise UsageError(
            f"{source.url}: holds tensors that cannot be read. Save them as dense tensors "
            "in a state_dict, or skip them with --allow-loss (allow_loss=True):\n"
            + listing([f"{left.path}: {left.why}" for left in lost])
        )


def _leaves(
    node: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], TensorRef | ArrayRef]]:
    if isinstance(node, TensorRef | ArrayRef):
        yield path, node
    elif isinstance(node, Mapping):
        for key, inner in node.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for number, inner in enumerate(node):
            yield from _leaves(inner, (*path, str(number)))
    elif isinstance(node, msgspec.Struct):  # a generator's members, an enum's value
        for name in ("members", "value"):
            yield from _leaves(getattr(node, name, None), path)
