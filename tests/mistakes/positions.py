"""Loops, sources and loaders whose position in the data would not be that of the training."""

from __future__ import annotations

import random
from itertools import islice

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User, new_state
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from holdfast.data import Loader, Stream

THEME = Theme("Positions in the data")
case = THEME.case


class Numbers:
    """A source with a state."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        while self.read < 40:
            self.read += 1
            yield self.read

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Shuffled(Numbers):
    """A wrapper with a buffer that is in no state."""

    def __iter__(self):
        draws, buffer = random.Random(1), []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) == 6:
                yield buffer.pop(draws.randrange(6))


class Ahead(Numbers):
    """A wrapper that has one sample in hand."""

    def __iter__(self):
        numbers = super().__iter__()
        held = next(numbers)
        for number in numbers:
            yield held
            held = number


class ByEpoch(Numbers):
    """A source with another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (number + 100 * self.epoch for number in super().__iter__())


class Plain:
    """A wrapper that does not forward `set_epoch`."""

    def __init__(self, inner):
        self.inner = inner
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    def __iter__(self):
        return iter(self.inner)


class Silent(Plain):
    """A wrapper whose `set_epoch` does nothing."""

    def set_epoch(self, epoch):
        pass


class Orders(RandomSampler):
    """A sampler with another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        own = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self), generator=own).tolist())


class Hiding:
    """A wrapper of a sampler without its `set_epoch`."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


class Sampled(Numbers):
    """Batches of torch's DataLoader, with a position."""

    def __init__(self):
        super().__init__()
        numbers = range(8)
        self.loader = DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 1, 0))  # type: ignore[arg-type]

    def __len__(self):
        return 4

    def __iter__(self):
        for batch in islice(self.loader, self.read, None):
            self.read += 1
            yield batch
        self.read = 0


def sum_of(model):
    return sum(parameter.sum() for parameter in model.parameters())


def ahead(batches):
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = batch
    yield held


def saved(user: User, data, batches) -> None:
    """A new run that takes four batches, and saves after each."""
    state = user.watch({**new_state(), "data": data})
    manager = user.manager(user.new, state=state)
    for step, _ in enumerate(islice(batches, 4), 1):
        manager.save(step, wait=True)


@case("a prefetcher around the `Loader`", names="holds them in hand", state=None)
def _(user: User) -> None:
    data = Loader(torch.zeros(20, 4), 2)
    saved(user, data, ahead(data))


@case("a prefetcher around a `Stream`", names="holds them in hand", state=None)
def _(user: User) -> None:
    data = Stream(Numbers(), 2)
    saved(user, data, ahead(data))


@case("a `Stream` of a source with a shuffle buffer", names="a Shuffled, is incomplete", state=None)
def _(user: User) -> None:
    data = Stream(Shuffled(), 2)
    saved(user, data, data)


@case("a `Stream` of a source that reads ahead", names="a Ahead, is incomplete", state=None)
def _(user: User) -> None:
    data = Stream(Ahead(), 2)
    saved(user, data, data)


@case("a source with a shuffle buffer in the state", names="this Shuffled", state=None)
def _(user: User) -> None:
    data = Shuffled()
    saved(user, data, data)


@case("a sampler's wrapper hides its `set_epoch`", names="in each lap", state=None)
def _(user: User) -> None:
    list(Loader(torch.zeros(40, 4), 4, sampler=Hiding(Orders(range(40)))).until(12))


@case("a wrapper in the state does not pass `set_epoch` on", names="this Silent", state=None)
def _(user: User) -> None:
    data = Silent(ByEpoch())
    saved(user, data, data)


@case("a `DistributedSampler` whose `set_epoch` is never called", names="same batch", state=None)
def _(user: User) -> None:
    user.trainer(data=Sampled(), loss=lambda model, batch: batch.sum() * 0 + sum_of(model)).fit(
        "3ep"
    )


@case("a wrapper of a source hides its `set_epoch`", names="does not reach", state=None)
def _(user: User) -> None:
    list(islice(Stream(Plain(ByEpoch()), 4).until(20), 12))


@case("an evaluation iterates over the training `Loader`", names="gradients off", state=None)
def _(user: User) -> None:
    data = Loader(torch.zeros(20, 4), 2)
    manager = user.manager(user.new, state=user.watch({**new_state(), "data": data}))
    next(iter(data))
    with torch.no_grad():
        list(data)
    manager.save(1, wait=True)


@case("a loop over a DataLoader made of parts of the `Loader`", names="does not move", state=None)
def _(user: User) -> None:
    data = Loader(torch.zeros(20, 4), 2)
    saved(user, data, DataLoader(data.dataset, batch_sampler=data.batch_sampler))  # type: ignore[arg-type]


@case("a validation with `persistent_workers=True`", names="persistent_workers", state=3)
def _(user: User) -> None:
    held_out = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    user.manager().resume()
    del held_out


@case("a validation made after a save, with `persistent_workers`", names="persistent_workers")
def _(user: User) -> None:
    manager = user.manager(user.new)
    manager.save(1, wait=True)
    held_out = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    list(held_out)
    manager.save(2, wait=True)


@case("`Loader(dataset, 2, generator=…)`", names="seed=…")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), 2, generator=torch.Generator())


@case("`Loader(dataset, 2, timeout=-1)`", names="timeout=-1")
def _(user: User) -> None:
    Loader(torch.zeros(4, 4), 2, timeout=-1)


@case("a position of an older version, inside of an epoch", names="version: stored 1, here 2")
def _(user: User) -> None:
    data = Loader(torch.zeros(20, 4), 2)
    next(iter(data))
    old = {name: value for name, value in data.state_dict().items() if name != "version"}
    Loader(torch.zeros(20, 4), 2).load_state_dict(old)
