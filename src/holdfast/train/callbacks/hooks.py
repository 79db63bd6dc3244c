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

    from holdfast.format.manifest import Timestamp
    from holdfast.results import Checkpoint
    from holdfast.state.capture.edits import StateView
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

    Hooks run on the training thread. If one raises an error, training ends with `HookFailed`,
    except in `exception`. A callback with `state_dict` and `load_state_dict` is saved and resumed
    with the run, as the component `callback-<name>`.
    """

    name: str | None = None
    """Unique name of the callback; None: its class's name, with `_2`, `_3` for further ones.

    Several callbacks of one class that have state need names.
    """
    priority: int = 0
    """Higher ones run first; equal ones in the order in which they were given."""
    vetoes_ephemeral: bool = False
    """If True, no ephemeral checkpoint is made; permanent ones are."""
    watches: Sequence[str] = ()
    """Full names of the metrics that it needs, such as "val/loss".

    If neither steps nor validations have one, the first validation raises an error. In a run
    without validations, a name that begins with "val/" is an error, and a warning lists other
    missing names at the end of the first epoch.
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
        """Called after the model was made, to rebuild it before optimizer and average are made."""

    def setup(self, training: Training) -> None:
        """Called when the Trainer is complete, before it reads a checkpoint or claims the run."""

    def before_load(self, training: Training) -> None:
        """Called before the run is claimed and its newest usable checkpoint, if any, is applied."""

    def edit_load(self, training: Training, view: StateView) -> None:
        """Called with the state of a checkpoint, to edit it before it is checked and applied.

        Called again for an older checkpoint if the first one is damaged.
        """

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Called after a checkpoint was applied."""

    def already_done(self, training: Training) -> None:
        """Called if the goal of `fit` was reached before; only `close` follows."""

    def fit_start(self, training: Training) -> None:
        """Called when training begins or resumes."""

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Called after `fit_start` if a checkpoint was loaded, with the cost of the load.

        `cost` has `load/duration_s`, which includes verification, and `load/nbytes`.
        """

    def epoch_start(self, training: Training) -> None:
        """Called when an epoch begins, but not when a run resumes within it."""

    def before_data(self, training: Training) -> None:
        """Called before the batches of a step are fetched, also if the epoch has no more."""

    def step_start(self, training: Training) -> None:
        """Called after the batches of a step were fetched."""

    def batch_start(self, training: Training, batch: Any) -> None:
        """Called before a batch, or a part of one with `micro_batch`; it is on its device."""

    def before_forward(self, training: Training, batch: Any) -> Any:
        """Called before the loss function; a returned value replaces the batch."""

    def after_forward(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called with the result of the loss function, the loss neither divided nor scaled."""

    def before_backward(self, training: Training, loss: Tensor) -> None:
        """Called before the backward pass, with the loss divided by the number of batches.

        If the loss function returns a weight, the loss is multiplied by it instead.
        """

    def after_backward(self, training: Training) -> None:
        """Called after the gradients of the batch were added to the step's.

        They include the loss scale, and are not yet divided by the total weight of the batches.
        """

    def batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called after the batch, with the result of the loss function."""

    def before_optimizer_step(self, training: Training) -> None:
        """Called before the optimizer steps, with the gradients complete, unscaled and clipped."""

    def after_optimizer_step(self, training: Training) -> None:
        """Called after the optimizer stepped, or the loss scaler skipped a non-finite update."""

    def before_zero_grad(self, training: Training) -> None:
        """Called before the gradients are cleared."""

    def after_zero_grad(self, training: Training) -> None:
        """Called after the gradients were cleared."""

    def before_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """Called before each scheduler steps."""

    def after_scheduler_step(self, training: Training, scheduler: Any) -> None:
        """Called after each scheduler stepped."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Called after a step was counted. Reading a metric may wait for the accelerator."""

    def epoch_end(self, training: Training) -> None:
        """Called after an epoch; `training.counters.epoch` includes it."""

    def validation_start(self, training: Training, name: str) -> None:
        """Called before the loader or check `name` ("" for the only loader) runs, in eval mode."""

    def validation_batch_start(self, training: Training, batch: Any) -> None:
        """Called before a batch of a validation; it is on its device."""

    def validation_batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        """Called after the batch, with the result of the loss function."""

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Called after the loader or check `name`, with its metrics under their full names."""

    def log(self, training: Training, metrics: Metrics) -> None:
        """Called with metrics to record: every `log_every` steps, after a validation, at the end.

        They belong to `training.present_step`. `Trainer.log` also calls it.
        """

    def log_image(self, training: Training, name: str, image: Image) -> None:
        """Called with an image to record, such as a confusion matrix.

        `image.pixels` has the shape height x width x 3; `image.values` is the matrix.
        """

    def log_text(self, training: Training, name: str, text: str) -> None:
        """Called with a text that was passed to `Trainer.log`."""

    def log_table(self, training: Training, name: str, table: Table) -> None:
        """Called with a table that was passed to `Trainer.log`."""

    def log_histogram(self, training: Training, name: str, histogram: Histogram) -> None:
        """Called with the distribution of a tensor that was passed to `Trainer.log`."""

    def before_save(self, training: Training) -> None:
        """Called before the state is captured for a save; changes by these hooks are saved."""

    def edit_save(self, training: Training, view: StateView) -> None:
        """Called with the captured state, to edit the stored values; the live state is not changed.

        Reading a tensor copies it.
        """

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Called when a checkpoint is durable, at the end of a step or of the training.

        `cost` has `save/stall_s`, `save/duration_s` and `save/nbytes`.
        """

    def checkpoint_failed(self, training: Training, error: SaveFailed) -> None:
        """Called instead of `checkpoint_saved` if a save failed; the next step retries it."""

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Called with the metrics of `Trainer.test`, if this Trainer has called `fit` before.

        `at` is the position of the tested checkpoint, or the current one.
        """

    def exception(self, training: Training, error: BaseException) -> None:
        """Called when an error ends the training; it is raised afterwards in any case."""

    def fit_end(self, training: Training) -> None:
        """Called after training without an error, when its last checkpoint is durable."""

    def close(self, training: Training) -> None:
        """Called last, also after an error, to release resources of `setup` and `fit_start`."""


class Logger(Callback):
    """Callback that only records metrics: called after other callbacks, but before them in
    `fit_start`, so that it is ready for what they log."""

    sink: Sink | None = None
    """Receiver of the events of saves, on whichever thread they happen; None: needs none."""
