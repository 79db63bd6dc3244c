"""Steps with several optimizers, or with a function that does the whole update.

A loss function may give a loss for each optimizer; an `update` function does all by itself, by the
methods of `Control`: a GAN, an alternation, an optimizer that needs a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from holdfast.errors import UsageError
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.outputs import StepOutput
from holdfast.train.step.device_metrics import LazyMetrics, Mean, convert_metric
from holdfast.train.step.step import Clip, LossFunction, Update, moved
from holdfast.train.strategies import gather_dtensor

Closure = Callable[[], Any]
UpdateFunction = Callable[["Control", Any], Mapping[str, Any]]
"""Function of a `Control` and a batch (of a list of batches, with `accumulate`) that trains one
step; returns metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralUpdate(Update):
    """Runs a training step by a function, with one optimizer or several by name."""

    optimizers: Mapping[str, torch.optim.Optimizer]
    """Optimizers by name; the only one has the name ""."""
    clips: Mapping[str, Clip]
    update: UpdateFunction | None
    """Function that trains a step; None: the loss function gives a loss for each optimizer."""
    accumulate: int

    @classmethod
    def from_update(
        cls,
        parts: Update,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        clips: Mapping[str, Clip],
        update: UpdateFunction | None,
        accumulate: int,
    ) -> SeveralUpdate:
        """Make one with the parts of another update."""
        return cls(
            **{field.name: getattr(parts, field.name) for field in fields(parts)},
            optimizers=optimizers,
            clips=clips,
            update=update,
            accumulate=accumulate,
        )

    @property
    @override
    def stepped(self) -> Sequence[torch.optim.Optimizer]:
        return (*self.optimizers.values(),)

    @property
    @override
    def validation_loss(self) -> LossFunction:
        """The sum of all losses, with each as a metric; with `update` that of the Trainer."""
        if self.update is not None:
            return self.loss
        return lambda model, batch: summed(losses_of(self.loss(model, batch), self.optimizers))

    @override
    def __call__(self, window: Sequence[Any], *, fills_in: bool = False) -> LazyMetrics:
        """Train one step by the function; returns its metrics, and norms of clipped gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)  # gradients that other code has left
        self.numerics.reset_loss_scaler()
        control = Control(self)
        batches = [moved(batch, self.device) for batch in window]
        for batch in batches:
            self.callbacks.call_hook(Callback.batch_start, batch)
        mean = Mean()
        if self.update is None:
            self._train_on_losses(control, batches, mean)
        else:
            with self.numerics.autocast():
                found = self.update(control, batches if self.accumulate > 1 else batches[0])
            if not isinstance(found, Mapping):
                raise UsageError(f"update gave {type(found).__name__}, not a mapping of metrics")
            values, kinds = self.numbers.reduced(found)
            mean.add_batch(values, 1.0, kinds)
        control.finish_step()
        self._step_schedulers(may_be_early=True)
        return LazyMetrics({**self.means(mean), **control.norms})

    def _train_on_losses(self, control: Control, batches: Sequence[Any], mean: Mean) -> None:
        """Add up the gradients of each optimizer's own loss, then step each optimizer."""
        for given in batches:
            batch = self.callbacks.transformed(Callback.before_forward, given)
            with self.numerics.autocast():
                outputs = losses_of(self.loss(self.called, batch), self.optimizers)
            joined = summed(outputs)
            self.callbacks.call_hook(Callback.after_forward, batch, joined)
            for at, (name, output) in enumerate(outputs.items()):
                is_last = at == len(outputs) - 1
                control.backward(output.loss / len(batches), name, retain_graph=not is_last)
            values, kinds = self.numbers.reduced({"loss": joined.loss, **joined.metrics})
            mean.add_batch(values, 1.0, kinds)
            self.callbacks.call_hook(Callback.batch_end, batch, joined)
        for name in self.optimizers:
            control.step(name)


