"""Numeric precision of a step: autocast, and the scaling of the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from holdfast.errors import UsageError

Name = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AS_IT_IS = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Precision setting: forward passes run under torch's autocast; weights are not converted."""

    dtype: Name = "fp32"
    """Type of the forward pass; `fp32` is the model's own, without autocast."""
    loss_scale: float = 2.0**16
    """For fp16: factor of the loss, initial if the scale is dynamic."""
    dynamic: bool = True
    """Whether the scale is halved after an update that was not finite, and grows."""
    growth_interval: int = 2000
    """Finite updates in a row after which a dynamic scale doubles."""

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Name):
            raise UsageError(f"precision: dtype={self.dtype!r} must be one of {get_args(Name)}")
        if not 0 < self.loss_scale < float("inf"):
            raise UsageError(f"precision: loss_scale={self.loss_scale!r} must be above zero")
        if not self.growth_interval >= 1:
            raise UsageError(f"precision: growth_interval={self.growth_interval!r}: at least 1")


class Numerics:
    """Precision of a training on one type of device.

    The scaler of fp16 skips an update whose gradients are not finite; for counters and schedulers
    it is a step like any other.
    """

    def __init__(self, precision: Precision, device_type: str) -> None:
        self.precision = precision
        self._device_type = device_type
        self._dtype = _DTYPES.get(precision.dtype)
        self.scaler: torch.amp.GradScaler | None = None
        """Scaler of the loss for fp16, a component of the state; its step waits for the device."""
        if precision.dtype == "fp16":
            self.scaler = torch.amp.GradScaler(
                device_type,
                init_scale=precision.loss_scale,
                growth_interval=precision.growth_interval,
            )
        self._is_unscaled = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        if self._dtype is None:
            return _AS_IT_IS
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss, scaled if there is a scaler."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, if there is a scaler."""
        if self.scaler is None:
            return
        if self._is_unscaled:  # an error interrupted an update, which the scaler remembers
            self.scaler.update(self.scaler.get_scale())
        self._is_unscaled = True
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless the scaler finds that the gradients are not finite."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update(None if self.precision.dynamic else self.precision.loss_scale)
        self._is_unscaled = False


def checked_precision(value: str | Precision) -> Precision:
    """Convert an argument to a `Precision`.

    Raises:
        UsageError: `value` is not a precision.
    """
    if isinstance(value, Precision):
        return value
    if not isinstance(value, str):
        raise UsageError(f"precision={value!r}: must be one of {get_args(Name)} or a Precision")
    return Precision(dtype=value)  # type: ignore[arg-type]
