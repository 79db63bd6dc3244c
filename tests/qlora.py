"""A QLoRA fine-tune on the CPU: NF4 base that is frozen, PEFT's LoRA, 8-bit AdamW of torchao.

As a script it trains in the root that is its argument, to the step that is its second, on a base
that its third quantizes, if given.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast.data import Loader
from quantized import import_torchao

STEPS = 24


class Texts(torch.utils.data.Dataset[Tensor]):
    """Rows of tokens, each a walk from one number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(16) * (index % 7 + 1) + index) % 128


def make_base(seed: int = 7, width: int = 256, quantizer: str = "torchao") -> nn.Module:
    """A Llama of four layers in bfloat16 whose linear layers are NF4, as a script loads it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ao = import_torchao()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if quantizer == "bitsandbytes":
        for parent in [*model.model.layers.modules()]:
            for name, inner in [*parent.named_children()]:
                if isinstance(inner, nn.Linear):
                    setattr(parent, name, pack_layer(inner))
        model.is_loaded_in_4bit = True  # as transformers tells PEFT
        return model  # type: ignore[no-any-return]
    for layer in model.model.layers:
        for inner in layer.modules():
            if isinstance(inner, nn.Linear):
                packed = ao.nf4.nf4_tensor.to_nf4(inner.weight.detach(), 64, 128)
                inner.weight = nn.Parameter(packed, requires_grad=False)
    return model  # type: ignore[no-any-return]


def pack_layer(plain: nn.Linear) -> nn.Module:
    import bitsandbytes

    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    layer = bitsandbytes.nn.Linear4bit(plain.in_features, plain.out_features, False, **options)
    layer.weight.data = plain.weight.detach()
    return layer.to("cpu")  # type: ignore[no-any-return]


@dataclass
class QLoRA:
    model: Any
    optimizer: torch.optim.Optimizer
    data: Loader

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "data": self.data}

    def train(self, root: Path, until: int = STEPS, **options: Any) -> holdfast.Checkpoint:
        """Resume, and train to a step."""
        options = {"frozen": "by digest", "every": "3step"} | options
        with holdfast.CheckpointManager(root, self.state, **options) as checkpoints:
            found = checkpoints.resume()
            step = found.step if found else 0
            for batch in self.data.until(step=until, start=step):
                with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
                    self.model(input_ids=batch, labels=batch).loss.backward()
                    self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                checkpoints.maybe_save(step)
            return checkpoints.save(step).wait()

    def logits(self) -> Tensor:
        return logits_of(self.model)


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=Texts()[0][None]).logits
    model.train()
    return logits


def make_run(
    base_seed: int = 7, width: int = 256, rank: int = 8, quantizer: str = "torchao"
) -> QLoRA:
    """A run before its first step."""
    from peft import LoraConfig, get_peft_model

    ao = import_torchao()
    base = make_base(base_seed, width, quantizer)
    torch.manual_seed(0)
    config = LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.1)
    model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ao.optim.AdamW8bit(trained, lr=0.01, block_size=128)
    return QLoRA(model.train(), optimizer, Loader(Texts(), batch_size=4, seed=0))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    make_run(quantizer=[*sys.argv, "torchao"][3]).train(Path(sys.argv[1]), int(sys.argv[2]))
