"""Components whose state differs by rank: each rank's whole, under keys that name the rank.

The joined tree is a `$ranks` node: the trees of all ranks, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import FormatError
from holdfast.format import strictjson
from holdfast.format.layout import FORMAT_VERSION, MAX_TREE_NBYTES
from holdfast.format.objects import MAX_TREE_VALUES, RANKS
from holdfast.format.tensors import TensorSpec
from holdfast.state.components import StoredComponent

BY_RANK = frozenset({"rng", "generator"})
"""Kinds of components of which each rank keeps its own."""
_REFERENCES = ("$tensor", "$array")


def key_of_rank(key: str, rank: int) -> str:
    """Return the key under which a rank's tensor is stored."""
    return f"rank{rank}.{key}"


def joined(trees: Sequence[bytes]) -> bytes:
    """Join the trees of all ranks, in their order, to one document."""
    nodes = []
    for rank, tree in enumerate(trees):
        document = msgspec.json.decode(tree)
        nodes.append(_with_keys(document.pop("tree"), rank))
    return msgspec.json.encode({"holdfast": FORMAT_VERSION, "tree": {RANKS: nodes}})


def part_of(
    stored: StoredComponent, rank: int
) -> tuple[StoredComponent, Mapping[str, str], int] | None:
    """Return a rank's part of a joined component; None if the component is not joined.

    With another number of ranks, rank r gets the part of r modulo the stored number.

    Returns:
        The part, the stored key of each of its keys, and the stored number of ranks.

    Raises:
        FormatError: the tree is not valid.
    """
    if stored.kind not in BY_RANK or f'"{RANKS}"'.encode() not in stored.tree:
        return None
    what = f"{stored.name}'s tree"
    document = strictjson.loads(
        stored.tree, what=what, max_nbytes=MAX_TREE_NBYTES, max_values=MAX_TREE_VALUES
    )
    strictjson.check_version(document, what=what)
    node = document.get("tree")
    nodes = node.get(RANKS) if isinstance(node, dict) and node.keys() == {RANKS} else None
    if not isinstance(nodes, list) or not nodes:
        raise FormatError(f"{what}: `{RANKS}` is not a list of trees, one for each rank")
    old = rank % len(nodes)
    prefix = key_of_rank("", old)
    keys = {key.removeprefix(prefix): key for key in stored.tensors if key.startswith(prefix)}
    tree = {"holdfast": FORMAT_VERSION, "tree": _without_prefix(nodes[old], prefix, what)}
    part = StoredComponent(
        name=stored.name,
        kind=stored.kind,
        tree=msgspec.json.encode(tree),
        tensors={
            key: TensorSpec(key, stored.tensors[old_key].dtype, stored.tensors[old_key].shape)
            for key, old_key in keys.items()
        },
    )
    return part, keys, len(nodes)


def difference(one: bytes, other: bytes) -> str:
    """Say where two trees differ first, with both values; for messages."""
    trees = [msgspec.json.decode(tree).get("tree") for tree in (one, other)]
    return _difference(trees[0], trees[1], "")


def _difference(one: Any, other: Any, path: str) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            if one.get(name) != other.get(name):
                return _difference(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                return _difference(pair[0], pair[1], f"{path}.{number}".lstrip("."))
    return f"{path or 'the whole'} is {one!r:.60} and {other!r:.60}"


def _with_keys(node: Any, rank: int) -> Any:
    """Return a node whose tensors are named as those of a rank."""
    if isinstance(node, list):
        return [_with_keys(one, rank) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        name: (
            key_of_rank(value, rank)
            if name in _REFERENCES and isinstance(value, str)
            else _with_keys(value, rank)
        )
        for name, value in node.items()
    }


def _without_prefix(node: Any, prefix: str, what: str) -> Any:
    if isinstance(node, list):
        return [_without_prefix(one, prefix, what) for one in node]
    if not isinstance(node, dict):
        return node
    plain = {}
    for name, value in node.items():
        if name in _REFERENCES and isinstance(value, str):
            if not value.startswith(prefix):
                raise FormatError(f"{what}: {value[:80]!r} is a tensor of another rank")
            plain[name] = value.removeprefix(prefix)
        else:
            plain[name] = _without_prefix(value, prefix, what)
    return plain
