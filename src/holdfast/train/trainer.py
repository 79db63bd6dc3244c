"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

`build` makes its parts from the arguments, `fit.fitting` runs a call of `fit`, and
`evaluation.evaluator` validates, tests and predicts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from holdfast.arguments import check_arguments
from holdfast.checkpoints import Checkpoints
from holdfast.control.stop import Stop
from holdfast.errors import UsageError
from holdfast.loading.optional_components import MissingComponentPolicy
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time, Unit
from holdfast.state.patterns import convert_names
from holdfast.state.planning.schedulesettings import check_override
from holdfast.state.resizing import NO_RESIZE, Resize
from holdfast.store.base import Store
from holdfast.train import build
from holdfast.train.argument_checks import Counts, check_counted
from holdfast.train.averages import SWA
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.evaluation.evaluator import Evaluator, Validated, Which
from holdfast.train.evaluation.predicting import Outputs, Predictions, predict
from holdfast.train.fit.fitting import run_fit
from holdfast.train.fit.starting import Resuming, StartingPoint, check_load_best
from holdfast.train.fit.tuner import LearningRateCurve, find_learning_rate
from holdfast.train.outputs import Entry, Histogram, Image, Table, entry_of
from holdfast.train.parts import Policy
from holdfast.train.status import EndReason, FitEnding, Outcome
from holdfast.train.step.batches import Limits
from holdfast.train.step.device_metrics import LazyMetrics
from holdfast.train.step.numerics import Precision
from holdfast.train.step.several_optimizers import UpdateFunction
from holdfast.train.step.step import Clip, LossFunction
from holdfast.train.strategies import Name, Strategy

logger = logging.getLogger("holdfast")

C = TypeVar("C", bound=Callback)

