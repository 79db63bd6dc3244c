"""Numerics of a step: its precision, the scale of its loss, and steps that are not finite.

`NanBudget` skips steps whose loss or gradients are not finite; its count is in the checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from holdfast.errors import HoldfastError, UsageError
from holdfast.train.argument_checks import check_range
from holdfast.train.group import Group
from holdfast.train.status import FitStatus
from holdfast.train.step.undo import modules_of
from holdfast.train.strategies import local

logger = logging.getLogger("holdfast")

Name = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NO_AUTOCAST = nullcontext()


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
            raise UsageError(f"precision: dtype={self.dtype!r}: choose from {get_args(Name)}")
        if not 0 < self.loss_scale < float("inf"):
            raise UsageError(f"precision: loss_scale={self.loss_scale!r} must be above zero")
        if not self.growth_interval >= 1:
            raise UsageError(f"precision: growth_interval={self.growth_interval!r}: at least 1")


class Numerics:
    """Applies a `Precision` on one type of device; a step that fp16 skips counts as one."""

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
        self._is_unscaled = self._is_stepping = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        if self._dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss, scaled if there is a scaler."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, for a backward pass or a step within `autocast`."""
        if self._dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device_type, enabled=False)

    def reset_loss_scaler(self) -> None:
        """Make the loss scaler forget an update that an error has interrupted."""
        if self.scaler is not None and self._is_unscaled:
            self.scaler.update(self.scaler.get_scale())
            self._is_unscaled = False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, if there is a scaler."""
        if self.scaler is not None:
            self._is_unscaled = True
            self.scaler.unscale_(optimizer)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Step an optimizer, unless the scaler finds that its gradients are not finite."""
        self._is_stepping = True
        try:
            if self.scaler is not None:
                return self.scaler.step(optimizer)
            return optimizer.step() if closure is None else optimizer.step(closure)
        finally:
            self._is_stepping = False

    @contextmanager
    def refuse_other_steps(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Refuse, in the block, a `step()` of these optimizers that hooks or losses call."""

        def check_caller(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self._is_stepping:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() was called by a hook, a loss or an update "
                    "function. Only the Trainer steps its optimizers: remove the call, or call "
                    "control.step() in an update function"
                )

        check_caller._torchdynamo_disable = True  # type: ignore[attr-defined]
        handles = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # one that has not called Optimizer.__init__
                handles.append(optimizer.register_step_pre_hook(check_caller))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_step(self) -> None:
        """Adapt the loss scale, when all optimizers of a step have stepped."""
        if self.scaler is not None and self._is_unscaled:
            self.scaler.update(None if self.precision.dynamic else self.precision.loss_scale)
            self._is_unscaled = False


_MEANT: dict[str, Name] = {
    **dict.fromkeys(("32", "32-true", "float32", "no", "amp_fp32"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bfloat16", "amp_bf16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "fp16-mixed", "float16", "amp_fp16"), "fp16"),
}
"""Names of other libraries (Lightning, Accelerate, Composer) for the same precisions."""


def checked_precision(value: str | int | Precision) -> Precision:
    """Convert an argument to a `Precision`; names of other libraries are understood."""
    if isinstance(value, Precision):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"precision={value!r}: choose from {get_args(Name)} or a Precision")
    name = str(value)
    if name in ("bf16-true", "16-true", "64", "64-true"):
        raise UsageError(
            f"precision={value!r}: the Trainer does not convert weights: give the model in that "
            'type, such as model.to(torch.bfloat16), with precision="fp32"'
        )
    known = _MEANT.get(name, name)
    if known not in get_args(Name):
        raise UsageError(
            f"precision={value!r}: choose from {get_args(Name)}, a Precision, {', '.join(_MEANT)}"
        )
    return Precision(dtype=known)  # type: ignore[arg-type]


class NotFinite(HoldfastError):
    """Loss or gradients are not finite, in more steps than `skip_nan` allows."""


class NanBudget:
    """Budget of steps that may be skipped; a component, so that a resume continues the count."""

    def __init__(
        self, limit: int, group: Group, status: FitStatus, state: Mapping[str, Any]
    ) -> None:
        """Allow `limit` skipped steps in the run, which restore the buffers of `state`."""
        check_range("skip_nan", limit, 1, 2**31)
        self.limit = limit
        self.num_skipped = 0
        """Steps that were skipped so far, of the whole run."""
        self._group = group
        self._status = status
        self._state = state
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Keep the buffers: a bad batch spoils statistics such as those of batch norm."""
        self._buffers = [
            (item, item.detach().clone())
            for module in modules_of(self._state)
            for item in module.buffers()
        ]

    @torch.no_grad()
    def must_skip(self, values: Iterable[Tensor | float]) -> bool:
        """Whether a value is not finite on any rank; waits for the device, restores the buffers."""
        checks = [local(torch.as_tensor(value)).isfinite().all() for value in values]
        # One read for each device, not for each tensor.
        devices = {check.device for check in checks}
        are_fine = all(
            bool(torch.stack([check for check in checks if check.device == device]).all())
            for device in devices
        )
        kept, self._buffers = self._buffers, []
        if not any(self._group.max([not are_fine])):
            return False
        for buffer, before in kept:
            buffer.copy_(before)
        what = f"step {self._status.present_step}: its loss or gradients are not finite"
        if self.num_skipped >= self.limit:
            raise NotFinite(
                f"{what}, and {self.num_skipped} steps were skipped before: skip_nan={self.limit} "
                "allows no more. Look at the data and the learning rate, or raise skip_nan"
            )
        self.num_skipped += 1
        logger.warning(
            "%s: step skipped (%d of %d allowed by skip_nan)",
            what,
            self.num_skipped,
            self.limit,
        )
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the count to save."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        if set(state) != {"num_skipped"}:
            raise UsageError(f"not the count of skipped steps: {sorted(state)}")
        self.num_skipped = state["num_skipped"]
