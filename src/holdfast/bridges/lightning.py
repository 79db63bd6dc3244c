"""Bridge to Lightning 2.x: a callback that saves and resumes what its Trainer trains.

Lightning's own restart replays parts of an epoch: validations, hooks, counters. So states are saved
only where a batch or an epoch has ended with all that belongs to it, and loops are set to stand
there. Owns the order of these calls; what is saved, and when, is the manager's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from holdfast.arguments import checked
from holdfast.bridges.naming import left_out, numbered
from holdfast.bridges.parts import Generators, start_from, taking_over
from holdfast.engine.access import place_of
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.control.stop import Stop
from holdfast.engine.hooks import StateHooks
from holdfast.engine.options import Checkpoints
from holdfast.engine.roots.best import BEST
from holdfast.engine.tiers.catalog import catalog_of
from holdfast.engine.tiers.tiered import Tiered
from holdfast.errors import NoCheckpoint, UsageError, listing
from holdfast.events import Emitter
from holdfast.interop.sources import checkpoint as checkpoints_of_ours
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.policy.clock import Time
from holdfast.policy.rule import Rule
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Event, SaveFunction, Trigger
from holdfast.state.components import RNG, TRAINER
from holdfast.store.base import Store

SUPPORTED = "2.4 to 2.6"

_NEEDED = (
    "_checkpoint_connector._loaded_checkpoint",
    "_checkpoint_connector.dump_checkpoint",
    "_checkpoint_connector.restore_callbacks",
    "_checkpoint_connector.restore_datamodule",
    "_checkpoint_connector.restore_loops",
    "_checkpoint_connector.restore_precision_plugin_state",
    "_logger_connector._callback_metrics",
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._restarting",
    "fit_loop.epoch_loop._restarting",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total",
    "fit_loop.epoch_loop.batch_progress.current",
    "fit_loop.epoch_loop.load_state_dict",
    "fit_loop.epoch_loop.manual_optimization.optim_step_progress.total",
    "fit_loop.epoch_loop.on_advance_end",
    "fit_loop.epoch_loop.on_run_start",
    "fit_loop.epoch_loop.val_loop._combined_loader",
    "fit_loop.epoch_loop.val_loop._restarting",
    "fit_loop.epoch_progress.current",
    "fit_loop.on_advance_end",
    "fit_loop.on_run_start",
    "fit_loop.setup_data",
)
"""Parts of Lightning's Trainer that are no public interface, or not as they are used here."""
_RESTARTING = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")
"""Members of a loop by which it repeats parts of an epoch; not each version has each."""

