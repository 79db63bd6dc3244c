"""Predictions: in the order of the samples, by parts, and never those of an earlier call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from distributed.run import run_ranks
from holdfast.data import Buckets, DataRanks, Loader, Stream, Weighted
from holdfast.errors import RanksFailed, UsageError
from holdfast.train import Predictions, Trainer
from train.small import make

COUNT = 23


def samples(count: int = COUNT) -> list[Tensor]:
    return [torch.full((4,), float(number)) for number in range(count)]


def loader(**options: Any) -> Loader:
    return Loader(samples(), **{"batch_size": 4, "shuffle": False, **options})


class Numbers:
    """A source that goes on where it was left."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < COUNT:
            self.at += 1
            yield samples()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream(**options: Any) -> Stream:
    return Stream(Numbers(), **{"batch_size": 4, **options})


def begun(data: Any) -> Any:
    """A loader of which an epoch, and a batch of the next, were taken."""
    for _ in data:
        pass
    next(iter(data))
    return data


def reader(root: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    return Trainer(model, checkpoints=root, progress=False, log=False, **options)


def expected(trainer: Trainer) -> Tensor:
    with torch.no_grad():
        return trainer.model.eval()(torch.stack(samples()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "data",
    [
        loader(),
        loader(num_workers=1),
        DataLoader(samples(), batch_size=4),
        [*DataLoader(samples())],
        DataLoader(
            samples(), batch_sampler=BatchSampler(SequentialSampler(samples()), 4, drop_last=False)
        ),
        begun(stream()),
        begun(loader(batch_size={0: 4, 1: 2})),
    ],  # type: ignore[arg-type]
    ids=["Loader", "workers", "torch", "list", "batch_sampler", "Stream", "sizes"],
)
def test_predictions_are_in_the_order_of_the_samples(data: Any, tmp_path: Path) -> None:
    trainer = reader()
    found = trainer.predict(data, to=tmp_path / "out", batches_per_part=2)
    assert found.num_samples == COUNT
    assert trainer.model.training
    torch.testing.assert_close(found.load()["output"], expected(trainer))
    read = [load_file(path)["output"] for path in found.files]
    assert torch.equal(torch.cat(read), found.load()["output"])
    assert len(found.files) == -(-(COUNT if isinstance(data, list) else 6) // 2)
    assert [part["output"].shape for part in Predictions.of(tmp_path / "out")] == [
        each.shape for each in read
    ]


class Killed(BaseException):
    pass


def dies(model: nn.Module, batch: Tensor) -> Tensor:
    if batch[0, 0] >= 12:
        raise Killed
    return model(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_folder_with_predictions_is_refused(is_killed: bool, tmp_path: Path) -> None:
    """They may be of other data, weights or outputs, and those of a killed call are not all."""
    trainer, folder = reader(), tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    if is_killed:
        with pytest.raises(Killed):
            trainer.predict(loader(), to=folder, outputs=dies, batches_per_part=1)
        with pytest.raises(UsageError, match="no complete predictions"):
            Predictions.of(folder)
    else:
        trainer.predict(loader(), to=folder, batches_per_part=1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UsageError, match="another folder"):
        trainer.predict(loader(), to=folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_names_and_dtypes_of_outputs_are_kept(tmp_path: Path) -> None:
    def outputs(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"sum": batch.sum(1).bfloat16(), "half": model(batch).half()}

    found = reader().predict(loader(), to=tmp_path, outputs=outputs, batches_per_part=2).load()
    assert found["sum"].tolist() == [4.0 * number for number in range(COUNT)]
    assert found["half"].dtype == torch.float16


def test_a_checkpoint_predicts_with_its_average(tmp_path: Path) -> None:
    trained = make(tmp_path / "run", ema=0.5)
    trained.fit(4)
    weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
    first = trained.predict(loader(), to=tmp_path / "first", which="step=2").load()["output"]
    now = trained.predict(loader(), to=tmp_path / "now").load()["output"]
    plain = trained.predict(loader(), to=tmp_path / "plain", use_ema=False).load()["output"]
    assert not torch.equal(first, now)
    assert not torch.equal(now, plain)
    assert all(
        torch.equal(weights[name], value) for name, value in trained.model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (loader(shuffle=True), "shuffle=False"),
        (DataLoader(samples(), shuffle=True), "shuffle=False"),  # type: ignore[arg-type]
        (loader(drop_last=True), "drop_last"),
        (DataLoader(samples(), batch_size=4, drop_last=True), "drop_last"),  # type: ignore[arg-type]
        (
            DataLoader(
                TensorDataset(torch.ones(4, 4)),
                sampler=DistributedSampler(samples(), 2, 0),  # type: ignore[arg-type]
            ),
            r"holdfast\.data\.Loader",
        ),
        (Loader(samples(), sampler=Weighted([1.0] * COUNT), batch_size=4), "leave the sampler out"),
        (
            Loader(samples(), batch_sampler=Buckets([1] * COUNT, batch_size=4)),
            "leave the sampler out",
        ),
        (loader(batches_per_epoch=2), "batches_per_epoch"),
        (
            DataLoader(samples(), sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),  # type: ignore[arg-type]
            "leave the sampler out",
        ),
        (
            DataLoader(
                samples(),  # type: ignore[arg-type]
                batch_sampler=BatchSampler(RandomSampler(samples()), 4, drop_last=False),
            ),
            "leave the sampler out",
        ),
        (
            DataLoader(
                samples(),  # type: ignore[arg-type]
                batch_sampler=BatchSampler(SequentialSampler(samples()), 4, drop_last=True),
            ),
            "drop_last",
        ),
        (stream(shuffle=8), "shuffle=False"),
        (stream(drop_last=True), "drop_last"),
        (stream(ranks=DataRanks(0, 2)), r"holdfast\.data\.Loader"),
        (3, "data=3: must be a loader"),
        ([], "no batch"),
        ([[1, 2]], "give outputs="),
    ],
)
def test_a_loader_whose_samples_could_not_be_matched_is_refused(
    data: Any, message: str, tmp_path: Path
) -> None:
    give = (lambda model, batch: batch) if isinstance(data, list) else None
    with pytest.raises(UsageError, match=message):
        reader().predict(data, to=tmp_path / "out", outputs=give)


def _predict(folder: Path, kind: str, rank: int) -> list[list[float]]:
    data: Any = loader(batch_size=2) if kind == "Loader" else DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]
    found = reader(optimizer=None).predict(data, to=folder, batches_per_part=2)
    return found.load()["output"].tolist()


@pytest.mark.parametrize("kind", ["Loader", "torch"])
def test_several_ranks_write_what_one_would(kind: str, tmp_path: Path) -> None:
    """The last batch has fewer samples than there are ranks, too."""
    alone = expected(reader())
    for rows in run_ranks(4, partial(_predict, tmp_path / "out", kind)):
        torch.testing.assert_close(torch.tensor(rows), alone)


def _predict_nowhere(folder: Path, rank: int) -> str:
    with pytest.raises(OSError if rank == 0 else RanksFailed) as raised:
        _predict(folder, "Loader", rank)
    return str(raised.value)


@pytest.mark.full
def test_a_leader_that_cannot_write_says_so_to_all(tmp_path: Path) -> None:
    """Else the others would wait for it until the timeout of the group."""
    (tmp_path / "file").touch()
    leader, follower = run_ranks(2, partial(_predict_nowhere, tmp_path / "file" / "out"))
    what = "preparing the folder of predictions"
    assert f"rank 0, in {what}: NotADirectoryError: {leader}" in follower
