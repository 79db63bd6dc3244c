"""Schedule of a run: merges the saves that all savers request at a step into one.

Rules and intervals are recorded in manifests as texts; reading one runs no code. A rule that no
text can express, such as one that a user wrote, becomes an empty text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import ceil, inf

from holdfast.errors import UsageError
from holdfast.format.manifest import Manifest, RunPolicy, Timestamp
from holdfast.policy.auto import Auto
from holdfast.policy.clock import Time, Unit
from holdfast.policy.rule import MAIN, Candidate, Rule, SaveClass, flat, join_reasons
from holdfast.policy.rules import Best, Nothing, parse_rule
from holdfast.policy.savers import Due, Saved, SavePolicy, SideSaver, as_trigger, join_triggers
from holdfast.policy.triggers import (
    NO_METRICS,
    AtEnd,
    AtStart,
    Event,
    Every,
    Metrics,
    On,
    SaveFunction,
    Trigger,
    parts_of,
)

_ASKED: tuple[Event, ...] = ("signal", "demand")
"""Events that are explicit requests for a save, independent of the policy."""
_NEVER = Saved()


def policies_of(
    every: str | Time | Trigger | SaveFunction | SavePolicy | None,
    sides: Sequence[SideSaver] = (),
) -> dict[str, SavePolicy]:
    """Return the policy of each saver by name; first that of the main saver, from `every`."""
    twice = sorted({s.name for s in sides if sum(o.name == s.name for o in sides) > 1})
    if twice:
        raise UsageError(f"savers: two are named {twice[0]!r}")
    policies = {side.name: side.policy for side in sides}
    if isinstance(every, int | float):
        raise UsageError(
            f"every={every!r}: an interval needs a unit, such as every='{every}step' for steps"
        )
    if every is None:
        return policies
    if not isinstance(every, SavePolicy):
        every = SavePolicy(permanent=as_trigger(every))
    return {MAIN: every, **policies}


class SaveSchedule:
    """Decides when a run saves; remembers the last decision and the last save of each saver."""

    def __init__(
        self,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None,
        sides: Sequence[SideSaver] = (),
        *,
        max_duration: Time | None = None,
        is_shared: bool = False,
    ) -> None:
        """Make a schedule; `every` is for the whole state, `max_duration` the length of the run.

        Where it `is_shared` by several ranks, `due` decides only what they decide alike.
        """
        self.policies: dict[str, SavePolicy] = {
            name: policy.resolve(max_duration) for name, policy in policies_of(every, sides).items()
        }
        self._alike = _split_policies(self.policies, is_pure=True) if is_shared else self.policies
        self._leaders = _split_policies(self.policies, is_pure=False) if is_shared else {}
        self.components: Mapping[str, tuple[str, ...]] = {
            side.name: side.components for side in sides
        }
        """Components that each saver beside the main one saves."""
        self._previous: Timestamp | None = None
        self._before: Timestamp | None = None
        self._saved: dict[str, Saved] = {}
        self._undo: tuple[Timestamp | None, dict[str, Saved]] | None = None

    @property
    def auto(self) -> Auto | None:
        """The main saver's `Auto` trigger, which needs measurements of saves, if it has one."""
        policy = self.policies.get(MAIN)
        return None if policy is None else policy.auto

    @property
    def has_sides(self) -> bool:
        """Whether there are savers beside the main one."""
        return bool(self.components)

    def merge_due_saves(
        self,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        events: Sequence[Event] = ("step",),
        *,
        vetoes: Collection[str] = (),
        wanted: Due | None = None,
    ) -> Due | None:
        """Merge what all savers request at `now`, and `wanted`, into one save; None if nothing."""
        self._before = self._previous
        self._previous = now
        dues = [] if wanted is None else [self._name_savers(wanted)]
        for name, best in self._decided(self._alike, now, metrics, events, vetoes):
            if not (wanted and _is_as_good(wanted, name, best)):
                dues.append(self._by(name, best))
        if not any(due.components is None for due in dues):
            dues += self._asked_for(now, events, vetoes)
        return together(dues) if dues else None

    def due_by_leader(
        self,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        events: Sequence[Event] = ("step",),
        *,
        vetoes: Collection[str] = (),
        but: Due | None = None,
    ) -> Due | None:
        """Merge what only the leader can decide, by clock or functions, unless `but` has it all."""
        decided = self._decided(self._leaders, now, metrics, events, vetoes)
        due = together([self._by(name, best) for name, best in decided])
        return None if due is None or (but is not None and covers(but, due)) else due

    def quiet_until(self, now: Timestamp) -> int:
        """Return the first step after `now` at which a save may be due, or the next if unknown."""
        first: float = inf
        for policy in self.policies.values():
            for trigger in (policy.permanent, policy.ephemeral):
                for part in parts_of(trigger) if trigger is not None else ():
                    if isinstance(part, On | AtStart | AtEnd):
                        continue  # at other events
                    if not isinstance(part, Every) or part.unit is not Unit.STEP:
                        return now.step + 1
                    first = min(first, ceil((now.step // part.size + 1) * part.size))
        return int(min(first, 2**62))

    def began(self, due: Due, now: Timestamp) -> None:
        """Record that a save was begun. A partial save by hand belongs to no saver."""
        self._undo, self._before = (self._before, dict(self._saved)), self._previous
        for name in _owners(due):
            self._saved[name] = self._get_saved(name).plus(due.save_class, now)

    def undo_decision(self) -> None:
        """Undo the last decision, as its save could not begin: it stays due."""
        self._previous = self._before

    def undo_failed_save(self) -> None:
        """Undo the save that was begun last, as it did not commit. A second call is a no-op."""
        if self._undo is not None:
            (self._previous, self._saved), self._undo = self._undo, None
            self._before = self._previous

    def resume_schedule(self, timestamp: Timestamp, saves: Iterable[Manifest | Candidate]) -> None:
        """Continue from a checkpoint; `saves` are its own and earlier ones, newest first."""
        self._previous = self._before = timestamp
        self._saved, self._undo = {}, None
        for entry in saves:
            for name in entry.savers or (() if entry.lacks else (MAIN,)):
                saved, save_class = self._get_saved(name), entry.save_class
                if getattr(saved, save_class) is None:
                    self._saved[name] = saved.plus(save_class, entry.timestamp)

    def needs_earlier_saves(self) -> bool:
        """Whether the schedule needs records of saves before the checkpoint that is resumed."""
        return self.has_sides or any(p.ephemeral is not None for p in self.policies.values())

    def asks_for(self, event: Event) -> bool:
        """Whether a trigger `On` of the event is in a policy."""
        triggers = [t for p in self.policies.values() for t in (p.permanent, p.ephemeral) if t]
        parts = (part for trigger in triggers for part in parts_of(trigger))
        return any(isinstance(part, On) and event in part.events for part in parts)

    def is_saved(self, now: Timestamp) -> bool:
        """Whether a save of the whole state was begun at this very step."""
        latest = self._get_saved(MAIN).latest
        return latest is not None and latest.step == now.step

    def savers_of(self, due: Due) -> tuple[str, ...]:
        """Return the savers to name in the manifest of a save."""
        return _owners(due) if self.has_sides else due.savers

    def asked_class(self, vetoes: Collection[str] = ()) -> SaveClass:
        """Return the class of a save on request: ephemeral, if the policy and `vetoes` allow it."""
        policy = self.policies.get(MAIN)
        has_ephemeral = policy is not None and policy.ephemeral is not None
        return "ephemeral" if has_ephemeral and not vetoes else "permanent"

    def _decided(
        self,
        policies: Mapping[str, SavePolicy],
        now: Timestamp,
        metrics: Metrics,
        events: Sequence[Event],
        vetoes: Collection[str],
    ) -> Iterator[tuple[str, Due]]:
        """Yield each saver that is due since the call before, with its save of highest class."""
        for name, policy in policies.items():
            saved, before = self._get_saved(name), self._before
            best = highest(
                [policy.decide(before, saved, now, metrics, e, vetoes=vetoes) for e in events]
            )
            if best is not None:
                yield name, best

    def _get_saved(self, name: str) -> Saved:
        return self._saved.get(name, _NEVER)

    def _by(self, name: str, due: Due) -> Due:
        if not self.has_sides:
            return due
        reason = due.reason if name == MAIN else f"{name} {due.reason}"
        components = self.components.get(name)
        return Due(due.save_class, reason, savers=(name,), components=components)

    def _name_savers(self, due: Due) -> Due:
        return replace(due, savers=_owners(due)) if self.has_sides else due

    def _asked_for(
        self, now: Timestamp, events: Sequence[Event], vetoes: Collection[str]
    ) -> list[Due]:
        """Make a save of the whole state for a signal or request, unless this step has one."""
        asked = [event for event in events if event in _ASKED]
        if not asked or self.is_saved(now):
            return []
        return [self._name_savers(Due(self.asked_class(vetoes), asked[0]))]


def together(dues: Sequence[Due]) -> Due | None:
    """Merge saves into one: of the highest class, with everything that any of them holds."""
    if not dues:
        return None
    best = highest(dues)
    assert best is not None
    whole = any(due.components is None for due in dues)
    return Due(
        best.save_class,
        join_reasons(*_unique(due.reason for due in dues)),
        savers=_unique(name for due in dues for name in due.savers),
        components=None if whole else _unique(c for due in dues for c in due.components or ()),
        tags=_unique(tag for due in dues for tag in due.tags),
    )


def highest(dues: Iterable[Due | None]) -> Due | None:
    """Return the first save of the highest class; None if there is none."""
    given = [due for due in dues if due is not None]
    return max(given, key=class_rank) if given else None


def covers(done: Due, wanted: Due) -> bool:
    """Whether `done` has all that `wanted` has: its components, its class or a higher, its tags."""
    if class_rank(done) < class_rank(wanted) or not set(wanted.tags) <= set(done.tags):
        return False
    if done.components is None:
        return True
    return wanted.components is not None and set(wanted.components) <= set(done.components)


def class_rank(due: Due) -> int:
    """Return the rank of a save's class: higher for permanent."""
    return ("ephemeral", "permanent").index(due.save_class)


def _owners(due: Due) -> tuple[str, ...]:
    """Return the savers of a save. If it names none: `main`, or none if the save is partial."""
    return due.savers or ((MAIN,) if due.components is None else ())


def _is_as_good(wanted: Due, name: str, due: Due) -> bool:
    """Whether `wanted` belongs to saver `name` and its class is no lower than that of `due`."""
    return name in _owners(wanted) and class_rank(wanted) >= class_rank(due)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _split_policies(policies: Mapping[str, SavePolicy], *, is_pure: bool) -> dict[str, SavePolicy]:
    parts = {name: policy.part(is_pure=is_pure) for name, policy in policies.items()}
    return {name: part for name, part in parts.items() if part is not None}


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
    """Make a rule from its recorded text, or raise `UsageError`."""
    return Nothing() if text == _NOTHING else parse_rule(_expect_short(text))


def policies_from_texts(every: Mapping[str, Mapping[str, str]]) -> dict[str, SavePolicy]:
    """Make the policies of savers from their recorded texts, or raise `UsageError`."""
    return {
        name: SavePolicy(
            permanent=_trigger_of(texts.get("permanent", "")),
            ephemeral=_trigger_of(texts.get("ephemeral", "")),
            cooldown=texts.get("cooldown"),
        )
        for name, texts in every.items()
    }


def _part_text(rule: Rule) -> str:
    if isinstance(rule, Best):
        wait = f":wait={rule.wait}" if rule.wait else ""
        return f"{rule.spelled}:{rule.metric}:{rule.mode}:{rule.n}{wait}"
    values = [getattr(rule, name) for name in _field_names(rule)]
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
    return join_triggers(Every(part) for part in parts if part)


def _expect_short(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"{text[:40]!r}…: {len(text):,} characters; at most {_MAX_LENGTH:,}")
    return text
