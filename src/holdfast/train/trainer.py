"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

It owns the order of things in a run; what a step is, is in `loop`, when to save, in `saving`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from holdfast.data.randomness import preserved
from holdfast.engine.checkpoint import Checkpoint, PendingSave
from holdfast.engine.hooks import StateHooks
from holdfast.engine.stop import Interrupted, Stop
from holdfast.errors import OwnershipError, SaveSkipped, UsageError
from holdfast.events import log_event
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager, OnExisting
from holdfast.policy.classes import Due, SaveClass, SavePolicy
from holdfast.policy.clock import Time, Unit, argument_name
from holdfast.policy.retention import Rule
from holdfast.policy.savers import SideSaver
from holdfast.policy.triggers import Event, SaveFunction, Trigger
from holdfast.state.capture import check_state
from holdfast.state.edits import StateView
from holdfast.store.base import Store
from holdfast.train import making
from holdfast.train.asked import asks_for, check_counted, checked_every
from holdfast.train.callbacks import Callbacks, HookFailed
from holdfast.train.counters import Counters
from holdfast.train.ema import Average
from holdfast.train.health import HealthGate, Policy, UnhealthyState
from holdfast.train.hooks import Callback
from holdfast.train.loop import Clip, LossFunction, Update, next_window
from holdfast.train.metrics import LazyMetrics
from holdfast.train.outcome import EndReason, Outcome
from holdfast.train.precision import Numerics, Precision, checked_precision
from holdfast.train.saving import Between, SaveCosts, Saver
from holdfast.train.schedulers import make_schedulers
from holdfast.train.skipping import WithoutSteps
from holdfast.train.targets import Target, Validated, Which, borrowed, kept_all, select
from holdfast.train.training import Metrics, Training
from holdfast.train.validation import Part, Validations, Validator, plans_of, size_of
from holdfast.train.wayback import WayBack

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
        savers: Sequence[SideSaver] = (),
        on_existing: OnExisting = "keep",
        takeover: bool = False,
        stop: Stop | None = Stop(),
        validate: Any = None,
        skip_steps: Iterable[range] = (),
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
            root, every, keep, savers, on_existing, takeover: as for `CheckpointManager`; the last
                step is always saved, and fractions of the run in `every` are those of the goal.
            stop: the signals that end `fit`, or make it save; None: it handles none.
            state: further components to save.
            validate: a loader, loaders by name, or one `Validation` or a list of them.
            skip_steps: steps whose batches are not trained on, such as `[range(100, 110)]` for
                those from 100 to 109; they count, and schedulers step.
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
        self._callbacks = Callbacks([*callbacks, *making.own_loggers(root, log, progress)], self)
        self._callbacks.tell(Callback.model_made)
        self.optimizer = making.make_optimizer(optimizer, self.model, self.model is not model)
        self.schedulers = make_schedulers(scheduler, self.optimizer)
        """By the names of their components."""
        self.data = data
        self.root = root
        self.counters = Counters()
        self.manager: CheckpointManager | None = None
        """The manager while `fit` runs."""
        self.ema = None if ema is None else Average(self.model, ema)
        self._counted = {
            unit
            for unit, count in ((Unit.SAMPLE, count_samples), (Unit.TOKEN, count_tokens))
            if count is not None
        }
        self._every = checked_every(every, self._counted, handles_signals=stop is not None)
        self._keep = keep
        self._savers = tuple(savers)
        self._on_existing: OnExisting = on_existing
        self._takeover = takeover
        self._stop = stop
        self._between = Between(self.counters)
        self._accumulate = accumulate
        self._seed = seed
        self._log_every = log_every
        self._count_samples = count_samples
        self._count_tokens = count_tokens
        self._gate = HealthGate(unhealthy)
        self._numerics = Numerics(checked_precision(precision), making.device_type(self.model, on))
        self._way_back: WayBack
        self._update = Update(
            model=self.model,
            optimizer=self.optimizer,
            schedulers=tuple(self.schedulers.values()),
            loss=loss,
            clip=Clip(norm=clip_norm, value=clip_value),
            numerics=self._numerics,
            device=on,
            callbacks=self._callbacks,
            begin_update=lambda: self._way_back.begin_update(),
        )
        self._train_on = WithoutSteps.of(skip_steps, self._update, self)
        self._validations = self._make_validations(validate)
        self._goal: Time | None = None
        self._has_begun = self._is_within_step = False
        self._stop_reason: str | None = None
        self._ending: EndReason | None = None
        self._ends_at_s = float("inf")
        self._validated_step: int | None = None
        self._logged_step: int | None = None
        self._looked_step: int | None = None
        self._begun = self.counters.timestamp
        """Where the step began that is under way, or was the last one."""
        self._metrics = LazyMetrics({})
        """What is known of the last step that was done."""
        self.state = self._components(state or {})
        check_state(self.state)
        self._way_back = WayBack(
            stop=stop,
            is_exact=asks_for(self._every, "exception"),
            data=data,
            state=self.state,
            callbacks=self._callbacks,
        )
        self._callbacks.tell(Callback.setup)

    def fit(self, until: str | int, *, max_time: str | Time | None = None) -> Outcome:
        """Train until the whole run has come to `until`: a number of steps, or "10_000step",
        "2ep", "1e9tok". What was done by earlier processes counts.

        Resumes from the newest usable checkpoint of the root. When the goal is reached already,
        says so and neither trains nor saves. On return the last step is durable.

        A signal that asks to stop ends it after the present step; a fetch from a
        `holdfast.data.Loader` and a validation are given up, and done anew after the resume. When
        all is durable and closed, it raises what ends the program as docs/running.md says.

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
            SystemExit, KeyboardInterrupt: a signal asked to stop, the latter for SIGINT.
        """
        goal = making.checked_goal(until)
        check_counted(goal.unit, f"until={until!r}", self._counted)
        self._ends_at_s = time.monotonic() + making.checked_max_time_s(max_time)
        self._goal = goal
        self._is_within_step = False
        self._stop_reason = self._ending = None
        self._validated_step = self._logged_step = self._looked_step = None
        with self._stop or nullcontext():
            return self._fit_to(goal)

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

    def validate(self, which: Which | None = None) -> dict[str, float]:
        """Validate now, whatever is due; gives the metrics, as a checkpoint would get them.

        Args:
            which: one checkpoint, as for `validate_all`; None: the weights as they are.

        Raises:
            UsageError: the Trainer has no `validate`, `which` is given while `fit` runs, or it is
                a pattern for several checkpoints.
            NoCheckpoint: nothing answers `which`.
            HookFailed: a callback raised.
        """
        if which is not None:
            chosen = self._chosen(which)
            if len(chosen) > 1:
                raise UsageError(f"which={which!r}: {len(chosen)} checkpoints; use validate_all")
            return dict(self._validate_each(chosen)[0].metrics)
        self._check_validates()
        if self.manager is not None:
            return self._validated(self._validations.parts)
        with self._closing(), self._managed(None):
            return self._validated(self._validations.parts)

    def validate_all(self, which: Which | Iterable[Which] | None = None) -> tuple[Validated, ...]:
        """Validate checkpoints, one after the other, on all that there is to validate on.

        Each is loaded once, into the model (and its average), which have their own weights again
        afterwards. Nothing is claimed or logged, and none of them is deleted meanwhile.
        `edit_load` sees these components alone.

        Args:
            which: one checkpoint or several: "latest", a step, a folder, a tag or a label of this
                root, also as a pattern such as "step=*"; or a path, `other/root@which`, of which
                every part may be a pattern. None: the newest of this root.

        Returns:
            By step, then in the order in which they were made; each checkpoint once.

        Raises:
            NoCheckpoint: nothing answers one of them; nothing was validated.
            UsageError: the Trainer has no `validate`, or `fit` runs.
            FormatError, MismatchError: one is damaged, or does not fit.
            HookFailed: a callback raised.
        """
        return self._validate_each(self._chosen(which))

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

    def _fit_to(self, goal: Time) -> Outcome:
        costs, begun = SaveCosts(), list[PendingSave]()
        hooks = StateHooks(
            before_save=self._before_save,
            edit_save=self._editing(Callback.edit_save),
            save_begun=begun.append,
            edit_load=self._editing(Callback.edit_load),
        )
        with self._closing():
            manager = CheckpointManager(
                self.root,
                self.state,
                every=self._every,
                max_duration=goal,
                keep=self._keep,
                savers=self._savers,
                on_existing=self._on_existing,
                on_failure="warn",
                hooks=hooks,
                counters=lambda: self.counters.totals,
                takeover=self._takeover,
                stop=self._stop,
                sinks=(log_event, costs),
            )
            with manager, self._managed(manager):
                return self._fit(manager, costs, begun)

    def _fit(
        self, manager: CheckpointManager, costs: SaveCosts, begun: list[PendingSave]
    ) -> Outcome:
        tell = self._callbacks.tell
        tell(Callback.before_load)
        began_s = time.monotonic()
        found = manager.resume()
        load_s = time.monotonic() - began_s
        if found is None:
            self._begin_afresh()
        self._begin_counting()
        self._between.is_here = True
        if found is not None:
            tell(Callback.resumed, found)
        is_complete = (
            found is not None and found.save_class == "permanent" and not self.counters.unvalidated
        )
        if self._is_at_goal():
            logger.info("%s is reached already, at step %d", self.goal, self.counters.step)
            if is_complete:
                tell(Callback.already_done)
                return self._outcome("goal")
        saver = Saver(
            manager,
            begun,
            self._between,
            self.counters,
            self._callbacks,
            costs,
            saved_step=self.counters.step if is_complete else None,
        )
        tell(Callback.fit_start)
        if found is not None:
            cost = {"load/duration_s": load_s, "load/nbytes": float(found.nbytes)}
            tell(Callback.checkpoint_loaded, found, cost)
        self.model.train()
        if found is None:
            saver.at(["start"], {})
        try:
            self._train(saver, found)
        except Exception as error:
            if self._way_back.is_exact and not isinstance(error, OwnershipError):
                self._save_after(error, saver)
            raise
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

    def _train(self, saver: Saver, found: Checkpoint | None) -> None:
        """Do the steps up to the goal, and after each of them what it is time for.

        `found` is the checkpoint from which training goes on.
        """
        metrics, now, is_over = LazyMetrics({}), self.counters.timestamp, False
        begun_at, before = now.step, now
        known: Metrics = {} if found is None else found.metrics
        self._metrics = LazyMetrics(known)
        self._validations.begin(self.goal, begun_at, known)
        if any(name.startswith("val/") for name in known):
            self._validated_step = begun_at
        if found is not None and self.counters.unvalidated:
            known = self._made_up(saver, found)
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
        if self._ending == "signal":
            saver.stop(self._events(before, now) if now.step > begun_at else [], metrics)
        else:
            saver.finish(metrics, "final" if self._ending == "goal" else str(self._ending))
        self._callbacks.tell(Callback.fit_end)
        saver.settle(metrics)  # what was saved in that hook

    def _steps(self) -> Iterator[LazyMetrics]:
        """Do the steps up to the goal; gives the metrics of each when it is done and counted."""
        tell = self._callbacks.tell
        while not self._is_done():
            begun_at = self.counters.batch
            self._begin_step()
            if begun_at == 0:
                tell(Callback.epoch_start)
            with preserved():
                # Beginning an iteration of torch's own loaders draws from the global generator.
                batches = iter(self.data)
            epoch = self.counters.epoch
            while not self._is_done() and self.counters.epoch == epoch:
                self._begin_step()
                tell(Callback.before_data)
                self._has_begun = True
                try:
                    with self._way_back.fetching():
                        window = next_window(batches, self._accumulate)
                except Interrupted:
                    break
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
        if not self._between.is_here:
            self._way_back.go()  # it ended where a step had begun
        self._mark(is_within_step=False)

    def _begin_step(self) -> None:
        if self._between.is_here:
            self._begun = self.counters.timestamp
            self._way_back.begin_step()
            self._mark(is_within_step=True)

    def _mark(self, *, is_within_step: bool) -> None:
        """Note where training is, for the stamps of logs and for saves."""
        self._is_within_step = is_within_step
        self._between.is_here = not is_within_step

    def _step(self, window: list[Any], batches: Iterator[Any]) -> LazyMetrics:
        tell = self._callbacks.tell
        tell(Callback.step_start)
        metrics = self._train_on(window)
        if self.ema is not None:
            self.ema.follow(self.model)
        self.counters.add_step(
            len(window), _total(self._count_samples, window), _total(self._count_tokens, window)
        )
        # What is saved after the epoch's last step is to say that the epoch is over.
        is_over = len(window) < self._accumulate or self._ends_now(batches)
        if is_over:
            self.counters.end_epoch()
        self._metrics = metrics
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
        step, due = self.counters.step, []
        self._looked_step = step
        if self._validations:
            is_last = is_over and self._ending == "goal"
            due = self._validations.due(before, self.counters.timestamp, is_last=is_last)
        if due:
            metrics = self._joined(metrics, due)
        if self.counters.unvalidated:
            return metrics  # logged by the resume that validates
        # A run that is stopped is to have the log of one that is not.
        is_due = step % self._log_every == 0 or (is_over and self._ending != "signal")
        if due or (is_due and metrics and self._logged_step != step):
            self._logged_step = step
            self._callbacks.tell(Callback.log, metrics)
        return metrics

    def _joined(self, metrics: LazyMetrics, parts: Sequence[Part]) -> LazyMetrics:
        """The metrics with those of these validations, or without when a signal cuts them short."""
        self.counters.unvalidated = [part.name for part in parts]
        try:
            with self._way_back.validating():
                found = self._validated(parts)
        except Interrupted:
            return metrics
        self.counters.unvalidated = []
        self._validated_step = self.counters.step
        self._metrics = metrics.joined(found)
        return self._metrics

    def _made_up(self, saver: Saver, found: Checkpoint) -> Metrics:
        """Do the validation that a signal or an error kept from the checkpoint's step.

        The checkpoint is then made once more, for those who look for the best one.
        """
        step = self.counters.step
        parts = self._validations.made_up(self.counters.unvalidated, step)
        metrics = self._joined(LazyMetrics(found.metrics), parts)
        if self.counters.unvalidated:
            return metrics
        self._logged_step = step
        self._callbacks.tell(Callback.log, metrics)
        if not self._is_done():
            save_class: SaveClass = "permanent" if found.save_class == "permanent" else "ephemeral"
            saver.again(Due(save_class, found.reason), metrics)
        return metrics

    def _save_after(self, error: Exception, saver: Saver) -> None:
        """Save the state of the last boundary; the error is raised whatever becomes of it."""
        try:
            if not self._between.is_here and not self._way_back.go():
                logger.error(
                    "step %d failed in its update, so nothing of it can be saved; the newest "
                    "checkpoint is %s",
                    self.present_step,
                    saver.newest() or "none",
                )
                return
            self._mark(is_within_step=False)
            step, metrics = self.counters.step, self._metrics
            if self._looked_step != step and step > self._begun.step:
                parts = self._validations.due(self._begun, self.counters.timestamp, is_last=False)
                self.counters.unvalidated = [part.name for part in parts]
            saver.at(["exception"], metrics)
            saver.settle(metrics)
        except Exception as failure:
            logger.exception("after %r the state could not be saved: %s", error, failure)

    def _events(self, before: Timestamp, now: Timestamp) -> list[Event]:
        """What has happened at this step, for triggers."""
        events: list[Event] = ["step"]
        if now.epoch != before.epoch:
            events.append("epoch")
        if self._validated_step == now.step:
            events.append("evaluation")
        return events

    def _check_validates(self) -> None:
        if not self._validations:
            raise UsageError("there is nothing to validate on: give the Trainer validate=…")

    def _chosen(self, which: Which | Iterable[Which] | None) -> list[Target]:
        self._check_validates()
        if self.manager is not None:
            raise UsageError(f"which={which!r}: while fit runs, only its weights can be used")
        return select(self.root, which)

    def _validate_each(self, targets: Sequence[Target]) -> tuple[Validated, ...]:
        weights = {"model": self.model, **({} if self.ema is None else {"ema": self.ema.model})}
        found = []
        with self._closing(), self._managed(None), kept_all(targets), borrowed(weights):
            for target in targets:
                checkpoint = target.load(weights, self._editing(Callback.edit_load))
                metrics = self._validated(self._validations.parts)
                found.append(Validated(checkpoint=checkpoint, metrics=metrics))
        return tuple(found)

    def _validated(self, parts: Iterable[Part]) -> dict[str, float]:
        """The metrics of each part, of the weights that it is to validate."""
        found: dict[str, float] = {}
        # Within them, modes and generators are not those of training.
        with self._between.left():
            for part in parts:
                use_average = self.ema is not None and part.plan.use_ema
                model = self.ema.model if self.ema is not None and use_average else self.model
                found |= part.on(model, self.model)
        return found

    def _editing(
        self, hook: Callable[[Callback, Training, StateView], None]
    ) -> Callable[[StateView], None] | None:
        """The function that tells a hook of a view; None when nobody would look at it."""
        if not self._callbacks.listens(hook):
            return None

        def edit(view: StateView) -> None:
            with self._between.left():
                self._callbacks.tell(hook, view)

        return edit

    def _before_save(self, now: Timestamp, metrics: Metrics) -> tuple[str, ...]:
        """Prepare everybody for a save; gives the reasons why its state is unhealthy."""
        self._between.check(now.step)
        with self._between.left():
            try:
                found = self._gate.check(now.step, self.model, metrics)
            except UnhealthyState as error:
                if self._gate.policy == "skip":
                    raise SaveSkipped(f"{error}\nno checkpoint is made of it") from error
                raise
            self._callbacks.tell(Callback.before_save)
        return found

    @contextmanager
    def _managed(self, manager: CheckpointManager | None) -> Iterator[None]:
        self.manager = manager
        try:
            yield
        except BaseException as error:
            self._callbacks.tell_exception(error)
            raise
        finally:
            self.manager, self._between.is_here = None, False

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
        goal = self.goal
        value: int | None = getattr(self.counters, argument_name(goal.unit))
        return value is not None and value >= goal.value

    def _is_done(self) -> bool:
        """Whether training ends here; once it does, it stays so, whatever the clock says."""
        if self._ending is None:
            if self._is_at_goal():
                self._ending = "goal"
            elif self._stop is not None and self._stop.requested is not None:
                self._ending = "signal"
            elif self._stop_reason is not None:
                self._ending = "stopped"
            elif time.monotonic() >= self._ends_at_s:
                self._ending = "max_time"
        return self._ending is not None

    def _outcome(self, reason: EndReason) -> Outcome:
        detail = self._stop_reason if reason == "stopped" else None
        if reason == "signal" and self._stop is not None:
            detail = self._stop.requested
        return Outcome(reason=reason, step=self.counters.step, detail=detail or "")

    def _make_validations(self, given: Any) -> Validations:
        plans = plans_of(given)
        for plan in plans:
            check_counted(plan.trigger.unit, f"validation every='{plan.every}'", self._counted)
        return Validations(
            [
                Validator(
                    plan=plan,
                    loss=self._update.loss,
                    numerics=self._numerics,
                    device=self._update.device,
                    callbacks=self._callbacks,
                    weigh=plan.weigh or self._count_samples or size_of,
                    waiting=lambda: self._way_back.waiting(),
                )
                for plan in plans
            ]
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