_OURS = "lightning"
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_FILES = (".ckpt", ".pt", ".pth", ".safetensors")


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

    @checked(but=("every", "max_duration", "keep"))
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
        self._emit = Emitter(tuple(self.checkpoints.sinks))
        self._open = ExitStack()
        self._io: _CheckpointIO | None = None
        self._generators: Generators | None = None
        """Those that were resumed, until training goes on."""
        self._state: _TrainerState | None = None
        self._step = 0
        """Steps at the last boundary."""
        self._has_validated = self._has_ended = False

    @property
    def best_model_path(self) -> str:
        """The best checkpoint as `ROOT@best`, for Lightning's `ckpt_path="best"`; "": none."""
        root, options = self.checkpoints.root, self.checkpoints
        assert root is not None, "checked when this was made"
        catalog = catalog_of(root, self._emit, options.encrypt)
        try:
            catalog.resolve(BEST)
        except NoCheckpoint:
            return ""
        return f"{catalog.store.url}@{BEST}"

    # Hooks of Lightning

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check versions and the strategy, and let Lightning read our checkpoints."""
        if trainer.fast_dev_run:
            return
        _check(trainer)
        others = [one for one in trainer.callbacks if isinstance(one, HoldfastCheckpoint)]
        if len(others) > 1:
            raise UsageError("there are two HoldfastCheckpoint: one run has one root")
        io = trainer.strategy.checkpoint_io
        inner = io.inner if isinstance(io, _CheckpointIO) else io
        self._io = _CheckpointIO(inner, trainer, self.checkpoints.encrypt, self._part)
        trainer.strategy.checkpoint_io = self._io

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume the run, or begin it."""
        if trainer.fast_dev_run:
            return
        assert self._io is not None, "setup() comes first"
        trainer.fit_loop.setup_data()
        self._state = _TrainerState(trainer, self._emit)
        components = {
            "model": _model(pl_module, self._part),
            **_components(trainer, self._emit),
            TRAINER: self._state,
        }
        self.manager = CheckpointManager(
            self.checkpoints,
            components,
            max_duration=self._max_duration,
            hooks=taking_over(self._hooks),
            stop=self._stop,
            config=dict(pl_module.hparams),
        )
        self._open = ExitStack()
        self._open.callback(self._close)
        resumed = self._resume(self.manager, components)
        if resumed is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}
            self._generators = Generators()
            self._state.stand(resumed)
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
            _begin_anew(trainer)

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note a validation, for triggers of evaluations."""
        self._has_validated = not trainer.sanity_checking

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, unless it is saved."""
        if self.manager is None or trainer.fast_dev_run:
            return
        if not self._has_ended:
            self._save(trainer, ["step", "end"], is_last=True)
        self.manager.wait()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the save under way, and release the run."""
        self._open.pop_all().__exit__(type(exception), exception, exception.__traceback__)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the run."""
        self._open.close()

    # Steps of these

    def _close(self) -> None:
        assert self.manager is not None
        self.manager.close()

    def _resume(self, manager: CheckpointManager, components: dict[str, Any]) -> Checkpoint | None:
        asked = self._io.asked if self._io is not None else None
        if asked is None:
            return manager.resume()
        store, which = asked
        if store.url == manager.store.url:
            found = manager.resume(which)
            if found is None:
                raise UsageError(f"ckpt_path={store.url!r}: no whole state was saved there")
            return found
        found = manager.resume()
        if found is not None:
            self._emit("warning", f"{found.path} goes on, and not ckpt_path of {store.url}")
            return found
        options = self.checkpoints
        return start_from(
            store, which, manager, components, hooks=self._hooks, encrypt=options.encrypt
        )

    def _wrap(self, fit_loop: Any) -> None:
        """Call our functions at the ends of batches and epochs, until the run is released.

        No hook of a callback comes late enough: after a validation, and after schedulers.
        """
        epoch_loop, trainer = fit_loop.epoch_loop, fit_loop.trainer
        assert self._state is not None
        state = self._state
        self._replace(epoch_loop, "on_advance_end", after=lambda: self._batch_end(trainer))
        self._replace(fit_loop, "on_advance_end", after=lambda: self._epoch_end(trainer))
        if self._generators is None:
            self._replace(fit_loop, "on_run_start", before=state.load_of_lightning)
            self._replace(epoch_loop, "on_run_start", before=state.epoch_begins)
            return
        self._replace(fit_loop, "on_run_start", before=state.put_back_metrics)
        self._replace(fit_loop, "on_run_start", after=self._restore_generators)
        self._replace(epoch_loop, "on_run_start", before=state.go_on, after=self._goes_on)

    def _replace(
        self,
        loop: Any,
        name: str,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
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
            self._generators.put_back()

    def _goes_on(self) -> None:
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
        self._state.is_between = False
        self._save(trainer, ["step"], is_last=trainer.fit_loop.epoch_loop.done)

    def _epoch_end(self, trainer: Any) -> None:
        assert self._state is not None
        if trainer.global_step != self._step:  # otherwise the steps of the run have ended
            self._state.is_between = True
            self._save(trainer, ["step", "epoch"], is_last=False)

    def _save(self, trainer: Any, events: list[Event], *, is_last: bool) -> None:
        manager, self._step = self.manager, trainer.global_step
        assert manager is not None
        metrics = _Metrics(trainer)
        if self._has_validated:
            events, self._has_validated = [*events, "evaluation"], False
        epoch = trainer.fit_loop.epoch_progress.current.completed
        if not manager.is_quiet(self._step) or len(events) > 1:
            manager.maybe_save(self._step, epoch=epoch, metrics=metrics, event=events)
        signal = self._stop.requested
        if is_last or signal:
            reason = "signal" if signal else "end"
            manager.save(self._step, epoch=epoch, metrics=metrics, reason=reason, wait=True)
            self._has_ended = True
        if signal:
            raise SystemExit(self._stop.exit_code)


class _TrainerState:
    """The component `trainer`: loops, callbacks, and what hooks add to Lightning's checkpoint."""

    def __init__(self, trainer: Any, emit: Emitter) -> None:
        self._trainer, self._emit = trainer, emit
        self.is_between = False
        """Whether an epoch has ended, and the next one has not begun."""
        self.is_within = False
        """Whether the state that was loaded is in the middle of an epoch."""
        self._loops: dict[str, Any] | None = None
        """Lightning's state of the loops that was loaded."""
        self._goes_on = False
        self._metrics: dict[str, Tensor] = {}
        self._left_out: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's checkpoint without what other components hold."""
        content = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in ("state_dict", "optimizer_states", "lr_schedulers"):
            del content[name]
        loops = content["loops"]["fit_loop"]
        loops["state_dict"].pop("combined_loader", None)
        content["loops"] = {"fit_loop": loops}
        lost: list[str] = []
        for name in _HYPER_PARAMETERS:
            if name in content:
                content[name] = _plain(content[name], name, lost)
        for name in ("hparams_type", "datamodule_hparams_type"):
            content.pop(name, None)
        if tuple(lost) != self._left_out:
            self._emit("warning", "left out, as only code could restore it: " + ", ".join(lost))
            self._left_out = tuple(lost)
        return {
            "of": _OURS,
            "is_between": self.is_between,
            "metrics": dict(self._trainer.callback_metrics),
            "has_stopped": bool(self._trainer.should_stop),
            "checkpoint": content,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it through Lightning, and set its loops to the boundary that was saved."""
        note = left_out(state, _OURS)
        if note is not None:
            self._emit("warning", note)
            return
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        content = dict(state["checkpoint"])
        content |= {
            "state_dict": trainer.lightning_module.state_dict(),
            "optimizer_states": [one.state_dict() for one in trainer.optimizers],
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        }
        self._loops = content["loops"]["fit_loop"]
        connector._loaded_checkpoint = content
        trainer.lightning_module.on_load_checkpoint(content)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector._loaded_checkpoint = {}
        self.is_within = not state["is_between"]
        device = trainer.strategy.root_device
        self._metrics = {name: one.to(device) for name, one in state["metrics"].items()}
        if state["has_stopped"]:
            trainer.should_stop = True
            self._emit("warning", "this run has stopped before its goal, and stays so")

    def stand(self, found: Checkpoint) -> None:
        """Set the loops to a boundary at the step of a checkpoint, which is loaded."""
        fit_loop = self._trainer.fit_loop
        self._goes_on = True
        if self._loops is None:
            self._count(found)
        for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            tracker.ready = tracker.started = tracker.completed = tracker.processed
        self._calm()

    def load_of_lightning(self) -> None:
        """Load the positions of a file of Lightning's own, which came after the loaders were made.

        They were made early, as components of the state.
        """
        fit_loop = self._trainer.fit_loop
        states = getattr(fit_loop, "_combined_loader_states_to_load", [])
        if states:
            fit_loop._combined_loader._load_state_dicts(states)
            fit_loop._combined_loader_states_to_load = []
            iter(fit_loop._data_fetcher)

    def put_back_metrics(self) -> None:
        """Set the metrics that schedulers and callbacks may look at before they are logged anew."""
        self._trainer._logger_connector._callback_metrics.update(self._metrics)

    def epoch_begins(self) -> None:
        """Note that an epoch has begun; called before Lightning begins it."""
        self.is_between = False

    def go_on(self) -> None:
        """Set progress within the epoch, which Lightning has reset, after a resume."""
        self.is_between = False
        if not self._goes_on:
            return
        self._goes_on = False
        fit_loop = self._trainer.fit_loop
        if self._loops is not None and self.is_within:
            fit_loop.epoch_loop.load_state_dict(self._loops, "epoch_loop.")
        elif self._loops is None and self._batches_taken():
            self.is_within = True
            progress = fit_loop.epoch_loop.batch_progress
            for tracker in (progress.total, progress.current):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(tracker, name, getattr(tracker, name) + self._batches_taken())
        self._calm()
        # The iterator was made before the position was loaded; at an epoch's end, Lightning makes
        # one more, and the loader goes on with the next epoch.
        iter(fit_loop._data_fetcher)

    def _count(self, found: Checkpoint) -> None:
        """Take the counters from a checkpoint of another trainer."""
        fit_loop = self._trainer.fit_loop
        loader = _position(self._trainer)
        epoch = found.timestamp.epoch or 0
        if loader is not None:
            epoch = loader.epoch + loader.at_epoch_end
        for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            tracker.processed = epoch
        epoch_loop = fit_loop.epoch_loop
        automatic = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = epoch_loop.manual_optimization.optim_step_progress.total
        for total in (automatic, manual):
            total.ready = total.completed = found.step
        epoch_loop._batches_that_stepped = found.step

    def _batches_taken(self) -> int:
        loader = _position(self._trainer)
        return 0 if loader is None or loader.at_epoch_end else int(loader.batch)

    def _calm(self) -> None:
        """Let the loops repeat nothing of the epoch: they stand at a boundary."""
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        for loop in (
            fit_loop,
            epoch_loop,
            epoch_loop.val_loop,
            epoch_loop.automatic_optimization,
            epoch_loop.manual_optimization,
        ):
            for name in _RESTARTING:
                if name in vars(loop):
                    setattr(loop, name, False)


class _Metrics(Mapping[str, float]):
    """Metrics that were logged, read from Lightning only where a save needs them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._read: dict[str, float] | None = None

    def _values(self) -> dict[str, float]:
        if self._read is None:
            self._read = {name: float(one) for name, one in self._trainer.callback_metrics.items()}
        return self._read

    @override
    def __getitem__(self, name: str) -> float:
        return self._values()[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    @override
    def __len__(self) -> int:
        return len(self._values())


class _CheckpointIO(CheckpointIO):
    """Reads our checkpoints where Lightning is given one, and leaves all other files to `inner`."""

    def __init__(
        self, inner: Any, trainer: Any, encrypt: Encryption | None, part: str | None
    ) -> None:
        self.inner = inner
        self.asked: tuple[Store, str] | None = None
        """Store and checkpoint of the `ckpt_path` of a fit; its state is loaded later, at once."""
        self._trainer, self._encrypt, self._part = trainer, encrypt, part

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a file of Lightning's own, as without this bridge."""
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load weights into the live module, and return them with what hooks may ask for.

        Raises:
            NoCheckpoint: no checkpoint matches.
            MismatchError: it does not fit the module.
        """
        text = os.fspath(path)
        if text.endswith(_FILES) or not checkpoints_of_ours.recognises(text):
            options = {name: one for name, one in options.items() if one is not None}
            loaded: dict[str, Any] = self.inner.load_checkpoint(path, *arguments, **options)
            return loaded
        store, which, folder = place_of(text)
        module, is_fit = self._trainer.lightning_module, self._trainer.training
        stored = _Stored()
        # Of a fit, all but what hooks may ask for is loaded later.
        model = _model(module, self._part)
        wanted = {TRAINER: stored} if is_fit else {TRAINER: stored, "model": model}
        hooks = StateHooks(one_sided=lambda name: name != "model" or is_fit)
        with CheckpointManager(
            store, wanted, ranks=None, encrypt=self._encrypt, hooks=hooks, sinks=()
        ) as manager:
            manager.load(folder or which, skip=[RNG])
        if is_fit:
            self.asked = store, folder or which
        content = stored.content.get("checkpoint", {}) if stored.content.get("of") == _OURS else {}
        return {
            "pytorch-lightning_version": lightning.__version__,
            "epoch": 0,
            "global_step": 0,
            **{name: one for name, one in content.items() if name != "loops"},
            "state_dict": module.state_dict(),
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of Lightning's own."""
        self.inner.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        """Let the inner one clean up."""
        self.inner.teardown()


class _Stored:
    """Component that keeps what is loaded into it."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the content."""
        self.content = state


def _check(trainer: Any) -> None:
    """Check that the Trainer is one that this bridge knows.

    Raises:
        UsageError: lists everything that is not.
    """
    version, wrong = getattr(lightning, "__version__", "unknown"), []
    if not isinstance(trainer, lightning.Trainer):
        wrong.append(f"{type(trainer).__module__}: import the Trainer from `lightning`")
    for name in _NEEDED:
        try:
            attrgetter(name)(trainer)
        except AttributeError:
            wrong.append(f"trainer.{name}: Lightning {version} has none; supported are {SUPPORTED}")
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        kind = type(trainer.strategy).__name__
        wrong.append(f"{kind}: only single devices and DDP are supported, which hold whole models")
    if trainer.reload_dataloaders_every_n_epochs:
        wrong.append("reload_dataloaders_every_n_epochs: a new loader has no position; leave it 0")
    if wrong:
        raise UsageError("HoldfastCheckpoint:\n" + listing(wrong))


def _model(module: Any, part: str | None) -> Any:
    """Return the LightningModule, or the part of it that is the component `model`.

    Raises:
        UsageError: there is no such part, or another one has weights or buffers, too.
    """
    if part is None:
        return module
    found = attrgetter(part)(module) if part in dict(module.named_modules()) else None
    if found is None:
        raise UsageError(f"model={part!r}: the LightningModule has no module of this name")
    others = [name for name in module.state_dict() if not name.startswith(f"{part}.")]
    if others:
        raise UsageError(
            f"model={part!r}: these would not be saved; leave the argument out, to save the whole "
            "LightningModule:\n" + listing(others)
        )
    return found


def _components(trainer: Any, emit: Emitter) -> dict[str, Any]:
    """Name the parts of the Trainer as all bridges do."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    loaders = list(trainer.fit_loop._combined_loader.flattened)
    kept = [
        one for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    ]
    if len(kept) < len(loaders):
        kinds = sorted({type(one).__name__ for one in loaders if one not in kept})
        emit(
            "no_position",
            f"the position in the data is not saved, as {', '.join(kinds)} has none: a resume "
            "within an epoch trains on other samples. Give a holdfast.data.Loader",
        )
    _check_lengths(trainer, kept)
    return {
        **numbered("optimizer", trainer.optimizers),
        **numbered("scheduler", schedulers),
        **numbered("data", kept),
    }


def _check_lengths(trainer: Any, loaders: list[Any]) -> None:
    """Check that an epoch of Lightning is one of the loader.

    Raises:
        UsageError: it is shorter, or a loader without a length is read ahead.
    """
    for loader in loaders:
        if not hasattr(loader, "at_epoch_end"):
            continue
        length = len(loader) if hasattr(loader, "__len__") else None
        if length is None:
            raise UsageError(
                f"{type(loader).__name__}: Lightning reads one batch ahead of a loader without a "
                "length, so no position would be exact; give a Loader"
            )
        if trainer.num_training_batches != length:
            raise UsageError(
                f"Lightning ends an epoch after {trainer.num_training_batches} batches, and the "
                f"Loader after {length}: instead of limit_train_batches, overfit_batches or "
                "several loaders, give Loader(…, batches_per_epoch=…)"
            )


def _position(trainer: Any) -> Any:
    """Return the first loader of ours; None: there is none."""
    loaders = trainer.fit_loop._combined_loader.flattened
    return next((one for one in loaders if hasattr(one, "at_epoch_end")), None)


def _begin_anew(trainer: Any) -> None:
    """Set the loaders of validations to their first batch."""
    training = trainer.fit_loop._combined_loader.flattened
    for loader in trainer.fit_loop.epoch_loop.val_loop._combined_loader.flattened:
        if hasattr(loader, "at_epoch_end") and not any(loader is one for one in training):
            state = loader.state_dict()
            at_end = {"at_end": False} if "at_end" in state else {}
            loader.load_state_dict({**state, "epoch": 0, "batch": 0, **at_end})


def _plain(value: Any, path: str, lost: list[str]) -> Any:
    """Copy hyper-parameters without what a checkpoint cannot hold, whose paths are noted."""
    if isinstance(value, Mapping):
        copied = {}
        for name, one in value.items():
            inside = f"{path}.{name}"
            found = _plain(one, inside, lost)
            if inside not in lost:
                copied[name] = found
        return copied
    if isinstance(value, list | tuple):
        return [_plain(one, f"{path}.{number}", lost) for number, one in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    lost.append(path)
    return None
