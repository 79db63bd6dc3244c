"""A LightningModule of a hundred lines and its port, compared: `python -m bench.lightning_port`.

The port was written by docs/coming-from/lightning.md; the diary of it is decision 0043.
Needs lightning and torchmetrics (the extra `bench`).
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from holdfast import Best, Checkpoints, Last
from holdfast.data import Loader
from holdfast.train import (
    Callback,
    EarlyStopping,
    Freeze,
    LearningRates,
    Metrics,
    StepOutput,
    Trainer,
    Training,
    Validation,
)

Weights = dict[str, Tensor]
NUM_EPOCHS, BATCH_SIZE, NUM_CLASSES = 4, 16, 4
BATCHES = 128 // BATCH_SIZE


class Corners(Dataset[tuple[Tensor, int]]):
    """Noisy pictures with one bright corner, which is the class."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        own = torch.Generator().manual_seed(self.first + index)
        picture, corner = torch.randn(1, 8, 8, generator=own) * 0.5, index % NUM_CLASSES
        row, column = divmod(corner, 2)
        picture[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1
        return picture, corner


class Net(nn.Module):
    """A backbone that begins frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, NUM_CLASSES))

    def forward(self, pictures: Tensor) -> Any:
        return self.head(self.backbone(pictures))


def groups_of(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    weights = [*model.parameters()]
    return [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": decay, "name": "decay"},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0, "name": "plain"},
    ]


def theirs(folder: Path) -> tuple[Weights, dict[str, float]]:
    """Train with Lightning; returns the last weights, and the test's metrics of the best ones."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    class Classifier(lightning.LightningModule):
        def __init__(self, lr: float = 0.01, decay: float = 0.1, smoothing: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net()
            self.train_accuracy = MulticlassAccuracy(NUM_CLASSES)
            self.val_accuracy = MulticlassAccuracy(NUM_CLASSES)
            self.val_f1 = MulticlassF1Score(NUM_CLASSES)
            self.test_accuracy = MulticlassAccuracy(NUM_CLASSES)

        def forward(self, pictures: Tensor) -> Any:
            return self.net(pictures)

        def training_step(self, batch: Any, index: int) -> Tensor:
            logits = self(batch[0])
            loss = cross_entropy(logits, batch[1], label_smoothing=self.hparams["smoothing"])
            self.train_accuracy(logits, batch[1])
            self.log("train/loss", loss)
            self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
            if self.trainer.is_last_batch:
                self.log("train/confidence", logits.softmax(1).amax(1).mean())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [w.grad for w in self.parameters() if w.grad is not None]
            self.log("grad_norm", nn.utils.get_total_norm(grads))

        def validation_step(self, batch: Any, index: int) -> None:
            logits = self(batch[0])
            self.val_accuracy(logits, batch[1])
            self.val_f1(logits, batch[1])
            self.log("val/loss", cross_entropy(logits, batch[1]), batch_size=len(batch[1]))
            self.log("val/accuracy", self.val_accuracy)
            self.log("val/f1", self.val_f1)

        def test_step(self, batch: Any, index: int) -> None:
            self.test_accuracy(self(batch[0]), batch[1])
            self.log("test/accuracy", self.test_accuracy)

        def configure_optimizers(self) -> Any:
            groups = groups_of(self.net, self.hparams["decay"])
            optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=BATCHES)
            rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * (NUM_EPOCHS - 1))
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [BATCHES])
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": both, "interval": "step"},
            }

    class Unfreeze(lightning.Callback):
        """Trains the head alone in the first epoch."""

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net.backbone.requires_grad_(trainer.current_epoch >= 1)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            gap = trainer.callback_metrics["train/loss"] if trainer.global_step else 0.0
            module.log("last_loss", gap)

    lightning.seed_everything(3, verbose=False)
    module = Classifier()
    best = ModelCheckpoint(folder, monitor="val/loss", save_top_k=1, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        gradient_clip_val=0.5,
        callbacks=[best, EarlyStopping("val/loss", patience=2), LearningRateMonitor(), Unfreeze()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(Corners(128), batch_size=BATCH_SIZE)
    trainer.fit(module, train, DataLoader(Corners(64, 1000), batch_size=32))
    weights = {name: value.clone() for name, value in module.net.state_dict().items()}
    test = DataLoader(Corners(64, 2000), batch_size=32)
    (found,) = trainer.test(module, test, ckpt_path="best", verbose=False)
    return weights, {**found, "val/loss": float(best.best_model_score)}


def smoothed(model: nn.Module, batch: Any, smoothing: float = 0.1) -> StepOutput:
    """The training's loss; outputs are for the metrics."""
    logits = model(batch[0])
    loss = cross_entropy(logits, batch[1], label_smoothing=smoothing)
    confidence = logits.softmax(1).amax(1).mean()
    return StepOutput(loss, {"confidence": confidence}, (logits, batch[1]))


def plain(model: nn.Module, batch: Any) -> StepOutput:
    """The validation's loss."""
    return smoothed(model, batch, 0.0)


class LastLoss(Callback):
    """Logs the loss of the last step beside a validation."""

    loss = 0.0

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.loss = metrics["loss"]

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        training.log({"last_loss": self.loss})


def ours(folder: Path, lr: float = 0.01, decay: float = 0.1) -> tuple[Weights, dict[str, float]]:
    """Train with Holdfast; returns the same."""
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    def scores() -> dict[str, Any]:
        return {"accuracy": MulticlassAccuracy(NUM_CLASSES), "f1": MulticlassF1Score(NUM_CLASSES)}

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups_of(model, decay), lr=lr)

    def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=BATCHES)
        rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * (NUM_EPOCHS - 1))
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [BATCHES])

    held_out = Loader(Corners(64, 1000), batch_size=32, shuffle=False)
    trainer = Trainer(
        Net,
        optimizer=adamw,
        scheduler=warm_then_cosine,
        data=Loader(Corners(128), batch_size=BATCH_SIZE, shuffle=False),
        loss=smoothed,
        clip=0.5,
        seed=3,
        metrics={"accuracy": MulticlassAccuracy(NUM_CLASSES)},
        validate=Validation(data=held_out, every="1ep", loss=plain, metrics=scores()),
        checkpoints=Checkpoints(folder, keep=Best("val/loss") | Last(1)),
        callbacks=[
            EarlyStopping("val/loss", patience=2),
            LearningRates(),
            Freeze("backbone.*", until="1ep"),
            LastLoss(),
        ],
        state={"config": {"lr": lr, "decay": decay}},
        log_every=1,
        device="cpu",
        progress=False,
    )
    outcome = trainer.fit(f"{NUM_EPOCHS}ep")
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    test = Loader(Corners(64, 2000), batch_size=32, shuffle=False)
    found = trainer.test(
        Validation(data=test, loss=plain, metrics={"accuracy": scores()["accuracy"]}), which="best"
    )
    assert outcome.best is not None
    return weights, {**found, "val/loss": outcome.best.metrics["val/loss"]}


def main() -> int:
    """Compare both sides; exit status 1 if they differ."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        weights, metrics = theirs(Path(folder, "theirs"))
        own_weights, own_metrics = ours(Path(folder, "ours"))
    same = all(torch.equal(value, own_weights[name]) for name, value in weights.items())
    print(f"Lightning: {metrics}\nHoldfast: {own_metrics}")
    print("the same weights, bit for bit" if same else "other weights")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
