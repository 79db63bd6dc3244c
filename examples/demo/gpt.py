"""The training that `demo.py` kills: a small GPT over bytes, in a loop with a CheckpointManager.

    python examples/demo/gpt.py ROOT SEED [--fast]

Reports each step and save to standard output, one JSON object a line, each in one write, so that a
kill never splits a line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import holdfast
from holdfast.events import Event


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the run and its model."""

    num_steps: int = 300
    save_every: int = 20
    batch_size: int = 8
    width: int = 144
    num_layers: int = 4
    context: int = 64
    dropout: float = 0.05


FAST = Plan(batch_size=2, width=128, num_layers=2, context=16)


class GPT(nn.Module):
    """Predicts the next byte; the output layer shares its weight with the embedding."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, plan.width)
        self.position = nn.Parameter(torch.zeros(plan.context, plan.width))
        shape = {"d_model": plan.width, "nhead": 4, "dim_feedforward": 4 * plan.width}
        block = nn.TransformerEncoderLayer(
            **shape, dropout=plan.dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, plan.num_layers, norm=nn.LayerNorm(plan.width), enable_nested_tensor=False
        )
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Compute logits [batch, time, 256] from text [batch, time]."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embedding(text) + self.position[: text.shape[1]]
        return self.blocks(x, mask, is_causal=True) @ self.embedding.weight.T


class Windows(Dataset[Tensor]):
    """Windows of text, `length + 1` bytes long, each shifted by a draw from torch's generator.

    So an exact resume must restore the generator as well as the position in the data.
    """

    def __init__(self, length: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])  # Python's own source
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self._text = torch.frombuffer(bytearray(text[:4_000_000]), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return len(self._text) // self._length - 2

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length + int(torch.randint(self._length, ()))
        return self._text[start : start + self._length + 1].long()


def train(root: str, plan: Plan, seed: int) -> None:
    """Resume, or start a new run, and train to the last step."""
    torch.set_num_threads(1)  # float sums depend on the number
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = GPT(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.num_steps)
    data = holdfast.data.Loader(Windows(plan.context), plan.batch_size, seed=seed, num_workers=1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    with holdfast.CheckpointManager(
        root, state, every=f"{plan.save_every}step", keep="last:3", sinks=(report_event,)
    ) as checkpoints:
        found = checkpoints.resume()
        step = found.step if found else 0
        report("resumed", step=step)
        for batch in data.until(step=plan.num_steps, start=step):
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            report("step", step=step, loss=loss.item())
            checkpoints.maybe_save(step, metrics={"loss": loss})
        checkpoints.save(step, tags=["final"], wait=True)


def report_event(event: Event) -> None:
    """Report the commit of a save."""
    if event.kind == "committed":
        report(event.kind, step=event.step)


def report(kind: str, **fields: Any) -> None:
    """Write a line of JSON."""
    line = json.dumps({"kind": kind, "at_s": time.monotonic(), **fields})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    root, seed, *fast = sys.argv[1:]
    train(root, FAST if fast else Plan(), int(seed))
