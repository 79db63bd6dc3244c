"""Batches that a position counts, and that no step was trained on, are named at a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from data.sources import Shards
from holdfast.data import Loader, Stream
from holdfast.manager import CheckpointManager
from train.small import make

Save = Callable[[int], Any]
SAVED = torch.Generator()


def ahead(batches: Any) -> Iterator[Any]:
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = batch
    yield held


def shown(batches: Any) -> Iterator[Any]:
    """Passes batches on, as a progress bar does."""
    yield from batches


def threaded(batches: Any) -> Iterator[Any]:
    """Takes five batches at once, in another thread."""
    batches = iter(batches)
    with ThreadPoolExecutor() as pool:
        while some := pool.submit(list, islice(batches, 5)).result():
            yield from some


class Held:
    """A wrapper in the state, whose position is that of the loader inside."""

    def __init__(self, loader: Any, wrap: Any = ahead) -> None:
        self.loader = loader
        self.wrap = wrap

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.wrap(self.loader)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Peekable:
    """An iterator that has fetched what it gives next."""

    def __init__(self, batches: Any) -> None:
        self.batches = iter(batches)
        self.held = next(self.batches, None)

    def __iter__(self) -> Peekable:
        return self

    def __next__(self) -> Any:
        if self.held is None:
            raise StopIteration
        batch, self.held = self.held, next(self.batches, None)
        return batch


def filtered(batches: Any) -> Iterator[Any]:
    """Drops some batches."""
    yield from (batch for number, batch in enumerate(batches) if number not in (0, 2))


def train(data: Any, save: Save, wrap: Any = iter) -> None:
    for step, _ in enumerate(wrap(data), 1):
        save(step)


def accumulated(data: Any, save: Save) -> None:
    for taken, _ in enumerate(shown(data), 1):
        if taken % 2 == 0:
            save(taken // 2)


def from_zero(data: Any, save: Save) -> None:
    for step, _ in enumerate(shown(data)):
        save(step)


def after_an_example(data: Any, save: Save) -> None:
    next(iter(data))
    train(data, save, shown)


def skipping(data: Any, save: Save) -> None:
    steps = count(1)
    for number, _ in enumerate(data):
        if number != 1:
            save(next(steps))


def holding_one(data: Any, save: Save) -> None:
    batches, steps = iter(data), count(1)
    held = next(batches)
    while held is not None:
        following = next(batches, None)
        save(next(steps))
        held = following


def by_steps(data: Any, save: Save) -> None:
    train(data.until(25), save)


def evaluating(data: Any, save: Save) -> None:
    train(data, save)
    with torch.no_grad():
        list(islice(data, 4))
    save(20)


def initializing(data: Any, save: Save) -> None:
    with torch.no_grad():
        next(iter(data))
    train(data, save)


def copied(data: Any, save: Save) -> None:
    train(DataLoader(data.dataset, batch_sampler=data.batch_sampler), save)


def without_gradients(data: Any, save: Save) -> None:
    with torch.no_grad():
        train(data, save)


def late(data: Any, save: Save) -> None:
    save(2)
    for step, _ in enumerate(data, 3):
        save(step)


LOOPS: list[tuple[Any, str]] = [
    (lambda data, save: train(data, save, ahead), "1 more than were trained on"),
    (lambda data, save: train(data, save, Peekable), "1 more than were trained on"),
    (lambda data, save: train(data, save, pairwise), "1 more than were trained on"),
    (lambda data, save: train(data, save, threaded), "more than were trained on"),
    (holding_one, "1 more than were trained on"),
    (evaluating, "4 batches were taken with gradients off"),
    (copied, "steps 2 to 4 were trained, and no batch was taken"),
    (train, ""),
    (without_gradients, ""),
    (late, ""),
    (lambda data, save: train(data, save, shown), ""),
    (accumulated, ""),
    (from_zero, ""),
    (after_an_example, ""),
    (skipping, ""),
    (by_steps, ""),
    (initializing, ""),
]


@pytest.mark.parametrize(("loop", "said"), LOOPS)
def test_batches_that_are_not_trained_on_are_named_once(
    loop: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Loader(range(20), 2)
    with CheckpointManager(tmp_path, {"data": data, "progress": {}}, every="2step") as manager:
        loop(data, manager.maybe_save)
    assert [said in text for text in caplog.messages] == ([True] if said else [])


@pytest.mark.parametrize("make", [lambda: Held(Loader(range(20), 2)), lambda: Stream(Shards(), 2)])
def test_read_ahead_is_named_in_a_resumed_run_and_in_wrappers(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for first in (0, 3):
        data = make()
        with CheckpointManager(tmp_path, {"data": data}) as manager:
            found = manager.resume()
            step = found.step if found else 0
            assert step == first
            caplog.clear()
            for _ in islice(ahead(data), 3):
                step += 1
                manager.save(step)
    assert len([text for text in caplog.messages if "holds them in hand" in text]) == 1


@pytest.mark.parametrize(
    ("wrap", "held"),
    [(ahead, "1 more"), (pairwise, "1 more"), (threaded, "3 more"), (iter, ""), (filtered, "")],
)
def test_a_trainer_names_read_ahead_once(
    wrap: Any, held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Held(Loader(torch.rand(20, 4), 2), wrap)
    make(tmp_path, data=data, loss=lambda model, batch: model(batch[0]).mean()).fit("2ep")
    texts = [text for text in caplog.messages if "more batches were taken" in text]
    assert [held in text for text in texts] == ([True] if held else [])


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"persistent_workers": True}, True),
        ({"persistent_workers": True, "generator": torch.default_generator}, True),
        ({"persistent_workers": True, "generator": SAVED}, True),
        ({"persistent_workers": True, "generator": torch.Generator()}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("made", ["before", "after"])
def test_persistent_workers_whose_seed_a_resume_draws_again_are_named(
    options: Any, is_said: bool, made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(range(4), num_workers=1, **options)  # type: ignore[arg-type]

    held_out = make() if made == "before" else None
    state = {"model": nn.Linear(1, 1), "data": {"order": SAVED}}
    with CheckpointManager(tmp_path, state) as manager:
        manager.resume()
        manager.save(1)
        assert _num_named(caplog) == (is_said and made == "before")
        held_out = held_out or make()
        batches = iter(held_out)
        for step in (2, 3):
            manager.save(step)
    assert _num_named(caplog) == is_said
    del batches, held_out


def _num_named(caplog: pytest.LogCaptureFixture) -> int:
    return sum("persistent_workers" in text for text in caplog.messages)
