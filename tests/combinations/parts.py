"""Weights, optimizers and wrappers of a small training, each by the name that users know it by.

Libraries are imported where they are used, as a process needs few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH = 64
"""Inputs and hidden units: 8-bit optimizers quantize moments of 4096 elements and more."""

Optimizer = Any
"""Not all of them derive from that of torch."""


class Net(nn.Module):
    """Two layers; the first one is quantized."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, hidden)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.dropout(self.hidden(inputs).relu()))
        return outputs


def quantize_hidden(config: str, **options: Any) -> nn.Module:
    """Replace the first layer's weight by a frozen one of torchao."""
    library, model = import_module("torchao.quantization"), Net()
    made = getattr(library, config)(**options)
    library.quantize_(model, made, filter_fn=lambda _, name: name == "hidden")
    model.hidden.weight.requires_grad_(False)
    return model


def train_quantized(config: str) -> nn.Module:
    """Replace the first layer's weight by a trained one of torchao."""
    library = import_module("torchao.prototype.quantized_training")
    model = Net(hidden=96)  # rows that 1, 2 and 3 ranks share evenly, as torchao requires
    made = getattr(library, config)()
    import_module("torchao.quantization").quantize_(
        model, made, filter_fn=lambda _, name: name == "hidden"
    )
    return model


def make_nf4() -> nn.Module:
    library = import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    model = Net(hidden=6 * 256)  # scales of scales, of which each of 1, 2 or 3 ranks has as many
    weight = library.to_nf4(model.hidden.weight.data)
    model.hidden.weight = nn.Parameter(weight, requires_grad=False)
    return model


def make_float8() -> nn.Module:
    library = import_module("torchao.float8")
    config = library.Float8LinearConfig(emulate=True)
    model: nn.Module = library.convert_to_float8_training(
        Net(), config=config, module_filter_fn=lambda _, name: name == "hidden"
    )
    return model


def make_bitsandbytes(layer: str, **options: Any) -> nn.Module:
    """Replace the first layer by a frozen one of bitsandbytes, which a move quantizes."""
    library, model = import_module("bitsandbytes"), Net()
    hidden = getattr(library.nn, layer)(WIDTH, WIDTH, **options)
    hidden.load_state_dict(model.hidden.state_dict())
    hidden.weight.requires_grad_(False)
    model.hidden = hidden.to("cpu")
    return model


def make_sparse() -> nn.Module:
    model = Net()
    model.register_buffer("mask", torch.eye(WIDTH).to_sparse())
    return model


