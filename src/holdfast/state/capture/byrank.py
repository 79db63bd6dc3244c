"""Trees of one component that differ by rank: joined by rank or by name, and compared.

Joined by rank, the tree is a `$ranks` node: the trees of all ranks, in their order. Joined by name,
as a pipeline's stages, each rank has entries under names of its own, and an entry of several ranks
must be equal in all. Only modules and optimizers are joined by name: a load takes by name what they
hold, and refills all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.nodes import TensorRef
from holdfast.format.objects import (
    RANKS,
    TreeDocument,
    decode_beside,
    decode_frozen,
    decode_tree,
    document,
    join_path,
    load_document,
)
from holdfast.format.strictjson import FROZEN
from holdfast.format.tensors import TensorSpec
from holdfast.state.components import StoredComponent
from holdfast.state.trees import UNSAVED

BY_RANK = frozenset({"rng", "generator"})
"""Kinds of components of which each rank always has its own; others may be marked so."""
_REFERENCES = ("$tensor", "$array")


def key_of_rank(key: str, rank: int) -> str:
    """Return the key under which a rank's tensor is stored."""
    return f"rank{rank}.{key}"


def join_rank_trees(trees: Sequence[bytes]) -> bytes:
    """Join the trees of all ranks, in their order, to one document."""
    documents = [msgspec.json.decode(tree) for tree in trees]
    nodes = [
        _rename_tensors(one.pop("tree"), partial(key_of_rank, rank=rank))
        for rank, one in enumerate(documents)
    ]
    if any(one != documents[0] for one in documents):
        raise UnsupportedState([("versions of submodules", "they differ by rank")])
    documents[0].pop("holdfast")
    return TreeDocument({RANKS: nodes}, documents[0]).data


def part_of(
    stored: StoredComponent, rank: int, world_size: int | None = None
) -> tuple[StoredComponent, Mapping[str, str]] | None:
    """Return a rank's (modulo the stored number) part of a joined component, and stored keys."""
    if f'"{RANKS}"'.encode() not in stored.tree:
        return None
    what = f"{stored.name}'s tree"
    document = load_document(stored.tree, what=what)
    node = document.get("tree")
    if not isinstance(node, dict) or node.keys() != {RANKS}:
        return None  # it is in a text
    nodes = node[RANKS]
    if not isinstance(nodes, list) or not nodes:
        raise FormatError(f"{what}: `{RANKS}` is not a list of trees, one for each rank")
    if world_size not in (None, len(nodes)) and stored.kind not in BY_RANK:
        _expect_one_shape(stored, len(nodes))
    old = rank % len(nodes)
    prefix = key_of_rank("", old)
    keys = {key.removeprefix(prefix): key for key in stored.tensors if key.startswith(prefix)}
    own = partial(_remove_prefix, prefix=prefix, what=what)
    tree = {**document, "tree": _rename_tensors(nodes[old], own)}
    part = StoredComponent(
        name=stored.name,
        kind=stored.kind,
        tree=msgspec.json.encode(tree),
        tensors={
            key: TensorSpec(key, stored.tensors[old_key].dtype, stored.tensors[old_key].shape)
            for key, old_key in keys.items()
        },
    )
    return part, keys


def _expect_one_shape(stored: StoredComponent, num_ranks: int) -> None:
    """Raise `MismatchError` if the tensors of a joined component differ by rank in their shapes."""
    tensors = [_select_specs(stored, rank) for rank in range(num_ranks)]
    odd = [rank for rank, specs in enumerate(tensors) if specs != tensors[0]]
    if odd:
        names = sorted({key for key, _ in tensors[0].items() ^ tensors[odd[0]].items()})
        why = (
            f"each of {num_ranks} ranks saved its own, and those of ranks 0 and {odd[0]} differ in "
            f"the shapes of tensors ({', '.join(names[:3])}), so that no other number of ranks can "
            f"take them over. Load on {num_ranks} ranks, or leave it out: load(skip=[…])"
        )
        raise MismatchError(stored.name, hint=why)


