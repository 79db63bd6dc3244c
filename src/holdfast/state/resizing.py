"""Resizing of stored tensors along one dimension, to fit a model with more or fewer rows.

Weights, their optimizer slots and tied weights change together. Plans register here, while they
compare names, which tensors get another shape; nothing is read before all checks have passed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.format.nodes import SubclassRef, TensorRef
from holdfast.format.objects import Refused, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import identity, is_subclass, refusal
from holdfast.state.patterns import Entries
from holdfast.state.shards import shards_of

Resize: TypeAlias = Mapping[str, str | int]
"""Path or pattern → "rows", "columns", or the number of the dimension that changes."""
NO_RESIZE: Resize = MappingProxyType({})

_DIMENSIONS = {"rows": 0, "columns": 1}
RESIZABLE = frozenset({"F16", "BF16", "F32", "F64", "C32", "C64", "C128"})
"""Dtypes of tensors of modules and optimizers that can be resized; others may be quantized."""
_QUANTIZED = (
    "a quantized tensor, or one of integers, cannot be resized. Resize the model before it is "
    "quantized, or use edit_load"
)
_CLOSE = 0.5
"""A slot within this relative distance of its weight is taken for a copy of it."""


def name_dimension(dim: int) -> str | int:
    """Return the name of a dimension, as in `resize`."""
    return next((name for name, number in _DIMENSIONS.items() if number == dim), dim)


def only_difference(stored: Sequence[int], live: Sequence[int]) -> int | None:
    """Return the dimension in which two shapes differ; None unless there is exactly one."""
    if len(stored) != len(live):
        return None
    pairs = enumerate(zip(stored, live, strict=True))
    differing = [dim for dim, (before, now) in pairs if before != now]
    return differing[0] if len(differing) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedTensor:
    """A stored tensor that is grown or cut in one dimension before it is loaded."""

    path: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the live tensor."""
    dim: int
    live: Tensor
    """Holds the values of new rows; of an optimizer slot its parameter."""
    is_slot: bool = False
    """Whether new rows are zero, unless the slot is a copy of the weight."""

    def fit_tensor(self, stored: Tensor, weight: Tensor | None) -> Tensor:
        """Return the tensor in the live shape, on the CPU; of a DTensor only own boxes are live.

        `weight`: the stored weight of a slot, if it is loaded, too.
        """
        kept = min(self.stored[self.dim], self.shape[self.dim])
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.zeros(self.shape, dtype=stored.dtype)
            is_copy = weight is not None and _is_copy(stored, weight)
            if kept < self.shape[self.dim] and (is_copy or not self.is_slot):
                shards = shards_of(self.live)
                assert not isinstance(shards, Refused), "the plan has refused it"
                for box, view in zip(shards.boxes, shards.views, strict=True):
                    spans = zip(box.offsets, box.sizes, strict=True)
                    whole[tuple(slice(start, start + size) for start, size in spans)] = view
            whole.narrow(self.dim, 0, kept).copy_(stored.narrow(self.dim, 0, kept))
        return whole

    @property
    def change(self) -> str:
        """The change as text: path, old and new shape."""
        return f"{self.path}: {[*self.stored]} → {[*self.shape]}"

    @property
    def lost(self) -> str | None:
        """Warning of a tensor that is cut; None for slots, which follow."""
        count = self.stored[self.dim] - self.shape[self.dim]
        if self.is_slot or count <= 0:
            return None
        name = name_dimension(self.dim)
        what = f"indices of dimension {name}" if isinstance(name, int) else name
        return f"{self.change}: the last {count} {what} are dropped"


def _is_copy(slot: Tensor, weight: Tensor) -> bool:
    """Whether a slot follows its weight, as a master copy or the average of schedule-free does."""
    if slot.shape != weight.shape:
        return False
    weight = weight.to(slot.dtype)
    size = torch.linalg.vector_norm(weight)
    return bool(size > 0 and torch.linalg.vector_norm(slot - weight) < _CLOSE * size)


def _parse_dimension(entry: str, given: object) -> int:
    dim = _DIMENSIONS.get(given) if isinstance(given, str) else given
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise UsageError(
            f'resize: {entry!r}: the dimension must be "rows" (0), "columns" (1) or a number, not '
            f"{given!r}"
        )
    return dim


