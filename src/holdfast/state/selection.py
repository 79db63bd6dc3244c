"""Matching of leaves with `include` and `skip`: components, paths, prefixes, patterns.

A path is split into segments at its dots. In an entry `*` matches exactly one segment and `**`
any number of them; every other character matches itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from holdfast.errors import UsageError
from holdfast.format.objects import join

_ONE, _ANY = "*", "**"
_MAX_NAMED = 3
_MAX_KEY_BITS = 2000


def covers(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether `pattern` matches `path` or an ancestor of it; both are lists of segments."""
    at = position = 0
    resume: tuple[int, int] | None = None
    while at < len(pattern):
        if pattern[at] == _ANY:
            at += 1
            resume = (at, position)
        elif position < len(path) and pattern[at] in (_ONE, path[position]):
            at, position = at + 1, position + 1
        elif resume is not None and resume[1] < len(path):
            # Backtrack: the last `**` matches one more segment.
            resume = (resume[0], resume[1] + 1)
            at, position = resume
        else:
            return False
    return True


def names_of_keys(keys: Iterable[Any]) -> dict[Any, str]:
    """Map the keys of one dict to unique names in paths.

    Text is its own name. The name of another key is its value, unless a text key has that name:
    then its type is added, as `int(0)` beside the text `0`.
    """
    keys = list(keys)
    texts = {key for key in keys if type(key) is str}
    names: dict[Any, str] = {}
    for key in keys:
        if type(key) is str:
            names[key] = key
        else:
            shown = _shown(key)
            names[key] = f"{type(key).__name__}({shown})" if shown in texts else shown
    return names


def _shown(key: Any) -> str:
    # Python refuses to write very long numbers.
    if type(key) is int:
        return str(key) if key.bit_length() < _MAX_KEY_BITS else "<int>"
    return str(key) if type(key) in (bool, float, type(None)) else f"<{type(key).__name__}>"


def listed(entries: Iterable[str], argument: str) -> tuple[str, ...]:
    """Convert the names that a caller gave for `argument` to a tuple.

    Raises:
        UsageError: the argument is a single text, or an entry is not text.
    """
    if isinstance(entries, str):
        hint = f"pass a collection of names, e.g. [{entries!r}]"
        raise UsageError(f"{argument}={entries!r}: {hint}")
    names = tuple(entries)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{argument}={names!r}: every entry must be text")
    return names


class Entries:
    """Entries of one argument; remembers which of them have matched something."""

    def __init__(self, entries: Collection[str], argument: str) -> None:
        """Parse entries; `argument` is the name of the argument, for messages.

        Raises:
            UsageError: `entries` is a single text, or an entry is not text.
        """
        entries = listed(entries, argument)
        self._argument = argument
        self._patterns = {entry: entry.split(".") for entry in entries}
        self._unused = dict.fromkeys(self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

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
        return any(pattern[0] in (component, _ONE, _ANY) for pattern in self._patterns.values())

    def reach_inside(self, component: str) -> bool:
        """Whether an entry may match something in this component and not the whole of it."""
        return any(
            pattern[0] in (component, _ONE, _ANY) and not covers(pattern, [component])
            for pattern in self._patterns.values()
        )

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """List a message if there are entries that matched nothing.

        `unseen`: components whose leaves were not matched, so entries for them are not reported;
        nor are entries for leaves inside of what another entry matches.
        """
        used = [pattern for entry, pattern in self._patterns.items() if entry not in self._unused]
        lost = [
            entry
            for entry in self._unused
            if self._patterns[entry][0] not in unseen
            and not any(covers(pattern, self._patterns[entry]) for pattern in used)
        ]
        return [f"{self._argument}: nothing is called {sorted(lost)}"] if lost else []


class Selection:
    """Selection of leaves to load: those in `include`, or all, without those in `skip`."""

    def __init__(self, *, include: Collection[str] = (), skip: Collection[str] = ()) -> None:
        self._include = Entries(include, "include")
        self._skip = Entries(skip, "skip")
        self._left: dict[str, dict[str, None]] = defaultdict(dict)

    def omits(self, component: str) -> bool:
        """Whether the whole component is left alone, judged by its name only."""
        is_skipped = self._skip.cover(component)
        return is_skipped or (bool(self._include) and not self._include.reach(component))

    def is_partial(self, component: str) -> bool:
        """Whether each leaf of the component must be matched."""
        within = self._skip.reach_inside(component) or self._include.reach_inside(component)
        return within or not self.includes(component)

    def leaves(self, component: str, *names: str) -> bool:
        """Whether a leaf is left alone; an entry may match any of its `names`, stored and live."""
        if not (self._include or self._skip):
            return False
        # All names are matched, not only the first: every entry that matches one is used.
        called = {*names} or {""}
        skipped = [self.skips(component, name) for name in called]
        included = [self.includes(component, name) for name in called]
        if any(skipped) or not any(included):
            self.note_left(component, names[0] if names else "")
            return True
        return False

    def skips(self, component: str, name: str = "") -> bool:
        """Whether `skip` matches a leaf or a container, or an ancestor of it."""
        return self._skip.cover(join(component, name) if name else component)

    def includes(self, component: str, name: str = "") -> bool:
        """Whether `include` is empty, or matches a leaf or a container, or an ancestor of it."""
        if not self._include:
            return True
        return self._include.cover(join(component, name) if name else component)

    def note_left(self, component: str, name: str) -> None:
        """Record a leaf that is left alone, for `notes`."""
        self._left[component][name] = None

    def notes(self, components: Collection[str]) -> list[str]:
        """List the components of which a part is left alone, one line each."""
        return [
            f"{component}: left as it is, as asked: {_shortened([name or 'all' for name in left])}"
            for component, left in self._left.items()
            if component in components
        ]

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """List a message for each argument with entries that matched nothing."""
        return [*self._include.unmatched(unseen), *self._skip.unmatched(unseen)]


def _shortened(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
