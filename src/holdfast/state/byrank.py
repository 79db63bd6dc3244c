"""Components whose state differs by rank: each rank's whole, under keys that name the rank."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format import strictjson

BY_RANK = frozenset({"rng", "generator"})
"""Kinds of components of which each rank keeps its own."""


def key_of_rank(key: str, rank: int) -> str:
    """Return the key under which a rank's tensor is stored."""
    return f"rank{rank}.{key}"


def joined(trees: Sequence[bytes]) -> bytes:
    """Join the trees of all ranks, in their order, to one document."""
    raise NotImplementedError(strictjson, trees)
