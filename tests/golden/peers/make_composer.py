"""Checkpoints of Composer: a pickle by itself, and packed in the ways that file names ask for."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for torchvision, which Composer imports and does not use here."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _StandIn())

import torch  # noqa: E402
from composer import ComposerModel, Trainer  # noqa: E402
from sample import STEPS, folder_argument, make_batches, make_model, write_record  # noqa: E402

NAME = "ba3.pt"
COMPRESSED = (".tar.gz", ".zst", ".lz4")


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.pow(2).mean()


def main() -> None:
    folder = folder_argument()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(torch.cat(make_batches(8)), batch_size=4),
        max_duration=f"{STEPS}ba",
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        progress_bar=False,
        device="cpu",
        run_name="sample",
    )
    trainer.fit()
    for ending in ("", *COMPRESSED):
        trainer.save_checkpoint(str(folder / f"{NAME}{ending}"))
    trainer.close()
    write_record(folder, {NAME: torch.load(folder / NAME, weights_only=False)}, "torch", "mosaicml")
    (folder / NAME).unlink()  # the others hold the same bytes


main()
