"""Each bridge with two ranks of gloo: the leader alone reports, and its metrics decide for all."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
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
    model = trainers.on_all_ranks(own.model)
    state = {**own.state, "trainer": Foreign()}
    with holdfast.CheckpointManager(root, state, sinks=()) as manager:
        for batch in own.data.until(2):
            model(**batch)["loss"].backward()
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


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["accelerate", "ignite", "lightning", "torchtitan", "transformers"]
)
def test_one_rank_reports_for_all(name: str, tmp_path: Path) -> None:
    needed(name)
    found = run_ranks(RANKS, partial(train, name, tmp_path))
    for rank, result in enumerate(found):
        assert result is not None
        told, said = result
        own = [text for text in told if text.startswith("trainer: saved by another")]
        assert len(own) == (rank == 0), told
        assert not any("different values" in text for text in told), told
        if name != "accelerate":  # its manager is the user's, who is told at INFO
            assert said.count("resuming from step 2: ") == (rank == 0), said
    with holdfast.CheckpointManager(tmp_path, {"nothing": {}}, sinks=()) as manager:
        assert 4 in {one.step for one in manager.list()}


LOSSES = {0: [3.0, 2.0, 4.0], 1: [1.0, 5.0, 0.0]}
"""Losses of validations at steps 2, 4 and 6, which each rank has for itself."""


class Begun(list[int]):
    """Steps of the saves that were begun."""

    def __call__(self, event: holdfast.events.Event) -> None:
        if event.kind == "save_started" and event.step not in self:
            self.append(event.step)


def validate_lightning(root: holdfast.Checkpoints, losses: list[float]) -> None:
    import lightning as library

    from holdfast.bridges.lightning import HoldfastCheckpoint

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", losses.pop(0))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = library.Trainer(
        max_steps=7,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        num_sanity_val_steps=0,
        limit_val_batches=1,
        callbacks=[HoldfastCheckpoint(root)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data, held_out = (Loader(torch.ones(rows, 1), batch_size=2) for rows in (8, 4))
    made.fit(Module(), data, held_out)


def validate_transformers(root: holdfast.Checkpoints, losses: list[float]) -> None:
    import transformers as library

    from holdfast.bridges.transformers import CheckpointedMixin

    class Told(library.Trainer):  # type: ignore[name-defined, misc]
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            found = {"val_loss": losses.pop(0) if losses else 9.0}
            self.log(found)
            self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

    class Ours(CheckpointedMixin, Told):
        pass

    library.logging.set_verbosity_error()
    arguments = library.TrainingArguments(
        "unused",
        max_steps=7,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    data = trainers.Rows()
    Ours(trainers.Net(), arguments, train_dataset=data, eval_dataset=data, checkpoints=root).train()


def validate_ignite(root: holdfast.Checkpoints, losses: list[float]) -> None:
    from ignite.engine import Engine, Events

    from holdfast.bridges.ignite import HoldfastRun

    own, evaluator = trainers.Parts(), Engine(lambda *_: None)

    @evaluator.on(Events.COMPLETED)
    def measure(engine: Engine) -> None:
        engine.state.metrics["val_loss"] = losses.pop(0)

    engine = Engine(lambda *_: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: evaluator.run([0]))
    run = HoldfastRun(engine, root, {"model": own.model}, evaluator=evaluator)
    run.run(Loader(torch.ones(14, 1), batch_size=1), max_epochs=1)


VALIDATES = {
    "ignite": validate_ignite,
    "lightning": validate_lightning,
    "transformers": validate_transformers,
}


def validate(name: str, root: Path, rank: int) -> list[int]:
    as_launched(rank)
    begun = Begun()
    checkpoints = holdfast.Checkpoints(root, keep="last:1,best:val_loss", sinks=[begun])
    VALIDATES[name](checkpoints, LOSSES[rank])
    return begun


@pytest.mark.full
@pytest.mark.parametrize("name", VALIDATES)
def test_the_best_validation_is_the_leaders(name: str, tmp_path: Path) -> None:
    """The loss of each rank is another: else they would save different steps, and wait in vain."""
    needed(name)
    assert run_ranks(RANKS, partial(validate, name, tmp_path)) == [[2, 4, 7], [2, 4, 7]]


def mean_of_three(rank: int) -> float:
    """Validate with Lightning on three samples: 0, 1 and 2."""
    import lightning
    from torchmetrics import MeanMetric

    as_launched(rank)
    data = Loader(torch.arange(3.0).view(3, 1), batch_size=1, shuffle=False)

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mean = torch.nn.Linear(1, 1), MeanMetric()

        def validation_step(self, batch: Any, index: int) -> None:
            self.mean.update(batch.mean(), weight=data.own_samples)
            self.log("val_loss", self.mean)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy="ddp", **quiet)
    (found,) = trainer.validate(Module(), data, verbose=False)
    return float(found["val_loss"])


@pytest.mark.full
def test_lightning_counts_each_sample_once_in_a_metric_weighted_by_own_samples() -> None:
    needed("lightning")
    assert run_ranks(RANKS, mean_of_three) == [1.0, 1.0]


UNREAD = {
    "reading the metrics of earlier checkpoints": ("parts", "_read_earlier_metrics"),
    "looking for checkpoints": ("transformers.trainer", "newest_step"),
}
"""What the leader does alone before training, by its name in errors: module and function."""


def go_on_unread(name: str, what: str, root: Path, rank: int) -> str:
    """Train, then resume while the leader cannot read what it needs; return the error."""
    as_launched(rank)
    checkpoints = holdfast.Checkpoints(root, keep="last:1,best:val_loss", sinks=())
    VALIDATES[name](checkpoints, [*LOSSES[rank]])

    def fail(*_: Any) -> Any:
        raise holdfast.errors.AccessDenied("a manifest cannot be read")

    path, function = UNREAD[what]
    module = importlib.import_module(f"holdfast.bridges.{path}")
    assert hasattr(module, function)
    if rank == 0:
        setattr(module, function, fail)
    try:
        VALIDATES[name](checkpoints, [*LOSSES[rank]])
    except holdfast.errors.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "has gone on"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "reading the metrics of earlier checkpoints") for name in VALIDATES),
        ("transformers", "looking for checkpoints"),
    ],
)
def test_a_leader_that_cannot_read_earlier_checkpoints_fails_all_ranks(
    name: str, what: str, tmp_path: Path
) -> None:
    """Else the others would wait for it in their first collective."""
    needed(name)
    leader, follower = run_ranks(RANKS, partial(go_on_unread, name, what, tmp_path))
    assert leader == "AccessDenied: a manifest cannot be read"
    assert str(follower).startswith("RanksFailed: the start of the training failed in:")
    assert f"rank 0, in {what}: AccessDenied: a manifest cannot be read" in str(follower)


class Net(torch.nn.Module):
    """Has dropout, so that each rank draws other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


