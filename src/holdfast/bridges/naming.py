"""Names that all bridges share, and what one says of the state of another's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def name_components(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Name several components of a kind: `optimizer`, `optimizer1`, …

    >>> name_components("optimizer", ["a", "b"])
    {'optimizer': 'a', 'optimizer1': 'b'}
    """
    return {f"{name}{number or ''}": value for number, value in enumerate(values)}


def left_out(state: Mapping[str, Any], framework: str) -> str | None:
    """Return a note if a stored component `trainer` is of another framework than the one loading.

    >>> left_out({"of": "ignite"}, "lightning")
    'trainer: saved by ignite, so lightning leaves its counters and callbacks out'
    """
    other = state.get("of", "another trainer")
    if other == framework:
        return None
    return f"trainer: saved by {other}, so {framework} leaves its counters and callbacks out"
