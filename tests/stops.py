"""Where a stop of a process may make a difference to a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.testing.faulty import Fault, FaultyStore, Kind, OpName

CHANGES: tuple[OpName, ...] = (
    *("put", "create", "write", "finish", "abort", "link", "point"),
    *("delete", "make_folder", "sweep", "abort_uploads"),
)
"""The operations that change what a store holds. A stop at any other leaves what one before the
next of these leaves, and before that one more may have been acknowledged."""


def stops(kind: Kind, clean: FaultyStore) -> Iterator[Fault]:
    """A stop at each change that an undisturbed run made on `clean`."""
    seen: Counter[str] = Counter()
    for name, _ in clean.ops:
        if name in CHANGES:
            yield Fault(kind=kind, op=name, at=seen[name])  # type: ignore[arg-type]
            seen[name] += 1
