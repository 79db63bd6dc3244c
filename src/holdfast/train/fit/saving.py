"""Saves of the Trainer: when one may begin, health checks of the state, and retries.

`FitStatus` says when one may begin; failures are those of invariant 8 in docs/design.md. All ranks
must begin and retry a save at the same step (tests/train/parallel/test_ranks.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError, SaveFailed, SaveSkipped, listing
from holdfast.events import Event as ManagerEvent
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.savers import Due
from holdfast.policy.schedule import covers, together
from holdfast.policy.triggers import Event
from holdfast.results import PendingSave
from holdfast.train.averages import EqualAverage
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.measuring import read_numbers
from holdfast.train.evaluation.validation import Restarting, undisturbed
from holdfast.train.group import Group
from holdfast.train.parts import Policy, TrainerParts
from holdfast.train.step.step import Update, moved
from holdfast.train.strategies import local
from holdfast.train.training import Metrics

logger = logging.getLogger("holdfast")

MAX_FAILURES_IN_A_ROW = 3
_ONLY_STEP: Sequence[Event] = ["step"]


class Saves:
    """Event sink of saves that a manager has begun, in order, and their time in the background."""

    def __init__(self) -> None:
        self.begun: list[PendingSave] = []
        """Saves whose end no hook was called for yet."""
        self._durations_s: dict[int, float] = {}

    def __call__(self, event: ManagerEvent) -> None:
        """Record how long a committed save took, from the manager's event, on any thread."""
        if event.kind == "committed" and event.step is not None:
            self._durations_s[event.step] = event.fields["save_s"]

    def collect_costs(self, pending: PendingSave, nbytes: int) -> dict[str, float]:
        """Return the cost metrics of a durable save; forgets those of earlier steps."""
        for step in list(self._durations_s):
            if step < pending.step:
                del self._durations_s[step]
        return {
            "save/stall_s": pending.stall_s,
            "save/duration_s": self._durations_s[pending.step],
            "save/nbytes": float(nbytes),
        }


