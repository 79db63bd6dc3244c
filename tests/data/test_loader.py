"""Loader: the order is pure, the position is exact, and nobody else's randomness is touched."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from holdfast.data import Loader, randomness
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@dataclass
class Augmented:
    """Samples that draw from all three global generators, as augmentations do."""

    num_samples: int = 22

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


def collate_with_noise(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.random()


def augmented(num_workers: int = 0, **options: Any) -> Loader:
    options = {"batch_size": 4, "seed": 7, "collate_fn": collate_with_noise, **options}
    return Loader(Augmented(), num_workers=num_workers, **options)


def epochs(loader: Loader, count: int) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(left, right), f"batch {number} differs"


@pytest.fixture(scope="module")
def straight() -> list[torch.Tensor]:
    """Two epochs in one go, without workers."""
    return epochs(augmented(), 2)


@pytest.mark.parametrize("taken", range(7))
def test_every_position_resumes_exactly_without_workers(
    straight: list[torch.Tensor], taken: int
) -> None:
    """Invariant 7: what was taken and what comes after the resume is the straight run."""
    first, second = augmented(), augmented()
    begun = list(islice(iter(first), taken))
    torch.rand(3)
    second.load_state_dict(first.state_dict())
    epochs_left = 2 if taken < 7 else 1
    assert_same(begun + epochs(second, epochs_left), straight)


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [(0, 2, 3), (1, 3, 1), (2, 0, 5), (3, 1, 2), (2, 2, 6), (3, 0, 4)],
)
def test_positions_resume_exactly_with_any_number_of_workers(
    straight: list[torch.Tensor], before: int, after: int, taken: int
) -> None:
    """Invariant 7: also a changed number, and after workers have fetched ahead."""
    first, second = augmented(before), augmented(after)
    begun = list(islice(first.until(12), taken))
    second.load_state_dict(first.state_dict())
    assert_same(begun + list(second.until(12, start=taken)), straight)


def test_persistent_workers_go_on_after_a_loop_that_broke_off(
    straight: list[torch.Tensor],
) -> None:
    loader = augmented(2, persistent_workers=True)
    begun = list(islice(loader, 2))
    assert_same(begun + epochs(loader, 2), straight)


@pytest.mark.full
def test_spawned_workers_give_the_same(straight: list[torch.Tensor]) -> None:
    loader = augmented(1, multiprocessing_context="spawn")
    assert_same(list(islice(loader, 2)), straight[:2])


@dataclass
class Summed:
    """Sums so long that the number of threads shows in their last bits."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(1_000_003).sum()


def test_a_batch_does_not_depend_on_the_threads_of_the_process_that_fetches_it() -> None:
    """Workers of torch's run with one intra-op thread; so does a fetch in this process."""
    here = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        without = list(Loader(Summed(), batch_size=1, seed=3))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(here)
    assert_same(list(Loader(Summed(), batch_size=1, seed=3, num_workers=1)), without)


def global_state() -> tuple[Any, Any, Any]:
    numpy = np.random.get_state(legacy=False)
    numbers = (numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["gauss"])
    return random.getstate(), numbers, torch.get_rng_state().tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_left_as_they_were(num_workers: int) -> None:
    """PEERS: beginning an iteration of torch's DataLoader draws from the global generator."""
    before = global_state()
    loader = augmented(num_workers)
    for _ in loader:
        assert global_state() == before
    assert global_state() == before


def test_the_global_generators_are_left_as_they_were_when_a_fetch_raises() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            torch.rand(1)
            raise OSError("no such sample")

    torch.set_num_threads(2)  # a fetch has one
    before = global_state()
    loader = Loader(Failing(), batch_size=2)
    with pytest.raises(OSError, match="no such sample"):
        next(iter(loader))
    assert global_state() == before
    assert torch.get_num_threads() == 2
    assert loader.batch == 0


def test_a_batch_does_not_depend_on_what_the_loop_draws(straight: list[torch.Tensor]) -> None:
    found = []
    for batch in augmented():
        random.random(), np.random.random(), torch.rand(5)
        found.append(batch)
    assert_same(found, straight[:6])


