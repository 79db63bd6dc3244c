"""Garbage is collected at the steps that are due, and at no other moment of a fit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.train import Callback, CollectGarbage, HookFailed, Metrics, Training
from train.small import make


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


class Litters(Callback):
    """Leaves a cycle at each step, and notes how many are alive after the step before it."""

    priority = 1

    def __init__(self, *, fails: bool = False) -> None:
        self.left: list[weakref.ref[Cycle]] = []
        self.alive: list[int] = []
        self._fails = fails

    def step_start(self, training: Training) -> None:
        assert not gc.isenabled()
        self.alive.append(sum(ref() is not None for ref in self.left))
        self.left.append(weakref.ref(Cycle()))

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if self._fails:
            raise OSError("a disk")


def test_garbage_is_collected_at_the_steps_that_are_due() -> None:
    """O55."""
    litters = Litters()
    make(None, callbacks=[CollectGarbage("3step"), litters]).fit(8)
    assert litters.alive == [0, 1, 2, 0, 1, 2, 0, 1]
    assert gc.isenabled()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_automatic_collection_is_restored_after_an_error(*, was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    with pytest.raises(HookFailed):
        make(None, callbacks=[CollectGarbage(), Litters(fails=True)]).fit(2)
    assert gc.isenabled() == was_enabled


@pytest.mark.parametrize("every", [100, "2ep", "0step", "often"])
def test_an_interval_that_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="CollectGarbage: every"):
        CollectGarbage(every)
