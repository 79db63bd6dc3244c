"""What the structure of a component decides, kept for as long as the structure stays the same.

A state is captured many times and changes its structure hardly ever. A walk over the plain
containers of a component finds its tensors and everything else that its tree says. Where all of
that is as it was, names, specs and tree are as they were; numbers that changed are put into the
tree. Anything that the walk does not know is captured anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from holdfast.errors import UnsupportedState
from holdfast.format.nodes import WRITERS
from holdfast.format.objects import Document
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import Leaves, identity, refusal

_TENSORS = frozenset({Tensor, Parameter})
_NUMBERS = frozenset({bool, int, float})
_CONTAINERS = frozenset({dict, list, tuple})
_DICTS = frozenset({dict})
_TEXT = frozenset({str})
_IS_CPU = attrgetter("is_cpu")
_REQUIRES_GRAD = attrgetter("requires_grad")
_IS_LEAF = attrgetter("is_leaf")
_DEVICE = attrgetter("device")
_DTYPE = attrgetter("dtype")
_LAYOUT = attrgetter("layout")
_SHAPE = attrgetter("shape")
_PLAIN = frozenset({torch.strided})

_Place: TypeAlias = tuple[Any, Any]


class Irregular(Exception):
    """Something that the walk does not know; it is captured as if for the first time."""


class Walk:
    """One pass over dicts, lists, tuples, plain values and tensors, in the order of the tree."""

    def __init__(self, value: Any) -> None:
        """Raises `Irregular` where there is anything else."""
        self.outline: list[Any] = []
        """Types, keys and texts; equal for values whose trees differ in numbers at most."""
        self.tensors: list[Tensor] = []
        self.numbers: list[bool | int | float] = []
        self._seen: dict[int, int] = {}
        self._visit(value)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _NUMBERS:
            self.numbers.append(value)
            self.outline.append(kind)
        elif kind in _TENSORS:
            self.tensors.append(value)
            self.outline.append(kind)
        elif value is None or kind is str:
            self.outline.append(value)
        elif kind is dict:
            self._visit_dict(value)
        elif kind is list or kind is tuple:
            if not self._was_seen(value):
                self.outline.append((kind, len(value)))
                self._visit_all(value)
        else:
            raise Irregular

    def _visit_dict(self, value: dict[Any, Any]) -> None:
        if self._was_seen(value):
            return
        if not _TEXT.issuperset(map(type, value)):
            raise Irregular
        self.outline.append(tuple(value))
        self._visit_all(list(value.values()))

    def _visit_all(self, values: Sequence[Any]) -> None:
        kinds = list(map(type, values))
        if _TENSORS.issuperset(kinds):
            self.tensors += values
            self.outline += kinds
        elif _DICTS.issuperset(kinds) and self._visit_dicts_of_tensors(values):
            return
        else:
            for value in values:
                self._visit(value)

    def _visit_dicts_of_tensors(self, values: Sequence[dict[Any, Any]]) -> bool:
        """As if each had been visited; False where there is more to them. Slots are many."""
        ids = list(map(id, values))
        keys = list(map(tuple, values))
        tensors = list(chain.from_iterable(map(dict.values, values)))
        kinds = list(map(type, tensors))
        is_new = len({*ids, *self._seen}) == len(ids) + len(self._seen)
        is_text = _TEXT.issuperset(map(type, chain.from_iterable(keys)))
        if not (is_new and is_text and _TENSORS.issuperset(kinds)):
            return False
        self._seen.update(zip(ids, count(len(self._seen))))
        self.outline += (dict, *keys, *kinds)
        self.tensors += tensors
        return True

    def _was_seen(self, value: Any) -> bool:
        """Whether the container was met before, as `{"$same": …}` says in the tree."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.outline.append(number)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What a component is now, without its having been captured anew."""

    tree: bytes
    tensors: dict[str, Tensor]
    specs: tuple[TensorSpec, ...]
    may_overlap: frozenset[str]


