"""Sources whose state is incomplete, or that the number of an epoch does not reach, are named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from data.sources import Shards
from holdfast.data import Stream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Wrapped(IterableDataset[Any]):
    """A source inside of another class, which keeps its state."""

    def __init__(self, inner: Any) -> None:
        self.parts = {"inner": [inner]}
        self.transform = lambda sample: sample

    @property
    def inner(self) -> Any:
        return self.parts["inner"][0]

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.inner)


class Buffered(Wrapped):
    """Shuffles in a buffer that survives a load, and that is in no state."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.buffer: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        draws = random.Random(7)
        for sample in self.inner:
            self.buffer.append(sample)
            if len(self.buffer) == 5:
                yield self.buffer.pop(draws.randrange(5))
        yield from self.buffer


class Ahead(Wrapped):
    """Holds one sample in hand."""

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.inner)
        held = next(samples)
        for sample in samples:
            yield held
            held = sample
        yield held


class Forwarding(Wrapped):
    def set_epoch(self, epoch: int) -> None:
        getattr(self.inner, "inner", self.inner).set_epoch(epoch)


class Connected(Forwarding):
    """Cannot be copied, so nothing is known of its state."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'socket' object")


class InOrder(Shards):
    """Has `set_epoch`, and no order that depends on it."""

    def set_epoch(self, epoch: int) -> None:
        pass


INCOMPLETE, UNREACHED = "is incomplete", "does not reach"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda: Wrapped(Buffered(InOrder())), {}, [INCOMPLETE]),
        (lambda: Forwarding(Ahead(InOrder())), {"shuffle": 4}, [INCOMPLETE]),
        (lambda: Wrapped(Shards()), {}, [UNREACHED]),
        (lambda: Ahead(Shards()), {}, [INCOMPLETE, UNREACHED]),
        (lambda: Forwarding(Shards()), {}, []),
        (lambda: Wrapped(InOrder()), {}, []),
        (lambda: Connected(Buffered(Shards())), {}, []),
        (Shards, {"shuffle": 4}, []),
    ],
)
def test_what_a_source_leaves_out_is_named_once(
    make: Callable[[], Any],
    options: dict[str, Any],
    expected: list[str],
    num_workers: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = Stream(make(), batch_size=2, num_workers=num_workers, **options)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for _ in islice(data.until(20), 14):
            data.state_dict()
    assert len(caplog.messages) == len(expected)
    assert all(part in caplog.text for part in expected)
    assert not expected or f"a {type(data.source).__name__}," in caplog.text


def test_a_stream_that_is_not_saved_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        list(Stream(Buffered(InOrder()), batch_size=2))
    assert caplog.messages == []
