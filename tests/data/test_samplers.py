"""Samplers, mixtures, computed shuffles, sizes by epoch: pure orders, exact positions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from data.test_loader import Augmented, assert_same, collate_with_noise, global_state
from holdfast.data import Buckets, DataRanks, Loader, Mixture, Weighted
from holdfast.data.randomness import Permutation
from holdfast.errors import UsageError

LENGTHS = [1 + 7 * index % 13 for index in range(22)]
WEIGHTS = [1.0 + index % 3 for index in range(22)]


class Global(Sampler[int]):
    """Draws from the global generator, as simple samplers of users do."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22).tolist()[:15])


def curriculum(seed: int, lap: int) -> list[int]:
    """Longer laps of more samples."""
    return list(range(min(22, 5 + 6 * lap)))


def a_mixture() -> Mixture:
    return Mixture([(Augmented(9), 2), (Augmented(13), 1.0)], num_samples=15)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"sampler": Weighted(WEIGHTS)},
    "without-replacement": lambda: {"sampler": Weighted(WEIGHTS, 14, replacement=False)},
    "torch-random": lambda: {"sampler": RandomSampler(range(22))},
    "torch-weighted": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 15)},
    "torch-subset": lambda: {"sampler": SubsetRandomSampler(range(3, 20))},
    "global": lambda: {"sampler": Global()},
    "function": lambda: {"sampler": curriculum},
    "indices": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2]},
    "buckets": lambda: {"batch_sampler": Buckets(LENGTHS, batch_size=4, pool=2)},
    "tokens": lambda: {"batch_sampler": Buckets(LENGTHS, max_tokens=30, pool=2)},
    "torch-batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(22)), 5, True)},
    "sizes": lambda: {"batch_size": {0: 3, 1: 8}},
    "size-function": lambda: {"batch_size": lambda epoch: 2 + 3 * epoch},
    "computed": lambda: {"shuffle": "computed"},
    "mixture": lambda: {"dataset": a_mixture()},
    "mixture-in-order": lambda: {"dataset": a_mixture(), "shuffle": False},
}


def make(kind: str, **options: Any) -> Loader:
    given = {"dataset": Augmented(), "seed": 7, "collate_fn": collate_with_noise, **KINDS[kind]()}
    if "batch_sampler" not in given:
        given.setdefault("batch_size", 4)
    return Loader(given.pop("dataset"), **{**given, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_resumes_exactly(kind: str) -> None:
    loader = make(kind)
    straight = [batch for _ in range(3) for batch in loader]
    for taken in range(len(straight)):
        first, second = make(kind), make(kind)
        begun = list(islice(first.until(100), taken))
        torch.rand(3)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        rest = list(islice(second.until(100, start=taken), len(straight) - taken))
        assert_same(begun + rest, straight)


@pytest.mark.parametrize("kind", ["weighted", "torch-random", "tokens", "sizes", "mixture"])
def test_epochs_differ_and_end_at_their_own_length(kind: str) -> None:
    loader = make(kind, collate_fn=torch.stack)
    lengths = []
    found = []
    for _ in range(3):
        lengths.append(len(loader))
        found.append([*loader])
    assert [*map(len, found)] == lengths
    orders = [torch.cat(batches)[:, 0].tolist() for batches in found]
    assert len({*map(tuple, orders)}) == 3


@pytest.mark.parametrize("kind", ["torch-random", "tokens", "mixture", "size-function"])
def test_workers_give_the_same_and_generators_are_left_alone(kind: str) -> None:
    before = global_state()
    alone = [batch for _ in range(2) for batch in make(kind)][:2]
    assert_same(list(islice(make(kind, num_workers=2), 2)), alone)
    assert global_state() == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "size" not in kind])
def test_the_parts_of_ranks_are_the_batch_of_one(kind: str) -> None:
    """With a batch sampler the batch is that of all ranks, so any number of them shares it."""
    sized = {} if "batch_sampler" in KINDS[kind]() else {"batch_size": 2}
    options = {"collate_fn": torch.stack, **sized}
    parts = [[*make(kind, ranks=DataRanks(rank, 2), **options)] for rank in range(2)]
    whole = [*make(kind, collate_fn=torch.stack)]
    for first, second, batch in zip(*parts, whole, strict=True):
        joined = [*dict.fromkeys([*first[:, 0].tolist(), *second[:, 0].tolist()])]
        assert sorted(joined) == sorted({*batch[:, 0].tolist()})


