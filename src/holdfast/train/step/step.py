"""A step of training: its batches, its gradients, its precision, the update of the weights.

Knows nothing about saving, counting or validating.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.outputs import Image, StepOutput
from holdfast.train.step.device_metrics import LazyMetrics, Mean, Numbers, RankMeans, convert_metric
from holdfast.train.step.epoch_metrics import Scores
from holdfast.train.step.micro_batches import MicroBatch, MicroBatches, Weighing, is_out_of_memory
from holdfast.train.step.numerics import NanBudget, Numerics
from holdfast.train.strategies import Parallel, gather_dtensor

LossFunction = Callable[[Any, Any], Any]
"""Function of the model and a batch that gives its mean loss, as `StepOutput.of` takes it."""
_Outputs = list[tuple[Any, StepOutput]]
"""Batches with what the loss function gave for them."""


@check_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Gradient clipping by norm or by value; at most one of the two."""

    norm: float | None = None
    """Largest norm of all gradients together."""
    value: float | None = None
    """Largest absolute value of a gradient element."""

    def __post_init__(self) -> None:
        for name, value in (("norm", self.norm), ("value", self.value)):
            if value is not None and not value > 0:
                raise UsageError(f"clip: {name}={value!r}: must be above zero, or None")
        if self.norm is not None and self.value is not None:
            raise UsageError(f"clip: norm={self.norm!r}, value={self.value!r}: give only one")

    def __call__(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Clip the gradients; returns the norm before clipping, if clipped by norm."""
        if self.norm is not None:
            return nn.utils.clip_grad_norm_(_parameters(optimizer), self.norm)
        if self.value is not None:
            nn.utils.clip_grad_value_(_parameters(optimizer), self.value)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Runs a training step: forward, backward, clipping and the optimizer's update."""

    model: nn.Module
    called: nn.Module
    """What the loss function calls: the model, or a wrapper that exchanges gradients."""
    parallel: Parallel
    optimizer: torch.optim.Optimizer
    schedulers: Sequence[Any]
    """Schedulers, each with `step()`, called once a step, in order."""
    loss: LossFunction
    """Function that computes the mean loss of a batch, and optionally metrics, outputs, weight."""
    clip: Clip
    numerics: Numerics
    device: torch.device | None
    """Device to move batches to; None: they are not moved."""
    callbacks: Callbacks
    numbers: Numbers
    means: RankMeans
    weighing: Weighing
    micro_batches: MicroBatches
    scores: Scores
    """Metrics of the training that are no means."""
    snapshot: Callable[[], Undo]
    """Function that copies what a forward and a backward pass change, except gradients."""
    begin_update: Callable[[], None] = lambda: None
    """Callback right before the first change that cannot be undone."""
    nan: NanBudget | None = None
    """Budget of steps that are skipped as they are not finite; None: none is skipped."""

    def __call__(self, window: Sequence[Any], *, fills_in: bool = False) -> LazyMetrics:
        """Train on the batches of one step; returns mean metrics.

        `fills_in`: the last batch is a neighbor's sample (`Loader.own_samples`). Its weight is 0.
        Metrics besides `loss` are those of the loss function, and `grad_norm` (before clipping)
        when gradients are clipped by their norm.
        """
        tell = self.callbacks.call_hook
        if any(weight.grad is not None for weight in _parameters(self.optimizer)):
            self.optimizer.zero_grad(set_to_none=True)  # gradients that other code has left
        if self.nan is not None:
            self.nan.keep_buffers()
        self.numerics.reset_loss_scaler()
        mean, unscored = self._gradients_that_fit(window, fills_in=fills_in)
        self.weighing.divide(_parameters(self.optimizer))
        self.numerics.unscale(self.optimizer)
        # Before clipping, which makes infinite gradients finite if it is by value.
        if self.nan is not None and self.nan.must_skip(self._checked_for_nan(mean)):
            self.optimizer.zero_grad(set_to_none=True)
            self.begin_update()
            self._step_schedulers(may_be_early=True)
            return LazyMetrics({"nan_skipped": self.nan.num_skipped})
        for batch, output in unscored:
            self.scores.add_batch(batch, output)
        norm = self.clip(self.optimizer)
        tell(Callback.before_optimizer_step)
        self.begin_update()
        self.numerics.step_optimizer(self.optimizer)
        self.numerics.end_step()
        tell(Callback.after_optimizer_step)
        tell(Callback.before_zero_grad)
        self.optimizer.zero_grad(set_to_none=True)
        tell(Callback.after_zero_grad)
        self._step_schedulers(may_be_early=self.numerics.scaler is not None)
        extra = (
            {} if norm is None else {"grad_norm": convert_metric("grad_norm", gather_dtensor(norm))}
        )
        return LazyMetrics({**self.means(mean), **extra})

    def _checked_for_nan(self, mean: Mean) -> list[Tensor | float]:
        """Values that must be finite; a loss scaler looks at the gradients itself."""
        gradients = [] if self.numerics.scaler is not None else _parameters(self.optimizer)
        found = [item.grad for item in gradients if item.grad is not None]
        return [mean.totals["loss"][0], *found]

    @property
    def stepped(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that a step of training steps."""
        return (self.optimizer,)

    @property
    def validation_loss(self) -> LossFunction:
        """The loss function as validations call it."""
        return self.loss

    def skip_step(self) -> LazyMetrics:
        """Skip the training of a step: only schedulers step; returns no metrics."""
        self.begin_update()
        self._step_schedulers(may_be_early=True)
        return LazyMetrics({})

    def end_epoch(self) -> tuple[LazyMetrics, dict[str, Image]]:
        """Return metrics and pictures of the epoch, named `train/…`; its metrics begin anew."""
        if not self.scores:
            return LazyMetrics({}), {}
        found, pictures = self.scores.compute_metrics()
        self.scores.reset_metrics()
        named = self.numbers({f"train/{name}": value for name, value in found.items()})
        return LazyMetrics(named), {f"train/{name}": image for name, image in pictures.items()}

    def _gradients_that_fit(
        self, window: Sequence[Any], *, fills_in: bool
    ) -> tuple[Mean, _Outputs]:
        """Compute a step's gradients, exactly, with smaller parts when memory runs out."""
        while self.micro_batches.is_auto:
            before = self.snapshot()
            try:
                return self._gradients(window, fills_in=fills_in)
            except RuntimeError as error:
                if not is_out_of_memory(error) or not self.micro_batches.can_halve(window):
                    raise
            # Outside of the handler, where the error would keep the tensors of the failed try.
            self.optimizer.zero_grad(set_to_none=True)
            before.restore_snapshot()
            self.micro_batches.halve(window)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return self._gradients(window, fills_in=fills_in)

    def _gradients(self, window: Sequence[Any], *, fills_in: bool) -> tuple[Mean, _Outputs]:
        """Compute gradients; return metrics, and what `scores` see unless the step is skipped."""
        pieces, mean = self.micro_batches.split_window(window), Mean()
        unscored: _Outputs = []
        self.weighing.start_step()
        self.parallel.prepare_step(self.model)
        for at, piece in enumerate(pieces):
            is_last = at == len(pieces) - 1
            with self.parallel.enter_batch(is_last=is_last):
                is_own = not (fills_in and is_last)  # one sample, so it is one piece
                self._train_on(piece, len(pieces), mean, unscored, is_own=is_own)
        return mean, unscored

    def _train_on(
        self, piece: MicroBatch, num_pieces: int, mean: Mean, unscored: _Outputs, *, is_own: bool
    ) -> None:
        tell = self.callbacks.call_hook
        batch = moved(piece.batch, self.device)
        tell(Callback.batch_start, batch)
        batch = self.callbacks.transformed(Callback.before_forward, batch)
        with self.numerics.autocast():
            output = evaluate(self.loss, self.called, batch)
        if not is_own and output.weight is not None:
            output = replace(output, weight=0.0)
        tell(Callback.after_forward, batch, output)
        weighted, weight = self.weighing.weighted(output, piece.share, num_pieces)
        tell(Callback.before_backward, weighted)
        self.numerics.backward(weighted)
        self.parallel.check_gradients()
        tell(Callback.after_backward)
        if self.scores and is_own and self.nan is not None:
            unscored.append((batch, output))
        elif self.scores and is_own:
            self.scores.add_batch(batch, output)
        tell(Callback.batch_end, batch, output)
        found, kinds = self.numbers.reduced({"loss": output.loss, **output.metrics})
        mean.add_batch(found, piece.weight if weight is None else weight, kinds, is_own=is_own)

    def _step_schedulers(self, *, may_be_early: bool) -> None:
        for scheduler in self.schedulers:
            self.callbacks.call_hook(Callback.before_scheduler_step, scheduler)
            if may_be_early:
                _step_without_warning(scheduler)
            else:
                scheduler.step()
            self.callbacks.call_hook(Callback.after_scheduler_step, scheduler)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [item for group in optimizer.param_groups for item in group["params"]]


def _step_without_warning(scheduler: Any) -> None:
    """Step a scheduler without torch's warning about the order, which a skipped update causes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()


class Undo(Protocol):
    """Copy of a state that can be restored."""

    def restore_snapshot(self) -> None:
        """Restore the state."""


def evaluate(loss: LossFunction, model: nn.Module, batch: Any) -> StepOutput:
    """Compute the loss of a batch, with the metrics, outputs and weight that `loss` returns."""
    return StepOutput.of(loss(model, batch))


def moved(batch: Any, device: torch.device | None) -> Any:
    """Move a batch's tensors and objects with `to`, in any container, to `device`, if given."""
    if device is None:
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(to := getattr(batch, "to", None)):
        moved_batch = to(device)
        return batch if moved_batch is None else moved_batch  # None: it was moved in place
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def checked_skips(given: Iterable[range]) -> tuple[range, ...]:
    """Check `skip_steps`, ranges of steps that are counted and not trained, as for bad data."""
    ranges = tuple(given)
    for item in ranges:
        if not isinstance(item, range) or item.step != 1 or not 1 <= item.start < item.stop:
            raise UsageError(f"skip_steps: {item!r} must be a range such as range(100, 110)")
    return ranges
