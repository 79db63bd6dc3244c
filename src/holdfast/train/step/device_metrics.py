"""Metrics of a step that stay on their device until they are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.staging.device import is_at_hand
from holdfast.train.group import Group
from holdfast.train.outputs import Reduced, Reduction

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

    @property
    def unread(self) -> Mapping[str, Tensor | float]:
        """The values as they are, which waits for no device."""
        return self._values

    def joined(self, others: Mapping[str, float]) -> LazyMetrics:
        """Return these metrics and `others`, without reading any value."""
        more = others._values if isinstance(others, LazyMetrics) else others
        return LazyMetrics({**self._values, **more})

    def __repr__(self) -> str:
        return repr(dict(self))


class Numbers:
    """Converts metrics to numbers; others are dropped, with a warning once for each name."""

    def __init__(self) -> None:
        self._left_out: set[Any] = set()

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Tensor | float]:
        """Return the metrics that are numbers, by name."""
        found: dict[str, Tensor | float] = {}
        for name, value in values.items():
            try:
                found[name] = convert_metric(name, value)
            except UsageError as error:
                if name not in self._left_out:
                    self._left_out.add(name)
                    logger.warning("%s: it is neither logged nor saved", error)
        return found

    def reduced(
        self, values: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor | float], dict[str, Reduction]]:
        """Return the metrics that are numbers, and how those given as `Reduced` are reduced."""
        kinds = {name: value.by for name, value in values.items() if isinstance(value, Reduced)}
        if not kinds:
            return self(values), kinds
        plain = {n: v.value if isinstance(v, Reduced) else v for n, v in values.items()}
        return self(plain), kinds


class Mean:
    """Weighted mean of metrics on their devices, without waiting; or another reduction."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}
        self.kinds: dict[str, Reduction] = {}
        """Reductions of the metrics that are not means."""

    def add_batch(
        self,
        values: Mapping[str, Tensor | float],
        weight: Tensor | float,
        kinds: Mapping[str, Reduction] | None = None,
        *,
        is_own: bool = True,
    ) -> None:
        """Add values and reductions of one batch, as of `Numbers`; only names unless `is_own`."""
        self._set_kinds(values, kinds or {})
        weight = weight if is_own else 0.0
        for name, value in values.items():
            kind = self.kinds.get(name, "mean")
            if kind == "mean":
                self._add_term(name, value if _is_one(weight) else value * weight, weight)
            elif is_own:
                self._add_term(name, _TERMS[kind](value), 1.0)
            else:
                self._add_term(name, -math.inf if kind in _EXTREMES else 0.0, 0.0)

    @property
    def totals(self) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Weighted sum and total weight of each metric; of a minimum, its negative."""
        return {name: (total, self._weights[name]) for name, total in self._sums.items()}

    def add_totals(
        self,
        totals: Mapping[str, tuple[Tensor | float, Tensor | float]],
        kinds: Mapping[str, Reduction],
    ) -> None:
        """Add the totals of another mean, with its reductions."""
        self._set_kinds(totals, kinds)
        for name, (total, weight) in totals.items():
            self._add_term(name, total, weight)

    def compute_means(self) -> dict[str, Tensor | float]:
        """Return means over batches with the metric, 0 without weight, and other reductions."""
        return {
            name: reduced_of(self.kinds.get(name, "mean"), total, self._weights[name])
            for name, total in self._sums.items()
        }

    def _set_kinds(self, names: Iterable[str], kinds: Mapping[str, Reduction]) -> None:
        for name in names:
            kind, known = kinds.get(name, "mean"), self.kinds.get(name, "mean")
            if name in self._sums and kind != known:
                raise UsageError(f"metric {name!r} is reduced by {known} and by {kind}: choose one")
            if kind != "mean":
                self.kinds[name] = kind

    def _add_term(self, name: str, term: Tensor | float, weight: Tensor | float) -> None:
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = term
        elif self.kinds.get(name) in _EXTREMES:
            self._sums[name] = _larger(known, term)
        else:
            self._sums[name] = known + term
        self._weights[name] = self._weights.get(name, 0.0) + weight


_EXTREMES = ("max", "min")

_TERMS: Mapping[Reduction, Callable[[Tensor | float], Tensor | float]] = {
    "sum": lambda value: value,
    "max": lambda value: value,
    "min": lambda value: -value,  # the largest negative
    "l2": lambda value: value * value,
}


def reduced_of(kind: Reduction, total: Tensor | float, weight: Tensor | float) -> Tensor | float:
    """Return a metric from the total of its terms."""
    if kind == "mean":
        return total if _is_one(weight) else total / _divisor(weight)
    if kind == "l2":
        return total**0.5
    return -total if kind == "min" else total


def _larger(a: Tensor | float, b: Tensor | float) -> Tensor | float:
    """Return the larger number; NaN if one is NaN."""
    if isinstance(a, Tensor):
        return torch.maximum(a, torch.as_tensor(b).to(a))
    if isinstance(b, Tensor):
        return _larger(b, a)
    return a if math.isnan(a) or a >= b else b


def _is_one(weight: Tensor | float) -> bool:
    return not isinstance(weight, Tensor) and weight == 1


def _divisor(weight: Tensor | float) -> Tensor | float:
    """Return the weight to divide by; one for zero, without waiting for the device."""
    return torch.where(weight == 0, 1.0, weight) if isinstance(weight, Tensor) else weight or 1.0


class RankMeans:
    """Reductions of a step's metrics over ranks, by one collective; names as in the first step."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._kinds: dict[str, Reduction] | None = None
        self._own: set[str] = set()

    def __call__(self, mean: Mean) -> dict[str, Tensor | float]:
        """Return the reduced metrics; every rank calls this at the same step."""
        if self._group.is_alone:
            return mean.compute_means()
        totals = mean.totals
        if self._kinds is None:
            self._kinds = self._agreed(mean)
        self._warn_of_own([name for name in totals if name not in self._kinds])
        sums = [name for name, kind in self._kinds.items() if kind not in _EXTREMES]
        extremes = [name for name, kind in self._kinds.items() if kind in _EXTREMES]
        pairs = [totals.get(name, (0.0, 0.0)) for name in sums]
        pairs = [  # a weight of zero divides nothing
            (total, weight if self._kinds[name] == "mean" else 0.0)
            for name, (total, weight) in zip(sums, pairs, strict=True)
        ]
        # One sum finds extremes, too: each rank has a place of its own.
        largest = [totals.get(name, (-math.inf, 0.0))[0] for name in extremes]
        places: list[Tensor | float] = [
            value if rank == self._group.rank else 0.0
            for value in largest
            for rank in range(self._group.world_size)
        ]
        cells = [*(x for pair in pairs for x in pair), *places]
        device = next((x.device for x in cells if isinstance(x, Tensor)), torch.device("cpu"))
        values = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in cells]
        found = self._group.sum_over_ranks(torch.stack(values))
        added = found[: 2 * len(sums)].view(-1, 2)
        means = added[:, 0] / _divisor(added[:, 1])
        compared = found[2 * len(sums) :].view(len(extremes), self._group.world_size).amax(dim=1)
        joined = torch.cat([means, compared])
        known = joined.unbind() if device.type != "cpu" else joined.tolist()
        of_all = {
            name: total
            if self._kinds[name] == "mean"
            else reduced_of(self._kinds[name], total, 1.0)
            for name, total in zip([*sums, *extremes], known, strict=True)
        }
        return {name: of_all.get(name, own) for name, own in mean.compute_means().items()}

    def _agreed(self, mean: Mean) -> dict[str, Reduction]:
        """Return the reductions of the metrics of all ranks, by sorted names."""
        all_ranks = Mean()
        for names, kinds in self._group.gather_values(([*mean.totals], mean.kinds)):
            all_ranks.add_totals(dict.fromkeys(names, (0.0, 0.0)), kinds)
        return {name: all_ranks.kinds.get(name, "mean") for name in sorted(all_ranks.totals)}

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
    for totals, kinds in group.gather_values((read, mean.kinds)):
        joined.add_totals(totals, kinds)
    return joined


def convert_metric(name: str, value: Any) -> Tensor | float:
    """Convert a metric to a float or a copied scalar on its device, or raise `UsageError`."""
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
