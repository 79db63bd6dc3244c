"""The JSONL log is one consistent history, whatever happened to the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Csv, Image, Logger, Metrics, Table, Training
from holdfast.train.loggers.files import JsonLines, drop_beyond
from holdfast.train.outputs import picture
from train.small import make


class Now:
    """As much of a Trainer as a logger looks at."""

    def __init__(self, step: int) -> None:
        from holdfast.train import Counters

        self.counters = Counters(step=step)
        self.present_step = step


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step}).encode() + b"\n" for step in steps)


@given(steps=st.lists(st.integers(1, 9)), step=st.integers(0, 10))
def test_lines_beyond_the_step_go_and_all_others_stay(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], step: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "train.jsonl"
    path.write_bytes(lines(*steps))
    dropped = drop_beyond(path, step)
    assert path.read_bytes() == lines(*(item for item in steps if item <= step))
    assert dropped == sum(item > step for item in steps)
    assert [item.name for item in path.parent.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3', b'{"step": 3}', b"\xff\xfe\n", b"[3]\n", b'{"step": null}\n', b"\n"]
)
def test_what_is_no_line_goes(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(lines(1, 2) + torn)
    assert drop_beyond(path, 9) == 1
    assert path.read_bytes() == lines(1, 2)


def test_a_file_with_nothing_to_drop_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(lines(1, 2))
    before = path.stat().st_ino
    assert drop_beyond(path, 2) == 0
    assert path.stat().st_ino == before
    assert drop_beyond(tmp_path / "none.jsonl", 2) == 0


def test_what_saves_and_loads_took_is_in_the_log(tmp_path: Path) -> None:
    """K45: stall, duration and bytes, of each checkpoint and of each resume."""
    for until in (2, 5):
        make(tmp_path, every="2step").fit(until)
    text = (tmp_path / "log" / "train.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    costs = {
        kind: [line for line in lines if f"{kind}/nbytes" in line["metrics"]]
        for kind in ("save", "load")
    }
    assert {kind: [line["step"] for line in found] for kind, found in costs.items()} == {
        "save": [2, 4, 5],
        "load": [2],
    }
    assert [line["epoch"] for line in costs["save"]] == [0, 0, 1]
    assert set(costs["save"][0]["metrics"]) == {"save/stall_s", "save/duration_s", "save/nbytes"}
    assert set(costs["load"][0]["metrics"]) == {"load/duration_s", "load/nbytes"}
    assert all(value > 0 for line in costs["load"] for value in line["metrics"].values())


def test_values_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "train.jsonl")
    now = Now(1)
    log.fit_start(now)  # type: ignore[arg-type]
    log.log(now, {"loss": float("nan"), "top": float("inf"), "x": 0.5})  # type: ignore[arg-type]
    log.close(now)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "train.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["metrics"] == {"loss": "nan", "top": "inf", "x": 0.5}


class Tells(Callback):
    """Logs a text, a table and a number at each step."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        table = Table(["word", "loss"], [["a|b", 0.5], ["c", math.nan]])
        with training.scope("own"):
            training.log({"sample": f"once {training.counters.step}", "worst": table, "x": 1.0})


