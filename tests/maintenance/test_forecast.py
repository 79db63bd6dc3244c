"""Claims about the forecast: what it says is what a real manager then does."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager, SavePolicy, SideSaver, StateHooks, Tiered
from holdfast.errors import UsageError
from holdfast.maintenance.forecast import AssumedSave, RetentionForecast, forecast_retention
from holdfast.maintenance.retention import candidate
from holdfast.policy.rule import Rule
from holdfast.policy.rules import (
    All,
    Best,
    Budget,
    ByClass,
    Daily,
    EveryNth,
    Hourly,
    Last,
    Within,
)
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from marks import full

HISTORIES = 5
"""Histories of one test: 40 in `make test`, 200 in `make test-full`."""
Left = dict[tuple[int, int], frozenset[str]]
"""Order → components of each checkpoint that is left."""


def rule_of(draw: random.Random) -> Rule:
    """A random rule, of one to three parts, some of which drop components."""
    parts: list[Rule] = []
    for _ in range(draw.choice([1, 1, 2, 2, 3])):
        part = draw.choice(
            [
                Last(draw.randint(1, 4)),
                Last(draw.randint(1, 2), save_class=draw.choice(["permanent", "ephemeral"])),
                Best("loss", draw.randint(1, 3)),
                Best("acc", draw.randint(1, 2), "max"),
                EveryNth(f"{draw.choice([15, 25, 40])}step"),
                EveryNth("100tok"),
                Within(f"{draw.choice([9, 20, 35])}step"),
                Budget(draw.choice([3, 5, 7]) * 13_000 + 6_000),
                ByClass(draw.choice(["ephemeral_only", "all_non_permanent"])),
                Hourly(2),
                Daily(),
                All(),
            ]
        )
        if draw.random() < 0.25:
            part = part.then_drop(*draw.sample(["optimizer", "ema"], draw.randint(1, 2)))
        parts.append(part)
    return reduce(or_, parts)


@dataclass
class Run:
    """A run with random settings, and the script that trains it."""

    draw: random.Random
    local: MemoryStore = field(default_factory=lambda: MemoryStore("local"))
    remote: MemoryStore | None = None
    step: int = 0
    keeps_nothing_local: bool = False
    """Whether a local copy is deleted once it is uploaded."""
    is_odd: bool = False
    """Whether the state is unhealthy at the next save."""

    def __post_init__(self) -> None:
        draw = self.draw
        names = ("model", "optimizer", "ema")
        self.state = {name: {"w": torch.zeros(1000 * size)} for size, name in enumerate(names, 1)}
        self.remote = MemoryStore("remote") if draw.random() < 0.2 else None
        keep = rule_of(draw) if draw.random() < 0.95 else None
        every: SavePolicy | str = f"{draw.choice([5, 8, 10])}step"
        if draw.random() < 0.5:
            cooldown = draw.choice([None, "3step"])
            every = SavePolicy(permanent="20step", ephemeral="6step", cooldown=cooldown)
        self.root: Any = self.local
        if self.remote is not None:
            far = draw.choice([Last(4), Last(2) | Best("loss"), All(), None])
            near = draw.choice([0, keep])
            self.keeps_nothing_local = near == 0
            self.root = Tiered(self.local, self.remote, keep_local=near, keep_remote=far)
            keep = keep if near is None else None
        self.options: dict[str, Any] = {
            "every": every,
            "keep": keep,
            "savers": [_side(draw)] if draw.random() < 0.4 else [],
            "on_existing": draw.choice(["keep", "keep", "replace"]),
            "preflight": False,
            "sinks": (),
        }

    def manager(self) -> CheckpointManager:
        hooks = StateHooks(before_save=lambda now, metrics: ["odd"] if self.is_odd else [])
        return CheckpointManager(self.root, self.state, hooks=hooks, **self.options)

    def resume(self, manager: CheckpointManager, which: int | str = "latest") -> None:
        found = manager.resume(which)
        self.step = 0 if found is None else found.step

    def move(self) -> None:
        """Make a step of training: all of the state changes."""
        self.step += 1
        for part in self.state.values():
            part["w"] += self.draw.random()

    def live(self, manager: CheckpointManager) -> None:
        """Train for some steps, with everything that a person may do meanwhile."""
        draw = self.draw
        for _ in range(draw.randint(8, 40)):
            self.move()
            self.is_odd = draw.random() < 0.1
            metrics = {
                name: draw.choice([math.nan, float(draw.randint(0, 9)), float(draw.randint(0, 9))])
                for name in ("loss", "acc")
                if draw.random() < 0.9
            }
            counts = {"tokens": 4 * self.step, "metrics": metrics}
            if draw.random() < 0.04:
                part = draw.choice([None, ["model"], ["model", "optimizer"]])
                tags = ("mine",) if draw.random() < 0.3 else ()
                kind = draw.choice(["permanent", "ephemeral"])
                manager.save(self.step, components=part, tags=tags, save_class=kind, **counts)
            manager.maybe_save(self.step, **counts)
            self.is_odd = False
            if draw.random() < 0.05:
                self._mark(manager)
        manager.wait()

    def repeat_metrics(self, manager: CheckpointManager) -> None:
        """Measure what the newest checkpoint has, so that the same values are no new best later."""
        self.move()
        newest = manager.list()[0]
        manager.maybe_save(self.step, tokens=4 * self.step, metrics=newest.metrics)
        manager.wait()

    def _mark(self, manager: CheckpointManager) -> None:
        manager.wait()
        entries = manager.list()
        if entries:
            folder = self.draw.choice(entries).folder
            if self.draw.random() < 0.6:
                manager.pin(folder)
            else:
                manager.tag(folder, f"t{self.step}")


def _side(draw: random.Random) -> SideSaver:
    keep = rule_of(draw) if draw.random() < 0.7 else None
    every = f"{draw.choice([7, 10, 15])}step"
    return SideSaver("weights", every=every, components=["model", "ema"], keep=keep)


def left_in(store: Store) -> Left:
    """What a root has."""
    entries, unread = Catalog(store).survey()
    assert not unread
    return {entry.order: frozenset(candidate(store, entry).components) for entry in entries}


def foretold(save: AssumedSave) -> Left:
    """What the forecast says is left after a save."""
    return {order: frozenset(made.entry.components) for order, made in save.left.items()}


def looked_ahead(store: Store, number: int = 10) -> RetentionForecast:
    return forecast_retention(store, Catalog(store).survey()[0], number=number)


def follow(run: Run, manager: CheckpointManager, stores: Sequence[Store], number: int) -> None:
    """Train as the forecasts assume, and compare after each save."""
    found = [looked_ahead(store, number) for store in stores]
    if not manager.is_owner:
        run.resume(manager)
    for place in range(number):
        save = found[0].saves[place].save
        while run.step < save.timestamp.step:
            run.move()
            manager.maybe_save(run.step, tokens=4 * run.step, metrics=save.metrics)
        manager.wait()
        newest = Catalog(stores[0]).attempts()[0]
        assert newest.order == save.order
        for store, one in zip(stores, found, strict=True):
            assert left_in(store) == foretold(one.saves[place]), (store.url, place, one)


def play(seed: int) -> None:
    """Play a random history, look ahead, and go on."""
    draw = random.Random(seed)
    run = Run(draw)
    number = draw.randint(1, 8)
    for _ in range(draw.randint(0, 2)):
        with run.manager() as manager:
            steps = [one.step for one in manager.list() if not one.left_out]
            goes_back = steps and draw.random() < 0.4
            run.resume(manager, draw.choice(steps) if goes_back else "latest")
            run.live(manager)
    stores = [run.local] if run.remote is None else [run.local, run.remote]
    if run.keeps_nothing_local:
        stores.remove(run.local)
    with run.manager() as manager:
        if draw.random() < 0.6 or not manager.list():
            run.resume(manager)
            run.live(manager)
            while not manager.list():
                run.live(manager)
            run.repeat_metrics(manager)
        follow(run, manager, stores, number)


@pytest.mark.parametrize("batch", [*range(3), *full(*range(3, 40))])
def test_what_is_foretold_then_happens(batch: int) -> None:
    for seed in range(HISTORIES * batch, HISTORIES * (batch + 1)):
        play(seed)


def test_a_root_with_keep_local_0_names_the_remote_root(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    root = Tiered(local, remote, keep_local=0)
    with CheckpointManager(root, {"model": {"w": torch.zeros(4)}}, sinks=()) as manager:
        for step in (1, 2):
            manager.save(step).wait()
        store = LocalStore(local)
        with pytest.raises(UsageError, match=rf"keep_local=0 .*{re.escape(str(remote))}"):
            looked_ahead(store)
