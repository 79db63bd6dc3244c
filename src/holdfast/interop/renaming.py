"""Rules that rename tensors during a conversion, with the patterns of `include` and `skip`.

A rule is `old=new`. In `old`, `*` matches one segment of a name and `**` any number of them; each
such star in `new` stands for what the star in its place has matched. A name below `old` is renamed
with it: `encoder=enc` makes `enc.0.weight` of `encoder.0.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.errors import UsageError, listing

_STARS = ("*", "**")


class RenameRules:
    """Rename rules; the first that matches a name renames it, and names without one stay."""

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        """Take pairs of an old and a new pattern."""
        self._rules = [(old, _Rule(old, new)) for old, new in rules]
        self._unused = dict.fromkeys(old for old, _ in self._rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __call__(self, name: str) -> str:
        """Return the new name of a tensor."""
        for old, rule in self._rules:
            renamed = rule.rename_path(name)
            if renamed is not None:
                self._unused.pop(old, None)
                return renamed
        return name

    def map_names(self, names: Iterable[str], component: str) -> dict[str, str]:
        """Map all names of a component to new ones."""
        made = {name: self(name) for name in names}
        taken: dict[str, str] = {}
        for old, new in made.items():
            if taken.setdefault(new, old) != old:
                raise UsageError(
                    f"--map: {component}.{taken[new]} and {component}.{old} both become {new!r}"
                )
        return made

    def expect_used(self) -> None:
        """Raise `UsageError` if a rule has matched no name."""
        if self._unused:
            lost = [f"{old}: nothing is called so" for old in self._unused]
            raise UsageError("--map: rules that match no name:\n" + listing(lost))


class _Rule:
    def __init__(self, old: str, new: str) -> None:
        stars = [part for part in old.split(".") if part in _STARS]
        if not old or [part for part in new.split(".") if part in _STARS] != stars:
            raise UsageError(
                f"--map {old}={new}: the new name must have the same stars as the old one, each "
                "alone between dots"
            )
        self._new = new.split(".")
        self._pattern = re.compile(_expression(old.split(".")))

    def rename_path(self, name: str) -> str | None:
        found = self._pattern.fullmatch(f"{name}.")
        if found is None:
            return None
        *captured, rest = found.groups()
        parts, stars = [], iter(captured)
        for part in self._new:
            parts.append(next(stars).removesuffix(".") if part in _STARS else part)
        return ".".join(filter(None, (*parts, rest.removesuffix("."))))


def _expression(segments: Sequence[str]) -> str:
    """Write a pattern as a regular expression on a name that ends with a dot."""
    of_star = {"*": r"([^.]*\.)", "**": r"((?:[^.]*\.)*?)"}
    texts = [of_star.get(part, re.escape(part) + r"\.") for part in segments]
    last = r"()" if segments[-1] == "**" else r"((?:[^.]*\.)*)"
    return "".join(texts) + last


def read_rules(given: Sequence[str]) -> RenameRules:
    """Read rules as typed, `old=new`, or a file of them with empty lines and `#` comments."""
    pairs: list[tuple[str, str]] = []
    for text in given:
        if "=" in text:
            pairs.append(_pair(text, "--map"))
            continue
        try:
            lines = Path(text).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--map {text}: neither old=new nor a file of such lines: {error}"
            ) from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                pairs.append(_pair(line, f"{text}, line {number}"))
    return RenameRules(pairs)


def _pair(text: str, where: str) -> tuple[str, str]:
    old, found, new = (part.strip() for part in text.partition("="))
    if not (old and found and new):
        raise UsageError(f"{where}: {text!r} is not old=new")
    return old, new
