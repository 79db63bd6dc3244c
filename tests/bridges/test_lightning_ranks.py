"""Lightning on several ranks, under DDP and FSDP2: kills, other numbers of ranks, refusals."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Dataset

from bridges import forks
from bridges.frameworks import needed
from holdfast.data import DataRanks, Loader
from holdfast.errors import UsageError
from holdfast.launched import present_ranks
from holdfast.weights import load_weights
from marks import full

lightning = needed("lightning")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch.distributed.checkpoint import state_dict as gathering  # noqa: E402

from holdfast.bridges.lightning import HoldfastCheckpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
BATCH = 12
"""Samples of a step, of all ranks."""
ROWS = 60
EPOCHS = 3


STRATEGIES: dict[str, Any] = {
    "ddp": lambda num_ranks: DDPStrategy(),
    "fsdp2": lambda num_ranks: ModelParallelStrategy(num_ranks, 1, False),
    "tensor parallel": lambda num_ranks: ModelParallelStrategy(),
}


class Rows(Dataset[Any]):
    """Rows with noise that is drawn anew each time, and their numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(-1, 1, 4) * (index % 7) + torch.randn(4)
        return x, x.sum().reshape(1), index


class Sharded(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Dropout, a scheduler, and weights that `fully_shard` divides where there is a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.samples: dict[int, list[int]] = {}

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            if mesh.size() != self.trainer.world_size:
                plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
                return
            for part in (self.net[0], self.net[3], self.net):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.samples[self.global_step] = batch[2].tolist()
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def make(strategy: str, *callbacks: Any, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1, verbose=False)
    num_ranks = present_ranks().world_size
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "devices": num_ranks,
            "strategy": STRATEGIES[strategy](num_ranks),
            "callbacks": [*callbacks],
            "max_epochs": EPOCHS,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def whole(value: Any) -> Any:
    """Copy nested values, with DTensors gathered; all ranks call it."""
    if isinstance(value, dict):
        return {name: whole(one) for name, one in value.items()}
    if not isinstance(value, Tensor):
        return value
    return getattr(value, "full_tensor", lambda: value)().detach().clone()


def collect(made: Any) -> dict[str, Any]:
    """Return what is compared of a trained run, of all ranks."""
    module = made.lightning_module
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, module.samples)
    return {
        "model": whole(module.state_dict()),
        "optimizer": whole(made.optimizers[0].state_dict()["state"]),
        "rate": made.optimizers[0].param_groups[0]["lr"],
        "step": made.global_step,
        "rng": torch.get_rng_state(),
        "samples": {step: [row for one in of_all for row in one[step]] for step in module.samples},
    }