KILL_AT = 5


def train_ignite(root: Path, kills: bool, rank: int) -> dict[str, Any]:
    """Train eight steps under DDP; all ranks are killed within the sixth if `kills`."""
    from ignite.engine import Engine, Events
    from torch.nn.parallel import DistributedDataParallel

    from holdfast.bridges.ignite import HoldfastRun

    as_launched(rank)
    torch.manual_seed(rank)  # DDP gives all ranks the weights of the first
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = Loader(torch.linspace(0, 1, 128).reshape(32, 4), batch_size=4)

    def update(engine: Engine, batch: torch.Tensor) -> float:
        loss = (model(batch + torch.rand(1)).squeeze() - batch.sum(1)).square().mean()
        loss.backward()
        if kills and engine.state.iteration == KILL_AT + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    engine, losses = Engine(update), dict[int, float]()

    @engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        scheduler.step()
        losses[engine.state.iteration] = engine.state.output

    run = HoldfastRun(
        engine,
        root,
        {"model": model, "optimizer": optimizer, "scheduler": scheduler},
        every="1step",
    )
    run.run(data, max_epochs=2)
    weights = {name: one.tolist() for name, one in model.module.state_dict().items()}
    return {"weights": weights, "losses": losses, "rng": torch.get_rng_state().tolist()}


@pytest.mark.full
def test_a_killed_run_of_ignite_under_ddp_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    needed("ignite")
    whole = run_ranks(RANKS, partial(train_ignite, tmp_path / "whole", False))
    with pytest.raises(AssertionError, match="ended: -9"):
        run_ranks(RANKS, partial(train_ignite, tmp_path / "run", True))
    resumed = run_ranks(RANKS, partial(train_ignite, tmp_path / "run", False))
    for one, other in zip(resumed, whole, strict=True):
        assert one is not None
        assert other is not None
        losses = one.pop("losses")
        assert 0 < len(losses) < 8
        assert losses == {step: other["losses"][step] for step in losses}
        assert one == {name: other[name] for name in one}
