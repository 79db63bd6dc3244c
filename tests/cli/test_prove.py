"""Claims about `holdfast prove`, with real trainings that are really killed."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cli.roots import Result
from tests.cli.test_run import _signals_are_not_ignored as _signals_are_not_ignored

from holdfast.cli.output import Code
from holdfast.cli.proving.findings import RunDifference, What, compare_runs
from holdfast.cli.proving.runs import CheckpointRecord, RunResult, plan_kills
from holdfast.cli.supervisor import ChildProcess
from holdfast.errors import CorruptData, StoreError
from holdfast.manager import CheckpointManager
from runs import new_run

Command = Callable[..., Result]
PROVED = Path(__file__).with_name("proved.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = ("--", sys.executable, "-c")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where proofs without --folder make theirs."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def prove(holdfast: Command, fault: str, *options: object) -> Any:
    command = ("--", sys.executable, PROVED, "{root}", fault)
    return holdfast("prove", "--json", "--seed", 1, *options, *command)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_run_that_is_killed_inside_a_save_is_proved_equal(
    holdfast: Command, folders: Path
) -> None:
    """R1, invariant 7: the checkpoints of both runs are equal, deleted ones included."""
    result = prove(holdfast, "", "--kills", 1)
    assert result.code == Code.OK, result.out + result.err
    proof = result.document
    assert (proof["verdict"], proof["num_compared"], proof["last_step"]) == ("equal", 6, 60)
    (kill,) = proof["kills"]
    assert kill["saving"] in (kill["after_step"] + 10, None)
    assert proof["resumed_from"] == [kill["after_step"]]
    assert proof["ignored"] == ["samples_a_second"]
    assert proof["num_tensors"] > 10
    assert list(folders.iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "component", "cause"),
    [
        ("scheduler", Code.FOUND, "optimizer", "scheduler: "),
        ("data", Code.FOUND, "model", "data: "),
        ("prefetcher", Code.FOUND, "data", "data: "),
        ("average", Code.FOUND, "metrics", "metrics: "),
        ("teacher", Code.FOUND, "model", "outside of the state: "),
        ("unseeded", Code.DIFFERS_ANYWAY, "rng", "rng: "),
        ("unseeded of its own", Code.DIFFERS_ANYWAY, "model", "a generator that is not seeded"),
    ],
)
def test_a_fault_is_found_with_its_component(
    holdfast: Command, fault: str, code: Code, component: str, cause: str
) -> None:
    result = prove(holdfast, fault, "--kills", 2)
    assert result.code == code, result.out + result.err
    proof = result.document
    assert component in [one["component"] for one in proof["first"]]
    assert proof["causes"][0].startswith(cause)
    assert Path(proof["folder"], "undisturbed").is_dir()
    if code is Code.FOUND:
        assert proof["since_resume"] == proof["first_step"] - 10
    if fault in ("scheduler", "data", "prefetcher"):
        assert len(proof["warnings"]) == 1
    else:
        assert proof["since_resume"] is not None or proof["first_step"] == 10


@pytest.mark.timeout(200)
@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("never resumes", Code.COMMAND_FAILED, "Call resume()"),
        ("starts over", Code.GAVE_UP, "from step 0"),
        ("fails when resumed", Code.COMMAND_FAILED, "planted"),
        ("saves no weights", Code.GAVE_UP, "have no tensors"),
    ],
)
def test_a_run_that_does_not_resume_is_never_called_equal(
    holdfast: Command, fault: str, code: Code, reason: str
) -> None:
    result = prove(holdfast, fault, "--kills", 1)
    assert (result.code, reason in result.document["reason"]) == (code, True), result.out


@pytest.mark.timeout(200)
@pytest.mark.full
def test_a_second_claim_of_a_process_that_ignores_the_signal_is_no_resume(
    holdfast: Command,
) -> None:
    result = prove(holdfast, "ignores SIGTERM", "--kills", 1, "--signal", "TERM")
    assert (result.code, "did not end" in result.document["reason"]) == (Code.GAVE_UP, True)


@pytest.mark.timeout(400)
@pytest.mark.full
def test_ranks_of_torchrun_are_killed_together_or_one_alone(
    holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: torchrun starts a session for each rank, which its own group does not hold."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    restarting = (sys.executable, *launcher, "--max-restarts", 3)
    training = (EXAMPLES / "trainer_ranks.py", "{root}", "ddp")
    options = ("--json", "--seed", 6, "--kills", 3)
    result = holdfast("prove", *options, "--", *restarting, *training)
    assert result.code == Code.OK, result.out + result.err
    targets = {kill["target"] for kill in result.document["kills"]}
    assert targets <= {"all processes", "rank 0 of 2", "rank 1 of 2"}
    assert len(result.document["kills"]) == 3


@pytest.mark.parametrize(
    ("program", "options", "code", "reason"),
    [
        ("raise SystemExit('planted')", (), Code.COMMAND_FAILED, "planted"),
        ("pass", (), Code.GAVE_UP, "committed no checkpoint"),
        ("import time; time.sleep(60)", ("--timeout", "1s"), Code.GAVE_UP, "within 1s"),
    ],
)
def test_a_command_that_proves_nothing_is_reported_with_what_to_do(
    holdfast: Command, program: str, options: tuple[object, ...], code: Code, reason: str
) -> None:
    result = holdfast("prove", "--json", *options, *QUICK, program, "{root}")
    assert (result.code, reason in result.document["reason"]) == (code, True), result.out
    assert Path(result.document["folder"], "undisturbed.log").exists()


def test_a_command_without_a_root_of_its_own_is_refused(holdfast: Command) -> None:
    result = holdfast("prove", "--", "python", "train.py")
    assert result.code == Code.USAGE
    assert "holdfast prove -- python train.py {root}" in result.err
    assert holdfast("prove").code == Code.USAGE


def test_its_folder_must_be_new_and_the_program_must_exist(
    holdfast: Command, tmp_path: Path
) -> None:
    assert holdfast("prove", "--folder", tmp_path, "--", "x", "{root}").code == Code.USAGE
    missing = holdfast("prove", "--", tmp_path / "no-such-program", "{root}")
    assert (missing.code, "No such file" in missing.err) == (Code.USAGE, True)


class _FullDisk:
    """Watcher that fails as where a file cannot be kept."""

    poll_s = 0.01
    leader = 0

    def look_around(self, leader: int) -> None:
        self.leader = leader
        raise StoreError("full")


def test_a_fault_of_the_watcher_leaves_no_process() -> None:
    watcher = _FullDisk()
    with ChildProcess(["sleep", "60"], grace_s=1) as child, pytest.raises(StoreError):
        child.run_to_end(watcher=watcher)
    with pytest.raises(ProcessLookupError):
        os.kill(watcher.leader, 0)


def test_checkpoints_are_copied_where_no_links_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(2, 1)}) as manager:
        manager.save(1, wait=True)
    monkeypatch.setattr(os, "link", refuse)
    record = CheckpointRecord(tmp_path / "run", tmp_path / "kept")
    record.look_again()
    (save,) = record.committed()
    assert {file.name for file in (tmp_path / "kept" / save.folder).iterdir()} == {
        file.name for file in (tmp_path / "run" / save.folder).iterdir()
    }


@pytest.mark.parametrize(("what", "is_timing"), [("metrics", True), ("values", False)])
def test_no_name_exempts_a_value_of_the_state(what: What, is_timing: bool) -> None:
    found = RunDifference(component="c", what=what, path="warmup_seconds", a="1", b="2")
    assert found.is_timing == is_timing


@pytest.mark.parametrize("num_kills", [1, 3, 20])
def test_kills_are_between_the_first_and_the_last_save_and_one_is_inside_a_save(
    num_kills: int,
) -> None:
    for seed in range(50):
        plan = plan_kills([10, 20, 30, 40], num_kills, random.Random(seed))
        steps = [kill.step for kill in plan]
        assert (len(plan), steps) == (num_kills, sorted(steps))
        assert {*steps} <= {10, 20, 30}
        assert sum(kill.inside_save for kill in plan) == 1
        assert [plan_kills([10, 20], 1, random.Random(seed))[0].step] == [10]


def test_a_checkpoint_that_cannot_be_read_is_not_left_out_of_the_comparison(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        with new_run().manager(tmp_path / name / "run") as manager:
            for step in (1, 2):
                manager.save(step, wait=True)
        record: Any = SimpleNamespace(roots=[Path("run")])
        places = {"folder": tmp_path, "kept": tmp_path / name, "log": tmp_path}
        runs.append(RunResult(name=name, record=record, **places))
    assert len(compare_runs(*runs)) == 2
    [manifest] = (tmp_path / "b" / "run").glob("step-00000001*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(CorruptData, match="step-00000001"):
        compare_runs(*runs)
