"""Parsing of retention rules from one text: `last:3,best:loss:min:2,weights=last:24`."""

from __future__ import annotations

import re

import holdfast.policy.rules  # noqa: F401 - so that they are known
from holdfast.errors import UsageError
from holdfast.policy.rule import MAIN, BySaver, Rule

_SAVER = re.compile(r"(?P<saver>[^:= ]*)\s*=(?P<rule>.*)", re.DOTALL)


def parse_rule(text: str) -> Rule:
    """Parse a rule from `text`: parts separated by commas, combined as by `|`.

    A part is `all`, `last:N[:CLASS]`, `best:METRIC[:min|max][:N]`, `every:INTERVAL`, `hourly[:N]`,
    `daily[:N]`, `within:SPAN`, `budget:SIZE` or `remove:CLASSES`. The suffix
    ` without COMPONENT+COMPONENT` drops components. The prefix `SAVER=` makes it a part of that
    saver's rule; the others are parts of `main`'s.

    >>> str(parse_rule("last:3, every:1000step without optimizer+rng"))
    'last 3 | every 1000step without optimizer, rng'
    >>> str(parse_rule("last:3, weights=last:24"))
    'main: last 3, weights: last 24'

    Raises:
        UsageError: a part is none of these.
    """
    rules: dict[str, Rule] = {}
    parts = text.split(",")
    for number, part in enumerate(parts):
        match = _SAVER.fullmatch(part.strip())
        saver, rule = (MAIN, part) if match is None else (match["saver"], match["rule"])
        try:
            parsed = _part(rule.strip())
        except UsageError as error:
            if not any("best:" in before for before in parts[:number]):
                raise
            raise UsageError(
                f"{error}. Commas separate rules: a rule for a metric with a comma in its name is "
                "written as Best('…') in Python"
            ) from error
        rules[saver] = rules[saver] | parsed if saver in rules else parsed
    return rules[MAIN] if set(rules) == {MAIN} else BySaver(rules)


def as_rule(given: Rule | str | None, *, what: str) -> Rule | None:
    """Convert an argument to a rule, which may be given as text; `what` names the argument.

    Raises:
        UsageError: the argument is not a rule.
    """
    if isinstance(given, str):
        try:
            return parse_rule(given)
        except UsageError as error:
            raise UsageError(f"{what}={given!r}: {error}") from error
    if given is not None and not isinstance(given, Rule):
        raise UsageError(f"{what}={given!r} must be a rule such as Last(3) or 'last:3'")
    return given


def _part(text: str) -> Rule:
    picked, _, dropped = text.partition(" without ")
    rule = _simple(picked.strip())
    if not dropped:
        return rule
    return rule.then_drop(*(name.strip() for name in dropped.split("+")))


def _simple(text: str) -> Rule:
    name, colon, value = text.partition(":")
    known = {rule.spelled: rule for rule in Rule.__subclasses__() if rule.spelled}
    if name not in known or (colon and not value):
        raise UsageError(f"{text!r}: unknown rule; known: {', '.join(known)}, as in 'last:3'")
    return known[name].parse(value)
