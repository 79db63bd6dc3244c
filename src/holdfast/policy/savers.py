"""Further savers of a run, each with its components, trigger and retention rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.arguments import checked
from holdfast.errors import UsageError
from holdfast.format.layout import check_component
from holdfast.policy.classes import SavePolicy
from holdfast.policy.clock import Time
from holdfast.policy.rule import MAIN, BySaver, Rule, named_components, savers_of
from holdfast.policy.rules import All
from holdfast.policy.spelling import as_rule
from holdfast.policy.spoken import as_trigger
from holdfast.policy.triggers import SaveFunction, Trigger


@dataclass(frozen=True, slots=True, init=False)
class SideSaver:
    """A saver of some components at its own times, beside the saver of the whole state.

        SideSaver("weights", every="1h", components=["model"], keep=Last(24))

    A run cannot resume from its checkpoints, unless they hold all components; loading components
    by name works, and so does `load_weights`. Where several savers are due at one
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
