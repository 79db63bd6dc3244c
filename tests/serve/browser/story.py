"""A run with a story, for pictures of the pages: `python -m tests.serve.browser.story ROOT`.

A small transformer learns to copy. Its process is killed; the run goes on, and is later taken back
to an older checkpoint with a lower learning rate. Each life is a process of its own.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import holdfast

SAVE_EVERY = 50
LIVES: tuple[tuple[str, int, float, bool], ...] = (
    ("latest", 800, 3e-3, True),
    ("latest", 1400, 3e-3, False),
    ("step=1000", 2000, 1e-3, False),
)
"""Of each life: what it goes on from, its last step, its learning rate, whether it is killed."""


class Block(nn.Module):
    """Attention and two layers behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(y)))


class Model(nn.Module):
    """A transformer of four blocks."""

    def __init__(self, width: int = 32, words: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def live(root: Path, life: int) -> None:
    """Train one life of the run, in this process."""
    which, last, rate, is_killed = LIVES[life]
    torch.set_num_threads(1)
    torch.manual_seed(life)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    counters = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "data": counters}
    keep = holdfast.Last(4) | holdfast.EveryNth("250 steps") | holdfast.Best("val/loss", 2)
    config = {"learning_rate": rate, "batch_size": 16, "blocks": 4}
    with holdfast.CheckpointManager(root, state, keep=keep, config=config) as manager:
        if life:
            manager.resume(which)
            for group in optimizer.param_groups:
                group["lr"] = rate
        while counters["step"] < last:
            loss = _step(model, optimizer)
            counters["step"] += 1
            step = counters["step"]
            if step % SAVE_EVERY == 0:
                metrics = {"loss": loss, "val/loss": loss + 0.1 + 0.08 * math.sin(step / 130)}
                tags = {(1, 1300): ("too-high",), (2, 1750): ("paper",)}.get((life, step), ())
                manager.save(step, metrics=metrics, tags=tags, reason="interval").wait()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.randint(24, (16, 12))
    answers = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def tell(root: Path) -> None:
    """Train all lives of the run, each in a process of its own."""
    for life, (*_, is_killed) in enumerate(LIVES):
        words = [sys.executable, "-m", __spec__.name, str(root), str(life)]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
        if done.returncode != (-signal.SIGKILL if is_killed else 0):
            raise RuntimeError(f"life {life}: status {done.returncode}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        live(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        tell(Path(sys.argv[1]))