def test_another_world_size_goes_on_in_a_weighted_order() -> None:
    def order(batches: Any) -> list[float]:
        return [index for batch in batches for index in batch[:, 0].tolist()]

    four = make("weighted", batch_size=4, ranks=DataRanks(0, 1))
    straight = order(four)
    first = make("weighted", batch_size=2, ranks=DataRanks(0, 2))
    list(islice(first, 3))
    second = make("weighted", batch_size=4, ranks=DataRanks(0, 1))
    second.load_state_dict(first.state_dict())
    assert order(second) == straight[12:]
    third = make("weighted", batch_size=5, ranks=DataRanks(0, 1))
    assert "3 of its samples are left out" in third.check_state_dict(first.state_dict())[0]


def test_with_epochs_of_some_batches_laps_of_a_sampler_go_on() -> None:
    by_laps = make("weighted")
    laps = [batch for _ in range(3) for batch in by_laps]
    cut, again = (make("weighted", batches_per_epoch=4) for _ in range(2))
    begun = list(islice(cut.until(100), 10))
    again.load_state_dict(cut.state_dict())
    assert_same(begun + list(islice(again.until(100, start=10), 8)), laps)


def test_laps_of_several_lengths_need_epochs_of_laps() -> None:
    with pytest.raises(UsageError, match="lap 1 has 3 batches and the first one 2"):
        list(make("function", batches_per_epoch=2).until(9))


def test_a_changed_sampler_is_refused_within_an_epoch_only() -> None:
    loader = make("weighted")
    list(islice(loader, 2))
    other = make("weighted", sampler=Weighted([*WEIGHTS[:-1], 9.0]))
    plain = make("computed")
    for each in (other, plain):
        with pytest.raises(UsageError, match="order: stored"):
            each.load_state_dict(loader.state_dict())
    list(loader)
    other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.batch) == (1, 0)


class Own(Sampler[int]):
    """Draws from a generator of its own, which nobody can put back."""

    def __init__(self) -> None:
        self._own = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22, generator=self._own).tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": Own()}, "returned two orders for one lap"),
        ({"sampler": iter([1])}, "each time it is iterated over"),
        ({"sampler": 3}, "must be a function"),
        ({"sampler": [22]}, "has the index 22, and the dataset has 22"),
        ({"sampler": [-1]}, "has the index -1"),
        ({"sampler": [0.5]}, "must be whole numbers"),
        ({"sampler": []}, "lap 0 has no sample"),
        ({"sampler": Weighted([1.0] * 21)}, "made for 21 samples, and the dataset has 22"),
        ({"sampler": DistributedSampler(range(22), 2, 0)}, r"itself \(ranks=\)"),
        ({"sampler": [1], "shuffle": False}, "omit shuffle"),
        ({"sampler": [1], "drop_last": True}, "leaves no batch"),
        ({"batch_sampler": [[1]]}, "omit batch_size"),
        ({"batch_sampler": [[1], []], "batch_size": None}, "a batch of lap 0 is empty"),
        (
            {"batch_sampler": [[1]], "batch_size": None, "batches_per_epoch": 3},
            "needs one batch_size",
        ),
        ({"batch_size": {0: 3}, "batches_per_epoch": 3}, "needs one batch_size"),
        ({"batch_size": {0: 3, 9: 23}, "drop_last": True}, "batch_size=23 with drop_last"),
        ({"batch_size": {1: 3}}, "must have a size for epoch 0"),
        ({"batch_size": {0: 0}}, r"batch_size\[0\]=0"),
        ({"batch_size": lambda epoch: 0.5}, r"batch_size\(0\)=0.5"),
        ({"shuffle": "x"}, 'True, False or "computed"'),
        ({"dataset": a_mixture(), "sampler": [1]}, "a Mixture has an order of its own"),
        ({"dataset": a_mixture(), "shuffle": "computed"}, "order of a Mixture is stored"),
    ],
)
def test_what_cannot_be_exact_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(**{"dataset": Augmented(), "batch_size": 4, **options})