def _select_specs(stored: StoredComponent, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    prefix = key_of_rank("", rank)
    return {
        key.removeprefix(prefix): (spec.dtype, spec.shape)
        for key, spec in stored.tensors.items()
        if key.startswith(prefix)
    }


def difference(one: bytes, other: bytes) -> str:
    """Say where two trees differ first, with both values; for messages."""
    trees = [decode_tree(tree, what="a rank's tree") for tree in (one, other)]
    path, *values = first_difference(*trees)
    return f"{path or 'the whole'} is {values[0]} and {values[1]}"


def _rename_tensors(node: Any, rename: Callable[[str], str]) -> Any:
    """Return a node with other keys of its tensors."""
    if isinstance(node, list):
        return [_rename_tensors(one, rename) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        name: (
            rename(value)
            if name in _REFERENCES and isinstance(value, str)
            else _rename_tensors(value, rename)
        )
        for name, value in node.items()
    }


def _remove_prefix(key: str, prefix: str, what: str) -> str:
    if not key.startswith(prefix):
        raise FormatError(f"{what}: {key[:80]!r} is a tensor of another rank")
    return key.removeprefix(prefix)


ABSENT = object()
"""In place of an entry that one of the trees does not have."""
_NUM_SHOWN = 60
_NUM_BEFORE = 20
"""Characters of a value that are shown, and how many of them before the first that differs."""


def are_equal(one: Any, other: Any) -> bool:
    """Whether two decoded values are the same, with their types, bit by bit."""
    if one is ABSENT or other is ABSENT:
        return one is other
    if type(one) is TensorRef and type(other) is TensorRef:
        return one == other
    return one is other or document(one).data == document(other).data


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, str, str]:
    """Return the path of the first entry that differs in two decoded values, and both entries."""
    for name, left, right in _entries(one, other):
        if not are_equal(left, right):
            return first_difference(left, right, join_path(path, name))
    return path, *_show_both(one, other)


def _entries(one: Any, other: Any) -> Iterator[tuple[object, Any, Any]]:
    """List the entries of two containers of one type; none if they are something else."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            yield name, one.get(name, ABSENT), other.get(name, ABSENT)
    elif type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield number, *pair


def _show_both(one: Any, other: Any) -> tuple[str, str]:
    """Show two values; of long texts the part around their first difference."""
    texts = [repr(value) for value in (one, other)]
    if one is ABSENT or other is ABSENT:
        texts = ["absent" if value is ABSENT else _format_value(value) for value in (one, other)]
    if texts[0] == texts[1]:
        texts = [
            f"{text} ({type(value).__name__})"
            for text, value in zip(texts, (one, other), strict=True)
        ]
    if max(map(len, texts)) <= _NUM_SHOWN:
        return texts[0], texts[1]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - _NUM_BEFORE) if same > _NUM_SHOWN - _NUM_BEFORE else 0
    cut = [_cut_excerpt(text, start) for text in texts]
    return cut[0], cut[1]


def _format_value(value: Any) -> str:
    return "present" if isinstance(value, dict | list | TensorRef) else repr(value)


def _cut_excerpt(text: str, start: int) -> str:
    end = start + _NUM_SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


JOINED = frozenset({"module", "optimizer"})
"""Kinds of components that are joined."""
_POSITION = re.compile(r"group\d+\.param\d+(#\d+)?", re.ASCII)
"""Name of a parameter in no module of the state: its position in the optimizer of one rank."""
_OF_OWNERS = (
    "If each rank has the state of its own parameters, mark the component as holdfast.PerRank"
)
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
        frozen = [(rank, decode_frozen(tree, what=what)) for rank, tree in ranks]
        both = {_VERSIONS: versions, FROZEN: frozen}
        beside = {
            name: found
            for name, of_ranks in both.items()
            if (found := joining.by_name(name, of_ranks))
        }
        joining.conflicts += [
            (join_path(component, name), "some ranks save only its digest: freeze it on all")
            for name in beside.get(FROZEN, ())
            if name in joined
        ]
        unsaved = [decode_beside(tree, UNSAVED, what=what) or {} for _, tree in ranks]
        beside |= {UNSAVED: equal} if (equal := _equal_in_all(unsaved)) else {}
    if joining.conflicts:
        raise UnsupportedState(joining.conflicts, hint=_OF_OWNERS)
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
                "the parameter groups differ by rank and are joined by the names of parameters, "
                "but no module of the state has this one",
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
