"""Adapters of PEFT that PEFT itself reads back, of checkpoints that lack the base model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager

HOLDFAST = Path(sys.executable).with_name("holdfast")
TOKENS = torch.arange(6).reshape(2, 3)


def make_base() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def make_adapters(**adapters: dict[str, Any]) -> Any:
    """Wrap a base with random adapters, each by its options."""
    from peft import LoraConfig, PeftModel

    common = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    (first, options), *others = adapters.items()
    model = PeftModel(make_base(), LoraConfig(**common | options), adapter_name=first)
    for name, options in others:
        model.add_adapter(name, LoraConfig(**common | options))
    return model.eval()


def save_model(model: Any, root: Path, config: Path, **options: Any) -> None:
    """Save a model, with its base by digest, and the configurations of its adapters."""
    for name, one in model.peft_config.items():
        one.save_pretrained(config if name == "default" else config / name)
    with CheckpointManager(root, {"model": model}, **options) as checkpoints:
        checkpoints.save(1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["default", "one"])
def test_peft_opens_all_adapters_of_a_checkpoint_by_digest(first: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = make_adapters(
        **{first: {"target_modules": ["c_attn"]}}, two={"target_modules": ["c_fc", "wte"], "r": 3}
    )
    save_model(model, tmp_path / "root", tmp_path / "config", frozen="by digest")
    out = tmp_path / "out"
    command = [HOLDFAST, "export", tmp_path / "root", out, "--to", "peft"]
    done = subprocess.run(
        [*command, "--config", tmp_path / "config"], capture_output=True, text=True, check=True
    )
    lines = done.stdout[done.stdout.index("from peft import") :]
    found: dict[str, Any] = {"base": make_base()}
    exec(lines, found)
    assert isinstance(found["model"], PeftModel)
    assert {*found["model"].peft_config} == {first, "two"}
    for name in (first, "two"):
        model.set_adapter(name)
        found["model"].eval().set_adapter(name)
        with torch.no_grad():
            assert torch.equal(found["model"](TOKENS).logits, model(TOKENS).logits), name
