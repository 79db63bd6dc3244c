"""Claims about `holdfast advise`: the interval of `every="auto"`, and what it refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result
from tests.cli.test_app import in_a_process
from tests.maintenance.recorded import RecordedRun, three_failures

from holdfast.maintenance.recorded_costs import read_recorded_costs
from holdfast.policy.auto import Auto
from holdfast.policy.triggers import Every
from holdfast.store.local import LocalStore

Command = Callable[..., Result]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "saving.md"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty hours with three failures, and a stall of 2 s per save."""
    root = tmp_path_factory.mktemp("advise") / "run"
    three_failures(LocalStore(root))
    return root


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(LocalStore(tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "settings"),
    [("", {}), ("--mtbf 1h30m", {"mtbf": "90min"}), ("--overhead 0.001", {"overhead": 0.001})],
)
def test_it_is_the_interval_of_auto_for_what_was_recorded(
    holdfast: Command, failing: Path, options: str, settings: dict[str, Any]
) -> None:
    auto = Auto(**settings)
    auto.learn(read_recorded_costs(LocalStore(failing)).history)
    assert auto.plan is not None
    document = holdfast("advise", failing, "--json", *shlex.split(options)).document
    assert document["interval_s"] == auto.plan.interval_s
    assert document["limit"] == auto.plan.limit
    assert document["num_failures"] == auto.plan.num_failures
    assert Every(document["every"]) == Every(f"{round(auto.plan.interval_s)}s")
    result = holdfast("advise", failing, *shlex.split(options))
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        str(auto.plan),
        "saves measured: 200; starts: 1 closed, 3 failed",
        f'every="{document["every"]}"',
    ]


def test_the_example_of_the_page_is_what_the_command_says(holdfast: Command, failing: Path) -> None:
    example = re.search(
        r"```console\n\$ holdfast advise runs/gpt\n([^`]*)```", PAGE.read_text("utf-8")
    )
    assert example is not None
    assert holdfast("advise", failing).out == example[1]


def test_a_real_run_is_advised_and_not_touched(holdfast: Command, root: Path) -> None:
    """Invariant 11."""
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    result = holdfast("advise", root)
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
    assert result.code == 0
    assert "starts: 1 closed" in result.out


def test_without_a_measured_save_there_is_no_advice(holdfast: Command, run: RecordedRun) -> None:
    run.start(0)
    run.save(200, 200, timings={})
    result = holdfast("advise", run.store.url)
    assert (result.code, result.out) == (3, "")
    assert "no checkpoint records how long its save stopped training" in result.err
    error = holdfast("advise", run.store.url, "--json").document["error"]
    assert error["kind"] == "NoCheckpoint"


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


def test_there_must_be_a_root(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("advise", tmp_path).code == 3
    assert holdfast("advise", tmp_path / "nowhere").code == 3
    assert holdfast("advise", f"{tmp_path}@latest").code == 2


def test_it_does_not_pay_for_torch(failing: Path) -> None:
    """Design, section 7."""
    done = in_a_process("advise", failing)
    assert (done.returncode, done.stderr.strip()) == (0, "imported")


@pytest.mark.parametrize(
    "options", ["--mtbf 6", "--mtbf 100step", "--mtbf 0s", "--overhead 5", "--overhead 1%"]
)
def test_an_option_that_says_nothing_sensible_is_a_wrong_call(
    holdfast: Command, failing: Path, options: str
) -> None:
    result = holdfast("advise", failing, *shlex.split(options))
    assert (result.code, result.out) == (2, "")
    assert options.split()[0].removeprefix("--") in result.err
