"""Lightning callback that resumes a run when a fit begins, and saves it between batches.

Lightning's own restart repeats parts of an epoch: validations, hooks, counters. So a state is saved
only after all calls that belong to a batch or an epoch, and `_wrap` puts ours into this place.
Exact resumes depend on the order of the calls: tests/bridges/test_lightning.py kills runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.bridges.lightning.seams import (
    NO_STEP,
    LazyNumbers,
    NewMetrics,
    check_trainer,
    components_of,
    evaluated_loaders,
    given_path,
    model_of,
    monitors_of,
    patch_path_lookup,
    rewind_training_loaders,
    rewind_validation_loaders,
)
from holdfast.bridges.lightning.state import CheckpointReader, TrainerState, patch_loading
from holdfast.bridges.parts import (
    BridgeValidations,
    Generators,
    allow_other_trainers,
    check_direction,
    describe_ended_run,
    make_leader_emitter,
    rewind,
    say_start,
    start_from,
    warn_without_interval,
)
from holdfast.checkpoints import Checkpoints, StateHooks
from holdfast.control.stop import Stop
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter, url_without_secrets
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time
from holdfast.policy.rule import Rule
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Event, SaveFunction, Trigger
from holdfast.results import Checkpoint
from holdfast.root.best import BEST
from holdfast.state.components import TRAINER
from holdfast.store.base import Store


class HoldfastCheckpoint(CheckpointCallback):
    """Callback that resumes a run when its fit begins, and saves it while it trains.

        trainer = Trainer(callbacks=[HoldfastCheckpoint("runs/gpt", every="500step")])
        trainer.fit(model, Loader(dataset, batch_size=32))

    The same script, started again, goes on at the newest checkpoint, with the same bits as a run
    that was not interrupted. `ckpt_path="ROOT@WHICH"` of `fit` goes back in its own root, or starts
    from a checkpoint of another one while the own is empty; of `validate`, `test` and `predict` it
    names the weights. Steps are Lightning's `global_step`. Give `Loader` or `Stream` of
    `holdfast.data` as data: of a DataLoader no position is saved, and a warning is logged.

    A signal that asks to stop is obeyed at the next step: saved, then `SystemExit`.
    """

    @check_arguments(but=("every", "max_duration", "keep"))
    def __init__(
        self,
        checkpoints: str | os.PathLike[str] | Store | Tiered | Checkpoints,
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        keep: Rule | str | None = None,
        max_duration: str | Time | None = None,
        model: str | None = None,
        hooks: StateHooks | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Check the arguments; nothing is read or written before `fit`.

        Args:
            checkpoints: the root of the run, or a `Checkpoints` with all its options.
            every: when to save, if `checkpoints` is a root: "500step", "1ep", "30min", …; the end
                of a fit is saved in any case.
            keep: what retention keeps, if `checkpoints` is a root.
            max_duration: how long the run is to be, for intervals such as "0.1dur".
            model: the attribute of the LightningModule that is the component `model`, such as
                "net", so that its names are those under other trainers; it must have all weights
                and buffers. None: the LightningModule itself.
            hooks: callbacks around saves and loads.
            stop: the signals that end training; None: `Stop()`.

        Raises:
            UsageError: an argument is wrong.
        """
        super().__init__()
        self.checkpoints = Checkpoints.of(checkpoints, {"every": every, "keep": keep})
        if self.checkpoints.root is None:
            raise UsageError("root=None: a HoldfastCheckpoint needs a root to save in")
        self.manager: CheckpointManager | None = None
        """The manager of the fit under way, or of the last one."""
        self._max_duration, self._hooks = max_duration, hooks or StateHooks()
        self._part = model
        self._stop = stop or Stop()
        self._emit = Emitter()
        self._open = ExitStack()
        self._reader: CheckpointReader | None = None
        self.chosen_path: str | os.PathLike[str] | None = None
        """The `ckpt_path` that Lightning was given; "best" and "last" are replaced by a path."""
        self._generators: Generators | None = None
        """Those that were resumed, until training goes on."""
        self._state: TrainerState | None = None
        self._step = 0
        """Steps at the last boundary."""
        self._has_warned = False
        self._has_ended = False

    @property
    def best_model_path(self) -> str:
        """The best checkpoint as `ROOT@best`, for Lightning's `ckpt_path="best"`; "": none."""
        return self._path_of(BEST)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint as `ROOT@latest`, for Lightning's `ckpt_path="last"`; "": none."""
        return self._path_of("latest")

    def _path_of(self, which: str) -> str:
        root, options = self.checkpoints.root, self.checkpoints
        assert root is not None, "checked when this was made"
        catalog = catalog_of(root, Emitter(), options.encrypt)
        try:
            catalog.find_checkpoint(which)
        except NoCheckpoint:
            return ""
        return f"{catalog.store.url}@{which}"

    # Hooks of Lightning

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check versions and the strategy, and let Lightning read our checkpoints."""
        if trainer.fast_dev_run:
            return
        check_trainer(trainer)
        others = [one for one in trainer.callbacks if isinstance(one, HoldfastCheckpoint)]
        if len(others) > 1:
            raise UsageError("two HoldfastCheckpoint callbacks were passed: pass one")
        encrypt = self.checkpoints.encrypt
        self._reader = CheckpointReader(trainer, encrypt, self._part, self._hooks)

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume the run, or begin it."""
        if trainer.fast_dev_run:
            return
        assert self._reader is not None, "setup() comes first"
        given = given_path(trainer, self.chosen_path)
        self._reader.note_named_checkpoint(given)
        self._emit = make_leader_emitter(self.checkpoints)
        for who, metric, mode in monitors_of(trainer):
            check_direction(self.checkpoints, self._emit, metric, mode, who)
        warn_without_interval(self.checkpoints, self._emit)
        trainer.fit_loop.setup_data()
        self._state = TrainerState(trainer, self._emit, self._part)
        components = {
            "model": model_of(pl_module, self._part),
            **components_of(trainer, self._emit),
            TRAINER: self._state,
        }
        self.manager = CheckpointManager(
            self.checkpoints,
            components,
            max_duration=self._max_duration,
            hooks=allow_other_trainers(self._hooks),
            stop=self._stop,
            config=dict(pl_module.hparams),
        )
        self._open = ExitStack()
        self._open.push(self.manager)
        resumed = self._resume(self.manager, components, given)
        self._measured = NewMetrics(trainer)
        self._validations = BridgeValidations(
            self.checkpoints,
            self.manager,
            trainer.strategy.broadcast,
            resumed=resumed,
            validates=trainer.enable_validation,
        )
        self._generators = None if resumed is None else Generators()
        if resumed is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}
            self._reader.done = given
            self._state.set_loops_to_boundary(resumed)
            self._stay_ended(trainer, resumed)
        elif not given:
            rewind_training_loaders(trainer, self._emit)
        self._step, self._has_ended = trainer.global_step, False
        self._wrap(trainer.fit_loop)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Handle signals from now on, since Lightning has just set its own handlers."""
        if self.manager is not None and not trainer.fast_dev_run:
            self._open.enter_context(self._stop)

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let each validation see the same batches, however many were before it in this process."""
        if not trainer.fast_dev_run and trainer.state.fn == "fit":
            rewind_validation_loaders(trainer)
            step = trainer.global_step
            self._measured.collect_new_metrics(
                step + (step == self._step)
            )  # of a step that is not complete yet
        elif not trainer.fast_dev_run and trainer.state.fn == "validate":
            self._rewind_for_evaluation(trainer)

    @override
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Let a test see all batches of its loader, also of one that was trained on."""
        self._rewind_for_evaluation(trainer)

    @override
    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Let a prediction see all batches, as a test does."""
        self._rewind_for_evaluation(trainer)

    def _rewind_for_evaluation(self, trainer: Any) -> None:
        """Set the loaders to their first batch, and back to their position at the end."""
        loaders = [one for one in evaluated_loaders(trainer) if hasattr(one, "at_epoch_end")]
        for loader in loaders:
            self._open.callback(loader.load_state_dict, loader.state_dict())
        rewind(loaders)

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what a validation has measured, for saves of its step."""
        if trainer.sanity_checking or trainer.fast_dev_run or trainer.state.fn != "fit":
            return
        step = trainer.global_step
        if step != self._step:
            self._validations.ended(step, LazyNumbers(self._measured.collect_new_metrics(step)))
            return
        self._measured.collect_new_metrics(NO_STEP)
        self._validations.ended(None, {})
        if self._validations.are_watched and not self._has_warned:
            self._has_warned = True
            self._emit(
                "warning",
                f"the validation after step {step} is within the next one, whose gradients are "
                "being accumulated: nothing can be saved there, so no checkpoint has its metrics. "
                "Let val_check_interval be a multiple of accumulate_grad_batches",
            )

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last save."""
        if self.manager is not None and not trainer.fast_dev_run:
            self.manager.wait(uploads=False)

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the save under way, and release the run."""
        self._open.pop_all().__exit__(type(exception), exception, exception.__traceback__)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the run."""
        self._open.close()

    # Steps of these

    def _resume(
        self, manager: CheckpointManager, components: dict[str, Any], ckpt_path: str
    ) -> Checkpoint | None:
        asked = self._reader.asked if self._reader is not None else None
        if asked is not None and asked[0].url == manager.store.url:
            found = manager.resume(asked[1])
            if found is None:
                raise UsageError(f"ckpt_path={asked[0].url!r}: no whole state was saved there")
            say_start(self.checkpoints, manager, found)
            return found
        found = manager.resume()
        given = url_without_secrets(ckpt_path)
        if found is not None and given:
            self._emit("warning", f"resuming {found.path}, not ckpt_path={given}")
        say_start(self.checkpoints, manager, found, begun_with=given)
        if found is not None or asked is None:
            return found
        encrypt = self.checkpoints.encrypt
        return start_from(*asked, manager, components, hooks=self._hooks, encrypt=encrypt)

    def _stay_ended(self, trainer: Any, resumed: Checkpoint) -> None:
        """End the fit of a run that a callback had ended, unless a checkpoint of it is named."""
        assert self._state is not None
        assert self._reader is not None
        is_named = self._reader.asked is not None and self._reader.asked[1] != "latest"
        if self._state.has_stopped and not is_named:
            trainer.should_stop = True
            which = f"{resumed.root}@step={resumed.step}"
            how = f'fit(…, ckpt_path="{which}") without the callback that ended it'
            self._emit("warning", describe_ended_run(resumed.step, how))

    def _wrap(self, fit_loop: Any) -> None:
        """Call our functions at the ends of batches and epochs, until the run is released.

        No hook of a callback comes late enough: after a validation, and after schedulers.
        """
        epoch_loop, trainer = fit_loop.epoch_loop, fit_loop.trainer
        assert self._state is not None
        state = self._state
        # What was shown before is old, such as metrics of a resume.
        self._replace(
            fit_loop, "on_run_start", after=lambda: self._measured.collect_new_metrics(NO_STEP)
        )
        self._replace(epoch_loop, "on_advance_end", after=lambda: self._batch_end(trainer))
        self._replace(fit_loop, "on_advance_end", after=lambda: self._epoch_end(trainer))
        # Before callbacks put an average in the place of the weights.
        self._replace(fit_loop, "on_run_end", before=lambda: self._end(trainer))
        if self._generators is None:
            self._replace(fit_loop, "on_run_start", before=state.load_lightning_positions)
            self._replace(epoch_loop, "on_run_start", before=state.note_epoch_start)
            return
        self._replace(fit_loop, "on_run_start", before=state.restore_metrics)
        self._replace(fit_loop, "on_run_start", after=self._restore_generators)
        self._replace(epoch_loop, "on_run_start", before=state.set_progress, after=self._end_resume)

    def _replace(
        self,
        loop: Any,
        name: str,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        original = getattr(loop, name)

        def called(*arguments: Any) -> None:
            before()
            original(*arguments)
            after()

        setattr(loop, name, called)
        self._open.callback(loop.__dict__.pop, name, None)

    def _restore_generators(self) -> None:
        """Set the generators again: since the resume, hooks and iterators have drawn from them."""
        if self._generators is not None:
            self._generators.restore_states()

    def _end_resume(self) -> None:
        """Set the generators once more where an epoch goes on, whose first hooks were called."""
        if self._state is not None and self._state.is_within:
            self._restore_generators()
        self._generators = None

    def _batch_end(self, trainer: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if trainer.global_step == self._step or is_last:
            return  # gradients are being accumulated, or the end of the epoch follows
        assert self._state is not None
        self._state.is_between_epochs = False
        self._save(trainer, ["step"], is_last=trainer.fit_loop.epoch_loop.done)

    def _epoch_end(self, trainer: Any) -> None:
        assert self._state is not None
        if trainer.global_step != self._step:  # otherwise the steps of the run have ended
            self._state.is_between_epochs = True
            self._save(trainer, ["step", "epoch"], is_last=False)

    def _end(self, trainer: Any) -> None:
        if not self._has_ended:
            self._save(trainer, ["step", "end"], is_last=True)

    def _save(self, trainer: Any, events: list[Event], *, is_last: bool) -> None:
        manager, self._step = self.manager, trainer.global_step
        assert manager is not None
        self._measured.collect_new_metrics(self._step)
        metrics = self._measured.get_metrics(self._step)
        epoch = trainer.fit_loop.epoch_progress.current.completed
        if (
            not manager.is_quiet(self._step)
            or len(events) > 1
            or self._validations.has_validation(self._step)
        ):
            self._validations.maybe_save(self._step, events=events, metrics=metrics, epoch=epoch)
        else:
            manager.record_metrics(self._step, metrics)
        signal = self._stop.requested
        if is_last or signal:
            reason = "signal" if signal else "end"
            manager.save(self._step, epoch=epoch, metrics=metrics, reason=reason, wait=True)
            self._has_ended = True
        if signal:
            raise SystemExit(self._stop.exit_code)


patch_path_lookup(HoldfastCheckpoint)
patch_loading()
