"""A run that begins with the checkpoint of another root, and states that were loaded by hand."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import At, AtStart, CheckpointManager, Encryption, load_weights
from holdfast.data import Loader
from holdfast.errors import HoldfastError, MismatchError, NoCheckpoint, UsageError
from holdfast.keys import generate
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Logger, Trainer, Training, Validation
from train.small import Noisy, make, network


def trained(root: Any, *goals: int, **options: Any) -> Trainer:
    """The last of the Trainers of one root, each of which went to its goal."""
    trainer = new(root, **options)
    for number, goal in enumerate(goals):
        trainer = new(root, **options) if number else trainer
        trainer.fit(goal)
    return trainer


def new(root: Any, **options: Any) -> Trainer:
    return make(root, **{"ema": 0.9, "log": False, **options})


def everything(trainer: Trainer) -> dict[str, Any]:
    """What must be the same, bit for bit; draws from the generators, so call it once."""
    return {
        "model": [weight.tolist() for weight in trainer.model.parameters()],
        "ema": [] if trainer.ema is None else [w.tolist() for w in trainer.ema.model.parameters()],
        "optimizer": repr(trainer.optimizer.state_dict()),
        "schedulers": repr([item.state_dict() for item in trainer.schedulers.values()]),
        "data": trainer.data.state_dict(),
        "counters": trainer.counters.state_dict(),
        "next": torch.rand(3).tolist(),
    }


def steps(root: Any, **options: Any) -> list[int]:
    manager = CheckpointManager(root, {"any": {}}, **options)
    return [checkpoint.step for checkpoint in reversed(manager.list())]


# `start_from`


@pytest.mark.parametrize("which", ["@step=3", "", "@latest", "folder", "label"])
def test_a_fork_is_the_run_that_was_never_forked(which: str, tmp_path: Path) -> None:
    """Lines 10 and 18: model, optimizer, schedule, data, counters, average and generators."""
    expected = everything(trained(MemoryStore(), 7, seed=5))
    trained(tmp_path / "old", 3, seed=5)
    source = f"{tmp_path}/old{which}"
    if which == "folder":
        source = str((tmp_path / "old" / "latest").resolve())
    elif which == "label":
        source = f"{tmp_path}/old@step-00000003"
    fork = new(tmp_path / "new", seed=8)
    torch.manual_seed(99)
    fork.fit(7, start_from=source)
    assert everything(fork) == expected
    assert steps(tmp_path / "new") == [4, 6, 7]
    assert steps(tmp_path / "old") == [2, 3]


def test_a_fork_of_a_root_in_a_store(tmp_path: Path) -> None:
    """Lines 10 and 18: also from an object store."""
    expected = everything(trained(MemoryStore(), 5))
    trained("memory://fork-old", 3)
    fork = new("memory://fork-new")
    fork.fit(5, start_from="memory://fork-old@step=3")
    assert everything(fork) == expected


def test_a_fork_of_a_sealed_root(tmp_path: Path) -> None:
    """Lines 10 and 18: the keys are those of the Trainer."""
    keys = Encryption(keys=generate())
    trained(tmp_path / "old", 3, encrypt=keys)
    expected = everything(trained(MemoryStore(), 5))
    fork = new(tmp_path / "new", encrypt=keys)
    fork.fit(5, start_from=tmp_path / "old")
    assert everything(fork) == expected
    with pytest.raises(HoldfastError, match="sealed"):
        new(tmp_path / "another").fit(5, start_from=tmp_path / "old")


def test_a_fork_that_is_killed_goes_on_in_its_own_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Line 18: the same script again; what the new root holds wins, and the log says so."""
    expected = everything(trained(MemoryStore(), 7))
    trained(tmp_path / "old", 3)
    start = f"{tmp_path}/old@step=3"
    new(tmp_path / "new").fit(5, start_from=start)
    shutil.rmtree(tmp_path / "old")
    again = new(tmp_path / "new")
    with caplog.at_level(logging.INFO, "holdfast"):
        again.fit(7, start_from=start)
    assert everything(again) == expected
    assert "start_from" in caplog.text
    assert "start_from is ignored" in caplog.text


