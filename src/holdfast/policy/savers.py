"""Savers of a run: when each saves, in which class, what of the state, and which saves it keeps.

Permanent checkpoints stay; later saves replace ephemeral ones, which retention deletes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.layout import check_component
from holdfast.format.manifest import Timestamp
from holdfast.policy.auto import Auto
from holdfast.policy.clock import ALL_UNITS, Time, Unit, get_counter, parse
from holdfast.policy.rule import MAIN, BySaver, Rule, SaveClass, named_components, savers_of
from holdfast.policy.rules import All, as_rule
from holdfast.policy.triggers import (
    NO_METRICS,
    AnyTrigger,
    Event,
    Every,
    Metrics,
    SaveFunction,
    Trigger,
    When,
    is_other_step,
    parts_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Timestamps at which the newest save of each class was begun; None where none was."""

    permanent: Timestamp | None = None
    ephemeral: Timestamp | None = None

    @property
    def latest(self) -> Timestamp | None:
        """The later of the two timestamps."""
        both = [at for at in (self.ephemeral, self.permanent) if at is not None]
        return max(both, key=lambda at: (at.step, at.wall_s), default=None)

    def plus(self, save_class: SaveClass, now: Timestamp) -> Saved:
        """Return a copy that records a save of `save_class` at `now`."""
        changes: dict[str, Any] = {save_class: now}
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Due:
    """A save that is due: its class, reason and contents."""

    save_class: SaveClass
    reason: str
    savers: tuple[str, ...] = ()
    """Savers that requested the save; empty when the run has only one."""
    components: tuple[str, ...] | None = None
    """Components to save; None: the whole state."""
    tags: tuple[str, ...] = ()


def as_trigger(value: str | Time | Trigger | SaveFunction, *, what: str = "every") -> Trigger:
    """Convert "auto" to `Auto`, an interval to `Every`, a function to `When`; keep a trigger."""
    if isinstance(value, Trigger):
        return value
    if callable(value):
        return When(value)
    if isinstance(value, str) and value.strip().lower() == "auto":
        return Auto()
    if isinstance(value, str | Time):
        return Every(parse(value, what=what, units=ALL_UNITS, parts=True))
    raise UsageError(f"{what}={value!r}: must be an interval with a unit, a trigger or a function")


@dataclass(frozen=True, slots=True, init=False)
class SavePolicy:
    """When to save permanent checkpoints, and when ephemeral ones, which later saves replace.

    One save is made at a step, of the highest class that is due. Intervals and functions are
    accepted in place of triggers.

    Raises:
        UsageError: a setting would never have an effect.
    """

    permanent: Trigger | None
    ephemeral: Trigger | None
    cooldown: Time | None
    """Shortest time from a save of any class to an ephemeral one; a save that is due sooner is
    skipped, not delayed."""

    def __init__(
        self,
        *,
        permanent: str | Time | Trigger | SaveFunction | None = None,
        ephemeral: str | Time | Trigger | SaveFunction | None = None,
        cooldown: str | Time | None = None,
    ) -> None:
        if permanent is None and ephemeral is None:
            raise UsageError("SavePolicy: pass permanent, ephemeral or both; else nothing is saved")
        if cooldown is not None and ephemeral is None:
            raise UsageError("SavePolicy: cooldown needs ephemeral saves: pass ephemeral, too")
        for name, given in (("permanent", permanent), ("ephemeral", ephemeral)):
            trigger = None if given is None else as_trigger(given, what=name)
            object.__setattr__(self, name, trigger)
        time = None if cooldown is None else parse(cooldown, what="cooldown", units=ALL_UNITS)
        object.__setattr__(self, "cooldown", time)
        for permanents in _intervals(self.permanent):
            for ephemerals in _intervals(self.ephemeral):
                _check_intervals(permanents, ephemerals, time)
            _check_cooldown(permanents, time)
        if len(self._autos) > 1:
            raise UsageError('SavePolicy: "auto" is given twice; it can be used once')

    @property
    def auto(self) -> Auto | None:
        """The `Auto` trigger, which needs measurements of saves, if there is one."""
        return next(iter(self._autos), None)

    @property
    def _autos(self) -> list[Auto]:
        triggers = (trigger for trigger in (self.permanent, self.ephemeral) if trigger)
        return [p for trigger in triggers for p in parts_of(trigger) if isinstance(p, Auto)]

    def resolve(self, max_duration: Time | None) -> SavePolicy:
        """Return the policy with fractions of the run converted by the run's length.

        Raises:
            UsageError: as for the policy itself, or the length is needed and not known.
        """
        return SavePolicy(
            permanent=self.permanent and self.permanent.resolve(max_duration),
            ephemeral=self.ephemeral and self.ephemeral.resolve(max_duration),
            cooldown=self.cooldown and self.cooldown.resolve(max_duration),
        )

    @property
    def needs_epoch(self) -> bool:
        """Whether a trigger needs the length of an epoch."""
        return any(t.needs_epoch for t in (self.permanent, self.ephemeral) if t is not None)

    def with_epoch(self, epoch: Time) -> SavePolicy:
        """Return the policy with parts of an epoch converted to steps; `epoch` has so many."""
        return SavePolicy(
            permanent=self.permanent and self.permanent.with_epoch(epoch),
            ephemeral=self.ephemeral and self.ephemeral.with_epoch(epoch),
            cooldown=self.cooldown,
        )

    def part(self, *, is_pure: bool) -> SavePolicy | None:
        """Return the policy with only those triggers that are pure, or only the others.

        With a cooldown by the clock all ephemeral saves are among the others.
        """
        by_clock = self.cooldown is not None and self.cooldown.unit is Unit.SECOND
        permanent = join_triggers(p for p in _list_triggers(self.permanent) if p.is_pure is is_pure)
        ephemeral = join_triggers(
            p for p in _list_triggers(self.ephemeral) if (p.is_pure and not by_clock) is is_pure
        )
        if permanent is None and ephemeral is None:
            return None
        cooldown = self.cooldown if ephemeral is not None else None
        return SavePolicy(permanent=permanent, ephemeral=ephemeral, cooldown=cooldown)

    def decide(
        self,
        previous: Timestamp | None,
        saved: Saved,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
        *,
        vetoes: Collection[str] = (),
    ) -> Due | None:
        """Decide whether to save at `now`, in which class, and why.

        After a resume `previous` and `saved` come from the checkpoints. `vetoes` names the
        callbacks that now forbid ephemeral saves. After an ephemeral save, a permanent one may
        still become due at the same step, such as the final one.

        Raises:
            UsageError: a trigger needs a counter that the loop does not pass.
        """
        why = self.permanent and self.permanent.due(previous, saved.permanent, now, metrics, event)
        if why and is_other_step(saved.permanent, now):
            return Due("permanent", why)
        if self.ephemeral is None:
            return None
        latest = saved.latest
        why = self.ephemeral.due(previous, latest, now, metrics, event)
        if why and not vetoes and is_other_step(latest, now) and not self._is_cooling(latest, now):
            return Due("ephemeral", why)
        return None

    def _is_cooling(self, latest: Timestamp | None, now: Timestamp) -> bool:
        if self.cooldown is None or latest is None:
            return False
        current = get_counter(now, self.cooldown.unit, "cooldown")
        before = self.cooldown.unit.read_progress(latest) or 0
        return 0 <= current - before < self.cooldown.value


