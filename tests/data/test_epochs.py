"""Loops by epoch: epochs and steps have the right numbers after a resume at any position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import pytest
from tests.data.sources import Shards

from holdfast.data import Buckets, DataRanks, Loader, Stream
from holdfast.errors import UsageError

Data: TypeAlias = Loader | Stream
COUNT = 3

MAKERS: dict[str, Callable[[], Data]] = {
    "loader": lambda: Loader(range(10), batch_size=4),
    "of a rank": lambda: Loader(range(10), batch_size=2, ranks=DataRanks(1, 2)),
    "sizes by epoch": lambda: Loader(range(10), batch_size={0: 4, 1: 2}),
    "buckets": lambda: Loader(
        range(10), batch_sampler=Buckets([1 + n % 5 for n in range(10)], max_tokens=8)
    ),
    "short epochs": lambda: Loader(range(10), batch_size=4, batches_per_epoch=2),
    "stream": lambda: Stream(Shards(), batch_size=4, shuffle=4),
    "stream of a rank": lambda: Stream(Shards(), batch_size=2, ranks=DataRanks(1, 2)),
}


def loop(data: Data) -> Iterator[tuple[int, int, Any]]:
    for epoch in data.epochs(COUNT):
        for step, batch in data.steps():
            yield epoch, step, batch.tolist()
        assert data.step is not None
        yield epoch, -data.step, "end"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_resume_at_any_position_continues_with_the_right_numbers(kind: str) -> None:
    make = MAKERS[kind]
    whole = [*loop(make())]
    steps = [step for _, step, _ in whole if step > 0]
    assert steps == [*range(1, len(steps) + 1)]
    for taken in range(len(whole)):
        first, again = make(), make()
        before = [*islice(loop(first), taken)]
        again.load_state_dict(first.state_dict())
        after = [*loop(again)]
        assert before + after == whole


def test_after_the_last_epoch_nothing_is_left() -> None:
    data, again = (Loader(range(10), batch_size=4) for _ in range(2))
    assert [*loop(data)][-1] == (COUNT - 1, -9, "end")
    again.load_state_dict(data.state_dict())
    assert [*loop(again)] == []
    assert next(again.epochs(COUNT + 1)) == COUNT


def test_a_position_without_numbers_is_counted_if_it_tells_them() -> None:
    def resumed(kind: str) -> Data:
        old, new = MAKERS[kind](), MAKERS[kind]()
        assert len([*islice(old.until(9), 7)]) == 7
        assert "steps" not in old.state_dict()
        new.load_state_dict(old.state_dict())
        return new

    assert next(iter(resumed("loader").steps()))[0] == 8
    with pytest.raises(UsageError, match="start="):
        resumed("stream").steps()
    assert next(iter(resumed("stream").steps(start=7)))[0] == 8


def test_a_break_continues_in_the_epoch_and_a_body_without_batches_is_an_error() -> None:
    data = Loader(range(10), batch_size=4)
    seen = []
    for epoch in data.epochs(2):
        for step, _ in data.steps():
            seen.append((epoch, step))
            if step in (1, 3):
                break
    assert seen == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    with pytest.raises(UsageError, match="no batch in epoch 2"):
        for _ in data.epochs(9):
            pass
