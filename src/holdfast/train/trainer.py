"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

Makes the parts of a training from the arguments; `fitting` runs a call of `fit`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from holdfast.arguments import checked
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.control.stop import Stop
from holdfast.engine.hooks import StateHooks
from holdfast.engine.loading.sides import Sides
from holdfast.engine.options import Checkpoints
from holdfast.engine.tiers.tiered import Tiered
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.clock import Time
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.components import RNG, PerRank, check_state, marked
from holdfast.state.edits import StateView
from holdfast.state.overrides import OptimizerOptions
from holdfast.state.selection import listed
from holdfast.store.base import Store
from holdfast.train import making
from holdfast.train.asked import Counts, asks_for, check_counted, check_range, checked_every
from holdfast.train.callbacks.calling import Callbacks, HookFailed
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.evaluation.targets import Target, Validated, Which, borrowed, kept_all, select
from holdfast.train.evaluation.validation import (
    ValidationPart,
    Validations,
    Validator,
    plans_of,
    size_of,
)
from holdfast.train.evaluation.watching import Watched
from holdfast.train.fit.best import BestSaves, best_rules, check_load_best, finder
from holdfast.train.fit.config import config_of
from holdfast.train.fit.ending import FitEnding, Outcome
from holdfast.train.fit.fitting import Fit, Gear
from holdfast.train.fit.saving import Policy, Saves, StepPosition, check_health
from holdfast.train.fit.starting import StartingPoint, Unsaved
from holdfast.train.making import epoch_length, make_schedulers
from holdfast.train.parallel.strategies import (
    Name,
    Strategy,
    chosen_strategy,
    parallel_of,
    recompute,
)
from holdfast.train.schedules.stepping import Schedules
from holdfast.train.training import Average, Counters, Metrics, Training
from holdfast.train.window.loop import (
    Clip,
    LossFunction,
    Numerics,
    Precision,
    Update,
    checked_precision,
    checked_skips,
)
from holdfast.train.window.metrics import LazyMetrics, Numbers, RankMeans
from holdfast.train.window.scores import Scores, check_apart
from holdfast.train.window.splitting import MicroBatches
from holdfast.train.window.wayback import Boundary, WayBack, modules_of, small
from holdfast.train.window.weighing import Weighing

logger = logging.getLogger("holdfast")

