"""Folders of DeepSpeed: ZeRO stages 0 to 3, and universal; two processes on the CPU write them."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from sample import STEPS, folder_argument, write_record

NUM_RANKS = 2


class Model(torch.nn.Module):
    """Frozen and tied weights, a buffer, and parameters that do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(3, 5).requires_grad_(False)
        self.first, self.norm = torch.nn.Linear(5, 4), torch.nn.LayerNorm(4)
        self.last, self.tied = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.full((4,), 1.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.frozen(batch))) * self.scale.to(batch.dtype)
        return self.last(hidden) + self.tied(hidden)


def train(rank: int, stage: int, folder: pathlib.Path) -> None:
    """Train a few steps, and save."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": NUM_RANKS,
        "MASTER_PORT": 29640 + stage,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    warnings.simplefilter("ignore")
    import deepspeed

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model()
    groups = [
        {"params": [model.first.weight, model.first.bias, model.norm.weight], "lr": 0.02},
        {"params": [model.norm.bias, model.last.weight, model.last.bias, model.tied.bias]},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage > 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    dtype = torch.bfloat16 if stage else torch.float32
    for step in range(STEPS):
        batch = torch.ones(2, 3, dtype=dtype) * (step + rank + 1)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    own = {"epoch": 7, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(folder / f"stage{stage}", client_state=own)
    engine.destroy()


def join(folder: pathlib.Path, stage: int) -> None:
    """Make the universal folder of a stage."""
    made = folder / f"universal{stage}" / "joined"
    named = [
        "--input_folder",
        folder / f"stage{stage}" / f"global_step{STEPS}",
        "--output_folder",
        made,
    ]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    words = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *named, *workers]
    subprocess.run(words, check=True)


def main() -> None:
    folder = folder_argument()
    for stage in range(4):
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            spawn.Process(target=train, args=(rank, stage, folder)) for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
    for stage in (2, 3):
        join(folder, stage)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = {}
    for stage in range(4):
        root = folder / f"stage{stage}"
        for script in root.glob("*.py"):
            script.unlink()
        whole = (root / f"global_step{STEPS}" / "mp_rank_00_model_states.pt") if not stage else None
        found[root.name] = {
            "module": torch.load(whole, weights_only=False)["module"]
            if whole
            else dict(get_fp32_state_dict_from_zero_checkpoint(str(root)))
        }
    # What its own tool has joined of the moments: those of stage 3 are vectors there.
    for path in sorted((folder / "universal2" / "joined" / "zero").glob("*/exp_avg*.pt")):
        slots = found["stage2"].setdefault(path.stem, {})
        slots[path.parent.name] = torch.load(path, weights_only=False)["param"]
    write_record(folder, found, "torch", "deepspeed")
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
