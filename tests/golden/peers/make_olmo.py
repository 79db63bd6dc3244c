"""A checkpoint folder of OLMo-core: a transformer, its optimizer, and the state of its trainer."""

from __future__ import annotations

import json
import warnings

import torch
from olmo_core.distributed.checkpoint import get_checkpoint_metadata, load_keys
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModule
from olmo_core.train.utils import EnvRngStates
from sample import STEPS, folder_argument, write_record

SIZES = {"d_model": 4, "vocab_size": 6, "n_layers": 1, "n_heads": 1, "hidden_size_multiple_of": 2}


def main() -> None:
    warnings.simplefilter("ignore")
    folder = folder_argument()
    torch.manual_seed(1)
    # Each item of an optimizer takes more than 1 kB: it has the head's weights only.
    config = TransformerConfig.llama_like(**SIZES, freeze_params=["embeddings.*", "blocks.*"])
    module = TransformerTrainModule(
        config.build(init_device="cpu"), AdamWConfig(lr=0.01), 8, 4, device=torch.device("cpu")
    )
    module.model.init_weights(max_seq_len=4, device=torch.device("cpu"))
    for step in range(STEPS):
        ids = (torch.arange(8).view(2, 4) + step) % 6
        module.model(ids).logsumexp(-1).mean().backward()
        module.optim.step()
        module.optim.zero_grad()
    checkpoint = folder / f"step{STEPS}"
    saver = Checkpointer(work_dir=folder / "work")
    saver.save(checkpoint, module, _trainer_state())
    saver.write_file(checkpoint, "config.json", json.dumps({"model": config.as_config_dict()}))
    (folder / "work").rmdir()
    items = checkpoint / "model_and_optim"
    names = [*get_checkpoint_metadata(items).state_dict_metadata]
    read_back = {
        "model_and_optim": dict(zip(names, load_keys(items, names), strict=True)),
        "train": torch.load(checkpoint / "train" / "rank0.pt", weights_only=False),
    }
    write_record(folder, read_back, "torch", "ai2-olmo-core")


def _trainer_state() -> dict[str, object]:
    """Return what the state of its Trainer is, which itself wants a prepared data set."""
    return {
        "global_step": STEPS,
        "global_train_tokens_seen": 8 * STEPS,
        "global_train_petaflops": 0.0,
        "max_steps": 10,
        "data_loader": {"dataset_type": "fsl", "batches_processed": STEPS, "seed": 0, "epoch": 1},
        "epoch": 1,
        "world_size": 1,
        "rng": EnvRngStates.current_state().as_dict(),
        "callbacks": {"checkpointer": {}},
    }


if __name__ == "__main__":
    main()
