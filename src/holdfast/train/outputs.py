"""Results of loss functions for a batch (`StepOutput`), and entries of the log (`Entry`).

Knows no model and no loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.arguments import shown
from holdfast.errors import UsageError, listing

_RESERVED = ("loss", "grad_norm")
_EXPECTED = (
    "loss must give a tensor of one number, or that and a dict of metrics, a StepOutput, or an "
    "object or a mapping with a `loss`"
)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a loss function for one batch, as hooks and metrics get it.

    >>> import torch
    >>> StepOutput(torch.tensor(1.5), weight=12).weight
    12
    """

    loss: Tensor
    """Mean loss of the batch, a tensor of one number."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Numbers by name, of which means are logged; a `Reduced` is reduced otherwise."""
    outputs: Any = None
    """What hooks and metrics that are no means get; torchmetrics get `update(*outputs)` of a tuple
    such as `(logits, labels)`."""
    weight: float | Tensor | None = None
    """Number of tokens or samples over which the loss is a mean, also as a tensor of one number.
    Gradients and metrics of a step are then means over all of these. None: batches count alike."""

    @classmethod
    def of(cls, result: Any) -> StepOutput:
        """Convert what a loss function returned.

        Raises:
            UsageError: it has no loss of one number, a metric has a reserved name, or the weight
                is not a number.
        """
        found = cls._converted(result)
        if not isinstance(found.loss, Tensor) or found.loss.numel() != 1:
            raise UsageError(_EXPECTED)
        if not isinstance(found.metrics, Mapping):
            raise UsageError(_EXPECTED)
        reserved = [name for name in found.metrics if name in _RESERVED]
        if reserved:
            raise UsageError(f"loss gives metrics with reserved names: {reserved}")
        if found.weight is not None:
            _check_weight(found.weight)
        return found

    @classmethod
    def _converted(cls, result: Any) -> StepOutput:
        if isinstance(result, StepOutput):
            return result
        if isinstance(result, Tensor):
            return cls(result)
        if isinstance(result, Mapping):
            if "loss" not in result:
                raise UsageError(f"{_EXPECTED}; the mapping has {[*result][:10]}")
            return cls(result["loss"], outputs=result)
        if isinstance(getattr(result, "loss", None), Tensor):
            return cls(result.loss, outputs=result)
        if isinstance(result, tuple) and len(result) == 2:
            return cls(*result)
        raise UsageError(_EXPECTED)


