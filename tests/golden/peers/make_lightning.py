"""A checkpoint of Lightning with hyper-parameters, a callback's state and a scheduler."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sample import STEPS, folder_argument, make_batches, make_model, write_record


class Module(lightning.LightningModule):
    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = make_model()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["rate"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    folder = folder_argument()
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder, filename="epoch={epoch}-step={step}", monitor="loss"),
            EarlyStopping("loss", patience=10),
        ],
        log_every_n_steps=1,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(make_batches(8), batch_size=None))
    [path] = folder.glob("*.ckpt")
    path = path.rename(folder / "last.ckpt")
    write_record(folder, {path.name: torch.load(path, weights_only=False)}, "torch", "lightning")


main()
