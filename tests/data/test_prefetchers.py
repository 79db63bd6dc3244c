"""Prefetchers around a loader: `iterate_through` counts the batches that they have yielded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch

from data.sources import Shards
from holdfast import CheckpointManager
from holdfast.data import Loader, Stream
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore


class OneAhead:
    """Holds one batch in hand, as timm's PrefetchLoader does."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        held = None
        for batch in self.loader:
            if held is not None:
                yield held
            held = batch
        if held is not None:
            yield held


class Threaded:
    """Reads batches in a thread, at most three ahead."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(3)

        def read() -> None:
            for batch in self.loader:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := batches.get()) is not None:
            yield batch


def loader(**options: Any) -> Loader:
    return Loader(torch.arange(22), 4, seed=1, **options)


def stream(**options: Any) -> Stream:
    return Stream(Shards(), batch_size=4, shuffle=8, seed=1, **options)


MADE: list[Callable[..., Any]] = [loader, stream]
PREFETCHERS: list[Callable[..., Any]] = [OneAhead, Threaded]


def expected(made: Callable[..., Any], epochs: int) -> list[list[int]]:
    data = made()
    return [batch.tolist() for _ in range(epochs) for batch in data]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("prefetcher", PREFETCHERS)
def test_a_position_of_each_step_resumes_at_the_next_batch(
    made: Callable[..., Any], prefetcher: Callable[..., Any]
) -> None:
    whole = expected(made, 2)
    data = made(num_workers=1) if prefetcher is Threaded else made()
    got, saved = [], []
    for epoch in data.epochs(2):
        for step, batch in data.steps(prefetcher=prefetcher(data)):
            got.append(batch.tolist())
            assert step == len(got)
            assert (data.epoch, data.step) == (epoch, step)
            saved.append(data.state_dict())
    assert got == whole
    for number, state in enumerate(saved, 1):
        again = made(num_workers=data.num_workers)
        again.load_state_dict(state)
        # The end of an epoch still belongs to it, as without a prefetcher.
        assert again.at_epoch_end is (number % (len(whole) // 2) == 0)
        numbered = ((step, batch) for _ in again.epochs(2) for step, batch in again.steps())
        found = [(step, batch.tolist()) for step, batch in numbered]
        assert found == [*enumerate(whole[number:], number + 1)]


@pytest.mark.parametrize("made", MADE)
def test_a_break_returns_to_the_next_batch(made: Callable[..., Any]) -> None:
    whole, data = expected(made, 1), made()
    for number in range(1, len(whole) + 1):
        (batch,) = islice(data.iterate_through(OneAhead(data)), 1)
        assert batch.tolist() == whole[number - 1]
        assert data.batch == number
    assert data.at_epoch_end


def test_a_manager_warns_without_it_and_not_with_it(caplog: pytest.LogCaptureFixture) -> None:
    for is_through in (False, True):
        data, caplog_before = loader(), len(caplog.records)
        with CheckpointManager(MemoryStore(), {"data": data}, every="1step") as manager:
            batches = OneAhead(data.until(step=12))
            for step, _ in enumerate(data.iterate_through(batches) if is_through else batches, 1):
                manager.maybe_save(step)
        told = [line for line in caplog.messages[caplog_before:] if "iterate_through" in line]
        assert bool(told) is not is_through


def test_pairs_count_their_first_batch() -> None:
    data, whole = loader(), expected(loader, 1)
    for (first, _), wanted in zip(data.iterate_through(pairwise(data)), whole, strict=False):
        assert first.tolist() == wanted
        again = loader()
        again.load_state_dict(data.state_dict())
        assert [batch.tolist() for batch in again] == whole[whole.index(wanted) + 1 :]


def test_what_began_earlier_or_yields_other_numbers_is_refused() -> None:
    data = loader()
    early = iter(OneAhead(data))
    next(early)
    with pytest.raises(UsageError, match="before it was iterated over"):
        list(data.iterate_through(early))
    again = loader()
    twice = (part for batch in again for part in batch.chunk(2))
    with pytest.raises(UsageError, match="more items"):
        list(again.iterate_through(twice))


def test_several_batches_in_an_item_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = loader()
    batches = iter(data)
    assert len([*data.iterate_through(zip(batches, batches, batches, strict=True))]) == 2
    assert "repeats some" in caplog.text


def test_a_thread_that_seeds_generators_beside_the_training_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = loader()
    assert len([*data.iterate_through(Threaded(data))]) == 6
    assert "num_workers=1" in caplog.text
