"""The states that cases are measured on, a training step on them, and proof that a load brought
them back.

Knows torch and nothing of any checkpoint library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

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

    def flat(self) -> dict[str, Tensor]:
        """Every tensor under a dotted name, as safetensors takes them."""
        return dict(_flatten(self.nested(), ""))

    def live(self) -> list[Tensor]:
        """Every tensor, found where it lives: parameters, buffers, slots, values of dicts."""
        found: list[Tensor] = []
        for part in self.components.values():
            if isinstance(part, nn.Module):
                found += part.parameters()
                found += part.buffers()
            elif isinstance(part, torch.optim.Optimizer):
                for slots in part.state.values():
                    found += slots.values()
            else:
                found += part.values()
        return found

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

    def negate(self, share: float = 1.0) -> float:
        """Change every element of a part of the tensors; returns the part's true share of bytes.

        It is at most `share`, and the same part each time: the last parameters with their
        moments, as if the layers before them were frozen. Twice is no change.
        """
        tensors, nbytes, total = [], 0, self.nbytes
        for group in reversed(self._groups()):
            of_group = sum(tensor.nbytes for tensor in group)
            if nbytes + of_group <= share * total:
                tensors += group
                nbytes += of_group
        torch._foreach_neg_(tensors)
        return nbytes / total

    def _groups(self) -> list[list[Tensor]]:
        """What changes together: a parameter and its optimizer state, or a tensor of a dict."""
        if "model" not in self.components:
            return [[tensor] for tensor in self.flat().values()]
        slots = self.components["optimizer"].state
        parameters = self.components["model"].parameters()
        return [[p.detach(), *slots[p].values()] for p in parameters]

    def count_wrong(self, seed: int, *, negated: bool = False) -> int:
        """How many tensors differ from what `fill(seed)`, and maybe `negate()`, gives them."""
        return sum(
            not torch.equal(-expected if negated else expected, tensor)
            for expected, tensor in self._content(seed)
        )

    def sums(self) -> list[int]:
        """A sum of the bits of each tensor, on its own device: cheap proof that nothing changed."""
        flat = (tensor.detach().reshape(-1) for tensor in self.flat().values())
        return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in flat]

    def _content(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = np.random.Generator(np.random.SFC64(seed))
        for tensor in self.flat().values():
            expected = generator.random(tensor.numel(), dtype=np.float32)
            yield torch.from_numpy(expected).view(tensor.shape), tensor.detach()


def build(spec: StateSpec, device: str = "cpu") -> State:
    """The state with all of its memory touched and every value zero."""
    if spec.kind == "gpt":
        return _gpt(spec.gpt_nbytes, device)
    shape = (SMALL_TENSOR_NBYTES // 4,)
    tensors = {f"layer{i // 8:04d}.part{i:05d}": torch.zeros(shape) for i in range(spec.num_small)}
    return State(components={"tensors": tensors})


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))


def train_step(state: State, tokens: Tensor, guard: AbstractContextManager[Any]) -> None:
    """One optimizer window of the GPT-like state; the optimizer steps inside `guard`."""
    optimizer = state.components["optimizer"]
    optimizer.zero_grad(set_to_none=False)
    _forward(state.components["model"], tokens).square().mean().backward()
    with guard:
        optimizer.step()


def _forward(model: nn.ModuleDict, tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    hidden = model["tokens"](tokens) + model["positions"](places)
    for block in model["blocks"]:
        query, key, value = block["qkv"](block["norm_1"](hidden)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + block["projection"](mixed)
        hidden = hidden + block["down"](functional.gelu(block["up"](block["norm_2"](hidden))))
    found: Tensor = model["norm"](hidden)
    return found


def _gpt(nbytes: int, device: str) -> State:
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
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
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
