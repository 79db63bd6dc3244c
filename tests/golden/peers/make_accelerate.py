"""The folder of Accelerate's `save_state`, with a registered object of one's own."""

from __future__ import annotations

import pickle

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from sample import STEPS, folder_argument, make_batches, make_model, write_record


class Counter:
    def __init__(self) -> None:
        self.count = STEPS

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def main() -> None:
    folder = folder_argument()
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(make_batches(8), batch_size=None, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(Counter())
    for batch, _ in zip(loader, range(STEPS), strict=False):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "state"))
    read_back: dict[str, object] = {}
    for path in sorted((folder / "state").iterdir()):
        name = f"state/{path.name}"
        if path.suffix == ".safetensors":
            read_back[name] = load_file(path)
        else:
            read_back[name] = torch.load(path, weights_only=False, pickle_module=pickle)
    write_record(folder, read_back, "torch", "accelerate", "safetensors")


main()
