"""Live values for a stored tree: DTensors to load into, excluded values, members of enumerations.

Of a tensor that goes into a DTensor a rank needs only its own part. Classes of enumerations come
from the live state only; no class is imported by a name in a file.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, Flag
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.format.nodes import EnumValue, SubclassRef, TensorRef
from holdfast.format.objects import Refused, join_path, type_name
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import PLAIN_TYPES, is_dtensor
from holdfast.state.planning.copying import Stored, fetched
from holdfast.state.planning.inner import match_inner
from holdfast.state.selection import Problems, Selection, names_of_keys
from holdfast.state.shards import LocalShards, shards_of
from holdfast.state.trees import LiveValue, Skeleton, nodes_in

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_ABSENT: Any = object()


def revive(
    skeleton: Skeleton, live: Any, component: str, problems: Problems, *, stored: Any = _ABSENT
) -> Any:
    """Replace `EnumValue` nodes of a tree by members of live classes, in place where possible.

    Values are wrapped in `LiveValue`; keys and members of sets are not. Nodes whose class is
    nowhere in `live` stay `EnumValue`, with a note for each. `stored` replaces the skeleton's own
    value, if given.
    """
    tree = skeleton.value if stored is _ABSENT else stored
    if not skeleton.has_enums:
        return tree
    reviving = _Reviving(_classes_in(live))
    tree = reviving.value(tree, component)
    problems.notes += [
        f"{path}: an enumeration ({kind[:80]}) comes back as EnumValue"
        for path, kind in reviving.left
    ]
    return tree


def _classes_in(live: Any) -> dict[str, type[Enum]]:
    """Map names to enumeration classes in `live`; two classes of one name are both left out."""
    by_name: dict[str, set[type[Enum]]] = {}
    for node in nodes_in(live):
        for value in (node, *node) if isinstance(node, dict) else (node,):
            parts = nodes_in(value) if isinstance(value, tuple | frozenset) else (value,)
            for part in parts:
                if isinstance(part, Enum):
                    by_name.setdefault(type_name(type(part)), set()).add(type(part))
    return {name: classes.pop() for name, classes in by_name.items() if len(classes) == 1}


class _Reviving:
    """Replaces `EnumValue` nodes of a decoded tree by members; shared containers stay shared."""

    def __init__(self, classes: dict[str, type[Enum]]) -> None:
        self.left: list[tuple[str, str]] = []
        self._classes = classes
        # Old containers are kept, so that no id is used twice.
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, node: Any, path: str) -> Any:
        """Return the replacement of `node`, which is not a key or a member of a set."""
        if isinstance(node, EnumValue):
            member = self._member(node, path)
            return member if member is node else LiveValue(member)
        if type(node) is not tuple and not isinstance(node, dict | list | set | frozenset):
            return node
        if id(node) not in self._done:
            # A container may occur several times, but never inside itself.
            self._done[id(node)] = node, self._container(node, path)
        return self._done[id(node)][1]

    def _container(self, node: Any, path: str) -> Any:
        if isinstance(node, dict):
            items = [
                (self._revive_key(k, path), self.value(v, join_path(path, k)))
                for k, v in node.items()
            ]
            if len(dict(items)) == len(node):
                node.clear()
                node.update(dict(items))
            return node
        if isinstance(node, list):
            node[:] = [self.value(item, join_path(path, i)) for i, item in enumerate(node)]
            return node
        if isinstance(node, tuple):
            made = tuple(self.value(item, join_path(path, i)) for i, item in enumerate(node))
            return node if _are_same(made, node) else made
        return self._set(node, path)

    def _set(self, node: Any, path: str) -> Any:
        members = [self._revive_key(member, path) for member in node]
        return node if len(set(members)) < len(node) else type(node)(members)

    def _revive_key(self, key: Any, path: str) -> Any:
        if isinstance(key, EnumValue):
            return self._member(key, path)
        if type(key) is tuple:
            made = tuple(self._revive_key(item, path) for item in key)
            return key if _are_same(made, key) else made
        return self._set(key, path) if isinstance(key, frozenset) else key

    def _member(self, stored: EnumValue, path: str) -> Any:
        kind = self._classes.get(stored.type)
        member = stored if kind is None else member_of(kind, stored)
        if member is stored:
            self.left.append((path, stored.type))
        return member


def _are_same(ones: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(ones, others, strict=True))


def keep_live(stored: Any, live: Any, component: str, selection: Selection) -> bool:
    """Put live values for those that `selection` excludes; return whether others are loaded."""
    if not isinstance(stored, dict | list):
        return not selection.is_excluded(component)
    keeping = _Keeping(component, selection)
    keeping.container(stored, live, "")
    return keeping.num_wanted > 0 or selection.includes(component)


class _Keeping:
    """Replaces the values of a stored tree that a selection excludes by the live ones."""

    def __init__(self, component: str, selection: Selection) -> None:
        self._component = component
        self._choice = selection
        self.num_wanted = 0
        """Number of stored values that will be loaded, so far."""

    def container(self, stored: Any, live: Any, path: str) -> None:
        """Replace the excluded values in the dict or list `stored`, in place."""
        if isinstance(stored, dict):
            self._dict(stored, live if isinstance(live, dict) else {}, path)
        else:
            self._list(stored, [*live] if isinstance(live, list | deque) else [], path)

    def _dict(self, stored: dict[Any, Any], live: dict[Any, Any], path: str) -> None:
        for key, name in names_of_keys(dict.fromkeys([*stored, *live])).items():
            # For a missing key a Counter returns 0, and a defaultdict makes an entry.
            known = dict.get(live, key, _ABSENT)
            value = self._choose_value(dict.get(stored, key, _ABSENT), known, join_path(path, name))
            if value is not _ABSENT:
                stored[key] = value
            elif key in stored:
                del stored[key]

    def _list(self, stored: list[Any], live: list[Any], path: str) -> None:
        values = []
        for i in range(max(len(stored), len(live))):
            value = stored[i] if i < len(stored) else _ABSENT
            known = live[i] if i < len(live) else _ABSENT
            values.append(self._choose_value(value, known, join_path(path, i)))
        stored[:] = [value for value in values if value is not _ABSENT]

    def _choose_value(self, value: Any, known: Any, path: str) -> Any:
        """Return the value for `path`: the stored one, the live one, or `_ABSENT`."""
        shown = value if value is not _ABSENT else known
        if isinstance(shown, dict | list) and not self._choice.skips(self._component, path):
            return self._chosen_inside(value, known, path)
        if self._choice.is_excluded(self._component, path):
            return _wrap_known(known)
        self.num_wanted += value is not _ABSENT
        return value

    def _chosen_inside(self, value: Any, known: Any, path: str) -> Any:
        is_included = self._choice.includes(self._component, path)
        inside = value if value is not _ABSENT else _empty_like(known)
        before = self.num_wanted
        self.container(inside, known, path)
        if not is_included:
            return inside if self.num_wanted > before else _wrap_known(known)
        self.num_wanted += value is not _ABSENT
        return inside if inside or value is not _ABSENT else _ABSENT


def _wrap_known(known: Any) -> Any:
    return known if known is _ABSENT else LiveValue(known)


def _empty_like(live: Any) -> Any:
    if type(live) in (OrderedDict, Counter):
        return type(live)()
    return {} if isinstance(live, dict) else []


def revived(live: Any, stored: EnumValue) -> Any:
    """Return the stored member in the live value's enum class; `stored` if it has none."""
    kind = type(live)
    if not isinstance(live, Enum) or type_name(kind) != stored.type:
        return stored
    return member_of(kind, stored)


