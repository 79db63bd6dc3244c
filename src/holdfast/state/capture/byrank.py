"""Components of which each rank has its own state, under keys that name the rank.

The joined tree is a `$ranks` node: the trees of all ranks, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format import strictjson
from holdfast.format.layout import MAX_TREE_NBYTES
from holdfast.format.objects import MAX_TREE_VALUES, RANKS, TreeDocument, decode_tree
from holdfast.format.tensors import TensorSpec
from holdfast.state.components import StoredComponent
from holdfast.state.differences import first_difference

BY_RANK = frozenset({"rng", "generator"})
"""Kinds of components of which each rank always has its own; others may be marked so."""
_REFERENCES = ("$tensor", "$array")


def key_of_rank(key: str, rank: int) -> str:
    """Return the key under which a rank's tensor is stored."""
    return f"rank{rank}.{key}"


def join_rank_trees(trees: Sequence[bytes]) -> bytes:
    """Join the trees of all ranks, in their order, to one document."""
    documents = [msgspec.json.decode(tree) for tree in trees]
    nodes = [_with_keys(one.pop("tree"), rank) for rank, one in enumerate(documents)]
    if any(one != documents[0] for one in documents):
        raise UnsupportedState([("versions of submodules", "they differ by rank")])
    documents[0].pop("holdfast")
    return TreeDocument({RANKS: nodes}, documents[0]).data


def part_of(
    stored: StoredComponent, rank: int, world_size: int | None = None
) -> tuple[StoredComponent, Mapping[str, str]] | None:
    """Return a rank's part of a joined component; None if the component is not joined.

    With another number of ranks, rank r gets the part of r modulo the stored number.

    Returns:
        The part, and the stored key of each of its keys.
    """
    if f'"{RANKS}"'.encode() not in stored.tree:
        return None
    what = f"{stored.name}'s tree"
    document = strictjson.loads(
        stored.tree, what=what, max_nbytes=MAX_TREE_NBYTES, max_values=MAX_TREE_VALUES
    )
    strictjson.check_version(document, what=what)
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
    tree = {**document, "tree": _without_prefix(nodes[old], prefix, what)}
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