class StepSaver:
    """Saves at the ends of steps; a failed save is retried, and the third in a row raises."""

    def __init__(
        self,
        parts: TrainerParts,
        manager: CheckpointManager,
        saves: Saves,
        *,
        saved_step: int | None,
    ) -> None:
        """Start with the manager's `saves`; `saved_step` has a permanent checkpoint already."""
        self._group = parts.group
        self._manager = manager
        self._saves = saves
        self._begun = saves.begun
        self._status = parts.status
        self._counters = parts.counters
        self._callbacks = parts.callbacks
        self._best = parts.best
        self._saved_step = saved_step
        self._newest_own: PendingSave | None = None
        """Newest save that this object began, not a callback."""
        self._num_failures = 0
        self._retry: Due | None = None
        self._failed_step: int | None = None
        self._num_reported = 0
        self._failed_somewhere: list[int] | None = None
        """Whether each save that all ranks know to have ended has failed on any of them, in order;
        None: this rank alone decides when one has ended."""

    @property
    def num_ended(self) -> int:
        """Number of saves that have ended on this rank, before the first one that is under way."""
        return self._num_reported + sum(1 for _ in takewhile(PendingSave.done, self._begun))

    def agree_on_ended_saves(self, num_ended: int) -> None:
        """Agree on the saves that ended on all ranks, to report these; one failure fails all."""
        ended = self._begun[: num_ended - self._num_reported]
        failed = [int(save.failure() is not None) for save in ended]
        self._failed_somewhere = self._group.max(failed) if failed else []

    def handle_events(self, events: Sequence[Event], metrics: Metrics) -> None:
        """Call hooks for saves that have ended, and begin one if it is due at any of `events`."""
        is_plain = events == _ONLY_STEP and not self._begun and self._retry is None
        if is_plain and self._manager.is_quiet(self._counters.step):
            self._manager.record_metrics(self._counters.step, metrics)
            return
        self._report_ended()
        vetoes = self._callbacks.vetoes
        best = (
            self._best.find_best_save(self._counters.step, metrics)
            if "evaluation" in events
            else None
        )
        wanted = [due for due in (self._due_retry(vetoes), best) if due is not None]
        self._save_if_due(events, metrics, together(wanted), vetoes)
        self._report_ended()

    def save_and_wait(
        self, events: Sequence[Event], metrics: Metrics, reason: str, *, again: bool
    ) -> None:
        """Save this step, unless it is saved and not `again` changed; wait until it is durable."""
        self._await()
        if again:
            self._saved_step = None
        while self._saved_step != self._counters.step:
            if not self._save_if_due([*events, "end"], metrics, Due("permanent", reason)):
                return
            self._await()

    def save_after_signal(self, events: Sequence[Event], metrics: Metrics) -> None:
        """Save the current step after a signal, permanent or not, and wait until it is durable."""
        self.handle_events([*events, "signal"], metrics)
        self.finish_saves(metrics)

    def save_again(self, due: Due, metrics: Metrics) -> None:
        """Save the current step again, with metrics that were not known before."""
        self._save_if_due([], metrics, due)
        self._report_ended()

    def wait_for_newest(self) -> str | None:
        """Wait for the save under way, and return the newest checkpoint's folder."""
        with suppress(SaveFailed):
            self._manager.wait(uploads=False)
        return next((checkpoint.folder for checkpoint in self._manager.list()), None)

    def finish_saves(self, metrics: Metrics) -> None:
        """Wait until no save is under way, and retry failed ones."""
        self._await()
        while self._retry is not None and self._save_if_due([], metrics, self._retry):
            self._await()

    def _save_if_due(
        self,
        events: Sequence[Event],
        metrics: Metrics,
        wanted: Due | None,
        vetoes: Collection[str] = (),
    ) -> bool:
        """Begin a save if one is due; False if none is, or an unhealthy state is skipped."""
        pending = self._manager.maybe_save(
            self._counters.step, metrics=metrics, event=events, vetoes=vetoes, wanted=wanted
        )
        self._newest_own = pending if pending is not None else self._newest_own
        if pending is None or isinstance(pending.failure(), SaveSkipped):
            return False
        self._best.begun(self._counters.step, metrics)
        return True

    def _due_retry(self, vetoes: Collection[str]) -> Due | None:
        """Return the save that failed at an earlier step, unless one under way replaces it."""
        again = self._retry
        if again is None or self._failed_step == self._counters.step:
            return None
        if vetoes and again.save_class == "ephemeral":
            return None
        return None if any(covers(begun.due, again) for begun in self._begun) else again

    def _await(self) -> None:
        with suppress(SaveFailed):
            # Not the save's own wait: only the manager's has a deadline.
            self._manager.wait(uploads=False)
        if not self._group.is_alone:
            self.agree_on_ended_saves(
                self._num_reported + len(self._begun)
            )  # every rank has waited
        self._report_ended()

    def _report_ended(self) -> None:
        """Call hooks for saves that have ended; a third failure and ownership errors are raised."""
        known = self._failed_somewhere
        while self._begun and (self._begun[0].done() if known is None else known):
            begun = self._begun.pop(0)
            self._num_reported += 1
            has_failed = bool(known and known.pop(0))
            try:
                checkpoint = begun.wait()
                if has_failed:
                    raise SaveFailed(
                        f"the save of step {begun.step} failed on another rank, or is not known "
                        "there to have committed",
                        step=begun.step,
                    )
            except SaveFailed as error:
                self._failed_step = begun.step
                self._best.forget_save(begun.step)
                self._handle_failed_save(begun.due, error)
                continue
            self._num_failures = 0
            if checkpoint.unhealthy:
                self._best.forget_save(begun.step)
            if self._retry is not None and covers(begun.due, self._retry):
                self._retry = None
            is_whole = begun.due.components is None
            if begun is self._newest_own and is_whole and checkpoint.save_class == "permanent":
                self._saved_step = checkpoint.step
            cost = self._saves.collect_costs(begun, checkpoint.nbytes)
            with self._status.refusing_saves():
                self._callbacks.call_hook(Callback.checkpoint_saved, checkpoint, cost)

    def _handle_failed_save(self, due: Due, error: SaveFailed) -> None:
        self._num_failures += 1
        self._retry = together([due] if self._retry is None else [self._retry, due])
        with self._status.refusing_saves():
            self._callbacks.call_hook(Callback.checkpoint_failed, error)
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.warning(
            "%s (failure %d in a row; tried again after the next step, raised at failure %d)",
            error,
            self._num_failures,
            MAX_FAILURES_IN_A_ROW,
        )


