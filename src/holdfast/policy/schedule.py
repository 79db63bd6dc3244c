"""What is to be saved at a step: the answers of all savers of a run put together into one save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.auto import Auto
from holdfast.policy.classes import Due, Saved, SavePolicy
from holdfast.policy.clock import Time, Unit
from holdfast.policy.rule import MAIN, SaveClass, join_reasons
from holdfast.policy.savers import SideSaver
from holdfast.policy.spoken import as_trigger
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
"""Events at which somebody waits for a save, whatever the policy says."""
_NEVER = Saved()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a committed checkpoint says of its place in the schedule."""

    savers: tuple[str, ...]
    save_class: SaveClass
    timestamp: Timestamp


def policies_of(
    every: str | Time | Trigger | SaveFunction | SavePolicy | None,
    sides: Sequence[SideSaver] = (),
) -> dict[str, SavePolicy]:
    """The policy of each saver by its name; that of `every`, about the whole state, is first.

    Raises:
        UsageError: `every` is no interval, or two savers have one name.
    """
    twice = sorted({s.name for s in sides if sum(o.name == s.name for o in sides) > 1})
    if twice:
        raise UsageError(f"savers: two are named {twice[0]!r}")
    policies = {side.name: side.policy for side in sides}
    if isinstance(every, int | float):
        raise UsageError(
            f"every={every!r}: an interval has a unit, such as every='{every}step' for steps"
        )
    if every is None:
        return policies
    if not isinstance(every, SavePolicy):
        every = SavePolicy(permanent=as_trigger(every))
    return {MAIN: every, **policies}


class Schedule:
    """When a run saves. Remembers where it was asked last, and where each saver last saved."""

    def __init__(
        self,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None,
        sides: Sequence[SideSaver] = (),
        *,
        max_duration: Time | None = None,
    ) -> None:
        """`every` is about the whole state, `max_duration` what fractions of the run are of.

        Raises:
            UsageError: two savers of one name, or a fraction without a length.
        """
        self.policies: dict[str, SavePolicy] = {
            name: policy.resolve(max_duration) for name, policy in policies_of(every, sides).items()
        }
        self._components = {side.name: side.components for side in sides}
        self._previous: Timestamp | None = None
        self._before: Timestamp | None = None
        self._saved: dict[str, Saved] = {}
        self._undo: tuple[Timestamp | None, dict[str, Saved]] | None = None

    @property
    def auto(self) -> Auto | None:
        """The main saver's trigger that wants to be told what saves cost, if it has one."""
        policy = self.policies.get(MAIN)
        return None if policy is None else policy.auto

    @property
    def has_sides(self) -> bool:
        """Whether there are savers beside the main one."""
        return bool(self._components)

    def due(
        self,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        events: Sequence[Event] = ("step",),
        *,
        vetoes: Collection[str] = (),
        wanted: Due | None = None,
    ) -> Due | None:
        """The save to make at `now`, if any: what all savers want at any of the events.

        `wanted` is to be saved in any case. Counts as a look: a crossing fires once.

        Raises:
            UsageError: a trigger looks at a counter that the loop does not tell.
        """
        previous = self._before = self._previous
        self._previous = now
        found = [] if wanted is None else [self._named(wanted)]
        for name, policy in self.policies.items():
            saved = self._of(name)
            best = highest(
                [policy.decide(previous, saved, now, metrics, e, vetoes=vetoes) for e in events]
            )
            if best is not None and not (wanted and _is_as_good(wanted, name, best)):
                found.append(self._by(name, best))
        if not any(due.components is None for due in found):
            found += self._asked_for(now, events, vetoes)
        return together(found) if found else None

    def quiet_until(self, now: Timestamp) -> int:
        """The first step after `now` at which something may be due at the event `step`.

        The very next one where that cannot be told.
        """
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
        """A save was begun. A part that was saved by hand is no saver's own."""
        self._undo, self._before = (self._before, dict(self._saved)), self._previous
        for name in _owners(due):
            self._saved[name] = self._of(name).plus(due.save_class, now)

    def not_begun(self) -> None:
        """What was due at the last look could not be begun: it is due at the next one."""
        self._previous = self._before

    def failed(self) -> None:
        """The save that was begun last did not commit: what is due is as if it had not been tried.

        To be told twice does no harm.
        """
        if self._undo is not None:
            (self._previous, self._saved), self._undo = self._undo, None
            self._before = self._previous

    def stand_on(self, timestamp: Timestamp, records: Iterable[Record]) -> None:
        """Go on from a checkpoint; `records` are it and those before it, newest first."""
        self._previous = self._before = timestamp
        self._saved, self._undo = {}, None
        for record in records:
            for name in record.savers:
                saved = self._of(name)
                if getattr(saved, record.save_class) is None:
                    self._saved[name] = saved.plus(record.save_class, record.timestamp)

    def looks_back(self) -> bool:
        """Whether it matters what was saved before the checkpoint that is gone on from."""
        return self.has_sides or any(p.ephemeral is not None for p in self.policies.values())

    def is_saved(self, now: Timestamp) -> bool:
        """Whether a save of the whole state was begun at this very step."""
        latest = self._of(MAIN).latest
        return latest is not None and latest.step == now.step

    def savers_of(self, due: Due) -> tuple[str, ...]:
        """What a manifest says of who asked for a save; see `began`."""
        return _owners(due) if self.has_sides else due.savers

    def asked_class(self, vetoes: Collection[str] = ()) -> SaveClass:
        """The class of saves that somebody asks for: the lowest that may be made."""
        policy = self.policies.get(MAIN)
        has_ephemeral = policy is not None and policy.ephemeral is not None
        return "ephemeral" if has_ephemeral and not vetoes else "permanent"

    def _of(self, name: str) -> Saved:
        return self._saved.get(name, _NEVER)

    def _by(self, name: str, due: Due) -> Due:
        if not self.has_sides:
            return due
        reason = due.reason if name == MAIN else f"{name} {due.reason}"
        components = self._components.get(name)
        return Due(due.save_class, reason, savers=(name,), components=components)

    def _named(self, due: Due) -> Due:
        return replace(due, savers=_owners(due)) if self.has_sides else due

    def _asked_for(
        self, now: Timestamp, events: Sequence[Event], vetoes: Collection[str]
    ) -> list[Due]:
        """A save for those who wait for one, unless the policy has an opinion of its own."""
        asked = [event for event in events if event in _ASKED]
        if not asked or self.is_saved(now):
            return []
        return [self._named(Due(self.asked_class(vetoes), asked[0]))]