def test_a_fork_that_was_killed_before_its_first_save_forks_again(tmp_path: Path) -> None:
    """Line 18: only a claim is in the new root by then."""

    class Fails(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            raise OSError

    trained(tmp_path / "old", 3)
    start = f"{tmp_path}/old@step=3"
    with pytest.raises(HoldfastError):
        new(tmp_path / "new", every=None, callbacks=[Fails()]).fit(5, start_from=start)
    fork = new(tmp_path / "new")
    fork.fit(5, start_from=start)
    assert everything(fork) == everything_of_straight(5)


def everything_of_straight(goal: int) -> dict[str, Any]:
    return everything(trained(MemoryStore(), goal))


def test_a_fork_saves_where_the_run_that_was_never_forked_saves(tmp_path: Path) -> None:
    """Line 18: an interval goes on counting, and so does the epoch."""
    trained(tmp_path / "old", 6)
    fork = new(tmp_path / "new", every="5step")
    fork.fit(8, start_from=tmp_path / "old")
    assert steps(tmp_path / "new") == [8]
    newest = CheckpointManager(tmp_path / "new", {"any": {}}).list()[0]
    assert newest.timestamp.step_in_epoch == 3


def test_a_fork_at_its_goal_is_saved_in_the_new_root(tmp_path: Path) -> None:
    """Line 18: when `fit` returns the last step is durable, here."""
    trained(tmp_path / "old", 3)
    new(tmp_path / "new").fit(3, start_from=tmp_path / "old")
    assert steps(tmp_path / "new") == [3]
    assert new(tmp_path / "new").fit(3).step == 3


def test_a_fork_does_the_validation_that_was_still_due(tmp_path: Path) -> None:
    """Line 18: metrics of the checkpoint count as known in the new root."""
    validate = Validation(data=Loader(Noisy(), batch_size=5, shuffle=False), every="3step")
    trained(tmp_path / "old", 3, validate=validate)
    new(tmp_path / "new", validate=validate).fit(3, start_from=tmp_path / "old")
    newest = CheckpointManager(tmp_path / "new", {"any": {}}).list()[0]
    assert "val/loss" in newest.metrics


def test_a_fork_takes_what_the_checkpoint_lacks_as_a_resume_does(tmp_path: Path) -> None:
    """Line 18: a new average begins with the loaded weights."""
    trained(tmp_path / "old", 3, ema=None)
    fork = new(tmp_path / "new")
    outcome = fork.fit(3, start_from=tmp_path / "old")
    assert "ema: not in the checkpoint, unchanged" in outcome.notes
    assert fork.ema is not None
    for average, live in zip(fork.ema.model.parameters(), fork.model.parameters(), strict=True):
        assert torch.equal(average, live)


def test_a_logger_of_a_fork_begins_a_record_of_its_own(tmp_path: Path) -> None:
    """Line 18: the record of the old run is not written on."""

    class Remote(Logger):
        id: str | None = None

        def fit_start(self, training: Training) -> None:
            self.id = self.id or str(training.counters.step)

        def state_dict(self) -> dict[str, Any]:
            return {"id": self.id}

        def load_state_dict(self, state: Any) -> None:
            self.id = state["id"]

    trained(tmp_path / "old", 3, callbacks=[Remote()])
    forked = Remote()
    new(tmp_path / "new", callbacks=[forked]).fit(5, start_from=tmp_path / "old")
    assert forked.id == "3"
    again = Remote()
    new(tmp_path / "new", callbacks=[again]).fit(6, start_from=tmp_path / "old")
    assert again.id == "3"


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        ("{}/olt", NoCheckpoint),
        ("{}/old@step=4", NoCheckpoint),
        ("{}/old@", UsageError),
        ("@step=3", UsageError),
        ("", UsageError),
        (3, UsageError),
        ("dbfs:/old", UsageError),
        ("{}/renamed", UsageError),
    ],
)
def test_a_mistyped_start_is_refused(start: Any, wanted: type[Exception], tmp_path: Path) -> None:
    """Line 18: nothing is trained, nothing is made, and the same call may be mended."""
    trained(tmp_path / "old", 3)
    shutil.copytree((tmp_path / "old" / "latest").resolve(), tmp_path / "renamed")
    fork = new(tmp_path / "new")
    given = start.format(tmp_path) if isinstance(start, str) else start
    with pytest.raises(wanted):
        fork.fit(5, start_from=given)
    assert fork.counters.step == 0
    assert not (tmp_path / "olt").exists()
    assert steps(tmp_path / "new") == []
    fork.fit(5, start_from=tmp_path / "old")
    assert everything(fork) == everything_of_straight(5)


