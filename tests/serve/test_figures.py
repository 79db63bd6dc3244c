"""Claims that each figure on the pages is that of a command's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serve.client import Page
from tests.serve.test_pages import folders, text_of

from holdfast.cli.diff import diff
from holdfast.cli.log import log_root
from holdfast.cli.ls import list_root
from holdfast.cli.output import format_nbytes, number
from holdfast.cli.prune import forecast_deletions
from holdfast.cli.resume_plan import plan_of
from holdfast.cli.show import show
from holdfast.cli.stats import stats
from holdfast.cli.target import open_root
from holdfast.cli.verify import verify_target
from holdfast.cli.watch import Watcher
from holdfast.cli.web.curves import (
    MetricCurve,
    Row,
    draw_on,
    make_columns,
    make_grid,
    make_spark,
    panel_of,
    sort_rows,
)

Rows = list[list[str]]


def rows_of(text: str, label: str) -> Rows:
    """Return the texts of the cells of the table that has a label."""
    region = re.search(rf'aria-label="{label}".*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    assert region is not None, label
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", region[1], re.DOTALL)
    return [[text_of(f" {cell} ").strip() for cell in cells_of(row)] for row in rows]


def cells_of(row: str) -> list[str]:
    return re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)


def picked(rows: Rows, *columns: int) -> list[tuple[str, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


def when(text: str | None) -> str:
    return (text or "?")[:19].replace("T", " ")


def took(text: str) -> float | None:
    """Return the seconds that a cell says."""
    value, _, unit = text.partition(" ")
    return None if text == "–" else float(value) / (1000 if unit == "ms" else 1)


def near(found: Iterable[str], expected: Iterable[float | None]) -> bool:
    pairs = [(took(text), value) for text, value in zip(found, expected, strict=True)]
    return all(
        one == other if one is None or other is None else one == pytest.approx(other, abs=0.006)
        for one, other in pairs
    )


def test_checkpoints_are_those_of_ls(page: Page, run_root: Path) -> None:
    listed: Any = list_root(str(run_root)).document
    shown = rows_of(page.whole("/r/run/checkpoints"), "Checkpoints")
    assert picked(shown, 0, 1, 2, 4) == [
        (str(one.step), one.folder, when(one.created), format_nbytes(one.nbytes))
        for one in listed.checkpoints
    ]
    metrics = [{n: float(v) for n, v in one.metrics.items()} for one in listed.checkpoints]
    read = [dict(re.findall(r"(\S+) ([\d.e+-]+)", row[5])) for row in shown]
    assert [{n: float(v) for n, v in one.items()} for one in read] == [
        {n: float(number(v)) for n, v in one.items()} for one in metrics
    ]


@pytest.mark.parametrize("path", ["/r/run", "/"])
def test_size_and_last_step_are_those_of_watch(page: Page, run_root: Path, path: str) -> None:
    seen = Watcher(open_root(str(run_root))).observe_root()
    text = text_of(page.whole(path))
    if path == "/":
        row = f" {len(seen.checkpoints)} {format_nbytes(seen.nbytes)}"
        assert f"ended {seen.last_step} " in text
        assert row in text
    else:
        assert f"step {seen.last_step}, saved" in text
        assert f"{len(seen.checkpoints)} checkpoints, {format_nbytes(seen.nbytes)}" in text


def test_lives_saves_and_costs_are_those_of_log(page: Page, run_root: Path) -> None:
    log: Any = log_root(str(run_root), saves=True).document
    text = page.whole("/r/run/lineage")
    assert picked(rows_of(text, "Sessions"), 0, 1, 4, 5, 6) == [
        (
            str(session.epoch),
            when(session.began),
            f"{session.from_step} to {session.to_step}",
            str(session.num_checkpoints),
            session.ending,
        )
        for session in reversed(log.sessions)
    ]
    saves = [
        (session, save) for session in reversed(log.sessions) for save in reversed(session.saves)
    ]
    assert picked(rows_of(text, "Saves"), 0, 1, 2, 3, 4, 5) == [
        (str(session.epoch), str(s.step), s.folder, when(s.created), s.reason, s.state)
        for session, s in saves
    ]
    costs = rows_of(page.whole("/r/run/costs"), "Costs of saves")
    known = [save for session in log.sessions for save in session.saves if save.cost][::-1]
    assert picked(costs, 1, 7, 8) == [
        (one.folder, format_nbytes(one.cost.nbytes), format_nbytes(one.cost.new_nbytes))
        for one in known
    ]
    for row, save in zip(costs, known, strict=True):
        cost = save.cost
        assert near(row[3:6], (cost.stall_s, cost.write_s, cost.durable_s)), row
    data = json.loads(page.whole("/r/run/costs.json"))
    drawn = sorted([*reversed(known)], key=lambda save: save.step or 0)
    assert data["x"] == [save.step for save in drawn]
    for one in data["panels"][0]["curves"]:
        assert one["mean"] == [getattr(save.cost, f"{one['name']}_s") for save in drawn]


def test_what_is_to_come_is_that_of_forecast_and_resume_plan(page: Page, run_root: Path) -> None:
    found: Any = forecast_deletions(str(run_root), keep="last:2").document
    text = page.whole("/r/run/retention?keep=last:2")
    assert picked(rows_of(text, "Coming saves"), 0, 1, 4) == [
        (str(save.save), str(save.step), format_nbytes(save.nbytes) if save.nbytes else "")
        for save in found.saves
    ]
    found = forecast_deletions(str(run_root), keep="all").document
    shown = rows_of(page.whole("/r/run/retention?keep=all"), "Checkpoints that stay")
    assert shown == [
        [str(one.step), one.folder, format_nbytes(one.nbytes), one.why] for one in found.kept
    ]
    plan: Any = plan_of(str(run_root), verify=False).document
    shown = rows_of(page.whole("/r/run/resume"), "Candidates")
    assert picked(shown, 0, 1, 2, 3) == [
        (str(one.step), one.folder, when(one.created), one.outcome) for one in plan.candidates
    ]


def test_the_curves_and_their_table_are_what_was_saved(page: Page, run_root: Path) -> None:
    listed: Any = list_root(str(run_root)).document
    standing = sorted((one.step, one.metrics) for one in listed.checkpoints if one.in_lineage)
    drawn = json.loads(page.whole("/r/run/curves.json"))
    by_step = dict(zip(drawn["x"], drawn["panels"][0]["curves"][0]["mean"], strict=True))
    assert {step: value for step, value in by_step.items() if value is not None} == {
        step: metrics["loss"] for step, metrics in standing
    }
    shown = rows_of(page.whole("/r/run/numbers"), "Numbers by step")
    assert shown == [[str(step), number(metrics["loss"])] for step, metrics in reversed(standing)]


def test_a_checkpoint_and_its_tensors_are_those_of_show(page: Page, run_root: Path) -> None:
    newest = folders(run_root)[0]
    found: Any = show(f"{run_root}@{newest}", tensors=True).document
    text, one = page.whole(f"/r/run/c/{newest}"), found.checkpoint
    assert f"{format_nbytes(one.nbytes)} in {len(one.files)} files" in text_of(text)
    assert picked(rows_of(text, "Components"), 0, 2, 3) == [
        (name, str(part["num_tensors"]), format_nbytes(part["nbytes"]))
        for name, part in one.components.items()
    ]
    assert picked(rows_of(text, "Files"), 0, 1, 2) == [
        (name, f"{file['nbytes']:,}", file["digest"]) for name, file in one.files.items()
    ]
    shown = rows_of(page.whole(f"/r/run/c/{newest}/tensors"), "Tensors")
    assert picked(shown, 0, 1, 2, 3) == [
        (
            f"{tensor.component}:{tensor.key}",
            tensor.dtype,
            "×".join(map(str, tensor.shape)) or "scalar",
            f"{sum(shard.nbytes for shard in tensor.shards):,}",
        )
        for tensor in found.tensors
    ]


def test_what_work_found_is_what_its_command_finds(page: Page, run_root: Path) -> None:
    newest, *_, oldest = folders(run_root)
    verified: Any = verify_target(str(run_root)).document
    shown = rows_of(page.done(page.post("/r/run/verify")), "Verified checkpoints")
    assert shown == [
        [str(o.step), o.folder, format_nbytes(o.nbytes), "ok"] for o in verified.checkpoints
    ]
    target = f"{run_root}@{newest}"
    computed: Any = stats(target, components=["model"], tensors=[]).document
    shown = rows_of(
        page.done(page.post(f"/r/run/c/{newest}/stats", component="model")), "Statistics"
    )
    assert picked(shown, 0, 3, 4, 5, 6, 7) == [
        (
            o.tensor,
            *("–" if x is None else number(x) for x in (o.norm, o.min, o.max, o.mean)),
            str(o.zeros or ""),
        )
        for o in computed.tensors
    ]
    compared: Any = diff(f"{run_root}@{oldest}", target, components=(), fail_above=None).document
    text = page.done(page.post("/r/run/compare", a=oldest, b=newest))
    assert f"{compared.num_equal} tensors are equal" in text_of(text)
    assert picked(rows_of(text, "Tensors that differ"), 0, 3, 4, 5) == [
        (
            o.tensor,
            *("–" if x is None else number(x) for x in (o.max_abs, o.relative_norm, o.cosine)),
        )
        for o in compared.tensors
    ]


def make_curve(name: str, values: Any) -> MetricCurve:
    steps = np.arange(1, len(values) + 1, dtype=np.float64)
    return MetricCurve(name, steps, steps, np.array(values, np.float64))


def test_many_points_keep_their_mean_and_their_extremes() -> None:
    values = np.arange(50_000) % 7.0
    values[31_234], values[40_000] = 99.0, np.nan
    curve = make_curve("loss", values)
    grid = make_grid([curve.steps], 600, is_whole=True)
    drawn = draw_on(grid, curve.steps, curve.values)
    assert (len(grid), grid[0], grid[-1]) == (600, 1, 50_000)
    assert (max(drawn["high"]), min(drawn["low"])) == (99, 0)
    assert drawn["mean"][100] == pytest.approx(3, abs=0.1)
    few = make_curve("val", [2.0, np.inf, 1.0])
    grid = make_grid([few.steps], 600, is_whole=True)
    assert draw_on(grid, few.steps, few.values) == {"mean": [2.0, None, 1.0], "per": 1}


def test_metrics_of_training_and_validation_share_a_panel() -> None:
    names = ("loss", "val/loss", "eval_loss", "train.loss", "lr", "test")
    assert [panel_of(name) for name in names] == ["loss"] * 4 + ["lr", "test"]


def test_the_table_has_what_differs_and_sorts_numbers_as_numbers() -> None:
    def row(name: str, loss: float, **config: str) -> Row:
        curves = {"loss": make_curve("loss", [3.0, loss])}
        return Row(name=name, watched=None, curves=curves, config=config)

    rows = [row("a", 2.0, lr="1e-3", seed="1"), row("b", float("nan"), lr="0.01", seed="1")]
    rows += [row("c", 1.0, lr="2e-4", seed="1"), row("d", 1.5)]
    columns = make_columns(rows)
    titles = [column.title for column in columns]
    assert titles == ["step", "loss", "last save", "lr", "kept", "size"]

    def order(key: str) -> str:
        return "".join(row.name for row in sort_rows(rows, columns, key))

    assert (order("m:loss"), order("-m:loss")) == ("cdab", "adcb")
    assert (order("c:lr"), order("-c:lr"), order("-run")) == ("cabd", "bacd", "dcba")
    spark = make_spark(rows[0], "loss")
    assert spark is not None
    assert spark.text == "loss from 3 to 2"
    assert spark.points == "2.0,3.0 94.0,21.0"
