"""The training that the examples of this folder start: it goes on from wherever its root stands.

It saves at the next step when a scheduler's signal has come, and ends with status 75. Alone:

    python examples/clusters/train.py runs/gpt
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from holdfast import Checkpoints, Last, Stop
from holdfast.data import Loader
from holdfast.train import Trainer

GLOBAL_BATCH = 24


def words() -> TensorDataset:
    """Numbers in base seven and the digit that follows each: something that can be learnt."""
    numbers = torch.arange(2400).unsqueeze(1) // torch.tensor([[1, 7, 49, 343]]) % 7
    return TensorDataset(numbers, numbers.sum(1) % 7)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 20), nn.Flatten(), nn.Linear(80, 33), nn.Dropout(0.1), nn.Linear(33, 7)
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main(root: str) -> None:
    """Train until the goal; with torchrun on all ranks together."""
    torch.set_num_threads(1)  # enough for a model of this size
    torch.manual_seed(0)
    batch_size = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        network,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=Loader(words(), batch_size=batch_size),
        loss=loss,
        checkpoints=Checkpoints(root, every="20step", keep=Last(2)),
        # Less than what the scheduler gives: torchrun kills after 30 s what it has told to end.
        stop=Stop(grace="25s"),
    )
    trainer.fit(os.environ.get("UNTIL", "2000step"))


if __name__ == "__main__":
    main(sys.argv[1])
