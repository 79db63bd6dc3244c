"""Base class of callbacks, with every hook of a training in the order of their calls.

A hook is a method of `Callback` and a name in `MOMENTS`; that is all there is to adding one,
beside the place that calls it. `docs/hooks.md` is made from this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from holdfast.errors import SaveFailed
from holdfast.events import Sink
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.engine.checkpoint import Checkpoint
    from holdfast.format.manifest import Timestamp
    from holdfast.state.edits import StateView
    from holdfast.train.outputs import Histogram, Image, StepOutput, Table

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
    "Loggers, if it is time": ("log", "log_image", "log_text", "log_table", "log_histogram"),
    "Saving, if it is due": ("before_save", "edit_save", "checkpoint_saved", "checkpoint_failed"),
    "`test` ends": ("test_end",),
    "`fit` or `validate` ends": ("exception", "fit_end", "close"),
}
"""Title of each phase of a training, and the hooks called in it, both in order of time."""

HOOKS: tuple[str, ...] = tuple(name for names in MOMENTS.values() for name in names)
"""Names of all hooks of a `Callback`, in order of time."""


class Callback:
    """Base class of callbacks: training calls these methods, its hooks. Override some.

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
    watches: Sequence[str] = ()
    """Full names of the metrics that it needs, such as "val/loss".

    One that neither steps nor validations give is an error at the first validation.
    """
    records_log: bool = True
    """Whether its `log` hooks record what other callbacks log; False for monitors and displays.

    If no callback records an entry of `Trainer.log`, a warning is logged.
    """
    step_numbers: Mapping[str, Tensor | float] = MappingProxyType({})
    """Numbers of the step that its hooks note for its log: a new dict at each step.

    A checkpoint that is made before a validation due at its step holds them. A resume does this
    validation, and sets them before it logs.
    """

    def model_made(self, training: Training) -> None:
        """Called when the model was made, to rebuild it before optimizer and average are made."""

    def setup(self, training: Training) -> None:
        """Called when the Trainer is complete, before it reads a checkpoint or claims the run."""

    def before_load(self, training: Training) -> None:
        """Called before the run is claimed and its newest usable checkpoint, if any, is applied."""

    def edit_load(self, training: Training, view: StateView) -> None:
        """Called with the state of a checkpoint, to edit it before it is checked against the live
        state and applied. Called again for an older checkpoint where one proves damaged."""

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Called when a checkpoint was applied."""

    def already_done(self, training: Training) -> None:
        """Called if the goal of `fit` had been reached and saved before; only `close` follows."""

    def fit_start(self, training: Training) -> None:
        """Called when training begins or resumes."""

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Called after `fit_start` if a checkpoint was loaded, with the cost of the load.

        `cost` has `load/duration_s`, in which everything that was read was verified, and
        `load/nbytes`.
        """

    def epoch_start(self, training: Training) -> None:
        """Called when an epoch begins, but not again by a resume inside it."""

    def before_data(self, training: Training) -> None:
        """Called before the batches of a step are fetched; the epoch may turn out to be over."""

    def step_start(self, training: Training) -> None:
        """Called when the batches of a step were fetched."""

    def batch_start(self, training: Training, batch: Any) -> None:
        """Called before a batch is trained on; it is on its device.

        With `micro_batch` a part of a batch is a batch for hooks.
        """

    def before_forward(self, training: Training, batch: Any) -> Any:
        """Called before the loss function; what it returns, if anything, is the batch from here."""

    def after_forward(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called with what the loss function gave, the loss neither divided nor scaled."""

    def before_backward(self, training: Training, loss: Tensor) -> None:
        """Called before the backward pass, with the loss divided by the number of batches.

        If the loss function gives a weight, the loss is multiplied by it instead.
        """

    def after_backward(self, training: Training) -> None:
        """Called when the batch's gradients were added to those of the step.

        Under a loss scale they are scaled. If batches have weights, they are not yet divided by the
        total weight.
        """

    def batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called when the batch was trained on, with what the loss function gave."""

    def before_optimizer_step(self, training: Training) -> None:
        """Called before the optimizer steps, with the gradients complete, unscaled and clipped."""

    def after_optimizer_step(self, training: Training) -> None:
        """Called when the optimizer stepped, or the loss scaler skipped a non-finite update."""

    def before_zero_grad(self, training: Training) -> None:
        """Called before the gradients are cleared."""

    def after_zero_grad(self, training: Training) -> None:
        """Called when the gradients were cleared."""

    def before_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """Called before each scheduler steps."""

    def after_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """Called when each scheduler has stepped."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Called when a step is done and counted. Reading a metric may wait for the accelerator."""

    def epoch_end(self, training: Training) -> None:
        """Called when an epoch has ended; `training.counters.epoch` counts it already."""

    def validation_start(self, training: Training, name: str) -> None:
        """Called before the loader or check `name` ("" for the only loader) runs, in eval mode."""

    def validation_batch_start(self, training: Training, batch: Any) -> None:
        """Called before a batch is validated on; it is on its device."""

    def validation_batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called when the batch was validated on, with what the loss function gave."""

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Called after the loader or check `name`, with its metrics, named as in checkpoints."""

    def log(self, training: Training, metrics: Metrics) -> None:
        """Called with metrics to record: every `log_every` steps, after a validation, at the end.

        They belong to `training.present_step`. `Trainer.log` calls it, too.
        """

    def log_image(self, training: Training, name: str, image: Image) -> None:
        """Called with a picture to record, such as that of a confusion matrix.

        `image.pixels` has the shape height x width x 3; `image.values` is the matrix.
        """

    def log_text(self, training: Training, name: str, text: str) -> None:
        """Called with a text to record, which `Trainer.log` was given."""

    def log_table(self, training: Training, name: str, table: Table) -> None:
        """Called with a table to record, which `Trainer.log` was given."""

    def log_histogram(self, training: Training, name: str, histogram: Histogram) -> None:
        """Called with the distribution of a tensor to record, which `Trainer.log` was given."""

    def before_save(self, training: Training) -> None:
        """Called before the state is captured for a save; what these hooks change is saved."""

    def edit_save(self, training: Training, view: StateView) -> None:
        """Called with the captured state, to edit what is stored; the live state is not changed.

        A component that no hook reads costs nothing; reading a tensor copies it.
        """

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Called once a checkpoint is durable, at the end of a step or of the training.

        `cost` has `save/stall_s`, `save/duration_s` and `save/nbytes`.
        """

    def checkpoint_failed(self, training: Training, error: SaveFailed) -> None:
        """Called like `checkpoint_saved`, but for a failed save, which the next step retries."""

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Called with the metrics of `Trainer.test`, if this Trainer has called `fit` before.

        `at` is where the tested weights were saved, or for those as they are, the present place.
        """

    def exception(self, training: Training, error: BaseException) -> None:
        """Called when an error ends the training; it is raised afterwards whatever a hook does."""

    def fit_end(self, training: Training) -> None:
        """Called when training ends without an error, once its last checkpoint is durable."""

    def close(self, training: Training) -> None:
        """Called last, however training ended, to release what `setup` or `fit_start` acquired."""


class Logger(Callback):
    """Callback that only records metrics: called after other callbacks, but before them in
    `fit_start`, so that it is ready for what they log."""

    sink: Sink | None = None
    """Receiver of the events of saves, on whichever thread they happen; None: needs none."""
