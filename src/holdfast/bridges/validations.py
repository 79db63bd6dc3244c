"""Validations of another library's trainer, as its saves see them.

A checkpoint has the metrics of a validation only if it has the weights that were validated. So
where a rule `Best` would keep these, they are saved at the validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.bridges.parts import Agree, only_leader
from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.errors import SaveSkipped, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import Mode
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.policy.best import BestSaves
from holdfast.policy.direction import direction
from holdfast.policy.savers import Due
from holdfast.policy.schedule import together
from holdfast.policy.triggers import Event
from holdfast.results import Checkpoint, PendingSave, metrics_by_step

_WORDS = {"min": "lower", "max": "higher"}


def check_direction(
    checkpoints: Checkpoints, emit: Emitter, metric: str, mode: Mode, who: str
) -> None:
    """Compare the direction that a trainer's option or callback has for a metric with ours."""
    for item in best_rules(checkpoints):
        if item.rule.metric == metric and item.rule.mode != mode:
            raise UsageError(
                f"keep={item.rule}: {who} has the other direction, {mode!r}: correct one of them"
            )
    shown = direction(metric)
    if shown is not None and shown != mode:
        emit("warning", f"{who} takes {metric!r} as better if {_WORDS[mode]}; is that a mistake?")


class BridgeValidations:
    """Metrics of validations at the present step, and the saves that they make due."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        manager: CheckpointManager,
        agree: Agree,
        *,
        resumed: Checkpoint | None,
        to_come: bool,
    ) -> None:
        """Read the metrics of the checkpoints that the run goes on from, and those before.

        All ranks call it, and the leader reads. `to_come`: whether the trainer validates at all.
        Until it has done so once, no warning says that a rule's metric is missing.
        """
        self._manager, self._agree = manager, agree
        self._best = BestSaves(best_rules(checkpoints))
        self._step, self._metrics = -1, dict[str, float]()
        self._was_within = False
        """Whether a validation was within the present step."""
        self._begun: list[PendingSave] = []
        """Saves whose outcome is not known yet."""
        self._awaits_first = to_come
        if to_come:
            manager.expect_metrics()
        if self._best and resumed is not None:
            what = "reading the metrics of earlier checkpoints"
            known = only_leader(
                agree, what, lambda: _read_earlier_metrics(checkpoints, resumed.step)
            )
            self._best.set_known_metrics(known or {})  # the leader decides for all

    @property
    def are_watched(self) -> bool:
        """Whether a rule `Best` looks at metrics."""
        return bool(self._best)

    def ended(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Note the end of a validation of the weights at `step`.

        None: it was within a step, where nothing can be saved.
        """
        self._was_within |= step is None
        if step is not None:
            before = self._metrics if step == self._step else {}
            self._step, self._metrics = step, {**before, **self._best.select_metrics(metrics)}

    def maybe_save(
        self,
        step: int,
        *,
        events: Sequence[Event],
        metrics: Mapping[str, float],
        wanted: Due | None = None,
        **counters: Any,
    ) -> None:
        """Save what is due by the manager's policy, by a rule `Best`, or because it is `wanted`."""
        happened, dues = [*events], [] if wanted is None else [wanted]
        if self.was_at(step):
            happened.append("evaluation")
            dues += self._find_due_saves(step)
        pending = self._manager.maybe_save(
            step, metrics=metrics, event=happened, wanted=together(dues), **counters
        )
        if self._step == step and self._awaits_first:
            self._awaits_first = False
            self._manager.expect_metrics(step)
        self._step, self._was_within = -1, False
        if self._best and pending is not None and not isinstance(pending.failure(), SaveSkipped):
            self._best.begun(step, metrics)
            self._begun.append(pending)

    def was_at(self, step: int) -> bool:
        """Whether a validation was at this step or within it, and no call of `maybe_save` since."""
        return self._was_within or self._step == step

    def _find_due_saves(self, step: int) -> list[Due]:
        if not self._best or step != self._step:
            return []
        self._forget_unhealthy()
        due = self._best.save_for(self._agree(self._best.keeping(step, self._metrics)))
        return [] if due is None else [due]

    def _forget_unhealthy(self) -> None:
        ended = [pending for pending in self._begun if pending.done()]
        self._begun = [pending for pending in self._begun if pending not in ended]
        for pending in ended:
            if pending.failure() is not None or pending.committed.result().unhealthy:
                self._best.forget_save(pending.step)


def _read_earlier_metrics(checkpoints: Checkpoints, step: int) -> dict[int, Mapping[str, float]]:
    assert checkpoints.root is not None, "a bridge needs a root"
    catalog = catalog_of(checkpoints.root, Emitter(()), checkpoints.encrypt)
    return metrics_by_step(catalog.lineage_entries(opens_all=False), step)