def test_a_start_from_its_own_root_is_refused(tmp_path: Path) -> None:
    """Line 18: to go back in a run is not to begin another one."""
    trained(tmp_path / "old", 3)
    with pytest.raises(UsageError, match="resume"):
        new(tmp_path / "old").fit(5, start_from=f"{tmp_path}/old@step=2")


def test_a_start_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Line 18."""
    trained(tmp_path / "old", 3)
    fork = new(tmp_path / "new", model=torch.nn.Linear(4, 1))
    before = [weight.tolist() for weight in fork.model.parameters()]
    with pytest.raises(MismatchError):
        fork.fit(5, start_from=tmp_path / "old")
    assert [weight.tolist() for weight in fork.model.parameters()] == before


def test_a_start_that_proves_damaged_is_no_beginning(tmp_path: Path) -> None:
    """Line 18: what was replaced in part is not trained on by another `fit` of the Trainer."""
    trained(tmp_path / "old", 3)
    (file,) = (tmp_path / "old" / "latest").resolve().glob("optimizer-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    fork = new(tmp_path / "new")
    with pytest.raises(OpaqueLoadFailed):
        fork.fit(5, start_from=tmp_path / "old")
    with pytest.raises(UsageError, match="new Trainer"):
        fork.fit(5)


# By hand


def test_a_state_that_was_loaded_by_hand_is_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Line 18: neither are the generators seeded nor is the average overwritten, and a warning
    names `start_from`."""
    trained(tmp_path / "old", 3)
    fork = new(tmp_path / "new", every="5step")
    CheckpointManager(tmp_path / "old", fork.state).load("step=3")
    fork.fit(7)
    assert everything(fork) == everything_of_straight(7)
    assert "start_from" in caplog.text
    assert steps(tmp_path / "new") == [5, 7]


def test_a_state_of_step_0_that_was_loaded_by_hand_is_gone_on_from(tmp_path: Path) -> None:
    """Line 18: the counters say nothing there, and yet all was loaded."""
    trained(tmp_path / "old", 1, every=AtStart(), seed=5)
    fork = new(tmp_path / "new", seed=8)
    CheckpointManager(tmp_path / "old", fork.state).load("step=0")
    fork.fit(3)
    assert everything(fork) == everything(trained(MemoryStore(), 3, seed=5))


def test_an_average_that_was_not_loaded_begins_with_the_weights(tmp_path: Path) -> None:
    """Line 18: a load of parts leaves the average alone, which is that of other weights."""
    trained(tmp_path / "old", 3)
    fork = new(tmp_path / "new")
    manager = CheckpointManager(tmp_path / "old", fork.state)
    manager.load(components=["model", "progress"])
    loaded = [weight.tolist() for weight in fork.model.parameters()]

    class Watch(Callback):
        begun: Any = None

        def fit_start(self, training: Any) -> None:
            self.begun = [weight.tolist() for weight in training.ema.model.parameters()]

    watch = Watch()
    another = new(tmp_path / "another", callbacks=[watch])
    CheckpointManager(tmp_path / "old", another.state).load(components=["model", "progress"])
    another.fit(4)
    assert watch.begun == loaded


def test_weights_that_were_loaded_begin_a_run_of_their_own(tmp_path: Path) -> None:
    """Line 18: with seeded generators and an average of these weights."""
    trained(tmp_path / "old", 3)
    found = []
    for _ in range(2):
        trainer = new(MemoryStore())
        load_weights(tmp_path / "old", trainer.model)
        torch.rand(1)
        trainer.fit(2)
        found.append(everything(trainer))
    assert found[0] == found[1]


# The start


