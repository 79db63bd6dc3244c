"""Weight averages in a copy of the model: exponential (EMA) and stochastic weight averaging (SWA).

After Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (2018).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError, listing
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, Unit, parse
from holdfast.state.capture.edits import StateView, cast_floats
from holdfast.state.leaves import is_subclass
from holdfast.train.strategies import local

logger = logging.getLogger("holdfast")


class Average:
    """Exponential moving average of a model's weights, in a copy of the model.

    `average = decay * average + (1 - decay) * weight`, for parameters and buffers of floating
    point; other buffers are copied. The copy is the component `ema`, so that `load_weights` with
    `component="ema"` gives the averaged weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy `model`, to average weights in the copy; `model` itself is never changed.

        The copy is in float32, or wider: most updates round to no change in bfloat16 and float16.
        """
        if isinstance(decay, bool) or not 0 < decay < 1:
            raise UsageError(f"ema={decay!r}: must be between 0 and 1, such as 0.999")
        self.decay = decay
        self.model = widened(model)
        """The averaged model, in float32 or wider."""
        self.cast = AverageInModelDtypes(self.model, model)
        """The averaged model in the dtypes of the trained one."""

    @torch.no_grad()
    def start_from_model(self, model: nn.Module) -> None:
        """Start the average from the current weights of the model."""
        for average, live in pairs_of(self.model, model):
            average.copy_(live)

    @torch.no_grad()
    def update_average(self, model: nn.Module) -> None:
        """Update the average with the current weights of the model."""
        averages, weights = [], []
        for average, live in pairs_of(self.model, model):
            if not (average.is_floating_point() or average.is_complex()):
                average.copy_(live)
            elif average.dtype == live.dtype:
                averages.append(average)
                weights.append(live)
            else:
                average.lerp_(live.to(average.dtype), 1 - self.decay)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)


@check_arguments(but=("start", "every"))
@dataclass(frozen=True, slots=True, kw_only=True)
class SWA:
    """Settings of an equal average of the weights, kept beside training.

    Trainer(…, swa=SWA(start="0.75dur", every="1ep"))
    """

    start: str | Time
    """When averaging begins, such as "10ep", or "0.75dur" for the last quarter of the way to the
    goal."""
    every: str | Time = "1ep"
    """Interval at which the weights are added, in a counted unit."""
    batch_norm: Any = None
    """Loader for a pass that recomputes the statistics of batch norm, before the save at the end of
    a run: its goal, `max_time`, or a request to stop. A model with batch norm needs it, since
    averaged weights have other statistics. Saves before the end have those of the live model."""

    def __post_init__(self) -> None:
        if self.starts_at.unit is Unit.SECOND or self.interval.unit in (Unit.SECOND, Unit.DURATION):
            raise UsageError(
                f"swa: start={str(self.start)!r}, every={str(self.every)!r}: must be counted, such "
                "as '1ep', so that both are the same after a resume"
            )

    @property
    def starts_at(self) -> Time:
        """The argument `start`, parsed."""
        return parse(self.start, what="swa: start", units=ALL_UNITS)

    @property
    def interval(self) -> Time:
        """The argument `every`, parsed."""
        return parse(self.every, what="swa: every")


class EqualAverage:
    """Mean of the weights at several moments, in a copy, `swa`; their number is `swa-count`."""

    def __init__(self, model: nn.Module, plan: SWA) -> None:
        """Copy `model`, to average weights in the copy; `model` itself is never changed."""
        self.plan = plan
        self.num_averaged = 0
        """Number of weights in the average; with 0 the copy is that of the beginning."""
        self.model = widened(model)
        """The averaged model, in float32 or wider."""
        self.cast = AverageInModelDtypes(self.model, model)
        """The averaged model in the dtypes of the trained one."""
        self.has_statistics = not _with_statistics(model)
        """Whether batch norm has the statistics of the averaged weights."""
        names = [name for name, _ in _with_statistics(model)]
        if names and plan.batch_norm is None:
            raise UsageError(
                "swa: averaged weights have other statistics in batch norm, which need a pass over "
                "data: give SWA(batch_norm=loader). The modules are:\n" + listing(names)
            )

    @torch.no_grad()
    def add_if_due(self, model: nn.Module, before: Timestamp, now: Timestamp, goal: Time) -> None:
        """Add the model's weights if they are due after the step from `before` to `now`."""
        interval = self.plan.interval
        passed = [
            (interval.unit.read_progress(stamp) or 0) // interval.value for stamp in (before, now)
        ]
        if not self._has_begun(now, goal):
            if self.num_averaged:
                logger.warning(
                    "swa: with the goal %s averaging begins later: the average of %d weights is "
                    "dropped, and begins again at start=%r",
                    goal,
                    self.num_averaged,
                    str(self.plan.start),
                )
                self.num_averaged = 0
            return
        if passed[0] == passed[1]:
            return
        self.num_averaged += 1
        for average, live in _pairs(self.model.parameters(), model.parameters()):
            if average.is_floating_point() or average.is_complex():
                average.lerp_(live.to(average), 1 / self.num_averaged)
            else:
                average.copy_(live)
        for average, live in _pairs(self.model.buffers(), model.buffers()):
            average.copy_(live)
        self.has_statistics = not _with_statistics(self.model)

    @torch.no_grad()
    def update_statistics(
        self, batches: Iterable[Any], forward: Callable[[Any], Any], fills_in: Callable[[], bool]
    ) -> None:
        """Compute batch norm's statistics anew, as means over `batches`, if it has any."""
        modules = [module for _, module in _with_statistics(self.cast.update())]
        if self.has_statistics or not self.num_averaged:
            return
        before, num_batches = [module.momentum for module in modules], 0
        for module in modules:
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
        try:
            for batch in batches:
                is_own = not fills_in()
                for module in modules:
                    # Others may need this rank in the forward pass, and SyncBatchNorm in training.
                    module.train(is_own or isinstance(module, nn.SyncBatchNorm))
                forward(batch)
                num_batches += is_own
        finally:
            for module, momentum in zip(modules, before, strict=True):
                module.momentum = momentum
                module.eval()
        if not num_batches:
            raise UsageError("swa: batch_norm gave no batch: give a loader, not an iterator")
        if self.cast.differs:
            for average, cast in _pairs(self.model.buffers(), self.cast.model.buffers()):
                average.copy_(cast)
        self.has_statistics = True

    def state_dict(self) -> dict[str, int]:
        """Return the count to save."""
        return {"num_averaged": self.num_averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        if set(state) != {"num_averaged"}:
            raise UsageError(f"not the state of an SWA average: {sorted(state)}")
        self.num_averaged = state["num_averaged"]

    def _has_begun(self, now: Timestamp, goal: Time) -> bool:
        start = self.plan.starts_at
        if start.unit is Unit.DURATION:
            return (goal.unit.read_progress(now) or 0) >= start.value * goal.value
        return (start.unit.read_progress(now) or 0) >= start.value


def _with_statistics(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]


class AverageInModelDtypes:
    """An averaged model in the dtypes of the trained one, which its batches and losses expect."""

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        """Copy `model` if its dtypes are not those of `average`."""
        self._average = average
        is_same = all(one.dtype == other.dtype for one, other in pairs_of(average, model))
        self.model = average if is_same else copy.deepcopy(model).requires_grad_(False).eval()
        """The module; `update` makes it current."""

    @property
    def differs(self) -> bool:
        """Whether the trained model has narrower dtypes than the average."""
        return self.model is not self._average

    @torch.no_grad()
    def update(self) -> nn.Module:
        """Cast the present average into the module, and return it."""
        if self.differs:
            for cast, average in pairs_of(self.model, self._average):
                cast.copy_(average)
        return self.model


def modules_of_averages(*averages: Average | EqualAverage | None) -> list[nn.Module]:
    """List the averaged models, also in the dtypes of the trained one if those are narrower."""
    kept = [item for item in averages if item is not None]
    casts = [item.cast.model for item in kept if item.cast.differs]
    return [*(item.model for item in kept), *casts]


def widened(model: nn.Module) -> nn.Module:
    """Copy a model without gradients, in eval mode; values of less than 32 bits become float32.

    Tensor subclasses, such as quantized weights, are copied as they are.

    Raises:
        UsageError: one of them trains, so its average would stay at the initial value.
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}  # shared buffers stay shared
    trained = [
        f"{name}: {type(local(one)).__qualname__}"
        for name, one in model.named_parameters()
        if one.requires_grad and is_subclass(local(one))
    ]
    if trained:
        raise UsageError(
            "ema, swa: tensor subclasses that train cannot be averaged. Leave out ema and swa, or "
            "train these weights as plain tensors:\n" + listing(trained)
        )

    def widen(tensor: Tensor) -> Tensor:
        if is_subclass(tensor):
            return tensor
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            return known.setdefault(id(tensor), (tensor, tensor.float()))[1]
        return tensor

    copied: nn.Module = copy.deepcopy(model).requires_grad_(False).eval()
    copied._apply(widen)  # type: ignore[no-untyped-call]
    return copied


def pairs_of(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair what this rank holds of the parameters and buffers of two models of one structure."""
    own = [*one.parameters(), *one.buffers()]
    return _pairs(own, [*other.parameters(), *other.buffers()])


def _pairs(own: Iterable[Tensor], other: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for mine, its in zip(own, other, strict=True):
        if not is_subclass(local(its)):  # quantized weights, which do not train
            yield local(mine), local(its)


def cast_averages(view: StateView, averages: Mapping[str, nn.Module]) -> None:
    """Cast stored averages of bfloat16 or float16, as older versions made, to float32."""
    for name, module in averages.items():
        if name in view and (names := cast_floats(view[name], module)):
            logger.warning(
                "%s: the checkpoint has %d tensors in less than 32 bits, in which an average moves "
                "too little; it continues from them in float32",
                name,
                len(names),
            )