@pytest.mark.parametrize("column", [1, 2, 3])
def test_every_batch_of_every_epoch_draws_something_else(column: int) -> None:
    """From each of the three generators."""
    drawn = epochs(Loader(Augmented(), batch_size=4, seed=7), 2)
    assert len({float(batch[0, column]) for batch in drawn}) == len(drawn) == 12


def order(seed: int, epoch: int, num_samples: int = 20) -> list[int]:
    loader = Loader(range(num_samples), batch_size=num_samples, seed=seed)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
    return next(iter(loader)).tolist()


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(1)
    found = order(5, 3)
    torch.manual_seed(2)
    assert order(5, 3) == found
    assert sorted(found) == list(range(20))
    assert len({tuple(order(seed, epoch)) for seed in (5, 6, 35) for epoch in (0, 3, 53)}) == 9


def test_the_order_stays_what_it_was_in_earlier_versions() -> None:
    """Golden values of version 2: another order needs another version of the position."""
    assert order(0, 0, 10) == [0, 4, 6, 3, 5, 8, 9, 1, 2, 7]
    assert order(2**70, 12, 10) == [0, 9, 8, 5, 1, 2, 7, 4, 6, 3]


OF_TORCH = [
    "dataset",
    "batch_size",
    "drop_last",
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
]


def noted(worker: int) -> None:
    raise OSError(f"worker {worker} was told")


@pytest.mark.parametrize(
    "given",
    [
        (range(9), 2),
        (range(9), 2, False, None, None, 1, list, False, True, 30.0, noted, "spawn"),
    ],
)
def test_a_loader_has_the_arguments_and_attributes_of_torchs(given: tuple[Any, ...]) -> None:
    theirs, ours = DataLoader(*given), Loader(*given)
    for name in OF_TORCH:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) == len(ours.batch_sampler)
    assert len(ours.sampler) == len(theirs.sampler) - (1 if ours.drop_last else 0)
    with pytest.raises(AttributeError):
        ours.batch_size = 4  # type: ignore[misc]


def test_the_samplers_are_the_order_of_the_present_epoch() -> None:
    loader = Loader(range(9), 2, seed=5)
    for _ in range(2):
        expected = [*loader.batch_sampler]
        assert [*loader.sampler] == [index for batch in expected for index in batch]
        assert [batch.tolist() for batch in loader] == expected
    batches = torch.utils.data.BatchSampler(range(9), 2, False)
    assert Loader(range(9), batch_sampler=batches).batch_sampler is batches
    assert Loader(range(9), batch_sampler=batches).batch_size is None


def test_the_users_worker_init_fn_is_called() -> None:
    with pytest.raises(OSError, match="worker 0 was told"):
        list(Loader(range(9), 2, num_workers=1, worker_init_fn=noted))


def test_all_of_a_seed_reaches_the_generators() -> None:
    """Of 32 bits, two of 100,000 batches would probably be equal; and their numbers would be."""
    states = [randomness.generator(bytes(28) + number) for number in (b"abcd", b"abce")]
    drawn = [torch.rand(4, generator=own).tolist() for own in states]
    with randomness.seeded(bytes(28) + b"abcd"):
        assert torch.rand(4).tolist() == drawn[0]
    assert drawn[0] != drawn[1]


def test_without_shuffling_the_order_is_the_datasets_own() -> None:
    loader = Loader(range(5), batch_size=2, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_the_unfull_batch_out() -> None:
    loader = Loader(range(5), batch_size=2, shuffle=False, drop_last=True)
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_dataset_that_fetches_many_at_once_is_asked_once() -> None:
    class Many:
        asked: list[list[int]] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return [index * 10 for index in indices]

    loader = Loader(Many(), batch_size=3, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20], [30]]
    assert Many.asked == [[0, 1, 2], [3]]


def test_the_position_counts_what_the_loop_has_taken() -> None:
    loader = augmented()
    batches = iter(loader)
    assert (loader.epoch, loader.batch) == (0, 0)
    next(batches)
    next(batches)
    assert (loader.epoch, loader.batch) == (0, 2)


def test_the_epoch_ends_when_the_loop_asks_for_more_than_its_last_batch() -> None:
    """A position saved at the last batch is in that epoch, so its end is not lost by a resume."""
    loader, again = augmented(), augmented()
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    assert (loader.epoch, loader.batch, loader.at_epoch_end) == (0, 6, True)
    again.load_state_dict(loader.state_dict())
    assert next(batches, None) is None
    assert (loader.epoch, loader.batch, loader.at_epoch_end) == (1, 0, False)
    assert list(again) == []
    assert (again.epoch, again.batch) == (1, 0)


