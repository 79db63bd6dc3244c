"""Patterns of paths, as in `include` and `skip` of a load. Imports no torch.

A path is split into segments at its dots. In a pattern `*` matches any characters of one segment,
and a segment `**` any number of segments; every other character matches itself. A pattern also
matches everything below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from holdfast.errors import UsageError

_ONE, _ANY = "*", "**"


def _matches(pattern: str, segment: str) -> bool:
    """Whether a segment of a pattern, which is not `**`, matches one of a path."""
    if pattern in (_ONE, segment) or _ONE not in pattern:
        return pattern in (_ONE, segment)
    first, *middle, last = pattern.split(_ONE)
    if len(segment) < len(first) + len(last):
        return False
    if not (segment.startswith(first) and segment.endswith(last)):
        return False
    at, end = len(first), len(segment) - len(last)
    for part in middle:
        found = segment.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def covers(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether `pattern` matches `path` or an ancestor of it; both are lists of segments."""
    at = position = 0
    resume: tuple[int, int] | None = None
    while at < len(pattern):
        if pattern[at] == _ANY:
            at += 1
            resume = (at, position)
        elif position < len(path) and _matches(pattern[at], path[position]):
            at, position = at + 1, position + 1
        elif resume is not None and resume[1] < len(path):
            # Backtrack: the last `**` matches one more segment.
            resume = (resume[0], resume[1] + 1)
            at, position = resume
        else:
            return False
    return True


def convert_names(entries: Iterable[str], argument: str) -> tuple[str, ...]:
    """Convert the names that a caller gave for `argument` to a tuple."""
    if isinstance(entries, str):
        hint = f"pass a collection of names, e.g. [{entries!r}]"
        raise UsageError(f"{argument}={entries!r}: {hint}")
    names = tuple(entries)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{argument}={names!r}: every entry must be a str")
    return names


class Entries:
    """Path patterns of one argument, `include` or `skip`; tracks which have matched something."""

    def __init__(self, entries: Collection[str], argument: str) -> None:
        """Parse entries; `argument` is the name of the argument, for messages."""
        entries = convert_names(entries, argument)
        self._argument = argument
        self._patterns = {entry: entry.split(".") for entry in entries}
        self._unused = dict.fromkeys(self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    @property
    def given(self) -> list[str]:
        """The patterns as they were given."""
        return [*self._patterns]

    def cover(self, path: str) -> bool:
        """Whether an entry matches `path`, which begins with a component, or an ancestor of it."""
        if not self._patterns:
            return False
        segments = path.split(".")
        matching = [entry for entry, pattern in self._patterns.items() if covers(pattern, segments)]
        for entry in matching:
            self._unused.pop(entry, None)
        return bool(matching)

    def reach(self, component: str) -> bool:
        """Whether an entry may match something in this component, or the whole of it."""
        return any(
            pattern[0] == _ANY or _matches(pattern[0], component)
            for pattern in self._patterns.values()
        )

    def reach_inside(self, component: str) -> bool:
        """Whether an entry may match something in this component and not the whole of it."""
        return any(
            (pattern[0] == _ANY or _matches(pattern[0], component))
            and not covers(pattern, [component])
            for pattern in self._patterns.values()
        )

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """Return a message, in a list, about entries that match nothing that was seen."""
        used = [pattern for entry, pattern in self._patterns.items() if entry not in self._unused]
        lost = [
            entry
            for entry in self._unused
            if self._patterns[entry][0] not in unseen
            and not any(covers(pattern, self._patterns[entry]) for pattern in used)
        ]
        return [f"{self._argument}: nothing is called {sorted(lost)}"] if lost else []
