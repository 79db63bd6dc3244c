"""Saves that `maybe_save` makes because a validation metric is one that a rule `Best` would keep.

Trainers and bridges make these saves themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.errors import SaveSkipped
from holdfast.events import Emitter
from holdfast.ownership.annotations import checked_metrics
from holdfast.policy.best import BestRule, BestSaves, MetricChanges
from holdfast.policy.direction import words_of
from holdfast.policy.savers import Due
from holdfast.results import PendingSave, metrics_by_step
from holdfast.root.catalog import Catalog, Entry

_OF_TRAINING = frozenset({"loss", "train", "training", "batch", "step"})
"""Words in the name of a metric that is expected to be measured at each step."""


class ValidatedSaves:
    """Decides whether `maybe_save` saves because a rule `Best` would keep what was measured."""

    def __init__(
        self,
        rules: Sequence[BestRule],
        catalog: Catalog,
        emit: Emitter,
        *,
        is_alone: bool,
        is_leader: bool,
    ) -> None:
        """Decide for these rules. Ranks cannot decide alone: there only a warning is logged."""
        self._best = BestSaves(rules)
        self._measured = MetricChanges(self._best.metric_names)
        self._catalog = catalog
        self._emit = emit
        self._is_alone = is_alone
        self._watches = bool(self._best) and (is_alone or is_leader)
        self._begun: list[PendingSave] = []
        """Saves whose outcome is not known yet."""
        self._standing: Entry | None = None
        """The checkpoint that the run continues from, until the metrics of the lineage are read."""
        self._has_warned = self._has_warned_of_repeats = False
        self._unsaved: frozenset[str] = frozenset()
        """Names of the metrics with new values at this step for which nothing is saved."""

    def __bool__(self) -> bool:
        """Whether any metric is watched."""
        return self._watches

    def start_from_checkpoint(self, standing: Entry) -> None:
        """Continue from a checkpoint."""
        self._standing = standing
        self._measured.restart_after_step(standing.step)
        self._begun.clear()

    def find_due_save(self, step: int, metrics: Mapping[str, Any], event: str) -> Due | None:
        """Return the save that is due because of new values of metrics, if any."""
        if not self._watches:
            return None
        new = self._measured.find_new_values(step, metrics, event)
        if new.repeated and not self._has_warned_of_repeats:
            self._warn_of_repeats(step, new.repeated)
        if new.validated and self._is_alone:
            self._unsaved = frozenset()
            return self._best.save_for(self._keeping(step, metrics, new.validated))
        self._unsaved = new.validated or new.others
        return None

    def not_due(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note that the step of the last call of `find_due_save` is not saved for any reason."""
        if self._unsaved and not self._has_warned:
            self._warn_of_unsaved(step, metrics, self._unsaved)

    def began(self, pending: PendingSave, metrics: Mapping[str, float]) -> None:
        """Note that a checkpoint with these metrics is being saved."""
        if self._watches and not isinstance(pending.failure(), SaveSkipped):
            self._best.begun(pending.step, metrics)
            self._begun.append(pending)

    def _keeping(self, step: int, metrics: Mapping[str, Any], names: Collection[str]) -> list[int]:
        if self._standing is not None:
            entries = self._catalog.lineage_entries(opens_all=False)
            self._best.set_known_metrics(metrics_by_step(entries, self._standing.step))
            self._standing = None
        ended = [pending for pending in self._begun if pending.done()]
        self._begun = [pending for pending in self._begun if pending not in ended]
        for pending in ended:
            if pending.failure() is not None or pending.committed.result().unhealthy:
                self._best.forget_save(pending.step)
        return self._best.keeping(step, checked_metrics({name: metrics[name] for name in names}))

    def _warn_of_repeats(self, step: int, names: Collection[str]) -> None:
        self._has_warned_of_repeats = True
        self._emit(
            "warning",
            f"step {step}: {', '.join(sorted(names))} has the same value at several steps in a "
            "row, so it may be older than the weights that are saved with it, and a rule Best "
            "would keep the wrong ones: pass a metric only at the step whose weights were measured",
            step=step,
        )

    def _warn_of_unsaved(
        self, step: int, metrics: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Warn, once, of a value that a rule would keep and that is not saved."""
        if self._is_alone:
            # To read a tensor would make each step wait for its device.
            names = {name for name in names if not hasattr(metrics[name], "device")}
            names = {name for name in names if not _OF_TRAINING.intersection(words_of(name))}
        if not names or not self._keeping(step, metrics, names):
            return
        names = {name for name in names if self._best.knows(name)}
        if not names:
            return  # nothing is saved yet, and so nothing lost
        self._has_warned = True
        which = ", ".join(f"{name}={float(metrics[name]):g}" for name in sorted(names))
        why = (
            "it is new at each step, as a value of training is"
            if self._is_alone
            else "several ranks do not save for it"
        )
        self._emit(
            "warning",
            f"step {step} has the best value so far, {which}, and is not saved for that: {why}. "
            "The rule chooses among the steps that are saved. To save at validations, give "
            'every=… | On("evaluation"), and maybe_save(…, event="evaluation") after each',
            step=step,
        )
