"""The two states that every case is measured on, and proof that a load brought them back.

Knows torch and nothing of any checkpoint library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

NUM_LAYERS = 12
SMALL_TENSOR_NBYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What to build. `kind` is `gpt` or `small`; sizes in bytes of tensor data."""

    kind: str
    gpt_nbytes: int
    num_small: int

    @property
    def title(self) -> str:
        """A heading for people."""
        if self.kind == "gpt":
            return f"GPT-like model and Adam moments, {self.gpt_nbytes / 1e9:g} GB, fp32"
        return f"{self.num_small:,} tensors of {SMALL_TENSOR_NBYTES} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Live objects by component: a module, an optimizer or a dict of tensors."""

    components: Mapping[str, Any]

    def nested(self) -> dict[str, Any]:
        """State dicts by component, as `torch.save` and DCP take them."""
        return {
            name: part if isinstance(part, dict) else part.state_dict()
            for name, part in self.components.items()
        }

    def flat(self) -> dict[str, torch.Tensor]:
        """Every tensor under a dotted name, as safetensors takes them."""
        return dict(_flatten(self.nested(), ""))

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.flat().values())

    @property
    def num_tensors(self) -> int:
        """Tensors of all components."""
        return len(self.flat())

    def fill(self, seed: int) -> None:
        """Give every tensor random content that depends on the seed and its place alone."""
        for expected, tensor in self._content(seed):
            tensor.copy_(expected)

    def count_wrong(self, seed: int) -> int:
        """How many tensors differ from what `fill(seed)` gives them."""
        return sum(not torch.equal(expected, tensor) for expected, tensor in self._content(seed))

    def _content(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = np.random.Generator(np.random.SFC64(seed))
        for tensor in self.flat().values():
            expected = generator.random(tensor.numel(), dtype=np.float32)
            yield torch.from_numpy(expected).view(tensor.shape), tensor.detach()


def build(spec: StateSpec) -> State:
    """The state with all of its memory touched and every value zero."""
    if spec.kind == "gpt":
        return _gpt(spec.gpt_nbytes)
    shape = (SMALL_TENSOR_NBYTES // 4,)
    tensors = {f"layer{i // 8:04d}.part{i:05d}": torch.zeros(shape) for i in range(spec.num_small)}
    return State(components={"tensors": tensors})


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))


def _gpt(nbytes: int) -> State:
    # 3 copies of 4 bytes; 12 layers of 12 * width**2, and embeddings of 50 * width**2 together.
    num_parameters = nbytes / 12
    width = max(8, round((num_parameters / (12 * NUM_LAYERS + 50)) ** 0.5))
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "tokens": nn.Embedding(49 * width, width),
                "positions": nn.Embedding(width, width),
                "blocks": nn.ModuleList(_block(width) for _ in range(NUM_LAYERS)),
                "norm": nn.LayerNorm(width),
            }
        )
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            # What AdamW itself makes in its first step.
            optimizer.state[parameter] = {
                "step": torch.ones(()),
                "exp_avg": torch.zeros_like(parameter).fill_(0.0),
                "exp_avg_sq": torch.zeros_like(parameter).fill_(0.0),
            }
    return State(components={"model": model, "optimizer": optimizer})


def _block(width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm_1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "projection": nn.Linear(width, width),
            "norm_2": nn.LayerNorm(width),
            "up": nn.Linear(width, 4 * width),
            "down": nn.Linear(4 * width, width),
        }
    )
