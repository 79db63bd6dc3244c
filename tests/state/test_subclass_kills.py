"""Runs with quantized weights and moments that are killed end with the bits of one in one go."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridges.forks import assert_kills_change_nothing
from holdfast import CheckpointManager
from quantized import bits_in, bits_of, import_torchao, quantized_model

NUM_STEPS = 8


def train(root: Path, say: Any, *, name: str) -> dict[str, Any]:
    """A frozen quantized base, and a layer that an optimizer with quantized moments trains."""
    base = quantized_model(0)
    model = nn.ModuleList([base, nn.Linear(64, 64)])
    optimizer = getattr(import_torchao().optim, name)(model[1].parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
    with CheckpointManager(root, state, every="1step", keep="last:2") as manager:
        manager.resume()
        while state["progress"]["step"] < NUM_STEPS:
            say()
            loss = base[:3](model[1](torch.randn(2, 64)).bfloat16()).square().mean()
            loss.backward()
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            optimizer.zero_grad()
            state["progress"]["step"] += 1
            say()
            manager.maybe_save(state["progress"]["step"])
    slots = [optimizer.state[parameter] for parameter in model[1].parameters()]
    return {
        "weights": bits_in(model),
        "slots": [{slot: bits_of(value) for slot, value in of_one.items()} for of_one in slots],
    }


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("AdamW8bit", 2),
        pytest.param("AdamW4bit", 6, marks=pytest.mark.full),
        pytest.param("AdamWFp8", 6, marks=pytest.mark.full),
    ],
)
def test_kills_change_no_bit_of_quantized_tensors(name: str, kills: int, tmp_path: Path) -> None:
    import_torchao()
    assert_kills_change_nothing(partial(train, name=name), tmp_path, kills=kills, seed=1)
