"""Weights of a step's batches: its gradient is the mean over all tokens or samples, of all ranks.

`sum(weight * gradient) / sum(weight)`, without waiting for the device where weights are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.train.outputs import StepOutput
from holdfast.train.parallel.group import Group
from holdfast.train.parallel.strategies import local
from holdfast.train.step.device_metrics import convert_metric


class Weighing:
    """Weighs the losses of a step, and divides its gradients by the total weight.

    Without weights each loss is multiplied by its share of the step, and nothing is divided.
    """

    def __init__(self, group: Group, *, is_scaled: bool) -> None:
        """Start; `is_scaled`: losses are scaled for fp16, so that large weights would overflow."""
        self._group = group
        self._is_scaled = is_scaled
        self._has_weights: bool | None = None
        """Whether the loss function gives weights, for all steps of this process."""
        self._reference = 1.0
        self._total: Tensor | float | None = None
        self._device = torch.device("cpu")

    def start_step(self) -> None:
        """Begin a step."""
        self._total = None

    def weighted(
        self, output: StepOutput, share: float, num_batches: int
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss for the backward pass, and the batch's weight (None: it has none).

        Args:
            output: of the loss function.
            share: part of the step that the batch is, where there are no weights.
            num_batches: number of losses of the step.
        """
        self._check_weights_agree(output.weight is not None)
        if output.weight is None:
            return (output.loss if share == 1 else output.loss * share), None
        weight = convert_metric("weight", output.weight)
        if self._total is None:
            self._device = output.loss.device
            self._reference = self._agreed_reference(weight, num_batches)
            self._total = weight
        else:
            self._total = self._total + weight
        factor = weight if self._reference == 1 else weight / self._reference
        # Half precision would round the weight, or overflow.
        loss = output.loss if output.loss.element_size() > 2 else output.loss.float()
        if isinstance(factor, Tensor):
            factor = factor.to(loss.dtype)
        return loss * factor, weight

    def divide(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the total weight, of all ranks; a total of zero divides nothing.

        Strategies average the gradients over the ranks.
        """
        if self._total is None:
            return
        divisor = self._of_ranks(self._total) / self._reference
        if isinstance(divisor, Tensor):
            divisor = torch.where(divisor == 0, 1.0, divisor)
        elif divisor in (0, 1):
            return
        gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), several in gradients.items():
            known = divisor.to(device, dtype) if isinstance(divisor, Tensor) else divisor
            torch._foreach_div_(several, known)

    def _check_weights_agree(self, has_weight: bool) -> None:
        if self._has_weights is None:
            of_ranks = self._group.gather_values(has_weight)
            self._has_weights = of_ranks[0]
            if len({*of_ranks}) > 1:
                with_weights = [rank for rank, has in enumerate(of_ranks) if has]
                raise UsageError(f"loss: only ranks {with_weights} give a weight: all or none must")
        elif has_weight != self._has_weights:
            given, before = ("a", "none") if has_weight else ("no", "one")
            raise UsageError(
                f"loss: this batch has {given} weight, and earlier ones had {before}: all or none"
            )

    def _agreed_reference(self, weight: Tensor | float, num_batches: int) -> float:
        """Return a power of two, the same on all ranks, that keeps scaled losses in range.

        It depends on the batches of the step only, so that a resumed run has the same.
        """
        if not self._is_scaled:
            return 1.0
        exponent = math.frexp(float(weight))[1] + (num_batches - 1).bit_length()
        return float(2.0 ** max(0, *self._group.max([exponent])))

    def _of_ranks(self, total: Tensor | float) -> Tensor | float:
        if self._group.is_alone:
            return total
        summed = torch.as_tensor(total, dtype=torch.float64, device=self._device).reshape(1)
        mean = self._group.sum_over_ranks(summed.clone())[0] / self._group.world_size
        return float(mean) if mean.is_cpu else mean
