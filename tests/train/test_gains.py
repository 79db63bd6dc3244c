"""Runs that gain or lose a component between two scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from each import each
from holdfast import CheckpointManager
from holdfast.errors import MismatchError, UsageError
from holdfast.train import Callback, EarlyStopping, Metrics, Trainer, Training, Validation
from marks import full
from train.small import make


class Count(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.steps = 0

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def options(kind: str) -> dict[str, Any]:
    """Arguments with which a run gains one component, new objects each time."""
    made: dict[str, Any] = {
        "callback": lambda: {"callbacks": [Count()]},
        "early": lambda: {
            "callbacks": [EarlyStopping("val/loss", patience=50)],
            "validate": Validation(data=[torch.ones(2, 4)], every="2step"),
        },
        "ema": lambda: {"ema": 0.5},
        "scheduler": lambda: {"scheduler": lambda given: LinearLR(given, 0.1, total_iters=5)},
        "fp16": lambda: {"precision": "fp16"},
        "state": lambda: {"state": {"extra": {"seen": [1]}, "critic": nn.Linear(2, 2)}},
    }[kind]()
    return {"scheduler": None, **made}


NAMES = {
    "callback": "callback-count",
    "early": "callback-earlystopping",
    "ema": "ema",
    "scheduler": "scheduler",
    "fp16": "scaler",
    "state": "critic",
}


@pytest.mark.parametrize("kind", ["callback", "scheduler", "fp16", *full("early", "ema", "state")])
def test_a_run_gains_a_component(kind: str, tmp_path: Path) -> None:
    """`fit` goes on from a checkpoint without it, leaves it as it is, and the outcome says so.

    A run that is killed later and started again has it from its checkpoints, bit for bit.
    """
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for root in (straight, killed):
        make(root, scheduler=None).fit(3)
    first = make(straight, **options(kind))
    outcome = first.fit(8)
    assert f"{NAMES[kind]}: not in the checkpoint, unchanged" in outcome.notes
    make(killed, **options(kind)).fit(5)
    second = make(killed, **options(kind))
    again = second.fit(8)
    assert not any("not in the checkpoint, unchanged" in note for note in again.notes)
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name]), name
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]
    if first.ema is not None and second.ema is not None:
        for one, other in zip(
            first.ema.model.parameters(), second.ema.model.parameters(), strict=True
        ):
            assert torch.equal(one, other)


def test_an_average_that_is_new_begins_with_the_loaded_weights(tmp_path: Path) -> None:
    """Not with those that the model had before they were loaded."""
    make(tmp_path).fit(4)

    class Looks(Callback):
        def fit_start(self, training: Training) -> None:
            assert training.ema is not None
            pairs = zip(training.ema.model.parameters(), training.model.parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
            assert training.counters.step == 4
            self.looked = True

    looks = Looks()
    make(tmp_path, ema=0.5, callbacks=[looks]).fit(5)
    assert looks.looked


def test_a_warning_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Default logging shows what was taken as new."""
    make(tmp_path).fit(2)
    make(tmp_path, ema=0.5).fit(3)
    said = [record for record in caplog.records if "ema: not in the checkpoint" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]


@each("name", ["model", "optimizer", "data"])
def test_what_every_run_has_is_never_new(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A checkpoint without model, optimizer or data is no start of a Trainer's run."""
    root = tmp_path_factory.mktemp("root")
    trainer = make(root)
    state = {key: value for key, value in trainer.state.items() if key != name}
    with CheckpointManager(root, state) as manager:
        manager.save(1, wait=True)
    before = weights(trainer)
    with pytest.raises(MismatchError, match=f"{name} .the whole component."):
        trainer.fit(3)
    assert all(torch.equal(value, before[key]) for key, value in weights(trainer).items())


class Batches:
    """Data of another library, which tells neither epoch nor batch."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Any:
        self.count += 1
        yield torch.ones(2, 4)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_without_counters_a_run_goes_on_only_with_data_that_tells_its_place(tmp_path: Path) -> None:
    """docs/bridges/index.md: another trainer saves no counters of ours."""
    for root, data in ((tmp_path / "a", {"data": Batches()}), (tmp_path / "b", {})):
        trainer = make(root, **data)
        state = {key: value for key, value in trainer.state.items() if key != "progress"}
        with CheckpointManager(root, state) as manager:
            manager.save(2, wait=True)
        if data:
            with pytest.raises(MismatchError, match=r"progress .the whole component."):
                trainer.fit(3)
        else:
            trainer.fit(3)
            assert trainer.counters.step == 3


@each("kind", NAMES)
def test_a_run_goes_on_without_a_component(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`fit(…, without=[…])` leaves stored components out; a rerun of the script needs no change."""
    root = tmp_path_factory.mktemp("root")
    make(root, **options(kind)).fit(3)
    without = [NAMES[kind], "extra"] if kind == "state" else [NAMES[kind]]
    with pytest.raises(MismatchError, match="without="):
        make(root, scheduler=None).fit(5)
    outcome = make(root, scheduler=None).fit(5, without=without)
    assert f"{NAMES[kind]}: in the checkpoint only, not loaded" in outcome.notes
    again = make(root, scheduler=None).fit(6, without=without)
    assert again.step == 6
    assert not any("in the checkpoint only" in note for note in again.notes)


def test_what_the_trainer_has_cannot_be_left_out(tmp_path: Path) -> None:
    """`without` of a component of this Trainer is an error, before anything is claimed."""
    make(tmp_path, ema=0.5).fit(2)
    with pytest.raises(UsageError, match="without: 'ema' is a component"):
        make(tmp_path, ema=0.5).fit(3, without=["ema"])
    with pytest.raises(UsageError, match="pass a collection"):
        make(tmp_path, ema=0.5).fit(3, without="ema")


def test_a_component_that_changes_its_name_needs_both(tmp_path: Path) -> None:
    """A renamed callback is one that is gone and one that is new; nothing is guessed."""

    class Other(Count):
        pass

    make(tmp_path, callbacks=[Count()]).fit(3)
    with pytest.raises(MismatchError, match="callback-count"):
        make(tmp_path, callbacks=[Other()]).fit(4)
    other = Other()
    make(tmp_path, callbacks=[other]).fit(4, without=["callback-count"])
    assert other.steps == 1


def test_a_run_gains_and_loses_at_once(tmp_path: Path) -> None:
    """What is gone is named, what is new is not."""
    make(tmp_path, ema=0.5).fit(3)
    outcome = make(tmp_path, callbacks=[Count()]).fit(4, without=["ema"])
    assert {note.partition(":")[0] for note in outcome.notes} >= {"ema", "callback-count"}
