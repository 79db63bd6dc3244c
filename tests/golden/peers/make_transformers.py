"""A checkpoint folder of Hugging Face's Trainer, and a folder of `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from sample import STEPS, folder_argument, write_record
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(4) + number) % 8
        return {"input_ids": ids, "labels": ids}


def read_folder(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        name = f"{folder.name}/{path.name}"
        if path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.suffix == ".json":
            found[name] = json.loads(path.read_text())
        elif path.suffix in (".pt", ".pth", ".bin"):
            found[name] = torch.load(path, weights_only=False)
    return found


def main() -> None:
    folder = folder_argument()
    transformers.set_seed(1)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=STEPS,
        save_steps=STEPS,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=Tokens()).train()
    checkpoint = (folder / "run" / f"checkpoint-{STEPS}").rename(folder / f"checkpoint-{STEPS}")
    (folder / "run").rmdir()
    model.save_pretrained(folder / "pretrained")
    write_record(
        folder,
        read_folder(checkpoint) | read_folder(folder / "pretrained"),
        *("torch", "transformers", "accelerate", "safetensors"),
    )


main()
