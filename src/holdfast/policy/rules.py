"""Built-in retention rules: each picks checkpoints to keep, with reasons.

A new rule is a class in this file; its `spelled` and `parse` make it usable as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import ClassVar, Literal, cast, get_args

from holdfast.arguments import checked
from holdfast.errors import UsageError
from holdfast.policy.amounts import number_of_bytes, whole_number
from holdfast.policy.clock import Time, argument_name, parse
from holdfast.policy.rule import Candidate, Rule, SaveClass, counting

Mode = Literal["min", "max"]
Removal = Literal["ephemeral_only", "all_non_permanent", "never"]
_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max))?(?::(?P<n>[0-9]{1,18}))?")


@dataclass(frozen=True, slots=True, repr=False)
class All(Rule):
    """Keep every checkpoint, also those that resume rejected."""

    spelled: ClassVar[str] = "all"

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick every checkpoint."""
        return dict.fromkeys(range(len(newest_first)), "all are kept")

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `all`, which takes no argument."""
        if text:
            raise UsageError(f"all:{text}: 'all' takes no argument")
        return cls()

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True, slots=True, repr=False)
class Nothing(Rule):
    """Keep only what is kept in any case, such as the newest: another tier has the rest.

    Applies to the checkpoints of every saver, also of those without a rule.
    """

    is_for_all: ClassVar[bool] = True

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick no checkpoint."""
        return {}

    def quota(self) -> int | None:
        """Return 1: the newest."""
        return 1

    def __str__(self) -> str:
        return "only the newest"