def together(dues: Sequence[Due]) -> Due | None:
    """One save for all: of the highest class, with all that any of them holds."""
    if not dues:
        return None
    best = highest(dues)
    assert best is not None
    whole = any(due.components is None for due in dues)
    return Due(
        best.save_class,
        join_reasons(*_each(due.reason for due in dues)),
        savers=_each(name for due in dues for name in due.savers),
        components=None if whole else _each(c for due in dues for c in due.components or ()),
        tags=_each(tag for due in dues for tag in due.tags),
    )


def highest(dues: Iterable[Due | None]) -> Due | None:
    """The first one of the highest class."""
    found = [due for due in dues if due is not None]
    return max(found, key=rank) if found else None


def covers(done: Due, wanted: Due) -> bool:
    """Whether one save makes another one needless: it holds as much, in as high a class, and has
    its tags."""
    if rank(done) < rank(wanted) or not set(wanted.tags) <= set(done.tags):
        return False
    if done.components is None:
        return True
    return wanted.components is not None and set(wanted.components) <= set(done.components)


def rank(due: Due) -> int:
    """Higher for the higher class."""
    return ("ephemeral", "permanent").index(due.save_class)


def _owners(due: Due) -> tuple[str, ...]:
    """Whose save it is: what names nobody is the main saver's, unless it is a part."""
    return due.savers or ((MAIN,) if due.components is None else ())


def _is_as_good(wanted: Due, name: str, due: Due) -> bool:
    """Whether a save is one of this saver's own, so that its next one needs no second reason."""
    return name in _owners(wanted) and rank(wanted) >= rank(due)


def _each(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
