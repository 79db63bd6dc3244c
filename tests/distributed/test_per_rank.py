"""R38: real ranks get their own state back; what lies on several of them cannot be that of one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from distributed.run import run_ranks
from holdfast import CheckpointManager, Checkpoints, PerRank, errors
from holdfast.data import Loader
from holdfast.train import Trainer


def save(folder: Path, rank: int) -> None:
    own: dict[str, Any] = {"t": torch.full((3,), float(rank)), "n": [rank]}
    with CheckpointManager(folder, {"model": nn.Linear(2, 2), "own": PerRank(own)}) as manager:
        manager.save(1, wait=True)


def load(folder: Path, rank: int) -> list[float]:
    own: dict[str, Any] = {"t": torch.zeros(3), "n": []}
    with CheckpointManager(folder, {"model": nn.Linear(2, 2), "own": PerRank(own)}) as manager:
        found = manager.resume()
    assert found is not None
    has_note = any("modulo the old number" in note for note in found.notes)
    assert has_note == (dist.get_world_size() != 2)
    return [*own["t"].tolist(), *own["n"]]


def test_each_real_rank_gets_its_own_back(tmp_path: Path) -> None:
    run_ranks(2, partial(save, tmp_path))
    for num_ranks in (2, 3):
        expected = [[float(rank % 2)] * 3 + [rank % 2] for rank in range(num_ranks)]
        assert run_ranks(num_ranks, partial(load, tmp_path)) == expected


def follow_the_page(root: Path, rank: int) -> list[float]:
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n((?:(?!```).)*PerRank.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {"torch": torch, "model": nn.Linear(2, 2)}
    given["optimizer"] = torch.optim.AdamW(given["model"].parameters())
    exec(code.replace("/shared/runs/gpt", str(root)), given)
    queue = given["queue"]
    with given["manager"] as manager:
        queue["lengths"].fill_(rank)
        queue["samples"].append(rank)
        manager.save(1, wait=True)
        queue["lengths"].zero_()
        queue["samples"].clear()
        manager.load()
    return [*queue["samples"], float(queue["lengths"].mean())]


def test_the_page_shows_it(tmp_path: Path) -> None:
    assert run_ranks(2, partial(follow_the_page, tmp_path)) == [[0, 0.0], [1, 1.0]]


def save_sharded(folder: Path, rank: int) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model)
    with CheckpointManager(folder, {"model": PerRank(model)}) as manager:
        try:
            manager.save(1, wait=True)
        except errors.UnsupportedState as error:
            return str(error)
    return "committed"


def test_a_tensor_that_lies_on_several_ranks_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(2, partial(save_sharded, tmp_path)):
        assert "model.weight: a DTensor lies on several ranks, and is in a PerRank" in str(said)


def train(root: Path, until: str, rank: int) -> list[int]:
    queue = [rank]
    data = Loader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer = Trainer(
        lambda: nn.Linear(2, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=data,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        state={"queue": PerRank(queue)},
        checkpoints=Checkpoints(root, every="1step"),
        progress=False,
    )
    if until == "4step":
        queue.clear()
    trainer.fit(until)
    return queue


def test_a_trainer_takes_the_mark_too(tmp_path: Path) -> None:
    for until in ("2step", "4step"):
        assert run_ranks(2, partial(train, tmp_path, until)) == [[0], [1]]