class Resizing:
    """The option `resize` of one load: registers the tensors that get another shape."""

    def __init__(self, entries: Resize) -> None:
        """Parse entries: path or pattern → dimension."""
        self._dims = {entry: _parse_dimension(entry, dim) for entry, dim in entries.items()}
        self._patterns = {entry: Entries([entry], "resize") for entry in self._dims}
        self._idle = dict.fromkeys(self._dims)
        self._memories: dict[Hashable, int] = {}
        """Live tensor → the dimension in which it has grown; its slots and ties follow."""
        self.made: dict[str, dict[str, ResizedTensor]] = {}
        """Component → key → the tensor that gets another shape."""
        self._others: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._by_own_code: list[tuple[str, str, tuple[int, ...]]] = []
        """(component, path, stored shape) in optimizers that load by code of their own."""
        self._refused: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._dims)

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """List a message for each entry that matches nothing."""
        return [text for one in self._patterns.values() for text in one.unmatched(unseen)]

    def list_idle(self, unseen: Collection[str]) -> list[str]:
        """List a message for the entries whose tensors all fit as they are."""
        idle = [entry for entry in self._idle if not self._patterns[entry].unmatched(unseen)]
        text = f"resize: {idle}: the shapes are equal already, so remove the argument"
        return [text] if idle else []

    def list_refused(self) -> list[str]:
        """List a message for each tensor that is named, or a slot of one, and cannot be resized."""
        shapes = {one.stored for of in self.made.values() for one in of.values()}
        return self._refused + [
            f"{path}: {[*shape]}, as a resized parameter, and the optimizer loads it by its own "
            f"code. Use edit_load, or load without it in another root: load(skip=[{component!r}])"
            for component, path, shape in self._by_own_code
            if shape in shapes
        ]

    def note_names(self, component: str, names: Iterable[str]) -> None:
        """Note names that exist, and that a check of its own compares."""
        for name in names:
            for one in self._patterns.values():
                one.cover(join_path(component, name))

    def list_unresized(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """List (path, stored, live) of tensors in trees with shapes as of resized ones."""
        pairs = {(one.stored, one.shape) for of in self.made.values() for one in of.values()}
        return [other for other in self._others if other[1:] in pairs]

    def resize_module(
        self,
        component: str,
        wanted: Mapping[str, object],
        leaves: Mapping[str, Tensor],
        old_names: Mapping[str, str],
        specs: dict[str, TensorSpec],
    ) -> None:
        """Register the tensors of a module that entries match, and those tied to them."""
        is_trained = any(leaf.requires_grad for leaf in leaves.values())
        found: list[tuple[str, str, TensorSpec, Tensor]] = []
        by_key: dict[str, int] = {}
        for name, value in wanted.items():
            leaf = leaves.get(name)
            if leaf is None or not isinstance(value, TensorRef | SubclassRef):
                continue
            paths = [join_path(component, one) for one in (name, old_names.get(name, name))]
            dim = self._choose_dim(paths, _shape_of(value, specs), tuple(leaf.shape))
            if isinstance(value, SubclassRef) or is_subclass(leaf):
                self._refused += [f"{paths[0]}: {_QUANTIZED}"] if dim is not None else []
            elif refusal(leaf) is None:
                found.append((name, value.key, specs[value.key], leaf))
                if dim is not None:
                    by_key[value.key] = self._memories[identity(leaf)] = dim
        for name, key, spec, leaf in found:
            dim = by_key.get(key, self._memories.get(identity(leaf)))
            if dim is None or only_difference(spec.shape, leaf.shape) != dim:
                continue
            self._memories[identity(leaf)] = dim
            path, first = join_path(component, name), self.made.get(component, {}).get(key)
            if first is not None:
                if identity(first.live) != identity(leaf):
                    self._refused.append(
                        f"{first.path} and {path}: tied when saved, but not in the live model, so "
                        "new rows have two values. Tie them, or resize them in edit_load"
                    )
            elif spec.dtype not in RESIZABLE:
                self._refused.append(f"{path}: {_QUANTIZED}")
            elif isinstance(leaf, nn.Parameter) and is_trained and not leaf.requires_grad:
                self._refused.append(
                    f"{path}: is frozen, so new rows would not be trained. Call requires_grad_() "
                    "before the load, or use edit_load"
                )
            else:
                self._register(component, key, path, specs, dim=dim, live=leaf)

    def resize_slots(
        self,
        component: str,
        names: Sequence[str],
        stored: Sequence[int],
        parameter: Tensor,
        slots: object,
        specs: dict[str, TensorSpec],
    ) -> Sequence[int]:
        """Register the slots of a resized parameter; return the shape that they are for.

        `names`: the live and the stored name of the parameter, whose shape was `stored`.
        """
        before, shape = tuple(stored), tuple(parameter.shape)
        dim = self._choose_dim((join_path(component, one) for one in names), before, shape)
        if refusal(parameter) is not None:
            return stored
        dim = self._memories.get(identity(parameter)) if dim is None else dim
        if dim is None or only_difference(before, shape) != dim:
            return stored
        at = join_path(component, names[0])
        for path, ref, _ in _tensors_in(slots, None, at):
            found = _shape_of(ref, specs)
            is_plain = isinstance(ref, TensorRef) and specs[ref.key].dtype in RESIZABLE
            if isinstance(ref, TensorRef) and is_plain and found == before:
                self._register(
                    component, ref.key, path, specs, dim=dim, live=parameter, is_slot=True
                )
            elif math.prod(found) > 1:
                self._refused.append(
                    f"{path}: {[*found]} for a parameter {[*before]} cannot be resized, as it is "
                    "factored, quantized or in blocks. Use edit_load, or load without it, and "
                    f"continue in another root: load(skip=[{at!r}])"
                )
        return shape

    def resize_tree(
        self,
        component: str,
        stored: object,
        live: object,
        specs: dict[str, TensorSpec],
        *,
        is_optimizer: bool = False,
    ) -> None:
        """Register the tensors of a dict, list or object that entries match."""
        for path, ref, tensor in _tensors_in(stored, live, component):
            if is_optimizer and isinstance(ref, TensorRef):
                spec = specs[ref.key]
                if tensor is None or spec.dtype not in RESIZABLE:
                    self._by_own_code.append((component, path, spec.shape))
                    continue
            if tensor is None or refusal(tensor) is not None or not isinstance(ref, TensorRef):
                continue
            shapes = specs[ref.key].shape, tuple(tensor.shape)
            dim = self._choose_dim([path], *shapes)
            if dim is not None:
                self._register(component, ref.key, path, specs, dim=dim, live=tensor)
            elif shapes[0] != shapes[1]:
                self._others.append((path, *shapes))

    def _choose_dim(
        self, paths: Iterable[str], stored: tuple[int, ...], live: tuple[int, ...]
    ) -> int | None:
        """Return the dimension to resize; None if no entry names the only one that differs."""
        names, only = {*paths}, only_difference(stored, live)
        matching = [entry for entry, one in self._patterns.items() if any([*map(one.cover, names)])]
        if not any(self._dims[entry] == only for entry in matching):
            return None
        for entry in matching:
            self._idle.pop(entry, None)
        return only

    def _register(
        self,
        component: str,
        key: str,
        path: str,
        specs: dict[str, TensorSpec],
        *,
        dim: int,
        live: Tensor,
        is_slot: bool = False,
    ) -> None:
        shapes = {"stored": specs[key].shape, "shape": tuple(live.shape)}
        made = ResizedTensor(path=path, dim=dim, live=live, is_slot=is_slot, **shapes)
        self.made.setdefault(component, {})[key] = made
        specs[key] = TensorSpec(key, specs[key].dtype, made.shape)


def _shape_of(ref: TensorRef | SubclassRef, specs: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    return ref.shape if isinstance(ref, SubclassRef) else specs[ref.key].shape


def _tensors_in(
    stored: object, live: object, path: str
) -> Iterator[tuple[str, TensorRef | SubclassRef, Tensor | None]]:
    """Yield path, node and live counterpart of each tensor in a stored dict, list or tuple."""
    if isinstance(stored, TensorRef | SubclassRef):
        yield path, stored, live if isinstance(live, Tensor) else None
    elif isinstance(stored, dict):
        known = live if isinstance(live, dict) else {}
        for key, value in stored.items():
            yield from _tensors_in(value, dict.get(known, key), join_path(path, str(key)))
    elif isinstance(stored, list | tuple):
        items = [*live] if isinstance(live, list | tuple | deque) else []
        for i, (value, item) in enumerate(zip_longest(stored, items[: len(stored)])):
            yield from _tensors_in(value, item, join_path(path, i))


def fit_tensors(
    made: Mapping[str, Mapping[str, ResizedTensor]], stored: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Return the stored tensors in their live shapes; `made` and `stored` by component and key."""
    weights = {
        identity(one.live): stored[component][key]
        for component, of_component in made.items()
        for key, one in of_component.items()
        if not one.is_slot
    }
    return {
        component: {
            key: one.fit_tensor(stored[component][key], weights.get(identity(one.live)))
            for key, one in of_component.items()
        }
        for component, of_component in made.items()
    }
