"""The hooks of a training: all of them, in the order in which they are called.

A hook is a method of `Callback` and a name in `MOMENTS`; that is all there is to adding one,
beside the place that tells it. `docs/hooks.md` is made from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import SaveFailed
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.engine.checkpoint import Checkpoint
    from holdfast.state.edits import StateView

MOMENTS: Mapping[str, tuple[str, ...]] = {
    "Once, when the Trainer is made": ("model_made", "setup"),
    "`fit` begins": (
        *("before_load", "edit_load", "resumed", "already_done"),
        *("fit_start", "checkpoint_loaded"),
    ),
    "Each epoch begins": ("epoch_start",),
    "Each step begins": ("before_data", "step_start"),
    "Each batch of the step": (
        *("batch_start", "before_forward", "after_forward"),
        *("before_backward", "after_backward", "batch_end"),
    ),
    "The update of the step": (
        *("before_optimizer_step", "after_optimizer_step"),
        *("before_zero_grad", "after_zero_grad"),
        *("before_scheduler_step", "after_scheduler_step"),
    ),
    "The step is counted": ("step_end", "epoch_end"),
    "Validation, if it is due": (
        *("validation_start", "validation_batch_start", "validation_batch_end"),
        "validation_end",
    ),
    "Loggers, if it is time": ("log",),
    "Saving, if it is due": ("before_save", "edit_save", "checkpoint_saved", "checkpoint_failed"),
    "`fit` or `validate` ends": ("exception", "fit_end", "close"),
}
"""When hooks are called: titles for people, and the names of hooks, both in order."""

HOOKS: tuple[str, ...] = tuple(name for names in MOMENTS.values() for name in names)


class Callback:
    """Base class of callbacks: methods that training calls at its moments. Override some.

    Hooks run on the training thread. What one raises ends the training as `HookFailed`, except
    in `exception`. A callback with `state_dict` and `load_state_dict` is saved and resumed with
    the run, as the component `callback-<name>`.
    """

    name: str | None = None
    """Unique name of the callback; None: that of its class, with `_2`, `_3` for further ones.

    Several callbacks of one class that have state need names.
    """
    priority: int = 0
    """Higher ones run first; equal ones in the order in which they were given."""
    vetoes_ephemeral: bool = False
    """While it is True, no ephemeral checkpoint is made; permanent ones are."""

    def model_made(self, training: Training) -> None:
        """The model was made and may be rebuilt; optimizer and average are made of it next."""

    def setup(self, training: Training) -> None:
        """The Trainer is complete; nothing was read or claimed yet."""

    def before_load(self, training: Training) -> None:
        """The run is claimed next and its newest usable checkpoint, if any, is applied."""

    def edit_load(self, training: Training, view: StateView) -> None:
        """A checkpoint was read: what will be applied can be changed here, before it is checked
        against the live state. Called again for an older one where one proves damaged."""

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """A checkpoint was applied."""

    def already_done(self, training: Training) -> None:
        """The goal of `fit` had been reached and saved before; only `close` follows."""

    def fit_start(self, training: Training) -> None:
        """Training begins, or goes on."""

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Training goes on from this checkpoint; loggers are ready for what that took.

        `cost` has `load/duration_s`, in which everything that was read was verified, and
        `load/nbytes`.
        """

    def epoch_start(self, training: Training) -> None:
        """An epoch begins. Not called again by a resume inside it."""

    def before_data(self, training: Training) -> None:
        """The batches of a step are asked for; the epoch may turn out to be over."""

    def step_start(self, training: Training) -> None:
        """The batches of a step were fetched."""

    def batch_start(self, training: Training, batch: Any) -> None:
        """A batch is on its device and will be trained on."""

    def before_forward(self, training: Training, batch: Any) -> None:
        """The loss function is called next."""

    def after_forward(self, training: Training, loss: Tensor) -> None:
        """The loss of the batch is known; it is neither divided nor scaled."""

    def before_backward(self, training: Training, loss: Tensor) -> None:
        """The loss, divided by the number of batches of the step, is propagated back next."""

    def after_backward(self, training: Training) -> None:
        """The gradients of the batch were added; under a loss scale they are scaled."""

    def batch_end(self, training: Training, batch: Any) -> None:
        """The batch was trained on."""

    def before_optimizer_step(self, training: Training) -> None:
        """The gradients are complete, unscaled and clipped; the optimizer steps next."""

    def after_optimizer_step(self, training: Training) -> None:
        """The optimizer stepped, or the loss scaler skipped an update that was not finite."""

    def before_zero_grad(self, training: Training) -> None:
        """The gradients are dropped next."""

    def after_zero_grad(self, training: Training) -> None:
        """The gradients were dropped."""

    def before_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """A scheduler steps next; called for each of them."""

    def after_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """A scheduler stepped; called for each of them."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """A step is done and counted. Reading a metric may wait for the accelerator."""

    def epoch_end(self, training: Training) -> None:
        """An epoch has ended; `training.counters.epoch` counts it already."""

    def validation_start(self, training: Training, name: str) -> None:
        """The loader `name` (empty for the only one) is validated on; the model is in eval mode."""

    def validation_batch_start(self, training: Training, batch: Any) -> None:
        """A batch is on its device and will be validated on."""

    def validation_batch_end(self, training: Training, batch: Any) -> None:
        """The batch was validated on."""

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """The loader `name` was validated on; `metrics` are its own, as checkpoints get them."""

    def log(self, training: Training, metrics: Metrics) -> None:
        """Metrics are to be recorded: every `log_every` steps, after a validation, at the end.

        They are those of `training.present_step`.
        """

    def before_save(self, training: Training) -> None:
        """A checkpoint is made of the state as it is when all these hooks have returned."""

    def edit_save(self, training: Training, view: StateView) -> None:
        """The state was captured: what will be stored can be changed here, the live state cannot.

        A component that nobody looks into costs nothing; reading a tensor copies it.
        """

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """A checkpoint is durable; told at the end of a later step, or of the training.

        `cost` has `save/stall_s`, `save/duration_s` and `save/nbytes`.
        """

    def checkpoint_failed(self, training: Training, error: SaveFailed) -> None:
        """A save did not commit; told like `checkpoint_saved`. The next step tries again."""

    def exception(self, training: Training, error: BaseException) -> None:
        """The training ends by this error, which is raised afterwards whatever a hook does."""

    def fit_end(self, training: Training) -> None:
        """Training is over for now, and its last checkpoint is durable."""

    def close(self, training: Training) -> None:
        """The last hook, however it ended: give back what `setup` or `fit_start` took."""


class Logger(Callback):
    """A callback that only records; it runs after those that are not loggers, except in
    `fit_start`, so that it is ready for what they log."""