def test_weights_are_kept() -> None:
    drawn = Counter(Weighted([1, 0, 3], 40_000)(0, 0).tolist())
    assert drawn[1] == 0
    assert abs(drawn[2] / drawn[0] - 3) < 0.2
    firsts = Counter(int(Weighted([1, 0, 3], replacement=False)(0, lap)[0]) for lap in range(2000))
    assert firsts[1] == 0
    assert abs(firsts[2] / firsts[0] - 3) < 0.6
    assert sorted(Weighted([1, 0, 3], replacement=False)(0, 0).tolist()) == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "weights"),
        (([0.0],), {}, "weights"),
        (([-1.0, 2],), {}, "weights"),
        (([float("nan")],), {}, "weights"),
        (([1.0], 0), {}, "num_samples=0"),
        (([1.0, 0], 2), {"replacement": False}, "there are 1 samples"),
    ],
)
def test_weights_that_are_none_are_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Weighted(*arguments, **options)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    pool=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_buckets_have_each_sample_once_within_their_budget(
    lengths: list[int], pool: int, seed: int
) -> None:
    for options in ({"batch_size": 4}, {"max_tokens": 50}):
        batches = Buckets(lengths, pool=pool, **options)(seed, 1)
        assert sorted(index for batch in batches for index in batch) == [*range(len(lengths))]
        for batch in batches:
            padded = len(batch) * max(lengths[index] for index in batch)
            assert len(batch) <= 4 if "batch_size" in options else padded <= 50


def test_buckets_pad_less_than_a_shuffle() -> None:
    lengths = torch.randint(1, 500, (2000,), generator=torch.Generator().manual_seed(1)).tolist()

    def padded(batches: list[list[int]]) -> int:
        return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)

    shuffled = torch.randperm(2000, generator=torch.Generator().manual_seed(2))
    plain = padded(shuffled.view(-1, 20).tolist())
    assert padded(Buckets(lengths, batch_size=20)(0, 0)) < 1.05 * sum(lengths) < 0.6 * plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "max_tokens": 9},
        {"batch_size": 0},
        {"max_tokens": 8},
        {"batch_size": 2, "pool": 0},
        {"batch_size": 2, "lengths": []},
    ],
)
def test_buckets_that_cannot_be_filled_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Buckets(**{"lengths": [3, 9], **options})


def test_a_mixture_has_its_weights_in_each_lap_and_its_parts_their_own_laps() -> None:
    mixture = Mixture([(range(7), 3), (range(100, 120), 1)], num_samples=8)
    assert mixture.counts == [6, 2]
    laps = [mixture.order(3, lap).tolist() for lap in range(7)]
    samples = [[mixture[index] for index in lap] for lap in laps]
    assert all(sum(value < 100 for value in lap) == 6 for lap in samples)
    of_first = Counter(value for lap in samples for value in lap if value < 100)
    assert set(of_first.values()) == {6}
    of_second = [value for lap in samples for value in lap if value >= 100]
    assert len({*of_second}) == 14
    assert len({tuple(lap) for lap in laps}) == 7


def test_a_mixture_in_order_is_spread_evenly() -> None:
    mixture = Mixture([("ab", 1), ("vwxyz", 2)], num_samples=6)
    found = ["".join(mixture[i] for i in mixture.order(0, lap, shuffle=False)) for lap in (0, 1)]
    assert found == ["vawxby", "zavwbx"]


