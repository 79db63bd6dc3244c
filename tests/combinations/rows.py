"""Combinations of weights, optimizer and wrappers, and what holds of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bridges.forks import Say
from combinations.parts import GROUPED, OWN_TRAINER, WIDTH, Parts, build
from holdfast import CheckpointManager, Checkpoints
from holdfast.data import Loader
from holdfast.data.randomness import seed_generators
from holdfast.errors import HoldfastError
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import Trainer

NUM_STEPS, BATCH = 6, 16


@dataclass(frozen=True)
class Row:
    """A combination, and what holds of it."""

    weights: str
    optimizer: str
    wrappers: tuple[str, ...] = ()
    refused: str = ""
    """Words of the error at the start; empty: killed runs end with the undisturbed run's bits."""

    ranks: tuple[int, ...] = (1, 2, 3)
    """Numbers of ranks on which the libraries themselves train it, if it needs a group."""

    @property
    def needs_group(self) -> bool:
        return any(name in GROUPED for name in self.wrappers)

    def __str__(self) -> str:
        return " × ".join([self.weights, self.optimizer, *self.wrappers])


def train(row: Row, root: Path, say: Say) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint; return what is compared."""
    with torch.compiler.set_stance("default" if compiles(row) else "force_eager"):
        return train_parts(row, root, say)


def compiles(row: Row) -> bool:
    return any(name.startswith("torch.compile") for name in row.wrappers)


def train_parts(row: Row, root: Path, say: Say) -> dict[str, Any]:
    # A resume finds other weights and moments than the run began with, and must replace them all.
    seed_generators(num_saved(root))
    inputs = torch.randn(5 * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    data = Loader(inputs, batch_size=BATCH, shuffle=True, seed=1)
    parts = build(row.weights, row.optimizer, row.wrappers)
    if row.needs_group:
        torch.manual_seed(1 + dist.get_rank())  # dropout of its own on each
    train_by = train_by_trainer if OWN_TRAINER in row.wrappers else train_by_hand
    try:
        state = train_by(parts, data, root, say)
    except HoldfastError as error:
        if not row.refused:
            raise
        found = {"class": type(error).__name__, "said": str(error)}
        return {**found, "batches": data.state_dict()["batch"], "checkpoints": num_saved(root)}
    state["generator"] = torch.get_rng_state()
    return leaf_digests({name: plain(part) for name, part in state.items()})


def num_saved(root: Path) -> int:
    return len(Catalog(LocalStore(root)).checkpoints()) if root.exists() else 0


def train_by_hand(parts: Parts, data: Loader, root: Path, say: Say) -> dict[str, Any]:
    state = {**parts.state, "data": data}
    with CheckpointManager(root, state, every="1step", keep="last:2") as manager:
        resumed = manager.resume()
        step = resumed.step if resumed else 0
        with nullcontext() if step else no_warnings():
            for batch in data.until(NUM_STEPS, start=step):
                say()
                parts.take_step(batch)
                step += 1
                say()
                manager.maybe_save(step)
    return state


def train_by_trainer(parts: Parts, data: Loader, root: Path, say: Say) -> dict[str, Any]:
    trainer = Trainer(
        parts.model,
        optimizer=parts.optimizer,
        data=data,
        loss=lambda _, batch: parts.compute_loss(batch),
        checkpoints=Checkpoints(root, every="1step", keep="last:2"),
        ema=0.9,
        progress=False,
    )
    trainer.fit(f"{NUM_STEPS}step")
    return {**trainer.state}


@contextmanager
def no_warnings() -> Iterator[None]:
    """Raise a warning that a user would see in the first session."""
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("holdfast")

    def refuse(record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())

    handler.emit = refuse  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def plain(value: Any) -> Any:
    """Replace tensors of subclasses by the tensors in them."""
    if hasattr(value, "state_dict"):
        return plain(value.state_dict())
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, DTensor):
        return {"placements": repr(value.placements), "local": plain(value.to_local())}
    if not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter):
        return value
    inner = {"subclass": type(value).__name__, "shape": [*value.shape]}
    if not hasattr(value, "__tensor_flatten__"):
        return {**inner, "data": value.detach().as_subclass(Tensor)}
    names, context = value.__tensor_flatten__()
    return {
        **inner,
        "context": repr(context),
        **{name: plain(getattr(value, name)) for name in names},
    }


ROWS: tuple[Row, ...] = (
    # Several kinds at once, as users have them; `make test` runs these.
    Row("float32", "torch AdamW"),
    Row("bfloat16", "torch AdamW foreach", ("EMA",)),
    Row("float32", "torch AdamW fused", ("GradScaler",)),
    Row("bitsandbytes Linear4bit", "bitsandbytes PagedAdamW8bit", ("LoRA",)),
    Row("bitsandbytes Linear8bitLt", "bitsandbytes AdamW8bit", ("EMA",)),
    Row("torchao int8", "torchao AdamW8bit", ("LoRA",)),
    Row("torchao int4", "torchao AdamWFp8"),
    Row("torchao float8", "pytorch_optimizer Prodigy", ("Accelerate",)),
    Row("torchao NF4", "torchao AdamW4bit", ("LoRA",)),
    Row("torchao int8 activations", "bitsandbytes Lion8bit"),
    Row("torchao float8 training", "torch Muon"),
    Row("torchao int8 training", "torch Adafactor"),
    Row("torchao BitNet training", "pytorch_optimizer Lion"),
    Row("float32", "schedulefree AdamW", ("DDP",)),
    Row("float32", "torchao AdamW8bit", ("FSDP2",)),
    Row("float32", "pytorch_optimizer SOAP", ("Trainer with EMA",)),
    Row("float32", "bitsandbytes AdEMAMix8bit"),
    Row("float32", "torch LBFGS"),
    Row("float32", "torch SGD", ("torch.compile",)),
    Row("float32", "schedulefree SGD"),
    Row("float32", "schedulefree RAdam"),
    Row("float32", "schedulefree wrapper"),
    Row("float32", "pytorch_optimizer Shampoo"),
    Row("float32", "pytorch_optimizer SAM"),
    Row("float32", "pytorch_optimizer Lookahead"),
    Row("float32", "pytorch_optimizer Muon"),
    Row("float32", "pytorch_optimizer AdEMAMix"),
    Row("float32", "pytorch_optimizer GaLore"),
    Row("float32", "pytorch_optimizer AdamMini"),
    Row("float32", "pytorch_optimizer ScalableShampoo", refused="PreConditioner is not a type"),
    Row("float32", "pytorch_optimizer Conda", refused="GaLoreProjector is not a type"),
    Row("sparse buffer", "torch AdamW", refused="layout torch.sparse_coo"),
    # Others, only in `make test-full`.
    Row("float32", "torch AdamW", ("torch.compile inductor",)),
    Row("float32", "torch AdamW", ("LoRA", "EMA", "GradScaler")),
    Row("float32", "torch AdamW foreach", ("torch.compile", "EMA")),
    Row("torchao int8", "torchao AdamW4bit", ("LoRA", "GradScaler")),
    Row("torchao int4", "schedulefree AdamW", ("LoRA",)),
    Row("torchao float8 training", "torchao AdamW8bit", ("Trainer with EMA",)),
    Row("torchao NF4", "torch AdamW fused"),
    Row("torchao NF4", "bitsandbytes PagedAdamW8bit", ("LoRA", "GradScaler")),
    Row("torchao float8 training", "torchao AdamWFp8", ("EMA",)),
    Row("torchao int8 training", "torchao AdamW8bit", ("EMA",)),
    Row("torchao BitNet training", "schedulefree AdamW", ("torch.compile",)),
    Row("bitsandbytes Linear4bit", "schedulefree AdamW", ("LoRA", "EMA")),
    Row("bitsandbytes Linear4bit", "torchao AdamW8bit", ("LoRA", "Accelerate")),
    Row("bitsandbytes Linear8bitLt", "pytorch_optimizer SOAP", ("LoRA",)),
    Row("bfloat16", "torchao AdamW8bit"),
    Row("bfloat16", "pytorch_optimizer SAM", ("EMA",)),
    # On 1, 2 and 3 ranks.
    Row("float32", "torch AdamW", ("FSDP2",)),
    Row("bfloat16", "torch AdamW fused", ("FSDP2",)),
    Row("float32", "torch AdamW foreach", ("FSDP2",)),
    Row("float32", "torch Muon", ("FSDP2",)),
    Row("float32", "torchao AdamW4bit", ("FSDP2",)),
    Row("float32", "torchao AdamWFp8", ("FSDP2",)),
    Row("float32", "schedulefree AdamW", ("FSDP2",)),
    Row("float32", "pytorch_optimizer Lion", ("FSDP2",)),
    Row("float32", "torch AdamW", ("LoRA", "FSDP2")),
    Row("torchao float8 training", "torchao AdamW8bit", ("FSDP2",)),
    Row("bitsandbytes Linear4bit", "torch AdamW", ("LoRA", "FSDP2")),
    Row("torchao NF4", "torchao AdamW8bit", ("LoRA", "FSDP2"), ranks=(2, 3)),
    Row("torchao int8 training", "torch AdamW", ("FSDP2",)),
    Row("torchao BitNet training", "torchao AdamW8bit", ("FSDP2",)),
    Row("float32", "pytorch_optimizer SOAP", ("DDP", "EMA")),
    Row("bitsandbytes Linear4bit", "bitsandbytes AdamW8bit", ("LoRA", "DDP")),
)