def data(strategy: str) -> Loader:
    if strategy == "tensor parallel":
        return Loader(Rows(), BATCH, seed=3, ranks=DataRanks(0, 1))
    return Loader(Rows(), BATCH // present_ranks().world_size, seed=3)


def fit(strategy: str, root: Path, *callbacks: Any, **options: Any) -> Any:
    ckpt_path = options.pop("ckpt_path", None)
    keep = "last:3,best:val_loss"
    saving = HoldfastCheckpoint(root, every="1step", keep=keep)
    made = make(strategy, saving, *callbacks, **options)
    made.fit(Sharded(), data(strategy), data(strategy), ckpt_path=ckpt_path)
    return made


def job(strategy: str, root: Path, say: forks.Say, **options: Any) -> dict[str, Any]:
    # What Lightning would call to copy or gather the weights and moments of all ranks.
    for name in ("get_model_state_dict", "get_optimizer_state_dict"):
        setattr(gathering, name, None)
    started = Started()
    found = collect(fit(strategy, root, started, **options))
    return {"start": started.state, **found}


class Started(Callback):  # type: ignore[misc]
    """Keeps the state with which a training begins."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.state = collect(trainer)


def end_of(strategy: str, root: Path, say: forks.Say) -> dict[str, Any]:
    """Return what does not depend on where a run was resumed."""
    found = job(strategy, root, say)
    del found["samples"], found["start"]
    return found


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_kills_of_one_or_all_ranks_change_no_bit(strategy: str, kills: int, tmp_path: Path) -> None:
    """I7, R1."""
    forks.assert_kills_of_ranks_change_nothing(
        partial(end_of, strategy), tmp_path, 2, kills=kills, seed=kills
    )


def train(strategy: str, root: Path, num_ranks: int, until: int) -> dict[str, Any]:
    """Train on some ranks until a step; return the state and the samples of each step."""
    of_run = partial(job, strategy, max_steps=until)
    assert forks.finish_ranks(of_run, root, num_ranks) == [0] * num_ranks
    found: dict[str, Any] = forks.result(root, 0)["found"]
    return found


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp2", *full("ddp")])
def test_other_numbers_of_ranks_have_the_same_bits_and_the_order_of_samples(
    strategy: str, tmp_path: Path
) -> None:
    """I7."""
    order = [batch[2].tolist() for batch in Loader(Rows(), BATCH, seed=3).until(11)]
    samples: dict[int, list[int]] = {}
    last = None
    for num_ranks, until in ((2, 4), (1, 7), (3, 11)):
        found = train(strategy, tmp_path / "run", num_ranks, until)
        assert found["step"] == until
        samples |= found["samples"]
        if last is not None:
            names = ("model", "optimizer", "rate", "step")
            forks.assert_equal(
                {name: found["start"][name] for name in names}, {name: last[name] for name in names}
            )
        last = found
    assert [samples[step] for step in range(11)] == order


def visit(root: Path, say: forks.Say) -> dict[str, Any]:
    """Train under FSDP2, and give its checkpoints to each function that takes one."""
    made = fit("fsdp2", root, max_steps=8)
    expected = {name: load_weights(f"{root}@{name}") for name in ("best", "latest", "step=6")}
    wrong, module = [], Sharded()
    for function, path, which in (
        ("test", "best", "best"),
        ("validate", "last", "latest"),
        ("test", f"{root}@step=6", "step=6"),
    ):
        other = make("fsdp2", HoldfastCheckpoint(root))
        module = Sharded()
        getattr(other, function)(module, data("fsdp2"), ckpt_path=path, verbose=False)
        found = whole(dict(module.state_dict()))
        wrong += [
            f"{path}: {n}" for n, one in found.items() if not torch.equal(one, expected[which][n])
        ]
    rolled = Started()
    again = fit("fsdp2", root, rolled, ckpt_path=f"{root}@step=6", max_steps=8)
    assert rolled.state["step"] == 6
    forks.assert_equal(rolled.state["model"], dict(expected["step=6"]))
    forks.assert_equal(collect(again)["model"], collect(made)["model"])
    taken = Started()
    fit("fsdp2", root, taken, ckpt_path="last", max_steps=8)
    for name in ("file", "folder"):
        made.strategy._save_distributed_checkpoint = name == "folder"
        own, begun = root.with_name(name), Started()
        made.save_checkpoint(own)
        fit("fsdp2", root.with_name(f"of-{name}"), begun, ckpt_path=own, max_steps=9)
        ends = {**collect(made), "samples": {}, "rng": begun.state["rng"]}
        forks.assert_equal(begun.state, ends)
        assert own.is_dir() == (name == "folder")
    return {"wrong": wrong}


@pytest.mark.full
def test_lightnings_own_words_for_checkpoints_work_under_fsdp2(tmp_path: Path) -> None:
    assert forks.finish_ranks(visit, tmp_path / "run", 2) == [0, 0]
    assert forks.result(tmp_path / "run", 0)["found"] == {"wrong": []}


def mistake(root: Path, say: forks.Say) -> dict[str, Any]:
    """Give the parts of one model other data."""
    made = make("tensor parallel", HoldfastCheckpoint(root))
    with pytest.raises(UsageError, match="rank 0 of 1"):
        made.fit(Sharded(), Loader(Rows(), 2))
    return {}


def test_ranks_with_parts_of_one_model_need_the_same_data(tmp_path: Path) -> None:
    assert forks.finish_ranks(mistake, tmp_path / "run", 2) == [0, 0]


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_other_shards_are_refused_by_the_name_of_the_strategy(kind: Any, tmp_path: Path) -> None:
    """Called as Lightning does, which refuses these strategies itself without a GPU."""
    made = lightning.Trainer(accelerator="cpu", logger=False)
    made._accelerator_connector.strategy = object.__new__(kind)
    match = f"{kind.__name__} is not supported: use ModelParallelStrategy"
    with pytest.raises(UsageError, match=match) as error:
        HoldfastCheckpoint(tmp_path).setup(made, Sharded(), "fit")
    assert ("holdfast import" in str(error.value)) is (kind is DeepSpeedStrategy)