class Control:
    """Controls a step of training from an `update` function: backward passes, optimizer steps.

    A step that an error has interrupted after the first `step` of an optimizer cannot be undone,
    and nothing of it is saved.
    """

    def __init__(self, update: SeveralUpdate) -> None:
        self._update = update
        self._stepped: set[str] = set()
        self.norms: dict[str, Tensor | float] = {}
        """Norms of the gradients of optimizers that clip them, before clipping."""

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self._update.called

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name; the only one has the name ""."""
        return self._update.optimizers

    def backward(
        self, loss: Tensor, name: str | None = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradients of a loss: of all parameters, or of those of one optimizer."""
        tell, scaler = self._update.callbacks.call_hook, self._update.numerics.scaler
        tell(Callback.before_backward, loss)
        scaled = loss if scaler is None else scaler.scale(loss)
        inputs = None if name is None else _trained(self._find_optimizer(name)[1])
        with self._update.numerics.outside():
            torch.autograd.backward(scaled, inputs=inputs, retain_graph=retain_graph)
        tell(Callback.after_backward)

    def step(self, name: str | None = None, closure: Closure | None = None) -> Any:
        """Clip the gradients of an optimizer, step it, and drop its gradients.

        A `closure` computes the loss and its gradients (by `backward`) and returns the loss; the
        optimizer may call it several times, and clips nothing. Returns what the optimizer gives.

        Args:
            name: of the optimizer; None: of the only one.
            closure: for optimizers that compute the loss again.
        """
        update = self._update
        name, optimizer = self._find_optimizer(name)
        clip = update.clips[name]
        if closure is None:
            self._expect_once(name)
            update.numerics.unscale(optimizer)
            norm = clip(optimizer)
            if norm is not None:
                key = f"grad_norm/{name}" if name else "grad_norm"
                self.norms[key] = convert_metric(key, gather_dtensor(norm))
        elif update.numerics.scaler is not None or clip != Clip():
            raise UsageError("step: with a closure gradients are neither scaled (fp16) nor clipped")
        update.callbacks.call_hook(Callback.before_optimizer_step)
        update.begin_update()
        with update.numerics.outside():
            result = update.numerics.step_optimizer(optimizer, closure)
        self._stepped.add(name)
        update.callbacks.call_hook(Callback.after_optimizer_step)
        update.callbacks.call_hook(Callback.before_zero_grad)
        optimizer.zero_grad(set_to_none=True)
        update.callbacks.call_hook(Callback.after_zero_grad)
        return result

    def zero_grad(self, name: str | None = None) -> None:
        """Drop the gradients of one optimizer, or of all."""
        for optimizer in (
            self.optimizers.values() if name is None else [self._find_optimizer(name)[1]]
        ):
            optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def toggle(self, name: str) -> Iterator[None]:
        """Let only the parameters of one optimizer require gradients, during the block."""
        own = {id(item) for item in _trained(self._find_optimizer(name)[1])}
        others = [
            item
            for optimizer in self.optimizers.values()
            for item in _trained(optimizer)
            if id(item) not in own
        ]
        for item in others:
            item.requires_grad_(False)
        try:
            yield
        finally:
            for item in others:
                item.requires_grad_(True)

    def finish_step(self) -> None:
        """End the step: update the loss scale."""
        if not self._stepped:
            raise UsageError(
                "update did not step any optimizer: call step(), and use skip_steps for steps "
                "that train nothing"
            )
        self._update.numerics.end_step()

    def _expect_once(self, name: str) -> None:
        if name in self._stepped and self._update.numerics.scaler is not None:
            raise UsageError(
                f"step({name!r}): with fp16 each optimizer can step only once per step, as its "
                'gradients have one scale; use precision="bf16"'
            )

    def _find_optimizer(self, name: str | None) -> tuple[str, torch.optim.Optimizer]:
        if name is None and len(self.optimizers) == 1:
            (name,) = self.optimizers
        if name is None or name not in self.optimizers:
            raise UsageError(f"optimizer {name!r}: there are {[*self.optimizers]}")
        return name, self.optimizers[name]


def losses_of(given: Any, names: Mapping[str, Any]) -> dict[str, StepOutput]:
    """Convert what a loss function gives for several optimizers, by their names."""
    if not isinstance(given, Mapping) or set(given) != set(names):
        shown = [*given] if isinstance(given, Mapping) else type(given).__name__
        raise UsageError(
            f"loss must give a mapping with a loss for each optimizer, {[*names]}, and gave {shown}"
        )
    found = {name: StepOutput.of(given[name]) for name in names}
    weighted = [name for name, output in found.items() if output.weight is not None]
    if weighted:
        raise UsageError(f"loss: weights are for one optimizer only, and {weighted} have one")
    return found


def summed(outputs: Mapping[str, StepOutput]) -> StepOutput:
    """Return the sum of several losses, with each of them as a metric and in `outputs`."""
    first, *others = (output.loss for output in outputs.values())
    metrics: dict[str, Any] = {f"loss/{name}": item.loss for name, item in outputs.items()}
    for output in outputs.values():
        metrics |= output.metrics
    return StepOutput(sum(others, first), metrics, outputs=outputs)


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    return [item for item in parameters if item.requires_grad]
