"""Where the position in the data is: in the state, or outside of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from holdfast import CheckpointManager, SideSaver
from holdfast.data import Loader
from holdfast.errors import UnsupportedState, UsageError
from holdfast.state.capture.lacking import lacks_optimizer
from holdfast.store.memory import MemoryStore

SAMPLES = list(range(10))


def training() -> dict[str, Any]:
    """A state without data."""
    model = nn.Sequential(nn.Linear(1, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("loader", "instead"),
    [
        (DataLoader(SAMPLES, batch_size=4), "Loader(dataset, batch_size=4, shuffle=False)"),
        (DataLoader(SAMPLES, 2, shuffle=True), "Loader(dataset, batch_size=2, shuffle=True)"),
        (
            DataLoader(SAMPLES, 2, shuffle=True, drop_last=True, collate_fn=sum, num_workers=1),
            "shuffle=True, drop_last=True, num_workers=1, collate_fn=…)",
        ),
        (DataLoader(Endless()), "state_dict and load_state_dict"),
        (
            DataLoader(SAMPLES, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 2, False)),
            "a batch sampler",
        ),
    ],
    ids=["plain", "shuffled", "more", "iterable", "batch-sampler"],
)
def test_a_dataloader_of_torch_is_refused_with_the_line_to_write(loader: Any, instead: str) -> None:
    """It has no position; ours is named, with the arguments of the one that was given."""
    with pytest.raises(UsageError) as caught:
        CheckpointManager(MemoryStore(), {**training(), "data": loader})
    assert "holdfast.data.Loader" in str(caught.value)
    assert instead in str(caught.value)


def test_a_dataloader_inside_a_component_is_refused_with_the_line_to_write() -> None:
    state = {**training(), "data": {"train": DataLoader(SAMPLES, 2)}}
    with pytest.raises(UnsupportedState, match=r"holdfast\.data\.Loader\(dataset, batch_size=2"):
        CheckpointManager(MemoryStore(), state)


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("data-loader position" in text for text in caplog.messages)


def test_a_training_whose_data_is_outside_of_its_state_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The resumed run would begin its data anew: at the first save it can still be mended."""
    caplog.set_level(logging.WARNING, logger="holdfast")
    with CheckpointManager(tmp_path, training()) as manager:
        manager.resume()
        assert told(caplog) == 0
        manager.save(1)
        assert told(caplog) == 1
        manager.save(2)
        manager.wait()
    assert told(caplog) == 1
    with CheckpointManager(tmp_path, training()) as manager:
        manager.resume()
        assert told(caplog) == 2
        manager.save(3)
        manager.wait()
    assert told(caplog) == 2


class Stream:
    """Somebody's data with a position."""

    def __iter__(self) -> Iterator[int]:
        yield 0

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    "more",
    [
        {"data": Loader(SAMPLES, batch_size=2)},
        {"train": Loader(SAMPLES, batch_size=2)},
        {"stream": Stream()},
        {"data": {"batches": 0}},
        {"train_sampler": {"epoch": 0}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_state_with_a_position_is_not_told(
    caplog: pytest.LogCaptureFixture, more: dict[str, Any]
) -> None:
    caplog.set_level(logging.WARNING, logger="holdfast")
    with CheckpointManager(MemoryStore(), {**training(), **more}) as manager:
        manager.save(1)
        manager.wait()
    assert told(caplog) == 0


def test_what_does_not_train_on_or_is_saved_in_part_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights alone are for others, who have no position in this data."""
    caplog.set_level(logging.WARNING, logger="holdfast")
    with CheckpointManager(MemoryStore(), {"model": training()["model"]}) as manager:
        manager.save(1)
    weights = SideSaver("weights", every="1step", components=["model"])
    with CheckpointManager(MemoryStore(), training(), savers=[weights]) as manager:
        manager.maybe_save(1)
        manager.save(2, components=["model"])
    assert told(caplog) == 0


class Engine:
    """An object of another library, which may hold an optimizer."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("more", "is_lacking"),
    [
        ({"data": Loader(SAMPLES, batch_size=2)}, True),
        ({"scaler": torch.amp.GradScaler("cpu")}, True),
        ({}, False),
        ({"counters": {"step": 1}}, False),
        ({"optimizer": None, "data": Loader(SAMPLES, batch_size=2)}, False),
        ({"engine": Engine(), "data": Loader(SAMPLES, batch_size=2)}, False),
    ],
)
def test_a_training_without_its_optimizer_is_told(more: dict[str, Any], is_lacking: bool) -> None:
    """A model alone may be weights that somebody stores."""
    model = nn.Linear(2, 2)
    if "optimizer" in more:
        more = {**more, "optimizer": torch.optim.SGD(model.parameters())}
    assert lacks_optimizer({"model": model, **more}) == is_lacking
    assert not lacks_optimizer({"model": model.requires_grad_(False), **more})


def test_a_layer_that_is_replaced_between_two_saves_is_missed_by_the_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {**training(), "data": {}}
    with caplog.at_level(logging.WARNING), CheckpointManager(MemoryStore(), state) as manager:
        manager.save(1, wait=True)
        assert caplog.messages == []
        state["model"][0] = nn.Linear(1, 1)
        manager.save(2, wait=True)
        manager.save(3, wait=True)
    assert [text for text in caplog.messages if "trained and not saved" in text] != []
    assert len(caplog.messages) == 1
