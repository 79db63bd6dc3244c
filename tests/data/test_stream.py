"""Stream: the position of an iterable source is exact, in blocks, workers, epochs and ranks."""

from __future__ import annotations

import logging
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.sources import Shards, Stateless
from data.test_loader import Augmented, assert_same, collate_with_noise, global_state
from holdfast.data import DataRanks, Stream
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager
from marks import diagonal

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
KINDS: dict[str, dict[str, Any]] = {
    "state": {},
    "shuffled": {"shuffle": 5},
    "replayed": {"source": Stateless(), "resume": "replay"},
    "replayed-shuffled": {"source": Stateless(), "resume": "replay", "shuffle": 4},
    "full-only": {"drop_last": True},
}


def stream(**options: Any) -> Stream:
    options = {"source": Shards(), "batch_size": 2, "seed": 7, **options}
    return Stream(options.pop("source"), collate_fn=collate_with_noise, **options)


def epochs(data: Stream, count: int) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in data]


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_resumes_exactly(kind: str) -> None:
    straight = epochs(stream(**KINDS[kind]), 3)
    for taken in range(len(straight)):
        first, second = stream(**KINDS[kind]), stream(**KINDS[kind])
        begun = list(islice(first.until(100), taken))
        torch.rand(3)
        random.random()
        second.load_state_dict(first.state_dict())
        rest = list(islice(second.until(100, start=taken), len(straight) - taken))
        assert_same(begun + rest, straight)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "taken"), diagonal(["state", "shuffled", "replayed"], [1, 4, 9, 12])
)
def test_positions_with_workers_resume_exactly(kind: str, taken: int) -> None:
    """Also after a worker has ended, and in the middle of the workers' turns."""
    straight = epochs(stream(num_workers=3, **KINDS[kind]), 2)
    first, second = (stream(num_workers=3, **KINDS[kind]) for _ in range(2))
    begun = list(islice(first.until(100), taken))
    second.load_state_dict(first.state_dict())
    rest = list(islice(second.until(100, start=taken), len(straight) - taken))
    assert_same(begun + rest, straight)


def test_each_sample_comes_once_an_epoch_and_epochs_differ() -> None:
    data = stream(shuffle=6)
    each = [[int(row) for batch in data for row in batch[:, 0]] for _ in range(2)]
    expected = sorted(int(row) for row in torch.cat([*stream()])[:, 0])
    assert [len(found) for found in each] == [17, 17]
    assert each[0] != each[1]
    assert len(expected) == 17


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_left_as_they_were(num_workers: int) -> None:
    before = global_state()
    epochs(stream(num_workers=num_workers, shuffle=4), 2)
    assert global_state() == before


def test_the_end_of_an_epoch_is_known_with_its_last_batch() -> None:
    data = stream()
    ends = [data.at_epoch_end for _ in data]
    assert ends == [False] * 8 + [True]
    assert (data.epoch, data.batch, data.at_epoch_end) == (1, 0, False)


def test_a_position_after_the_last_batch_is_still_in_its_epoch() -> None:
    data, again = stream(), stream()
    list(islice(data, 9))
    again.load_state_dict(data.state_dict())
    assert (again.epoch, again.batch, again.at_epoch_end) == (0, 9, True)
    assert list(again) == []
    assert_same(list(again), epochs(stream(), 2)[9:])