_HOOKS_OF_ENTRIES: tuple[tuple[type, Callable[..., None]], ...] = (
    (str, Callback.log_text),
    (Table, Callback.log_table),
    (Histogram, Callback.log_histogram),
    (Image, Callback.log_image),
)
"""Hooks for the entries of the log that are not numbers."""


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
        arguments = {name: value for name, value in locals().items() if name != "self"}
        given = build.Arguments(**arguments)
        base = build.ModelSetup(given)
        self.model = base.model
        self.checkpoints = base.checkpoints
        """The argument `checkpoints`, as a record: the root and how checkpoints are made."""
        self._callbacks = Callbacks(base.callbacks, self, is_leader=base.group.is_leader)
        self._callbacks.call_hook(Callback.model_made)
        self._parts = parts = build.PartsBuilder(given, base, self._callbacks).make_parts()
        self._evaluator = Evaluator(parts, validate, data)
        parts.schedules.check_steppable(counts.units, validates=validate is not None)
        self.ema, self.swa = parts.ema, parts.swa
        self.optimizer = parts.optimizer
        """The optimizer, or several by name; None where nothing is trained."""
        self.schedulers = parts.schedules.components
        """Schedulers by component name."""
        self.data = parts.data
        self.counters = parts.counters
        self.state = parts.state
        self._trains, self._detects_anomaly = given.trains, detect_anomaly
        self._scopes: list[str] = []
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
        resize: Resize = NO_RESIZE,
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
            resize: tensors that have more or fewer rows than in the checkpoint, as
                `CheckpointManager.resume` takes it (docs/loading.md).
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
        if self.data is None or not self._trains:
            raise UsageError(
                "fit needs an optimizer, a loss and data, and this Trainer was made without some"
            )
        parts, evaluator = self._parts, self._evaluator
        goal = build.checked_goal(until)
        if parts.limits.num_steps is not None:
            goal = Time(parts.limits.num_steps, Unit.STEP)
        check_counted(goal.unit, f"until={until!r}", parts.counts.units)
        without, override = convert_names(without, "without"), convert_names(override, "override")
        check_override(self.state, override)
        MissingComponentPolicy(without=without).check_live_state(self.state)
        if parts.limits.fast_dev_run and (start_from is not None or load_best):
            logger.info("limits: fast_dev_run: start_from and load_best are ignored")
            start_from, load_best = None, False
        resuming = Resuming(
            how=resume,
            start=StartingPoint.resolve_source(start_from, self.root),
            strict=strict,
            override=override,
            resize=resize,
            without=without,
        )
        resuming.check_resume_arguments(has_root=self.root is not None)
        if load_best:
            check_load_best(self.checkpoints, validates=bool(evaluator.validations))
        parts.schedules.compute_lengths(goal, parts.epoch)
        evaluator.validations.compute_intervals(goal, parts.epoch)
        ending = FitEnding(
            goal,
            self.counters,
            stop=parts.stop,
            max_time_s=build.checked_max_time_s(max_time),
            group=parts.group,
            checkpoints=self.checkpoints,
        )
        parts.status.ending, parts.status.is_under_way = ending, False
        watch = torch.autograd.set_detect_anomaly(True) if self._detects_anomaly else nullcontext()
        with parts.stop or nullcontext(), watch, self._callbacks.closing():
            outcome = run_fit(parts, evaluator, ending, resuming)
            # A signal ends the program, and leaves it little time.
            if load_best and outcome.reason != "signal":
                return evaluator.load_best(outcome)
            return outcome

    @property
    def manager(self) -> CheckpointManager | None:
        """Manager while `fit` runs, else None."""
        return self._parts.status.manager

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
        return self._parts.status.present_step

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._parts.group.world_size

    @property
    def is_log_step(self) -> bool:
        """Whether the present step is logged: each `log_every`-th, and the last one."""
        return self.present_step % self._parts.log_every == 0 or self.is_last

    @property
    def is_first(self) -> bool:
        """Whether the present step is the first one of the current or last call of `fit`."""
        begun_at = None if self._ending is None else self._ending.begun_at
        return begun_at is not None and self.present_step == begun_at + 1

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
    def _ending(self) -> FitEnding | None:
        return self._parts.status.ending

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
        return self._evaluator.evaluate(data, which)

    def test(self, data: Any, *, which: Which | None = None) -> dict[str, float]:
        """Evaluate on loaders that no decision of the training has seen: metrics `test/…`.

        After a `fit` of this Trainer they are logged, too, at the step of the tested weights.

        Args:
            data: a loader, loaders by name, or a `Validation` or a list of them.
            which: one checkpoint, as for `validate_all`; None: the weights as they are.
        """
        return self._evaluator.evaluate(data, which, is_test=True)

    def predict(
        self,
        data: Any,
        *,
        to: str | os.PathLike[str],
        which: Which | None = None,
        outputs: Outputs | None = None,
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
        with self._evaluator.lend_weights(which, use_ema=use_ema) as model:
            return predict(
                model,
                data,
                folder=Path(to),
                outputs=outputs,
                update=self._parts.update,
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
        if self._parts.status.is_running:
            raise UsageError("find_learning_rate: fit runs")
        if not self._trains:
            raise UsageError(
                "find_learning_rate: there is nothing to train: give an optimizer and a loss"
            )
        return find_learning_rate(self._parts, lowest=lowest, highest=highest, steps=steps)

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
        return self._evaluator.validate_all(which)

    def request_stop(self, reason: str) -> None:
        """End `fit` after the current step, which is saved. Requests cannot be cancelled.

        No-op in a validation outside of `fit`.
        """
        if not self._parts.status.is_running:
            raise UsageError(f"request_stop({reason!r}): fit is not running")
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
        if self._parts.limits.fast_dev_run:
            to = None  # there are no loggers
        found_entries = {name: entry_of(value) for name, value in metrics.items()}
        entries = {name: entry for name, entry in found_entries.items() if entry is not None}
        numbers = {name: value for name, value in metrics.items() if name not in entries}
        if numbers or not entries:
            found = self._parts.update.numbers(numbers)
            if self.manager is not None:
                self.manager.record_metrics(self.present_step, found)
            self._log(to, Callback.log, found, LazyMetrics(found))
        for name, entry in entries.items():
            hook = next(hook for kind, hook in _HOOKS_OF_ENTRIES if isinstance(entry, kind))
            self._log(to, hook, [name], name, entry)

    def _log(
        self,
        to: Collection[str] | None,
        hook: Callable[..., None],
        names: Collection[str],
        *arguments: Any,
    ) -> None:
        self._callbacks.call_hook_of(to, hook, *arguments)
        if not self._parts.limits.fast_dev_run:
            self._callbacks.warn_if_unrecorded(hook, names)

    def _use_data(self, data: Any) -> None:
        """Train on other data from now on."""
        parts = self._parts
        if parts.status.is_running:
            raise UsageError("fit(data=…): fit runs already")
        build.check_data(data)
        build.check_shared_data(data, parts.strategy, parts.group)
        self._evaluator.use_data(data)
        self.data = self.state["data"] = parts.limits.of_data(data)
        parts.undo.use_data(self.data)
        others = {
            name: text for name, text in parts.config.items() if name.partition(".")[0] != "data"
        }
        config = others | build.config_of_data(data)
        self._parts = replace(parts, data=self.data, config=config)