def test_nothing_is_saved_at_the_start_where_weights_were_loaded(tmp_path: Path) -> None:
    """Line 10: `AtStart` is for a run for which nothing was loaded."""
    trained(tmp_path / "old", 1)
    for number, (trigger, expected) in enumerate(
        [(AtStart(), [2]), (AtStart(always=True), [0, 2])]
    ):
        trainer = new(tmp_path / f"new{number}", every=trigger)
        load_weights(tmp_path / "old", trainer.model)
        trainer.fit(2)
        assert steps(tmp_path / f"new{number}") == expected
    parts = new(tmp_path / "parts", every=AtStart() | At("1step"))
    CheckpointManager(tmp_path / "old", parts.state).load(components=["model"])
    parts.fit(2)
    assert steps(tmp_path / "parts") == [1, 2]
    checkpoint = CheckpointManager(tmp_path / "parts", {"any": {}}).list()[0]
    assert checkpoint.timestamp.step_in_epoch == 2


def test_validating_other_weights_is_no_load(tmp_path: Path) -> None:
    """Line 10: the model has its own weights again afterwards."""
    validate = Validation(data=Loader(Noisy(), batch_size=5, shuffle=False), every="9step")
    trained(tmp_path / "old", 1, validate=validate)
    trainer = new(tmp_path / "new", every=AtStart(), validate=validate)
    trainer.validate(tmp_path / "old")
    trainer.fit(2)
    assert steps(tmp_path / "new") == [0, 2]


@pytest.mark.parametrize(("always", "expected"), [(False, [2]), (True, [0, 2])])
def test_a_fork_of_step_0_is_saved_at_the_start_only_if_asked(
    always: bool, expected: list[int], tmp_path: Path
) -> None:
    """Line 10: `always` is for what came from elsewhere."""
    trained(tmp_path / "old", 1, every=AtStart())
    fork = new(tmp_path / "new", every=AtStart(always=always))
    fork.fit(2, start_from=f"{tmp_path}/old@step=0")
    assert steps(tmp_path / "new") == expected


# `resume` by name, and `strict`


def test_a_named_checkpoint_wins_over_newer_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is rolled back, as one that was never past that step."""
    expected = everything(trained(MemoryStore(), 5))
    trained(tmp_path, 6)
    back = new(tmp_path)
    assert back.fit(5, resume="step=2").step == 5
    assert everything(back) == expected
    assert steps(tmp_path) == [2, 4, 6, 4, 5]
    assert any("rolled back from step 6 to step 2" in message for message in caplog.messages)
    assert new(tmp_path).fit(6).step == 6
    caplog.clear()
    assert new(tmp_path).fit(7, resume="step=6").step == 7  # the newest: nothing is lost
    assert not any("rolled back" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("root", "options", "names"),
    [
        (None, {"resume": "step=2"}, "no root"),
        ("here", {"resume": 2, "start_from": "there"}, "start_from"),
    ],
)
def test_a_named_checkpoint_is_refused(
    root: str | None, options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=names):
        new(root and tmp_path / root).fit(3, **options)


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    with pytest.raises(NoCheckpoint):
        new(tmp_path).fit(5, resume="step=1")
    assert steps(tmp_path) == [2, 3]


def test_a_checkpoint_of_another_root_can_win_over_newer_ones(tmp_path: Path) -> None:
    old, here = tmp_path / "old", tmp_path / "here"
    trained(old, 3)
    trained(here, 5)
    expected = everything(trained(old, 4))
    fork = new(here)
    fork.fit(4, resume="never", start_from=f"{old}@step=3")
    assert everything(fork) == expected
    assert steps(here) == [2, 4, 5, 4]


@pytest.mark.parametrize("is_fork", [False, True], ids=["resumed", "forked"])
def test_a_grown_model_is_resumed_with_its_optimizer(is_fork: bool, tmp_path: Path) -> None:
    def grown(root: Any) -> Trainer:
        return new(root, model=torch.nn.Sequential(*network(), torch.nn.Linear(1, 1)))

    root = tmp_path / "old"
    trained(root, 3)
    with pytest.raises(MismatchError, match=r"model\.3\.weight"):
        grown(root).fit(5)
    trainer = grown(tmp_path / "fork" if is_fork else root)
    outcome = trainer.fit(5, strict=False, start_from=root if is_fork else None)
    assert outcome.step == 5
    assert any("model.3.weight" in note for note in outcome.notes)
    counts = [trainer.optimizer.state[p]["step"].item() for p in trainer.model.parameters()]
    assert counts == [5, 5, 5, 5, 2, 2]