# Limit of weights that the manifest names, as every weight of a model may be wrong.
_MAX_REASONS = 10
# A type without infinity and NaN, which older versions of torch lack.
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


class UnhealthyState(HoldfastError):
    """The loss or the weights to be saved are not finite; nothing was saved."""


def prepare_save(parts: TrainerParts, now: Timestamp, metrics: Metrics) -> tuple[str, ...]:
    """Check loss and weights of all ranks, and call `before_save`; returns what is not finite."""
    status, group = parts.status, parts.group
    status.check_save_step(now.step)
    ending = status.ending
    # After a signal the run is to be resumed, and has little time.
    is_end = ending is not None and ending.is_here() and ending.reason != "signal"
    if parts.swa is not None and is_end:
        _update_statistics(parts.swa, parts.update)
    with status.refusing_saves():
        found = check_health(parts.unhealthy, now.step, parts.model, metrics, group)
        parts.callbacks.call_hook(Callback.before_save)
    if not group.is_alone:
        parts.share_buffers()
        parts.callbacks.copy_logger_state(group)
        parts.update.scores.gather_states()
    counters = parts.counters
    counters.step_numbers = {}
    if counters.unvalidated:  # the resume that validates will log the step
        own = {"": read_numbers(counters.step_metrics), **parts.callbacks.step_numbers}
        counters.step_numbers = group.gather_values(own)[0]
    return found


def _update_statistics(swa: EqualAverage, update: Update) -> None:
    """Recompute the statistics of the averaged model's batch norm, at the end of the run."""
    if swa.plan.batch_norm is None or swa.has_statistics:
        return
    loader = Restarting(swa.plan.batch_norm)
    with undisturbed(), torch.no_grad(), update.numerics.autocast():
        swa.update_statistics(
            loader.batches(),
            lambda batch: update.loss(swa.cast.model, moved(batch, update.device)),
            lambda: loader.fills_in,
        )


def check_health(
    policy: Policy, step: int, model: nn.Module, metrics: Mapping[str, float], group: Group
) -> tuple[str, ...]:
    """Check all weights and the loss; return those that are not finite on any rank."""
    own = [*_wrong_loss(metrics), *_wrong_weights(model)]
    reasons = tuple(dict.fromkeys(reason for found in group.gather_values(own) for reason in found))
    if not reasons:
        return ()
    error = UnhealthyState(f"step {step} is not healthy:\n{listing(reasons)}")
    if policy == "raise":
        raise error
    if policy == "skip":
        raise SaveSkipped(f"{error}\nthis save was skipped") from error
    logger.warning("%s", error)
    more = (f"and {len(reasons) - _MAX_REASONS} more",) if len(reasons) > _MAX_REASONS else ()
    return reasons[:_MAX_REASONS] + more


def _wrong_loss(metrics: Mapping[str, float]) -> list[str]:
    loss = metrics.get("loss", 0.0)
    return [] if math.isfinite(loss) else [f"the loss is {loss}"]


@torch.no_grad()
def _wrong_weights(model: nn.Module) -> list[str]:
    names, checks = [], []
    for name, weight in model.named_parameters():
        if weight.is_floating_point() or weight.is_complex():
            names.append(name)
            checks.append(_is_finite(local(weight)))
    devices = {check.device for check in checks}
    if len(devices) > 1:
        checks = [check.cpu() for check in checks]
    # One result for all tensors, so that an accelerator is waited for once.
    if not checks or bool(torch.stack(checks).all()):
        return []
    return [
        f"weight {name} is not finite"
        for name, is_fine in zip(names, checks, strict=True)
        if not is_fine
    ]


def _is_finite(weight: Tensor) -> Tensor:
    """Return whether all values are finite, on the weight's device."""
    if weight.dtype == _FLOAT4:
        return torch.ones((), dtype=torch.bool, device=weight.device)
    # torch has no isfinite for most types of 8 bits, and bfloat16 has all their values.
    values = weight.bfloat16() if weight.dtype.itemsize == 1 else weight
    return values.isfinite().all()