class Recollection:
    """What one capture of a component found out. Holds none of its tensors."""

    def __init__(
        self,
        value: Any,
        stamp: Any,
        document: Document,
        leaves: Leaves,
        *,
        may_overlap: frozenset[str],
    ) -> None:
        """`value` is what was walked, all of the tree or members of it in the tree's order, or a
        list of tensors; `stamp` is whatever else decided the tree.

        Raises:
            Irregular: a structure of which nothing can be kept.
        """
        walk = Walk(value)
        self._outline, self._stamp = walk.outline, stamp
        if any(tensor.is_complex() for tensor in walk.tensors):
            raise Irregular  # they may be conjugate views, and to ask all others takes its time
        self._facts, self._partition = _facts(walk.tensors), _partition(walk.tensors)
        self._keys = tuple(leaves.tensors)
        self._specs = tuple(leaves.specs)
        self._may_overlap = may_overlap
        self._document = document
        self._numbers = list(map(repr, walk.numbers))
        self._places = list(_places(value, document.node, set()))
        if list(map(id, self._first_of_each(walk.tensors))) != list(map(id, leaves.originals)):
            raise Irregular

    def recall(self, value: Any, stamp: Any) -> Recalled | None:
        """The component as it is now; None where its structure is another one."""
        if stamp != self._stamp:
            return None
        try:
            walk = Walk(value)
            is_same = (
                walk.outline == self._outline
                and _facts(walk.tensors) == self._facts
                and _partition(walk.tensors) == self._partition
                and self._takes(walk.numbers)
            )
        except (Irregular, RecursionError, UnsupportedState, ValueError):
            return None
        if not is_same:
            return None
        tensors = [t.detach() if t.requires_grad else t for t in self._first_of_each(walk.tensors)]
        return Recalled(
            tree=self._document.data,
            tensors=dict(zip(self._keys, tensors, strict=True)),
            specs=self._specs,
            may_overlap=self._may_overlap,
        )

    def _first_of_each(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors without those that are the memory of an earlier one."""
        if self._partition is None:
            return tensors
        return [tensors[i] for i, first in enumerate(self._partition) if i == first]

    def _takes(self, numbers: Sequence[bool | int | float]) -> bool:
        """Put the numbers into the tree; False where they cannot be."""
        # By their texts: -0.0 equals 0.0, and nan is not equal to itself.
        texts = list(map(repr, numbers))
        if texts == self._numbers:
            return True
        self._numbers = []  # until the tree has them
        try:
            for (home, key), number in zip(self._places, numbers, strict=True):
                home[key] = WRITERS[type(number)](number)
        except ValueError:
            return False
        self._document.write()
        self._numbers = texts
        return True


def _facts(tensors: list[Tensor]) -> list[Any]:
    """All that a tensor's spec and node are made of, and all that could make it one that is
    refused; but where the tensors are and what is in them."""
    try:
        if any(map(Tensor.is_neg, tensors)) or not _PLAIN.issuperset(map(_LAYOUT, tensors)):
            raise Irregular
        facts: list[Any] = [*map(Tensor.stride, tensors), *map(_SHAPE, tensors)]
    except RuntimeError as error:  # layouts without shapes or strides
        raise Irregular from error
    facts += map(_DTYPE, tensors)
    if not all(map(_IS_CPU, tensors)):
        facts += map(_DEVICE, tensors)
    if any(map(_REQUIRES_GRAD, tensors)):
        facts += map(_REQUIRES_GRAD, tensors)
        facts += map(_IS_LEAF, tensors)  # without gradients each is one
    return facts


def _partition(tensors: list[Tensor]) -> list[int] | None:
    """For each tensor the position of the first that is the same memory; None: all differ."""
    places = list(map(Tensor.data_ptr, tensors))
    if 0 not in places and len(set(places)) == len(places):
        return None
    if any(refusal(tensor) is not None for tensor in tensors):
        raise Irregular
    first: dict[Hashable, int] = {}
    return [first.setdefault(identity(tensor), i) for i, tensor in enumerate(tensors)]


def _places(value: Any, node: Any, seen: set[int]) -> Iterator[_Place]:
    """Where in the node the numbers of `value` stand, in the order of the walk."""
    seen.add(id(value))
    home = node["$tuple"] if type(value) is tuple else node
    if "$dict" in home:
        raise Irregular
    for key, item in value.items() if type(value) is dict else enumerate(value):
        kind = type(item)
        if kind in _NUMBERS:
            yield home, key
        elif kind in _CONTAINERS and id(item) not in seen:
            yield from _places(item, home[key], seen)