def test_the_ranks_parts_are_the_batch_of_one_and_another_world_size_goes_on() -> None:
    def part(rank: int, world_size: int) -> Stream:
        ranks = DataRanks(rank, world_size)
        return Stream(Shards(), batch_size=4 // world_size, seed=1, ranks=ranks, shuffle=8)

    whole = [batch[:, 0] for batch in part(0, 1)]
    parts = [[b[:, 0] for b in islice(part(rank, 2), 2)] for rank in range(2)]
    assert_same([torch.cat(both) for both in zip(*parts, strict=True)], whole[:2])
    first, second = part(1, 2), part(0, 1)
    list(islice(first, 2))
    second.load_state_dict(first.state_dict())
    assert_same([batch[:, 0] for batch in second], whole[2:])


def test_a_resume_by_the_manager_is_exact(tmp_path: Path) -> None:
    straight = epochs(stream(shuffle=5), 2)
    data = stream(shuffle=5)
    with CheckpointManager(tmp_path, {"data": data}) as manager:
        begun = list(islice(data, 4))
        manager.save(4).wait()
        next(iter(data))
    data = stream(shuffle=5)
    with CheckpointManager(tmp_path, {"data": data}) as manager:
        manager.resume()
        assert_same(begun + epochs(data, 2), straight)


@pytest.mark.parametrize(
    "change", [{"batch_size": 3}, {"shuffle": 2}, {"num_workers": 1}, {"drop_last": True}]
)
def test_other_settings_are_refused_within_an_epoch_only(change: dict[str, Any]) -> None:
    data = stream(**({"source": Stateless(), "resume": "replay"} if "resume" in change else {}))
    list(islice(data, 2))
    other = stream(**change)
    with pytest.raises(UsageError, match=f"{next(iter(change))}: stored"):
        other.check_state_dict(data.state_dict())
    list(islice(data, 7))
    other.load_state_dict(data.state_dict())
    assert list(other) == []
    assert other.epoch == 1


def test_a_stream_has_the_attributes_of_torchs_loader() -> None:
    source = Shards()
    data = Stream(source, 3)
    assert (data.dataset, data.batch_size, data.num_workers) == (source, 3, 0)
    assert (data.sampler, data.batch_sampler, data.drop_last) == (None, None, False)


def test_a_position_of_another_version_is_refused_within_an_epoch_only() -> None:
    data, other = stream(), stream()
    list(islice(data, 2))
    old = {name: value for name, value in data.state_dict().items() if name != "version"}
    with pytest.raises(UsageError, match="version: stored 1, here 2"):
        other.check_state_dict(old)
    (note,) = other.check_state_dict({**old, "epoch": 1, "batch": 0})
    assert "its version is 1" in note


def test_a_source_that_gives_other_samples_when_replayed_is_refused() -> None:
    data = stream(**KINDS["replayed"])
    list(islice(data, 3))
    other = stream(source=Stateless(18), resume="replay")
    other.load_state_dict(data.state_dict())
    with pytest.raises(UsageError, match="returned different samples when epoch 0 was read again"):
        next(iter(other))


def test_another_fingerprint_is_refused_and_another_type_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, named, other = stream(fingerprint="a"), stream(fingerprint="a"), stream(fingerprint="b")
    list(islice(data, 1))
    named.load_state_dict(data.state_dict())
    with pytest.raises(UsageError, match="fingerprint='a', not 'b'"):
        other.load_state_dict(data.state_dict())
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        stream().load_state_dict(data.state_dict())
    assert "had the fingerprint 'a', and none is given now" in caplog.text


class NoState:
    def __iter__(self) -> Any:
        return iter([1])


class Counted(NoState):
    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": NoState()}, 'pass resume="replay"'),
        ({"source": Counted()}, "read it by index, with a Loader"),
        ({"source": iter([1])}, "each time it is iterated over"),
        ({"source": Augmented()}, "each time it is iterated over"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"shuffle": -1}, "shuffle=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stream(**options)


def test_what_is_no_position_is_refused() -> None:
    data = stream()
    position = data.state_dict()
    for change in ({"epoch": -1}, {"batch": True}, {"at_end": 0}, {"more": 1}):
        with pytest.raises(UsageError, match="not the position of a Stream"):
            data.load_state_dict({**position, **change})


def test_a_source_without_samples_is_an_error_in_a_loop_by_steps() -> None:
    with pytest.raises(UsageError, match="no batch in epoch 0"):
        list(stream(source=Shards(())).until(1))


def test_a_former_iterator_says_that_it_has_ended() -> None:
    data = stream()
    former = iter(data)
    next(former)
    next(iter(data))
    with pytest.raises(UsageError, match="has ended"):
        next(former)