def test_a_mixture_of_large_parts_draws_what_it_takes() -> None:
    mixture = Mixture([(range(10**9), 1), (range(10**5), 1)], num_samples=1000)
    laps = torch.cat([mixture.order(1, lap) for lap in range(200)])
    small = laps[laps >= 10**9]
    assert len(small) == len(small.unique()) == 10**5
    assert len(laps.unique()) == len(laps)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([], {}, "not empty"),
        ([([], 1)], {}, "is empty"),
        ([(iter([1]), 1)], {}, "interleave_datasets"),
        ([([1], 0)], {}, "weight=0"),
        ([([1], True)], {}, "weight=True"),
        ([([1], float("inf"))], {}, "weight=inf"),
        ([([1], "a")], {}, "weight='a'"),
        ([([1], 1), ([1, 2], 9)], {}, r"parts\[0\]: weight=1"),
        ([([1], 1)], {"num_samples": 0}, "num_samples=0"),
    ],
)
def test_mixtures_that_are_none_are_refused(parts: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mixture(parts, **options)


@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 9), lap=st.integers(0, 9))
def test_a_computed_shuffle_has_each_sample_once(num_samples: int, seed: int, lap: int) -> None:
    order = Permutation(num_samples, seed, lap)
    assert len(order) == num_samples
    assert sorted(order[:].tolist()) == [*range(num_samples)]
    assert order[num_samples // 3 : 10**9].tolist() == order[:].tolist()[num_samples // 3 :]


def test_a_computed_shuffle_puts_each_sample_anywhere() -> None:
    """Chi-square of (place, sample) and of neighbours, within 5 standard deviations."""
    num_laps, n = 2000, 30
    laps = torch.tensor([Permutation(n, 3, lap)[:].tolist() for lap in range(num_laps)])
    places = torch.nn.functional.one_hot(laps, n).sum(0).double()
    expected = num_laps / n
    assert abs(float(((places - expected) ** 2 / expected).sum()) - 29**2) < 5 * (2 * 29**2) ** 0.5
    pairs = (laps[:, 0] * n + laps[:, 1]).bincount(minlength=n * n).view(n, n).double()
    off = pairs[~torch.eye(n, dtype=torch.bool)]
    expected = num_laps / len(off)
    chi_square = float(((off - expected) ** 2 / expected).sum())
    assert abs(chi_square - len(off)) < 5 * (2 * len(off)) ** 0.5


def test_a_shuffle_of_a_thousand_million_samples_takes_no_memory_for_its_order() -> None:
    """An order of torch's would have 8 GB. Its batches and its resume are at once."""
    first, second = (Loader(range(10**9), batch_size=64, seed=1) for _ in range(2))
    begun = list(islice(first, 3))
    second.load_state_dict({**first.state_dict(), "batch": 10**7})
    far = next(iter(second))
    assert first.state_dict()["order"] == "computed"
    assert len({*torch.cat([*begun, far]).tolist()}) == 4 * 64


GOLDEN = [
    [1, 7, 6, 5, 9, 2],
    [29458, 889170, 554982, 44671, 876099, 753062],
    [595412567472, 18481935749, 518848788960, 498134356970, 779624208592, 652312919635],
]


def test_the_computed_order_is_that_of_before() -> None:
    """Golden: positions that are stored mean these samples."""
    found = [Permutation(n, 5, 2)[:6].tolist() for n in (10, 10**6, 10**12)]
    assert found == GOLDEN


def test_the_stored_order_goes_on_until_an_epoch_ends(caplog: pytest.LogCaptureFixture) -> None:
    drawn, computed = make("computed", shuffle=True), make("computed")
    straight = [*drawn]
    drawn = make("computed", shuffle=True)
    begun = list(islice(drawn, 3))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        computed.load_state_dict(drawn.state_dict())
    assert "the position was saved without it" in caplog.text
    assert_same([*begun, *computed], straight)
    list(drawn)
    computed = make("computed")
    computed.load_state_dict(drawn.state_dict())
    assert computed.state_dict()["order"] == "computed"
    drawn.load_state_dict(computed.state_dict())
    assert drawn.state_dict()["order"] == "computed"


def test_what_has_changed_in_the_data_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(range(8), batch_size=2, fingerprint="v1")
    list(islice(loader, 4))
    changed = Loader(Subset(range(99), range(9)), batch_size=2)
    assert changed.check_state_dict(loader.state_dict()) == [
        "the data had the fingerprint 'v1', and none is given now",
        "the data was range and is Subset(range) now",
        "the dataset had 8 samples and has 9 now",
    ]
    other = Loader(range(8), batch_size=2, fingerprint="v2")
    with pytest.raises(UsageError, match="fingerprint='v1', not 'v2'"):
        other.load_state_dict(loader.state_dict())
    fresh = Loader(range(8), batch_size=2, fingerprint="v1").state_dict()
    assert other.check_state_dict(fresh) == []
    same = Loader(range(8), batch_size=2, fingerprint="v1")
    same.load_state_dict(loader.state_dict())
    assert caplog.messages == []


def test_a_position_of_another_version_is_refused_within_an_epoch_only() -> None:
    """Version 1, which is not stored, has other orders: the same numbers mean other samples."""
    old = {"epoch": 1, "batch": 2, "seed": 7, "num_samples": 22, "batch_size": 4}
    old |= {"shuffle": True, "drop_last": False}
    loader = Loader(Augmented(), batch_size=4, seed=7)
    with pytest.raises(UsageError, match="version: stored 1, here 2"):
        loader.check_state_dict(old)
    for batch in (0, 6):
        (note,) = loader.check_state_dict({**old, "batch": batch})
        assert "its version is 1" in note
    assert loader.check_state_dict({**old, "epoch": 0, "batch": 0}) == []


@pytest.mark.parametrize("num_samples", [2, 13, 16])
def test_half_of_the_computed_orders_are_odd(num_samples: int) -> None:
    orders = [Permutation(num_samples, seed, 0)[:].tolist() for seed in range(300)]
    pairs = list(combinations(range(num_samples), 2))
    odd = sum(sum(order[i] > order[j] for i, j in pairs) % 2 for order in orders)
    assert 110 < odd < 190
