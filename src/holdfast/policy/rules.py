"""Built-in retention rules, which pick the checkpoints to keep, and parsing of their texts.

A new one is a class in this file; its `spelled` and `parse` bring it to the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import ClassVar, Literal, cast, get_args

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.manifest import Mode
from holdfast.policy.clock import Time, argument_name, parse
from holdfast.policy.direction import mode_for
from holdfast.policy.rule import MAIN, BySaver, Candidate, Rule, SaveClass, counting, flat

Removal = Literal["ephemeral_only", "all_non_permanent", "never"]
_BEST = re.compile(
    r"(?P<metric>.+?)(?::(?P<mode>min|max))?(?::(?P<n>[0-9]{1,18}))?(?::wait=(?P<wait>[0-9]{1,18}))?"
)
_SIZES = {
    **dict.fromkeys(("", "B"), 1),
    **{unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_SAVER = re.compile(r"(?P<saver>[^:= ]*)\s*=(?P<rule>.*)", re.DOTALL)


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
    """Keep only what no rule may delete, such as the newest checkpoint; another tier has the rest.

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
            raise UsageError(f"Last: save_class={self.save_class!r}: choose from {known}")

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


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Best(Rule):
    """Keep the `n` with the lowest (or highest) value of a metric; of equal ones the older.

    A checkpoint without that metric, or with one that is not finite, is never picked. `mode` may
    be omitted if the name of the metric shows it, as "val/loss" or "eval_accuracy" do. For a
    metric that is measured after the save, `wait` is the number of checkpoints without a value
    that are also kept, the newest ones; older ones are deleted without a value.
    """

    spelled: ClassVar[str] = "best"

    metric: str
    n: int
    mode: Mode
    wait: int = field(default=0, kw_only=True)

    @check_arguments(but=("metric", "n", "mode", "wait"))
    def __init__(self, metric: str, n: int = 1, mode: Mode | None = None, *, wait: int = 0) -> None:
        if not isinstance(metric, str) or not metric:
            raise UsageError(
                f"Best: metric={metric!r} must be the name of a metric, as in Best('loss', 2)"
            )
        _check_quota("Best", n)
        if wait != 0:
            _check_quota("Best", wait, name="wait")
        way = f"Best({metric!r}, mode='max') or mode='min', as text best:{metric}:max or :min"
        known = mode_for(metric, mode, what="Best", say=f"say {way}")
        object.__setattr__(self, "metric", metric)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "mode", known)
        object.__setattr__(self, "wait", wait)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick the `n` best that count towards quotas, and the newest that wait for a value."""
        sign = 1 if self.mode == "min" else -1
        waiting = [p for p in counting(newest_first) if self.awaits(newest_first[p])][: self.wait]
        why = f"waits for {self.metric}, {len(waiting)} of at most {self.wait}"
        scores = [
            (sign * value, newest_first[position].order, position)
            for position in counting(newest_first)
            if (value := newest_first[position].metrics.get(self.metric)) is not None
            and math.isfinite(value)
        ]
        best = {position: str(self) for _, _, position in sorted(scores)[: self.n]}
        return dict.fromkeys(waiting, why) | best

    def awaits(self, entry: Candidate) -> bool:
        """Whether a checkpoint has no value yet, and the rule waits for it."""
        return self.wait > 0 and entry.counts and self.metric not in entry.metrics

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name the metric if no checkpoint has a finite value of it, unless the rule waits."""
        if self.wait or any(
            math.isfinite(entry.metrics.get(self.metric, math.nan)) for entry in counting
        ):
            return ""
        known = sorted({name for entry in counting for name in entry.metrics})
        recorded = f" (recorded: {', '.join(map(repr, known[:10]))})" if known else ""
        what = "a finite value of the metric" if self.metric in known else "the metric"
        return f"{what} {self.metric!r}{recorded}"

    def quota(self) -> int | None:
        """Return `n`, plus those that wait."""
        return self.n + self.wait

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `best:METRIC`, `best:METRIC:max`, `best:METRIC:min:3` or `best:METRIC:wait=5`."""
        match = _BEST.fullmatch(text)
        if match is None:
            raise UsageError(f"best:{text}: expected best:METRIC:min:3:wait=5, or a part of it")
        return cls(
            match["metric"],
            int(match["n"] or 1),
            cast(Mode | None, match["mode"]),
            wait=int(match["wait"] or 0),
        )

    def __str__(self) -> str:
        many = "" if self.n == 1 else f"{self.n} "
        waits = f", wait {self.wait}" if self.wait else ""
        return f"best {many}{self.metric} ({self.mode}{waits})"


def best_rules(*rules: Rule) -> tuple[Best, ...]:
    """List the rules `Best` in some rules, one for each metric; that of `main` comes first."""
    found: dict[str, Best] = {}
    for rule in rules:
        for part, _, _ in flat(rule):
            if isinstance(part, Best):
                found.setdefault(part.metric, part)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, init=False, repr=False)
class EveryNth(Rule):
    """Keep, for every multiple of `interval`, the first checkpoint at or after it.

    Multiples start at one interval; a checkpoint at exactly zero is kept too. Of several with the
    same count, such as those within an epoch, the earliest step is kept; if training went back and
    passed that step twice, the newer one. Hours and the like are hours of training; see `Hourly`
    and `Daily` for the calendar.
    """

    spelled: ClassVar[str] = "every"

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        object.__setattr__(self, "interval", parse(interval, what="EveryNth: interval"))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick, of those that count towards quotas, the first at or after each multiple."""
        first: dict[int, tuple[int | float, int, int]] = {}
        for position in counting(newest_first):
            timestamp = newest_first[position].timestamp
            count = self.interval.unit.read_progress(timestamp)
            if count is None or 0 < count < self.interval.value:
                continue
            multiple = int(count // self.interval.value)
            place = (count, timestamp.step, position)
            first[multiple] = min(first.get(multiple, place), place)
        return {position: str(self) for _, _, position in first.values()}

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
class OnePerPeriod(Rule):
    """Keep the first checkpoint of each calendar period, of the newest `n` with any; None: all."""

    period: ClassVar[str]
    """Format of dates, for strftime, that differ between two periods."""

    n: int | None = None

    def __post_init__(self) -> None:
        _check_quota(type(self).__name__, 1 if self.n is None else self.n)

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick one for each period, among those that count towards quotas.

        Periods are ordered by the recorded order of saves, so a clock that was wrong for a day does
        not push out others for ever.
        """
        oldest: dict[str, int] = {}
        for position in counting(newest_first):
            created = recorded_time(newest_first[position].created)
            if created is not None:
                oldest[created.strftime(self.period)] = position  # later positions are older
        return dict.fromkeys(sorted(oldest.values())[: self.n], str(self))  # newest first

    def quota(self) -> int | None:
        """Return `n`."""
        return self.n

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse the name alone, or with a number, as in `daily:7`."""
        return cls(whole_number(text) if text else None)

    def __str__(self) -> str:
        return self.spelled if self.n is None else f"{self.spelled} {self.n}"


@dataclass(frozen=True, slots=True, repr=False)
class Hourly(OnePerPeriod):
    """Keep the first checkpoint of each hour (UTC), of the newest `n` hours with any; None: all.

    The hour is the one that was recorded when it was saved.
    """

    spelled: ClassVar[str] = "hourly"
    period: ClassVar[str] = "%Y-%m-%d %H"


@dataclass(frozen=True, slots=True, repr=False)
class Daily(OnePerPeriod):
    """Keep the first checkpoint of each day (UTC), of the newest `n` days with any; None: all.

    The day is the one that was recorded when it was saved.
    """

    spelled: ClassVar[str] = "daily"
    period: ClassVar[str] = "%Y-%m-%d"


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
            if (count := self.span.unit.read_progress(newest_first[position].timestamp)) is not None
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
        """Name the budget's limit, if every checkpoint is larger than it."""
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
            raise UsageError(f"ByClass: remove={self.remove!r}: choose from {known}")

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


def _missing_counter(counting: Sequence[Candidate], time: Time) -> str:
    if any(time.unit.read_progress(entry.timestamp) is not None for entry in counting):
        return ""
    return f"the counter {argument_name(time.unit)!r}"


def recorded_time(created: str) -> datetime | None:
    """Parse the recorded time, in UTC; None where it cannot be parsed."""
    try:
        moment = datetime.fromisoformat(created)
        return moment.astimezone(timezone.utc) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _check_quota(rule: str, n: int, *, name: str = "n") -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{rule}: {name}={n!r} must be a whole number, at least 1")


def whole_number(text: str) -> int:
    """Parse a whole number."""
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise UsageError(f"{text!r}: expected a whole number, as in 'last:3'")
    return int(text)


def number_of_bytes(text: str, *, what: str = "") -> int:
    """Parse a size such as `500GB` or `1.5TiB` into bytes; an error begins with `what`."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        raise UsageError(f"{what}{text!r}: expected a size such as 500GB or 1.5TiB")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_rule(text: str) -> Rule:
    """Parse a rule from `text`: parts separated by commas, combined as by `|`.

    A part is `all`, `last:N[:CLASS]`, `best:METRIC[:min|max][:N][:wait=M]`, `every:INTERVAL`,
    `hourly[:N]`, `daily[:N]`, `within:SPAN`, `budget:SIZE` or `remove:CLASSES`. The suffix
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
            parsed = _parse_part(rule.strip())
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
    """Convert an argument to a rule, which may be given as text; `what` names the argument."""
    if isinstance(given, str):
        try:
            return parse_rule(given)
        except UsageError as error:
            raise UsageError(f"{what}={given!r}: {error}") from error
    if given is not None and not isinstance(given, Rule):
        raise UsageError(f"{what}={given!r} must be a rule such as Last(3) or 'last:3'")
    return given


def _parse_part(text: str) -> Rule:
    picked, _, dropped = text.partition(" without ")
    rule = _simple(picked.strip())
    if not dropped:
        return rule
    return rule.then_drop(*(name.strip() for name in dropped.split("+")))


def _simple(text: str) -> Rule:
    name, colon, value = text.partition(":")
    known: dict[str, type[Rule]] = {}
    rules = Rule.__subclasses__()
    for rule in rules:
        rules += rule.__subclasses__()  # the loop comes to these, too
        if rule.spelled and not issubclass(rule, known.get(rule.spelled, ())):
            known[rule.spelled] = rule
    if name not in known or (colon and not value):
        raise UsageError(f"{text!r}: unknown rule; known: {', '.join(known)}, as in 'last:3'")
    return known[name].parse(value)
