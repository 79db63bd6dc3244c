"""Attributes that are state and in no component are named, and caches are not."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import Dataset

from holdfast import CheckpointManager, MemoryStore
from holdfast.data import Loader
from holdfast.errors import UsageError


class Model(nn.Module):
    """A model that does something with its attributes in each forward pass."""

    def __init__(self, does: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.net, self._does = nn.Linear(4, 2), does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, batch: Tensor) -> Tensor:
        self._does(self, batch)
        out: Tensor = self.net(batch)
        return out


class Hidden(torch.optim.SGD):
    """An optimizer with momenta, a count, or another optimizer in an attribute."""

    def __init__(self, parameters: Any, what: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.what, self.count, self.momenta = what, 0, dict[Tensor, Tensor]()
        self.base = torch.optim.Adam(self.param_groups)
        self.nested, self.function = {"scaler": Tally()}, counting()

    def step(self, closure: Any = None) -> None:
        if self.what == "count":
            self.count += 1
        elif self.what == "base":
            self.base.step()
        elif self.what == "nested":
            self.nested["scaler"].count()
        elif self.what == "function":
            self.function()
        else:
            for parameter in self.param_groups[0]["params"]:
                self.momenta.setdefault(parameter, torch.zeros_like(parameter)).add_(1)


class Progress:
    """An object that saves only some of what it counts, under another name."""

    def __init__(self) -> None:
        self.seen, self.lost, self.shadow = 0, 0, torch.zeros(2)

    def advance(self) -> None:
        self.seen += 3
        self.lost += 5
        self.shadow += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.seen, "average": self.shadow.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Tally:
    """An object with a count, as an augmentation has."""

    def __init__(self) -> None:
        self.n = 0

    def count(self, *_: Any) -> None:
        self.n += 1

    __call__ = count


class Slotted:
    """The same, with slots."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, *_: Any) -> None:
        self.n += 1


def counting() -> Callable[..., float]:
    """Make a function that counts its calls."""
    calls, kept = 0, {"n": 0}

    def count(*_: Any) -> float:
        nonlocal calls
        calls += 1
        kept["n"] += 1
        return 0.9

    return count


def add(model: Any, batch: Tensor) -> None:
    model.held = model.held + 1


def add_in_place(model: Any, batch: Tensor) -> None:
    model.held += 1


def add_inside(model: Any, batch: Tensor) -> None:
    model.held["a"]["b"]["n"] += 1


