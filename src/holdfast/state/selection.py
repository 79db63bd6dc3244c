"""Which leaves a caller means by `include` and `skip`: components, paths, prefixes, patterns.

A path is cut into segments at its dots. In an entry `*` stands for exactly one segment and `**`
for any number of them; every other character means itself.
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
    """Whether `pattern` names `path` or something above it, both cut into segments."""
    at = here = 0
    resume: tuple[int, int] | None = None
    while at < len(pattern):
        if pattern[at] == _ANY:
            at += 1
            resume = (at, here)
        elif here < len(path) and pattern[at] in (_ONE, path[here]):
            at, here = at + 1, here + 1
        elif resume is not None and resume[1] < len(path):
            # The last `**` takes one segment more.
            resume = (resume[0], resume[1] + 1)
            at, here = resume
        else:
            return False
    return True


def names_of_keys(keys: Iterable[Any]) -> dict[Any, str]:
    """What the keys of one dict are called in paths, each otherwise than the others.

    Text is called as it is. Another key is called by its value, unless a text key has that name:
    then by its type too, as `int(0)` beside the text `0`.
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
    """The names that a caller gave for `argument`, as a tuple.

    Raises:
        UsageError: it is one text, which would count as its letters, or an entry is not text.
    """
    if isinstance(entries, str):
        hint = f"pass a collection of names, e.g. [{entries!r}]"
        raise UsageError(f"{argument}={entries!r}: {hint}")
    names = tuple(entries)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{argument}={names!r}: every entry must be text")
    return names


class Entries:
    """The entries of one argument, and which of them have named something."""

    def __init__(self, entries: Collection[str], argument: str) -> None:
        """`argument`: what the caller calls it.

        Raises:
            UsageError: it is one text, or not of text.
        """
        entries = listed(entries, argument)
        self._argument = argument
        self._patterns = {entry: entry.split(".") for entry in entries}
        self._unused = dict.fromkeys(self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def cover(self, path: str) -> bool:
        """Whether an entry names `path`, which begins with a component, or what is above it."""
        if not self._patterns:
            return False
        segments = path.split(".")
        found = [entry for entry, pattern in self._patterns.items() if covers(pattern, segments)]
        for entry in found:
            self._unused.pop(entry, None)
        return bool(found)

    def reach(self, component: str) -> bool:
        """Whether an entry may name something of this component, or the whole of it."""
        return any(pattern[0] in (component, _ONE, _ANY) for pattern in self._patterns.values())

    def reach_inside(self, component: str) -> bool:
        """Whether an entry may name something of this component and not the whole of it."""
        return any(
            pattern[0] in (component, _ONE, _ANY) and not covers(pattern, [component])
            for pattern in self._patterns.values()
        )

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """A sentence if there are entries that named nothing.

        `unseen`: components whose inside nobody looked at, so that nothing is known of entries
        for them; nor of entries for what lies inside of what another one names.
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
    """What is loaded: what `include` names, or everything, and of it what `skip` does not."""

    def __init__(self, *, include: Collection[str] = (), skip: Collection[str] = ()) -> None:
        self._include = Entries(include, "include")
        self._skip = Entries(skip, "skip")
        self._left: dict[str, dict[str, None]] = defaultdict(dict)

    def omits(self, component: str) -> bool:
        """Whether the whole component is left alone, without a look inside."""
        is_skipped = self._skip.cover(component)
        return is_skipped or (bool(self._include) and not self._include.reach(component))

    def is_partial(self, component: str) -> bool:
        """Whether each leaf of the component must be asked about."""
        within = self._skip.reach_inside(component) or self._include.reach_inside(component)
        return within or not self.includes(component)

    def leaves(self, component: str, *names: str) -> bool:
        """Whether a leaf is left alone; of its `names`, stored and live, any may be meant."""
        if not (self._include or self._skip):
            return False
        # All are asked, not only the first that is named: every entry that names one is counted.
        called = {*names} or {""}
        skipped = [self.skips(component, name) for name in called]
        included = [self.includes(component, name) for name in called]
        if any(skipped) or not any(included):
            self.note_left(component, names[0] if names else "")
            return True
        return False

    def skips(self, component: str, name: str = "") -> bool:
        """Whether `skip` names a leaf or a container, or what is above it."""
        return self._skip.cover(join(component, name) if name else component)

    def includes(self, component: str, name: str = "") -> bool:
        """Whether `include` names a leaf or a container, or what is above it, or is not given."""
        if not self._include:
            return True
        return self._include.cover(join(component, name) if name else component)

    def note_left(self, component: str, name: str) -> None:
        """Remember what is left alone, for `notes`."""
        self._left[component][name] = None

    def notes(self, components: Collection[str]) -> list[str]:
        """One line for each of the components of which a part is left alone."""
        return [
            f"{component}: left as it is, as asked: {_shortened([name or 'all' for name in left])}"
            for component, left in self._left.items()
            if component in components
        ]

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """A sentence for each argument with entries that named nothing; see `Entries`."""
        return [*self._include.unmatched(unseen), *self._skip.unmatched(unseen)]


def _shortened(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
