"""Rules of retention as one text: `last:3,best:loss:min:2,weights=last:24`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

from holdfast.errors import UsageError
from holdfast.policy.rules import (
    MAIN,
    All,
    Best,
    Budget,
    ByClass,
    BySaver,
    Daily,
    EveryNth,
    Hourly,
    Last,
    Mode,
    Removal,
    Rule,
    Within,
)

_SIZES = {
    **dict.fromkeys(("", "B"), 1),
    **{unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_SAVER = re.compile(r"(?P<saver>[^:= ]*)\s*=(?P<rule>.*)", re.DOTALL)
_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max))?(?::(?P<n>[0-9]{1,18}))?")


def parse_rule(text: str) -> Rule:
    """The rule that `text` spells: parts, separated by commas, of which any keeps.

    A part is `all`, `last:N`, `best:METRIC[:min|max][:N]`, `every:INTERVAL`, `hourly[:N]`,
    `daily[:N]`, `within:SPAN`, `budget:SIZE` or `remove:CLASSES`; and behind it may stand
    `without COMPONENT+COMPONENT`. Before it may stand `SAVER=`, and then it speaks for that saver;
    the others speak for `main`.

    >>> str(parse_rule("last:3, every:1000step without optimizer+rng"))
    'last 3 | every 1000step without optimizer, rng'
    >>> str(parse_rule("last:3, weights=last:24"))
    'main: last 3, weights: last 24'

    Raises:
        UsageError: a part is none of these.
    """
    rules: dict[str, Rule] = {}
    for part in text.split(","):
        match = _SAVER.fullmatch(part.strip())
        saver, rule = (MAIN, part) if match is None else (match["saver"], match["rule"])
        found = _part(rule.strip())
        rules[saver] = rules[saver] | found if saver in rules else found
    return rules[MAIN] if set(rules) == {MAIN} else BySaver(rules)


def _part(text: str) -> Rule:
    picked, _, dropped = text.partition(" without ")
    rule = _simple(picked.strip())
    if not dropped:
        return rule
    return rule.then_drop(*(name.strip() for name in dropped.split("+")))


def _simple(text: str) -> Rule:
    name, colon, value = text.partition(":")
    if name not in _RULES or (name == "all" and colon):
        raise UsageError(f"{text!r}: no rule; there are {', '.join(_RULES)}, as in 'last:3'")
    return _RULES[name](value)


def _best(text: str) -> Rule:
    match = _BEST.fullmatch(text)
    if match is None:
        raise UsageError(f"best:{text}: expected best:METRIC, best:METRIC:max or best:METRIC:min:3")
    return Best(match["metric"], int(match["n"] or 1), cast(Mode, match["mode"] or "min"))


def _budget(text: str) -> Rule:
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        raise UsageError(f"budget:{text}: expected a size such as 500GB or 1.5TiB")
    return Budget(int(float(match[1]) * _SIZES[match[2]]))


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise UsageError(f"{text!r}: expected a whole number, as in 'last:3'")
    return int(text)


_RULES: Mapping[str, Callable[[str], Rule]] = {
    "all": lambda value: All(),
    "last": lambda value: Last(_number(value)),
    "best": _best,
    "every": EveryNth,
    "hourly": lambda value: Hourly(_number(value) if value else None),
    "daily": lambda value: Daily(_number(value) if value else None),
    "within": Within,
    "budget": _budget,
    "remove": lambda value: ByClass(cast(Removal, value or "ephemeral_only")),
}
