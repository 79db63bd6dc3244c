"""Restoring of enumeration members in a stored tree, with the classes of the live state.

Classes come from the live state only; no class is imported by a name in a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from holdfast.format.objects import EnumValue, join
from holdfast.state.problems import Problems
from holdfast.state.trees import LiveValue, Skeleton, member_of, nodes_in, type_name

_ABSENT = object()


def revive(
    skeleton: Skeleton, live: Any, component: str, problems: Problems, *, stored: Any = _ABSENT
) -> Any:
    """Replace `EnumValue` nodes of a tree by members, in place where possible.

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
    """Revives the enumerations of a decoded tree; shared containers stay shared."""

    def __init__(self, classes: dict[str, type[Enum]]) -> None:
        self.left: list[tuple[str, str]] = []
        self._classes = classes
        # Old containers are kept, so that no id is used twice.
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, node: Any, path: str) -> Any:
        """Return the replacement of `node` in the position of a value."""
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
            items = [(self._key(k, path), self.value(v, join(path, k))) for k, v in node.items()]
            if len(dict(items)) == len(node):
                node.clear()
                node.update(dict(items))
            return node
        if isinstance(node, list):
            node[:] = [self.value(item, join(path, i)) for i, item in enumerate(node)]
            return node
        if isinstance(node, tuple):
            made = tuple(self.value(item, join(path, i)) for i, item in enumerate(node))
            return node if _are_same(made, node) else made
        return self._set(node, path)

    def _set(self, node: Any, path: str) -> Any:
        members = [self._key(member, path) for member in node]
        return node if len(set(members)) < len(node) else type(node)(members)

    def _key(self, key: Any, path: str) -> Any:
        if isinstance(key, EnumValue):
            return self._member(key, path)
        if type(key) is tuple:
            made = tuple(self._key(item, path) for item in key)
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
