"""The CSV file is one consistent table, whatever happened to the run."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.train import (
    Callback,
    Csv,
    HookFailed,
    LearningRates,
    Metrics,
    Trainer,
    Training,
    Validation,
)
from train.small import Noisy, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


class Late(Callback):
    """Logs a metric that is new in step 4, in which the process may be killed later."""

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == 4:
            training.log({"late": 0.5, "step": 7.0})

    def step_start(self, training: Training) -> None:
        if self.dies and training.present_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def run(root: Path, *callbacks: Callback, until: int = 8, **options: Any) -> Trainer:
    made = make(
        root / "run",
        every="2step",
        validate=Validation(data=Loader(Noisy(), batch_size=5), every="3step"),
        callbacks=[*callbacks, Csv(root / "log" / "metrics.csv")],
        **options,
    )
    made.fit(until)
    return made


def table(root: Path) -> list[dict[str, str]]:
    with (root / "log" / "metrics.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert all(None not in row and None not in row.values() for row in found)  # no ragged row
    return found


def text(root: Path) -> str:
    return (root / "log" / "metrics.csv").read_text("utf-8")


def test_a_row_for_each_step_and_a_column_for_each_metric(tmp_path: Path) -> None:
    run(tmp_path, Late(), until=4)
    rows = table(tmp_path)
    names = ["step", "epoch", "loss", "draw", "lr/0", "val/loss", "val/draw", "late"]
    assert [*rows[0]] == [*names, "metrics/step"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [bool(row["val/loss"]) for row in rows] == [False, False, True, True]
    assert [row["late"] for row in rows] == ["", "", "", "0.5"]
    assert all(row["loss"] for row in rows)
    assert rows[3]["metrics/step"] == "7.0"
    log = (tmp_path / "run" / "log" / "train.jsonl").read_text().splitlines()
    of_three = next(line for line in map(json.loads, log) if line["step"] == 3)
    assert float(rows[2]["loss"]) == of_three["metrics"]["loss"]
    assert float(rows[2]["lr/0"]) == of_three["lr"]["0"]


class Monitors(Callback):
    """Logs by itself in several hooks of each step, also after the step's save."""

    def after_backward(self, training: Training) -> None:
        training.log({"grad": 1.0})

    def step_end(self, training: Training, metrics: Metrics) -> None:
        training.log({"speed": 2.0})

    def checkpoint_saved(self, training: Training, checkpoint: Any, cost: Metrics) -> None:
        training.log({"saved": 3.0})


def test_what_several_callbacks_log_of_a_step_is_one_row(tmp_path: Path) -> None:
    """Also a metric that is logged when the row was flushed for a save."""
    run(tmp_path, Monitors(), until=4)
    run(tmp_path, Monitors(), until=6)
    rows = table(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert all(row["loss"] and row["grad"] == "1.0" and row["speed"] == "2.0" for row in rows)
    assert rows[3]["saved"] == "3.0"


def test_the_file_of_a_killed_run_is_that_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Invariant 7: byte for byte, after SIGKILL with rows beyond the checkpoint."""
    run(tmp_path / "straight", Late())
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run, args=(tmp_path / "killed", Late(dies=True)))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert text(tmp_path / "killed") != text(tmp_path / "straight")
    run(tmp_path / "killed", Late())
    assert text(tmp_path / "killed") == text(tmp_path / "straight")


@pytest.mark.parametrize("torn", ["9,1,0.5", "2,0", "\n", "x,y,z,1,2\n", "2,0,0.1,0.2\n"])
def test_torn_and_strange_rows_go(tmp_path: Path, torn: str) -> None:
    run(tmp_path, until=4)
    path, before = tmp_path / "log" / "metrics.csv", text(tmp_path)
    path.write_text(before + torn)
    run(tmp_path, until=5)
    assert text(tmp_path).startswith(before)
    assert [row["step"] for row in table(tmp_path)] == ["1", "2", "3", "4", "5"]


def test_a_table_without_rows_is_continued(tmp_path: Path) -> None:
    run(tmp_path, until=2)
    path, before = tmp_path / "log" / "metrics.csv", text(tmp_path)
    path.write_text(before.splitlines(keepends=True)[0])
    run(tmp_path, until=4)
    assert [row["step"] for row in table(tmp_path)] == ["3", "4"]


def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "log" / "metrics.csv"
    path.parent.mkdir()
    path.write_text("name,age\nann,7\n")
    with pytest.raises(HookFailed) as caught:
        run(tmp_path, until=1)
    assert isinstance(caught.value.__cause__, UsageError)
    assert "name another file" in str(caught.value.__cause__)
    assert path.read_text() == "name,age\nann,7\n"


def test_values_that_are_not_finite_are_told_from_missing_ones(tmp_path: Path) -> None:
    class Odd(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"odd": math.inf if training.counters.step == 1 else math.nan})

    run(tmp_path, Odd(), until=2)
    assert [row["odd"] for row in table(tmp_path)] == ["inf", "nan"]


def test_learning_rates_beside_the_own_ones_add_no_line(tmp_path: Path) -> None:
    for name, callbacks in (("with", [LearningRates()]), ("without", [])):
        run(tmp_path / name, *callbacks, until=4)
    assert text(tmp_path / "with") == text(tmp_path / "without")
    lines = {
        name: (tmp_path / name / "run" / "log" / "train.jsonl").read_text().splitlines()
        for name in ("with", "without")
    }
    assert len(lines["with"]) == len(lines["without"])
    assert all("lr/0" not in json.loads(line)["metrics"] for line in lines["with"])


def test_a_test_is_logged_once_at_the_step_of_its_weights(tmp_path: Path) -> None:
    data = DataLoader(Noisy(), batch_size=5)  # type: ignore[arg-type]
    made = run(tmp_path, until=5)
    made.test(data, which="step=2")
    made.test({"other": data})
    again = run(tmp_path, until=5)  # reached already
    found = again.test(data, which="step=2")
    rows = [row for row in table(tmp_path) if any(row[name] for name in row if "test/" in name)]
    assert [(row["step"], row["test/loss"]) for row in rows] == [
        ("2", repr(found["test/loss"])),
        ("5", ""),
    ]
    log = (tmp_path / "run" / "log" / "train.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, log) if "test/loss" in line["metrics"]]
    assert [(line["step"], line["metrics"]) for line in lines] == [(2, found)]
    run(tmp_path, until=6)  # goes on, and keeps them
    assert [row["step"] for row in table(tmp_path)] == ["1", "2", "3", "4", "5", "6"]


def test_a_trainer_that_never_called_fit_logs_no_test(tmp_path: Path) -> None:
    """Another process may train the run, and write the log."""
    run(tmp_path, until=2)
    before = text(tmp_path)
    path = tmp_path / "log" / "metrics.csv"
    make(tmp_path / "run", callbacks=[Csv(path)]).test(Loader(Noisy(), batch_size=5), which=2)
    assert text(tmp_path) == before
