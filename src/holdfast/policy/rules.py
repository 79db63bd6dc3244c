"""Rules of retention: each picks checkpoints to keep, and says why.

A rule is a pure function of what the manifests recorded: no clock, no file time and no setting of
today's run is looked at. Order is the recorded (epoch, sequence) and nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, get_args

from holdfast.errors import UsageError
from holdfast.format.layout import check_component
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, parse, reading

Mode = Literal["min", "max"]
Removal = Literal["ephemeral_only", "all_non_permanent", "never"]

MAIN = "main"
"""The saver of the whole state, to which everything belongs that names no saver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the rules may know of one committed checkpoint, all of it as it was recorded."""

    order: tuple[int, int]
    """(epoch, sequence) as recorded; decides which one is newer."""
    timestamp: Timestamp
    created: str = ""
    """When it was saved, ISO 8601; for the rules that count by the calendar."""
    save_class: str = "permanent"
    """`permanent` or `ephemeral`, as decided when it was saved."""
    nbytes: int = 0
    """Bytes of the files that are left."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pinned: bool = False
    rejected: bool = False
    """Resume could not use it."""
    retired: bool = False
    """Its deletion was begun."""
    components: tuple[str, ...] = ()
    """Components whose files are all there."""
    begun: tuple[str, ...] = ()
    """Components of which some files were dropped and some are left."""
    dropped: tuple[str, ...] = ()
    """Components that cannot be loaded any more; with any of these, nobody can resume from it."""
    healthy: bool = True
    """Nothing was known to be wrong with the state."""
    savers: tuple[str, ...] = ()
    """Which savers of the run asked for it; none: `main`."""
    left_out: tuple[str, ...] = ()
    """Components that were not saved; with any of these, nobody can resume from it."""

    @property
    def is_usable(self) -> bool:
        """Whether nothing speaks against its bytes."""
        return not (self.rejected or self.retired)

    @property
    def counts(self) -> bool:
        """Whether it may fill a quota."""
        return self.is_usable and self.healthy

    @property
    def is_resumable(self) -> bool:
        """Whether a run could go on from it, be it healthy or not."""
        return self.is_usable and not (self.dropped or self.left_out)

    @property
    def is_held(self) -> bool:
        """Whether a person asked to keep it."""
        return self.pinned or bool(self.tags)


