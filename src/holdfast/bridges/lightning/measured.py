"""Metrics that were logged under Lightning, each with the step at which it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from holdfast.bridges.lightning.seams import shown_metrics

NO_STEP = -1
"""Step of metrics that belong to no state that can be saved."""


class NewMetrics:
    """Tells the metrics of a step from older ones, which Lightning shows beside them.

    Each value is kept until the next one of its name, so a value whose memory is another's is new.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._values: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def collect_new_metrics(self, step: int) -> dict[str, Any]:
        """Note what is new since the last look as measured at `step`, and return it."""
        new = {
            name: value
            for name, value in shown_metrics(self._trainer).items()
            if not _is_same_value(value, self._values.get(name))
        }
        self._values.update(new)
        self._steps.update(dict.fromkeys(new, step))
        return new

    def get_metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics of a step."""
        return LazyNumbers({n: self._values[n] for n, at in self._steps.items() if at == step})


class LazyNumbers(Mapping[str, float]):
    """Values as numbers, which are read from their device only where a save needs them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @override
    def __getitem__(self, name: str) -> float:
        return float(self._values[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)


def _is_same_value(value: Any, known: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(known, Tensor):
        return value.data_ptr() == known.data_ptr()
    return value is known
