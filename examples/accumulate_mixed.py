"""Gradient accumulation in half precision with a loss scaler, killed and resumed to the bit.

A step is one window of four batches. Checkpoints are made between steps only, so there is never a
half-accumulated gradient to save; the loss scaler, the average of the weights and the position in
the data are components of each checkpoint. This file starts itself as a training process, once
undisturbed and once with a SIGKILL in the middle, and compares what both saved.

    python examples/accumulate_mixed.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from holdfast import Checkpoints, Last, load_weights
from holdfast.data import Loader
from holdfast.train import Callback, Metrics, Trainer, Training

STEPS = 60


class KillAt(Callback):
    """The machine goes down in the middle of the training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """No handler runs after this, and nothing is flushed."""
        if training.counters.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> nn.Module:
    """Guesses the next byte from the 16 before it."""
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.Dropout(0.1),
        nn.Linear(128, 256),
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Runs under autocast; the Trainer divides it by the batches of the step and scales it."""
    (windows,) = batch
    return cross_entropy(model(windows[:, :-1]).float(), windows[:, -1])


def train(root: str, kill_at: int) -> None:
    """The training script, as a batch system would start it again and again."""
    torch.set_num_threads(1)  # enough for a model of this size
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:100_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 8).long()
    Trainer(
        make_model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        data=Loader(TensorDataset(windows), batch_size=16),
        loss=loss,
        checkpoints=Checkpoints(root, every="10step", keep=Last(2)),
        accumulate=4,
        precision="fp16",  # "bf16" needs no scaler
        clip=1.0,  # of the whole step's gradients, after they were unscaled
        ema=0.99,
        callbacks=[KillAt(kill_at)] if kill_at else [],
    ).fit(STEPS)


def run(root: Path, *, kill_at: int = 0) -> int:
    """Start this file as a training process; gives its exit status."""
    command = [sys.executable, __file__, str(root), str(kill_at)]
    status = subprocess.run(command, check=False).returncode
    print(f"{root.name}: ended with status {status}")
    return status


def main() -> None:
    """Train undisturbed, train through a kill, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, killed = Path(folder, "undisturbed"), Path(folder, "killed")
        assert run(undisturbed) == 0
        assert run(killed, kill_at=35) == -signal.SIGKILL
        assert run(killed) == 0
        for component in ("model", "ema"):
            expected, got = make_model(), make_model()
            load_weights(undisturbed, expected, component=component)
            assert load_weights(killed, got, component=component).step == STEPS
            pairs = zip(expected.parameters(), got.parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    print("weights and averaged weights are the same bits")


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
