"""Boundaries: what is put back, and when there is a way to one."""

from __future__ import annotations

import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Stop
from holdfast.control.stop import Interrupted
from holdfast.data import Loader, randomness
from holdfast.train import Callback
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.step.undo import Boundary, StepUndo, small


class Count:
    """An object with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_data_components_generators_and_buffers_are_put_back() -> None:
    """Invariant 7."""
    loader, count, tree = Loader(range(10), batch_size=2), Count(), {"mean": torch.ones(3)}
    norm, generator = nn.BatchNorm1d(4), torch.Generator().manual_seed(3)
    components = {"count": count, "tree": tree, "generator": generator}
    boundary = Boundary(data=loader, components=components, modules=[norm])
    before = (draw(), float(torch.rand((), generator=generator)))
    next(iter(loader))
    count.value = 5
    tree["mean"] += 1
    norm(torch.randn(8, 4))
    boundary.restore_snapshot()
    assert (loader.epoch, loader.batch, count.value) == (0, 0, 0)
    assert torch.equal(tree["mean"], torch.ones(3))
    assert torch.equal(norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert int(norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert (draw(), float(torch.rand((), generator=generator))) == before


def test_small_components_are_neither_modules_nor_optimizers() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "count": Count(), "data": []}
    assert list(small(state, "data")) == ["count"]


def test_blocks_that_never_came_to_their_end_are_ended() -> None:
    """As when an exception hits the very end of one."""
    before = randomness.count_open_blocks()
    expected = draw()
    torch.manual_seed(0)
    random.seed(0)
    with randomness.preserved():
        state = random.getstate()
        lost = randomness.preserved()
        lost.__enter__()
        random.seed(1)
        assert randomness.count_open_blocks() == before + 2
        randomness.end_inner_blocks(before + 1)
        assert randomness.count_open_blocks() == before + 1
        assert random.getstate() == state
        random.seed(2)
        lost.__exit__(None, None, None)  # as the collector of garbage would, later
        assert random.getstate() != state
    assert randomness.count_open_blocks() == before
    assert expected != draw()


def undo(stop: Stop | None, *callbacks: Callback, is_exact: bool = False) -> StepUndo:
    loader, training = Loader(range(10), batch_size=2), None
    state = {"data": loader, "count": Count()}
    told = Callbacks(callbacks, training)  # type: ignore[arg-type]
    return StepUndo(stop=stop, is_exact=is_exact, data=loader, state=state, callbacks=told)


def test_without_a_stop_nothing_is_interrupted_and_there_is_no_way_back() -> None:
    way = undo(None)
    way.take_snapshot()
    with way.fetching(), way.validating(), way.waiting():
        pass
    assert not way.undo_step()


def test_there_is_no_way_back_from_an_update() -> None:
    way = undo(Stop(), is_exact=True)
    way.take_snapshot()
    way.begin_update()
    assert not way.undo_step()
    way.take_snapshot()
    assert way.undo_step()
    assert not way.undo_step()


def test_parts_of_a_validation_are_interrupted_in_a_validation_only() -> None:
    stop = Stop()
    way = undo(stop)
    count = way._small["count"]
    seen = []

    def validate() -> None:
        with way.validating():
            count.value += 1
            with way.waiting():
                signal.raise_signal(signal.SIGTERM)

    def run() -> None:
        with stop:
            with way.waiting():
                seen.append("outside")
            try:
                validate()
            except Interrupted:
                seen.append(f"interrupted {count.value}")

    with pytest.raises(SystemExit):
        run()
    assert seen == ["outside", "interrupted 0"]
