"""Fix the order of DDP's buckets of gradients before the first step, so that a resume is exact.

After its first backward pass torch orders the buckets anew, once, as the gradients arrived in it.
A sum over three ranks or more then has another order, and so other last digits. A run that resumes
has a first backward pass again, so it would not end with the bits of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Make DDP order its buckets now: from the model's last parameter to the first.

    Runs DDP's first backward pass with gradients of zeros, and without the model. All ranks call
    it together. Hooks of parameters do not get the zeros.
    """
    model = wrapped.module
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wrapped.module = _Zero(model)
    try:
        with _without_hooks(weights), torch.enable_grad():
            # With an input, because DDP on a GPU moves its inputs and fails if there are none.
            wrapped(torch.zeros((), device=weights[0].device)).backward()
    finally:
        wrapped.module = model
    for weight in weights:
        weight.grad = None


@contextmanager
def _without_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """Call no hooks of parameters until the `with` ends: one may be the step of an optimizer.

    Their dicts are emptied and filled again, for torch and the handles of the hooks refer to them.
    """
    registered: list[Any] = []
    for weight in weights:
        registered += [weight._backward_hooks, weight._post_accumulate_grad_hooks]
    kept = [(hooks, dict(hooks)) for hooks in registered if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, members in kept:
            hooks.update(members)


class _Zero(nn.Module):
    """Stand-in for a model whose output is zero, and depends on each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model's: DDP looks up in each call which buffers it copies from rank 0."""
        return self._model.named_buffers(*args, **options)

    def forward(self, total: Tensor) -> Tensor:
        """Add a zero made of each parameter; a backward pass reaches the last parameter first."""
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
