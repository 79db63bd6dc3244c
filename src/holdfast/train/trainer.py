"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

It owns the order of things in a run; what a step is, is in `loop`, when to save, in `saving`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.events import log_event
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.classes import SavePolicy
from holdfast.policy.clock import Time, Unit, argument_name
from holdfast.policy.retention import Rule
from holdfast.policy.triggers import Event, SaveFunction, Trigger
from holdfast.state.capture import check_state
from holdfast.store.base import Store
from holdfast.train import making
from holdfast.train.asked import check_counted, checked_every
from holdfast.train.callbacks import Callbacks, HookFailed
from holdfast.train.counters import Counters
from holdfast.train.ema import Average
from holdfast.train.health import HealthGate, Policy
from holdfast.train.hooks import Callback
from holdfast.train.loop import Clip, LossFunction, Update, next_window
from holdfast.train.metrics import LazyMetrics
from holdfast.train.outcome import EndReason, Outcome
from holdfast.train.precision import Numerics, Precision, checked_precision
from holdfast.train.saving import SaveCosts, Saver, TrainingManager
from holdfast.train.schedulers import make_schedulers
from holdfast.train.training import Metrics
from holdfast.train.validation import Validation, Validator, size_of

logger = logging.getLogger("holdfast")


class Trainer:
    """Trains a model to a goal, over as many processes as it takes.

        trainer = Trainer(model, optimizer=optimizer, data=loader, loss=loss,
                          root="runs/gpt", every="500step", keep=Last(3))
        trainer.fit("10_000step")      # killed? run the script again

    A step is one window of `accumulate` batches (fewer where an epoch ends), and saves are made
    between steps only: after the hooks of the step, its validation and its log. An epoch whose
    end is known (as `holdfast.data.Loader` tells it) ends within its last step. A save that fails
    is warned of and tried again after the next step; the third failure in a row is raised.
    """

    def __init__(
        self,
        model: nn.Module | making.MakeModel,
        *,
        optimizer: torch.optim.Optimizer | making.MakeOptimizer,
        data: Any,
        loss: LossFunction,
        root: str | os.PathLike[str] | Store,
        scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        keep: Rule | None = None,
        takeover: bool = False,
        validate: Any = None,
        accumulate: int = 1,
        precision: str | Precision = "fp32",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        ema: float | None = None,
        unhealthy: Policy = "warn",
        seed: int = 0,
        device: str | torch.device | None = None,
        callbacks: Iterable[Callback] = (),
        count_samples: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        log: bool | str | os.PathLike[str] = True,
        log_every: int = 10,
        progress: bool = True,
    ) -> None:
        """Nothing is read, written or claimed before `fit`. docs/trainer.md says more of each.

        Args:
            model, optimizer, scheduler: the object, or a function that makes it: of nothing, of
                the model, of the optimizer. `fit` puts the model into training mode. There may be
                a list of schedulers; each has `step()`, called after each step, and is saved.
            data: batches with a position: a `holdfast.data.Loader`, or an iterable with
                `state_dict` and `load_state_dict` whose iteration gives the rest of an epoch.
            loss: called with the model and a batch; gives the batch's mean loss, or that and a
                dict of metrics.
            root, every, keep, takeover: as for `CheckpointManager`; the last step is always saved,
                and fractions of the run in `every` are those of the goal.
            state: further components to save.
            validate: a loader, loaders by name, or a `Validation`.
            accumulate: batches of a step.
            precision: "fp32", "bf16", "fp16" or a `Precision`.
            clip_norm, clip_value: largest norm of all gradients together, or value in them.
            ema: decay of an average of the weights, which is saved, and used for validation.
            unhealthy: what to do when loss or weights are not finite at a save.
            seed: of the global generators, when training begins afresh.
            device: where the model and batches are moved; None: not at all.
            callbacks: see `Callback`.
            count_samples, count_tokens: how many a batch has, for goals and triggers in them.
            log: write JSON lines to the root's `log/train.jsonl` or the file named.
            log_every: steps between two calls of `log`, each of which may wait for the device.
            progress: show a progress bar on a terminal.

        Raises:
            UsageError: an argument is wrong.
        """
        making.check_data(data)
        making.check_range("accumulate", accumulate, 1, 2**31)
        making.check_range("seed", seed, 0, 2**32)
        making.check_range("log_every", log_every, 1, 2**63)
        on = making.checked_device(device)
        self.model = making.make_model(model, seed, on)
        self.optimizer = making.make_optimizer(optimizer, self.model, self.model is not model)
        self.schedulers = make_schedulers(scheduler, self.optimizer)
        """By the names of their components."""
        self.data = data
        self.root = root
        self.counters = Counters()
        self.manager: TrainingManager | None = None
        """The manager while `fit` runs."""
        self.ema = None if ema is None else Average(self.model, ema)
        self._counted = {
            unit
            for unit, count in ((Unit.SAMPLE, count_samples), (Unit.TOKEN, count_tokens))
            if count is not None
        }
        self._every = checked_every(every, self._counted)
        self._keep = keep
        self._takeover = takeover
        self._accumulate = accumulate
        self._seed = seed
        self._log_every = log_every
        self._count_samples = count_samples
        self._count_tokens = count_tokens
        self._gate = HealthGate(unhealthy)
        self._callbacks = Callbacks([*callbacks, *making.own_loggers(root, log, progress)], self)
        self._numerics = Numerics(checked_precision(precision), making.device_type(self.model, on))
        self._update = Update(
            model=self.model,
            optimizer=self.optimizer,
            schedulers=tuple(self.schedulers.values()),
            loss=loss,
            clip=Clip(norm=clip_norm, value=clip_value),
            numerics=self._numerics,
            device=on,
            callbacks=self._callbacks,
        )
        self._validator = self._make_validator(validate)
        self._goal: Time | None = None
        self._has_begun = self._is_within_step = False
        self._stop_reason: str | None = None
        self._ending: EndReason | None = None
        self._ends_at_s = float("inf")
        self._validated_step: int | None = None
        self._logged_step: int | None = None
        self.state = self._components(state or {})
        check_state(self.state)
        self._callbacks.tell(Callback.setup)

    def fit(self, until: str | int, *, max_time: str | Time | None = None) -> Outcome:
        """Train until the whole run has come to `until`: a number of steps, or "10_000step",
        "2ep", "1e9tok". What was done by earlier processes counts.

        Resumes from the newest usable checkpoint of the root. When the goal is reached already,
        says so and neither trains nor saves. On return the last step is durable.

        Args:
            until: the goal; it may differ from that of earlier calls and processes.
            max_time: ends after the step in which this call has taken so long, such as "3h50min";
                `sys.exit(trainer.fit(…).exit_code)` then asks for being run again.

        Raises:
            UsageError: `until` is not a goal, or counts what is not counted here, or this Trainer
                has trained before and nothing of it was saved.
            SaveFailed: saving failed three times in a row.
            OwnershipError: another process trains this run.
            HookFailed: a callback raised.
            UnhealthyState: loss or weights are not finite, and `unhealthy="raise"`.
        """
        goal = making.checked_goal(until)
        check_counted(goal.unit, f"until={until!r}", self._counted)
        self._ends_at_s = time.monotonic() + making.checked_max_time_s(max_time)
        self._goal = goal
        self._is_within_step = False
        self._stop_reason = self._ending = None
        self._validated_step = self._logged_step = None
        costs = SaveCosts()
        with self._closing():
            manager = TrainingManager(
                self.root,
                self.state,
                counters=self.counters,
                before_save=self._before_save,
                skips_unhealthy=self._gate.policy == "skip",
                every=self._every,
                max_duration=goal,
                keep=self._keep,
                takeover=self._takeover,
                sinks=(log_event, costs),
            )
            with manager, self._managed(manager):
                return self._fit(manager, costs)

    @property
    def goal(self) -> Time:
        """Where the present or last `fit` goes.

        Raises:
            UsageError: there was none yet.
        """
        if self._goal is None:
            raise UsageError("there is no goal before fit is called")
        return self._goal

    @property
    def present_step(self) -> int:
        """The step that is under way, or between steps the last one that was done."""
        return self.counters.step + self._is_within_step

    def validate(self, which: str | int | None = None) -> dict[str, float]:
        """Validate now, whatever is due; gives the metrics, as a checkpoint would get them.

        Args:
            which: the checkpoint whose weights are loaded into the model (and its average) first,
                as for `CheckpointManager.load`; None: the weights as they are. Claims nothing.

        Raises:
            UsageError: the Trainer has no `validate`, or `which` is given while `fit` runs.
            NoCheckpoint: nothing answers `which`.
            HookFailed: a callback raised.
        """
        if self._validator is None:
            raise UsageError("there is nothing to validate on: give the Trainer validate=…")
        if self.manager is not None:
            if which is not None:
                raise UsageError(f"which={which!r}: while fit runs, only its weights can be used")
            return self._run_validation(self._validator)
        with self._closing(), self._managed(None):
            if which is not None:
                self._load_weights(which)
            return self._run_validation(self._validator)

    def request_stop(self, reason: str) -> None:
        """End `fit` after the present step, which is saved. Requests cannot be taken back."""
        self._stop_reason = self._stop_reason or reason or "a request"

    def log(self, metrics: Metrics, *, to: Collection[str] | None = None) -> None:
        """Give metrics of the present step to the loggers, or to those named in `to`.

        Raises:
            UsageError: `to` names what is not there.
            HookFailed: a logger raised.
        """
        self._callbacks.tell_loggers(metrics, to)

    def _fit(self, manager: TrainingManager, costs: SaveCosts) -> Outcome:
        tell = self._callbacks.tell
        tell(Callback.before_load)
        found = manager.resume()
        if found is None:
            self._begin_afresh()
        self._begin_counting()
        manager.is_between_steps = True
        if found is not None:
            tell(Callback.resumed, found)
        is_permanent = found is not None and found.save_class == "permanent"
        if self._is_at_goal():
            logger.info("%s is reached already, at step %d", self.goal, self.counters.step)
            if is_permanent:
                tell(Callback.already_done)
                return self._outcome("goal")
        saver = Saver(
            manager,
            self.counters,
            self._callbacks,
            costs,
            saved_step=self.counters.step if is_permanent else None,
        )
        tell(Callback.fit_start)
        self.model.train()
        if found is None:
            saver.at(["start"], {})
        self._train(saver, {} if found is None else found.metrics)
        return self._outcome(self._ending or "goal")

    def _begin_afresh(self) -> None:
        if self._has_begun:
            raise UsageError(
                f"this Trainer has trained before, to step {self.counters.step}, and nothing of it "
                "was saved: there is nothing to go on from. Make a new Trainer"
            )
        making.seed_generators(self._seed)
        if self.ema is not None:
            self.ema.begin(self.model)

    def _train(self, saver: Saver, known: Metrics) -> None:
        """Do the steps up to the goal, and after each of them what it is time for.

        `known` are the metrics of the checkpoint from which training goes on.
        """
        metrics, now, is_over = LazyMetrics({}), self.counters.timestamp, False
        begun_at = now.step
        if any(name.startswith("val/") for name in known):
            self._validated_step = begun_at
        for step_metrics in self._steps():
            before, now = now, self.counters.timestamp
            is_over = self._is_done()
            metrics = self._looked(step_metrics, before, is_over)
            if not is_over:
                saver.at(self._events(before, now), metrics)
        if not is_over:
            # It ended after the look at the last step: by its hooks, or as the data came to an end.
            metrics = self._looked(metrics, now, is_over=True)
        if self.counters.step == begun_at:
            metrics = LazyMetrics(known).joined(metrics)
        reason = "final" if self._ending == "goal" else str(self._ending)
        saver.finish(metrics, reason)
        self._callbacks.tell(Callback.fit_end)
        saver.settle(metrics)  # what was saved in that hook

    def _steps(self) -> Iterator[LazyMetrics]:
        """Do the steps up to the goal; gives the metrics of each when it is done and counted."""
        tell = self._callbacks.tell
        while not self._is_done():
            begun_at = self.counters.batch
            self._mark(is_within_step=True)
            if begun_at == 0:
                tell(Callback.epoch_start)
            with preserved():
                # Beginning an iteration of torch's own loaders draws from the global generator.
                batches = iter(self.data)
            epoch = self.counters.epoch
            while not self._is_done() and self.counters.epoch == epoch:
                self._mark(is_within_step=True)
                tell(Callback.before_data)
                self._has_begun = True
                window = next_window(batches, self._accumulate)
                if window:
                    yield self._step(window, batches)
                elif begun_at == self.counters.batch == 0:
                    raise UsageError("data gave no batch in a whole epoch")
                else:
                    self.counters.end_epoch()
                    self._mark(is_within_step=False)
                    # Unless training is over, a resume from the step before comes by here again.
                    self._is_within_step = not self._is_done()
                    tell(Callback.epoch_end)
        self._mark(is_within_step=False)

    def _mark(self, *, is_within_step: bool) -> None:
        """Note where training is, for the stamps of logs and for saves."""
        self._is_within_step = is_within_step
        if self.manager is not None:
            self.manager.is_between_steps = not is_within_step

    def _step(self, window: list[Any], batches: Iterator[Any]) -> LazyMetrics:
        tell = self._callbacks.tell
        tell(Callback.step_start)
        metrics = self._update(window)
        if self.ema is not None:
            self.ema.follow(self.model)
        self.counters.add_step(
            len(window), _total(self._count_samples, window), _total(self._count_tokens, window)
        )
        # What is saved after the epoch's last step is to say that the epoch is over.
        is_over = len(window) < self._accumulate or self._ends_now(batches)
        if is_over:
            self.counters.end_epoch()
        self._mark(is_within_step=False)
        tell(Callback.step_end, metrics)
        if is_over:
            tell(Callback.epoch_end)
        return metrics

    def _ends_now(self, batches: Iterator[Any]) -> bool:
        """Ends the epoch of data that knows its end; asking for more than the last batch does."""
        if not getattr(self.data, "at_epoch_end", False):
            return False
        return next(batches, None) is None

    def _looked(self, metrics: LazyMetrics, before: Timestamp, is_over: bool) -> LazyMetrics:
        """Validate and log what is due at this step; gives all its metrics."""
        step, validator = self.counters.step, self._validator
        is_validated = False
        if validator is not None and self._validated_step != step:
            is_end = is_over and self._ending == "goal" and validator.plan.at_end
            if is_end or validator.plan.is_due(before, self.counters.timestamp, self.goal):
                metrics = metrics.joined(self._run_validation(validator))
                self._validated_step, is_validated = step, True
        is_due = step % self._log_every == 0 or is_over
        if is_validated or (is_due and metrics and self._logged_step != step):
            self._logged_step = step
            self._callbacks.tell(Callback.log, metrics)
        return metrics

    def _events(self, before: Timestamp, now: Timestamp) -> list[Event]:
        """What has happened at this step, for triggers."""
        events: list[Event] = ["step"]
        if now.epoch != before.epoch:
            events.append("epoch")
        if self._validated_step == now.step:
            events.append("evaluation")
        return events

    def _run_validation(self, validator: Validator) -> dict[str, float]:
        use_average = self.ema is not None and validator.plan.use_ema
        model = self.ema.model if self.ema is not None and use_average else self.model
        if self.manager is None:
            return validator.run(model, self.model)
        with self.manager.not_between_steps():  # modes and generators are not those of training
            return validator.run(model, self.model)

    def _load_weights(self, which: str | int) -> None:
        weights: dict[str, Any] = {"model": self.model}
        if self.ema is not None:
            weights["ema"] = self.ema.model
        with CheckpointManager(self.root, weights) as manager:
            manager.load(which, components=list(weights))

    def _before_save(self, step: int, metrics: Metrics) -> None:
        self._gate.check(step, self.model, metrics)
        self._callbacks.tell(Callback.before_save)

    @contextmanager
    def _managed(self, manager: TrainingManager | None) -> Iterator[None]:
        self.manager = manager
        try:
            yield
        except BaseException as error:
            self._callbacks.tell_exception(error)
            raise
        finally:
            self.manager = None

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Tell everybody of the end, and never mask the error that it ended by."""
        try:
            yield
        except BaseException:
            try:
                self._callbacks.close()
            except HookFailed as error:
                logger.error("%s", error)
            raise
        self._callbacks.close()

    def _begin_counting(self) -> None:
        now = self.counters
        for name, count, total in (
            ("samples", self._count_samples, now.samples),
            ("tokens", self._count_tokens, now.tokens),
        ):
            if count is not None and total is None and now.step:
                logger.warning("%s were not counted before step %d", name, now.step)
        now.samples = None if self._count_samples is None else now.samples or 0
        now.tokens = None if self._count_tokens is None else now.tokens or 0

    def _is_at_goal(self) -> bool:
        value: int | None = getattr(self.counters, argument_name(self.goal.unit))
        return value is not None and value >= self.goal.value

    def _is_done(self) -> bool:
        """Whether training ends here; once it does, it stays so, whatever the clock says."""
        if self._ending is None:
            if self._is_at_goal():
                self._ending = "goal"
            elif self._stop_reason is not None:
                self._ending = "stopped"
            elif time.monotonic() >= self._ends_at_s:
                self._ending = "max_time"
        return self._ending is not None

    def _outcome(self, reason: EndReason) -> Outcome:
        detail = self._stop_reason if reason == "stopped" else None
        return Outcome(reason=reason, step=self.counters.step, detail=detail or "")

    def _make_validator(self, given: Any) -> Validator | None:
        if given is None:
            return None
        plan = given if isinstance(given, Validation) else Validation(data=given)
        check_counted(plan.trigger.unit, f"validation every='{plan.every}'", self._counted)
        return Validator(
            plan=plan,
            loss=self._update.loss,
            numerics=self._numerics,
            device=self._update.device,
            callbacks=self._callbacks,
            weigh=plan.weigh or self._count_samples or size_of,
        )

    def _components(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **self.schedulers}
        if self._numerics.scaler is not None:
            own["scaler"] = self._numerics.scaler
        if self.ema is not None:
            own["ema"] = self.ema.model
        own |= {"data": self.data, "progress": self.counters, **self._callbacks.components}
        taken = [name for name in extra if name in own]
        if taken:
            raise UsageError(f"state: the Trainer has components named {taken} itself")
        return own | dict(extra)


def _total(count: Callable[[Any], int] | None, window: list[Any]) -> int | None:
    return None if count is None else sum(map(count, window))
