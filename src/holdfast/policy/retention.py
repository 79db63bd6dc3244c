"""What to keep, and why: a pure function of what the records say.

Order is the recorded (epoch, sequence) and nothing else. Deciding deletes nothing; a dry run, a
report and a deletion share the same decisions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, parse, reading

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the rules may know of one committed checkpoint."""

    order: tuple[int, int]
    """(epoch, sequence) as recorded; decides which one is newer."""
    timestamp: Timestamp
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pinned: bool = False
    rejected: bool = False
    """Resume could not use it."""
    retired: bool = False
    """Its deletion was begun."""

    @property
    def counts(self) -> bool:
        """Whether it may fill a quota."""
        return not (self.rejected or self.retired)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to `entry`, and why."""

    entry: Candidate
    keep: bool
    reason: str


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
        return dict.fromkeys(_counting(newest_first)[: self.n], str(self))

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
            for position in _counting(newest_first)
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
    went back and passed a multiple twice at the same count, the newer one is kept.
    """

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        object.__setattr__(self, "interval", parse(interval, what="EveryNth"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """The milestones among those that count."""
        first: dict[int, tuple[int | float, int]] = {}
        for position in _counting(newest_first):
            count = reading(newest_first[position].timestamp, self.interval.unit)
            if count is None or 0 < count < self.interval.value:
                continue
            multiple = int(count // self.interval.value)
            first[multiple] = min(first.get(multiple, (count, position)), (count, position))
        return {position: str(self) for _, position in first.values()}

    def __str__(self) -> str:
        return f"every {self.interval}"


@dataclass(frozen=True, slots=True)
class AnyOf(Rule):
    """Keep what any of `rules` picks."""

    rules: tuple[Rule, ...]

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Every rule's picks, with all their reasons."""
        reasons: dict[int, str] = {}
        for rule in self.rules:
            for position, reason in rule.picks(newest_first).items():
                reasons[position] = _join(reasons.get(position), reason)
        return reasons

    def __str__(self) -> str:
        return " | ".join(str(rule) for rule in self.rules)


def decide(
    entries: Sequence[Candidate], rule: Rule, *, resumed_from: tuple[int, int] | None = None
) -> tuple[Decision, ...]:
    """One decision for each entry, newest first.

    Whatever the rule says, these stay: pinned and tagged ones, the newest that counts, and the
    one at `resumed_from`, the order of the checkpoint at which the lineage stands. A rejected one
    stays until all that the rule keeps is newer; one whose deletion was begun stays until
    something newer is kept. So nothing goes while there is nothing newer.
    """
    ordered = sorted(entries, key=lambda entry: entry.order, reverse=True)
    picks = {
        position: reason
        for position, reason in rule.picks(ordered).items()
        if not ordered[position].retired
    }
    newest = next(iter(_counting(ordered)), None)
    if newest is not None:
        picks[newest] = _join("newest", picks.get(newest))
    kept = [ordered[position].order for position in picks if ordered[position].counts]
    decisions: list[Decision] = []
    for position, entry in enumerate(ordered):
        reason = _join(_protection(entry, resumed_from), picks.get(position))
        if reason:
            decisions.append(Decision(entry=entry, keep=True, reason=reason))
        else:
            decisions.append(_unpicked(entry, kept, rule))
    return tuple(decisions)


def quota(rule: Rule) -> int | None:
    """How many checkpoints a rule keeps at most, as far as one can tell; None: no limit."""
    if isinstance(rule, Last | Best):
        return rule.n
    if isinstance(rule, AnyOf):
        parts = [quota(part) for part in rule.rules]
        return None if None in parts else sum(part for part in parts if part is not None)
    return None


def _protection(entry: Candidate, resumed_from: tuple[int, int] | None) -> str:
    """Why no rule may drop `entry`, or nothing."""
    reasons = (
        "pinned" if entry.pinned else "",
        f"tagged {', '.join(entry.tags)}" if entry.tags else "",
        "the run went on from it" if entry.order == resumed_from else "",
    )
    return _join(*reasons)


def _unpicked(entry: Candidate, kept: Sequence[tuple[int, int]], rule: Rule) -> Decision:
    """The decision on what neither the rule nor a mark keeps; `kept` are the orders that stay."""
    if entry.retired:
        if any(order > entry.order for order in kept):
            return Decision(entry=entry, keep=False, reason="its deletion was begun")
        return Decision(entry=entry, keep=True, reason="its deletion waits for something newer")
    if entry.rejected:
        if kept and min(kept) > entry.order:
            return Decision(entry=entry, keep=False, reason="rejected, and all that stays is newer")
        return Decision(entry=entry, keep=True, reason="rejected, stays to be looked at")
    return Decision(entry=entry, keep=False, reason=f"not kept by: {rule}")


def _counting(newest_first: Sequence[Candidate]) -> list[int]:
    """Positions of those that may fill a quota."""
    return [position for position, entry in enumerate(newest_first) if entry.counts]


def _parts(rule: Rule) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, AnyOf) else (rule,)


def _join(*reasons: str | None) -> str:
    return ", ".join(reason for reason in reasons if reason)


def _check_quota(rule: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{rule}: n={n!r} must be a whole number, at least 1")
