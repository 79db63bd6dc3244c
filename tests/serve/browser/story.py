"""Runs for pictures of the pages: `python -m tests.serve.browser.story FOLDER`.

A small transformer learns to copy. Its process is killed. The run resumes, and is later rolled back
to an older checkpoint with a lower learning rate. Other runs have other settings.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

import holdfast

SESSIONS: tuple[tuple[str, int, float, bool], ...] = (
    ("latest", 830, 3e-3, True),
    ("latest", 1400, 3e-3, False),
    ("step=1000", 2000, 1e-3, False),
)
"""Of each session: where it resumes, its last step, its learning rate, whether it is killed."""
OTHERS = ((1e-2, 16), (3e-3, 64), (1e-3, 16), (1e-3, 64), (3e-4, 32))
"""Learning rate and batch size of other runs, beside the first."""


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


def train(root: Path, session: int) -> None:
    """Train one session of the run, in this process."""
    which, last, rate, is_killed = SESSIONS[session]
    torch.manual_seed(session)
    keep = holdfast.Last(4) | holdfast.EveryNth("250 steps") | holdfast.Best("val/loss", 2)
    steps = train_steps(root, which if session else None, (rate, 16), keep=keep)
    for step in steps:
        if step == last:
            break
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    steps.close()


def train_steps(
    root: Path, which: str | None, settings: tuple[float, int], *, keep: holdfast.Rule
) -> Generator[int, None, None]:
    """Train until the generator is closed; yield each step."""
    torch.set_num_threads(1)
    rate, batch_size = settings
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    counters = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "data": counters}
    config = {"learning_rate": rate, "batch_size": batch_size, "blocks": 4}
    options = {"every": "50step", "keep": keep, "config": config}
    with holdfast.CheckpointManager(root, state, **options) as manager:
        if which is not None:
            manager.resume(which)
            for group in optimizer.param_groups:
                group["lr"] = rate
        while True:
            metrics = {"loss": _step(model, optimizer, batch_size)}
            counters["step"] += 1
            step = counters["step"]
            if step % 50 == 0:
                metrics["val/loss"] = metrics["loss"] + 0.1 + 0.08 * math.sin(step / 130)
            metrics["lr"] = rate * min(1, step / 100)
            manager.maybe_save(step, metrics=metrics)
            yield step


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> float:
    tokens = torch.randint(24, (batch_size, 12))
    answers = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def make_runs(folder: Path) -> None:
    """Train all sessions of the run `gpt`, each in a process of its own, and other runs."""
    for session, (*_, is_killed) in enumerate(SESSIONS):
        words = [sys.executable, "-m", __spec__.name, str(folder / "gpt"), str(session)]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
        if done.returncode != (-signal.SIGKILL if is_killed else 0):
            raise RuntimeError(f"session {session}: {done.returncode}\n{done.stderr[-2000:]}")
    for settings in OTHERS:
        name = f"gpt-{settings[0]:g}-{settings[1]}"
        with closing(train_steps(folder / name, None, settings, keep=holdfast.Last(2))) as steps:
            next(step for step in steps if step == 1000)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        make_runs(Path(sys.argv[1]))
