"""Loader on several ranks: one order for all, a position without a rank, any world size."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from distributed.run import run_ranks
from holdfast.data import DataRanks, Loader, Stream
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager
from holdfast.testing.ranks import ThreadCoordinator
from marks import full

Batches = list[list[int]]
WORLD_SIZES = (1, 2, 3, 4, 6)


class Rows:
    """A source of numbers, with a state."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loaders(num_ranks: int, num_samples: int, **options: Any) -> list[Loader]:
    """The loaders of all ranks; `global_batch_size` is that of all of them together."""
    if "global_batch_size" in options:
        options["batch_size"] = options.pop("global_batch_size") // num_ranks
    return [
        Loader(range(num_samples), seed=3, ranks=DataRanks(rank, num_ranks), **options)
        for rank in range(num_ranks)
    ]


def epochs_of(loader: Loader) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def parts(ranks: list[Loader], count: int) -> list[Batches]:
    """Of each of the next batches, the parts of all ranks."""
    taken = [[b.tolist() for b in islice(epochs_of(loader), count)] for loader in ranks]
    return [list(batch) for batch in zip(*taken, strict=True)]


def joined(batches: list[Batches]) -> Batches:
    """The batches of all ranks; a sample that ranks next to each other share counts once."""
    return [[*dict.fromkeys(index for part in batch for index in part)] for batch in batches]


@st.composite
def elastic(draw: st.DrawFn) -> dict[str, Any]:
    """A loader's options, whose batch of all ranks can be shared by all `WORLD_SIZES`."""
    global_batch_size = 12 * draw(st.integers(1, 2))
    drop_last = draw(st.booleans())
    num_samples = draw(st.integers(global_batch_size if drop_last else 1, 60))
    return {
        "num_samples": num_samples,
        "global_batch_size": global_batch_size,
        "drop_last": drop_last,
        "shuffle": draw(st.booleans()),
        "batches_per_epoch": draw(st.none() | st.integers(1, 7)),
    }


@given(options=elastic(), num_ranks=st.sampled_from(WORLD_SIZES))
def test_the_parts_of_all_ranks_are_the_batch_of_one(
    options: dict[str, Any], num_ranks: int
) -> None:
    ranks = loaders(num_ranks, **options)
    found = parts(ranks, 9)
    whole = joined(parts(loaders(1, **options), 9))
    assert joined(found) == whole
    lengths = [[*map(len, batch)] for batch in found]
    assert all(max(each) - min(each) <= 1 for each in lengths)
    assert [*map(sum, lengths)] == [max(len(batch), num_ranks) for batch in whole]
    assert len({len(loader) for loader in ranks}) == 1


