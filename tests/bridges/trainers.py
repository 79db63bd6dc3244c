"""One training under each trainer: same model, optimizer, scheduler, data, and so the same bits.

Each function trains in a root, from wherever that stands, until a step. It is as a user of that
trainer would write it, and imports nothing of the others.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast
from holdfast.data import Loader
from holdfast.launched import present_ranks
from holdfast.state.components import OF_TRAINERS

Root = Path | holdfast.Tiered
EPOCHS, BATCHES = 3, 4
GOAL = EPOCHS * BATCHES
WARMUP = 20


def on_all_ranks(model: nn.Module) -> nn.Module:
    """Return the model as it is trained: in DDP if there are several ranks."""
    if not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return model
    return nn.parallel.DistributedDataParallel(model)


class Rows(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 4 * BATCHES - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((4,), index / 10) + torch.rand(4)
        return {"x": x, "labels": x.sum()}


class Net(nn.Module):
    """As models of transformers are called, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / WARMUP)


def data() -> Loader:
    return Loader(Rows(), batch_size=4, seed=3)


def seed() -> None:
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(1)


class Parts:
    """What each script begins with."""

    def __init__(self) -> None:
        seed()
        self.model = Net()
        self.optimizer = optimizer_of(self.model)
        self.scheduler = scheduler_of(self.optimizer)
        self.data = data()
        seed()  # as trainers do that seed by themselves

    @property
    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "data")}


EVERY = "2step"
TAKES_OVER = holdfast.StateHooks(one_sided=OF_TRAINERS.__contains__)


def plain(root: Root, until: int) -> None:
    own, stop = Parts(), holdfast.Stop()
    with (
        stop,
        holdfast.CheckpointManager(
            root, own.state, every=EVERY, hooks=TAKES_OVER, stop=stop
        ) as manager,
    ):
        found = manager.resume()
        step = found.step if found else 0
        own.model.train()
        for batch in own.data.until(until, start=step):
            own.model(**batch)["loss"].backward()
            own.optimizer.step()
            own.scheduler.step()
            own.optimizer.zero_grad()
            step += 1
            manager.maybe_save(step)
            if stop.requested:
                break
        manager.save(step, wait=True)


def trainer(root: Root, until: int) -> None:
    from holdfast.train import Trainer

    own = Parts()
    Trainer(
        own.model,
        optimizer=own.optimizer,
        scheduler=own.scheduler,
        data=own.data,
        loss=lambda model, batch: model(**batch)["loss"],
        checkpoints=holdfast.Checkpoints(root, every=EVERY),
        seed=1,
        log=False,
        progress=False,
    ).fit(f"{until}step")


def lightning(root: Root, until: int) -> None:
    import lightning as library

    from holdfast.bridges.lightning import HoldfastCheckpoint

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.inner(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            scheduler = {"scheduler": scheduler_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    seed()
    module = Module()
    seed()
    world_size = present_ranks().world_size
    library.Trainer(
        max_epochs=EPOCHS,
        max_steps=until,
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        callbacks=[HoldfastCheckpoint(root, every=EVERY, model="inner")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data())


def transformers(root: Root, until: int) -> None:
    import transformers as library

    from holdfast.bridges.transformers import CheckpointedTrainer

    library.logging.set_verbosity_error()
    own = Parts()
    CheckpointedTrainer(
        own.model,
        library.TrainingArguments(
            str(root) if isinstance(root, Path) else tempfile.gettempdir(),  # nothing is written
            max_steps=until,
            per_device_train_batch_size=4,
            max_grad_norm=0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        ),
        train_dataset=Rows(),
        optimizers=(own.optimizer, own.scheduler),
        data=own.data,
        checkpoints=holdfast.Checkpoints(root, every=EVERY),
    ).train()


def accelerate(root: Root, until: int) -> None:
    import accelerate as library

    from holdfast.bridges.accelerate import state

    library.state.AcceleratorState._reset_state(True)
    library.state.GradientState._reset_state()
    own, accelerator = Parts(), library.Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(own.model, own.optimizer, own.scheduler)
    components = state(accelerator, data=own.data)
    stop = holdfast.Stop()
    with (
        stop,
        holdfast.CheckpointManager(
            root, components, every=EVERY, hooks=TAKES_OVER, stop=stop
        ) as manager,
    ):
        found = manager.resume()
        step = found.step if found else 0
        for batch in own.data.until(until, start=step):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            manager.maybe_save(step)
            if stop.requested:
                break
        manager.save(step, wait=True)


class _Enough(Exception):
    """Ends a training as an error does."""


def ignite(root: Root, until: int) -> None:
    from ignite.engine import Engine, Events

    from holdfast.bridges.ignite import HoldfastRun

    own = Parts()
    model = on_all_ranks(own.model)

    def update(engine: Engine, batch: Any) -> None:
        if engine.state.iteration > until:
            raise _Enough
        model(**batch)["loss"].backward()
        own.optimizer.step()
        own.optimizer.zero_grad()

    engine = Engine(update)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: own.scheduler.step())
    engine.logger.setLevel("CRITICAL")
    state = {name: one for name, one in own.state.items() if name != "data"}
    with contextlib.suppress(_Enough):
        HoldfastRun(engine, root, state, every=EVERY).run(own.data, max_epochs=EPOCHS)


class TitanTrain:
    """What torchtitan's Trainer keeps of itself, and its loop around the checkpoint manager."""

    def __init__(self, root: Path, goal: int) -> None:
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

        from holdfast.bridges.torchtitan import HoldfastManager

        own = Parts()
        self.step = self.ntokens_seen = 0
        self.model, self.data, self.goal = own.model, own.data, goal
        config = default_adamw(lr=0.01, weight_decay=0.1)
        config.implementation = "for-loop"  # fused kernels round otherwise
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=WARMUP).build(
            optimizers=self.optimizers, training_steps=WARMUP
        )
        self.checkpointer = HoldfastManager.Config(
            enable=True, folder=str(root), interval=2, keep_latest_k=0
        ).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder="",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        model = on_all_ranks(self.model)
        for batch in self.data.until(self.goal, start=self.step):
            self.step += 1
            self.ntokens_seen += 16  # as many on each rank: torchtitan's batches are whole
            model(**batch)["loss"].backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.step, last_step=self.step == self.goal)


def torchtitan(root: Root, until: int) -> None:
    assert isinstance(root, Path), "torchtitan names its folder in text"
    one = TitanTrain(root, until)
    try:
        one.train()
    finally:
        one.checkpointer.close()


TRAINERS: dict[str, Callable[[Root, int], None]] = {
    "plain": plain,
    "trainer": trainer,
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "ignite": ignite,
    "torchtitan": torchtitan,
}


def ending(root: Path) -> dict[str, Any]:
    """What the newest checkpoint of a root holds, but for what is the trainer's own."""
    own = Parts()
    with holdfast.CheckpointManager(root, own.state, hooks=TAKES_OVER, sinks=()) as manager:
        found = manager.load()
    state: dict[str, Any] = {name: one.state_dict() for name, one in own.state.items()}
    for group in state["optimizer"]["param_groups"]:
        del group["foreach"], group["fused"]  # how a step is computed: torchtitan sets them
    place = own.data
    state["data"] = place.epoch * BATCHES + place.batch  # the end of an epoch has two forms
    others = str((np.random.get_state(), random.getstate()))
    return {"step": found.step, **state, "torch": torch.get_rng_state(), "others": others}
