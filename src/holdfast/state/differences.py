"""Where two trees of a component differ first, with both values; for messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from holdfast.format.nodes import TensorRef
from holdfast.format.objects import document, join_path

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
