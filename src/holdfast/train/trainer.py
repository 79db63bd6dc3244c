"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

Makes the parts of a training from the arguments; `fitting` runs a call of `fit`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from holdfast.arguments import check_arguments
from holdfast.checkpoints import Checkpoints, StateHooks, best_rules
from holdfast.control.stop import Stop
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.loading.optional_components import MissingComponentPolicy
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time, Unit
from holdfast.results import Checkpoint
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.capture.edits import StateView
from holdfast.state.components import PROGRESS, RNG, TRAINER, PerRank, check_state, marked
from holdfast.state.patterns import convert_names
from holdfast.state.planning.schedulesettings import check_override
from holdfast.store.base import Store
from holdfast.train import build
from holdfast.train.argument_checks import (
    Counts,
    asks_for,
    check_counted,
    check_range,
    checked_every,
)
from holdfast.train.averages import SWA, Average, EqualAverage, cast_averages
from holdfast.train.build import epoch_length, make_schedulers
from holdfast.train.callbacks.hooks import Callback, Logger
from holdfast.train.callbacks.measuring import read_numbers
from holdfast.train.callbacks.registry import Callbacks, HookFailed
from holdfast.train.curves import EpochLength
from holdfast.train.evaluation.predicting import Predictions, predict
from holdfast.train.evaluation.targets import Target, Validated, Which, borrowed, kept_all, select
from holdfast.train.evaluation.validation import (
    Restarting,
    TrainerValidations,
    Validation,
    ValidationPart,
    Validator,
    WatchedMetricsCheck,
    plans_of,
    size_of,
    undisturbed,
)
from holdfast.train.fit.config import config_of, config_of_data
from holdfast.train.fit.ending import (
    EndReason,
    FitEnding,
    Outcome,
    check_load_best,
    finder,
    saves_of_validations,
)
from holdfast.train.fit.fitting import Fit, TrainerParts
from holdfast.train.fit.saving import Policy, Saves, StepPosition, check_health
from holdfast.train.fit.starting import DryRunManager, NullManager, Resuming, StartingPoint
from holdfast.train.fit.tuner import (
    LearningRateCurve,
    TrialSteps,
    find_learning_rate,
)
from holdfast.train.outputs import Entry, Histogram, Table, entry_of
from holdfast.train.schedules import Schedules
from holdfast.train.step.batches import Limits
from holdfast.train.step.device_metrics import LazyMetrics, Numbers, RankMeans
from holdfast.train.step.epoch_metrics import Scores, check_apart
from holdfast.train.step.micro_batches import MicroBatches, Weighing
from holdfast.train.step.numerics import NanBudget, Numerics, Precision, checked_precision
from holdfast.train.step.several_optimizers import SeveralUpdate, UpdateFunction
from holdfast.train.step.step import Clip, LossFunction, Update, checked_skips, moved
from holdfast.train.step.undo import Boundary, StepUndo, modules_of, small
from holdfast.train.strategies import Name, Strategy, chosen_strategy, parallel_of, recompute
from holdfast.train.training import Counters, Metrics, Training

logger = logging.getLogger("holdfast")

C = TypeVar("C", bound=Callback)

_IN_EVERY_RUN = frozenset({"model", "optimizer", "data"})
"""Components that every checkpoint from which a Trainer goes on has."""
# For one release: removed arguments of the Trainer, with what replaces each.


