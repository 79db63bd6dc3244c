"""A call of `fit`: resume, steps, validations, logs and saves, in order (docs/trainer.md).

`Update` trains a step, `StepSaver` saves, `FitEnding` decides when to end. Hooks rely on the order
of calls (tests/train/callbacks/test_hooks.py), and so do exact resumes (tests/train/test_stop.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.checkpoints import StateHooks
from holdfast.control.stop import Interrupted
from holdfast.data.randomness import preserved, seed_generators
from holdfast.errors import OwnershipError, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.rule import SaveClass
from holdfast.policy.savers import Due
from holdfast.policy.triggers import Event
from holdfast.results import Checkpoint
from holdfast.state.components import PROGRESS, TRAINER
from holdfast.state.modules import is_loaded
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.registry import HookFailed
from holdfast.train.evaluation.evaluator import Evaluator
from holdfast.train.evaluation.validation import ValidationPart
from holdfast.train.fit.saving import Saves, StepSaver, prepare_save
from holdfast.train.fit.starting import Resuming, load_best_metrics, make_manager
from holdfast.train.outputs import Image
from holdfast.train.parts import TrainerParts
from holdfast.train.status import FitEnding, Outcome
from holdfast.train.step.batches import Batches
from holdfast.train.step.device_metrics import LazyMetrics
from holdfast.train.training import Metrics

logger = logging.getLogger("holdfast")


_IN_EVERY_RUN = frozenset({"model", "optimizer", "data"})
"""Components of every checkpoint from which a Trainer resumes."""


def run_fit(
    parts: TrainerParts, evaluator: Evaluator, ending: FitEnding, resuming: Resuming
) -> Outcome:
    """Make a manager, and train with it until the end."""
    saves = Saves()
    may_be_new = parts.state.keys() - _IN_EVERY_RUN
    if not (hasattr(parts.data, "epoch") and hasattr(parts.data, "batch")):
        may_be_new -= {PROGRESS}  # only such data tells where in an epoch another trainer was
    may_be_left = {*resuming.without, TRAINER} - parts.state.keys()
    hooks = StateHooks(
        before_save=partial(prepare_save, parts),
        edit_save=parts.make_edit(Callback.edit_save),
        save_begun=saves.begun.append,
        edit_load=parts.make_edit(Callback.edit_load),
        one_sided=lambda name: name in may_be_new or name in may_be_left,
    )
    manager = make_manager(parts, ending.goal, hooks, saves)
    steps = parts.update.numerics.refuse_other_steps(parts.update.stepped)
    with manager, parts.status.running(manager, parts.callbacks), steps:
        return Fit(parts, evaluator, ending, manager, saves, resuming, hooks).run()


class Fit:
    """Runs a call of `fit`: trains with a manager until the end. Used once."""

    def __init__(
        self,
        parts: TrainerParts,
        evaluator: Evaluator,
        ending: FitEnding,
        manager: CheckpointManager,
        saves: Saves,
        resuming: Resuming,
        hooks: StateHooks,
    ) -> None:
        """Prepare a call of `fit`; `saves` collects the saves that `manager` begins."""
        self._parts = parts
        self._evaluator = evaluator
        self._resuming = resuming
        self._hooks = hooks
        self._ending = ending
        self._group = parts.group
        self._manager = manager
        self._saves = saves
        self._counters = parts.counters
        self._status = parts.status
        self._undo = parts.undo
        self._tell = parts.callbacks.call_hook
        self._validated_step: int | None = None
        self._has_warned_of_eval = False
        self._logged_step: int | None = None
        self._finished_step: int | None = None
        self._scored_step: int | None = None
        self._before = self._now = parts.counters.timestamp
        """Timestamps before and after the last completed step."""
        self._followed = self._now
        """Timestamp up to which the equal average of the weights has followed."""
        self._batches = Batches(parts.data, parts.seed, self._group.rank)
        self._interruption: Interrupted | None = None
        """Error kept until after the save, as `_batches`: dropping it may wait for data workers."""
        self._metrics = LazyMetrics({})
        """Known metrics of the last completed step."""
        self._pictures: dict[str, Image] = {}
        """Pictures of the metrics of the epoch that ended with the step, to be logged with it."""
        self._of_late_epoch = LazyMetrics({})
        """Metrics of an epoch that proved to be over after its last step, when training ended."""

    def run(self) -> Outcome:
        """Resume, train and save, as `Trainer.fit` does."""
        self._tell(Callback.before_load)
        began_s = time.monotonic()
        found = self._resume_or_start()
        is_resumed = found is not None
        if found is None:
            found = self._load_start()
        elif self._resuming.start is not None:
            logger.info("the run continues from %s; start_from is ignored", found.path)
        load_s = time.monotonic() - began_s
        notes = () if found is None else found.notes
        if found is None:
            self._begin_afresh()
        elif "ema" in found.new and self._parts.ema is not None:
            self._parts.ema.start_from_model(self._parts.model)
        if found is not None and PROGRESS in found.new:
            self._take_over(found)
        self._begin_counting()
        self._parts.schedules.apply_counters(self._counters)
        self._status.leave_step()
        if found is not None:
            self._tell(Callback.resumed, found)
        is_saved = found is not None and is_resumed and found.save_class == "permanent"
        is_complete = is_saved and not self._counters.unvalidated
        if self._ending.is_at_goal():
            # Starting a finished run again is normal; a goal that was passed may be a mistake.
            level = logging.WARNING if self._ending.is_beyond_goal() else logging.INFO
            text = "%s was already reached, at step %d"
            logger.log(level, text, self._ending.goal, self._counters.step)
            if is_complete:
                self._tell(Callback.already_done)
                return self._ending.outcome(notes)
        saved_step = self._counters.step if is_complete else None
        saver = StepSaver(self._parts, self._manager, self._saves, saved_step=saved_step)
        if not self._group.is_alone:
            saver.agree_on_ended_saves(0)
        resumed = found if is_resumed else None
        if is_resumed:
            self._parts.update.parallel.warn_of_inexact_resume()
        load_best_metrics(self._parts, resumed, self._manager)
        self._tell(Callback.fit_start)
        if found is not None:
            cost = {"load/duration_s": load_s, "load/nbytes": float(found.nbytes)}
            self._tell(Callback.checkpoint_loaded, found, cost)
        self._parts.model.train()
        if found is None:
            self._evaluator.check_sanity()
        if not is_resumed:
            saver.handle_events(["start"], {})
        try:
            self._train(saver, found)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if self._undo.allows_save and not isinstance(error, OwnershipError):
                self._save_after_error(error, saver)
            raise
        finally:
            self._batches.drop_iteration()
            self._interruption = None
        outcome = self._ending.outcome(notes)
        if outcome.reason == "stopped":
            logger.info("training ended at step %d: %s", outcome.step, outcome.detail)
        return outcome

    def _resume_or_start(self) -> Checkpoint | None:
        if self._resuming.how == "never":
            self._expect_untrained()
            self._manager.start_new()
            return None
        return self._resuming.resume_or_roll_back(self._manager)

    def _expect_untrained(self) -> None:
        if self._status.has_begun:
            raise UsageError(
                f"this Trainer has trained before, to step {self._counters.step}, and a new run "
                "needs a new model. Make a new Trainer"
            )

    def _load_start(self) -> Checkpoint | None:
        """Load the checkpoint of another root that this run starts from, if any."""
        if self._status.has_begun:
            raise UsageError(
                f"this Trainer has trained before, to step {self._counters.step}, and nothing of "
                "it was saved, so it cannot resume. Make a new Trainer"
            )
        if self._resuming.start is None:
            return None
        found = self._resuming.start.load_whole_state(self._parts, self._hooks, self._resuming)
        self._manager.count_from(found.timestamp)
        return found

    def _take_over(self, found: Checkpoint) -> None:
        """Continue from a checkpoint of another trainer, or of a loop without one."""
        now, data = self._counters, self._parts.data
        if getattr(data, "at_epoch_end", False):
            with preserved():
                next(iter(data), None)  # here an epoch ends within its last step
        now.take_over(found.timestamp, data)
        logger.warning(
            "%s: %s: another trainer has saved it, so counting continues from step %d, epoch %d "
            "and batch %d of its data",
            found.folder,
            PROGRESS,
            now.step,
            now.epoch,
            now.batch,
        )

    def _begin_afresh(self) -> None:
        """Seed the generators and start the weight average, unless the caller has loaded them."""
        model, ema, now = self._parts.model, self._parts.ema, self._counters
        if now.were_loaded:
            logger.warning(
                "the caller has loaded a state of step %d: training continues from it, with the "
                "generators unchanged. fit(…, start_from=…) loads all of another root's "
                "checkpoint by itself",
                now.step,
            )
        else:
            seed_generators(self._parts.seed + self._group.rank)
        if ema is not None and not is_loaded(ema.model):
            ema.start_from_model(model)
        if now.were_loaded or is_loaded(model):
            self._manager.count_from(now.timestamp)

    def _begin_counting(self) -> None:
        now, parts = self._counters, self._parts
        for name, count, total in (
            ("samples", parts.counts.samples, now.samples),
            ("tokens", parts.counts.tokens, now.tokens),
        ):
            if count is not None and total is None and now.step:
                logger.warning("%s were not counted before step %d", name, now.step)
        now.samples = None if parts.counts.samples is None else now.samples or 0
        now.tokens = None if parts.counts.tokens is None else now.tokens or 0

    def _train(self, saver: StepSaver, found: Checkpoint | None) -> None:
        """Train from `found` to the goal, with validations, logs and saves after each step."""
        metrics, is_over = LazyMetrics({}), False
        self._before = self._now = self._followed = self._counters.timestamp
        begun_at = self._ending.begun_at = self._now.step
        known: Metrics = {} if found is None else found.metrics
        self._evaluator.watched.saw(known)
        self._metrics = LazyMetrics(known)
        self._evaluator.validations.start_at_step(begun_at, known)
        if any(name.startswith("val/") for name in known):
            self._validated_step = begun_at
        if found is not None and self._counters.unvalidated:
            known = self._validate_late(saver, found)
        for step_metrics in self._steps():
            is_over = self._ending.is_here()
            metrics = self._finish_step(step_metrics, self._before, is_over)
            self._agree_with_ranks(saver)
            if not is_over:
                saver.handle_events(self._events(), metrics)
        if not is_over:
            # Training ended after the last step was handled: by hooks, or at the end of the data.
            metrics = self._finish_step(metrics, self._now, is_over=True)
        metrics = metrics.joined(self._of_late_epoch)
        events = self._events() if self._counters.step > begun_at else []
        if self._counters.step == begun_at:
            metrics = LazyMetrics(known).joined(metrics)
        if self._ending.reason == "signal":
            saver.save_after_signal(events, metrics)
        else:
            reason = "final" if self._ending.reason == "goal" else str(self._ending.reason)
            # A save from before the end was known lacks the statistics of averaged weights.
            swa, has_trained = self._parts.swa, self._counters.step > begun_at
            lacks = swa is not None and swa.num_averaged > 0 and not swa.has_statistics
            saver.save_and_wait(events, metrics, reason, again=lacks and has_trained)
        self._tell(Callback.fit_end)
        saver.finish_saves(metrics)  # saves that the hook began

    def _steps(self) -> Iterator[LazyMetrics]:
        """Train up to the goal; yields the metrics of each step after it is counted."""
        tell = self._tell
        while not self._ending.is_here():
            begun_at = self._counters.batch
            self._enter_step()
            if begun_at == 0:
                tell(Callback.epoch_start)
            epoch, goes_on = self._counters.epoch, True
            self._batches.start_iterating(epoch, is_new=begun_at == 0)
            while goes_on:  # at least one step, so that `epoch_start` is called once an epoch
                self._enter_step()
                tell(Callback.before_data)
                self._status.has_begun = True
                try:
                    with self._undo.fetching():
                        window = self._batches.take_window(self._parts.accumulate)
                except Interrupted as error:
                    self._interruption = error
                    break
                if window:
                    yield self._train_step(window)
                elif begun_at == self._counters.batch == 0:
                    raise UsageError("data gave no batch in a whole epoch")
                else:
                    if self._counters.batch:
                        self._batches.warn_of_late_end(self._counters.batch, self._counters.step)
                    of_epoch, pictures = self._parts.update.end_epoch()
                    self._counters.end_epoch()
                    self._manager.fence()  # a schedule may change what a save copies
                    known = self._metrics.joined(of_epoch)
                    self._evaluator.watched.saw(known, has_epoch=bool(of_epoch or pictures))
                    self._parts.schedules.advance(self._counters, known)
                    self._follow_swa()
                    self._note_due_validations(self._now)
                    self._status.leave_step()
                    # Unless training is over, a resume from the step before runs this hook again.
                    self._status.is_under_way = not self._ending.is_here()
                    self._log_late_epoch(of_epoch, pictures)
                    tell(Callback.epoch_end)
                goes_on = not self._ending.is_here() and self._counters.epoch == epoch
        if not self._status.is_between_steps:
            self._undo.undo_step()  # training ended after a step had begun
        self._status.leave_step()

    def _enter_step(self) -> None:
        if self._status.is_between_steps:
            self._undo.take_snapshot()
            self._status.enter_step()

    def _train_step(self, window: list[Any]) -> LazyMetrics:
        tell = self._tell
        tell(Callback.step_start)
        update, step = self._parts.update, self._status.present_step
        if not (self._parts.model.training or self._has_warned_of_eval):
            self._has_warned_of_eval = True
            logger.warning("step %d trains in eval mode: call training.model.train() first", step)
        is_skipped = any(step in steps for steps in self._parts.skip_steps)
        fills_in = len(self._batches.own) < len(window)
        metrics = update.skip_step() if is_skipped else update(window, fills_in=fills_in)
        has_epoch = False
        if self._parts.ema is not None:
            self._parts.ema.update_average(self._parts.model)
        self._counters.add_step(len(window), *self._count_samples())
        # A save after the epoch's last step must record that the epoch is over.
        is_cut = len(window) < self._parts.accumulate
        is_over = is_cut or self._batches.is_epoch_over(self._counters.batch)
        if is_over:
            self._counters.end_epoch()
            of_epoch, self._pictures = update.end_epoch()
            metrics = metrics.joined(of_epoch)
            self._scored_step = self._counters.step if of_epoch else None
            has_epoch = bool(of_epoch or self._pictures)
        self._metrics = self._counters.step_metrics = metrics
        self._evaluator.watched.saw(metrics, has_epoch=has_epoch)
        self._parts.schedules.advance(self._counters, metrics)
        self._before, self._now = self._now, self._counters.timestamp
        self._follow_swa()
        self._note_due_validations(self._before)
        self._status.leave_step()
        tell(Callback.step_end, metrics)
        if is_over:
            tell(Callback.epoch_end)
        return metrics

    def _follow_swa(self) -> None:
        if self._parts.swa is not None:
            before, self._followed = self._followed, self._counters.timestamp
            self._parts.swa.add_if_due(self._parts.model, before, self._followed, self._ending.goal)

    def _note_due_validations(self, before: Timestamp) -> None:
        """Count the validations due since `before`, for saves: hooks may save or fail first."""
        if not self._evaluator.validations:
            self._counters.unvalidated, self._counters.only_at_goal = [], []
            return
        now, due = self._counters.timestamp, self._evaluator.validations.names_due
        names = due(before, now, is_last=self._ending.is_at_goal())
        self._counters.unvalidated = names
        if self._parts.schedules.steps_after_validation:
            regular = due(before, now, is_last=False)
            self._counters.only_at_goal = [name for name in names if name not in regular]

    def _log_late_epoch(self, metrics: LazyMetrics, pictures: Mapping[str, Image]) -> None:
        for name, image in pictures.items():
            self._tell(Callback.log_image, name, image)
        if metrics:
            self._tell(Callback.log, metrics)
        if not self._status.is_under_way:
            self._of_late_epoch = metrics

    def _count_samples(self) -> list[int | None]:
        """Count the samples and tokens of a step, on all ranks."""
        own = self._parts.counts.totals(self._batches.own)
        if self._group.is_alone or own == (None, None):
            return [*own]
        total = self._group.sum([count or 0 for count in own])
        return [None if count is None else of_all for count, of_all in zip(own, total, strict=True)]

    def _agree_with_ranks(self, saver: StepSaver) -> None:
        """Agree with the other ranks on the end and on failed saves, at steps that log anyway."""
        now, before = self._now, self._before
        is_logged = now.step % self._parts.log_every == 0 or self._validated_step == now.step
        if not self._group.is_alone and (is_logged or now.epoch != before.epoch):
            saver.agree_on_ended_saves(self._ending.agree_on_end(saver.num_ended))

    def _finish_step(self, metrics: LazyMetrics, before: Timestamp, is_over: bool) -> LazyMetrics:
        """Run the validations and logs due at this step; returns all its metrics."""
        step, due = self._counters.step, []
        self._finished_step = step
        pictures, self._pictures = self._pictures, {}
        for name, image in pictures.items():
            self._tell(Callback.log_image, name, image)
        if self._evaluator.validations:
            is_last = is_over and self._ending.reason == "goal"
            due = self._evaluator.validations.count_due_parts(
                before, self._counters.timestamp, is_last=is_last
            )
        if due:
            metrics = self._validate(metrics, due)
        elif not self._evaluator.validations and not is_over:
            self._evaluator.watched.check_watched_metrics(
                metrics, but_of_steps=before.epoch == self._counters.timestamp.epoch
            )
        if self._counters.unvalidated:
            return metrics  # the resume that validates will log them
        # The log must be the same whether or not the run is stopped.
        is_due = step % self._parts.log_every == 0 or (is_over and self._ending.reason != "signal")
        is_due |= self._scored_step == step
        if due or (is_due and metrics and self._logged_step != step):
            self._logged_step = step
            self._tell(Callback.log, metrics)
        return metrics

    def _validate(self, metrics: LazyMetrics, parts: Sequence[ValidationPart]) -> LazyMetrics:
        """Add the metrics of these validations, unless a signal interrupts them."""
        names = [*self._counters.unvalidated, *(part.name for part in parts)]
        self._counters.unvalidated = list(dict.fromkeys(names))
        try:
            with self._undo.validating():
                found = self._evaluator.run_parts(parts)
        except Interrupted as error:
            self._interruption = error
            return metrics
        self._parts.schedules.advance_after_validation(
            [part.name for part in parts if part.name not in self._counters.only_at_goal],
            metrics.joined(found),
            self._evaluator.validations.owner_of,
        )
        self._counters.unvalidated, self._counters.only_at_goal = [], []
        self._validated_step = self._counters.step
        self._metrics = metrics.joined(found)
        self._evaluator.watched.check_watched_metrics(self._metrics)
        return self._metrics

    def _validate_late(self, saver: StepSaver, found: Checkpoint) -> Metrics:
        """Do the validation that an end prevented at this step, and save its metrics, too."""
        step = self._counters.step
        parts = self._evaluator.validations.count_named_parts(self._counters.unvalidated, step)
        numbers = self._counters.step_numbers
        self._parts.callbacks.pass_step_numbers(numbers)
        of_step = LazyMetrics(numbers.get("", {})).joined(found.metrics)
        self._counters.step_metrics = of_step
        metrics = self._validate(of_step, parts)
        if self._counters.unvalidated:
            return metrics
        self._logged_step = step
        self._tell(Callback.log, metrics)
        if not self._ending.is_here():
            save_class: SaveClass = "permanent" if found.save_class == "permanent" else "ephemeral"
            saver.save_again(Due(save_class, found.reason), metrics)
        return metrics

    def _save_after_error(self, error: BaseException, saver: StepSaver) -> None:
        """Save the state of the last step boundary after an error, which is raised anyway."""
        try:
            lost = "" if self._status.is_between_steps else self._undo_step()
            if lost:
                logger.error(
                    "step %d failed %s, so nothing of it can be saved; the newest checkpoint is %s",
                    self._status.present_step,
                    lost,
                    saver.wait_for_newest() or "none",
                )
                return
            self._status.leave_step()
            self._log_after_error()
            saver.handle_events(["exception"], self._metrics)
            saver.finish_saves(self._metrics)
        except Exception as failure:
            logger.exception("after %r the state could not be saved: %s", error, failure)

    def _undo_step(self) -> str:
        """Restore the state from before the failed step; returns why it is lost, or ""."""
        if not self._undo.undo_step():
            return "in its update"
        changed = ", ".join(self._undo.find_changed())
        return (
            changed
            and f"when it had changed {changed}, whose state from before the step is not kept"
        )

    def _log_after_error(self) -> None:
        """Log the last completed step, if its log was due and the error prevented it."""
        step = self._counters.step
        is_new = self._now.step > self._before.step and self._finished_step != step
        if is_new and step % self._parts.log_every == 0 and not self._counters.unvalidated:
            try:
                self._tell(Callback.log, self._metrics)
            except HookFailed as failure:
                logger.error("%s", failure)

    def _events(self) -> list[Event]:
        """List the events of this step at which triggers may fire, such as `epoch`."""
        before, now = self._before, self._now
        events: list[Event] = ["step"]
        if now.epoch != before.epoch:
            events.append("epoch")
        if now.cycle != before.cycle:
            events.append("cycle")
        if self._validated_step == now.step:
            events.append("evaluation")
        return events
