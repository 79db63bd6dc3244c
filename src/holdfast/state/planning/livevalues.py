"""Replacing nodes of a stored tree by live values: excluded ones, and members of enumerations.

Classes of enumerations come from the live state only; no class is imported by a name in a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum, Flag
from typing import Any

from holdfast.format.nodes import EnumValue
from holdfast.format.objects import join_path, type_name
from holdfast.state.selection import Problems, Selection, names_of_keys
from holdfast.state.trees import LiveValue, Skeleton, nodes_in

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
    """Replace the values of a decoded tree that `selection` excludes by the live ones.

    A tuple or a set is one value. Returns whether any stored value will be loaded.
    """
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
            self._list(stored, live if isinstance(live, list) else [], path)

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
    """Find the member of `kind` by its name, else by its value; `stored` if there is none.

    A combination of flags has no name of its own, or one that `__members__` lacks.
    """
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
