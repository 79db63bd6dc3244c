"""Validation: when it is due, on what, and the mean of its metrics.

It leaves the training as it was: modes of modules, random generators, and its own loaders at
their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, Unit, parse
from holdfast.policy.triggers import Every
from holdfast.state.generators import device_generators
from holdfast.train.callbacks import Callbacks
from holdfast.train.hooks import Callback
from holdfast.train.loop import LossFunction, evaluate, moved
from holdfast.train.making import check_range
from holdfast.train.metrics import LazyMetrics, Mean
from holdfast.train.precision import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What to validate on, and when."""

    data: Any
    """A loader, or several by name; each is iterated from its beginning every time."""
    every: str | Time | float = "1ep"
    """Between two validations, such as "500step"; a number in (0, 1] is a part of the goal, as is
    "0.25dur"."""
    batches: int | None = None
    """At most so many batches of each loader; None: all."""
    at_end: bool = True
    """Whether to validate when the goal is reached, also if it is not due."""
    loss: LossFunction | None = None
    """Gives a batch's mean loss and metrics; None: the Trainer's."""
    use_ema: bool = True
    """Whether the averaged weights are validated where the Trainer keeps some."""
    weigh: Callable[[Any], float] | None = None
    """The weight of a batch in the means; None: its samples, as the Trainer counts them, or else
    the first dimension of its first tensor."""

    def __post_init__(self) -> None:
        if self.trigger.unit is Unit.SECOND:
            raise UsageError(
                f"validation every='{self.every}': by the clock it would not be the same after a "
                "resume; use steps, epochs, samples or tokens"
            )
        if self.batches is not None:
            check_range("validation batches", self.batches, 1, 2**63)

    @property
    def trigger(self) -> Every:
        """When it is due.

        Raises:
            UsageError: `every` is neither a time nor a part.
        """
        if not isinstance(self.every, float):
            return Every(parse(self.every, what="validation every", units=ALL_UNITS))
        if not 0 < self.every <= 1:
            raise UsageError(f"validation every={self.every!r}: a part must be in (0, 1]")
        return Every(Time(self.every, Unit.DURATION))

    def is_due(self, before: Timestamp, now: Timestamp, goal: Time) -> bool:
        """Whether a multiple of `every` was reached or passed since `before`."""
        return self.trigger.resolve(goal).due(before, None, now) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """Carries a `Validation` out."""

    plan: Validation
    loss: LossFunction
    numerics: Numerics
    device: torch.device | None
    callbacks: Callbacks
    weigh: Callable[[Any], float]
    _loaders: dict[str, _Restarting] = field(init=False)

    def __post_init__(self) -> None:
        data = self.plan.data
        named = dict(data) if isinstance(data, Mapping) else {"": data}
        loaders = {name: _Restarting(loader) for name, loader in named.items()}
        if not loaders or not all(isinstance(name, str) for name in named):
            raise UsageError("validation data: give a loader, or some by name")
        object.__setattr__(self, "_loaders", loaders)

    def run(self, model: nn.Module, live: nn.Module) -> dict[str, float]:
        """Validate `model` on every loader; `live` is the module whose mode hooks may see.

        Metrics are named `val/<metric>`, or `val/<loader>/<metric>` of several loaders.

        Raises:
            UsageError: a loader gives no batch, or the loss is none.
        """
        found: dict[str, float] = {}
        with undisturbed(), _evaluating(live, model), torch.no_grad():
            for name, loader in self._loaders.items():
                self.callbacks.tell(Callback.validation_start, name)
                metrics = self._on(name, loader, model)
                self.callbacks.tell(Callback.validation_end, name, metrics)
                found |= metrics
        return found

    def _on(self, name: str, loader: _Restarting, model: nn.Module) -> dict[str, float]:
        mean, tell = Mean(), self.callbacks.tell
        for given in islice(loader.batches(), self.plan.batches):
            batch = moved(given, self.device)
            tell(Callback.validation_batch_start, batch)
            with self.numerics.autocast():
                loss, extra = evaluate(self.plan.loss or self.loss, model, batch)
            mean.add({"loss": loss, **extra}, self.weigh(given))
            tell(Callback.validation_batch_end, batch)
        found = LazyMetrics(mean.result())
        if not found:
            raise UsageError(f"validation data {name!r} gave no batch")
        scope = f"val/{name}/" if name else "val/"
        return {f"{scope}{metric}": value for metric, value in found.items()}


class _Restarting:
    """A loader that begins anew each time, if it has a position."""

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "__iter__"):
            raise UsageError(f"validation data: a {type(loader).__name__} cannot be iterated over")
        self._loader = loader
        has_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._begin = loader.state_dict() if has_position else None

    def batches(self) -> Iterator[Any]:
        if self._begin is not None:
            self._loader.load_state_dict(self._begin)
        return iter(self._loader)


def size_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor.

    Raises:
        UsageError: there is no tensor with a dimension.
    """
    tensor = next(_tensors(batch), None)
    if tensor is None:
        raise UsageError(
            "validation: how many samples a batch has cannot be told; give count_samples or weigh"
        )
    return len(tensor)


@contextmanager
def undisturbed() -> Iterator[None]:
    """After the block, the global generators of all devices are as before it."""
    devices = [item for several in device_generators().values() for item in several]
    states = [item.get_state() for item in devices]
    with preserved():
        try:
            yield
        finally:
            for item, state in zip(devices, states, strict=True):
                item.set_state(state)


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards every module has the mode it had, also those frozen by hand."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
