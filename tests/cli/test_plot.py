"""Claims about `holdfast plot`."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result

import warm
from children import environment
from runs import new_run

Command = Callable[..., Result]
SCRIPT = Path(__file__).with_name("plotted.py")


@pytest.fixture(scope="session")
def _drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plot") / "run"
    for arguments, code in ((("9step", "5"), -9), (("6step",), 0), (("9step",), 0)):
        done = warm.run([SCRIPT, root, *arguments], env=environment())
        assert done.returncode == code, done.stderr
    return root


@pytest.fixture
def run(_drawn: Path, tmp_path: Path) -> Path:
    """A run of nine steps: killed in step 5, ended at step 6, and gone on to step 9."""
    return Path(shutil.copytree(_drawn, tmp_path / "run", symlinks=True))


def test_the_series_are_those_of_the_log_with_saves_and_kills(holdfast: Command, run: Path) -> None:
    document = holdfast("plot", run, "--json").document
    assert list(document) == [
        *("holdfast", "root", "output", "series", "branches"),
        *("saves", "starts", "metrics", "notes"),
    ]
    assert {"loss", "val/loss", "lr/0", "save/nbytes"} <= {*document["metrics"]}
    series = {one["name"]: one for one in document["series"]}
    panels = {name: one["panel"] for name, one in series.items()}
    assert panels == {
        "loss": "loss",
        "val/loss": "loss",
        "lr/0": "learning rate",
        "samples/s": "throughput",
        "checkpoint, MB": "size",
    }
    sizes = [step for step, _ in series["checkpoint, MB"]["points"]]
    assert sizes[-2:] == [6, 9]  # 3 is deleted; the log may tell its size
    assert all(0.001 < nbytes < 1 for _, nbytes in series["checkpoint, MB"]["points"])
    assert [step for step, _ in series["loss"]["points"]] == list(range(1, 10))
    assert [step for step, _ in series["val/loss"]["points"]] == [4, 6, 8, 9]
    rates = [rate for _, rate in series["lr/0"]["points"]]
    assert rates == pytest.approx([0.5 * (1 - done / 10) for done in range(9)])
    assert document["saves"] == [3, 6, 9]
    assert [(one["step"], one["before"]) for one in document["starts"]] == [
        (3, "failed"),
        (6, "closed"),
    ]
    assert document["notes"] == []


def test_the_throughput_leaves_out_what_lies_between_two_processes(
    holdfast: Command, run: Path
) -> None:
    series = holdfast("plot", run, "--json").document["series"]
    (points,) = [one["points"] for one in series if one["name"] == "samples/s"]
    assert {4, 7}.isdisjoint({step for step, _ in points})


def test_without_a_file_the_curves_are_listed(holdfast: Command, run: Path) -> None:
    result = holdfast("plot", run)
    rows = [line.split() for line in result.out.splitlines()]
    assert [row[:3] for row in rows[1:3]] == [["loss", "loss", "1"], ["loss", "val/loss", "4"]]
    assert rows[1][3] == "9"
    assert "-o FILE draws them\n" in result.out


@pytest.mark.parametrize(
    ("ending", "start"),
    [
        ("svg", b"<?xml"),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.full),
        pytest.param("pdf", b"%PDF", marks=pytest.mark.full),
    ],
)
def test_a_file_is_of_the_kind_that_its_name_says(
    holdfast: Command, run: Path, tmp_path: Path, ending: str, start: bytes
) -> None:
    path = tmp_path / f"plot.{ending}"
    result = holdfast("plot", run, "-o", path)
    assert (result.code, result.out) == (0, f"{path}: 4 panels\n")
    assert path.read_bytes().startswith(start)


def test_an_image_has_the_curves_the_saves_and_the_starts(
    holdfast: Command, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plot.svg"
    holdfast("plot", run, "-o", path)
    drawn = path.read_text()
    for name in ("loss", "val/loss", "lr/0", "samples/s", "saves", "resumes", "kills"):
        assert f"<!-- {name} -->" in drawn


def test_without_matplotlib_the_error_names_the_extra(
    holdfast: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert holdfast("plot", run).code == 0
    result = holdfast("plot", run, "-o", tmp_path / "plot.png")
    assert (result.code, "pip install 'holdfast-torch[plot]'" in result.err) == (2, True)


def test_chosen_metrics_have_a_panel_each(holdfast: Command, run: Path) -> None:
    document = holdfast(
        "plot", run, "--metric", "save/nbytes", "--metric", "lr/0", "--json"
    ).document
    assert [one["panel"] for one in document["series"]] == ["save/nbytes", "lr/0"]


def test_damaged_lines_are_left_out_and_counted(holdfast: Command, run: Path) -> None:
    log = run / "log" / "train.jsonl"
    log.write_bytes(b"torn\n" + log.read_bytes() + b'{"step": 3}\n[1]\n')
    document = holdfast("plot", run, "--json").document
    assert document["notes"] == ["3 lines of the log are damaged and left out"]
    assert len(document["series"][0]["points"]) == 9


def test_a_log_may_be_elsewhere(holdfast: Command, run: Path, tmp_path: Path) -> None:
    log = run / "log" / "train.jsonl"
    moved = log.replace(tmp_path / "moved.jsonl")
    document = holdfast("plot", run, "--log", moved, "--json").document
    assert len(document["series"][0]["points"]) == 9


def test_of_two_saves_at_one_step_the_newer_is_drawn(holdfast: Command, tmp_path: Path) -> None:
    """The run went back before the other."""
    run = new_run()
    with run.manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, metrics={"loss": 5.0}).wait()
    with run.manager(tmp_path / "run") as manager:
        manager.resume("step=1")
        manager.save(2, metrics={"loss": 1.0}).wait()
    series = holdfast("plot", tmp_path / "run", "--json").document["series"]
    assert [one["points"] for one in series if one["name"] == "loss"] == [[[1, 5.0], [2, 1.0]]]


def test_all_steps_are_drawn_and_exported_whatever_was_deleted(
    holdfast: Command, tmp_path: Path
) -> None:
    root, table = tmp_path / "run", tmp_path / "metrics.csv"
    with new_run().manager(root, every="100step", keep="last:2") as manager:
        for step in range(1, 1001):
            manager.maybe_save(step, metrics={"loss": 1 / step})
    with new_run().manager(root, every="100step", keep="last:2") as manager:
        manager.resume("step=900")
        manager.maybe_save(901, metrics={"loss": 5.0, "lr": 0.5})
    document = holdfast("plot", root, "--json").document
    expected = [*([step, 1 / step] for step in range(1, 901)), [901, 5.0]]
    assert document["series"][0]["points"] == expected
    (left,) = document["branches"]
    assert (left["session"], len(left["points"]), left["points"][-1]) == (1, 100, [1000, 1 / 1000])
    assert holdfast("plot", root, "-o", tmp_path / "plot.svg").code == 0
    assert "<!-- left behind -->" in (tmp_path / "plot.svg").read_text()
    assert holdfast("plot", root, "-o", table).out == f"{table}: 901 steps\n"
    lines = table.read_text().splitlines()
    assert (lines[0], len(lines)) == ("step,time,loss,lr", 902)
    assert (lines[-1].split(",")[0], lines[-1].split(",")[2:]) == ("901", ["5.0", "0.5"])
    saves = [
        save
        for one in holdfast("log", root, "--saves", "--json").document["sessions"]
        for save in one["saves"]
    ]
    deleted = [save for save in saves if save["state"] == "deleted"]
    assert [save["step"] for save in deleted] == list(range(100, 900, 100))
    assert all("last 2" in save["why"] and save["deleted"] for save in deleted)


def test_without_a_history_the_checkpoints_are_drawn(holdfast: Command, root: Path) -> None:
    shutil.rmtree(root / "history")
    document = holdfast("plot", root, "--json").document
    loss, sizes = document["series"]
    assert loss == {
        "panel": "loss",
        "name": "loss",
        "points": [[100, 0.3], [200, 0.15], [300, 0.1]],
    }
    assert [step for step, _ in sizes["points"]] == [100, 200, 300]
    assert document["notes"] == ["no history: only the steps of checkpoints are known"]
    assert holdfast("plot", root, "--metric", "odd").code == 0  # NaN at all steps
    assert "--metric NAME draws another metric: odd\n" in holdfast("plot", root).out
    assert "another metric: loss\n" in holdfast("plot", root, "--metric", "odd").out


def test_a_loss_that_is_never_finite_is_said_to_be(holdfast: Command, tmp_path: Path) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        for step, loss in ((1, float("nan")), (2, float("inf"))):
            manager.save(step, metrics={"loss": loss, "score": 1.0}, wait=True)
    document = holdfast("plot", tmp_path / "run", "--json").document
    names = [one["name"] for one in document["series"]]
    assert names == ["score", "steps/s", "checkpoint, MB"]
    assert document["notes"][-1] == "loss: no finite value at any step"
    asked = holdfast("plot", tmp_path / "run", "--metric", "loss")
    assert (asked.code, asked.out.splitlines()[-1]) == (0, "loss: no finite value at any step")


def test_a_value_near_the_largest_float_is_clipped_and_that_is_said(
    holdfast: Command, tmp_path: Path
) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        for step, loss in enumerate((1.0, -1.7e308, 1.7e308), start=1):
            manager.save(step, metrics={"loss": loss}, wait=True)
    drawn = holdfast("plot", tmp_path / "run", "-o", tmp_path / "plot.svg")
    assert (drawn.code, "loss: values beyond ±1e+300" in drawn.out) == (0, True)


def test_the_error_for_a_log_of_counters_names_the_option_that_draws_them(
    holdfast: Command, run: Path
) -> None:
    (run / "log" / "train.jsonl").write_text(
        '{"step": 1, "time": "2026-01-01T00:00:00+00:00", "metrics": {"epoch": 1.0}}\n'
    )
    for path in (run / "history", *run.glob("step-*")):
        shutil.rmtree(path)
    result = holdfast("plot", run)
    assert (result.code, "only epoch; draw them by --metric" in result.err) == (3, True)
    assert holdfast("plot", run, "--metric", "epoch").code == 0


def test_many_names_of_metrics_are_counted(holdfast: Command, tmp_path: Path) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        manager.save(1, metrics={f"m{number:02}\n": 1.0 for number in range(23)}, wait=True)
    assert "m20\\x0a and 2 more\n" in holdfast("plot", tmp_path / "run").out
    result = holdfast("plot", tmp_path / "run", "--metric", "los")
    assert (result.code, result.err[-10:]) == (2, "and 3 more\n"[-10:])
    with new_run().manager(tmp_path / "none") as manager:
        manager.save(1, wait=True)
    assert holdfast("plot", tmp_path / "none", "--metric", "los").err.endswith("recorded: none\n")


@pytest.mark.parametrize(
    ("metrics", "keep", "drawn"),
    [
        (("train_loss", "val_loss", "lr"), "last:3", ["train_loss", "val_loss"]),
        (("eval_loss", "eval_runtime"), "last:3", ["eval_loss"]),
        (("eval_runtime", "weight"), "last:3", ["weight"]),
        (("accuracy", "score"), "best:score:max", ["score"]),
        (("epoch", "train_loss_step", "Loss"), "last:3", ["train_loss_step", "Loss"]),
        (("glossy",), "last:3", ["glossy"]),
        (("accuracy", "loss_scale", "loss/train"), "last:3", ["loss/train"]),
        (("aaa", "eval_runtime", "val/accuracy"), "last:3", ["val/accuracy"]),
        (("epoch", "global_step", "lr", "step", "weight"), "last:3", ["weight"]),
        (("epoch", "lr-AdamW", "num_input_tokens_seen"), "last:3", ["lr-AdamW"]),
        (("accuracy_epoch", "epoch"), "last:3", ["accuracy_epoch"]),
        (("epoch",), "best:epoch:max", ["epoch"]),
        (("epoch",), "last:3", []),
        ((), "last:3", []),
    ],
)
def test_a_recorded_metric_is_drawn_before_the_size(
    holdfast: Command, tmp_path: Path, metrics: tuple[str, ...], keep: str, drawn: list[str]
) -> None:
    with new_run().manager(tmp_path / "run", keep=keep) as manager:
        for step in (1, 2):
            manager.save(step, metrics={name: float(step) for name in metrics}, wait=True)
    document = holdfast("plot", tmp_path / "run", "--json").document
    names = [one["name"] for one in document["series"] if one["panel"] != "throughput"]
    assert names == [*drawn, "checkpoint, MB"]
    assert document["metrics"] == sorted(metrics)
    said = [note for note in document["notes"] if note.startswith("no loss to draw")]
    is_loss = any("loss" in name.lower() and name != "glossy" for name in drawn)
    assert said == [
        f"no loss to draw: {name} is drawn instead; --metric NAME draws another"
        for name in drawn
        if not is_loss
    ]


def test_what_is_drawn_without_a_loss_is_said_beside_a_file_too(
    holdfast: Command, tmp_path: Path
) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        manager.save(1, metrics={"epoch": 1.0, "reward": 2.0}, wait=True)
    path = tmp_path / "plot.svg"
    assert "reward is drawn instead; --metric" in holdfast("plot", tmp_path / "run", "-o", path).out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--metric", "lost"], 2, "--metric='lost': there is no such metric; recorded: load"),
        (["-o", "plot.gif"], 2, "must end in .png, .svg, .pdf"),
        (["-o", "lost/plot.svg"], 2, "No such file"),
        (["--log", "lost.jsonl"], 2, "there is no such file"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    holdfast: Command, run: Path, arguments: list[str], code: int, message: str
) -> None:
    result = holdfast("plot", run, *arguments)
    assert result.code == code
    assert message in result.err


def test_a_run_that_logged_nothing_is_refused(holdfast: Command, run: Path) -> None:
    (run / "log" / "train.jsonl").unlink()
    for path in (run / "history", *run.glob("step-*")):
        shutil.rmtree(path)
    result = holdfast("plot", run)
    assert result.code == 3
    assert "nothing was logged" in result.err


@pytest.mark.full
def test_any_finite_or_odd_values_are_drawn(holdfast: Command, tmp_path: Path) -> None:
    values = (1.0, math.nan, math.inf, -math.inf, -1e300, 5e-324, 0.0)
    with new_run().manager(tmp_path / "run") as manager:
        for step, value in enumerate(values, start=1):
            manager.save(step, metrics={"_$loss^\n": value}, wait=True)
    path = tmp_path / "plot.svg"
    assert holdfast("plot", tmp_path / "run", "-o", path).code == 0
    assert "_$loss^" in path.read_text()
