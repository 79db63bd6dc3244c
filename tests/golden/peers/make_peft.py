"""The state of a model with two adapters of PEFT, and what `save_pretrained` writes of each."""

from __future__ import annotations

import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model
from sample import folder_argument, write_record
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    folder = folder_argument()
    warnings.simplefilter("ignore")
    transformers.set_seed(1)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 2}
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    both = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = get_peft_model(base, LoraConfig(target_modules=["c_attn", "wte"], **both))
    second = LoraConfig(
        target_modules=["c_fc"], use_dora=True, bias="lora_only", modules_to_save=["ln_f"], **both
    )
    model.add_adapter("second", second)
    torch.save({"model": model.state_dict()}, folder / "state.pt")
    model.save_pretrained(folder / "adapters", save_embedding_layers=False)
    for path in folder.glob("**/README.md"):
        path.unlink()
    read_back = {"state.pt": torch.load(folder / "state.pt")}
    write_record(folder, read_back, "torch", "transformers", "peft", "safetensors")


main()