def member_of(kind: type[Enum], stored: EnumValue) -> Any:
    """Find the member of `kind` by name, else by value, as of combined flags; or `stored`."""
    member = kind.__members__.get(stored.name) if stored.name is not None else None
    if member is not None:
        return member
    value = stored.value
    if type(value) not in (int, str):
        return stored
    if issubclass(kind, Flag):
        return _combination(kind, stored)
    same = (m for m in kind if type(m.value) is type(value) and m.value == value)
    return next(same, stored)


def _combination(kind: type[Flag], stored: EnumValue) -> Any:
    if type(stored.value) is not int:
        return stored  # Python 3.10 compares it with numbers before it checks the type
    try:
        member = kind(stored.value)
    except ValueError:
        return stored
    # A class may also drop unknown bits, or return a plain number.
    is_it = isinstance(member, kind) and member.value == stored.value
    return member if is_it else stored


_PLAIN = PLAIN_TYPES | {bool, int, float, str, type(None)}


class Destinations:
    """The live tensor of each stored one of a component, where either is a DTensor."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._first: dict[str, tuple[str, DTensor | None]] = {}
        self._seen: set[int] = set()
        self.are_plain = True
        """Whether none is a DTensor, so that nothing need be matched."""
        self.layouts: dict[str, DTensor] = {}
        """Key -> DTensor of the same global shape, whose mesh and placements the new one has."""
        self.shards: dict[str, LocalShards] = {}
        """Key -> the boxes that this rank holds of it."""

    def look_in(self, live: Any) -> None:
        """Look for DTensors in the live values, before any is matched."""
        self.are_plain = not _has_dtensors(live, set())

    def match(
        self, live: Any, stored: Any, path: str, problems: Problems, beside: Tensor | None = None
    ) -> None:
        """Record the destination of each tensor in `stored`, the nodes of a tree."""
        if self.are_plain:
            return
        if isinstance(stored, TensorRef):
            self._add_destination(live, stored.key, path, problems, beside)
        elif isinstance(stored, SubclassRef):
            if is_dtensor(live):  # else it is matched when it is merged
                match_inner(path, stored, live, self._specs, problems, self.shards)
        elif isinstance(stored, dict | list | tuple) and id(stored) not in self._seen:
            self._seen.add(id(stored))
            for name, item in stored.items() if isinstance(stored, dict) else enumerate(stored):
                self.match(_item(live, name), item, join_path(path, name), problems, beside)

    def _add_destination(
        self, live: Any, key: str, path: str, problems: Problems, beside: Tensor | None
    ) -> None:
        shape = self._specs[key].shape
        known = next(
            (one for one in (live, beside) if isinstance(one, Tensor) and one.shape == shape), None
        )
        layout = known if is_dtensor(known) else None
        if known is None and is_dtensor(beside) and math.prod(shape) > 1:
            problems.other.append(
                f"{path}: stored {list(shape)}, its parameter is {list(beside.shape)}, and no live "
                "tensor tells how it is placed over the ranks: make one optimizer step before "
                "the load"
            )
        first, other = self._first.setdefault(key, (path, layout))
        if not _are_alike(layout, other):
            problems.other.append(
                f"{first} and {path} are placed over the ranks in different ways here, and were "
                "one tensor when saved"
            )
        if layout is None or key in self.layouts:
            return
        shards = shards_of(layout)
        if isinstance(shards, Refused):
            problems.offenders.append((path, shards.reason))
        else:
            self.layouts[key], self.shards[key] = layout, shards

    def placed(self, tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Return the tensors, with those that go into DTensors as DTensors."""
        if not self.layouts:
            return tensors
        made = {
            key: placed_as(layout, fetched(tensors[key]))
            for key, layout in self.layouts.items()
            if key in tensors
        }
        return {**tensors, **made}


