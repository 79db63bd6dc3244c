"""Where a stop of a process may make a difference to a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from holdfast.testing.faulty import Fault, FaultyStore, Kind, OpName

CHANGES: tuple[OpName, ...] = (
    *("put", "create", "write", "finish", "abort", "link", "point"),
    *("delete", "make_folder", "sweep", "abort_uploads"),
)
"""The operations that change which objects a store holds, or what is in them."""
OTHERS: tuple[OpName, ...] = (
    *("get", "read_into", "head", "list", "children", "unlisted", "uploads"),
    *("free_space", "pointed", "probe", "refresh_folder", "sync_folder"),
)
"""All others. A stop at one of them leaves the objects that a stop before the next change leaves,
by when some more may have been acknowledged. What is not durable yet is for test_write_order.py."""

assert {*CHANGES, *OTHERS} == {*get_args(OpName)}, "a new operation: does it change objects?"


def stops(kind: Kind, clean: FaultyStore, *, at_all: bool = False) -> Iterator[Fault]:
    """A stop at each change that an undisturbed run made on `clean`, or at all its operations."""
    assert any(name in CHANGES for name, _ in clean.ops), "the run changed nothing"
    seen: Counter[str] = Counter()
    for at, (name, _) in enumerate(clean.ops):
        if at_all:
            yield Fault(kind=kind, at=at)
        elif name in CHANGES:
            yield Fault(kind=kind, op=name, at=seen[name])  # type: ignore[arg-type]
            seen[name] += 1
