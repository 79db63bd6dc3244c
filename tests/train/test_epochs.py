"""Ends of epochs of data that are not holdfast's: in time where a length or the data tells them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from each import each
from holdfast import CheckpointManager
from holdfast.policy.triggers import On
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Metrics, Trainer, Training, Validation
from marks import full
from train.small import make

BATCHES = 4


class Others:
    """Batches of somebody else, with a position; each is drawn when it is asked for."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.batch < BATCHES:
            self.batch += 1
            yield torch.full((2, 4), self.epoch + self.batch / 10) + torch.rand(1) * random.random()
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


class WithLength(Others):
    def __len__(self) -> int:
        return BATCHES


class Telling(Others):
    @property
    def at_epoch_end(self) -> bool:
        return self.batch == BATCHES


class TellingWrongly(Others):
    @property
    def at_epoch_end(self) -> bool:
        return self.batch in (1, BATCHES)


class InSamples(Others):
    def __len__(self) -> int:
        return 3  # of something else


class Left(Others):
    def __len__(self) -> int:
        return BATCHES - self.batch


class TooLong(Others):
    def __len__(self) -> int:
        return BATCHES + 1


class NoLength(Others):
    def __len__(self) -> int:
        raise TypeError


class Ends(Callback):
    """Notes the step of each end of an epoch, and of each validation."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.validated: list[int] = []

    def epoch_end(self, training: Training) -> None:
        self.epochs.append(training.counters.step)

    def validation_start(self, training: Training, name: str) -> None:
        self.validated.append(training.counters.step)


def trainer(root: Path, data: Any, *callbacks: Callback, **options: Any) -> Trainer:
    given = {"every": "1ep", **options}
    return make(root, data=data, callbacks=callbacks, **given)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelname != "INFO"]


def saves(root: Path) -> list[tuple[int, int | None, int | None]]:
    with CheckpointManager(root, {"nothing": {}}) as manager:
        stamps = [checkpoint.timestamp for checkpoint in reversed(manager.list())]
    return [(now.step, now.epoch, now.step_in_epoch) for now in stamps]


@each("kind", [WithLength, Telling])
@each("every", ["1ep", On("epoch")])
def test_what_is_counted_in_epochs_comes_with_their_last_step(
    kind: type[Others], every: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saves, validations, hooks and counts within the epoch, of data with a length or an
    `at_epoch_end`."""
    root, ends = tmp_path_factory.mktemp("run"), Ends()
    validate = Validation(data=[torch.ones(2, 4)], every="1ep")
    trainer(root, kind(), ends, every=every, validate=validate).fit(9)
    assert saves(root) == [(4, 1, 0), (8, 2, 0), (9, 2, 1)]
    assert ends.epochs == [4, 8]
    assert ends.validated == [4, 8, 9]


@pytest.mark.parametrize(
    "kind",
    [WithLength, TellingWrongly, InSamples, *full(Telling, Left, TooLong, NoLength, Others)],
)
def test_every_batch_is_trained_on_whatever_the_data_says(
    kind: type[Others], tmp_path: Path
) -> None:
    """A wrong length loses no batch and no position: straight and resumed training end alike, and
    as with data that says nothing."""
    silent = trainer(tmp_path / "silent", Others())
    silent.fit(11)
    straight = trainer(tmp_path / "straight", kind())
    straight.fit(11)
    for step in (1, 3, 4, 5, 8, 11):
        parts = trainer(tmp_path / "parts", kind())
        parts.fit(step)
    assert leaf_digests(straight.state) == leaf_digests(parts.state)
    for name, value in silent.model.state_dict().items():
        assert torch.equal(value, straight.model.state_dict()[name]), name
    assert (straight.counters.epoch, straight.counters.batch) == (2, 3)


@each("kind", [TellingWrongly, InSamples, Left])
def test_a_wrong_length_is_told_once(
    kind: type[Others], tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says where the end was expected."""
    caplog.clear()
    trainer(tmp_path_factory.mktemp("run"), kind()).fit(9)
    said = [text for text in messages(caplog) if "did not end" in text]
    assert len(said) == 1
    assert kind.__name__ in said[0]


@each("kind", [Others, TooLong, NoLength])
def test_data_that_does_not_tell_its_end_is_warned_of(
    kind: type[Others], tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end shows when more is asked for: one warning says that, and what to give the data."""
    caplog.clear()
    root = tmp_path_factory.mktemp("run")
    trainer(root, kind()).fit(10)
    said = [
        record.getMessage() for record in caplog.records if "a step late" in record.getMessage()
    ]
    assert len(said) == 1
    assert "at_epoch_end" in said[0]


def test_a_length_that_is_right_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No warning, also not after resumes in mid-epoch and at its end."""
    for step in (3, 4, 6, 9):
        trainer(tmp_path, WithLength()).fit(step)
    assert messages(caplog) == []


@each("accumulate", [2, 3])
def test_windows_of_several_batches_end_with_the_epoch(
    accumulate: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A window that is full, and one that is cut short by the end."""
    root = tmp_path_factory.mktemp("run")
    trainer(root, WithLength(), accumulate=accumulate).fit("2ep")
    assert saves(root) == [(2, 1, 0), (4, 2, 0)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, *full(2)])
def test_a_stateful_data_loader_ends_in_time(num_workers: int, tmp_path: Path) -> None:
    """torchdata's loader has a length; checkpoints at the ends of its epochs resume exactly."""
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def data() -> Any:
        rows = [torch.full((4,), float(row)) for row in range(8)]
        return module.StatefulDataLoader(rows, batch_size=2, num_workers=num_workers)

    straight = trainer(tmp_path / "straight", data())
    straight.fit(10)
    assert saves(tmp_path / "straight") == [(4, 1, 0), (8, 2, 0), (10, 2, 2)]
    for step in (4, 6, 8, 10):
        parts = trainer(tmp_path / "parts", data())
        parts.fit(step)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name


def test_the_metrics_of_the_last_step_are_those_of_the_epoch(tmp_path: Path) -> None:
    """A save at an epoch's end has the validation of that step."""
    seen: list[tuple[int, Metrics]] = []

    class Logs(Callback):
        def checkpoint_saved(self, training: Training, checkpoint: Any, cost: Metrics) -> None:
            seen.append((checkpoint.step, checkpoint.metrics))

    validate = Validation(data=[torch.ones(2, 4)], every="1ep")
    trainer(tmp_path, WithLength(), Logs(), validate=validate).fit(8)
    assert [step for step, metrics in seen if "val/loss" in metrics] == [4, 8]
