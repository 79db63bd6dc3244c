"""A checkpoint of Ignite's `Checkpoint` handler."""

from __future__ import annotations

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from sample import STEPS, folder_argument, make_batches, make_model, write_record


def main() -> None:
    folder = folder_argument()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(_: Engine, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    trainer = Engine(step)
    to_save = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "trainer": trainer,
    }
    handler = Checkpoint(to_save, DiskSaver(str(folder), require_empty=False))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=STEPS), handler)
    trainer.run(make_batches(4), max_epochs=1)
    [path] = folder.glob("*.pt")
    read_back = {path.name: torch.load(path, weights_only=False)}
    write_record(folder, read_back, "torch", "pytorch-ignite")


main()
