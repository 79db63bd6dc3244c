"""Saves at validations for rules `Best`, and the best checkpoint at the end of a fit.

An interval of saves and one of validations may never meet, and then a rule `Best` would find its
metric in no checkpoint. So the state of a validation is saved where such a rule would keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.checkpoint import Checkpoint, describe
from holdfast.engine.options import Checkpoints
from holdfast.engine.roots.best import BEST
from holdfast.engine.tiers.catalog import catalog_of
from holdfast.engine.tiers.tiered import Rules
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.policy.rule import MAIN, flat
from holdfast.policy.rules import Best
from holdfast.policy.savers import Due
from holdfast.policy.schedule import together
from holdfast.train.evaluation.watching import OF_VALIDATION
from holdfast.train.parallel.group import Group
from holdfast.train.training import Metrics


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
    def due(self) -> Due:
        """The save that the rule asks for."""
        named = () if self.saver == MAIN else (self.saver,)
        reason = f"best {self.rule.metric}"
        return Due("permanent", reason, savers=named, components=self.components)


def best_rules(checkpoints: Checkpoints) -> tuple[BestRule, ...]:
    """List the rules `Best` of a run, of all savers and both tiers, each once."""
    if checkpoints.root is None:
        return ()
    rules = Rules.of(checkpoints.root, checkpoints.keep, checkpoints.savers)
    components = {saver.name: saver.components for saver in checkpoints.savers}
    found = [
        BestRule(rule=part, saver=saver, components=components.get(saver))
        for rule in (rules.remote, rules.local)
        for part, saver, _ in flat(rule)
        if isinstance(part, Best)
    ]
    return tuple(dict.fromkeys(found))


class BestSaves:
    """Decides whether the state of a validation is saved: where a rule `Best` would keep it."""

    def __init__(self, rules: Sequence[BestRule]) -> None:
        """Decide for those of `rules` that are about metrics of validations."""
        self._rules = [item for item in rules if item.rule.metric.startswith(OF_VALIDATION)]
        self._names = {item.rule.metric for item in self._rules}
        self._known: dict[int, Metrics] = {}
        """Metrics of the checkpoints that exist or are being saved, by step."""

    def begin(self, manager: CheckpointManager, group: Group) -> None:
        """Read the metrics of existing checkpoints; all ranks call it, and use the leader's."""
        if not self._rules:
            return
        mine: dict[int, Metrics] = {}
        if group.is_leader:
            healthy = [found for found in reversed(manager.list()) if not found.unhealthy]
            mine = {found.step: self._of(found.metrics) for found in healthy}
        self._known = group.gather(mine)[0]

    def due(self, step: int, metrics: Metrics) -> Due | None:
        """Return the save that is due after a validation with these metrics, if any."""
        now = self._of(metrics)
        return together([item.due for item in self._rules if self._is_kept(item, step, now)])

    def begun(self, step: int, metrics: Metrics) -> None:
        """Note that a checkpoint with these metrics is being saved."""
        if found := self._of(metrics):
            self._known[step] = found

    def failed(self, step: int) -> None:
        """Forget the checkpoint of a step: it failed, or does not count."""
        self._known.pop(step, None)

    def _of(self, metrics: Metrics) -> Mapping[str, float]:
        return {name: metrics[name] for name in self._names if name in metrics}

    def _is_kept(self, item: BestRule, step: int, now: Metrics) -> bool:
        name = item.rule.metric
        earlier = [
            found[name]
            for at, found in self._known.items()
            if at != step and math.isfinite(found.get(name, math.nan))
        ]
        return name in now and item.keeps(now[name], earlier)


def finder(checkpoints: Checkpoints) -> Callable[[], Checkpoint | None]:
    """Return a function that finds the best checkpoint in a root, or None; claims nothing."""
    root = checkpoints.root

    def find() -> Checkpoint | None:
        if root is None:
            return None
        catalog = catalog_of(root, Emitter(), checkpoints.encrypt)
        try:
            entry = catalog.resolve(BEST)
        except NoCheckpoint:
            return None
        return describe(catalog.home(entry.folder), entry)

    return find


def check_load_best(checkpoints: Checkpoints, *, validates: bool) -> None:
    """Raise `UsageError` if no checkpoint of this run could be the best."""
    if checkpoints.root is None:
        raise UsageError("load_best=True: nothing is saved (checkpoints=None); give a root")
    if not validates and not best_rules(checkpoints):
        raise UsageError(
            "load_best=True: nothing says which checkpoint is the best; give validate=…, or "
            'keep=Best("loss")'
        )
