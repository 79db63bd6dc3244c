"""Lightning's Trainer as the component `trainer`, and our checkpoints in place of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from lightning.pytorch.core import saving
from torch import Tensor

from holdfast.bridges.lightning.seams import FRAMEWORK, RESTARTING, find_own_loader, model_of
from holdfast.bridges.parts import note_other_framework
from holdfast.checkpoints import StateHooks
from holdfast.errors import NoCheckpoint
from holdfast.events import Emitter
from holdfast.interop.sources import checkpoint as checkpoints_of_ours
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.ownership.access import open_address
from holdfast.results import Checkpoint
from holdfast.state.components import RNG, TRAINER
from holdfast.state.leaves import local_of
from holdfast.store.base import Store
from holdfast.weights import load_weights

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class TrainerState:
    """The component `trainer`: loops, callbacks, and what hooks add to Lightning's checkpoint."""

    def __init__(self, trainer: Any, emit: Emitter, part: str | None) -> None:
        self._trainer, self._emit, self._part = trainer, emit, part
        self.is_between_epochs = False
        """Whether an epoch has ended, and the next one has not begun."""
        self.is_within = False
        """Whether the state that was loaded is in the middle of an epoch."""
        self.has_stopped = False
        """Whether a callback had ended the run whose state was loaded."""
        self._loops: dict[str, Any] | None = None
        """Lightning's state of the loops that was loaded."""
        self._is_resuming = False
        self._metrics: dict[str, Tensor] = {}
        self._left_out: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's checkpoint without what other components hold."""
        own = self._trainer.lightning_module.state_dict()
        with _without_gathering(self._trainer.strategy, own):
            content = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in ("optimizer_states", "lr_schedulers"):
            del content[name]
        # A callback that averages weights puts these there, and the model's own elsewhere.
        of_model = [name for name, value in content.items() if _is_model_state(value, own)]
        for name in of_model:
            del content[name]
        loops = content["loops"]["fit_loop"]
        loops["state_dict"].pop("combined_loader", None)
        content["loops"] = {"fit_loop": loops}
        lost: list[str] = []
        for name in _HYPER_PARAMETERS:
            if name in content:
                content[name] = _copy_storable(content[name], name, lost)
        for name in ("hparams_type", "datamodule_hparams_type"):
            content.pop(name, None)
        if tuple(lost) != self._left_out:
            self._emit("warning", "not saved, as only code could restore it: " + ", ".join(lost))
            self._left_out = tuple(lost)
        return {
            "of": FRAMEWORK,
            "is_between": self.is_between_epochs,
            "metrics": dict(self._trainer.callback_metrics),
            "has_stopped": bool(self._trainer.should_stop),
            "of_model": of_model,
            "part": self._part,
            "checkpoint": content,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept any state, so that Lightning loads it once and not on trial."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it through Lightning, and set its loops to the boundary that was saved."""
        note = note_other_framework(state, FRAMEWORK)
        if note is not None:
            self._emit("warning", note)
            return
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        content = dict(state["checkpoint"])
        of_model = state.get("of_model", ["state_dict"])
        content |= {
            **{name: trainer.lightning_module.state_dict() for name in of_model},
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
        self.has_stopped = bool(state["has_stopped"])

    def set_loops_to_boundary(self, found: Checkpoint) -> None:
        """Set the loops to a boundary at the step of a checkpoint, which is loaded."""
        fit_loop = self._trainer.fit_loop
        self._is_resuming = True
        if self._loops is None:
            self._set_counters(found)
        for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            tracker.ready = tracker.started = tracker.completed = tracker.processed
        self._clear_restart_flags()

    def load_lightning_positions(self) -> None:
        """Load positions of a file of Lightning's into loaders, which were made before it came."""
        fit_loop = self._trainer.fit_loop
        states = fit_loop._combined_loader_states_to_load
        if states:
            fit_loop._combined_loader._load_state_dicts(states)
            fit_loop._combined_loader_states_to_load = []
            iter(fit_loop._data_fetcher)

    def restore_metrics(self) -> None:
        """Set the metrics that schedulers and callbacks may look at before they are logged anew."""
        self._trainer._logger_connector._callback_metrics.update(self._metrics)

    def note_epoch_start(self) -> None:
        """Note that an epoch has begun; called before Lightning begins it."""
        self.is_between_epochs = False

    def set_progress(self) -> None:
        """Set progress within the epoch, which Lightning has reset, after a resume."""
        self.is_between_epochs = False
        if not self._is_resuming:
            return
        self._is_resuming = False
        fit_loop = self._trainer.fit_loop
        if self._loops is not None and self.is_within:
            fit_loop.epoch_loop.load_state_dict(self._loops, "epoch_loop.")
            self._follow_data()
        elif self._loops is None and self._batches_taken():
            self.is_within = True
            self._follow_data()
        if self.is_within:
            self._check_window()
        self._clear_restart_flags()
        # The iterator was made before the position was loaded; at an epoch's end, Lightning makes
        # one more, and the loader goes on with the next epoch.
        iter(fit_loop._data_fetcher)

    def _set_counters(self, found: Checkpoint) -> None:
        """Take the counters from a checkpoint of another trainer."""
        fit_loop = self._trainer.fit_loop
        loader = find_own_loader(self._trainer)
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
        loader = find_own_loader(self._trainer)
        return 0 if loader is None or loader.at_epoch_end else int(loader.batch)

    def _follow_data(self) -> None:
        """Set the epoch's number of batches by the data, as other ranks make other batches."""
        loader = find_own_loader(self._trainer)
        if loader is None:
            return
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        num_more = int(loader.batch) - progress.current.ready
        for tracker in (progress.total, progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(tracker, name, getattr(tracker, name) + num_more)

    def _check_window(self) -> None:
        """Warn if the next step would have the gradients of a part of its batches."""
        taken = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        window = self._trainer.accumulate_grad_batches
        if taken % window:
            self._emit(
                "warning",
                f"accumulate_grad_batches={window}, and the resume is after batch {taken} of the "
                f"epoch: the first step has the gradients of {window - taken % window} of "
                f"{window} batches. "
                "Use the accumulation and the batch size of the run that saved the checkpoint, or "
                "change them at the end of an epoch",
            )

    def _clear_restart_flags(self) -> None:
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
            for name in RESTARTING:
                if name in vars(loop):
                    setattr(loop, name, False)


@contextmanager
def _without_gathering(strategy: Any, own: Mapping[str, Any]) -> Iterator[None]:
    """Keep Lightning's dump from gathering weights and moments, which other components hold.

    Strategies of sharded models would copy or gather them.
    """
    strategy.lightning_module_state_dict = lambda: own
    strategy.optimizer_state = lambda optimizer: optimizer.state_dict()
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def _is_model_state(value: Any, own: Mapping[str, Any]) -> bool:
    """Whether a value is a mapping of the model's own tensors, under any names."""
    if value is own:
        return True
    if not isinstance(value, Mapping) or not any(isinstance(one, Tensor) for one in value.values()):
        return False
    memory = {local_of(one).data_ptr() for one in own.values() if isinstance(one, Tensor)}
    return all(
        local_of(one).data_ptr() in memory if isinstance(one, Tensor) else name in own
        for name, one in value.items()
    )


def _copy_storable(value: Any, path: str, lost: list[str]) -> Any:
    """Copy hyper-parameters without what a checkpoint cannot hold, whose paths are noted."""
    if isinstance(value, Mapping):
        copied = {}
        for name, one in value.items():
            inside = f"{path}.{name}"
            found = _copy_storable(one, inside, lost)
            if inside not in lost:
                copied[name] = found
        return copied
    if isinstance(value, list | tuple):
        return [_copy_storable(one, f"{path}.{number}", lost) for number, one in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    lost.append(path)
    return None


_FILES = (".ckpt", ".pt", ".pth", ".safetensors")
_SHARDED = "meta.pt"
"""A file in folders that Lightning saves of sharded models."""


class CheckpointReader:
    """Reads our checkpoints if Lightning is given one, and leaves all other paths to Lightning.

    It stands in for the first step of Lightning's restore, as strategies of sharded models read no
    files through a `CheckpointIO`.
    """

    def __init__(
        self, trainer: Any, encrypt: Encryption | None, part: str | None, hooks: StateHooks
    ) -> None:
        self.asked: tuple[Store, str] | None = None
        """Store and checkpoint of the `ckpt_path` of a fit; its state is loaded at once."""
        self.done: str | None = None
        """The `ckpt_path` of a fit that has resumed: such strategies would restore it later."""
        self._trainer, self._encrypt, self._part = trainer, encrypt, part
        self._hooks = hooks
        self._connector = trainer._checkpoint_connector
        self._connector.resume_start = self.start_restore

    def start_restore(self, path: Any = None, *arguments: Any, **options: Any) -> None:
        """Load weights into the live module, and let hooks see what they may ask for."""
        if path is not None and str(path) == self.done:
            return
        if path and _is_ours(os.fspath(path)):
            self._connector._ckpt_path = path
            self._connector._loaded_checkpoint = self._read_checkpoint(os.fspath(path))
        else:
            type(self._connector).resume_start(self._connector, path, *arguments, **options)

    def note_named_checkpoint(self, path: str) -> None:
        """Note which checkpoint of ours a fit was given, if it is one."""
        if path and _is_ours(path):
            store, which, folder = open_address(path)
            self.asked = store, folder or which

    def _read_checkpoint(self, path: str) -> dict[str, Any]:
        store, which, folder = open_address(path)
        module, is_fit = self._trainer.lightning_module, self._trainer.training
        stored = _Stored()
        # Of a fit, all but what hooks may ask for is loaded later.
        model = model_of(module, self._part)
        wanted = {TRAINER: stored} if is_fit else {TRAINER: stored, "model": model}
        hooks = StateHooks(
            edit_save=self._hooks.edit_save, one_sided=lambda name: name != "model" or is_fit
        )
        with CheckpointManager(
            store, wanted, encrypt=self._encrypt, hooks=hooks, sinks=()
        ) as manager:
            manager.load(folder or which, skip=[RNG])
        # Averages of the weights, which are what is tested, are in the place of the weights.
        unread = {"loops", "state_dict"} if is_fit else {"loops"}
        return _build_content(module.state_dict(), stored, unread)


def patch_loading() -> None:
    """Let `load_from_checkpoint` of modules and data modules take a root, or ROOT@WHICH."""
    original = saving.pl_load

    def load(path: Any, map_location: Any = None, **options: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not _is_ours(os.fspath(path)):
            return original(path, map_location=map_location, **options)
        store, which, folder = open_address(os.fspath(path))
        stored, hooks = _Stored(), StateHooks(one_sided=lambda name: True)
        with CheckpointManager(store, {TRAINER: stored}, ranks=None, hooks=hooks, sinks=()) as one:
            found = one.load(folder or which, skip=[RNG])
        weights = load_weights(found.path)
        part = stored.content.get("part")
        prefix = f"{part}." if part else ""
        device = map_location if isinstance(map_location, str | torch.device) else None
        moved = {f"{prefix}{name}": value.to(device) for name, value in weights.items()}
        return _build_content(moved, stored, {"loops"})

    saving.pl_load = load


def _is_ours(path: str) -> bool:
    """Whether a path is of our checkpoints; a folder of neither is an error."""
    if path.endswith(_FILES):
        return False
    is_ours = checkpoints_of_ours.recognises(path)
    if not is_ours and os.path.isdir(path) and not os.path.isfile(os.path.join(path, _SHARDED)):
        raise NoCheckpoint(
            f"{path}: a folder without checkpoints; give a root of Holdfast, ROOT@step=N, or a "
            "file of Lightning"
        )
    return is_ours


def _build_content(weights: Mapping[str, Any], stored: _Stored, unread: set[str]) -> dict[str, Any]:
    """Return what a file of Lightning holds of a checkpoint of ours."""
    is_of_lightning = stored.content.get("of") == FRAMEWORK
    content = stored.content.get("checkpoint", {}) if is_of_lightning else {}
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "state_dict": weights,
        **{name: one for name, one in content.items() if name not in unread},
        "optimizer_states": [],
        "lr_schedulers": [],
    }


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
