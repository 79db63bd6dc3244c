"""Chooses validations that trigger a save: a retention rule `Best` would keep their state.

An interval of saves and one of validations may never meet, and then a rule `Best` would find its
metric in no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from holdfast.policy.direction import VALIDATION, words_of
from holdfast.policy.rule import MAIN, Rule, flat
from holdfast.policy.rules import Best
from holdfast.policy.savers import Due, SideSaver
from holdfast.policy.schedule import together
from holdfast.policy.triggers import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRule:
    """A rule `Best` of a run's retention, with the saver whose checkpoints it is about."""

    rule: Best
    saver: str
    components: tuple[str, ...] | None
    """What that saver saves; None: the whole state."""

    def keeps(self, value: float, others: Sequence[float]) -> bool:
        """Whether the rule would keep a new checkpoint with this value, beside earlier ones."""
        sign = 1 if self.rule.mode == "min" else -1
        num_as_good = sum(sign * other <= sign * value for other in others)
        return math.isfinite(value) and num_as_good < self.rule.n

    @property
    def requested_save(self) -> Due:
        """The save that the rule asks for."""
        named = () if self.saver == MAIN else (self.saver,)
        reason = f"best {self.rule.metric}"
        return Due("permanent", reason, savers=named, components=self.components)


def best_rules_of(rules: Sequence[Rule], savers: Sequence[SideSaver]) -> tuple[BestRule, ...]:
    """List the rules `Best` in some rules, of all savers, each once."""
    components = {saver.name: saver.components for saver in savers}
    found = [
        BestRule(rule=part, saver=saver, components=components.get(saver))
        for rule in rules
        for part, saver, _ in flat(rule)
        if isinstance(part, Best)
    ]
    return tuple(dict.fromkeys(found))


_MAX_REPEATS = 5
"""Steps in a row at which a metric may be one object: a constant, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValues:
    """Names of the metrics with new values at a step."""

    validated: frozenset[str]
    """Those that a validation measured."""
    others: frozenset[str]
    """Those that are new at each step, as of training."""
    repeated: frozenset[str]
    """Those that are the same object at the `_MAX_REPEATS`th step in a row."""


class MetricChanges:
    """Finds the metrics that a loop has just measured among those that it passes at each step.

    A value is new if the call before had none or another one: some loops pass on the last value
    that they know. A new value at two steps in a row is one of training, such as a batch's loss,
    unless the name says that a validation measures it. Values are not read, only compared.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Watch these metrics."""
        self._names = {name: bool(VALIDATION.intersection(words_of(name))) for name in names}
        self.restart_after_step(0)

    def restart_after_step(self, step: int) -> None:
        """Start after a step, of which nothing is known: its metrics may be those of training."""
        self._step, self._before = step, dict[str, object]()
        self._were_new = {*self._names}
        self._num_repeats = dict.fromkeys(self._names, 0)

    def find_new_values(self, step: int, metrics: Mapping[str, object], event: str) -> NewValues:
        """Return which metrics of a step are new; `event` is "evaluation" after a validation."""
        now = {name: metrics[name] for name in self._names if name in metrics}
        new = {
            name
            for name, value in now.items()
            if not _is_same_reading(value, self._before.get(name))
        }
        each_step = self._were_new if step <= self._step + 1 else set()
        measured = {
            name
            for name in new
            if event == "evaluation" or self._names[name] or name not in each_step
        }
        for name in self._names:
            # Equal values of two validations are common: a model may do no better for long.
            is_same = name in now and now[name] is self._before.get(name)
            is_repeat = is_same and step == self._step + 1
            self._num_repeats[name] = self._num_repeats[name] + 1 if is_repeat else 0
        self._step, self._before, self._were_new = step, now, new
        repeated = (n for n, number in self._num_repeats.items() if number == _MAX_REPEATS - 1)
        return NewValues(
            validated=frozenset(measured),
            others=frozenset(new - measured),
            repeated=frozenset(repeated),
        )


def _is_same_reading(value: object, before: object) -> bool:
    return value is before or (isinstance(value, Real) and value == before)


class BestSaves:
    """Decides whether the state of a validation is saved: where a rule `Best` would keep it."""

    def __init__(self, rules: Sequence[BestRule]) -> None:
        """Decide for these rules."""
        # What a rule waits for is measured elsewhere, and causes no save.
        self._rules = tuple(item for item in rules if not item.rule.wait)
        self._names = {item.rule.metric for item in self._rules}
        self._known: dict[int, Metrics] = {}
        """Metrics of the checkpoints that exist or are being saved, by step."""

    def __bool__(self) -> bool:
        """Whether there is any rule to decide for."""
        return bool(self._rules)

    @property
    def metric_names(self) -> Collection[str]:
        """The metrics that a rule is about."""
        return self._names

    def set_known_metrics(self, known: Mapping[int, Metrics]) -> None:
        """Set the metrics of existing checkpoints, by step."""
        self._known = {step: self.select_metrics(metrics) for step, metrics in known.items()}

    def find_best_save(self, step: int, metrics: Metrics) -> Due | None:
        """Return the save that is due after a validation with these metrics, if any."""
        return self.save_for(self.keeping(step, metrics))

    def keeping(self, step: int, metrics: Metrics) -> list[int]:
        """Return the numbers of the rules that would keep a checkpoint with these metrics."""
        now = self.select_metrics(metrics)
        return [at for at, item in enumerate(self._rules) if self._is_kept(item, step, now)]

    def save_for(self, numbers: Sequence[int]) -> Due | None:
        """Return the save that rules ask for, given their numbers."""
        return together([self._rules[number].requested_save for number in numbers])

    def knows(self, name: str) -> bool:
        """Whether a checkpoint that exists or is being saved has a metric."""
        return any(name in found for found in self._known.values())

    def begun(self, step: int, metrics: Metrics) -> None:
        """Note that a checkpoint with these metrics is being saved."""
        if found := self.select_metrics(metrics):
            self._known[step] = found

    def forget_save(self, step: int) -> None:
        """Forget the checkpoint of a step: it failed, or does not count."""
        self._known.pop(step, None)

    def select_metrics(self, metrics: Metrics) -> dict[str, float]:
        """Return those metrics that a rule is about."""
        return {name: metrics[name] for name in self._names if name in metrics}

    def _is_kept(self, item: BestRule, step: int, now: Metrics) -> bool:
        name = item.rule.metric
        earlier = [
            found[name]
            for at, found in self._known.items()
            if at != step and math.isfinite(found.get(name, math.nan))
        ]
        return name in now and item.keeps(now[name], earlier)
