"""Claims about `holdfast advise`: its numbers, where each comes from, and what it refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.care.recorded import RecordedRun, three_failures
from tests.cli.roots import Result
from tests.cli.test_app import in_a_process

from holdfast.care.advise import gather
from holdfast.policy.advisor import advise, learnt_rate
from holdfast.policy.auto import Auto
from holdfast.policy.costs import Costs
from holdfast.policy.triggers import Every
from holdfast.store.local import LocalStore

Command = Callable[..., Result]
HOUR, DAY = 3600, 86_400
PAGE = Path(__file__).resolve().parents[2] / "docs" / "saving.md"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty hours with three failures; 100 steps of 3.58 s and a stall of 2 s per save."""
    root = tmp_path_factory.mktemp("advise") / "run"
    three_failures(LocalStore(root))
    return root


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(LocalStore(tmp_path / "run"))


def inputs(document: Any) -> dict[str, tuple[float, str]]:
    return {item["name"]: (item["value"], item["source"]) for item in document["inputs"]}


def rows(text: str) -> dict[str, list[str]]:
    """The lines of the tables, by their first cell."""
    cells = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def test_the_advice_is_that_of_the_advisor_for_what_was_recorded(
    holdfast: Command, failing: Path
) -> None:
    document = holdfast("advise", failing, "--json").document
    expected = advise(Costs(stall_s=2, restart_s=120), learnt_rate(3, 20 * HOUR), step_s=3.58)
    assert document["every"] == str(expected.every)
    assert document["advice"]["goodput"] == pytest.approx(expected.goodput)
    assert Every(document["every"]).unit.value == "step"
    assert document["advice"]["every"] == document["every"]


def test_each_number_says_where_it_comes_from(holdfast: Command, failing: Path) -> None:
    document = holdfast("advise", failing, "--json").document
    rate = learnt_rate(3, 20 * HOUR)
    assert inputs(document) == {
        "stall_s": (2, "measured"),
        "background_s": (0, "assumed"),
        "commit_s": (0, "assumed"),
        "restart_s": (120, "assumed"),
        "mtbf_s": (rate.mtbf_s, "measured"),
        "prior_mtbf_s": (DAY, "assumed"),
        "overhead_cap": (0.05, "assumed"),
        "step_s": (pytest.approx(3.58), "measured"),
    }
    assert all(item["basis"] for item in document["inputs"])


def test_people_get_the_same_as_tables_and_a_line_to_paste(
    holdfast: Command, failing: Path
) -> None:
    result = holdfast("advise", failing)
    document = holdfast("advise", failing, "--json").document
    assert (result.code, result.err) == (0, "")
    table = rows(result.out)
    assert table["a save stops training"] == [
        "2 s",
        "measured",
        "median of 32 saves: capture_s + stage_s",
    ]
    assert table["it delays training more"] == ["0 s", "assumed", "not recorded: --background"]
    assert table["one failure in"][2].startswith("3 failures in 20 h of training; 90%: ")
    assert table["part that saving may take"] == ["5%", "assumed", "--overhead-cap"]
    assert table["today"][:2] == ["5.97 min", "100 steps"]
    assert table["advised"][-1] == f"{document['advice']['goodput']:.2%}"
    assert "4 starts: 3 failed, 1 ended cleanly\n" in result.out
    assert "median 8 min, at most 8 min (3 failures); lost work and downtime" in result.out
    assert result.out.splitlines()[-1] == f'every="{document["every"]}"'


def test_the_example_of_the_page_is_what_the_command_says(
    holdfast: Command, run: RecordedRun
) -> None:
    point, step, at_s = None, 0, 0.0
    for num_saves in (15, 10, 10, 5):
        run.start(at_s, point=point)
        for _ in range(num_saves):
            step, at_s = step + 2000, at_s + 1800
            timings = {"capture_s": 0.6, "stage_s": 1.5}
            point = run.save(step, 0.9 * step, at_s=at_s, nbytes=511_000_000, timings=timings)
        at_s += 700
    run.close()
    example = re.search(
        r"```console\n\$ holdfast advise runs/gpt (.*)\n([^`]*)```", PAGE.read_text("utf-8")
    )
    assert example is not None
    assert holdfast("advise", run.store.url, *example[1].split()).out == example[2]


def test_what_is_given_goes_before_what_was_measured(holdfast: Command, failing: Path) -> None:
    options = "--mtbf 1h30m --overhead-cap 1% --stall 4s --background 1s --commit 60s --restart 0s"
    document = holdfast("advise", failing, "--json", *shlex.split(options)).document
    found = inputs(document)
    assert {source for name, (_, source) in found.items() if name != "step_s"} == {"given"}
    assert {name: value for name, (value, _) in found.items() if name != "step_s"} == {
        "stall_s": 4,
        "background_s": 1,
        "commit_s": 60,
        "restart_s": 0,
        "mtbf_s": 5400,
        "overhead_cap": 0.01,
    }
    advice = document["advice"]
    assert advice["limit"] == "overhead_cap"
    assert advice["saving"] <= 0.01
    assert advice["down"] == 0
    assert "saves would take more" in holdfast("advise", failing, *shlex.split(options)).out


