"""Trees of one component that differ by rank, joined by name: a pipeline's stages, experts.

Each rank has entries under names of its own; an entry that several ranks have must be equal. Only
modules and optimizers are joined: a load takes by name what they hold, and refills all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from holdfast.errors import UnsupportedState
from holdfast.format.objects import decode_beside, decode_tree, document, join_path
from holdfast.state.differences import ABSENT, are_equal, first_difference
from holdfast.state.trees import UNSAVED

JOINED = frozenset({"module", "optimizer"})
"""Kinds of components that are joined."""
_POSITION = re.compile(r"group\d+\.param\d+(#\d+)?", re.ASCII)
"""Name of a parameter in no module of the state: its position in the optimizer of one rank."""
_EQUAL = ("type", "extra")
_VERSIONS = "versions"

_OfRanks: TypeAlias = Sequence[tuple[int, Any]]
"""The lowest rank of each distinct value, and the value."""


def join_by_name(component: str, kind: str, trees: Sequence[bytes]) -> bytes:
    """Join the trees of all ranks, in their order, to one tree with the entries of all."""
    distinct = {tree: rank for rank, tree in reversed([*enumerate(trees)])}
    if len(distinct) == 1:
        return trees[0]
    what = f"{component}'s tree"
    ranks = sorted((rank, tree) for tree, rank in distinct.items())
    parts = [(rank, decode_tree(tree, what=what)) for rank, tree in ranks]
    joining = _Joining(component)
    beside: dict[str, Any] = {}
    if kind == "optimizer":
        joined = joining.optimizer(parts)
    else:
        joined = joining.by_name("", parts)
        versions = [(rank, decode_beside(tree, _VERSIONS, what=what) or {}) for rank, tree in ranks]
        beside = {_VERSIONS: found} if (found := joining.by_name(_VERSIONS, versions)) else {}
        unsaved = [decode_beside(tree, UNSAVED, what=what) or {} for _, tree in ranks]
        beside |= {UNSAVED: equal} if (equal := _equal_in_all(unsaved)) else {}
    if joining.conflicts:
        raise UnsupportedState(joining.conflicts)
    return document(joined, beside=beside).data


def _equal_in_all(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """Join dicts by name, without the names that have two values."""
    joined: dict[str, str] = {}
    for part in parts:
        joined |= part
    return {
        name: value
        for name, value in joined.items()
        if all(part.get(name, value) == value for part in parts)
    }


class _Joining:
    """Joins the values of one component, and collects the conflicts."""

    def __init__(self, component: str) -> None:
        self._component = component
        self.conflicts: list[tuple[str, str]] = []

    def by_name(self, path: str, parts: _OfRanks) -> dict[Any, Any]:
        """Join dicts to one with the names of all."""
        joined: dict[Any, Any] = {}
        holders: dict[Any, int] = {}
        for rank, part in parts:
            for name, value in part.items():
                if holders.setdefault(name, rank) == rank:
                    joined[name] = value
                elif not are_equal(joined[name], value):
                    self._record_conflict(
                        join_path(path, name), holders[name], joined[name], rank, value
                    )
        return joined

    def equal(self, path: str, parts: _OfRanks) -> Any:
        """Return the value that all have."""
        (first, value), *others = parts
        for rank, other in others:
            if not are_equal(value, other):
                self._record_conflict(path, first, value, rank, other)
        return value

    def optimizer(self, parts: _OfRanks) -> dict[str, Any]:
        """Join the trees of optimizers; group *n* gets the names of group *n* of each rank."""
        tree = {name: self.equal(name, list(_iterate_members(parts, name))) for name in _EQUAL}
        # Only with parameters does an optimizer know the modules that these come from.
        some = [(rank, one) for rank, one in parts if one["shapes"]] or parts
        tree["modules"] = self.equal("modules", list(_iterate_members(some, "modules")))
        tree["shapes"] = self.by_name("shapes", list(_iterate_members(parts, "shapes")))
        tree["devices"] = self._of_parameters(parts, "devices", "cpu")
        tree["slots"] = self._of_parameters(parts, "slots", ABSENT)
        options = list(_iterate_members(parts, "param_groups"))
        counts = [(rank, len(groups)) for rank, groups in options]
        count = self.equal("number of param_groups", counts)
        if len({num for _, num in counts}) > 1:
            return tree  # a rank without parameters for a group must have an empty one
        groups = list(_iterate_members(parts, "groups"))
        tree["param_groups"] = [
            self._options(n, [(rank, of_rank[n]) for rank, of_rank in options])
            for n in range(count)
        ]
        tree["groups"] = [
            [*dict.fromkeys(name for _, of_rank in groups for name in of_rank[n])]
            for n in range(count)
        ]
        self._check_names(groups)
        return {name: tree[name] for name in parts[0][1]}

    def _of_parameters(self, parts: _OfRanks, member: str, default: Any) -> dict[str, Any]:
        """Join a member that has entries for some parameters, and the default for all others."""
        whole = [
            (rank, {name: tree[member].get(name, default) for name in tree["shapes"]})
            for rank, tree in parts
        ]
        joined = self.by_name(member, whole)
        return {
            name: value
            for name, value in joined.items()
            if value is not default and value != default
        }

    def _options(self, number: int, parts: _OfRanks) -> dict[str, Any]:
        path = f"param_groups.{number}"
        self.equal(path, [(rank, sorted(options, key=repr)) for rank, options in parts])
        return self.by_name(path, parts)

    def _check_names(self, groups: _OfRanks) -> None:
        """Refuse parameters without a name, or in groups of different numbers on two ranks."""
        home: dict[str, tuple[int, int]] = {}
        for rank, of_rank in groups:
            for number, names in enumerate(of_rank):
                for name in names:
                    first, known = home.setdefault(name, (rank, number))
                    if known != number:
                        self._record_conflict(f"{name} in param_groups", first, known, rank, number)
        unnamed = sorted(name for name in home if _POSITION.fullmatch(name))
        self.conflicts += [
            (
                f"{self._component}.{name}",
                "no module of the state has this parameter, so that it has no name by which the "
                "parameter groups of the ranks, which differ, could be joined",
            )
            for name in unnamed
        ]

    def _record_conflict(self, path: str, first: int, value: Any, rank: int, other: Any) -> None:
        path, one, two = first_difference(value, other, join_path(self._component, path))
        reason = f"on rank {first} it is {one}, on rank {rank} {two}"
        self.conflicts.append((path, f"{reason}; values on several ranks must be equal"))


def _iterate_members(parts: _OfRanks, name: str) -> Iterator[tuple[int, Any]]:
    for rank, tree in parts:
        yield rank, tree[name]
