"""Runs the Python that the README and the pages show.

`python readme.py ROOT` trains the README's loop with the seeds of its section "Check that a
resume is exact"; with a second argument it kills itself at that step, once the checkpoint before
it is committed.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parent.parent


def toy() -> dict[str, Any]:
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


def code_under(title: str) -> list[str]:
    """The blocks of Python in a section of the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def loop() -> str:
    """The training loop of the README."""
    (block,) = code_under("In a training loop")
    return block


def changed_loop() -> str:
    """The loop at the top of the README, with the lines of its diff."""
    text = (ROOT / "README.md").read_text("utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-")


def prove(root: str, kill_at: int = 0) -> None:
    """Train that loop into a root, as the section "Check that a resume is exact" says."""
    (seeds,) = code_under("Check that a resume is exact")
    exec(f"import random\nimport numpy\nimport torch\n{seeds}", {})
    names = toy()
    if kill_at:
        names["loss_fn"] = _killing(names["loss_fn"], Path(root), kill_at)
    exec(loop().replace('"runs/first"', "sys.argv[1]"), {"sys": sys, **names})


def _killing(loss_fn: Any, root: Path, kill_at: int) -> Callable[..., Any]:
    num_calls = 0
    last_due = (kill_at - 1) // 500 * 500

    def counted(model: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == kill_at:
            while not [*root.glob(f"step-{last_due:08d}.*/manifest.json")]:
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(model, batch)

    return counted


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


if __name__ == "__main__":
    prove(sys.argv[1], *map(int, sys.argv[2:]))
