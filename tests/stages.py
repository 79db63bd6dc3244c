"""Modules of which each rank holds a part under names of its own: a pipeline's stages, experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 8


class Stage:
    """Some layers of a model, and their optimizer with a group of weights and one of biases.

    Each layer is trained by itself, so that its bits tell nothing of the cut into stages.
    """

    def __init__(self, layers: Sequence[int], *, seed: int = 1, router: int | None = None) -> None:
        self.model = nn.ModuleDict({"layers": nn.ModuleDict()})
        if router is not None:
            self.model["router"] = _layer(seed + router)
        for number in layers:
            self.model["layers"][str(number)] = _layer(seed * 1000 + number)
        self.optimizer = _optimizer(self.model)

    @classmethod
    def around(cls, model: nn.ModuleDict) -> Stage:
        """Make a stage of a model whose parameters were replaced."""
        stage = cls([])
        stage.model, stage.optimizer = model, _optimizer(model)
        return stage

    @classmethod
    def of(cls, rank: int, num_stages: int, **options: Any) -> Stage:
        """Make the stage of a rank: layers in a row."""
        layers = [n for n in range(NUM_LAYERS) if n * num_stages // NUM_LAYERS == rank]
        return cls(layers, **options)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        """One step of each layer."""
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear):
                layer(torch.ones(2, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, bytes]:
        """Every tensor as bytes, by name, with the options of its group."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = of(parameter).detach().numpy().tobytes()
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{slot}"] = of(value).numpy().tobytes()
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"lr {number}"] = repr((group["lr"], group["weight_decay"])).encode()
        return found


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in parameters if "weight" in name], "weight_decay": 0.1},
            {"params": [p for name, p in parameters if "bias" in name], "weight_decay": 0.0},
        ],
        lr=0.1,
    )


def _layer(seed: int) -> nn.Linear:
    noise = torch.Generator().manual_seed(seed)
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    return layer


def union(parts: Sequence[dict[str, bytes]]) -> dict[str, bytes]:
    """Join the bits of all ranks; what several have must be equal."""
    found: dict[str, bytes] = {}
    for part in parts:
        for name, value in part.items():
            assert found.setdefault(name, value) == value, name
    return found