def _check_weight(weight: Any) -> None:
    if isinstance(weight, Tensor):
        if weight.numel() == 1 and not weight.is_complex():
            return
    elif _is_number(weight) and 0 <= weight < math.inf:
        return
    raise UsageError(
        f"loss: weight={shown(weight)}: must be one number, 0 or above: the tokens or samples over "
        "which the loss is a mean"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


Reduction = Literal["mean", "sum", "max", "min", "l2"]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Metric of a batch that is not averaged over the batches of a step and the ranks.

    return loss, {"tokens": Reduced(labels.numel(), "sum")}
    """

    value: Any
    """Number of the batch, also as a tensor of one number."""
    by: Reduction
    """`sum`, `max`, `min`, `l2` (the root of the sum of squares) or `mean`. Only a mean is
    weighted."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for an unknown reduction."""
        if self.by not in get_args(Reduction):
            raise UsageError(f"Reduced: by={self.by!r}: choose from {get_args(Reduction)}")


@dataclass(frozen=True, slots=True)
class Image:
    """Picture that loggers record, such as a confusion matrix."""

    pixels: NDArray[np.uint8]
    """Height x width x 3, red, green and blue."""
    values: Sequence[Sequence[float]] | None = None
    """The matrix that it shows, if it shows one."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with named columns that loggers record, such as samples with their predictions."""

    columns: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[str | float]]
    """Each row has as many cells, texts or numbers, as there are columns."""

    def __post_init__(self) -> None:
        """Raise `UsageError` if a row has another number of cells than there are columns."""
        wrong = [
            f"row {at}: {len(row)} cells"
            for at, row in enumerate(self.rows)
            if len(row) != len(self.columns)
        ]
        if isinstance(self.columns, str) or not self.columns:
            raise UsageError(f"Table: columns={self.columns!r}: must be a list of names")
        if wrong:
            raise UsageError(f"Table of {len(self.columns)} columns:\n" + listing(wrong))

    @property
    def markdown(self) -> str:
        """The table as Markdown.

        >>> print(Table(["word", "loss"], [["a|b", 0.5]]).markdown)
        | word | loss |
        | --- | --- |
        | a\\|b | 0.5 |
        """
        head = [self.columns, ["---"] * len(self.columns)]
        return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in [*head, *self.rows])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Distribution of the values of a tensor that loggers record, such as of gradients.

    Only finite values are in it, apart from `num_not_finite`; without any, the rest is empty.
    """

    counts: Sequence[int]
    """Number of values in each bin; the bins have equal widths."""
    edges: Sequence[float]
    """Edges of the bins, one more than there are counts."""
    mean: float
    """Mean of the values; NaN if there are none."""
    std: float
    """Standard deviation of the values, with their number as divisor; NaN if there are none."""
    num_not_finite: int = 0
    """Number of values that are infinite or NaN."""

    @classmethod
    def of(cls, values: Tensor | NDArray[Any], num_bins: int = 64) -> Histogram:
        """Count the values of a tensor of numbers; waits for its device.

        >>> Histogram.of(torch.tensor([0.0, 0.0, 2.0, 2.0]), num_bins=2)
        Histogram(counts=(2, 2), edges=(0.0, 1.0, 2.0), mean=1.0, std=1.0, num_not_finite=0)
        """
        given = torch.as_tensor(values).detach().reshape(-1)
        given = given if given.dtype is torch.float64 else given.float()
        flat = given[given.isfinite()].cpu().double()
        if not len(flat):
            return cls(counts=(), edges=(), mean=math.nan, std=math.nan, num_not_finite=len(given))
        low, high = flat.min().item(), flat.max().item()
        counts, edges = np.histogram(flat.numpy(), num_bins, (low, high))
        return cls(
            counts=tuple(counts.tolist()),
            edges=tuple(edges.tolist()),
            mean=flat.mean().item(),
            std=flat.std(correction=0).item(),
            num_not_finite=len(given) - len(flat),
        )

    @property
    def record(self) -> dict[str, Any]:
        """All of it by name, for a JSON document; NaN is None."""
        mean, std = (None if math.isnan(one) else one for one in (self.mean, self.std))
        counts, edges = [*self.counts], [*self.edges]
        found = {"mean": mean, "std": std, "counts": counts, "edges": edges}
        return {**found, "num_not_finite": self.num_not_finite}


Entry = str | Image | Table | Histogram
"""What loggers record beside numbers."""


def entry_of(value: Any) -> Entry | None:
    """Return a logged value as an entry, such as `Histogram` or `Table`; None for numbers."""
    if isinstance(value, Entry):
        return value
    if type(value) in (Tensor, nn.Parameter):
        is_whole = value.layout is torch.strided and value.device.type != "meta"
        is_of_numbers = is_whole and not value.is_complex() and not value.is_quantized
        return Histogram.of(value) if is_of_numbers and value.numel() > 1 else None
    if type(value) is np.ndarray:
        return Histogram.of(value) if value.dtype.kind in "biuf" and value.size > 1 else None
    if isinstance(value, list | tuple) and value and all(isinstance(o, Mapping) for o in value):
        columns = [*dict.fromkeys(str(name) for row in value for name in row)]
        rows = [{str(name): cell for name, cell in row.items()} for row in value]
        return Table(
            columns, [[_number_or_text(row.get(name, "")) for name in columns] for row in rows]
        )
    return None


def _number_or_text(cell: Any) -> str | float:
    if isinstance(cell, str) or _is_number(cell):
        return cell if isinstance(cell, str | int) else float(cell)
    if isinstance(cell, Tensor | np.ndarray) and math.prod(cell.shape) == 1:
        item: Any = cell.item()
        return item if _is_number(item) else str(item)
    return str(cell)


_FROM, _TO = np.array([247.0, 251.0, 255.0]), np.array([8.0, 48.0, 107.0])
_MIN_SIDE, _MAX_CELL = 256, 64


def picture(values: Sequence[Sequence[float]]) -> Image:
    """Draw a matrix, one square a value: white is its smallest, dark blue its largest.

    A value that is not finite is red.

    >>> picture([[0.0, 1.0], [2.0, 4.0]]).pixels.shape
    (128, 128, 3)
    """
    matrix = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(matrix)
    known = matrix[is_finite]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    part = np.where(is_finite, matrix - low, 0.0) / ((high - low) or 1.0)
    colours = _FROM + part[..., None] * (_TO - _FROM)
    colours[~is_finite] = (220.0, 30.0, 30.0)
    cell = max(1, min(_MAX_CELL, _MIN_SIDE // max(matrix.shape)))
    pixels = colours.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    return Image(pixels, [[*row] for row in matrix.tolist()])