def _intervals(trigger: Trigger | None) -> Iterator[Every]:
    yield from (part for part in _list_triggers(trigger) if isinstance(part, Every))


def _list_triggers(trigger: Trigger | None) -> tuple[Trigger, ...]:
    return () if trigger is None else parts_of(trigger)


def join_triggers(parts: Iterable[Trigger]) -> Trigger | None:
    """Return a trigger that fires when any of `parts` does; None if there are none."""
    triggers = tuple(parts)
    return AnyTrigger(triggers) if len(triggers) > 1 else next(iter(triggers), None)


def _check_intervals(permanent: Every, ephemeral: Every, cooldown: Time | None) -> None:
    """Refuse settings under which hardly any ephemeral save would be made."""
    if permanent.unit is not ephemeral.unit:
        return
    if ephemeral.size >= permanent.size:
        raise UsageError(
            f"SavePolicy: ephemeral={str(ephemeral)!r} must be more often than "
            f"permanent={str(permanent)!r}"
        )
    if cooldown is None or cooldown.unit is not Unit.STEP or permanent.unit is not Unit.STEP:
        return
    if isinstance(permanent.size, int) and isinstance(ephemeral.size, int):
        # The longest distance of an ephemeral save from the permanent one before it.
        farthest = permanent.size - gcd(permanent.size, ephemeral.size)
        if cooldown.value > farthest:
            raise UsageError(
                f"SavePolicy: cooldown={str(cooldown)!r} drops every save of {str(ephemeral)!r}; "
                f"at most '{farthest}step'"
            )


def _check_cooldown(permanent: Every, cooldown: Time | None) -> None:
    if (
        cooldown is not None
        and cooldown.unit is permanent.unit
        and cooldown.value >= permanent.size
    ):
        raise UsageError(
            f"SavePolicy: cooldown={str(cooldown)!r} drops all ephemeral saves; it must be "
            f"shorter than permanent={str(permanent)!r}"
        )


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

    @check_arguments(but=("every", "keep"))
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

    @property
    def needs_epoch(self) -> bool:
        """Whether a trigger needs the length of an epoch."""
        return self.policy.needs_epoch

    def with_epoch(self, epoch: Time) -> SideSaver:
        """Return the saver with parts of an epoch converted to steps; `epoch` has so many."""
        policy = self.policy.with_epoch(epoch)
        return SideSaver(self.name, every=policy, components=self.components, keep=self.keep)


def combined_rule(
    keep: Rule | str | None,
    savers: Sequence[SideSaver],
    components: Collection[str] | None = None,
) -> Rule:
    """Check and combine the retention rules of all savers, with the `components` if known."""
    given = as_rule(keep, what="keep")
    if given is not None:
        known = {MAIN, *(saver.name for saver in savers if isinstance(saver, SideSaver))}
        strangers = savers_of(given) - known
        if strangers:
            raise UsageError(
                f"keep={given}: no saver is called {', '.join(sorted(strangers))}; there are "
                f"{', '.join(sorted(known))}. For savers of earlier runs use `holdfast prune`"
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
