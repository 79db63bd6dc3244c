"""Exponential moving average of the weights, as a component of the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError


class Average:
    """Exponential moving average of a model's weights, in a copy of the model.

    `average = decay * average + (1 - decay) * weight`, for parameters and buffers of floating
    point; other buffers are copied. The copy is the component `ema`, so that `load_weights` with
    `component="ema"` gives the averaged weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy `model`, which is never changed.

        Raises:
            UsageError: `decay` is not between 0 and 1.
        """
        if isinstance(decay, bool) or not 0 < decay < 1:
            raise UsageError(f"ema={decay!r}: must be between 0 and 1, such as 0.999")
        self.decay = decay
        self.model: nn.Module = copy.deepcopy(model).requires_grad_(False).eval()
        """The averaged model."""

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Start the average from the current weights of the model."""
        for average, live in self._pairs(model):
            average.copy_(live)

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Update the average with the current weights of the model."""
        averages, weights = [], []
        for average, live in self._pairs(model):
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                weights.append(live)
            else:
                average.copy_(live)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.model.parameters(), model.parameters(), strict=True)
        yield from zip(self.model.buffers(), model.buffers(), strict=True)