@dataclass(frozen=True, slots=True, repr=False)
class Last(Rule):
    """Keep the `n` newest, or the `n` newest of one class.

    The newest of all is kept in any case, whatever its class.
    """

    spelled: ClassVar[str] = "last"

    n: int
    save_class: SaveClass | None = None

    def __post_init__(self) -> None:
        _check_quota("Last", self.n)
        known = get_args(SaveClass)
        if self.save_class not in (None, *known):
            raise UsageError(f"Last: save_class={self.save_class!r} must be one of {known}")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick the `n` newest of the class that count towards quotas."""
        own = [p for p in counting(newest_first) if self._is_of_class(newest_first[p])]
        return dict.fromkeys(own[: self.n], str(self))

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name the class 'ephemeral' if no checkpoint has it.

        If none is permanent, the rule is right to keep none: it deletes only ephemeral ones.
        """
        if self.save_class != "ephemeral" or any(map(self._is_of_class, counting)):
            return ""
        return "the class 'ephemeral'"

    def quota(self) -> int | None:
        """Return `n`, plus one for the newest, which may be of the other class."""
        return self.n if self.save_class is None else self.n + 1

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `last:3` or `last:3:permanent`."""
        n, colon, save_class = text.partition(":")
        return cls(whole_number(n), cast(SaveClass, save_class) if colon else None)

    def _is_of_class(self, entry: Candidate) -> bool:
        return self.save_class in (None, entry.save_class)

    def __str__(self) -> str:
        return f"last {self.n}" if self.save_class is None else f"last {self.n} {self.save_class}"


@checked(but=("metric", "n", "mode"))
@dataclass(frozen=True, slots=True, repr=False)
class Best(Rule):
    """Keep the `n` with the lowest (or highest) value of a metric; of equal ones the older.

    A checkpoint without that metric, or with one that is not finite, is never picked.
    """

    spelled: ClassVar[str] = "best"

    metric: str
    n: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(
                f"Best: metric={self.metric!r} must be the name of a metric, as in Best('loss', 2)"
            )
        if self.mode not in get_args(Mode):
            raise UsageError(f"Best: mode={self.mode!r} must be 'min' or 'max'")
        _check_quota("Best", self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick the `n` best that count towards quotas."""
        sign = 1 if self.mode == "min" else -1
        scores = [
            (sign * value, newest_first[position].order, position)
            for position in counting(newest_first)
            if (value := newest_first[position].metrics.get(self.metric)) is not None
            and math.isfinite(value)
        ]
        return {position: str(self) for _, _, position in sorted(scores)[: self.n]}

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name the metric if no checkpoint has a finite value of it."""
        if any(math.isfinite(entry.metrics.get(self.metric, math.nan)) for entry in counting):
            return ""
        known = sorted({name for entry in counting for name in entry.metrics})
        recorded = f" (recorded: {', '.join(map(repr, known[:10]))})" if known else ""
        return f"the metric {self.metric!r}{recorded}"

    def quota(self) -> int | None:
        """Return `n`."""
        return self.n

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `best:METRIC`, `best:METRIC:max` or `best:METRIC:min:3`."""
        match = _BEST.fullmatch(text)
        if match is None:
            raise UsageError(f"best:{text}: expected best:METRIC:min:3, or a part of it")
        return cls(match["metric"], int(match["n"] or 1), cast(Mode, match["mode"] or "min"))

    def __str__(self) -> str:
        many = "" if self.n == 1 else f"{self.n} "
        return f"best {many}{self.metric} ({self.mode})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class EveryNth(Rule):
    """Keep, for every multiple of `interval`, the first checkpoint at or after it.

    Multiples start at one interval; a checkpoint at exactly zero is kept too. Where training
    went back and passed a multiple twice at the same count, the newer one is kept. Hours and the
    like are hours of training; see `Hourly` and `Daily` for the calendar.
    """

    spelled: ClassVar[str] = "every"

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        object.__setattr__(self, "interval", parse(interval, what="EveryNth: interval"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick the milestones among those that count towards quotas."""
        first: dict[int, tuple[int | float, int]] = {}
        for position in counting(newest_first):
            count = self.interval.unit.of(newest_first[position].timestamp)
            if count is None or 0 < count < self.interval.value:
                continue
            multiple = int(count // self.interval.value)
            first[multiple] = min(first.get(multiple, (count, position)), (count, position))
        return {position: str(self) for _, position in first.values()}

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name the counter of the interval if no checkpoint has it."""
        return _missing_counter(counting, self.interval)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `every:1000step`."""
        return cls(text)

    def __repr__(self) -> str:
        return f"EveryNth('{self.interval}')"

    def __str__(self) -> str:
        return f"every {self.interval}"


@dataclass(frozen=True, slots=True, repr=False)
class Hourly(Rule):
    """Keep the first checkpoint of each hour (UTC), of the newest `n` hours with any; None: all.

    The hour is the one that was recorded when it was saved.
    """

    spelled: ClassVar[str] = "hourly"

    n: int | None = None

    def __post_init__(self) -> None:
        _check_quota("Hourly", 1 if self.n is None else self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick one for each hour, among those that count towards quotas."""
        hours = _first_of_each(newest_first, lambda at: int(at.timestamp() // 3600))
        return dict.fromkeys(hours[: self.n], str(self))

    def quota(self) -> int | None:
        """Return `n`."""
        return self.n

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `hourly` or `hourly:24`."""
        return cls(whole_number(text) if text else None)

    def __str__(self) -> str:
        return "hourly" if self.n is None else f"hourly {self.n}"


@dataclass(frozen=True, slots=True, repr=False)
class Daily(Rule):
    """Keep the first checkpoint of each day (UTC), of the newest `n` days with any; None: all.

    The day is the one that was recorded when it was saved.
    """

    spelled: ClassVar[str] = "daily"

    n: int | None = None

    def __post_init__(self) -> None:
        _check_quota("Daily", 1 if self.n is None else self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick one for each day, among those that count towards quotas."""
        days = _first_of_each(newest_first, lambda at: at.toordinal())
        return dict.fromkeys(days[: self.n], str(self))

    def quota(self) -> int | None:
        """Return `n`."""
        return self.n

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `daily` or `daily:7`."""
        return cls(whole_number(text) if text else None)

    def __str__(self) -> str:
        return "daily" if self.n is None else f"daily {self.n}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Within(Rule):
    """Keep what was saved less than `span` before the newest: steps, tokens, hours of training.

    Independent of clocks, so a run that pauses for a week loses nothing.
    """

    spelled: ClassVar[str] = "within"

    span: Time

    def __init__(self, span: str | Time) -> None:
        object.__setattr__(self, "span", parse(span, what="Within: span"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick those within the span among those that count towards quotas."""
        counts = {
            position: count
            for position in counting(newest_first)
            if (count := self.span.unit.of(newest_first[position].timestamp)) is not None
        }
        if not counts:
            return {}
        newest = counts[min(counts)]
        near = [p for p, count in counts.items() if newest - count < self.span.value]
        return dict.fromkeys(near, str(self))

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name the counter of the span if no checkpoint has it."""
        return _missing_counter(counting, self.span)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `within:500step`."""
        return cls(text)

    def __repr__(self) -> str:
        return f"Within('{self.span}')"

    def __str__(self) -> str:
        return f"within {self.span}"


@dataclass(frozen=True, slots=True, repr=False)
class Budget(Rule):
    """Keep the newest, as many as fit into `nbytes` bytes together.

    Pinned and tagged checkpoints are counted first. Rules beside this one may keep more. If every
    checkpoint is larger than the budget, its unit is likely wrong, and everything is kept.
    """

    spelled: ClassVar[str] = "budget"

    nbytes: int

    def __post_init__(self) -> None:
        if isinstance(self.nbytes, bool) or not isinstance(self.nbytes, int) or self.nbytes < 1:
            raise UsageError(f"Budget: nbytes={self.nbytes!r} must be a whole number, at least 1")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick pinned and tagged ones, then others from the newest on while they fit."""
        left = self.nbytes - sum(entry.nbytes for entry in newest_first if entry.is_held)
        chosen: list[int] = []
        for position in counting(newest_first):
            entry = newest_first[position]
            left -= 0 if entry.is_held else entry.nbytes
            if entry.is_held or left >= 0:
                chosen.append(position)
        return dict.fromkeys(chosen, str(self))

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name a size that fits into the budget, if every checkpoint is larger."""
        smallest = min(entry.nbytes for entry in counting)
        if smallest <= self.nbytes:
            return ""
        return f"a size of at most {self.nbytes} bytes (the smallest: {smallest})"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `budget:500GB`."""
        return cls(number_of_bytes(text))

    def __str__(self) -> str:
        return f"budget {self.nbytes} bytes"


@dataclass(frozen=True, slots=True, repr=False)
class ByClass(Rule):
    """Keep checkpoints by the class that was recorded at the save.

    `ephemeral_only` keeps the permanent ones and the newest ephemeral one; `all_non_permanent`
    keeps the permanent ones alone; `never` removes none.
    """

    spelled: ClassVar[str] = "remove"

    remove: Removal = "ephemeral_only"

    def __post_init__(self) -> None:
        if self.remove not in get_args(Removal):
            known = ", ".join(repr(name) for name in get_args(Removal))
            raise UsageError(f"ByClass: remove={self.remove!r} must be one of {known}")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick the permanent ones that count towards quotas, and the ephemeral ones to keep."""
        if self.remove == "never":
            return dict.fromkeys(range(len(newest_first)), str(self))
        usable = counting(newest_first)
        ephemeral = [p for p in usable if newest_first[p].save_class == "ephemeral"]
        chosen = {p: "permanent" for p in usable if newest_first[p].save_class == "permanent"}
        if self.remove == "ephemeral_only":
            chosen |= dict.fromkeys(ephemeral[:1], "newest ephemeral")
        return chosen

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `remove:ephemeral_only`."""
        return cls(cast(Removal, text or "ephemeral_only"))

    def __str__(self) -> str:
        return f"remove {self.remove}"


def _first_of_each(
    newest_first: Sequence[Candidate], bucket: Callable[[datetime], int]
) -> list[int]:
    """Return the positions of the oldest in each calendar bucket, newest bucket first.

    Buckets are ordered by the recorded order of saves, so a clock that was wrong for a day does
    not push out others for ever.
    """
    oldest: dict[int, int] = {}
    for position in counting(newest_first):
        created = recorded_time(newest_first[position].created)
        if created is not None:
            oldest[bucket(created)] = position  # later positions are older
    return sorted(oldest.values())  # positions are newest first


def _missing_counter(counting: Sequence[Candidate], time: Time) -> str:
    if any(time.unit.of(entry.timestamp) is not None for entry in counting):
        return ""
    return f"the counter {argument_name(time.unit)!r}"


def recorded_time(created: str) -> datetime | None:
    """Parse the recorded time, in UTC; None where it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(created)
        return moment.astimezone(timezone.utc) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _check_quota(rule: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{rule}: n={n!r} must be a whole number, at least 1")