def counted_epoch(loader: Loader) -> Iterator[torch.Tensor]:
    """The rest of an epoch for a loop that counts, and never asks beyond the last batch."""
    batches = iter(loader)
    for _ in range(loader.batch, len(loader)):
        yield next(batches)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}],
    ids=str,
)
def test_a_loop_that_counts_gets_every_epoch(
    straight: list[torch.Tensor], options: dict[str, Any]
) -> None:
    """Others' trainers call `next` as often as the length says, and then `iter` anew."""
    loader = augmented(**options)
    found = []
    for _ in range(2):
        batches = iter(loader)
        found += [next(batches) for _ in range(len(loader))]
    assert_same(found, straight)
    assert (loader.epoch, loader.batch) == (1, 6)


@pytest.mark.parametrize("taken", range(13))
def test_a_loop_that_counts_resumes_exactly_at_every_position(
    straight: list[torch.Tensor], taken: int
) -> None:
    """Invariant 7, also where the position was saved at the end of an epoch."""
    first, second = augmented(), augmented()
    begun = list(islice((b for _ in range(2) for b in counted_epoch(first)), taken))
    second.load_state_dict(first.state_dict())
    # At the end of an epoch its rest comes first, as for a loop that has to do something there.
    rest = (batch for _ in range(3) for batch in counted_epoch(second))
    assert_same(begun + list(islice(rest, 12 - taken)), straight)


def test_a_position_at_the_end_of_an_epoch_that_was_counted_is_of_that_epoch(
    straight: list[torch.Tensor],
) -> None:
    """So a loop that does something at the end of an epoch does it after a resume."""
    loader, again = augmented(), augmented()
    list(counted_epoch(loader))
    again.load_state_dict(loader.state_dict())
    assert (again.epoch, again.batch) == (0, 6)
    assert list(again) == []
    assert_same(list(again), straight[6:])
    # In this process the next epoch has begun as soon as it has an iterator.
    batches = iter(loader)
    assert (loader.epoch, loader.batch) == (1, 0)
    again.load_state_dict(loader.state_dict())
    assert_same(list(again), straight[6:])
    assert_same(list(batches), straight[6:])


def test_iterators_that_nobody_uses_move_nothing(straight: list[torch.Tensor]) -> None:
    loader = augmented()
    list(islice(loader, 2))
    for _ in range(3):
        iter(loader)
    assert (loader.epoch, loader.batch) == (0, 2)
    assert_same(list(counted_epoch(loader)), straight[2:6])
    unused = [iter(loader) for _ in range(3)]
    assert (loader.epoch, loader.batch) == (1, 0)
    assert_same(list(counted_epoch(loader)), straight[6:])
    with pytest.raises(StopIteration):
        next(unused[0])


def test_an_iterator_that_was_made_before_the_resume_counts_too(
    straight: list[torch.Tensor],
) -> None:
    first, second = augmented(), augmented()
    begun = list(islice(first, 2))
    batches = iter(second)
    second.load_state_dict(first.state_dict())
    begun += [next(batches) for _ in range(4)]
    assert_same(begun + list(counted_epoch(second)), straight)


def test_the_iterator_of_an_epoch_that_has_ended_does_not_end_the_next_one(
    straight: list[torch.Tensor],
) -> None:
    loader = augmented()
    former = iter(loader)
    for _ in range(6):
        next(former)
    latter = iter(loader)
    assert next(former, None) is None
    assert (loader.epoch, loader.batch) == (1, 0)
    assert_same(list(latter), straight[6:])
    assert (loader.epoch, loader.batch) == (2, 0)