def test_texts_and_tables_have_lines_of_their_own_once_over_all_resumes(tmp_path: Path) -> None:
    for until in (2, 3):
        make(tmp_path, every="2step", callbacks=[Tells()]).fit(until)
    text = (tmp_path / "log" / "train.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    texts = [line["texts"]["own/sample"] for line in lines if "texts" in line]
    assert texts == ["once 1", "once 2", "once 3"]
    tables = [line["tables"]["own/worst"] for line in lines if "tables" in line]
    rows = [["a|b", 0.5], ["c", "nan"]]
    assert tables == [{"columns": ["word", "loss"], "rows": rows}] * 3
    assert [line["step"] for line in lines if "own/x" in line["metrics"]] == [1, 2, 3]


class Weighs(Callback):
    """Logs tensors, an array, and a table as a list of dicts."""

    def fit_start(self, training: Training) -> None:
        values = {"tensor": torch.tensor([0.0, 2.0, math.nan]), "array": np.ones(3, dtype=np.int8)}
        rows = [{"word": "a", "loss": torch.tensor(0.5)}, {"word": "b", "at": None}]
        training.log({**values, "nan": torch.full((2,), math.nan), "rows": rows})


def test_tensors_are_histograms_and_lists_of_dicts_are_tables(tmp_path: Path) -> None:
    """K45."""
    make(tmp_path, callbacks=[Weighs()]).fit(1)
    lines = map(json.loads, (tmp_path / "log" / "train.jsonl").read_text("utf-8").splitlines())
    entries = [line["histograms"] if "histograms" in line else line.get("tables") for line in lines]
    found = {name: entry for one in filter(None, entries) for name, entry in one.items()}
    assert found["tensor"]["edges"][0::64] == [0.0, 2.0]
    assert (found["tensor"]["mean"], found["tensor"]["std"]) == (1.0, 1.0)
    assert (sum(found["tensor"]["counts"]), found["tensor"]["num_not_finite"]) == (2, 1)
    assert sum(found["array"]["counts"]) == 3
    assert (found["nan"]["mean"], found["nan"]["num_not_finite"]) == (None, 2)
    columns, rows = ["word", "loss", "at"], [["a", 0.5, ""], ["b", "", "None"]]
    assert found["rows"] == {"columns": columns, "rows": rows}


def test_a_histogram_that_no_logger_records_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(MemoryStore(), callbacks=[Csv(tmp_path / "log.csv")])
    for _ in range(2):
        trainer.log({"weights": torch.ones(3)})
    (text,) = [one.getMessage() for one in caplog.records if "log_histogram" in one.getMessage()]
    assert "'weights'" in text


def test_tensors_of_no_numbers_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"complex": torch.ones(2, dtype=torch.complex64), "empty": torch.ones(0)}
    make(tmp_path).log({**strange, "meta": torch.ones(2, device="meta"), "list": [1.0, 2.0]})
    text = "\n".join(one.getMessage() for one in caplog.records)
    assert all(name in text for name in ("complex", "empty", "meta", "list"))


def test_entries_go_to_the_loggers_that_are_named(tmp_path: Path) -> None:
    class Names(Logger):
        def __init__(self, name: str) -> None:
            self.name, self.told = name, []  # type: ignore[var-annotated]

        def log_text(self, training: Training, name: str, text: str) -> None:
            self.told.append((name, text))

        def log_image(self, training: Training, name: str, image: Image) -> None:
            self.told.append((name, image.pixels.shape))

    one, two = Names("one"), Names("two")
    trainer = make(tmp_path, callbacks=[one, two])
    trainer.log({"a": "b", "matrix": picture([[1.0]])}, to=["two"])
    assert (one.told, two.told) == ([], [("a", "b"), ("matrix", (64, 64, 3))])
    with pytest.raises(UsageError, match="nobody"):
        trainer.log({"a": "b"}, to=["nobody"])


@pytest.mark.parametrize(("columns", "rows"), [("word", []), ([], []), (["a"], [[1], [1, 2]])])
def test_a_table_has_a_cell_for_each_column(columns: Any, rows: Any) -> None:
    with pytest.raises(UsageError, match="Table"):
        Table(columns, rows)


def test_a_validation_that_is_still_to_be_done_is_not_logged_twice(tmp_path: Path) -> None:
    """A process may be killed between the log of a validation made up for and its save."""
    path = tmp_path / "train.jsonl"
    lines = [
        {"step": 2, "metrics": {"val/loss": 1.0}},
        {"step": 3, "metrics": {"sparsity": 0.5}},
        {"step": 3, "metrics": {"loss": 1.0, "val/loss": 1.0}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert drop_beyond(path, 3) == 0
    assert drop_beyond(path, 3, is_validated=False) == 1
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]
