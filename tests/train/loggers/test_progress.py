"""The progress bar: on a terminal only."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

from holdfast.data import Loader
from holdfast.store.memory import MemoryStore
from holdfast.train import ProgressBar, Trainer


def shown(store: MemoryStore, *, is_terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=is_terminal, width=100, legacy_windows=False
    )
    model = nn.Linear(2, 1)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader([torch.ones(2)] * 4, batch_size=1),
        loss=lambda model, batch: model(batch).mean(),
        checkpoints=store,
        callbacks=[ProgressBar(console)],
        log=False,
        progress=False,
    )
    trainer.fit(6)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_how_far_training_is_and_that_a_rerun_has_nothing_to_do() -> None:
    store = MemoryStore()
    first = shown(store, is_terminal=True)
    assert "6/6" in first
    assert "epoch 1" in first
    assert "loss" in first
    assert "6step is reached already, at step 6" in shown(store, is_terminal=True)


def test_what_is_no_terminal_sees_nothing() -> None:
    assert shown(MemoryStore(), is_terminal=False) == ""