@given(
    num_samples=st.integers(1, 9),
    batch_size=st.integers(1, 4),
    batches_per_step=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_until_gives_the_same_batches_however_it_is_cut(
    num_samples: int, batch_size: int, batches_per_step: int, cuts: list[int]
) -> None:
    """Invariant 7, for any number of stops and resumes at any step."""

    def loader() -> Loader:
        return Loader(range(num_samples), batch_size=batch_size, seed=2)

    def plain(batches: Iterator[torch.Tensor]) -> list[list[int]]:
        return [batch.tolist() for batch in batches]

    expected = plain(loader().until(12, batches_per_step=batches_per_step))
    found: list[list[int]] = []
    state, start = loader().state_dict(), 0
    for stop in sorted({*cuts, 12}):
        part = loader()
        part.load_state_dict(state)
        found += plain(part.until(stop, start=start, batches_per_step=batches_per_step))
        state, start = part.state_dict(), stop
    assert found == expected
    assert len(expected) == 12 * batches_per_step
    assert plain(islice(epochs_of(loader()), len(expected))) == expected


def epochs_of(loader: Loader) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def test_until_a_step_that_is_done_gives_nothing() -> None:
    """D25: the rerun of a finished run trains no further."""
    loader = augmented()
    list(loader.until(8))
    assert list(loader.until(8, start=8)) == []
    assert list(loader.until(8, start=9)) == []


def test_until_from_later_on_with_a_fresh_loader_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        augmented().until(9, start=3)
    assert "was it in the state" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [{"step": -1}, {"step": 1.0}, {"step": True}, {"step": 1, "start": -1}, {"step": "5step"}],
)
def test_until_refuses_at_once_what_is_no_step(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        augmented().until(**arguments)


def test_a_load_ends_the_iterator_that_is_alive() -> None:
    loader = augmented()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="has ended"):
        next(batches)
    assert (loader.epoch, loader.batch) == (0, 1)


def test_beginning_another_iterator_ends_the_former() -> None:
    loader = augmented()
    former = iter(loader)
    next(former)
    latter = iter(loader)
    next(latter)
    with pytest.raises(UsageError, match="has ended"):
        next(former)
    assert loader.batch == 2
    next(latter)
    assert loader.batch == 3


@pytest.mark.parametrize(
    "other",
    [{"dataset": range(11)}, {"batch_size": 3}, {"shuffle": False}, {"drop_last": True}],
)
def test_a_position_in_mid_epoch_is_refused_by_an_epoch_of_another_shape(
    other: dict[str, Any],
) -> None:
    made = {"dataset": range(10), "batch_size": 4, **other}
    loader, differing = Loader(range(10), batch_size=4), Loader(**made)
    next(iter(loader))
    before = differing.state_dict()
    with pytest.raises(UsageError, match=r"stored .*, here "):
        differing.load_state_dict(loader.state_dict())
    assert differing.state_dict() == before


@pytest.mark.parametrize("per_epoch", [1, 4, 6, 9])
@pytest.mark.parametrize("taken", [0, 1, 4, 9, 11])
def test_batches_per_epoch_moves_the_ends_of_epochs_and_nothing_else(
    straight: list[torch.Tensor], per_epoch: int, taken: int
) -> None:
    """Invariant 7: a resume at any place, also at an end, gives the batches of whole laps."""
    first, second = (augmented(batches_per_epoch=per_epoch) for _ in range(2))
    begun = list(islice(epochs_of(first), taken))
    second.load_state_dict(first.state_dict())
    assert_same(begun + list(islice(epochs_of(second), 12 - taken)), straight)
    assert second.epoch * per_epoch + second.batch == 12
    assert len(second) == per_epoch
    assert second.at_epoch_end is (12 % per_epoch == 0)


def test_batches_per_epoch_counts_over_the_ends_of_laps(straight: list[torch.Tensor]) -> None:
    loader = augmented(2, batches_per_epoch=9)
    assert_same(list(loader), straight[:9])
    assert (loader.epoch, loader.batch) == (1, 0)
    assert_same(list(loader.until(3)), straight[9:])
    assert (loader.epoch, loader.batch) == (1, 3)


@pytest.mark.parametrize("per_epoch", [None, 2])
@pytest.mark.parametrize("taken", [1, 3, 6])
def test_epochs_of_another_length_mean_another_place_and_are_refused(
    per_epoch: int | None, taken: int
) -> None:
    loader = Loader(range(10), batch_size=4, batches_per_epoch=3)
    other = Loader(range(10), batch_size=4, batches_per_epoch=per_epoch)
    other.load_state_dict(loader.state_dict())
    list(islice(epochs_of(loader), taken))
    with pytest.raises(UsageError, match=f"batches_per_epoch: stored 3, here {per_epoch}"):
        other.load_state_dict(loader.state_dict())
    list(islice(epochs_of(other), taken))
    with pytest.raises(UsageError, match=f"batches_per_epoch: stored {per_epoch}, here 3"):
        loader.load_state_dict(other.state_dict())


