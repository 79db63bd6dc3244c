"""A small training on any device, and functions that return the bits of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


class Run:
    """A model with buffers and dropout, and its optimizer: all that a step changes."""

    def __init__(self, device: str, **options: Any) -> None:
        """`options` go to AdamW."""
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(96, 512), nn.BatchNorm1d(512), nn.Dropout(0.1), nn.Linear(512, 96)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._device = device

    def step(self, batch: Tensor | None = None) -> None:
        """Train one step; the batch is drawn from the device's generator unless it is given."""
        if batch is None:
            batch = torch.randn(16, 96, device=self._device)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, bytes]:
        """Return the bits of every tensor of the state, by name."""
        return bits({name: part.state_dict() for name, part in self.state.items()})


def bits(tree: Any) -> dict[str, bytes]:
    """Return the bits of every tensor of a tree, by name."""
    return {name: tensor_bits(tensor) for name, tensor in _tensors(tree, "")}


def tensor_bits(tensor: Tensor) -> bytes:
    """Return the bits of a tensor of any strides and type, row by row; waits for its device."""
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _tensors(value, f"{prefix}.{name}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _tensors(value, f"{prefix}.{number}")
