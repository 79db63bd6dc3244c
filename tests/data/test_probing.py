"""Sources whose state is incomplete, or that the number of an epoch does not reach, are named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from data.sources import Shards
from holdfast.data import Loader, Stream
from holdfast.manager import CheckpointManager
from holdfast.state import probing
from holdfast.state.probing import digest_sample

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


class Numbers:
    """A source with a state, whose samples depend on the global generator."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.read < 20:
            self.read += 1
            yield self.read, float(torch.rand(()))
        self.read = 0

    def state_dict(self) -> Any:
        return {"read": self.read}

    def load_state_dict(self, state: Any) -> None:
        self.read = state["read"]


class Shuffled(Numbers):
    """Shuffles in a buffer that is in no state."""

    size = 5

    def __iter__(self) -> Iterator[Any]:
        draws, buffer = random.Random(7), list[Any]()
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == self.size:
                yield buffer.pop(draws.randrange(self.size))
        yield from buffer


class AllShuffled(Shuffled):
    """Reads all before it gives a sample, so that its state does not change any more."""

    size = 1000


class InHand(Numbers):
    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        held = next(samples)
        for sample in samples:
            yield held
            held = sample
        yield held


class Noise(Numbers):
    """Draws from a generator of its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator or torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        for _ in super().__iter__():
            yield torch.rand(2, generator=self.generator)


class CountedByLoop(Numbers):
    """Its position is what the loop has counted."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.read, 20)
        self.read = 0


class Listing(Numbers):
    """Has items, and no position in them."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(5))


class Remembering(Numbers):
    """Reading it moves an object that a copy would share, so it is not read."""

    def __init__(self) -> None:
        super().__init__()
        numbers = iter(range(40))
        self.draw = lambda: next(numbers)

    def __iter__(self) -> Iterator[Any]:
        for _ in super().__iter__():
            yield self.draw()


class Batched(Numbers):
    """Skips batches of a DataLoader, which has workers and a sampler with `set_epoch`."""

    def __init__(self, is_passed_on: bool, *, shuffle: bool = True) -> None:
        super().__init__()
        sampler = DistributedSampler(range(20), 1, 0, shuffle=shuffle)  # type: ignore[arg-type]
        self.loader = DataLoader(range(20), 4, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
        self.sampler, self.is_passed_on = sampler, is_passed_on

    def set_epoch(self, epoch: int) -> None:
        if self.is_passed_on:
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number >= self.read:
                self.read += 1
                yield batch
        self.read = 0


SHARED = torch.Generator()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Shuffled, INCOMPLETE),
        (AllShuffled, INCOMPLETE),
        (InHand, INCOMPLETE),
        (Noise, INCOMPLETE),
        (lambda: Batched(False), UNREACHED),
        (Numbers, None),
        (CountedByLoop, None),
        (Listing, None),
        (Remembering, None),
        (lambda: Noise(SHARED), None),
        (lambda: Batched(True), None),
        (lambda: Batched(False, shuffle=False), None),
    ],
)
def test_a_component_that_gives_data_is_checked_once_and_not_moved(
    make: Callable[[], Any], expected: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    SHARED.manual_seed(0)
    alone = [repr(sample) for sample in make()]
    torch.manual_seed(0)
    SHARED.manual_seed(0)
    state = {"model": nn.Linear(1, 1), "data": make(), "order": SHARED}
    torch.manual_seed(0)
    taken = []
    with CheckpointManager(tmp_path, state) as manager:
        for step, sample in enumerate(state["data"], 1):
            taken.append(repr(sample))
            if step < 4:
                manager.save(step)
    assert taken == alone
    found = [text for text in caplog.messages if INCOMPLETE in text or UNREACHED in text]
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_a_buffer_that_is_empty_at_each_save_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Shuffled()
    with CheckpointManager(tmp_path, {"model": nn.Linear(1, 1), "data": data}) as manager:
        for epoch in (1, 2):
            list(data)
            manager.save(epoch)
        assert INCOMPLETE not in caplog.text
        batches = iter(data)
        next(batches)
        manager.save(3)
    assert caplog.text.count(INCOMPLETE) == 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_known_fault_of_a_component_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    data = module.StatefulDataLoader([1, 2], sampler=RandomSampler([1, 2]))
    with CheckpointManager(tmp_path, {"model": nn.Linear(1, 1), "data": data}) as manager:
        for step in (1, 2):
            manager.save(step)
    assert caplog.text.count("RandomSampler loses its order") == 1


class ByEpoch:
    """A sampler with another order in each epoch."""

    def __init__(self, *, is_fixed: bool = False) -> None:
        self.epoch, self.is_fixed = 0, is_fixed

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 0 if self.is_fixed else epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        own = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(12, generator=own).tolist())


class Hiding:
    """A wrapper of a sampler without its `set_epoch`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


@pytest.mark.parametrize(
    ("sampler", "batch_size", "is_named"),
    [
        (Hiding(ByEpoch()), 3, True),
        (ByEpoch(), 3, False),
        (Hiding(ByEpoch(is_fixed=True)), 3, False),
        (Hiding(range(12)), 3, False),
        (Hiding(ByEpoch()), 12, False),
    ],
)
def test_a_sampler_that_hides_set_epoch_is_named_once(
    sampler: Any, batch_size: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    list(Loader(range(12), batch_size, sampler=sampler).until(14))
    assert caplog.text.count(UNREACHED) == is_named


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.eye(3).mul(value).to_sparse(),
        lambda value: torch.eye(3).roll(value, 0).to_sparse(),
        lambda value: torch.eye(3).mul(value).to_sparse_csr(),
        lambda value: torch.full((3,), value, dtype=torch.cfloat).conj(),
        lambda value: torch.nested.nested_tensor([torch.full((2,), value)], layout=torch.jagged),
    ],
)
def test_samples_of_any_layout_are_told_apart(make: Callable[[float], torch.Tensor]) -> None:
    digests = [digest_sample({"x": [make(value)]}) for value in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


def test_a_sample_without_memory_of_its_own_is_told_by_its_type() -> None:
    assert digest_sample(torch.ones(2, device="meta"))


def test_a_source_of_many_names_is_kept_without_a_look_at_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(probing, "kind_of", looks.append)
    assert probing.FreshCopies.keep_source([(str(number), number) for number in range(1000)])
    assert len(looks) < 10


class Counted(Numbers):
    """Counts how often its copies are read."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).num_read += 1
        return super().__iter__()


@pytest.mark.parametrize(("limit_s", "expected"), [(-1.0, 1), (60.0, 2)])
def test_copies_of_a_slow_source_are_not_read_on(
    limit_s: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save waits for them."""
    monkeypatch.setattr(probing, "MAX_FIRST_S", limit_s)
    monkeypatch.setattr(Counted, "num_read", 0)
    state = {"model": nn.Linear(1, 1), "data": Counted()}
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(1)
    assert Counted.num_read == expected


class Looked:
    """A sample that counts the looks at it."""

    num_looks = 0

    @property
    def set_epoch(self) -> None:
        type(self).num_looks += 1


@pytest.mark.parametrize(("num_samples", "num_looks"), [(10, 10), (5000, 0)])
def test_no_set_epoch_is_looked_for_among_many_samples(num_samples: int, num_looks: int) -> None:
    """It would take seconds for millions of them."""
    Looked.num_looks = 0
    data = [Looked() for _ in range(num_samples)]
    assert not probing.hides_epochs(SequentialSampler(data), 1)
    assert Looked.num_looks == num_looks
