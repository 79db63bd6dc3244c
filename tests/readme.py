"""Runs the Python that the README and the pages show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parent.parent


def toy() -> dict[str, object]:
    """The names that the README takes for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))
    inputs = torch.randn(256, 4)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "loss_fn": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }


def code_in(page: Path) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"```python[^\n]*\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def loop() -> str:
    """The training loop of the README, its only block."""
    (block,) = code_in(ROOT / "README.md")
    return block


def run_loop(folder: Path) -> dict[str, Any]:
    """Run that loop as a script, and return its names."""
    script = folder / "train.py"
    script.write_text(loop(), "utf-8")
    return runpy.run_path(str(script), init_globals=toy())


def run_blocks(page: Path) -> dict[str, Any]:
    """Run all Python of a page as one script, and return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(code_in(page)), names)
    return names
