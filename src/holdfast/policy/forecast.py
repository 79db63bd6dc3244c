"""Forecast of retention: the decisions that follow when assumed saves are made. Pure functions.

`coming_saves` assumes the next saves from recorded ones and the intervals of the run. `foresee`
adds them one by one, and decides after each with the function that the manager decides with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Unit
from holdfast.policy.retention import Decision, judge, may_rest_on
from holdfast.policy.rule import MAIN, Candidate, Rule
from holdfast.policy.rules import best_rules, recorded_time
from holdfast.policy.savers import Due, SavePolicy, SideSaver
from holdfast.policy.schedule import Schedule
from holdfast.policy.sharing import Order, Sharing
from holdfast.policy.triggers import Every, parts_of

_LOOKS_BETWEEN = 100
"""How often a schedule that no step count decides is asked between two saves."""
_MAX_LOOKS = 100_000
_COUNTERS = ("epoch", "samples", "tokens", "cycle")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Stored bytes of a checkpoint as it was saved."""

    nbytes: int
    components: Mapping[str, int]


NO_SIZES = Sizes(0, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Facts on which the manager's next decision rests, apart from the rule."""

    entries: Sequence[Candidate]
    """All checkpoints of the run."""
    lineage: Collection[Order]
    """Orders of those that the run stands on, and of attempts among them."""
    resumed_from: Order | None
    """The checkpoint that the run went on from, until it has committed something good."""
    replaces: bool = False
    """Whether a checkpoint replaces older ones of its step."""
    held: Collection[Order] = ()
    """Orders of those that are not deleted for now, since somebody reads them, for instance."""
    sizes: Mapping[Order, Sizes] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    """Hard links between them; coming saves are added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Decisions on all checkpoints after a coming save, and what is done of them."""

    save: Candidate
    decisions: tuple[Decision, ...]
    """Newest first."""
    done: tuple[Decision, ...]
    """Deletions and droppings of components that are carried out."""
    freed_nbytes: Mapping[Order, int]
    """Bytes that each of these gives back."""


def foresee(now: Situation, rule: Rule, coming: Coming) -> Iterator[Foreseen]:
    """Yield what retention does after each coming save, as the manager decides it."""
    sizes = {**now.sizes, **coming.sizes}
    left = {entry.order: entry for entry in now.entries}
    lineage = {*now.lineage}
    point = now.resumed_from
    for save in coming.saves:
        now.sharing.add(save, left)
        left[save.order] = save
        lineage.add(save.order)
        if save.healthy and not save.lacks:
            point = None
        decisions = judge(
            [*left.values()],
            rule,
            resumed_from=point,
            lineage=lineage,
            replaces=now.replaces,
            share_files=now.sharing.share,
        )
        done = tuple(made for made in decisions if _is_carried_out(made, decisions, now.held))
        freed = {}
        for made in done:
            order = made.entry.order
            freed[order] = made.entry.nbytes
            if made.keep:
                left[order] = _thinned(made, sizes.get(order, NO_SIZES).components)
                freed[order] -= left[order].nbytes
            else:
                del left[order]
                lineage.discard(order)
        yield Foreseen(save=save, decisions=decisions, done=done, freed_nbytes=freed)


def _is_carried_out(made: Decision, decisions: Sequence[Decision], held: Collection[Order]) -> bool:
    if (made.keep and not made.drop) or made.entry.order in held:
        return False
    return any(may_rest_on(base, made) for base in decisions)


def _thinned(made: Decision, nbytes: Mapping[str, int]) -> Candidate:
    """Return a checkpoint as it is when the components of a decision were dropped."""
    entry = made.entry
    return replace(
        entry,
        nbytes=entry.nbytes - sum(nbytes.get(name, 0) for name in made.drop),
        components=tuple(name for name in entry.components if name not in made.drop),
        begun=tuple(name for name in entry.begun if name not in made.drop),
        dropped=tuple(dict.fromkeys((*entry.dropped, *made.drop))),
    )


# The saves that are assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """Saves that are assumed, oldest first, and what they rest on."""

    saves: tuple[Candidate, ...]
    sizes: Mapping[Order, Sizes]
    is_by_interval: bool
    """Whether their steps follow from the run's intervals; else the last distance is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Records of a run, from which its next saves are assumed."""

    history: Sequence[Candidate]
    """Its checkpoints, newest first; at least one."""
    policies: Mapping[str, SavePolicy]
    """Intervals by saver; empty: they are not known."""
    parts: Mapping[str, tuple[str, ...]]
    """Components of savers that do not save all."""
    sizes: Mapping[Order, Sizes]
    """Sizes of the checkpoints."""
    after: Order
    """Epoch of the coming saves, and sequence of the last save of that epoch."""
    began: str = ""
    """When the run goes on, ISO 8601; empty: it runs since its newest checkpoint."""


def coming_saves(
    record: Record, rule: Rule, number: int, metrics: Mapping[str, float] | None = None
) -> Coming:
    """Assume the next saves of a run, `number` of them.

    Each is as large as the last one of the same components. None has a new best value of a metric
    of the rule, unless `metrics` gives it.
    """
    history = record.history
    pace = _Pace(history)
    dues = _scheduled(record, pace, number)
    is_by_interval = len(dues) == number
    if not is_by_interval:
        dues = _repeated(history, pace, number)
    known = _Known(history, record.sizes)
    metrics = {**history[0].metrics, **_no_better(history, rule), **(metrics or {})}
    saves, sizes = [], {}
    epoch, sequence = record.after
    for place, (due, now) in enumerate(dues, start=1):
        order = epoch, sequence + place
        components, sizes[order] = known.parts_of(due)
        save = Candidate(
            order=order,
            timestamp=now,
            created=_created(history[0], record.began, now),
            save_class=due.save_class,
            nbytes=sizes[order].nbytes,
            metrics=metrics,
            components=components,
            savers=due.savers,
            left_out=tuple(name for name in known.whole if name not in components),
        )
        saves.append(save)
    return Coming(saves=tuple(saves), sizes=sizes, is_by_interval=is_by_interval)


class _Known:
    """Components and sizes of the checkpoints of a run."""

    def __init__(self, history: Sequence[Candidate], sizes: Mapping[Order, Sizes]) -> None:
        self._sizes = [sizes.get(entry.order, NO_SIZES) for entry in history]
        self.whole = tuple(dict.fromkeys((*self._sizes[0].components, *history[0].left_out)))
        """Names of all components of the state."""

    def parts_of(self, due: Due) -> tuple[tuple[str, ...], Sizes]:
        """Return the components of a coming save, and their sizes: those of the last one alike."""
        wanted = self.whole if due.components is None else due.components
        alike = (one for one in self._sizes if {*one.components} == {*wanted})
        found = next(alike, None)
        if found is None:
            nbytes = {name: self._nbytes(name) for name in wanted}
            found = Sizes(sum(nbytes.values()), nbytes)
        return wanted, found

    def _nbytes(self, name: str) -> int:
        having = (one.components[name] for one in self._sizes if name in one.components)
        return next(having, 0)


def _created(newest: Candidate, began: str, now: Timestamp) -> str:
    moment = recorded_time(began or newest.created)
    if moment is None:
        return ""
    try:
        moment += timedelta(seconds=now.wall_s - newest.timestamp.wall_s)
    except OverflowError:  # later than dates go, as with an interval that means never
        moment = datetime.max.replace(tzinfo=moment.tzinfo)
    return moment.isoformat()


def _no_better(history: Sequence[Candidate], rule: Rule) -> dict[str, float]:
    """Return the worst known value of each metric of a rule; of equal ones the older is best."""
    found: dict[str, float] = {}
    for best in best_rules(rule):
        if best.metric in history[0].metrics:
            known = (entry.metrics.get(best.metric, math.nan) for entry in history)
            finite = [value for value in known if math.isfinite(value)]
            worst = max if best.mode == "min" else min
            found[best.metric] = worst(finite, default=math.nan)
    return found


class _Pace:
    """How the counters of a run grow with its steps, by its newest two checkpoints of two steps."""

    def __init__(self, history: Sequence[Candidate]) -> None:
        self.newest = history[0].timestamp
        steps = (entry.timestamp for entry in history)
        earlier = (at for at in steps if at.step < self.newest.step)
        self._start = next(earlier, Timestamp(step=0))
        self.steps = max(self.newest.step - self._start.step, 1)
        """Steps between the two."""

    def of(self, unit: Unit) -> float:
        """Return by how much the counter of a unit grows in a step; 0: it does not, or is none."""
        here, before = unit.of(self.newest), unit.of(self._start)
        return 0.0 if here is None else max(here - (before or 0), 0) / self.steps

    def at(self, step: int) -> Timestamp:
        """Return the counters at a coming step."""
        num = step - self.newest.step
        changes: dict[str, int] = {}
        for name, unit in zip(
            _COUNTERS, (Unit.EPOCH, Unit.SAMPLE, Unit.TOKEN, Unit.CYCLE), strict=True
        ):
            here = unit.of(self.newest)
            if here is not None:
                changes[name] = math.floor(here + num * self.of(unit) + 1e-9)
        wall_s = self.newest.wall_s + num * self.of(Unit.SECOND)
        return Timestamp(step=step, wall_s=wall_s, **changes)


def _scheduled(record: Record, pace: _Pace, number: int) -> list[tuple[Due, Timestamp]]:
    """Run the schedule of the run from its newest checkpoint on; fewer than `number` if it ends."""
    if MAIN not in record.policies:
        return []
    stride = _stride(record.policies, pace)
    if stride is None:
        return []
    schedule = _schedule(record)
    found: list[tuple[Due, Timestamp]] = []
    now = record.history[0].timestamp
    for _ in range(_MAX_LOOKS):
        if len(found) == number:
            break
        step = schedule.quiet_until(now) if stride == 0 else now.step + stride
        now = pace.at(step)
        due = schedule.due(now)
        if due is not None:
            schedule.began(due, now)
            found.append((due, now))
    return found


def _stride(policies: Mapping[str, SavePolicy], pace: _Pace) -> int | None:
    """Return how many steps to go between two looks; 0: as the schedule says; None: unknown."""
    distances: list[float] = []
    for policy in policies.values():
        for trigger in (policy.permanent, policy.ephemeral):
            for part in parts_of(trigger) if trigger is not None else ():
                assert isinstance(part, Every), "recorded texts are intervals"
                if part.unit is not Unit.STEP:
                    if not pace.of(part.unit):
                        return None
                    distances.append(float(part.size) / pace.of(part.unit))
    return max(int(min(distances) / _LOOKS_BETWEEN), 1) if distances else 0


def _schedule(record: Record) -> Schedule:
    sides = [
        SideSaver(name, every=policy, components=record.parts[name])
        for name, policy in record.policies.items()
        if name in record.parts
    ]
    schedule = Schedule(record.policies.get(MAIN), sides)
    schedule.stand_on(record.history[0].timestamp, record.history)
    return schedule


def _repeated(
    history: Sequence[Candidate], pace: _Pace, number: int
) -> list[tuple[Due, Timestamp]]:
    """Assume saves like the newest one, each as far from the one before as that was."""
    newest = history[0]
    components = (*newest.components, *newest.begun, *newest.dropped) if newest.left_out else None
    due = Due(newest.save_class, "", savers=newest.savers, components=components)
    steps = (newest.timestamp.step + pace.steps * place for place in range(1, number + 1))
    return [(due, pace.at(step)) for step in steps]
