"""Weights & Biases, offline: one run over all resumes, and steps as the axis."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import (
    Callback,
    HookFailed,
    Measured,
    Metrics,
    Table,
    Training,
    Validation,
    WeightsAndBiases,
)
from offline import wandb_records, wandb_references
from train.small import Noisy, make

wandb = pytest.importorskip("wandb")


def logger(folder: Path) -> WeightsAndBiases:
    settings = wandb.Settings(silent=True, console="off")
    return WeightsAndBiases(mode="offline", dir=str(folder), project="test", settings=settings)


def history(file: Path) -> list[dict[str, str]]:
    """What a run's file holds: metrics as the JSON that was logged."""
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.item}
        for record in wandb_records(file.parent, "history")
    ]


def test_a_resumed_run_goes_on_under_its_own_id(tmp_path: Path) -> None:
    """K45, D55."""
    for until in (2, 4):
        folder = tmp_path / f"until-{until}"
        folder.mkdir()
        make(tmp_path / "run", log_every=2, callbacks=[logger(folder)]).fit(until)
        wandb.teardown()  # its service may still be writing after the end of a run
    files = sorted(tmp_path.glob("until-*/wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    lines = [line for file in files for line in history(file)]
    assert [line["step"] for line in lines if "loss" in line] == ["2", "4"]
    assert [line["step"] for line in lines if "save/nbytes" in line] == ["2", "4"]


@pytest.mark.full
def test_a_test_after_fit_goes_on_with_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", callbacks=[logger(tmp_path)])
    trainer.fit(2)
    found = trainer.test(Loader(Noisy(), batch_size=5))
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    lines = [line for file in dict.fromkeys(files) for line in history(file)]
    of_test = [line for line in lines if "test/loss" in line]
    assert [(line["step"], float(line["test/loss"])) for line in of_test] == [
        ("2", pytest.approx(found["test/loss"]))
    ]


class Ends(Callback):
    """Raises within the step after `step`, when it has logged something of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_optimizer_step(self, training: Training) -> None:
        training.log({"within": 1.0})
        if training.counters.step == self.step:
            raise RuntimeError


@pytest.mark.full
def test_steps_that_are_done_again_are_there_once(tmp_path: Path) -> None:
    """K45: also what is logged within a step; the position is in a file beside the runs."""
    lines: list[dict[str, str]] = []
    for step in (5, 4, 99):
        folder = tmp_path / "wandb"
        before = set(folder.glob("offline-run-*/run-*.wandb"))
        trainer = make(tmp_path / "run", every="2step", callbacks=[logger(tmp_path), Ends(step)])
        with suppress(HookFailed):
            trainer.fit(8)
        wandb.teardown()
        for file in set(folder.glob("offline-run-*/run-*.wandb")) - before:
            lines += history(file)
    steps = {
        name: [int(line["step"]) for line in lines if name in line]
        for name in ("loss", "within", "load/nbytes")
    }
    assert steps == {
        "loss": [1, 2, 3, 4, 5, 6, 7, 8],
        "within": [1, 2, 3, 4, 5, 6, 7, 8],
        "load/nbytes": [4, 4],
    }


def test_a_disabled_run_leaves_nothing(tmp_path: Path) -> None:
    made = WeightsAndBiases(
        mode="disabled", dir=str(tmp_path), settings=wandb.Settings(silent=True)
    )
    make(MemoryStore(), callbacks=[made]).fit(2)
    assert list(tmp_path.iterdir()) == []


def test_what_the_checkpoint_decides_cannot_be_set() -> None:
    with pytest.raises(UsageError, match="the checkpoint sets them"):
        WeightsAndBiases(id="mine")


@pytest.mark.parametrize("state", [{}, {"id": 5}, {"id": "a", "more": 1}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not the state"):
        WeightsAndBiases().load_state_dict(state)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"holdfast-torch\[wandb\]"):
        WeightsAndBiases()


def test_a_matrix_is_a_picture_of_its_step(tmp_path: Path) -> None:
    matrix = Measured(lambda inputs: inputs[:2], lambda batch, outputs: batch)
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="2step", metrics={"matrix": matrix})
    make(MemoryStore(), validate=plan, callbacks=[logger(tmp_path)]).fit(4)
    wandb.teardown()  # its service may still be writing after the end of a run
    (file,) = tmp_path.rglob("*.wandb")
    found = [item for item in history(file) if any("val/matrix" in name for name in item)]
    assert [item["step"] for item in found] == ["2", "4"]
    assert len([*tmp_path.rglob("*.png")]) == 2


class Tells(Callback):
    """Logs a text and a table at each step."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        training.log({"sample": "once", "worst": Table(["word", "loss"], [["a", 0.5]])})


@pytest.mark.full
def test_texts_and_tables_are_tables_of_their_step(tmp_path: Path) -> None:
    make(MemoryStore(), callbacks=[logger(tmp_path), Tells()]).fit(2)
    wandb.teardown()  # its service may still be writing after the end of a run
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    found = sorted((table["columns"], table["data"]) for table in tables)
    assert found == [(["text"], [["once"]])] * 2 + [(["word", "loss"], [["a", 0.5]])] * 2


def test_a_tensor_is_a_histogram_of_its_step(tmp_path: Path) -> None:
    class Weighs(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"weights": torch.tensor([0.0, 0.0, 2.0])})

    make(MemoryStore(), callbacks=[logger(tmp_path), Weighs()]).fit(1)
    wandb.teardown()  # its service may still be writing after the end of a run
    (file,) = tmp_path.rglob("*.wandb")
    (found,) = [item for item in history(file) if "weights/_type" in item]
    assert (found["weights/_type"], found["step"]) == ('"histogram"', "1")
    assert sum(json.loads(found["weights/values"])) == 3
    assert json.loads(found["weights/bins"])[-1] == 2.0


@pytest.mark.full
def test_checkpoints_are_reference_artifacts_of_the_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions, too; and nothing of it where references are refused."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    for until in (2, 4):
        folder = tmp_path / f"until-{until}"
        folder.mkdir()
        made = logger(folder)
        make(tmp_path / "run", keep="last:1", callbacks=[made]).fit(until)
        wandb.teardown()  # its service may still be writing after the end of a run
    found = wandb_references(tmp_path)
    names = {name.removesuffix("-deleted") for name, _, _ in found}
    assert len(names) == 1
    assert [(name.endswith("-deleted"), facts["step"]) for name, facts, _ in found] == [
        (False, 2),
        (False, 4),
        (True, 2),
    ]
    assert found[1][2][0].startswith((tmp_path / "run" / found[1][1]["folder"]).as_uri())
    settings = wandb.Settings(silent=True, console="off")
    folder = tmp_path / "other"
    folder.mkdir()
    quiet = WeightsAndBiases(mode="offline", dir=str(folder), settings=settings, references=False)
    make(tmp_path / "other-run", callbacks=[quiet]).fit(2)
    wandb.teardown()
    assert wandb_references(folder) == []
