"""Adapters of PEFT that PEFT itself reads back, of checkpoints that lack the base model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.interop import export_checkpoint
from qlora import make_run

HOLDFAST = Path(sys.executable).with_name("holdfast")
TOKENS = torch.arange(6).reshape(2, 3)


def make_base(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval().to(dtype)


def make_adapters(base: Any = None, **adapters: dict[str, Any]) -> Any:
    """Wrap a base with random adapters, each by its options."""
    from peft import LoraConfig, PeftModel

    common = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    (first, options), *others = adapters.items()
    model = PeftModel(base or make_base(), LoraConfig(**common | options), adapter_name=first)
    for name, options in others:
        model.add_adapter(name, LoraConfig(**common | options))
    return model.eval()


def save_model(model: Any, root: Path, config: Path, **options: Any) -> None:
    """Save a model, with its base by digest, and the configurations of its adapters."""
    for name, one in getattr(model, "peft_config", {}).items():
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


MERGED = [
    {"target_modules": ["c_attn", "c_proj"], "lora_alpha": 7},
    {"target_modules": ["c_fc", "wte"], "use_rslora": True, "rank_pattern": {"c_fc": 3}},
    {"target_modules": ["mlp.c_proj"], "modules_to_save": ["ln_f"]},
]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", MERGED, ids=["layers", "embedding", "modules_to_save"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_digest", [True, False])
def test_a_merged_export_equals_merge_and_unload(
    options: dict[str, Any], dtype: torch.dtype, by_digest: bool, tmp_path: Path
) -> None:
    """Bit for bit; the base is in shards, in float32, from which the run casts it."""
    from transformers import AutoModelForCausalLM

    make_base().save_pretrained(tmp_path / "base", max_shard_size="1KB")
    assert len([*(tmp_path / "base").glob("*.safetensors")]) > 1
    model = make_adapters(make_base(dtype), default=options)
    for name, one in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(one)
    frozen: Any = {"frozen": "by digest"} if by_digest else {}
    save_model(model, tmp_path / "root", tmp_path / "config", **frozen)
    if not by_digest:
        make_base().config.save_pretrained(tmp_path / "config")
    export_checkpoint(
        tmp_path / "root",
        tmp_path / "out",
        to="hf",
        base=tmp_path / "base" if by_digest else None,
        config=tmp_path / "config",
    )
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    expected = model.merge_and_unload().state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).state_dict()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == expected.keys()
    assert {*expected} - {*written} <= {"lm_head.weight", "transformer.wte.weight"}
    for name, one in expected.items():
        assert torch.equal(read[name], one), name
        assert name not in written or torch.equal(written[name], one), name


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_merge_into_another_base_is_refused_with_the_names(tmp_path: Path) -> None:
    model = make_adapters(default={"target_modules": ["c_attn"]})
    save_model(model, tmp_path / "root", tmp_path / "config", frozen="by digest")
    base = make_base()
    base.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    changed = "transformer.h.1.mlp.c_fc.bias"
    wrong = {
        "differ from their digests": weights | {changed: weights[changed] + 1},
        "not in the base": {name: one for name, one in weights.items() if name != changed},
        "when saved": weights | {changed: weights[changed][1:].clone()},
    }
    for message, values in wrong.items():
        save_file(values, file, {"format": "pt"})
        with pytest.raises(UsageError, match=message) as caught:
            export_checkpoint(
                tmp_path / "root",
                tmp_path / "out",
                to="hf",
                base=tmp_path / "base",
                config=tmp_path / "config",
            )
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 1
        assert changed in lines[0]
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--base FOLDER"):
        export_checkpoint(tmp_path / "root", tmp_path / "out", to="hf", config=tmp_path / "config")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_merge_into_a_quantized_base_is_refused(tmp_path: Path) -> None:
    run = make_run()
    run.train(tmp_path / "root", 1)
    run.model.peft_config["default"].save_pretrained(tmp_path / "config")
    base = {
        name.replace("base_layer.", ""): torch.zeros(one.shape)
        for name, one in run.model.get_base_model().named_parameters()
        if "lora_" not in name
    }
    save_file(base, tmp_path / "base.safetensors")
    command = [HOLDFAST, "export", tmp_path / "root", tmp_path / "out", "--to", "hf"]
    others = ["--base", tmp_path / "base.safetensors", "--config", tmp_path / "config"]
    done = subprocess.run([*command, *others], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "NF4Tensor" in done.stderr
    assert "merge_and_unload" in done.stderr


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["c_attn"], "use_dora": True}, "use_dora is True"),
        ({"target_modules": ["c_attn"], "bias": "all"}, "bias is 'all'"),
        ({"target_modules": ["c_attn"], "lora_bias": True}, "lora_bias is True"),
        ({"target_modules": ["c_attn"], "alpha_pattern": {"c_attn": 3}}, "alpha_pattern"),
        ({"target_modules": ["c_attn"], "trainable_token_indices": [1]}, "trainable_token"),
    ],
    ids=str,
)
def test_what_is_not_merged_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(make_adapters(default=options), tmp_path / "root", tmp_path / "config")
    with pytest.raises(UsageError, match=message) as caught:
        export_checkpoint(tmp_path / "root", tmp_path / "out", to="hf", config=tmp_path / "config")
    assert "merge_and_unload" in str(caught.value)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_merge_without_the_configuration_of_the_base_is_refused(tmp_path: Path) -> None:
    """transformers could not open the folder."""
    model = make_adapters(default={"target_modules": ["c_attn"]})
    save_model(model, tmp_path / "root", tmp_path / "config")
    with pytest.raises(UsageError, match=r"config\.json of its base"):
        export_checkpoint(tmp_path / "root", tmp_path / "out", to="hf", config=tmp_path / "config")
    assert not (tmp_path / "out").exists()


def test_frozen_parameters_without_an_adapter_are_read_from_the_base(tmp_path: Path) -> None:
    """The names may lack a first part, and the file may have a type that the run casts."""
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2)})
    model.half()
    model["net"].requires_grad_(False)
    save_model(model, tmp_path / "root", tmp_path, frozen="by digest")
    weights = {name: one.detach().float() for name, one in model["net"].named_parameters()}
    base, out = tmp_path / "base.safetensors", tmp_path / "out"
    save_file(weights, base)
    export_checkpoint(tmp_path / "root", out, to="hf", base=base)
    written = load_file(out / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], one) for name, one in model.state_dict().items())
    save_model(model, tmp_path / "whole", tmp_path)
    with pytest.raises(UsageError, match="has all weights"):
        export_checkpoint(tmp_path / "whole", tmp_path / "other", to="hf", base=base)
    with pytest.raises(UsageError, match="--base: does nothing"):
        export_checkpoint(tmp_path / "root", tmp_path / "other", to="safetensors", base=base)
