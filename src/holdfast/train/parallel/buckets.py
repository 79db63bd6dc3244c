"""Order of the buckets in which DDP exchanges gradients, settled before the first step.

After its first backward pass torch orders the buckets anew, once, as the gradients arrived in it.
A sum over three ranks or more then has another order, and so other last digits. A run that resumes
has its first backward pass once more, so these would not be the bits of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Have DDP order its buckets by the model's parameters, from the last to the first.

    Its first backward pass is one of zeros, which does not run the model. All ranks make it
    together. Hooks of parameters get these gradients, too.
    """
    model = wrapped.module
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wrapped.module = _Zero(model)
    try:
        with torch.enable_grad():
            # An input, as DDP moves it: without any it fails on a GPU.
            wrapped(torch.zeros((), device=weights[0].device)).backward()
    finally:
        wrapped.module = model
    for weight in weights:
        weight.grad = None


class _Zero(nn.Module):
    """Stand-in for a model whose output is zero, and depends on each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Return those of the model: DDP goes on with the buffers that it finds in a call."""
        return self._model.named_buffers(*args, **options)

    def forward(self, total: Tensor) -> Tensor:
        """Add a zero of each parameter; a backward pass comes to the last one first."""
        sparse = {id(weight) for weight in _sparse_weights(self._model)}
        for weight in self._model.parameters():
            if weight.requires_grad:
                zero = _sparse_zero(weight) if id(weight) in sparse else weight.sum() * 0
                total = total + zero.real.to(total.device)
        return total


def _sparse_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters whose gradients DDP expects to be sparse."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight


def _sparse_zero(weight: Tensor) -> Tensor:
    row = torch.zeros(1, dtype=torch.int64, device=weight.device)
    return embedding(row, weight, sparse=True).sum() * 0