class Trainer:
    """Trains a model to a goal, with checkpoints; a new process resumes an unfinished run.

        trainer = Trainer(model, optimizer=optimizer, data=loader, loss=loss,
                          checkpoints=Checkpoints("runs/gpt", every="500step"))
        trainer.fit("10_000step")      # killed? run the script again

    A step trains on `accumulate` batches (fewer where an epoch ends), and saves are made between
    steps only: after the hooks of the step, its validation and its log. An epoch whose
    end is known (the data has a length or `at_epoch_end`) ends within its last step. A failed
    save is logged as a warning and retried after the next step; the third failure in a row is
    raised.
    """

    @check_arguments(but=("model", "optimizer"))
    def __init__(
        self,
        model: nn.Module | build.MakeModel,
        *,
        optimizer: build.Optimizers | None = None,
        data: Any = None,
        loss: LossFunction | None = None,
        update: UpdateFunction | None = None,
        checkpoints: str | os.PathLike[str] | Store | Tiered | Checkpoints | None,
        scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        stop: Stop | None = Stop(),
        validate: Any = None,
        skip_steps: Iterable[range] = (),
        accumulate: int = 1,
        precision: str | int | Precision = "fp32",
        clip: float | Clip | Mapping[str, float | Clip] | None = None,
        ema: float | None = None,
        swa: SWA | None = None,
        unhealthy: Policy = "warn",
        skip_nan: int | None = None,
        detect_anomaly: bool = False,
        limits: Limits = Limits(),
        seed: int = 0,
        device: str | torch.device | None = None,
        strategy: Name | Strategy | None = None,
        activation_checkpointing: bool | Collection[type[nn.Module]] = False,
        compile: bool | Mapping[str, Any] = False,
        callbacks: Iterable[Callback] = (),
        counts: Counts = Counts(),
        log: bool | str | os.PathLike[str] | None = None,
        log_every: int = 10,
        progress: bool = True,
        metrics: Mapping[str, Any] | None = None,
        micro_batch: Literal["auto"] | int | None = None,
    ) -> None:
        """Set up a run; reads, writes and claims nothing. docs/trainer.md describes each argument.

        Args:
            model: the model, or a function that makes it. `fit` puts it into training mode.
            optimizer: the optimizer, or a function of the model that makes it. Optimizer, data and
                loss may be left out where nothing is trained (docs/trainer.md).
            scheduler: one or a list; each is an object, or a function of the optimizer that makes
                it. It has `step()`, called after each step (or as a `Schedule` says), and is
                saved. `warmup`, `cosine`, `linear`, `wsd`, `one_cycle` are ready.
            data: batches with a position: a `Loader` or `Stream` of `holdfast.data`, or an iterable
                with `state_dict` and `load_state_dict` whose iteration gives the rest of an epoch.
                Its length (in batches of an epoch) or `at_epoch_end` shows the end of an epoch
                (docs/trainer.md).
            update: trains a whole step in place of `loss`: a function of a `Control` and the batch
                (docs/trainer.md).
            loss: called with the model and a batch; gives the batch's mean loss, that and a dict
                of metrics, a `StepOutput`, or an object or a mapping with a `loss`.
            checkpoints: the root of the run (a path, a URL, a Store or a `Tiered`), or a
                `Checkpoints` with a root and options. The last step is always saved, and fractions
                of the run in `every` are those of the goal. Saves overlap with training on
                accelerators, where the record does not say otherwise. With None nothing is saved or
                resumed (docs/trainer.md).
            stop: the signals that end `fit`, or make it save; None: it handles none.
            state: further components to save.
            validate: a loader, loaders by name, or one `Validation` or a list of them.
            skip_steps: steps whose batches are not trained on, such as `[range(100, 110)]` for
                those from 100 to 109; they count, and schedulers step.
            accumulate: batches of a step.
            precision: "fp32", "bf16", "fp16" or a `Precision`; "bf16-mixed", "16-mixed" and other
                libraries' names are understood.
            clip: the largest norm of all gradients together, or a `Clip`.
            ema: decay of an average of the weights, which is saved, and used for validation.
            swa: an equal average of the weights from late in the run, which is saved.
            unhealthy: what to do when loss or weights are not finite at a save.
            skip_nan: how many steps of the run may be skipped because loss or gradients are not
                finite; one more is an error. None: such a step is applied, as any other.
            detect_anomaly: whether `fit` runs under torch's anomaly detection, which is slow and
                raises at the operation that gave NaN in the backward pass.
            limits: for trials: parts of epochs and validations, the same few batches
                (`overfit`), one batch of each (`fast_dev_run`), a validation before training.
            seed: of the global generators, when a run starts without a checkpoint.
            device: where the model and batches are moved; None: to the accelerator that there is
                (with several ranks that of the local rank), unless the model is on one already.
            strategy: how several ranks train (docs/trainer.md): "ddp", "fsdp2", or `DDP` or
                `FSDP2` with options; "single": this process trains alone, whatever others do. None:
                with DDP where torchrun has started several processes, unless the model is sharded.
            activation_checkpointing: compute activations again in the backward pass: of these
                classes of modules; True: of each item of each `nn.ModuleList`.
            compile: whether to compile the model in place, or options of `torch.compile`.
            callbacks: see `Callback`.
            counts: what is counted besides steps and epochs: samples, tokens, cycles.
            log: write JSON lines to the file named, or to the root's `log/train.jsonl` (True, and
                None where the root is a local folder).
            log_every: steps between two calls of `log`, each of which may wait for the device.
            progress: show the progress: a bar on a terminal, else a line at each log, on stderr.
            metrics: metrics of the training that are no means, over each epoch, by name: objects
                with `update`, `compute` and `reset`, functions of all outputs, or `Measured`.
            micro_batch: most samples in a forward pass: larger batches are split, with the
                gradient of the whole; "auto": as many as fit into memory.
        """
        callbacks = list(callbacks)
        given = dict(locals())
        build.check_data(data)
        check_range("accumulate", accumulate, 1, 2**31)
        check_range("seed", seed, 0, 2**32)
        check_range("log_every", log_every, 1, 2**63)
        on = build.checked_device(device)
        group = build.group_for(strategy, on)
        on = build.device_for(group, on, model)
        self.model = build.make_model(model, seed, on)
        chosen = chosen_strategy(strategy, self.model, group)
        if limits.fast_dev_run:
            logger.info("limits: fast_dev_run: nothing of this training is saved or logged")
            checkpoints, log, accumulate = None, False, 1
        self.checkpoints = Checkpoints.of(checkpoints, {})
        """The argument `checkpoints`, as a record: the root and how checkpoints are made."""
        loggers = build.own_loggers(self.checkpoints, log, progress)
        if limits.fast_dev_run:
            callbacks = [item for item in callbacks if not isinstance(item, Logger)]
        self._callbacks = Callbacks([*callbacks, *loggers], self, is_leader=group.is_leader)
        self._callbacks.call_hook(Callback.model_made)
        self.ema = None if ema is None else Average(self.model, ema)
        self.swa = None if swa is None else EqualAverage(self.model, swa)
        recompute(self.model, activation_checkpointing)
        self._parallel = parallel_of(chosen, group, on)
        for module in self._with_averages():
            self._parallel.prepare(module)
        if compile is not False:
            self.model.compile(**({} if compile is True else compile))
        if isinstance(optimizer, Mapping) or update is not None:
            build.check_several(
                loss=loss,
                update=update,
                micro_batch=micro_batch,
                skip_nan=skip_nan,
                metrics=metrics,
            )
        self.optimizer = build.make_optimizer(
            optimizer, self.model, self.model is not model, takes_closure=update is not None
        )
        """The optimizer, or several by name; None where nothing is trained."""
        self._schedules = Schedules(make_schedulers(scheduler, self.optimizer), self._callbacks)
        self.schedulers = self._schedules.components
        """Schedulers by component name."""
        self._limits = limits
        self._given_data = data
        self.data = limits.of_data(data)
        self.counters = Counters()
        self.manager: CheckpointManager | None = None
        """Manager while `fit` runs, else None."""
        self._is_running = False
        self._counts = counts
        self.counters.cycle_length = counts.cycle_length
        checked_times = partial(
            checked_every,
            extra=counts.units,
            handles_signals=stop is not None,
            validates=validate is not None,
        )
        self._every = checked_times(self.checkpoints.every)
        for saver in self.checkpoints.savers:
            checked_times(saver.policy, what=f"saver {saver.name!r}: every")
        self._overlap = build.checked_overlap(
            self.checkpoints.overlap, build.device_type(self.model, on)
        )
        self._stop = stop
        self._place = StepPosition(self.counters)
        self._numbers = Numbers()
        self._unhealthy = unhealthy
        self._numerics = Numerics(checked_precision(precision), build.device_type(self.model, on))
        self._way_back: StepUndo
        build.check_shared_data(data, chosen, group)
        is_single = isinstance(self.optimizer, torch.optim.Optimizer)
        named = {"": self.optimizer} if is_single and update is not None else self.optimizer
        build.check_parallel(
            named,
            self.model,
            chosen,
            self._numerics,
            self._every,
            group,
        )
        self._scores = Scores(metrics or {}, group, what="metrics", is_saved=True)
        self._micro_batches = MicroBatches(micro_batch, group)
        self._nan = (
            None
            if skip_nan is None
            else NanBudget(skip_nan, group, lambda: self.present_step, self._modules)
        )
        self._update = Update(
            model=self.model,
            called=self.model if optimizer is None else self._parallel.wrap_model(self.model),
            parallel=self._parallel,
            means=RankMeans(group),
            weighing=Weighing(group, is_scaled=self._numerics.scaler is not None),
            micro_batches=self._micro_batches,
            scores=self._scores,
            snapshot=self._snapshot,
            optimizer=self.optimizer,  # not used where it is None
            schedulers=self._schedules.plain_schedulers,
            loss=build.no_loss if loss is None else loss,
            clip=Clip() if isinstance(named, Mapping) else build.checked_clip(clip),
            numerics=self._numerics,
            device=on,
            callbacks=self._callbacks,
            numbers=self._numbers,
            begin_update=self._begin_update,
            nan=self._nan,
        )
        if isinstance(named, Mapping):
            self._update = SeveralUpdate.from_update(
                self._update,
                optimizers=named,
                clips=build.clips_of(clip, named),
                update=update,
                accumulate=accumulate,
            )
        self._validate = validate
        self._strategy = chosen
        self._validations = self._make_validations(validate)
        self._schedules.check_steppable(counts.units, validates=validate is not None)
        self._ending: FitEnding | None = None
        extra, self._per_rank = marked(state or {})
        self.state = self._collect_components(extra)
        check_state(self.state)
        build.check_held(self.state, loss)
        self.checkpoints.check_components({*self.state, RNG})
        self._way_back = self._make_way_back()
        self._gear = TrainerParts(
            model=self.model,
            ema=self.ema,
            swa=self.swa,
            data=self.data,
            counters=self.counters,
            place=self._place,
            callbacks=self._callbacks,
            update=self._update,
            skip_steps=checked_skips(skip_steps),
            schedules=self._schedules,
            validations=self._validations,
            validated=self._validated,
            way_back=self._way_back,
            accumulate=accumulate,
            log_every=log_every,
            seed=seed,
            counts=counts,
            checkpoints=self.checkpoints,
            best=saves_of_validations(self.checkpoints),
            watched=WatchedMetricsCheck(
                self._watched,
                self._validations,
                [f"train/{name}" for name in self._scores.metric_names],
            ),
            sanity=self._check_sanity,
        )
        self._config = config_of(
            given,
            checkpoints=self.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            schedulers=self.schedulers,
        )
        self._scopes: list[str] = []
        self._is_complete = optimizer is not None and (loss is not None or update is not None)
        self._detects_anomaly = detect_anomaly
        self._callbacks.call_hook(Callback.setup)

    @check_arguments(but=("until", "max_time"))
    def fit(
        self,
        until: str | int,
        *,
        max_time: str | Time | None = None,
        data: Any = None,
        without: Collection[str] = (),
        start_from: str | os.PathLike[str] | None = None,
        load_best: bool = False,
        override: Collection[str] = (),
        resume: str | int = "if_available",
        strict: bool = True,
    ) -> Outcome:
        """Train the run until it reaches `until`; the steps of earlier processes count.

        Resumes from the newest usable checkpoint of the root. If the goal is reached already,
        that is logged, and nothing is trained or saved. On return the last step is durable. A
        component that the checkpoint lacks, such as a callback or an average that the run did not
        have before, stays as it is, with a warning and a note in the outcome.

        A stop signal ends it after the current step; a fetch from a `Loader` or `Stream` and a
        validation are interrupted, and done again after the resume. When all is durable and
        closed, an exception ends the program as docs/running.md describes.

        Args:
            until: the goal, a number of steps, or "10_000step", "2ep", "1e9tok"; it may differ from
                that of earlier calls and processes.
            max_time: time after which this call ends, at the end of a step, such as "3h50min";
                `sys.exit(trainer.fit(…).exit_code)` then requests another run of the script.
            data: batches for this and later calls, as the argument of the Trainer; None: as before.
            without: components that the checkpoint may have and this Trainer does not, such as
                "ema" or "callback-<name>"; they are not loaded.
            start_from: checkpoint of another root to begin with: "old", "old@step=3",
                "s3://bucket/old@best" or the folder of a checkpoint. The whole state is loaded,
                except the ids under which loggers record. Once `root` has a checkpoint, the run
                resumes from that, and nothing is loaded from `start_from`.
            load_best: at the end, load the weights of the best checkpoint into the model and its
                average. Nothing else changes: the run goes on from its newest checkpoint.
            override: settings that take the script's value when a checkpoint is loaded: options of
                the optimizer, such as "lr", or "optimizer.param_groups.0.lr" of one group, and of
                schedulers, such as "scheduler.total_steps". All others stay as in the checkpoint,
                with a warning.
            resume: "always" requires a checkpoint, in the root or by `start_from`. "never" starts
                a new run beside the checkpoints of the root, which stay, as
                `CheckpointManager.start_new` does: at each start of the script. A checkpoint of the
                root, such as "step=2", "best" or a tag, rolls the run back to it, even if there are
                newer ones, which stay: at each start of the script, with a warning.
            strict: False: resume with a model that has gained or lost parameters. New ones keep
                their initial values and have no moments; all others are resumed. A warning lists
                both kinds (docs/loading.md).
        """
        if data is not None:
            self._use_data(data)
        if self.data is None or not self._is_complete:
            raise UsageError(
                "fit needs an optimizer, a loss and data; this Trainer was made without one of them"
            )
        goal = build.checked_goal(until)
        if self._limits.num_steps is not None:
            goal = Time(self._limits.num_steps, Unit.STEP)
        check_counted(goal.unit, f"until={until!r}", self._counts.units)
        without, override = convert_names(without, "without"), convert_names(override, "override")
        check_override(self.state, override)
        MissingComponentPolicy(without=without).check_live_state(self.state)
        if self._limits.fast_dev_run and (start_from is not None or load_best):
            logger.info("limits: fast_dev_run: start_from and load_best are ignored")
            start_from, load_best = None, False
        start = StartingPoint.resolve_source(start_from, self.root)
        resuming = Resuming(resume, strict=strict, override=override)
        resuming.check_resume_arguments(start, has_root=self.root is not None)
        if load_best:
            check_load_best(self.checkpoints, validates=bool(self._validations))
        self._schedules.compute_lengths(goal, self._epoch)
        self._validations.compute_intervals(goal, self._epoch)
        self._ending = ending = FitEnding(
            goal,
            self.counters,
            stop=self._stop,
            max_time_s=build.checked_max_time_s(max_time),
            group=self._parallel.group,
            shares_signals=self.root is None,
            find_best=finder(self.checkpoints),
        )
        self._place.is_under_way = False
        watch = torch.autograd.set_detect_anomaly(True) if self._detects_anomaly else nullcontext()
        with self._stop or nullcontext(), watch:
            return self._fit_to(ending, without, start, resuming, load_best)

    @property
    def root(self) -> str | os.PathLike[str] | Store | Tiered | None:
        """The root of the run; None: nothing is saved."""
        return self.checkpoints.root

    @property
    def goal(self) -> Time:
        """Goal of the current or last `fit`."""
        if self._ending is None:
            raise UsageError("there is no goal before fit is called")
        return self._ending.goal

    @property
    def end_reason(self) -> EndReason | None:
        """The `reason` of the outcome of the current or last `fit`; None while it continues."""
        return None if self._ending is None else self._ending.reason

    @property
    def present_step(self) -> int:
        """The step under way; between steps, the last completed one."""
        return self._place.present_step

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._parallel.group.world_size

    @property
    def is_log_step(self) -> bool:
        """Whether the present step is logged: each `log_every`-th, and the last one."""
        return self.present_step % self._gear.log_every == 0 or self.is_last

    @property
    def is_first(self) -> bool:
        """Whether the present step is the first one of the current or last call of `fit`."""
        ending = self._ending
        return (
            ending is not None
            and ending.begun_at is not None
            and self.present_step == ending.begun_at + 1
        )

    @property
    def is_last(self) -> bool:
        """Whether the present step is the last one of the current or last call of `fit`.

        Within a step this is known of a goal in steps only; from `step_end` on, of any.
        """
        if self._ending is None:
            return False
        goal = self._ending.goal
        is_known = self._ending.reason is not None or self._ending.is_at_goal()
        return is_known or (goal.unit is Unit.STEP and self.present_step >= goal.value)

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks in the order of their calls, with the loggers that come by themselves."""
        return self._callbacks.all

    def callback(self, kind: type[C]) -> C:
        """Return the only callback of a class."""
        found = [item for item in self.callbacks if isinstance(item, kind)]
        if len(found) != 1:
            names = [type(item).__name__ for item in self.callbacks]
            raise UsageError(f"{len(found)} callbacks are a {kind.__name__}; there are {names}")
        return found[0]

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Begin the names of metrics that are logged in the block with `name/`; may be nested."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"scope: name={name!r}: must be a text")
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def validate(self, which: Any = None, *, data: Any = None) -> dict[str, float]:
        """Validate now, whether due or not; returns the metrics as a checkpoint would get them.

        Args:
            which: one checkpoint, as for `validate_all`; None: the weights as they are. Loaders
                are taken as `data`.
            data: what to validate on, as the argument `validate` of the Trainer; None: on that.
        """
        if which is not None and not isinstance(which, str | int | os.PathLike):
            if data is not None:
                raise UsageError(f"which={which!r}: not a checkpoint, and data is given, too")
            which, data = None, which
        return self._evaluate(self._choose_parts(data), which)

    def test(self, data: Any, *, which: Which | None = None) -> dict[str, float]:
        """Evaluate on loaders that no decision of the training has seen: metrics `test/…`.

        After a `fit` of this Trainer they are logged, too, at the step of the tested weights.

        Args:
            data: a loader, loaders by name, or a `Validation` or a list of them.
            which: one checkpoint, as for `validate_all`; None: the weights as they are.
        """
        return self._evaluate(self._choose_parts(data, kind="test"), which, is_test=True)

    def predict(
        self,
        data: Any,
        *,
        to: str | os.PathLike[str],
        which: Which | None = None,
        outputs: Callable[[nn.Module, Any], Any] | None = None,
        use_ema: bool = True,
        batches_per_part: int = 100,
    ) -> Predictions:
        """Write the model's outputs for all samples into a folder, in the order of the samples.

        They are written by parts, each as soon as it is complete. Several ranks share the work.

        Args:
            data: a loader that does not shuffle.
            to: local folder of the parts, safetensors files, without earlier predictions; shared by
                all ranks.
            which: one checkpoint, as for `validate_all`; None: the weights as they are.
            outputs: called with the model and a batch; gives a tensor or a dict of tensors, whose
                first dimension is the samples of the batch. None: `model(batch)`.
            use_ema: whether the averaged weights predict, if the Trainer keeps an average.
            batches_per_part: batches of a part, which are kept in memory until it is written.
        """
        build.check_loader(data)
        weights = self._weights
        with ExitStack() as stack:
            if which is not None:
                targets = self._one(which)
                stack.enter_context(kept_all(targets))
                stack.enter_context(borrowed(weights))
                targets[0].load_modules(weights, self._editing(Callback.edit_load))
            self._share_buffers()
            chosen = self.ema.cast.update() if self.ema is not None and use_ema else self.model
            stack.callback(self._parallel.reshard, chosen)
            return predict(
                chosen,
                data,
                folder=Path(to),
                outputs=outputs,
                update=self._update,
                batches_per_part=batches_per_part,
            )

    def find_learning_rate(
        self, *, lowest: float = 1e-7, highest: float = 1.0, steps: int = 100
    ) -> LearningRateCurve:
        """Train with growing learning rates, and restore everything; returns losses by rate.

        Model, optimizer, average, data, generators and root are those of before, bit for bit.
        Callbacks and schedulers are not called. With several groups of parameters all rates grow
        by the same factors, so that the first group goes from `lowest` to `highest`.
        """
        with self._trying("find_learning_rate"):
            return find_learning_rate(self._trial, lowest=lowest, highest=highest, steps=steps)

    def validate_all(self, which: Which | Iterable[Which] | None = None) -> tuple[Validated, ...]:
        """Validate checkpoints one after the other, with all loaders and checks.

        Each is loaded once, into the model (and its average), whose own weights are restored
        afterwards. Nothing is claimed or logged, and none of the checkpoints is deleted meanwhile.
        `edit_load` gets only these components.

        Args:
            which: one checkpoint or several: "latest", "best", a step, a folder, a tag or a label
                of this root, also as a pattern such as "step=*"; or a path, `other/root@which`, of
                which every part may be a pattern. None: the newest of this root.

        Returns:
            By step, then in the order in which they were made; each checkpoint once.
        """
        self._check_validates()
        targets = self._choose_targets(which)
        with self._closing(), self._managed(None):
            return self._validate_each(targets, self._validations.parts)

    def request_stop(self, reason: str) -> None:
        """End `fit` after the current step, which is saved. Requests cannot be cancelled.

        No-op in a validation outside of `fit`.
        """
        if not self._is_running:
            raise UsageError(
                f"request_stop({reason!r}): fit does not run, so nothing can be stopped"
            )
        if self.manager is not None and self._ending is not None:
            self._ending.request_end(reason)

    @check_arguments()
    def log(
        self,
        metrics: Mapping[str, float | torch.Tensor | Entry | Sequence[Mapping[str, Any]]],
        *,
        to: Collection[str] | None = None,
    ) -> None:
        """Log metrics of the current step to all loggers, or to those named in `to`.

        Texts, `Table`, `Image` and `Histogram` are logged, too. A tensor or an array of several
        numbers is logged as a histogram, and a list of dicts as a table with their keys as columns.
        Other values are dropped; a warning is logged, once for each name. If no logger records an
        entry, a warning is logged, once for each kind of entry; not with `fast_dev_run`, which has
        no loggers.
        """
        if self._scopes:
            prefix = "/".join(self._scopes)
            metrics = {f"{prefix}/{name}": value for name, value in metrics.items()}
        if self._limits.fast_dev_run:
            to = None  # there are no loggers
        found_entries = {name: entry_of(value) for name, value in metrics.items()}
        entries = {name: entry for name, entry in found_entries.items() if entry is not None}
        numbers = {name: value for name, value in metrics.items() if name not in entries}
        if numbers or not entries:
            found = self._numbers(numbers)
            self._log(to, Callback.log, found, LazyMetrics(found))
        for name, entry in entries.items():
            if isinstance(entry, str):
                self._log(to, Callback.log_text, [name], name, entry)
            elif isinstance(entry, Table):
                self._log(to, Callback.log_table, [name], name, entry)
            elif isinstance(entry, Histogram):
                self._log(to, Callback.log_histogram, [name], name, entry)
            else:
                self._log(to, Callback.log_image, [name], name, entry)

    def _log(
        self,
        to: Collection[str] | None,
        hook: Callable[..., None],
        names: Collection[str],
        *arguments: Any,
    ) -> None:
        self._callbacks.tell_chosen(to, hook, *arguments)
        if not self._limits.fast_dev_run:
            self._callbacks.warn_if_unrecorded(hook, names)

    def _fit_to(
        self,
        ending: FitEnding,
        without: Collection[str],
        start: StartingPoint | None,
        resuming: Resuming,
        load_best: bool,
    ) -> Outcome:
        saves = Saves()
        may_be_new = self.state.keys() - _IN_EVERY_RUN
        if not (hasattr(self.data, "epoch") and hasattr(self.data, "batch")):
            may_be_new -= {PROGRESS}  # only such data tells where in an epoch another trainer was
        may_be_left = {*without, TRAINER} - self.state.keys()
        hooks = StateHooks(
            before_save=self._before_save,
            edit_save=self._editing(Callback.edit_save),
            save_begun=saves.begun.append,
            edit_load=self._editing(Callback.edit_load),
            one_sided=lambda name: name in may_be_new or name in may_be_left,
        )
        with self._closing():
            manager = self._make_manager(ending.goal, hooks, saves)
            begin = None if start is None else partial(self._begin_from, start, hooks, resuming)
            with manager, self._managed(manager):
                outcome = Fit(self._gear, ending, manager, saves, resuming, begin).run()
            # A signal ends the program, and leaves it little time.
            return self._with_best(outcome) if load_best and outcome.reason != "signal" else outcome

    def _with_best(self, outcome: Outcome) -> Outcome:
        """Load the weights of the best checkpoint; adds a note on it to the outcome."""
        group = self._parallel.group
        found = group.from_leader("finding the best checkpoint", lambda: outcome.best)
        if found is None:
            raise NoCheckpoint(
                f"load_best=True: no checkpoint has the metric of the best one. The run ended at "
                f"step {outcome.step} ({outcome.reason}), and all is saved"
            )
        targets = select(self.root, found.folder, self.checkpoints.encrypt)
        weights = {
            name: module
            for name, module in self._weights.items()
            if name in targets[0].entry.manifest.components
        }
        with kept_all(targets):
            best = targets[0].load_modules(weights, self._editing(Callback.edit_load))
        note = (
            f"{' and '.join(weights)}: loaded from the best checkpoint, {best.folder}; the run "
            f"itself is at step {outcome.step}"
        )
        logger.info("%s", note)
        return replace(outcome, notes=(*outcome.notes, note))

    def _watched(self) -> dict[str, Sequence[str]]:
        """Metrics that retention rules and callbacks watch, by name of the watcher."""
        rules = {f"keep: {item.rule}": [item.rule.metric] for item in best_rules(self.checkpoints)}
        return {**rules, **self._callbacks.watched}

    def _make_manager(self, goal: Time, hooks: StateHooks, saves: Saves) -> CheckpointManager:
        if self.root is None:
            if self._stop is not None and not self._parallel.group.is_alone:
                self._stop.share()
            if self._limits.fast_dev_run:
                return DryRunManager(self._before_save, self.counters, self.state)
            logger.warning("checkpoints=None: nothing of this training is saved")
            return NullManager()
        return CheckpointManager(
            replace(
                self.checkpoints,
                every=self._every and self._epoch.resolved(self._every, "every"),
                savers=tuple(
                    self._epoch.resolved(saver, f"saver {saver.name!r}: every")
                    for saver in self.checkpoints.savers
                ),
                overlap=self._overlap,
                sinks=(*self.checkpoints.sinks, *self._callbacks.sinks, saves),
            ),
            {n: PerRank(one) if n in self._per_rank else one for n, one in self.state.items()},
            max_duration=goal,
            on_failure="warn",
            hooks=hooks,
            stop=self._stop,
            counters=lambda: self.counters.totals,
            config={**self._config, "until": str(goal)},
            ranks=self._ranks,
        )

    def _begin_from(
        self, start: StartingPoint, hooks: StateHooks, resuming: Resuming
    ) -> Checkpoint:
        """Load the whole state from another root, except the ids under which loggers record."""
        own = [(item, item.state_dict()) for item in self._callbacks.recording]
        try:
            found = start.load_whole_state(
                self.state,
                hooks,
                self.checkpoints.encrypt,
                self._ranks,
                strict=resuming.strict,
                override=resuming.override,
            )
        except (OpaqueLoadFailed, KeyboardInterrupt):
            self._place.has_begun = True  # the state is neither the old nor the stored one
            raise
        for item, state in own:
            item.load_state_dict(state)
        return found

    @property
    def _ranks(self) -> Literal["group"] | None:
        """The argument `ranks` of managers: None if this process trains alone, beside others."""
        return None if self._parallel.group.is_alone else "group"

    @property
    def _epoch(self) -> EpochLength:
        """Length of an epoch of the data that is trained on."""
        return epoch_length(self.data, self._gear.accumulate)

    def _check_validates(self) -> None:
        if not self._validations:
            raise UsageError("there is nothing to validate on: give the Trainer validate=…")

    def _choose_targets(self, which: Which | Iterable[Which] | None) -> list[Target]:
        if self.manager is not None:
            raise UsageError(f"which={which!r}: while fit runs, only its weights can be used")
        return select(self.root, which, self.checkpoints.encrypt)

    @property
    def _weights(self) -> dict[str, nn.Module]:
        return {"model": self.model, **({} if self.ema is None else {"ema": self.ema.model})}

    def _one(self, which: Which) -> list[Target]:
        chosen = self._choose_targets(which)
        if len(chosen) > 1:
            raise UsageError(f"which={which!r}: {len(chosen)} checkpoints; use validate_all")
        return chosen

    def _choose_parts(self, data: Any, kind: str = "val") -> tuple[ValidationPart, ...]:
        if data is not None:
            return self._make_validations(data, kind=kind).parts
        self._check_validates()
        return self._validations.parts

    def _evaluate(
        self, parts: Sequence[ValidationPart], which: Which | None, *, is_test: bool = False
    ) -> dict[str, float]:
        targets = [] if which is None else self._one(which)
        with ExitStack() as stack:
            if self.manager is None:
                stack.enter_context(self._closing())
                stack.enter_context(self._managed(None))
            at = self.counters.timestamp
            if targets:
                (of_target,) = self._validate_each(targets, parts)
                found, at = dict(of_target.metrics), of_target.checkpoint.timestamp
            else:
                found = self._validated(parts)
            # Before `fit` the run may be another process's.
            if is_test and self._ending is not None:
                self._callbacks.call_hook(Callback.test_end, at, found)
            return found

    def _validate_each(
        self, targets: Sequence[Target], parts: Sequence[ValidationPart]
    ) -> tuple[Validated, ...]:
        weights = self._weights
        found = []
        with kept_all(targets), borrowed(weights):
            for target in targets:
                checkpoint = target.load_modules(weights, self._editing(Callback.edit_load))
                metrics = self._validated(parts)
                found.append(Validated(checkpoint=checkpoint, metrics=metrics))
        return tuple(found)

    def _validated(self, parts: Iterable[ValidationPart]) -> dict[str, float]:
        """Run validation parts, each on the weights that it validates; returns all metrics."""
        found: dict[str, float] = {}
        if self.manager is not None:
            self.manager.fence()  # hooks of a validation may put other weights into the model
        self._share_buffers()
        # No saves meanwhile: modes and generators are not those of training.
        with self._place.left():
            for part in parts:
                use_average = self.ema is not None and part.plan.use_ema
                model = self.model
                if self.ema is not None and use_average:
                    model = self.ema.cast.update()
                try:
                    found |= part.on(model, self.model)
                finally:
                    self._parallel.reshard(model)
        return found

    def _begin_update(self) -> None:
        """Before weights change: drop the snapshot for undo, and wait for saves that copy them."""
        self._way_back.begin_update()
        if self.manager is not None:
            self.manager.fence()

    def _editing(
        self, hook: Callable[[Callback, Training, StateView], None]
    ) -> Callable[[StateView], None] | None:
        """Return a function that calls `hook` with a `StateView`; None if none is needed."""
        averages = {
            name: item.model
            for name, item in (("ema", self.ema), ("swa", self.swa))
            if item is not None and item.cast.differs and hook is Callback.edit_load
        }
        if not averages and not self._callbacks.listens(hook):
            return None

        def edit(view: StateView) -> None:
            cast_averages(view, averages)
            with self._place.left():
                self._callbacks.call_hook(hook, view)

        return edit

    def _before_save(self, now: Timestamp, metrics: Metrics) -> tuple[str, ...]:
        """Check loss and weights, and call `before_save`; returns what is not finite."""
        self._place.check_save_step(now.step)
        group = self._parallel.group
        ending = self._ending
        # After a signal the run is to be resumed, and has little time.
        is_end = ending is not None and ending.is_here() and ending.reason != "signal"
        if self.swa is not None and is_end:
            self._update_statistics(self.swa)
        with self._place.left():
            found = check_health(self._unhealthy, now.step, self.model, metrics, group)
            self._callbacks.call_hook(Callback.before_save)
        if not group.is_alone:
            self._share_buffers()
            self._callbacks.copy_logger_state(group)
            self._scores.gather_states()
        self.counters.step_numbers = {}
        if self.counters.unvalidated:  # the resume that validates will log the step
            own = {"": read_numbers(self.counters.step_metrics), **self._callbacks.step_numbers}
            self.counters.step_numbers = group.gather_values(own)[0]
        return found

    def _snapshot(self) -> Boundary:
        """Copy what a forward pass may change."""
        fixed = ("data", "progress", "scaler", "micro_batch", *self.schedulers)
        return Boundary(components=small(self.state, *fixed), modules=self._modules())

    def _modules(self) -> list[nn.Module]:
        return modules_of(self.state)

    def _update_statistics(self, swa: EqualAverage) -> None:
        """Recompute the statistics of the averaged model's batch norm, at the end of the run."""
        if swa.plan.batch_norm is None or swa.has_statistics:
            return
        loader = Restarting(swa.plan.batch_norm)
        with undisturbed(), torch.no_grad(), self._update.numerics.autocast():
            swa.update_statistics(
                loader.batches(),
                lambda batch: self._update.loss(swa.cast.model, moved(batch, self._update.device)),
                lambda: loader.fills_in,
            )

    def _share_buffers(self) -> None:
        for module in self._with_averages():
            self._parallel.share_buffers(module)

    def _with_averages(self) -> list[nn.Module]:
        modules = [self.model]
        for item in (self.ema, self.swa):
            if item is not None:
                modules += [item.model, *([item.cast.model] if item.cast.differs else [])]
        return modules

    @contextmanager
    def _managed(self, manager: CheckpointManager | None) -> Iterator[None]:
        self.manager, self._is_running = manager, True
        try:
            yield
        except BaseException as error:
            self._callbacks.tell_exception(error)
            raise
        finally:
            self.manager, self._is_running, self._place.is_between = None, False, False

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close all callbacks after the block, without masking the block's error."""
        try:
            yield
        except BaseException:
            try:
                self._callbacks.call_close_hooks()
            except HookFailed as error:
                logger.error("%s", error)
            raise
        self._callbacks.call_close_hooks()

    def _make_validations(
        self, given: Any, *, kind: str = "val", batches: int | None = None, is_quiet: bool = False
    ) -> TrainerValidations:
        """Make validations on `given`, on so many batches or as many as the limits allow."""
        plans = plans_of(given)
        update = replace(self._update, callbacks=Callbacks([], self)) if is_quiet else self._update
        self._check_held_out(plans, self._given_data)
        for plan in plans:
            check_counted(plan.trigger.unit, f"validation every='{plan.every}'", self._counts.units)
        made = TrainerValidations(
            [
                Validator(
                    plan=plan if kind == "test" else self._limited(plan, batches),
                    update=update,
                    kind=kind,
                    weigh=plan.weigh or self._counts.samples or size_of,
                    waiting=lambda: self._way_back.waiting(),
                    started=lambda: self._way_back.validation_started(),
                )
                for plan in plans
            ]
        )
        check_apart(self._scores, [plan.metrics for plan in plans])
        return made

    def _check_held_out(self, plans: Sequence[Validation], trained: Any) -> None:
        """Check that the loader that is trained on is none of validations, nor of batch norm."""
        held_out = [("validate", plan.data) for plan in plans]
        if self.swa is not None:
            held_out.append(("swa: batch_norm", self.swa.plan.batch_norm))
        for what, given in held_out:
            loaders = given.values() if isinstance(given, Mapping) else [given]
            if trained is not None and any(loader is trained for loader in loaders):
                raise UsageError(
                    f"{what}: this loader is the one that is trained on, whose position would be "
                    "lost; make another Loader of the same dataset"
                )

    def _collect_components(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {"model": self.model}
        if isinstance(self.optimizer, Mapping):
            own |= {f"optimizer-{name}": item for name, item in self.optimizer.items()}
        else:
            own["optimizer"] = self.optimizer
        own |= self.schedulers
        own = {name: value for name, value in own.items() if value is not None}
        if self._numerics.scaler is not None:
            own["scaler"] = self._numerics.scaler
        if self.ema is not None:
            own["ema"] = self.ema.model
        if self.swa is not None:
            own |= {"swa": self.swa.model, "swa-count": self.swa}
        if self._nan is not None:
            own["nan-count"] = self._nan
        if self.data is not None:
            own["data"] = self.data
        own |= {PROGRESS: self.counters, **self._callbacks.components}
        if self._scores:
            own["metrics"] = self._scores
        if self._micro_batches.is_auto:
            own["micro_batch"] = self._micro_batches
        taken = [name for name in extra if name in own or name == RNG]
        if taken:
            raise UsageError(f"state: the Trainer has components named {taken} itself")
        return own | dict(extra)

    def _limited(self, plan: Validation, batches: int | None) -> Validation:
        at_end = plan.at_end or bool(self._limits.fast_dev_run)
        return replace(plan, data=self._limits.of_validation(plan.data, batches), at_end=at_end)

    def _make_way_back(self) -> StepUndo:
        return StepUndo(
            # With several ranks nothing is interrupted: they stop where they meet.
            stop=self._stop if self._parallel.group.is_alone else None,
            is_exact=self.root is not None and asks_for(self._every, "exception"),
            data=self.data,
            state=self.state,
            callbacks=self._callbacks,
        )

    def _use_data(self, data: Any) -> None:
        """Train on other data from now on."""
        if self._is_running:
            raise UsageError("fit(data=…): fit runs already")
        build.check_data(data)
        build.check_shared_data(data, self._strategy, self._parallel.group)
        self._check_held_out(plans_of(self._validate), data)
        self._given_data, self.data = data, self._limits.of_data(data)
        self.state["data"] = self.data
        self._way_back = self._make_way_back()
        self._gear = replace(self._gear, data=self.data, way_back=self._way_back)
        others = {
            name: text for name, text in self._config.items() if name.partition(".")[0] != "data"
        }
        self._config = others | config_of_data(data)

    def _check_sanity(self) -> None:
        """Try a validation on some batches of each loader; leaves no trace."""
        if not self._limits.sanity or not self._validations:
            return
        validations = self._make_validations(
            self._validate, batches=self._limits.sanity, is_quiet=True
        )
        modules = [item for item in self.state.values() if isinstance(item, nn.Module)]
        kept = Boundary(components={}, modules=modules)
        try:
            self._validated(validations.parts)
        finally:
            kept.restore_snapshot()

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Check, before the block, that the Trainer can run steps on trial."""
        if self._is_running:
            raise UsageError(f"{what}: fit runs")
        if not self._is_complete:
            raise UsageError(f"{what}: there is nothing to train: give an optimizer and a loss")
        yield

    @property
    def _trial(self) -> TrialSteps:
        quiet = Callbacks([], self)
        return TrialSteps(
            update=replace(
                self._update,
                callbacks=quiet,
                schedulers=(),
                scores=Scores({}, self._parallel.group, what="metrics"),
                begin_update=lambda: None,
                nan=None,
            ),
            state=self.state,
            data=self.data,
            accumulate=self._gear.accumulate,
        )