def test_a_rate_can_be_given_in_failures_per_day(holdfast: Command, failing: Path) -> None:
    document = holdfast("advise", failing, "--failures-per-day", "0.5", "--json").document
    assert inputs(document)["mtbf_s"] == (2 * DAY, "given")
    assert "prior_mtbf_s" not in inputs(document)


def test_more_failures_mean_more_saves(holdfast: Command, failing: Path) -> None:
    intervals = [
        holdfast("advise", failing, "--mtbf", mtbf, "--json").document["advice"]["interval_s"]
        for mtbf in ("1h", "6h", "48h")
    ]
    assert intervals == sorted(intervals)
    assert len(set(intervals)) == 3


def test_today_is_judged_by_the_same_numbers(holdfast: Command, failing: Path) -> None:
    document = holdfast("advise", failing, "--json").document
    today, advice = document["today"], document["advice"]
    assert (today["steps"], today["interval_s"], today["num_pairs"]) == (100, 358, 196)
    for found in (today, advice):
        parts = found["goodput"] + found["saving"] + found["lost"] + found["down"]
        assert parts == pytest.approx(1)
    assert advice["goodput"] >= today["goodput"]
    text = "today: median distance of 196 pairs of interval saves; {}\n"
    assert text.format("it is as good") in holdfast("advise", failing).out
    gain = text.format("goodput changes by +")[:-1]
    assert gain in holdfast("advise", failing, "--mtbf", "10min").out


def test_json_has_every_member_that_the_page_promises(holdfast: Command, failing: Path) -> None:
    document = holdfast("advise", failing, "--json").document
    assert list(document) == [
        "holdfast",
        "root",
        "every",
        "inputs",
        "advice",
        "today",
        "starts",
        "num_saves",
        "nbytes",
        "trained_s",
        "unreadable",
        "auto",
        "notes",
    ]
    for start in document["starts"]:
        assert list(start) == [
            "epoch",
            "created",
            "host",
            "ending",
            "resumed_from",
            "resume_gap_s",
            "steps_left_behind",
        ]


def test_a_real_run_is_advised_and_not_touched(holdfast: Command, root: Path) -> None:
    """Invariant 11."""
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    result = holdfast("advise", root)
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
    assert result.code == 0
    assert "1 start: 1 ended cleanly" in result.out
    assert "a program that ends with an exception also ends cleanly" in result.out
    assert Every(result.out.splitlines()[-1].removeprefix('every="').removesuffix('"'))


def test_a_rate_that_nothing_was_seen_of_is_called_assumed(
    holdfast: Command, run: RecordedRun
) -> None:
    run.start(0)
    run.close()
    for step in (100, 200):
        run.save(step, 0.0)
    document = holdfast("advise", run.store.url, "--json").document
    assert inputs(document)["mtbf_s"] == (DAY, "assumed")
    assert document["today"] is None
    assert document["every"].endswith("s")
    out = holdfast("advise", run.store.url).out
    assert "today's interval is unknown" in out
    assert "in seconds, as no two saves" in out


def test_a_recorded_write_is_measured(holdfast: Command, run: RecordedRun) -> None:
    run.start(0)
    timings = {"capture_s": 1.0, "stage_s": 1.0, "write_s": 2000.0}
    for step in (100, 200, 300):
        run.save(step, 3000.0 * step / 100, timings=timings, reason="manual")
    document = holdfast("advise", run.store.url, "--json").document
    assert inputs(document)["commit_s"] == (2000, "measured")
    assert document["advice"]["limit"] == "one_save_at_a_time"
    assert "saves of any reason" in holdfast("advise", run.store.url).out


def test_auto_on_a_recorded_root_takes_the_interval_that_is_advised(
    holdfast: Command, failing: Path
) -> None:
    document = holdfast("advise", failing, "--json").document
    auto = Auto()
    auto.learn(gather(LocalStore(failing)).history)
    assert auto.plan is not None
    exact_s = max(document["advice"][name] for name in ("daly_s", "cap_s", "commit_s"))
    assert auto.plan.interval_s == pytest.approx(exact_s, rel=1e-12)
    assert 0 <= document["advice"]["interval_s"] - auto.plan.interval_s < 3.58
    assert document["auto"] == {
        "interval_s": auto.plan.interval_s,
        "limit": document["advice"]["limit"],
        "text": str(auto.plan),
    }
    assert f'every="auto" would save {auto.plan}\n' in holdfast("advise", failing).out


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("--mtbf 6h", {"mtbf": "6h"}),
        ("--failures-per-day 4", {"mtbf": "6h"}),
        ("--overhead-cap 0.2%", {"overhead": 0.002}),
        ("--stall 10s --commit 300s", {}),
    ],
)
def test_what_auto_can_be_given_is_told_for_auto(
    holdfast: Command, failing: Path, options: str, settings: dict[str, Any]
) -> None:
    document = holdfast("advise", failing, "--json", *shlex.split(options)).document
    auto = Auto(**settings)
    auto.learn(gather(LocalStore(failing)).history)
    assert document["auto"]["text"] == str(auto.plan)


