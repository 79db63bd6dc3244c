"""Cases from the tests of other checkpoint systems, and what Holdfast makes of each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import AtEnd, AtStart, ByClass, CheckpointManager, Every, Last, SavePolicy
from holdfast.errors import CorruptData, NoUsableCheckpoint, UsageError
from holdfast.format import layout
from holdfast.train import Callback, Counts
from runs import new_run
from train.small import make


class Saved(Callback):
    """The steps of all checkpoints that became durable."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def checkpoint_saved(self, training: Any, checkpoint: Any, cost: Any) -> None:
        self.steps.append(checkpoint.step)


@pytest.mark.parametrize(
    ("every", "until", "count"),
    [
        ("1ep", "5ep", 5),
        ("2ep", "8ep", 4),
        ("10ba", "8ep", 4),
        ("0.25dur", "4ep", 4),
        ("5ba", "4ep", 4),
        ("5ba", "10ba", 2),
        ("0.35dur", "4ep", 3),
        pytest.param("0.01dur", "100ba", 100, marks=pytest.mark.full),
        ("0.10dur", "70sp", 10),
        ("0.05dur", "80sp", 20),
    ],
)
def test_how_many_saves_an_interval_makes(
    tmp_path: Path, every: str, until: str, count: int
) -> None:
    """Ten samples in batches of two, so five steps an epoch; the last step is always saved."""
    saved = Saved()
    make(tmp_path, every=every, callbacks=[saved], counts=Counts(samples=len)).fit(until)
    assert len(saved.steps) == count
    assert sorted(set(saved.steps)) == saved.steps


def test_every_second_cycle_of_eight_epochs(tmp_path: Path) -> None:
    """A cycle of two epochs; a save at the end of every second one."""
    run = new_run()
    with run.manager(tmp_path, every="2cycle") as manager:
        for epoch in range(1, 9):
            manager.maybe_save(epoch * 5, epoch=epoch, cycle=epoch // 2)
        manager.wait()
        assert [(c.step, c.timestamp.cycle) for c in manager.list()] == [(40, 4), (20, 2)]


@pytest.mark.parametrize("keep", [None, 1, 2, 3, 4])
def test_six_saves_leave_what_is_to_be_kept(tmp_path: Path, keep: int | None) -> None:
    with new_run().manager(tmp_path, keep=None if keep is None else Last(keep)) as manager:
        for step in range(1, 7):
            manager.save(step).wait()
        manager.wait()
        assert len(manager.list()) == (keep or 6)
        assert (tmp_path / layout.LATEST).resolve().name == manager.list()[0].folder


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int) -> None:
    """D48: without another copy it would delete the only one there is."""
    with pytest.raises(UsageError):
        Last(keep)


def test_later_checkpoints_do_not_stand_in_the_way_of_going_back(tmp_path: Path) -> None:
    """D26, D30: what was left behind neither blocks a save nor is resumed."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step, epoch=step).wait()
    again = new_run()
    with again.manager(tmp_path) as manager:
        assert manager.resume(1) is not None
        again.train()
        torch.rand(3)
        manager.save(2, epoch=2).wait()
    third = new_run()
    with third.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        assert third.bits() == again.bits()


_SKIPPED = [
    (["model.**"], {"model"}),
    (["counters"], {"counters"}),
    (["rng"], set()),
    (["optimizer"], {"optimizer"}),
    (["model.*.weight", "model.*.bias"], {"model"}),
]


def test_a_load_that_skips_everything_is_refused(tmp_path: Path) -> None:
    with new_run().manager(tmp_path) as manager:
        manager.save(3).wait()
    with new_run().manager(tmp_path) as manager, pytest.raises(UsageError, match="nothing would"):
        manager.load(skip=["**"])


@pytest.mark.parametrize(("skip", "fresh"), _SKIPPED)
def test_what_is_skipped_keeps_its_live_value(
    tmp_path: Path, skip: list[str], fresh: set[str]
) -> None:
    """D58: paths are exact, and a star is one segment."""
    run = new_run()
    run.train(3)
    with run.manager(tmp_path) as manager:
        manager.save(3).wait()
    other = new_run(seed=8)
    before = _parts(other)
    with other.manager(tmp_path) as manager:
        manager.load(skip=skip)
    after, stored = _parts(other), _parts(run)
    for name in before:
        assert after[name] == (before if name in fresh else stored)[name], name


def _parts(run: Any) -> dict[str, Any]:
    weights = [p.detach().tolist() for p in run.model.parameters()]
    slots = [
        {name: value.tolist() for name, value in slot.items()}
        for slot in run.optimizer.state_dict()["state"].values()
    ]
    return {"model": weights, "optimizer": slots, "counters": dict(run.counters)}


@pytest.mark.parametrize("skipped", [["state.history.1"], ["state.history.0", "state.history.2"]])
def test_elements_of_lists_can_be_skipped(tmp_path: Path, skipped: list[str]) -> None:
    """Two of them at once leave the others where they are."""
    with CheckpointManager(tmp_path, {"state": {"history": [1, 2, [3, 4]]}}) as manager:
        manager.save(1).wait()
    live: dict[str, Any] = {"history": [10, 20, [30, 40]]}
    with CheckpointManager(tmp_path, {"state": live}) as manager:
        manager.load(skip=skipped)
    kept = {int(path[-1]) for path in skipped}
    assert live["history"] == [
        fresh if position in kept else stored
        for position, (fresh, stored) in enumerate(
            zip([10, 20, [30, 40]], [1, 2, [3, 4]], strict=True)
        )
    ]


def test_the_generators_of_all_libraries_go_on(tmp_path: Path) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    with new_run().manager(tmp_path) as manager:
        manager.save(1).wait()
        expected = drawn()
    drawn()
    with new_run().manager(tmp_path) as manager:
        manager.resume()
    assert drawn() == expected


def test_a_checkpoint_is_whole_or_it_is_none(tmp_path: Path) -> None:
    """D8, D25, D31: without any one of its files the one before it is taken."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        first = manager.save(1).wait()
        run.train()
        folder = tmp_path / manager.save(2).wait().folder
    names = sorted(os.listdir(folder))
    assert {layout.MANIFEST, layout.INDEX} < set(names)
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        with new_run().manager(tmp_path, takeover=True) as manager:
            found = manager.resume()
            assert found is not None
            assert found.folder == first.folder, name
        (folder / name).write_bytes(data)


def test_permanent_and_ephemeral_saves_of_250_steps(tmp_path: Path) -> None:
    """D52: what is due for deletion is gone at the end."""
    policy = SavePolicy(permanent=AtStart() | Every("100step") | AtEnd(), ephemeral="50step")
    trainer = make(tmp_path, every=policy, keep=ByClass("all_non_permanent"))
    trainer.fit(250)
    left = [c.step for c in CheckpointManager(tmp_path, trainer.state).list()]
    assert left == [250, 200, 100, 0]


def _flips(data: bytes) -> Iterator[bytes]:
    """The data with one bit flipped, at places all over it."""
    for place in range(0, len(data), max(len(data) // 4, 1)):
        yield data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_a_flipped_bit_never_loads(tmp_path: Path) -> None:
    """D14, R15: wherever it is, the load says so and changes nothing."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        folder = tmp_path / manager.save(1).wait().folder
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for flipped in _flips(data):
            path.write_bytes(flipped)
            other = new_run(seed=2)
            before = other.bits()
            with (
                other.manager(tmp_path) as manager,
                pytest.raises((CorruptData, NoUsableCheckpoint)),
            ):
                manager.resume()
            assert other.bits() == before
        path.write_bytes(data)
