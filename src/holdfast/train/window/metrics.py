"""Metrics of a step that stay on their device until they are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.train.parallel.group import Group

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
        more = others._values if isinstance(others, LazyMetrics) else others
        return LazyMetrics({**self._values, **more})

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
        self._weights: dict[str, Tensor | float] = {}

    def add(self, values: Mapping[str, Tensor | float], weight: Tensor | float) -> None:
        """Add the values of one batch, as `Numbers` returns them."""
        for name, value in values.items():
            weighted = value if _is_one(weight) else value * weight
            known = self._sums.get(name)
            self._sums[name] = weighted if known is None else known + weighted
            self._weights[name] = self._weights.get(name, 0.0) + weight

    @property
    def totals(self) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Weighted sum and total weight of each metric."""
        return {name: (total, self._weights[name]) for name, total in self._sums.items()}

    def add_totals(self, totals: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        """Add the totals of another mean."""
        for name, (total, weight) in totals.items():
            known = self._sums.get(name)
            self._sums[name] = total if known is None else known + total
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, Tensor | float]:
        """Return the means, each over the batches that had the metric.

        Where all weights are zero the mean is zero, as is the gradient.
        """
        return {
            name: total if _is_one(self._weights[name]) else total / _divisor(self._weights[name])
            for name, total in self._sums.items()
        }


def _is_one(weight: Tensor | float) -> bool:
    return not isinstance(weight, Tensor) and weight == 1


def _divisor(weight: Tensor | float) -> Tensor | float:
    """Return the weight to divide by; one for zero, without waiting for the device."""
    return torch.where(weight == 0, 1.0, weight) if isinstance(weight, Tensor) else weight or 1.0


class RankMeans:
    """Means of a step's metrics over all ranks, by one small collective a step.

    The names are those of the first step. One that comes later is this rank's own, and a warning
    is logged.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._names: list[str] | None = None
        self._own: set[str] = set()

    def __call__(self, mean: Mean) -> dict[str, Tensor | float]:
        """Return the means; every rank calls this at the same step."""
        if self._group.is_alone:
            return mean.result()
        totals = mean.totals
        if self._names is None:
            self._names = sorted(
                {name for names in self._group.gather([*totals]) for name in names}
            )
        self._warn_of_own([name for name in totals if name not in self._names])
        sums = [totals.get(name, (0.0, 0.0)) for name in self._names]
        device = next((s.device for s, _ in sums if isinstance(s, Tensor)), torch.device("cpu"))
        values = [
            torch.as_tensor(x, dtype=torch.float64, device=device) for pair in sums for x in pair
        ]
        found = self._group.add(torch.stack(values)).view(-1, 2)
        means = found[:, 0] / _divisor(found[:, 1])
        known = means.unbind() if device.type != "cpu" else means.tolist()
        of_all = dict(zip(self._names, known, strict=True))
        return {name: of_all.get(name, own) for name, own in mean.result().items()}

    def _warn_of_own(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._own]
        if new:
            self._own.update(new)
            logger.warning(
                "metrics %s came after the first step: they are those of this rank, not means over "
                "all ranks",
                ", ".join(new),
            )


def mean_of_ranks(group: Group, mean: Mean) -> Mean:
    """Return the mean over the batches of all ranks; reads all values."""
    if group.is_alone:
        return mean
    read = {name: (float(total), float(weight)) for name, (total, weight) in mean.totals.items()}
    joined = Mean()
    for totals in group.gather(read):
        joined.add_totals(totals)
    return joined


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