def cache(model: Any, batch: Tensor) -> None:
    model.size, model.map = len(batch), batch.detach().softmax(1)
    model.loss, model.last = batch.sum(), float(batch.sum())
    model.output = model.net(batch)
    model.masks[len(batch)] = torch.ones(len(batch))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    def run(model: nn.Module, optimizer: Any = None, **state: Any) -> list[str]:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        whole = {"model": model, "optimizer": optimizer, "data": {}, **state}
        stepped = [value for name, value in state.items() if name != "data"]
        with CheckpointManager(MemoryStore(), whole) as manager:
            for step in range(1, 5):
                model(torch.full((7 - step % 3, 4), float(step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for value in stepped:
                    getattr(value, "advance", getattr(value, "step", None))()
                manager.save(step, wait=True)
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    return run


@pytest.mark.parametrize(
    ("held", "does"),
    [
        (0, add),
        (torch.zeros(3), add_in_place),
        (np.zeros(3), add_in_place),
        ({"a": torch.zeros(2)}, lambda model, _: model.held["a"].add_(1)),
        ([torch.zeros(2)], lambda model, _: model.held[0].add_(1)),
        ([], lambda model, _: model.held.append(1.0)),
        (False, lambda model, _: setattr(model, "held", True)),
        (np.int64(0), add),
        (1.0, lambda model, _: setattr(model, "held", model.held * 0.9)),
        (0.0, lambda model, _: setattr(model, "held", model.held + 0.1)),
        (Counter(), lambda model, _: model.held.update("a")),
        (defaultdict(int), lambda model, _: model.held.update(a=model.held["a"] + 1)),
        ({"a": {"b": {"n": 0}}}, add_inside),
        (Tally(), lambda model, _: model.held()),
        (Slotted(), lambda model, _: model.held()),
        (partial(Tally()), lambda model, _: model.held()),
        (Tally().count, lambda model, _: model.held()),
        (counting(), lambda model, _: model.held()),
        (random.Random(0), lambda model, _: model.held.random()),
        (np.random.default_rng(0), lambda model, _: model.held.random()),
    ],
    ids=[
        *("count", "tensor", "array", "dict", "list", "grows", "flag", "numpy number", "annealed"),
        *("progress", "Counter", "defaultdict", "nested", "object", "slots", "partial", "method"),
        *("closure", "random", "numpy generator"),
    ],
)
def test_state_in_an_attribute_of_a_module_is_named_once(
    held: Any, does: Callable[[Any, Tensor], Any], said: Callable[..., list[str]]
) -> None:
    (text,) = said(nn.Sequential(Model(does, held=held), nn.Linear(2, 1)))
    assert "model.0.held" in text


@pytest.mark.parametrize("make", [Tally, Slotted, counting])
def test_state_in_a_hook_is_named(
    make: Callable[[], Callable[..., Any]], said: Callable[..., list[str]]
) -> None:
    model = nn.Linear(4, 2)
    hook = make()
    model.register_forward_pre_hook(lambda *_: hook() and None)
    (text,) = said(model)
    assert "model.forward_pre_hooks" in text


def functions_of(optimizer: Any) -> Iterator[Any]:
    yield schedules.LambdaLR(optimizer, counting())
    yield schedules.MultiplicativeLR(optimizer, counting())
    yield schedules.ChainedScheduler([schedules.LambdaLR(optimizer, counting())])
    first = schedules.ConstantLR(optimizer, 1.0)
    yield schedules.SequentialLR(optimizer, [first, schedules.LambdaLR(optimizer, counting())], [1])


@pytest.mark.parametrize("at", range(4))
def test_state_in_functions_of_schedulers_is_named(at: int, said: Callable[..., list[str]]) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (text,) = said(model, optimizer, scheduler=[*functions_of(optimizer)][at])
    assert "lr_lambdas.0.kept.n" in text
    assert "lr_lambdas.0.calls" in text


def test_what_torch_saves_of_schedulers_is_no_loss(said: Callable[..., list[str]]) -> None:
    class Own(schedules.LambdaLR):
        def step(self, epoch: Any = None) -> None:
            self.own = getattr(self, "own", 0) + 1
            super().step(epoch)

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = 3  # a variable of the script, which the function only reads
    assert said(model, optimizer, scheduler=Own(optimizer, lambda at: 0.9**at * number)) == []


def test_state_of_a_dataset_and_a_collate_function_is_named(
    said: Callable[..., list[str]],
) -> None:
    class Noisy(Dataset[Tensor]):
        def __init__(self) -> None:
            self.source = np.random.RandomState(0)

        def __len__(self) -> int:
            return 64

        def __getitem__(self, at: int) -> Tensor:
            return torch.full((2,), self.source.rand())

    class Collate(Tally):
        def __call__(self, samples: list[Tensor]) -> Tensor:
            self.count()
            return torch.stack(samples)

    loader = Loader(Noisy(), 4, seed=0, collate_fn=Collate())
    batches = iter(loader)
    model = Model(lambda *_: next(batches))
    (text,) = said(model, data=loader)
    assert "data.dataset.source" in text
    assert "data.collate_fn.n" in text


@pytest.mark.parametrize("what", ["count", "base", "momenta", "nested", "function"])
def test_state_in_an_attribute_of_an_optimizer_is_named(
    what: str, said: Callable[..., list[str]]
) -> None:
    model = nn.Linear(4, 2)
    (text,) = said(model, Hidden(model.parameters(), what))
    assert f"optimizer.{what}" in text


def test_what_an_object_leaves_out_is_named(said: Callable[..., list[str]]) -> None:
    (text,) = said(nn.Linear(4, 2), progress=Progress())
    assert "progress.lost" in text
    assert "seen" not in text
    assert "shadow" not in text


def test_what_a_forward_pass_writes_anew_is_no_state(said: Callable[..., list[str]]) -> None:
    assert said(Model(cache, size=7, masks={})) == []


def test_attributes_that_a_component_holds_are_no_loss(said: Callable[..., list[str]]) -> None:
    class Saves(Model):
        def get_extra_state(self) -> Any:
            return {"held": self.held}

    assert said(Saves(add, held=0)) == []


def test_what_a_script_logs_and_caches_is_no_state(said: Callable[..., list[str]]) -> None:
    def note(model: Any, batch: Tensor) -> None:
        model.cache.key, model.cache.size = batch.detach(), len(batch)
        model.rate = optimizer.param_groups[0]["lr"]

    model = Model(note, cache=Tally(), rate=0.0)
    seen: dict[str, Tensor] = {}
    model.net.register_forward_hook(lambda _, __, out: seen.update(out=out.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.ExponentialLR(optimizer, 0.9)
    assert said(model, optimizer, scheduler=scheduler) == []


def test_sizes_features_and_messages_of_a_forward_pass_are_no_state(
    said: Callable[..., list[str]],
) -> None:
    def note(model: Any, batch: Tensor) -> None:
        model.seq_len, model._warned = batch.shape[1], True
        model.features = [batch, batch]

    assert said(Model(note, seq_len=0, _warned=False, features=[])) == []


def test_attributes_named_in_not_state_are_not_reported(said: Callable[..., list[str]]) -> None:
    def note(model: Any, batch: Tensor) -> None:
        model.seen += 1
        model.scratch += 1

    (text,) = said(Model(note, seen=0, scratch=torch.zeros(3), not_state=("scratch",)))
    assert "model.seen" in text
    assert "scratch" not in text
    assert "not_state" in text


def test_not_state_may_be_a_property_or_that_of_a_nested_object(
    said: Callable[..., list[str]],
) -> None:
    class Nested(Tally):
        not_state = ("n",)

    class Computed(Model):
        @property
        def not_state(self) -> tuple[str, ...]:
            return ("seen",)

    def note(model: Any, batch: Tensor) -> None:
        model.seen += 1
        model.tally()

    assert said(Computed(note, seen=0, tally=Nested())) == []


def test_not_state_that_is_no_tuple_of_names_is_refused(tmp_path: Path) -> None:
    model = Model(add, held=0, not_state="held")
    with pytest.raises(UsageError, match="not_state='held'"):
        CheckpointManager(tmp_path, {"model": model})


class Unreadable(Dataset[Tensor]):
    """Has an unset slot, and an error for each attribute that it lacks."""

    __slots__ = ("unset",)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("where", ["hook", "dataset"])
def test_attributes_that_cannot_be_read_fail_no_save(where: str, tmp_path: Path) -> None:
    model, unreadable = nn.Linear(2, 2), Unreadable()
    state: dict[str, Any] = {"model": model, "data": {}}
    if where == "hook":
        model.register_forward_hook(partial(lambda one, *_: None, unreadable))
    else:
        state["data"] = Loader(unreadable, 2, seed=0)
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(1, wait=True)
