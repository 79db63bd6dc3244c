"""A training with transformers' Trainer that is killed, started again, and ends with the same bits.

The script is as one writes it for the Trainer, with `CheckpointedTrainer` in its place. The model
has dropout, and the dataset draws random numbers. Each life goes on from the newest checkpoint.

    python examples/bridges/with_transformers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

import holdfast
from holdfast.bridges.transformers import CheckpointedTrainer

STEPS = 60


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a number, with errors that are drawn anew each time."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) + index) % 40
        tokens[torch.rand(12) < 0.1] = 0
        return {"input_ids": tokens, "labels": tokens}


class Kill(transformers.TrainerCallback):
    """Kills the process in the middle of a step, as a machine that fails would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, kill_at: int | None = None) -> None:
    """The training script, which does not know how often it was started before."""
    torch.set_num_threads(1)  # enough for a model of this size
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.2
    )
    trainer = CheckpointedTrainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            output_dir=str(root),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=20,
            save_strategy="no",  # `checkpoints` says when to save
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Numbers(),
        callbacks=[] if kill_at is None else [Kill(kill_at)],
        checkpoints=holdfast.Checkpoints(root, every="7step", keep=holdfast.Last(2)),
    )
    trainer.train()  # from the newest checkpoint, if there is one
    print(f"{root.name}: trained to step {trainer.state.global_step}", flush=True)
    torch.save(trainer.model.state_dict(), root / "trained.pt")


def start(root: Path, *options: str) -> int:
    """Run the script in a process of its own; returns its status."""
    return subprocess.run([sys.executable, __file__, str(root), *options], check=False).returncode


def main() -> None:
    """Train in one go, train with two kills, and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
        assert start(whole) == 0
        for step in (17, 43):
            print(f"killed: ended with status {start(killed, str(step))}", flush=True)
        assert start(killed) == 0
        one, other = (torch.load(root / "trained.pt") for root in (whole, killed))
        print("the same bits:", all(torch.equal(one[name], other[name]) for name in one))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        main()
