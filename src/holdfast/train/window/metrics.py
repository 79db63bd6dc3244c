"""Metrics of a step that stay on their device until they are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.errors import UsageError

logger = logging.getLogger("holdfast")


class LazyMetrics(Mapping[str, float]):
    """Metrics by name; the first read of a value on an accelerator waits for the device."""

    def __init__(self, values: Mapping[str, Tensor | float]) -> None:
        self._values: dict[str, Tensor | float] = dict(values)

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if isinstance(value, Tensor):
            value = self._values[name] = float(value.item())
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def joined(self, others: Mapping[str, float]) -> LazyMetrics:
        """Return these metrics and `others`, without reading any value."""
        return LazyMetrics({**self._values, **others})

    def __repr__(self) -> str:
        return repr(dict(self))


class Numbers:
    """Converts metrics to numbers, as `number` does, and drops those that are not numbers.

    A bad metric must not end the training, so a warning is logged, once for each name.
    """

    def __init__(self) -> None:
        self._left_out: set[Any] = set()

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Tensor | float]:
        """Return the metrics that are numbers, by name."""
        found: dict[str, Tensor | float] = {}
        for name, value in values.items():
            try:
                found[name] = number(name, value)
            except UsageError as error:
                if name not in self._left_out:
                    self._left_out.add(name)
                    logger.warning("%s: it is neither logged nor saved", error)
        return found


class Mean:
    """Weighted mean of metrics, summed on their devices, without waiting for them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, float] = {}

    def add(self, values: Mapping[str, Tensor | float], weight: float) -> None:
        """Add the values of one batch, as `Numbers` returns them."""
        for name, value in values.items():
            weighted = value if weight == 1 else value * weight
            known = self._sums.get(name)
            self._sums[name] = weighted if known is None else known + weighted
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, Tensor | float]:
        """Return the means, each over the batches that had the metric."""
        return {
            name: total if self._weights[name] == 1 else total / self._weights[name]
            for name, total in self._sums.items()
        }


def is_at_hand(value: Tensor) -> bool:
    """Whether a tensor's value can be read without waiting for a device."""
    return value.is_cpu


def number(name: str, value: Any) -> Tensor | float:
    """Convert a metric to a float, or to a copied scalar (double if possible) on its device.

    Raises:
        UsageError: the value is not one number, or its name is not text.
    """
    if not isinstance(name, str):
        raise UsageError(f"metric {name!r}: its name must be text")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UsageError(f"metric {name!r} is a Tensor of {value.numel()} numbers, not of one")
        if is_at_hand(value) and not value.is_complex():
            return float(value.item())
        dtype = torch.float32 if value.is_mps else torch.float64
        scalar = value.detach()
        if scalar.dim():
            scalar = scalar.reshape(())
        return scalar.to(dtype, copy=True)
    try:
        if not isinstance(value, str):
            return float(value)
    except OverflowError:
        raise UsageError(f"metric {name!r} is too large for a float") from None
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"metric {name!r} is not one number, but {shown(value)} of type {type(value).__name__}"
    )
