"""Savers of a run beside the main one, and the retention rules of all savers, also given as text.

A text is such as `last:3,best:loss:min:2,weights=last:24`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.arguments import checked
from holdfast.errors import UsageError
from holdfast.format.layout import check_component
from holdfast.policy.classes import SavePolicy, as_trigger
from holdfast.policy.clock import Time
from holdfast.policy.rule import MAIN, BySaver, Rule, named_components, savers_of
from holdfast.policy.rules import All
from holdfast.policy.triggers import SaveFunction, Trigger

_SAVER = re.compile(r"(?P<saver>[^:= ]*)\s*=(?P<rule>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, init=False)
class SideSaver:
    """A saver of some components at its own times, beside the saver of the whole state.

        SideSaver("weights", every="1h", components=["model"], keep=Last(24))

    A run cannot resume from what it saves, unless that happens to be everything; loading the
    components by name works, and so does `load_weights`. Where several savers are due at one
    step, one checkpoint holds what any of them saves.

    Raises:
        UsageError: the name is taken or invalid, nothing is to be saved, or a wrong interval or
            rule.
    """

    name: str
    policy: SavePolicy
    components: tuple[str, ...]
    keep: Rule

    @checked(but=("every", "keep"))
    def __init__(
        self,
        name: str,
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy,
        components: Collection[str],
        keep: Rule | str | None = None,
    ) -> None:
        check_component(name)
        if name == MAIN:
            raise UsageError(f"SideSaver: name={MAIN!r} is taken by the saver of the whole state")
        are_names = all(isinstance(component, str) for component in components)
        if isinstance(components, str) or not components or not are_names:
            raise UsageError(f"SideSaver {name}: components={components!r} must be a list of names")
        rule = as_rule(keep, what=f"SideSaver {name}: keep")
        policy = every
        if not isinstance(policy, SavePolicy):
            policy = SavePolicy(permanent=as_trigger(policy, what=f"SideSaver {name}: every"))
        if policy.auto is not None:
            raise UsageError(f'SideSaver {name}: "auto" is only for saves of the whole state')
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "components", tuple(dict.fromkeys(components)))
        object.__setattr__(self, "keep", rule if rule is not None else All())


def combined_rule(
    keep: Rule | str | None,
    savers: Sequence[SideSaver],
    components: Collection[str] | None = None,
) -> Rule:
    """Combine the rules of the main saver and all others.

    `components` are those of the state; None: they are not known yet, and not checked.

    Raises:
        UsageError: not a rule, an unknown saver, or components that the state does not have.
    """
    given = as_rule(keep, what="keep")
    if given is not None:
        known = {MAIN, *(saver.name for saver in savers if isinstance(saver, SideSaver))}
        strangers = savers_of(given) - known
        if strangers:
            raise UsageError(
                f"keep={given}: no saver is called {', '.join(sorted(strangers))}; there are "
                f"{', '.join(sorted(known))}. For what earlier runs saved there is `holdfast prune`"
            )
    for saver in savers:
        if not isinstance(saver, SideSaver):
            raise UsageError(f"savers: {saver!r} is not a SideSaver")
        known_parts = saver.components if components is None else components
        unknown = [name for name in saver.components if name not in known_parts]
        if unknown:
            raise UsageError(f"savers: {saver.name} saves {unknown}, which the state does not have")
    rule: Rule = given if given is not None else All()
    if savers:
        rule = BySaver({MAIN: rule} | {saver.name: saver.keep for saver in savers})
    lost = named_components(rule)
    lost = frozenset() if components is None else lost.difference(components)
    if lost:
        raise UsageError(f"keep={rule}: the state has no {', '.join(sorted(lost))} to drop")
    return rule


def parse_rule(text: str) -> Rule:
    """Parse a rule from `text`: parts separated by commas, of which any keeps.

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
