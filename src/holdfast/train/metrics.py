"""Metrics of a step that stay on their device until somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UsageError


class LazyMetrics(Mapping[str, float]):
    """Numbers by name. The first look at one of them waits for the accelerator, if it is there."""

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
        """These and `others`, without looking at any."""
        return LazyMetrics({**self._values, **others})

    def __repr__(self) -> str:
        return repr(dict(self))


class Mean:
    """The weighted mean of metrics, added up where they are, without waiting for them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, float] = {}

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add the values of one batch.

        Raises:
            UsageError: one is not a number.
        """
        for name, value in values.items():
            weighted = number(name, value)
            if weight != 1:
                weighted = weighted * weight
            known = self._sums.get(name)
            self._sums[name] = weighted if known is None else known + weighted
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, Tensor | float]:
        """The means; one that was not given with every batch is over those that had it."""
        return {
            name: total if self._weights[name] == 1 else total / self._weights[name]
            for name, total in self._sums.items()
        }


def is_at_hand(value: Tensor) -> bool:
    """Whether a number can be taken out of a tensor without waiting for a device."""
    return value.is_cpu


def number(name: str, value: Any) -> Tensor | float:
    """A metric as a number of its own: of double precision where the device has it.

    Raises:
        UsageError: it is not one number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UsageError(f"metric {name!r} is a tensor of {value.numel()} numbers, not of one")
        if is_at_hand(value) and not value.is_complex():
            return float(value.item())
        dtype = torch.float32 if value.is_mps else torch.float64
        scalar = value.detach()
        if scalar.dim():
            scalar = scalar.reshape(())
        return scalar.to(dtype, copy=True)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"metric {name!r}: {value!r} is not a number") from None
    except OverflowError:
        raise UsageError(f"metric {name!r} is too large for a float") from None
