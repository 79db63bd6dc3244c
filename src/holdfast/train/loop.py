"""One optimizer window: its batches, its gradients, its step.

Knows nothing about saving, counting or callbacks but the moment before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError

LossFunction = Callable[[Any, Any], "Tensor | tuple[Tensor, Mapping[str, Any]]"]
_RESERVED = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step of the optimizer consists of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    """Anything with `step()`, or None; it steps once a window."""
    loss: LossFunction
    """Gives the mean loss of a batch, and metrics of it if it likes."""
    clip_norm: float | None
    """Largest total norm of the gradients; None: not clipped."""
    device: torch.device | None
    """Where batches go; None: they stay where they are."""

    def __call__(self, window: Sequence[Any], before_step: Callable[[], None]) -> dict[str, float]:
        """Train on the batches of a window, each with the same weight; gives their mean metrics.

        Metrics beside `loss` are those of the loss function, and `grad_norm` (before clipping)
        when gradients are clipped.

        Raises:
            UsageError: the loss is no single number, or a metric has a reserved name.
        """
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, float] = {}
        for batch in window:
            for name, value in self._backward(batch, 1 / len(window)).items():
                metrics[name] = metrics.get(name, 0.0) + value / len(window)
        if self.clip_norm is not None:
            metrics["grad_norm"] = self._clip()
        before_step()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _backward(self, batch: Any, weight: float) -> dict[str, float]:
        found = self.loss(self.model, _moved(batch, self.device))
        loss, extra = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("loss must give a tensor of one number, or that and a dict of metrics")
        reserved = [name for name in extra if name in _RESERVED]
        if reserved:
            raise UsageError(f"loss gives metrics with reserved names: {reserved}")
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.item(), **{name: float(value) for name, value in extra.items()}}

    def _clip(self) -> float:
        assert self.clip_norm is not None
        parameters = [item for group in self.optimizer.param_groups for item in group["params"]]
        return float(nn.utils.clip_grad_norm_(parameters, self.clip_norm))


def next_window(batches: Iterator[Any], size: int) -> list[Any]:
    """The next `size` batches, fewer at the end of an epoch, none after it.

    They are taken before the first one is trained on, so that the position of the data is at a
    window's end whenever a step is.
    """
    return list(islice(batches, size))


def _moved(batch: Any, device: torch.device | None) -> Any:
    if device is None:
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