class Rule(ABC):
    """Picks checkpoints to keep. `a | b` keeps what either of them picks."""

    __slots__ = ()

    @abstractmethod
    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Position of every pick, with the reason."""

    def __or__(self, other: Rule) -> Rule:
        if not isinstance(other, Rule):
            return NotImplemented
        return AnyOf((*_parts(self), *_parts(other)))

    def then_drop(self, *components: str) -> Rule:
        """This rule, but what it picks loses `components`, such as `optimizer`, to save room.

        What another rule picks as well keeps what that rule does not drop.
        """
        return ThenDrop(self, tuple(sorted(set(components))))


@dataclass(frozen=True, slots=True)
class All(Rule):
    """Keep every checkpoint, also those that resume rejected."""

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Every position."""
        return dict.fromkeys(range(len(newest_first)), "all are kept")

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True, slots=True)
class Last(Rule):
    """Keep the `n` newest."""

    n: int

    def __post_init__(self) -> None:
        _check_quota("Last", self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The first `n` that count."""
        return dict.fromkeys(counting(newest_first)[: self.n], str(self))

    def __str__(self) -> str:
        return f"last {self.n}"


@dataclass(frozen=True, slots=True)
class Best(Rule):
    """Keep the `n` with the lowest (or highest) value of a metric; of equal ones the older.

    A checkpoint without that metric, or where it is not a finite number, is never among them.
    """

    metric: str
    n: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"Best: metric={self.metric!r} must be the name of a metric")
        if self.mode not in get_args(Mode):
            raise UsageError(f"Best: mode={self.mode!r} must be 'min' or 'max'")
        _check_quota("Best", self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The `n` best that count."""
        sign = 1 if self.mode == "min" else -1
        scores = [
            (sign * value, newest_first[position].order, position)
            for position in counting(newest_first)
            if (value := newest_first[position].metrics.get(self.metric)) is not None
            and math.isfinite(value)
        ]
        return {position: str(self) for _, _, position in sorted(scores)[: self.n]}

    def __str__(self) -> str:
        many = "" if self.n == 1 else f"{self.n} "
        return f"best {many}{self.metric} ({self.mode})"


@dataclass(frozen=True, slots=True, init=False)
class EveryNth(Rule):
    """Keep, for every multiple of `interval`, the first checkpoint at or after it.

    Multiples start at one interval; a checkpoint at exactly zero is kept too. Where training
    went back and passed a multiple twice at the same count, the newer one is kept. Hours and the
    like are hours of training; see `Hourly` and `Daily` for the calendar.
    """

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        object.__setattr__(self, "interval", parse(interval, what="EveryNth"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The milestones among those that count."""
        first: dict[int, tuple[int | float, int]] = {}
        for position in counting(newest_first):
            count = reading(newest_first[position].timestamp, self.interval.unit)
            if count is None or 0 < count < self.interval.value:
                continue
            multiple = int(count // self.interval.value)
            first[multiple] = min(first.get(multiple, (count, position)), (count, position))
        return {position: str(self) for _, position in first.values()}

    def __str__(self) -> str:
        return f"every {self.interval}"


@dataclass(frozen=True, slots=True)
class Hourly(Rule):
    """Keep the first checkpoint of each hour (UTC), of the newest `n` hours with any; None: all.

    The hour is the one that was recorded when it was saved.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        _check_quota("Hourly", 1 if self.n is None else self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """One for each hour, among those that count."""
        hours = _first_of_each(newest_first, lambda at: int(at.timestamp() // 3600))
        return dict.fromkeys(hours[: self.n], str(self))

    def __str__(self) -> str:
        return "hourly" if self.n is None else f"hourly {self.n}"


@dataclass(frozen=True, slots=True)
class Daily(Rule):
    """Keep the first checkpoint of each day (UTC), of the newest `n` days with any; None: all.

    The day is the one that was recorded when it was saved.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        _check_quota("Daily", 1 if self.n is None else self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """One for each day, among those that count."""
        days = _first_of_each(newest_first, lambda at: at.toordinal())
        return dict.fromkeys(days[: self.n], str(self))

    def __str__(self) -> str:
        return "daily" if self.n is None else f"daily {self.n}"


@dataclass(frozen=True, slots=True, init=False)
class Within(Rule):
    """Keep what was saved less than `span` before the newest: steps, tokens, hours of training.

    No clock is looked at, so a run that pauses for a week loses nothing.
    """

    span: Time

    def __init__(self, span: str | Time) -> None:
        object.__setattr__(self, "span", parse(span, what="Within"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Those that count, know their count, and are near enough."""
        counts = {
            position: count
            for position in counting(newest_first)
            if (count := reading(newest_first[position].timestamp, self.span.unit)) is not None
        }
        if not counts:
            return {}
        newest = counts[min(counts)]
        near = [p for p, count in counts.items() if newest - count < self.span.value]
        return dict.fromkeys(near, str(self))

    def __str__(self) -> str:
        return f"within {self.span}"


@dataclass(frozen=True, slots=True)
class Budget(Rule):
    """Keep the newest, as many as fit into `nbytes` bytes together.

    What a person pinned or tagged takes its room first. The newest stays also when it is larger.
    Rules beside this one may keep more.
    """

    nbytes: int

    def __post_init__(self) -> None:
        if isinstance(self.nbytes, bool) or not isinstance(self.nbytes, int) or self.nbytes < 1:
            raise UsageError(f"Budget: nbytes={self.nbytes!r} must be a whole number, at least 1")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """What is held, and the others from the newest on, until one does not fit."""
        left = self.nbytes - sum(entry.nbytes for entry in newest_first if entry.is_held)
        chosen: list[int] = []
        for position in counting(newest_first):
            entry = newest_first[position]
            left -= 0 if entry.is_held else entry.nbytes
            if entry.is_held or left >= 0:
                chosen.append(position)
        return dict.fromkeys(chosen, str(self))

    def __str__(self) -> str:
        return f"budget {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class ByClass(Rule):
    """Keep by the class that was recorded at the save, whatever today's intervals are.

    `ephemeral_only` keeps the permanent ones and the newest ephemeral one; `all_non_permanent`
    keeps the permanent ones alone; `never` removes none.
    """

    remove: Removal = "ephemeral_only"

    def __post_init__(self) -> None:
        if self.remove not in get_args(Removal):
            known = ", ".join(repr(name) for name in get_args(Removal))
            raise UsageError(f"ByClass: remove={self.remove!r} must be one of {known}")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The permanent ones that count, and what else is spared."""
        if self.remove == "never":
            return dict.fromkeys(range(len(newest_first)), str(self))
        usable = counting(newest_first)
        ephemeral = [p for p in usable if newest_first[p].save_class == "ephemeral"]
        chosen = {p: "permanent" for p in usable if newest_first[p].save_class == "permanent"}
        if self.remove == "ephemeral_only":
            chosen |= dict.fromkeys(ephemeral[:1], "newest ephemeral")
        return chosen

    def __str__(self) -> str:
        return f"remove {self.remove}"


@dataclass(frozen=True, slots=True)
class AnyOf(Rule):
    """Keep what any of `rules` picks."""

    rules: tuple[Rule, ...]

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Every rule's picks, with all their reasons."""
        reasons: dict[int, str] = {}
        for rule in self.rules:
            for position, reason in rule.picks(newest_first).items():
                reasons[position] = join_reasons(reasons.get(position), reason)
        return reasons

    def __str__(self) -> str:
        return " | ".join(str(rule) for rule in self.rules)


@dataclass(frozen=True, slots=True)
class ThenDrop(Rule):
    """Keep what `rule` picks, without `components`; made by `Rule.then_drop`."""

    rule: Rule
    components: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.components:
            raise UsageError("then_drop: name at least one component")
        for component in self.components:
            check_component(component)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The picks of `rule`; what they lose stands in their reasons."""
        suffix = f"without {', '.join(self.components)}"
        return {p: f"{reason} {suffix}" for p, reason in self.rule.picks(newest_first).items()}

    def __str__(self) -> str:
        return f"{_grouped(self.rule)} without {', '.join(self.components)}"


@dataclass(frozen=True, slots=True, init=False)
class BySaver(Rule):
    """Each saver of the run has its own rule, which sees what that saver asked for and no more.

        BySaver({"main": Last(3), "weights": Last(24)})

    What several savers asked for stays while one of their rules keeps it. A saver without a rule
    keeps everything. A rule that is not in a `BySaver` is one for `main`.
    """

    rules: tuple[tuple[str, Rule], ...]

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise UsageError(f"BySaver: rules={rules!r} must name a rule for at least one saver")
        for saver, rule in rules.items():
            check_component(saver)
            if not isinstance(rule, Rule):
                raise UsageError(f"BySaver: {saver}={rule!r} must be a rule such as Last(3)")
            if _names_savers(rule):
                raise UsageError(f"BySaver: the rule for {saver} names savers itself: {rule}")
        object.__setattr__(self, "rules", tuple(rules.items()))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """What the rule of one of its savers keeps."""
        reasons = picks_of_others(newest_first, savers_of(self))
        for saver, rule in self.rules:
            for position, reason in picks_of(rule, saver, newest_first).items():
                reasons[position] = join_reasons(reasons.get(position), reason)
        return reasons

    def __str__(self) -> str:
        return ", ".join(f"{saver}: {_grouped(rule)}" for saver, rule in self.rules)


def picks_of(rule: Rule, saver: str, newest_first: Sequence[Candidate]) -> dict[int, str]:
    """What a rule picks of one saver's checkpoints; of `main` the partial ones are judged apart.

    So three whole ones stay of the last three, however many beside them cannot be resumed from.
    """
    picks: dict[int, str] = {}
    for positions in _groups(newest_first, saver):
        group = [newest_first[position] for position in positions]
        for position, reason in rule.picks(group).items():
            if position not in range(len(group)):
                raise UsageError(f"rule {rule}: picks position {position} of {len(group)}")
            picks[positions[position]] = reason if saver == MAIN else f"{saver}: {reason}"
    return picks


def picks_of_others(newest_first: Sequence[Candidate], savers: frozenset[str]) -> dict[int, str]:
    """What a saver asked for that has no rule, beside the rules of `savers`."""
    others = (
        (position, [name for name in entry.savers or (MAIN,) if name not in savers])
        for position, entry in enumerate(newest_first)
    )
    return {position: f"{names[0]}: all are kept" for position, names in others if names}


def savers_of(rule: Rule) -> frozenset[str]:
    """The savers that a rule speaks for."""
    if isinstance(rule, BySaver):
        return frozenset(saver for saver, _ in rule.rules)
    if isinstance(rule, ThenDrop):
        return savers_of(rule.rule)
    if isinstance(rule, AnyOf):
        return frozenset().union(*(savers_of(part) for part in rule.rules))
    return frozenset((MAIN,))


def _names_savers(rule: Rule) -> bool:
    if isinstance(rule, ThenDrop):
        return _names_savers(rule.rule)
    if isinstance(rule, AnyOf):
        return any(_names_savers(part) for part in rule.rules)
    return isinstance(rule, BySaver)


def _groups(newest_first: Sequence[Candidate], saver: str) -> Iterator[list[int]]:
    """Positions of a saver's checkpoints, in the groups that are judged apart."""
    own = [p for p, entry in enumerate(newest_first) if saver in (entry.savers or (MAIN,))]
    if saver != MAIN:
        yield own
        return
    yield [position for position in own if not newest_first[position].left_out]
    yield [position for position in own if newest_first[position].left_out]


def quota(rule: Rule) -> int | None:
    """How many checkpoints a rule keeps at most, as far as one can tell; None: no limit.

    Of rules by saver only that of `main` is looked at: what others save has another size.
    """
    if isinstance(rule, BySaver):
        main = dict(rule.rules).get(MAIN)
        return quota(main) if main is not None else None
    if isinstance(rule, Last | Best | Hourly | Daily):
        return rule.n
    if isinstance(rule, ThenDrop):
        return quota(rule.rule)
    if isinstance(rule, AnyOf):
        parts = [quota(part) for part in rule.rules]
        return None if None in parts else sum(part for part in parts if part is not None)
    return None


def named_components(rule: Rule) -> frozenset[str]:
    """The components that a rule would drop somewhere."""
    if isinstance(rule, ThenDrop):
        return named_components(rule.rule).union(rule.components)
    if isinstance(rule, AnyOf):
        return frozenset().union(*(named_components(part) for part in rule.rules))
    if isinstance(rule, BySaver):
        return frozenset().union(*(named_components(part) for _, part in rule.rules))
    return frozenset()


def counting(newest_first: Sequence[Candidate]) -> list[int]:
    """Positions of those that may fill a quota."""
    return [position for position, entry in enumerate(newest_first) if entry.counts]


def join_reasons(*reasons: str | None) -> str:
    """The reasons that there are, as one text."""
    return ", ".join(reason for reason in reasons if reason)


def _first_of_each(
    newest_first: Sequence[Candidate], bucket: Callable[[datetime], int]
) -> list[int]:
    """Positions of the oldest one of each bucket of the calendar, newest bucket first.

    Which bucket is newer is said by the recorded order, so that a clock that was wrong for a day
    takes nobody's place for ever.
    """
    oldest: dict[int, int] = {}
    for position in counting(newest_first):
        created = _recorded_time(newest_first[position].created)
        if created is not None:
            oldest[bucket(created)] = position  # later positions are older
    return sorted(oldest.values())  # positions are newest first


def _recorded_time(created: str) -> datetime | None:
    """The recorded moment in UTC; None where the record says nothing that can be read."""
    try:
        moment = datetime.fromisoformat(created)
        return moment.astimezone(timezone.utc) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _grouped(rule: Rule) -> str:
    """A rule in words, as one thing beside others."""
    return f"({rule})" if isinstance(rule, AnyOf | BySaver) else str(rule)


def _parts(rule: Rule) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, AnyOf) else (rule,)


def _check_quota(rule: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{rule}: n={n!r} must be a whole number, at least 1")