@pytest.mark.parametrize(("taken", "batch"), [(0, 0), (3, 10)])
def test_the_begin_and_the_end_of_an_epoch_mean_the_same_in_any_shape(
    taken: int, batch: int
) -> None:
    loader, differing = Loader(range(10), batch_size=4), Loader(range(10), batch_size=1)
    list(islice(loader, taken))
    differing.load_state_dict(loader.state_dict())
    assert (differing.epoch, differing.batch) == (0, batch)


def test_a_stored_seed_wins_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """O50: the order of a run under way does not change because a script did."""
    loader, other = augmented(seed=7), augmented(seed=8)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        other.load_state_dict(loader.state_dict())
    assert "the stored one is used" in caplog.text
    assert other.seed == 7
    assert_same(list(other), list(loader))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"batch": 7},
        {"batch": 1.0},
        {"batch": True},
        {"seed": None},
        {"num_samples": 0},
        {"num_samples": 3, "drop_last": True, "batch": 0},
        {"num_samples": 3, "drop_last": True, "batch": 0, "batches_per_epoch": 2},
        {"batches_per_epoch": 0},
        {"batches_per_epoch": True},
        {"batches_per_epoch": 2, "batch": 3},
        {"shuffle": 1},
        {"extra": 1},
    ],
)
def test_what_is_no_position_is_refused(change: dict[str, Any]) -> None:
    loader = augmented()
    before = loader.state_dict()
    with pytest.raises(UsageError):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Endless()}, r"holdfast\.data\.Stream"),
        ({"dataset": iter([1, 2])}, "__getitem__"),
        ({"dataset": []}, "empty"),
        ({"dataset": [1, 2], "batch_size": 3, "drop_last": True}, "no batch"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_size": True}, "batch_size=True"),
        ({"generator": torch.Generator()}, "seed=…"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"batches_per_epoch": 0}, "batches_per_epoch=0"),
        (
            {"dataset": [1], "drop_last": True, "batches_per_epoch": 5},
            "leaves no batch",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_construction(
    arguments: dict[str, Any], message: str
) -> None:
    """D47: a setting that could only do nothing is an error."""
    with pytest.raises(UsageError, match=message):
        Loader(**{"dataset": [1, 2, 3], "batch_size": 2, **arguments})


def test_a_batch_larger_than_the_dataset_is_one_batch() -> None:
    assert [len(batch) for batch in Loader(range(3), batch_size=8)] == [3]


def test_a_dataset_that_changed_its_length_is_refused() -> None:
    samples = [1, 2, 3]
    loader = Loader(samples, batch_size=2)
    samples.append(4)
    with pytest.raises(UsageError, match="had 3 samples and now has 4"):
        next(iter(loader))


def test_an_error_in_a_worker_reaches_the_loop_and_the_batch_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch waits so long, twice, for a worker that it ends after an error.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)

    class Failing(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 3:
                raise OSError("no such sample")
            return super().__getitem__(index)

    loader = Loader(Failing(), batch_size=2, shuffle=False, num_workers=1)
    with pytest.raises(OSError, match="no such sample"):
        list(loader)
    gc.collect()  # the iterator, with its workers
    assert loader.batch == 1


def test_a_position_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Invariant 6, D18: the weights are not those of a checkpoint whose position is not taken."""
    weights = torch.zeros(3)
    loader = Loader(range(10), batch_size=2)
    with CheckpointManager(tmp_path, {"weights": {"w": weights}, "data": loader}) as manager:
        next(iter(loader))
        manager.save(1).wait()
    live = torch.ones(3)
    state = {"weights": {"w": live}, "data": Loader(range(10), batch_size=5)}
    with CheckpointManager(tmp_path, state) as manager:
        with pytest.raises(UsageError, match="batch"):
            manager.resume()
        assert live.tolist() == [1.0, 1.0, 1.0]