def _has_dtensors(value: Any, seen: set[int]) -> bool:
    if not isinstance(value, dict | list | tuple | deque):
        return is_dtensor(value)
    if id(value) in seen:
        return False
    seen.add(id(value))
    items = [*dict.values(value)] if isinstance(value, dict) else value
    if _PLAIN.issuperset(map(type, items)):
        return False
    return any(_has_dtensors(item, seen) for item in items)


def _item(live: Any, name: Any) -> Any:
    if isinstance(live, dict):
        return dict.get(live, name)
    is_there = isinstance(live, list | tuple | deque) and isinstance(name, int) and name < len(live)
    return live[name] if is_there else None


def _are_alike(one: DTensor | None, other: DTensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return _layout_of(one) == _layout_of(other)


def _layout_of(tensor: DTensor) -> tuple[Any, ...]:
    """Return what decides the boxes of each rank."""
    order = getattr(tensor._spec, "shard_order", None)  # only newer torch has one
    return tensor.device_mesh, tensor.placements, order


def placed_as(layout: DTensor, local: Tensor) -> Tensor:
    """Make a DTensor of `local`, moved to the device, as another one is placed."""
    # Not `from_local`: it does not take the order in which a dimension was sharded.
    spec = layout._spec
    assert spec.tensor_meta is not None, "a live DTensor has a shape"
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    placed = local.detach().to(layout._local_tensor.device)
    return type(layout)(placed, replace(spec, tensor_meta=meta), requires_grad=False)
