"""Each bridge with two ranks of gloo: the leader alone reports, and its metrics decide for all."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from bridges import trainers
from bridges.frameworks import needed
from distributed.run import run_ranks
from holdfast.data import Loader
from marks import full

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, version by version
RANKS = 2


class Foreign:
    """The counters of a trainer that no bridge is to."""

    def state_dict(self) -> dict[str, Any]:
        return {"of": "another"}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def as_launched(rank: int) -> None:
    """Say what torchrun says to each process; the group is open already."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    warnings.simplefilter("ignore")


def begin(root: Path) -> None:
    """Train two steps without a bridge."""
    own = trainers.Parts()
    state = {**own.state, "trainer": Foreign()}
    with holdfast.CheckpointManager(root, state, sinks=()) as manager:
        for batch in own.data.until(2):
            own.model(**batch)["loss"].backward()
            own.optimizer.step()
            own.scheduler.step()
            own.optimizer.zero_grad()
        manager.save(2, wait=True)


def train(name: str, root: Path, rank: int) -> tuple[list[str], str]:
    """Go on under a trainer; return the warnings and what was written to stderr."""
    as_launched(rank)
    begin(root)
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainers.TRAINERS[name](root, 4)
    return told, said.getvalue()


@pytest.mark.parametrize(
    "name", ["ignite", *full("lightning", "transformers", "accelerate", "torchtitan")]
)
def test_one_rank_reports_for_all(name: str, tmp_path: Path) -> None:
    needed(name)
    found = run_ranks(RANKS, partial(train, name, tmp_path))
    for rank, result in enumerate(found):
        assert result is not None
        told, said = result
        own = [text for text in told if text.startswith("trainer: saved by another")]
        assert len(own) == (rank == 0), told
        if name != "accelerate":  # its manager is the user's, who is told at INFO
            assert said.count("goes on at step 2: resumed") == (rank == 0), said
    with holdfast.CheckpointManager(tmp_path, {"nothing": {}}, sinks=()) as manager:
        assert 4 in {one.step for one in manager.list()}


def validate(root: Path, rank: int) -> list[int]:
    """Train under Lightning, with a loss of validation that each rank has for itself."""
    as_launched(rank)
    import lightning as library

    from holdfast.bridges.lightning import HoldfastCheckpoint

    losses = iter([[3.0, 2.0, 4.0], [1.0, 5.0, 0.0]][rank])

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", next(losses))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    begun: list[int] = []
    checkpoints = holdfast.Checkpoints(
        root,
        keep="last:1,best:val_loss",
        sinks=[lambda event: begun.append(event.step) if event.kind == "save_started" else None],
    )
    library.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        callbacks=[HoldfastCheckpoint(checkpoints)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1,
        max_steps=7,
    ).fit(Module(), Loader(torch.randn(8, 1), batch_size=2), Loader(torch.ones(4, 1), batch_size=2))
    return begun


@pytest.mark.full
def test_the_best_validation_is_the_leaders(tmp_path: Path) -> None:
    """The loss of each rank is another: else they would save different steps, and wait in vain."""
    needed("lightning")
    assert run_ranks(RANKS, partial(validate, tmp_path)) == [[2, 4, 7], [2, 4, 7]]
