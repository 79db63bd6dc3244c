"""What the tests of the state share: a round trip without an engine, and comparisons to the bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.state.apply import Prepared, prepare
from holdfast.state.capture.capture import Captured, capture
from holdfast.state.components import StoredComponent
from holdfast.state.selection import StateLoadOptions


class Image:
    """A captured state with its bytes copied, as a checkpoint holds it."""

    def __init__(self, captured: Captured) -> None:
        self.stored = {
            name: StoredComponent(
                name=name, kind=c.kind, tree=c.tree, tensors={spec.key: spec for spec in c.specs}
            )
            for name, c in captured.components.items()
        }
        self.tensors = {
            name: {key: packed(tensor) for key, tensor in c.tensors.items()}
            for name, c in captured.components.items()
        }
        for name, c in captured.components.items():
            assert list(c.tensors) == [spec.key for spec in c.specs]
            for spec in c.specs:
                assert spec.nbytes == self.tensors[name][spec.key].nbytes
                assert spec.shape == tuple(self.tensors[name][spec.key].shape)

    def prepare(self, state: Mapping[str, Any], **options: Any) -> Prepared:
        return prepare(state, self.stored, where="step-1", options=StateLoadOptions(**options))

    def load(self, state: Mapping[str, Any], **options: Any) -> Prepared:
        """Apply to live objects; only the needed tensors are handed over, as views."""
        prepared = self.prepare(state, **options)
        prepared.apply_values(
            {
                name: {key: as_view(self.tensors[name][key]) for key in keys}
                for name, keys in prepared.needed.items()
            }
        )
        return prepared


def packed(tensor: Tensor) -> Tensor:
    if tensor.element_size() == 1:  # torch cannot copy all types of eight bits
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def as_view(tensor: Tensor) -> Tensor:
    """The same values as a view into a read buffer, at an odd place."""
    size = tensor.element_size()
    raw = torch.zeros(tensor.nbytes + 3 * size, dtype=torch.uint8)
    inside = raw[size : size + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return inside.copy_(tensor)


def image(state: Mapping[str, Any]) -> Image:
    return Image(capture(state))


def raw_bytes(tensor: Tensor) -> bytes:
    flat = packed(tensor.detach().resolve_conj().resolve_neg()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(state: Mapping[str, Any]) -> str:
    """A digest of everything that capture sees, to the bit."""
    hashed = hashlib.sha256()
    captured = capture(state)
    for name, component in captured.components.items():
        hashed.update(name.encode() + component.tree)
        for key, tensor in component.tensors.items():
            hashed.update(f"{key}{tensor.dtype}{tensor.shape}".encode() + raw_bytes(tensor))
    return hashed.hexdigest()


def assert_same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert raw_bytes(one[name]) == raw_bytes(other[name]), name


@contextmanager
def global_generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def train(
    model: nn.Module, optimizer: Any, steps: int, width: int = 6, scheduler: Any = None
) -> None:
    """Steps that draw from the global torch generator."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        dtype = next(model.parameters()).dtype
        inputs = torch.randn(4, width).to(dtype)
        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()
