"""A training under Lightning that is killed, started again, and ends with the same bits.

Dropout, and a dataset that draws random numbers: a resume has to bring back every generator and the
very place in the data. The callback does it; the script has no line for it.

    python examples/bridges/with_lightning.py
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast.bridges.lightning import HoldfastCheckpoint
from holdfast.data import Loader


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8) * (index % 7) + torch.randn(8)
        return x, x.sum().reshape(1)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class Kill(Callback):
    """Kills the process in the middle of a step, as a machine that fails would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, kill_at: int | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1, verbose=False)
    model = Regression()
    callbacks: list[Callback] = [HoldfastCheckpoint(root, every="3step", keep="last:2")]
    if kill_at is not None:
        callbacks.append(Kill(kill_at))
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        callbacks=callbacks,
        val_check_interval=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Loader(Noisy(), batch_size=4), Loader(Noisy(), batch_size=32))
    print(f"{root.name}: trained to step {trainer.global_step}", flush=True)
    torch.save(model.state_dict(), root / "trained.pt")


def start(root: Path, *options: str) -> int:
    return subprocess.run([sys.executable, __file__, str(root), *options], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
            assert start(whole) == 0
            for step in (7, 29):
                print(f"killed: ended with status {start(killed, str(step))}", flush=True)
            assert start(killed) == 0
            one, other = (torch.load(root / "trained.pt") for root in (whole, killed))
            print("the same bits:", all(torch.equal(one[name], other[name]) for name in one))