WEIGHTS: Mapping[str, Callable[[], nn.Module]] = {
    "float32": Net,
    "bfloat16": lambda: Net().bfloat16(),
    "torchao int8": lambda: quantize_hidden("Int8WeightOnlyConfig"),
    "torchao int4": lambda: quantize_hidden("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": lambda: quantize_hidden("Float8WeightOnlyConfig"),
    "torchao int8 activations": lambda: quantize_hidden("Int8DynamicActivationInt8WeightConfig"),
    "torchao NF4": make_nf4,
    "torchao float8 training": make_float8,
    "torchao int8 training": lambda: train_quantized("int8_mixed_precision_training"),
    "torchao BitNet training": lambda: train_quantized("bitnet_training"),
    "bitsandbytes Linear4bit": lambda: make_bitsandbytes(
        "Linear4bit", compute_dtype=torch.float32, quant_type="nf4"
    ),
    "bitsandbytes Linear8bitLt": lambda: make_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
    "sparse buffer": make_sparse,
}


@dataclass
class Parts:
    """A training in one process: what is saved, and how it takes a step."""

    model: nn.Module
    optimizer: Optimizer = None
    scaler: Any = None
    saved: dict[str, Any] = field(default_factory=dict)
    """Components besides model, optimizer and data."""
    after_step: Callable[[], None] = lambda: None
    plan: Plan | None = None
    finish: Callable[[], None] = lambda: None
    """Called when the optimizer is made."""

    @property
    def state(self) -> dict[str, Any]:
        scaler = {"scaler": self.scaler} if self.scaler else {}
        return {"model": self.model, "optimizer": self.optimizer, **scaler, **self.saved}

    def compute_loss(self, batch: Tensor) -> Tensor:
        precision = torch.autocast("cpu", torch.float16) if self.scaler else nullcontext()
        dtype = next(trained(self.model)).dtype
        with precision:
            outputs: Tensor = self.model(batch.to(dtype))
            return outputs.float().square().mean()

    def take_step(self, batch: Tensor) -> None:
        def backward() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.compute_loss(batch)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            return loss

        closure = self.plan.closure if self.plan else ""
        if closure != "alone":
            backward()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step(*([backward] if closure else []))
        self.after_step()


@dataclass(frozen=True)
class Plan:
    """How an optimizer is made of a model, and called."""

    make: Callable[[nn.Module], Optimizer]
    closure: str = ""
    """`alone`: its closure computes all gradients; `again`: those of the second and later calls."""


def of_library(library: str, name: str, **options: Any) -> Plan:
    """An optimizer of the parameters that train."""
    return Plan(lambda model: getattr(import_module(library), name)([*trained(model)], **options))


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (one for one in model.parameters() if one.requires_grad)


def make_schedule_free(name: str, model: nn.Module) -> Optimizer:
    made = getattr(import_module("schedulefree"), name)([*trained(model)], lr=0.01)
    made.train()
    return made


def make_wrapped(library: str, name: str, model: nn.Module, **options: Any) -> Optimizer:
    """An optimizer around SGD."""
    inner = torch.optim.SGD([*trained(model)], lr=0.05, momentum=0.9)
    made = getattr(import_module(library), name)(inner, **options)
    if hasattr(made, "train"):
        made.train()
    return made


def make_sam(model: nn.Module) -> Optimizer:
    library = import_module("pytorch_optimizer")
    return library.SAM([*trained(model)], torch.optim.SGD, lr=0.05, momentum=0.9)


def make_muon(library: str, model: nn.Module) -> Optimizer:
    """Muon for matrices; pytorch_optimizer's own AdamW for the rest."""
    matrices = [one for one in trained(model) if one.ndim == 2]
    if library == "torch.optim":
        return torch.optim.Muon(matrices, lr=0.01)
    others = [one for one in trained(model) if one.ndim != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return import_module(library).Muon(groups, lr=0.01)


_TORCH, _AO, _BITS = "torch.optim", "torchao.optim", "bitsandbytes.optim"
_OTHER = "pytorch_optimizer"
OPTIMIZERS: Mapping[str, Plan] = {
    "torch AdamW": of_library(_TORCH, "AdamW", lr=0.01),
    "torch AdamW foreach": of_library(_TORCH, "AdamW", lr=0.01, foreach=True),
    "torch AdamW fused": of_library(_TORCH, "AdamW", lr=0.01, fused=True),
    "torch SGD": of_library(_TORCH, "SGD", lr=0.05, momentum=0.9),
    "torch LBFGS": Plan(of_library(_TORCH, "LBFGS", lr=0.1, max_iter=3).make, "alone"),
    "torch Muon": Plan(partial(make_muon, _TORCH)),
    "torch Adafactor": of_library(_TORCH, "Adafactor"),
    "torchao AdamW8bit": of_library(_AO, "AdamW8bit"),
    "torchao AdamW4bit": of_library(_AO, "AdamW4bit"),
    "torchao AdamWFp8": of_library(_AO, "AdamWFp8"),
    "bitsandbytes AdamW8bit": of_library(_BITS, "AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": of_library(_BITS, "PagedAdamW8bit"),
    "bitsandbytes Lion8bit": of_library(_BITS, "Lion8bit", lr=0.01),
    "bitsandbytes AdEMAMix8bit": of_library(_BITS, "AdEMAMix8bit"),
    "schedulefree AdamW": Plan(partial(make_schedule_free, "AdamWScheduleFree")),
    "schedulefree SGD": Plan(partial(make_schedule_free, "SGDScheduleFree")),
    "schedulefree RAdam": Plan(partial(make_schedule_free, "RAdamScheduleFree")),
    "schedulefree wrapper": Plan(partial(make_wrapped, "schedulefree", "ScheduleFreeWrapper")),
    "pytorch_optimizer SOAP": of_library(_OTHER, "SOAP"),
    "pytorch_optimizer Shampoo": of_library(_OTHER, "Shampoo", lr=0.01),
    "pytorch_optimizer ScalableShampoo": of_library(_OTHER, "ScalableShampoo", lr=0.01),
    "pytorch_optimizer SAM": Plan(make_sam, "again"),
    "pytorch_optimizer Lookahead": Plan(partial(make_wrapped, _OTHER, "Lookahead", k=3)),
    "pytorch_optimizer Muon": Plan(partial(make_muon, _OTHER)),
    "pytorch_optimizer Prodigy": of_library(_OTHER, "Prodigy"),
    "pytorch_optimizer Lion": of_library(_OTHER, "Lion", lr=0.001),
    "pytorch_optimizer AdEMAMix": of_library(_OTHER, "AdEMAMix"),
    "pytorch_optimizer GaLore": of_library(_OTHER, "GaLore"),
    "pytorch_optimizer Conda": of_library(_OTHER, "Conda"),
    "pytorch_optimizer AdamMini": Plan(
        lambda model: import_module(_OTHER).AdamMini(model, lr=0.01, num_embeds=4, num_heads=4)
    ),
}


def compile_model(backend: str, parts: Parts) -> None:
    parts.model = torch.compile(parts.model, backend=backend)


def average_weights(parts: Parts) -> None:
    average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    parts.saved["ema"] = average
    parts.after_step = lambda: average.update_parameters(parts.model)


def scale_gradients(parts: Parts) -> None:
    parts.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def add_lora(parts: Parts) -> None:
    peft = import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["hidden"], modules_to_save=["head"])
    parts.model = peft.get_peft_model(parts.model, config)


def prepare_by_accelerate(parts: Parts) -> None:
    accelerate, bridge = import_module("accelerate"), import_module("holdfast.bridges.accelerate")

    def prepare() -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        parts.model, parts.optimizer = accelerator.prepare(parts.model, parts.optimizer)
        parts.saved = bridge.state(accelerator)

    parts.finish = prepare


def shard_fully(parts: Parts) -> None:
    if isinstance(parts.model, Net):
        fully_shard(parts.model.hidden)
    fully_shard(parts.model)


def wrap_ddp(parts: Parts) -> None:
    is_exact = dist.get_world_size() > 2  # docs/ranks.md, "DDP on three ranks or more"
    parts.model = nn.parallel.DistributedDataParallel(parts.model, find_unused_parameters=is_exact)


OWN_TRAINER = "Trainer with EMA"
WRAPPERS: Mapping[str, Callable[[Parts], None]] = {
    "torch.compile": partial(compile_model, "aot_eager"),
    "torch.compile inductor": partial(compile_model, "inductor"),
    "EMA": average_weights,
    "GradScaler": scale_gradients,
    "LoRA": add_lora,
    "Accelerate": prepare_by_accelerate,
    OWN_TRAINER: lambda parts: None,
    "DDP": wrap_ddp,
    "FSDP2": shard_fully,
}
GROUPED = ("DDP", "FSDP2")
"""Wrappers that need a process group."""


def build(weights: str, optimizer: str, wrappers: tuple[str, ...]) -> Parts:
    """Make a training, as a script does at each start."""
    parts = Parts(WEIGHTS[weights](), plan=OPTIMIZERS[optimizer])
    for wrapper in wrappers:
        WRAPPERS[wrapper](parts)
    assert parts.plan is not None
    parts.optimizer = parts.plan.make(parts.model)
    parts.finish()
    return parts