def test_what_auto_records_is_measured_for_the_advice(holdfast: Command, run: RecordedRun) -> None:
    run.start(0)
    costs = {"capture_s": 1.0, "stage_s": 1.0, "write_s": 20.0}
    run.save(100, 100, timings={**costs, "stage_s": 9.0, "resume_s": 45.0})
    run.save(200, 200, timings={**costs, "delay_s": 3.0})
    run.save(300, 300, timings={**costs, "delay_s": 5.0})
    two = inputs(holdfast("advise", run.store.url, "--json").document)
    assert two["background_s"] == (0, "assumed")
    run.save(400, 400, timings={**costs, "delay_s": 4.0})
    assert {
        name: found
        for name, found in inputs(holdfast("advise", run.store.url, "--json").document).items()
        if found[1] == "measured" and name.endswith("_s") and name not in ("step_s", "mtbf_s")
    } == {
        "stall_s": (2, "measured"),
        "background_s": (4, "measured"),
        "commit_s": (20, "measured"),
        "restart_s": (45, "measured"),
    }


def test_too_little_is_one_line_that_says_what_is_missing(
    holdfast: Command, run: RecordedRun
) -> None:
    run.start(0)
    run.save(100, 100)
    run.save(200, 200, timings={})
    result = holdfast("advise", run.store.url)
    assert (result.code, result.out) == (3, "")
    assert len(result.err.splitlines()) == 1
    assert (
        "too little to go by: 1 of 2 checkpoints records how long the save stopped training, "
        "2 are needed; save more, or give --stall"
    ) in result.err
    error = holdfast("advise", run.store.url, "--json").document["error"]
    assert error["kind"] == "NoCheckpoint"
    assert holdfast("advise", run.store.url, "--stall", "3s").code == 0


def test_a_root_before_its_first_commit_needs_the_stall(
    holdfast: Command, run: RecordedRun
) -> None:
    run.start(0)
    assert "0 of 0 checkpoints record how" in holdfast("advise", run.store.url).err
    result = holdfast("advise", run.store.url, "--stall", "3s")
    assert result.code == 0
    assert "1 start: 1 failed" in result.out
    assert 'every="auto" would save after 60 s first, to measure\n' in result.out


def test_damage_is_said(holdfast: Command, run: RecordedRun) -> None:
    run.start(0)
    for step in (100, 200, 300):
        folder = run.save(step, step).folder
    manifest = Path(run.store.url) / folder / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_bytes(b"{}")
    result = holdfast("advise", run.store.url)
    assert result.code == 0
    assert f"cannot be read, not counted: {folder}: " in result.out


def test_steps_left_behind_are_said(holdfast: Command, run: RecordedRun) -> None:
    run.start(0)
    first = run.save(100, 100)
    run.save(150, 150)
    run.start(300, point=first)
    out = holdfast("advise", run.store.url).out
    assert "50 committed steps left behind after failures" in out
    assert "2 starts: 2 failed" in out


def test_there_must_be_a_root(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("advise", tmp_path).code == 3
    assert holdfast("advise", tmp_path / "nowhere").code == 3
    assert holdfast("advise", f"{tmp_path}@latest").code == 2


def test_it_does_not_pay_for_torch(failing: Path) -> None:
    """Design, section 7."""
    done = in_a_process("advise", failing)
    assert (done.returncode, done.stderr.strip()) == (0, "imported")


@pytest.mark.parametrize(
    "options",
    [
        "--mtbf 6h --failures-per-day 4",
        "--mtbf 6",
        "--mtbf 100step",
        "--mtbf 0s",
        "--failures-per-day 0",
        "--failures-per-day -1",
        "--failures-per-day nan",
        "--failures-per-day inf",
        "--overhead-cap 5",
        "--overhead-cap 0%",
        "--overhead-cap 100%",
        "--overhead-cap some",
        "--stall 3",
        "--background=-1s",
        "--commit soon",
        "--restart 1ep",
    ],
)
def test_an_option_that_says_nothing_sensible_is_a_wrong_call(
    holdfast: Command, failing: Path, options: str
) -> None:
    result = holdfast("advise", failing, *shlex.split(options))
    assert (result.code, result.out) == (2, "")
    assert options.split()[0].split("=")[0] in result.err
