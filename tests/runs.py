"""A small training run for tests: a model with buffers, Adam, a schedule, and plain state."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.events import Event
from holdfast.manager import CheckpointManager
from holdfast.ownership.claim import Claim
from holdfast.ownership.deletion import delete_checkpoint
from holdfast.ownership.leases import Readers
from holdfast.root.catalog import Catalog
from holdfast.root.commit import SaveAttempt, create_attempt
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore


def be_a_script() -> None:
    """In a process of a fork server: fork the workers of loaders, as a script does where that is
    the default. A server of their own imports torch anew.
    """
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)


@dataclass
class Run:
    """The live objects of a run, and one training step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    counters: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "counters": self.counters,
        }

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counters["step"] += 1

    def manager(self, root: str | Path | Store, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, self.state, **options)

    def bits(self) -> dict[str, bytes]:
        """Every tensor of the state as bytes, by name; equal dicts mean equal bits."""
        tensors = dict(self.model.state_dict())
        for index, slots in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"optimizer.{index}.{name}": value for name, value in slots.items()}
        bits = {
            name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, value in tensors.items()
        }
        return bits | {"scheduler": repr(self.scheduler.state_dict()).encode()}


def new_run(seed: int = 0, width: int = 16) -> Run:
    """A run before its first step; equal seeds give equal bits."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return Run(model, optimizer, scheduler, {"step": 0})


class Recorder:
    """An event sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Event]:
        """Events of one kind, oldest first."""
        return [event for event in self.events if event.kind == kind]


class ReadsNoted(MemoryStore):
    """Notes the keys of everything that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.keys.append(key)
        return super().get(key, start, nbytes)

    def manifests(self) -> list[str]:
        """Folders whose manifest was read since the last call, each time that it was."""
        keys, self.keys = self.keys, []
        return [key.split("/")[0] for key in keys if key.endswith("/manifest.json")]


def remove_folder(store: Store, folder: str) -> None:
    """Remove a folder with everything in it, as a user might; Holdfast never does."""
    store.delete_many([info.key for info in store.list(f"{folder}/")])
    store.delete(f"{folder}/")


def begun(store: Store, *, label: str, epoch: int, sequence: int) -> SaveAttempt:
    """Begin an attempt under the claim of that epoch in the root, if there is one."""
    writer = Catalog(store).writer(epoch)
    nonce = "0" * 32 if writer is None else writer.nonce
    return create_attempt(store, label=label, epoch=epoch, nonce=nonce, sequence=sequence)


def retracted(store: Store, folder: str, **more: Any) -> bool:
    """Delete a checkpoint in the name of epoch 1, as gc would; whether it is gone."""
    claim = Claim(epoch=1, nonce="", resumed_from=None)
    removal = delete_checkpoint(
        store, folder, claim=claim, reason="test", readers=Readers(store), unclear={folder}, **more
    )
    return removal.is_done