@given(
    options=elastic(),
    world_sizes=st.lists(st.sampled_from(WORLD_SIZES), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
def test_another_world_size_goes_on_in_the_same_order(
    options: dict[str, Any], world_sizes: list[int], lengths: list[int]
) -> None:
    """Invariant 7, sample for sample, for kills at any batch; all ranks save the same."""
    found: Batches = []
    state = Loader(range(options["num_samples"]), batch_size=12, seed=3).state_dict()
    for number, (num_ranks, length) in enumerate(zip(world_sizes, lengths, strict=False)):
        ranks = loaders(num_ranks, **options)
        for loader in ranks if number else ():
            assert loader.check_state_dict(state) == []
            loader.load_state_dict(state)
        found += joined(parts(ranks, length))
        states = [loader.state_dict() for loader in ranks]
        assert all(own == states[0] for own in states)
        state = states[0]
    assert found == joined(parts(loaders(1, **options), len(found)))


@given(
    num_samples=st.integers(1, 70),
    drop_last=st.booleans(),
    before=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    taken=st.integers(0, 20),
)
def test_batches_of_another_size_repeat_no_sample_and_leave_out_those_that_are_named(
    num_samples: int,
    drop_last: bool,
    before: tuple[int, int],
    after: tuple[int, int],
    taken: int,
) -> None:
    """Both are (number of ranks, samples of each). The rest of the epoch, and the next one."""
    total = after[0] * after[1]
    assume(not drop_last or num_samples >= max(before[0] * before[1], total))
    first, second = (
        loaders(num_ranks, num_samples, batch_size=batch_size, drop_last=drop_last)
        for num_ranks, batch_size in (before, after)
    )
    taken = min(taken, len(first[0]))
    seen = {index for batch in joined(parts(first, taken)) for index in batch}
    state = first[0].state_dict()
    notes = second[0].check_state_dict(state)
    for loader in second:
        loader.load_state_dict(state)
    rest = [[b.tolist() for b in loader] for loader in second]
    later = {index for part in rest for batch in part for index in batch}
    assert seen.isdisjoint(later)
    is_inside = 0 < taken < len(first[0])
    assert bool(notes) is (is_inside and before[0] * before[1] != total)
    num_due = num_samples - num_samples % total if drop_last else num_samples
    left_out = max(num_due - len(seen) - len(later), 0) if is_inside else 0
    assert left_out < total
    named = f"and {left_out} of its samples are left out"
    assert any(named in note for note in notes) is (left_out > 0)
    expected = loaders(1, num_samples, batch_size=total, drop_last=drop_last)
    expected[0].load_state_dict({**expected[0].state_dict(), "epoch": 1})
    assert second[0].epoch == 1
    assert joined(parts(second, len(expected[0]))) == joined(parts(expected, len(expected[0])))


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_as_many_batches_on_all_ranks(drop_last: bool) -> None:
    """11 samples for 2 ranks with 4 each: the last 3 are divided, or left out."""
    ranks = loaders(2, 11, batch_size=4, shuffle=False, drop_last=drop_last)
    whole: list[Batches] = [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    last: list[Batches] = [] if drop_last else [[[8], [9, 10]]]
    assert parts(ranks, len(whole + last)) == whole + last
    assert {len(loader) for loader in ranks} == {len(whole + last)}
    assert all(loader.at_epoch_end for loader in ranks)


def test_of_fewer_samples_than_ranks_each_rank_gets_one() -> None:
    """No rank is without a batch, which others would wait for in a collective."""
    assert parts(loaders(4, 10, batch_size=2, shuffle=False), 2)[1] == [[8], [8], [9], [9]]
    assert parts(loaders(3, 1, batch_size=2), 2) == [[[0], [0], [0]]] * 2


class Noise:
    """Samples that only draw."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand((), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_each_sample_is_owned_by_one_rank_also_where_ranks_get_the_same(kind: str) -> None:
    for num_ranks, size in ((1, 5), (2, 5), (3, 7), (4, 6), (4, 9)):
        for rank in range(num_ranks):
            ranks = DataRanks(rank, num_ranks)
            data: Any = (
                Loader(range(size), batch_size=1, ranks=ranks, shuffle=False)
                if kind == "loader"
                else Stream(Rows(size), batch_size=1, ranks=ranks)
            )
            assert data.own_samples is None
            own = [part.tolist() for part in data if data.own_samples]
            expected = [
                at
                for start in range(0, size, num_ranks)
                for number, at in enumerate(range(start, min(start + num_ranks, size)))
                if (batch := min(num_ranks, size - start))
                and rank * batch // num_ranks == number < (rank + 1) * batch // num_ranks
            ]
            assert [at for part in own for at in part] == expected


def noise(ranks: DataRanks | None, taken: int = 0) -> list[float]:
    """What the samples of an epoch drew after `taken` batches, with a resume there."""
    first, second = (Loader(Noise(), batch_size=2, seed=5, ranks=ranks) for _ in range(2))
    list(islice(first, taken))
    second.load_state_dict(first.state_dict())
    return [float(drawn) for batch in second for drawn in batch]


def test_ranks_draw_differently_and_the_same_again() -> None:
    """Invariant 7: what a fetch draws is of the seed, the lap, the batch and the rank."""
    drawn = [noise(DataRanks(rank, 4)) for rank in range(4)]
    assert len({number for rank in drawn for number in rank}) == 16
    assert noise(DataRanks(3, 4)) == drawn[3]
    assert noise(DataRanks(3, 4), taken=1) == drawn[3][2:]
    assert noise(DataRanks(0, 4)) == noise(None)[:4]


def test_one_rank_is_what_it_was() -> None:
    """The position says nothing of ranks, and the same bytes of noise are drawn."""
    alone, one = (Loader(Noise(), batch_size=4, seed=5, ranks=r) for r in (None, DataRanks(0, 1)))
    position = {"epoch": 0, "batch": 0, "seed": 5, "version": 2, "num_samples": 16, "batch_size": 4}
    assert alone.state_dict() == {
        **position,
        "shuffle": True,
        "drop_last": False,
        "data": "Noise",
    }
    assert list(alone.state_dict()) == [*position, "shuffle", "drop_last", "data"]
    assert one.state_dict() == alone.state_dict()
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in alone]


def test_a_loader_without_ranks_still_refuses_batches_of_another_size() -> None:
    ranks = loaders(2, 20, batch_size=4)
    parts(ranks, 1)
    with pytest.raises(UsageError, match="batch_size: stored 8, here 4"):
        Loader(range(20), batch_size=4).load_state_dict(ranks[0].state_dict())


@pytest.mark.parametrize(
    "other",
    [{"num_samples": 21}, {"shuffle": False}, {"batches_per_epoch": 3}, {"drop_last": True}],
)
def test_only_another_batch_size_is_carried_on(other: dict[str, Any]) -> None:
    ranks = loaders(2, 20, batch_size=4)
    parts(ranks, 1)
    (differing,) = loaders(1, **{"num_samples": 20, "batch_size": 4, **other})
    before = differing.state_dict()
    with pytest.raises(UsageError, match=rf"counts all ranks together[\s\S]*{next(iter(other))}"):
        differing.load_state_dict(ranks[0].state_dict())
    assert differing.state_dict() == before


def test_with_batches_per_epoch_another_size_is_refused() -> None:
    first, second = (loaders(n, 20, batch_size=4, batches_per_epoch=2) for n in (2, 1))
    parts(first, 1)
    with pytest.raises(UsageError, match="batch_size: stored 8, here 4"):
        second[0].load_state_dict(first[0].state_dict())


def test_a_resume_has_the_note_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loaders(4, 100, batch_size=2)[0]
    with CheckpointManager(tmp_path, {"data": loader}) as manager:
        list(islice(loader, 5))
        manager.save(5).wait()
    fewer = loaders(3, 100, batch_size=2)[0]
    with CheckpointManager(tmp_path, {"data": fewer}) as manager:
        with caplog.at_level(logging.WARNING, logger="holdfast"):
            found = manager.resume()
        assert found is not None
        said = (
            "a batch of all ranks had 8 samples and has 6 here, so epoch 0 resumes at batch 7 "
            "in place of 5, and 2 of its samples are left out"
        )
        assert found.notes == (f"data: {said}",)
    assert caplog.messages == [f"the loader's position: {said}"]
    assert (fewer.epoch, fewer.batch) == (0, 7)


@pytest.mark.parametrize(
    "ranks", [ThreadCoordinator.for_ranks(3)[1], SimpleNamespace(rank=1, world_size=3)]
)
def test_any_object_with_a_rank_and_a_world_size_will_do(ranks: Any) -> None:
    loader = Loader(range(12), batch_size=2, shuffle=False, ranks=ranks)
    assert [batch.tolist() for batch in loader] == [[2, 3], [8, 9]]


@pytest.mark.parametrize(
    "ranks", [DataRanks(2, 2), DataRanks(-1, 2), DataRanks(0, 0), DataRanks(True, 2), (0, 2)]
)
def test_what_is_no_rank_is_refused(ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks="):
        Loader(range(12), batch_size=2, ranks=ranks)


def test_batches_that_all_ranks_cannot_fill_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=4 on each of 2 ranks with drop_last"):
        Loader(range(7), batch_size=4, drop_last=True, ranks=DataRanks(0, 2))


def train(num_workers: int, rank: int) -> tuple[Batches, dict[str, Any], Batches]:
    """Three batches in the default group; its position; and two of a resumed loader."""
    early = Loader(range(40), batch_size=4, ranks=None)
    alone = [batch.tolist() for batch in islice(early, 1)]
    loader, again = (
        Loader(range(40), batch_size=4, seed=1, num_workers=num_workers) for _ in range(2)
    )
    found = [batch.tolist() for batch in islice(loader, 3)]
    dist.barrier()
    again.load_state_dict(loader.state_dict())
    return found + [b.tolist() for b in islice(again, 2)], loader.state_dict(), alone


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, *full(2)])
def test_the_default_is_that_of_the_process_group(num_workers: int) -> None:
    results = [r for r in run_ranks(2, partial(train, num_workers)) if r is not None]
    (first, position, alone), (second, same, also_alone) = results
    whole = Loader(range(40), batch_size=8, seed=1)
    expected = [b.tolist() for b in whole]
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    assert position == same
    assert (position["batch"], position["batch_size"]) == (3, 8)
    assert alone == also_alone


def use_too_early(rank: int) -> str:
    """What a loader says that was made before the process group."""
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    dist.destroy_process_group()
    loader, told = (Loader(range(40), batch_size=4, **o) for o in ({}, {"ranks": None}))
    dist.init_process_group("gloo", store=dist.PrefixStore("b", store), rank=rank, world_size=2)
    next(iter(told))
    try:
        next(iter(loader))
    except UsageError as error:
        return str(error)
    return "nothing"


def test_a_loader_that_was_made_before_the_group_says_so() -> None:
    """Else each rank would train on all of the data."""
    for rank, said in enumerate(run_ranks(2, use_too_early)):
        assert f"made for rank 0 of 1, but this process is rank {rank} of 2" in str(said)


def test_a_loader_that_is_made_before_its_group_takes_the_part_that_the_launcher_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its length is right at once, also for schedulers that are made before the group."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = Loader(range(16), batch_size=2, seed=3)
    assert len(loader) == 2
    (expected,) = epochs_taken(Loader(range(16), batch_size=2, seed=3, ranks=DataRanks(1, 4)))
    assert epochs_taken(loader) == [expected]
    assert "part of rank 1 of 4, as its launcher says, and there is no process group" in caplog.text
    assert len(Loader(range(16), batch_size=2, ranks=None)) == 8


def epochs_taken(loader: Loader) -> list[Batches]:
    return [[batch.tolist() for batch in loader]]
