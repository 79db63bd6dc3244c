"""Rules and intervals as texts that manifests record, and back. Reading one runs no code.

What a text cannot say, such as a rule that a user wrote, becomes an empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from holdfast.errors import UsageError
from holdfast.format.manifest import RunPolicy
from holdfast.policy.clock import Time, Unit
from holdfast.policy.rule import MAIN, Rule, flat
from holdfast.policy.rules import Best, Nothing, parse_rule
from holdfast.policy.savers import SavePolicy
from holdfast.policy.schedule import SaveSchedule
from holdfast.policy.triggers import AnyTrigger, AtEnd, AtStart, Every, On, Trigger, parts_of

_MAX_LENGTH = 10_000
"""Longest text that is read: manifests may be written by others, and longer ones take minutes."""
_NOTHING = "0"
"""Text of the rule `Nothing`, as `Tiered(keep_local=0)` is written."""


def policy_of(
    rule: Rule, remote: Rule | None, schedule: SaveSchedule, *, replaces: bool
) -> RunPolicy:
    """Make the record of a run's rules and intervals; `remote` is the rule of a second tier."""
    every = {name: _policy_text(policy) for name, policy in schedule.policies.items()}
    return RunPolicy(
        keep=rule_text(rule),
        keep_remote=None if remote is None else rule_text(remote),
        replaces=replaces,
        every={name: texts for name, texts in every.items() if texts},
        parts=schedule.components,
    )


def rule_text(rule: Rule) -> str:
    """Write a rule so that `rule_of` makes one that decides the same; empty if there is no text.

    >>> from holdfast.policy.rules import Best, EveryNth, Last
    >>> rule_text(Last(3) | Best("loss") | EveryNth("1000step").then_drop("optimizer"))
    'last:3,best:loss:min:1,every:1000step without optimizer'
    """
    if isinstance(rule, Nothing):
        return _NOTHING
    parts = [*flat(rule)]
    is_of_main = all(saver == MAIN for _, saver, _ in parts)
    text = ",".join(
        ("" if is_of_main else f"{saver}=")
        + _part_text(part)
        + (f" without {'+'.join(sorted(drop))}" if drop else "")
        for part, saver, drop in parts
    )
    try:
        return text if [*flat(parse_rule(text))] == parts else ""
    except UsageError:
        return ""


def rule_of(text: str) -> Rule:
    """Make a rule from its recorded text.

    Raises:
        UsageError: the text is not a rule.
    """
    return Nothing() if text == _NOTHING else parse_rule(_expect_short(text))


def policies_of(every: Mapping[str, Mapping[str, str]]) -> dict[str, SavePolicy]:
    """Make the policies of savers from their recorded texts.

    Raises:
        UsageError: a text is not an interval.
    """
    return {
        name: SavePolicy(
            permanent=_trigger_of(texts.get("permanent", "")),
            ephemeral=_trigger_of(texts.get("ephemeral", "")),
            cooldown=texts.get("cooldown"),
        )
        for name, texts in every.items()
    }


def _part_text(rule: Rule) -> str:
    names = ["metric", "mode", "n"] if isinstance(rule, Best) else _field_names(rule)
    values = [getattr(rule, name) for name in names]
    return ":".join([rule.spelled, *(str(value) for value in values if value is not None)])


def _field_names(rule: Rule) -> list[str]:
    return [field.name for field in fields(rule)] if rule.spelled else []  # type: ignore[arg-type]


def _policy_text(policy: SavePolicy) -> dict[str, str]:
    """Write the triggers of a policy; empty where one of them has no text."""
    given = {"permanent": policy.permanent, "ephemeral": policy.ephemeral}
    texts = {name: _trigger_text(trigger) for name, trigger in given.items() if trigger is not None}
    if not all(texts.values()):
        return {}
    return texts if policy.cooldown is None else {**texts, "cooldown": str(policy.cooldown)}


def _trigger_text(trigger: Trigger) -> str:
    """Write the intervals of a trigger, without events such as the end, which no counter tells."""
    parts = [part for part in parts_of(trigger) if not isinstance(part, On | AtStart | AtEnd)]
    texts = [_interval_text(part) for part in parts if isinstance(part, Every)]
    return " | ".join(texts) if len(texts) == len(parts) and all(texts) else ""


def _interval_text(every: Every) -> str:
    size = float(every.size) if every.unit is Unit.SECOND else every.size
    # A fraction of the run may be no whole number, which no text says.
    return str(Time(size, every.unit)) if isinstance(size, int | float) else ""


def _trigger_of(text: str) -> Trigger | None:
    parts: Iterable[str] = (part.strip() for part in _expect_short(text).split("|"))
    triggers = tuple(Every(part) for part in parts if part)
    return AnyTrigger(triggers) if len(triggers) > 1 else next(iter(triggers), None)


def _expect_short(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"{text[:40]!r}…: {len(text):,} characters; at most {_MAX_LENGTH:,}")
    return text