_IN_EVERY_RUN = frozenset({"model", "optimizer", "data", "progress"})
"""Components that every checkpoint of a Trainer has."""
# For one release: removed arguments of the Trainer, with what replaces each.
_REMOVED = {
    "root": "checkpoints=…",
    "clip_norm": "clip=…",
    "clip_value": "clip=Clip(value=…)",
    "count_samples": "counts=Counts(samples=…)",
    "count_tokens": "counts=Counts(tokens=…)",
    "cycle": "counts=Counts(cycle=…)",
} | {
    name: f"checkpoints=Checkpoints(root, {name}=…)"
    for name in (
        *("every", "keep", "savers", "on_existing", "label", "run_name", "takeover"),
        *("overlap", "memory_budget", "compress", "encrypt"),
    )
}


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

    @checked(but=("model", "optimizer"), removed=_REMOVED)
    def __init__(
        self,
        model: nn.Module | making.MakeModel,
        *,
        optimizer: torch.optim.Optimizer | making.MakeOptimizer,
        data: Any,
        loss: LossFunction,
        checkpoints: str | os.PathLike[str] | Store | Tiered | Checkpoints | None,
        scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        stop: Stop | None = Stop(),
        validate: Any = None,
        skip_steps: Iterable[range] = (),
        accumulate: int = 1,
        precision: str | Precision = "fp32",
        clip: float | Clip | None = None,
        ema: float | None = None,
        unhealthy: Policy = "warn",
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
            model, optimizer, scheduler: the object, or a function that makes it: of nothing, of
                the model, of the optimizer. `fit` puts the model into training mode. There may be
                a list of schedulers; each has `step()`, called after each step (or as a `Schedule`
                says), and is saved. `warmup`, `cosine`, `linear`, `wsd`, `one_cycle` are ready.
            data: batches with a position: a `Loader` or `Stream` of `holdfast.data`, or an iterable
                with `state_dict` and `load_state_dict` whose iteration gives the rest of an epoch.
                Its length (in batches of an epoch) or `at_epoch_end` shows the end of an epoch
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
            precision: "fp32", "bf16", "fp16" or a `Precision`.
            clip: the largest norm of all gradients together, or a `Clip`.
            ema: decay of an average of the weights, which is saved, and used for validation.
            unhealthy: what to do when loss or weights are not finite at a save.
            seed: of the global generators, when a run starts without a checkpoint.
            device: where the model and batches are moved; None: not at all, and with several ranks
                to the GPU of the local rank, if there is one.
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

        Raises:
            UsageError: an argument is wrong.
        """
        callbacks = list(callbacks)
        given = dict(locals())
        making.check_data(data)
        check_range("accumulate", accumulate, 1, 2**31)
        check_range("seed", seed, 0, 2**32)
        check_range("log_every", log_every, 1, 2**63)
        on = making.checked_device(device)
        group = making.group_for(strategy, on)
        on = making.device_for(group, on)
        self.model = making.make_model(model, seed, on)
        chosen = chosen_strategy(strategy, self.model, group)
        self.checkpoints = Checkpoints.of(checkpoints, {})
        """The argument `checkpoints`, as a record: the root and how checkpoints are made."""
        loggers = making.own_loggers(self.checkpoints, log, progress)
        self._callbacks = Callbacks([*callbacks, *loggers], self, is_leader=group.is_leader)
        self._callbacks.tell(Callback.model_made)
        self.ema = None if ema is None else Average(self.model, ema)
        recompute(self.model, activation_checkpointing)
        self._parallel = parallel_of(chosen, group, on)
        for module in (self.model, *([] if self.ema is None else [self.ema.model])):
            self._parallel.prepare(module)
        if compile is not False:
            self.model.compile(**({} if compile is True else compile))
        self.optimizer = making.make_optimizer(optimizer, self.model, self.model is not model)
        self._schedules = Schedules(make_schedulers(scheduler, self.optimizer), self._callbacks)
        self.schedulers = self._schedules.components
        """Schedulers by component name."""
        self.data = data
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
        self._overlap = making.checked_overlap(
            self.checkpoints.overlap, making.device_type(self.model, on)
        )
        self._stop = stop
        self._place = StepPosition(self.counters)
        self._numbers = Numbers()
        self._unhealthy = unhealthy
        self._numerics = Numerics(checked_precision(precision), making.device_type(self.model, on))
        self._way_back: WayBack
        making.check_shared_data(data, chosen, group)
        making.check_parallel(
            self.optimizer, self.model, chosen, self._numerics, self._every, group
        )
        self._scores = Scores(metrics or {}, group, what="metrics", is_saved=True)
        self._micro_batches = MicroBatches(micro_batch, group)
        self._update = Update(
            model=self.model,
            called=self._parallel.wrap(self.model),
            parallel=self._parallel,
            means=RankMeans(group),
            weighing=Weighing(group, is_scaled=self._numerics.scaler is not None),
            micro_batches=self._micro_batches,
            scores=self._scores,
            snapshot=self._snapshot,
            optimizer=self.optimizer,
            schedulers=self._schedules.plain,
            loss=loss,
            clip=clip if isinstance(clip, Clip) else Clip(norm=clip),
            numerics=self._numerics,
            device=on,
            callbacks=self._callbacks,
            numbers=self._numbers,
            begin_update=self._begin_update,
        )
        self._validations = self._make_validations(validate)
        check_apart(self._scores, [part.plan.metrics for part in self._validations.parts])
        self._schedules.check(counts.units, validates=validate is not None)
        self._ending: FitEnding | None = None
        extra, self._per_rank = marked(state or {})
        self.state = self._components(extra)
        check_state(self.state)
        making.check_held(self.state, loss)
        self.checkpoints.check_components({*self.state, RNG})
        self._way_back = WayBack(
            # With several ranks nothing is interrupted: they stop where they meet.
            stop=stop if group.is_alone else None,
            is_exact=self.root is not None and asks_for(self._every, "exception"),
            data=data,
            state=self.state,
            callbacks=self._callbacks,
        )
        self._gear = Gear(
            model=self.model,
            ema=self.ema,
            data=data,
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
            best=BestSaves(best_rules(self.checkpoints)),
            watched=Watched(self._watched, self._validations),
        )
        self._config = config_of(
            given,
            checkpoints=self.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            schedulers=self.schedulers,
        )
        self._callbacks.tell(Callback.setup)

    @checked(but=("until", "max_time"))
    def fit(
        self,
        until: str | int,
        *,
        max_time: str | Time | None = None,
        without: Collection[str] = (),
        start_from: str | os.PathLike[str] | None = None,
        load_best: bool = False,
        override: Collection[str] = (),
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
            without: components that the checkpoint may have and this Trainer does not, such as
                "ema" or "callback-<name>"; they are not loaded.
            start_from: checkpoint of another root to begin with: "old", "old@step=3",
                "s3://bucket/old@best" or the folder of a checkpoint. The whole state is loaded,
                except the ids under which loggers record. Once `root` has a checkpoint, the run
                resumes from that, and nothing is loaded from `start_from`.
            load_best: at the end, load the weights of the best checkpoint into the model and its
                average. Nothing else changes: the run goes on from its newest checkpoint.
            override: options of the optimizer that take the script's value when a checkpoint is
                loaded, such as "lr", or "optimizer.param_groups.0.lr" of one group; schedules go on
                from the new rate. All others stay as in the checkpoint, with a warning.

        Raises:
            UsageError: `until` is not a goal, or counts what is not counted here; `without` names
                what this Trainer has; `start_from` does not name another root; no optimizer has
                what `override` names; nobody logs a metric that is watched; or the Trainer has
                trained before and nothing of that was saved.
            NoCheckpoint: `start_from` names no checkpoint, or there is no best one to load.
            MismatchError: the checkpoint does not fit; nothing was changed.
            SaveFailed: saving failed three times in a row.
            OwnershipError: another process trains this run.
            HookFailed: a callback raised.
            UnhealthyState: loss or weights are not finite, and `unhealthy="raise"`.
            SystemExit, KeyboardInterrupt: a signal asked to stop, the latter for SIGINT.
        """
        goal = making.checked_goal(until)
        check_counted(goal.unit, f"until={until!r}", self._counts.units)
        without, override = listed(without, "without"), listed(override, "override")
        OptimizerOptions(self.state).check(override)
        Sides(without=without).check(self.state)
        start = StartingPoint.of(start_from, self.root)
        if load_best:
            check_load_best(self.checkpoints, validates=bool(self._validations))
        self._schedules.resolve(goal, epoch_length(self.data, self._gear.accumulate))
        self._ending = ending = FitEnding(
            goal,
            self.counters,
            stop=self._stop,
            max_time_s=making.checked_max_time_s(max_time),
            group=self._parallel.group,
            shares_signals=self.root is None,
            find_best=finder(self.checkpoints),
        )
        self._place.is_under_way = False
        with self._stop or nullcontext():
            return self._fit_to(ending, without, start, override, load_best)

    @property
    def root(self) -> str | os.PathLike[str] | Store | Tiered | None:
        """The root of the run; None: nothing is saved."""
        return self.checkpoints.root

    @property
    def goal(self) -> Time:
        """Goal of the current or last `fit`.

        Raises:
            UsageError: there was none yet.
        """
        if self._ending is None:
            raise UsageError("there is no goal before fit is called")
        return self._ending.goal

    @property
    def present_step(self) -> int:
        """The step under way; between steps, the last completed one."""
        return self._place.present_step

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._parallel.group.world_size

    def validate(self, which: Which | None = None) -> dict[str, float]:
        """Validate now, whether due or not; returns the metrics as a checkpoint would get them.

        Args:
            which: one checkpoint, as for `validate_all`; None: the weights as they are.

        Raises:
            UsageError: the Trainer has no `validate`, `which` is given while `fit` runs, or it is
                a pattern for several checkpoints.
            NoCheckpoint: no checkpoint matches `which`.
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

        Raises:
            NoCheckpoint: an item matches no checkpoint; nothing was validated.
            UsageError: the Trainer has no `validate`, or `fit` runs.
            FormatError, MismatchError: one is damaged, or does not fit.
            HookFailed: a callback raised.
        """
        return self._validate_each(self._chosen(which))

    def request_stop(self, reason: str) -> None:
        """End `fit` after the current step, which is saved. Requests cannot be cancelled.

        No-op in a validation outside of `fit`.

        Raises:
            UsageError: neither `fit` nor a validation is running.
        """
        if not self._is_running:
            raise UsageError(
                f"request_stop({reason!r}): fit does not run, so nothing can be stopped"
            )
        if self.manager is not None and self._ending is not None:
            self._ending.ask(reason)

    @checked()
    def log(self, metrics: Metrics, *, to: Collection[str] | None = None) -> None:
        """Log metrics of the current step to all loggers, or to those named in `to`.

        A metric that is not a number is left out; a warning is logged, once for each name.

        Raises:
            UsageError: `to` names a logger that does not exist.
            HookFailed: a logger raised.
        """
        self._callbacks.tell_loggers(LazyMetrics(self._numbers(metrics)), to)

    def _fit_to(
        self,
        ending: FitEnding,
        without: Collection[str],
        start: StartingPoint | None,
        override: Collection[str],
        load_best: bool,
    ) -> Outcome:
        saves = Saves()
        may_be_new = self.state.keys() - _IN_EVERY_RUN
        hooks = StateHooks(
            before_save=self._before_save,
            edit_save=self._editing(Callback.edit_save),
            save_begun=saves.begun.append,
            edit_load=self._editing(Callback.edit_load),
            one_sided=lambda name: name in may_be_new or name in without,
        )
        with self._closing():
            manager = self._make_manager(ending.goal, hooks, saves)
            begin = None if start is None else partial(self._begin_from, start, hooks, override)
            with manager, self._managed(manager):
                outcome = Fit(self._gear, ending, manager, saves, begin, override).run()
            # A signal ends the program, and leaves it little time.
            return self._with_best(outcome) if load_best and outcome.reason != "signal" else outcome

    def _with_best(self, outcome: Outcome) -> Outcome:
        """Load the weights of the best checkpoint; adds a note on it to the outcome."""
        group = self._parallel.group
        found = outcome.best if group.is_leader else None
        folder = group.gather(None if found is None else found.folder)[0]
        if folder is None:
            raise NoCheckpoint(
                f"load_best=True: no checkpoint has the metric of the best one. The run ended at "
                f"step {outcome.step} ({outcome.reason}), and all is saved"
            )
        targets = select(self.root, folder, self.checkpoints.encrypt)
        weights = {
            name: module
            for name, module in self._weights.items()
            if name in targets[0].entry.manifest.components
        }
        with kept_all(targets):
            best = targets[0].load(weights, self._editing(Callback.edit_load))
        note = (
            f"{' and '.join(weights)}: loaded from the best checkpoint, {best.folder}; the run "
            f"itself is at step {outcome.step}"
        )
        logger.info("%s", note)
        return replace(outcome, notes=(*outcome.notes, note))

    @property
    def _weights(self) -> dict[str, nn.Module]:
        return {"model": self.model, **({} if self.ema is None else {"ema": self.ema.model})}

    def _watched(self) -> dict[str, Sequence[str]]:
        """Metrics that retention and callbacks watch, by who does."""
        rules = {f"keep: {item.rule}": [item.rule.metric] for item in best_rules(self.checkpoints)}
        return {**rules, **self._callbacks.watched}

    def _make_manager(self, goal: Time, hooks: StateHooks, saves: Saves) -> CheckpointManager:
        if self.root is None:
            logger.warning("checkpoints=None: nothing of this training is saved")
            if self._stop is not None and not self._parallel.group.is_alone:
                self._stop.share()
            return Unsaved()
        return CheckpointManager(
            replace(
                self.checkpoints,
                every=self._every,
                overlap=self._overlap,
                sinks=(*self.checkpoints.sinks, saves),
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
        self, start: StartingPoint, hooks: StateHooks, override: Collection[str]
    ) -> Checkpoint:
        """Load the whole state from another root, except the ids under which loggers record."""
        own = [(item, item.state_dict()) for item in self._callbacks.recording]
        try:
            found = start.load(self.state, hooks, self.checkpoints.encrypt, self._ranks, override)
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

    def _check_validates(self) -> None:
        if not self._validations:
            raise UsageError("there is nothing to validate on: give the Trainer validate=…")

    def _chosen(self, which: Which | Iterable[Which] | None) -> list[Target]:
        self._check_validates()
        if self.manager is not None:
            raise UsageError(f"which={which!r}: while fit runs, only its weights can be used")
        return select(self.root, which, self.checkpoints.encrypt)

    def _validate_each(self, targets: Sequence[Target]) -> tuple[Validated, ...]:
        weights = self._weights
        found = []
        with self._closing(), self._managed(None), kept_all(targets), borrowed(weights):
            for target in targets:
                checkpoint = target.load(weights, self._editing(Callback.edit_load))
                metrics = self._validated(self._validations.parts)
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
                model = self.ema.model if self.ema is not None and use_average else self.model
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
        """Return a function that calls `hook` with a `StateView`; None if no callback has it."""
        if not self._callbacks.listens(hook):
            return None

        def edit(view: StateView) -> None:
            with self._place.left():
                self._callbacks.tell(hook, view)

        return edit

    def _before_save(self, now: Timestamp, metrics: Metrics) -> tuple[str, ...]:
        """Check loss and weights, and call `before_save`; returns what is not finite."""
        self._place.check(now.step)
        group = self._parallel.group
        with self._place.left():
            found = check_health(self._unhealthy, now.step, self.model, metrics, group)
            self._callbacks.tell(Callback.before_save)
        if not group.is_alone:
            self._share_buffers()
            self._callbacks.follow(group)
            self._scores.share()
        return found

    def _snapshot(self) -> Boundary:
        """Copy what a forward pass may change."""
        fixed = ("data", "progress", "scaler", "micro_batch", *self.schedulers)
        return Boundary(components=small(self.state, *fixed), modules=modules_of(self.state))

    def _share_buffers(self) -> None:
        for module in (self.model, *([] if self.ema is None else [self.ema.model])):
            self._parallel.share_buffers(module)

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
        """Call `close` of all callbacks after the block, without masking the block's error."""
        try:
            yield
        except BaseException:
            try:
                self._callbacks.close()
            except HookFailed as error:
                logger.error("%s", error)
            raise
        self._callbacks.close()

    def _make_validations(self, given: Any) -> Validations:
        plans = plans_of(given)
        for plan in plans:
            loaders = plan.data.values() if isinstance(plan.data, Mapping) else [plan.data]
            if any(loader is self.data for loader in loaders):
                raise UsageError(
                    "validate: this loader is the one that is trained on, whose position would be "
                    "lost; make another Loader of the same dataset"
                )
            check_counted(plan.trigger.unit, f"validation every='{plan.every}'", self._counts.units)
        return Validations(
            [
                Validator(
                    plan=plan,
                    update=self._update,
                    weigh=plan.weigh or self._counts.samples or size_of,
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
        if self._scores:
            own["metrics"] = self._scores
        if self._micro_batches.is_auto:
            own["micro_batch"] = self._micro_batches
        taken = [name for name in extra if name in own or name == RNG]
        if taken:
            raise UsageError(f"state: the Trainer has components named {taken} itself")
        return own | dict(extra)
