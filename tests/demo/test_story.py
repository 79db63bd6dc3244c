"""The demo as a whole, with a tiny model: real processes, real kills."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

import holdfast
from holdfast.demo import story
from holdfast.demo.record import Kill, RunRecord, fast_plan
from holdfast.demo.story import Worker, WorkerFailed
from holdfast.demo.worker import make_state
from holdfast.errors import FormatError, NoCheckpoint, UsageError


@dataclass(frozen=True, slots=True)
class Told:
    """A whole demo: its exit code, its folder, what it printed."""

    code: int
    out: Path
    printed: str


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    out = tmp_path_factory.mktemp("demo") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = story.run(out, seed=11, fast=True, as_json=True)
    return Told(code, out, printed.getvalue())


@pytest.mark.full
def test_three_kills_and_a_flipped_bit_leave_no_trace_in_the_result(told: Told) -> None:
    """R1, R19, D14, D31, invariants 3, 4 and 7: killed thrice, one time inside a save."""
    record = json.loads((told.out / "demo.json").read_text("utf-8"))
    assert told.code == 0
    assert record["identical"] is True
    assert len(set(record["digests"].values())) == 1
    lives = record["killed"]["lives"]
    *killed, last = lives
    assert len(killed) >= 3
    assert all(life["was_killed"] for life in killed)
    assert not last["was_killed"]
    in_save = [life for life in killed if life["killed_in_save"] is not None]
    assert in_save
    assert all(
        life["killed_in_save"] not in [step for _, step in life["saves"]] for life in in_save
    )
    assert all(after["began_at"] <= before["reached"] for before, after in pairwise(lives))


@pytest.mark.full
def test_the_flipped_checkpoint_was_passed_over_by_name(told: Told) -> None:
    """R15, R19: the reason names the file, and the one before is taken."""
    last = json.loads((told.out / "demo.json").read_text("utf-8"))["killed"]["lives"][-1]
    folder, file = last["flipped"].split(" of ")[-1].split("/")
    assert [name for name, _ in last["rejected"]] == [folder]
    assert file in last["rejected"][0][1]
    assert last["began_at"] > 0


@pytest.mark.full
def test_the_picture_and_the_roots_are_left_to_look_at(told: Told) -> None:
    out = told.out
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name in ("undisturbed", "killed"):
        state = make_state(fast_plan(11))
        with holdfast.CheckpointManager(out / name, state) as manager:
            assert manager.load("final").step == fast_plan(11).num_steps


def test_a_demo_takes_only_a_new_or_empty_folder(tmp_path: Path) -> None:
    story.prepare(tmp_path / "new" / "out")
    story.prepare(tmp_path / "new" / "out")
    (tmp_path / "new" / "out" / "demo.json").touch()
    with pytest.raises(UsageError, match="exists"):
        story.prepare(tmp_path / "new" / "out")
    assert (tmp_path / "new" / "out" / "demo.json").exists()


@pytest.mark.full
def test_json_goes_to_standard_output_alone(told: Told) -> None:
    recorded = json.loads((told.out / "demo.json").read_text("utf-8"))
    assert json.loads(told.printed) == recorded


@pytest.mark.full
def test_a_flip_changes_one_bit_and_is_refused_by_name(told: Told, tmp_path: Path) -> None:
    """R15: explicitly named, the damaged one raises."""
    root = tmp_path / "root"
    state = make_state(fast_plan(1))
    with holdfast.CheckpointManager(root, state) as manager:
        saved = manager.save(0).wait()
    before = {path: path.read_bytes() for path in root.rglob("*.safetensors")}
    story.flip_one_bit(root, random.Random(0))
    changed = [path for path, data in before.items() if path.read_bytes() != data]
    assert len(changed) == 1
    pairs = zip(before[changed[0]], changed[0].read_bytes(), strict=True)
    assert sum((a ^ b).bit_count() for a, b in pairs) == 1
    with (
        holdfast.CheckpointManager(root, state) as manager,
        pytest.raises(FormatError, match=changed[0].name),
    ):
        manager.load(saved.folder)


def test_there_must_be_something_to_damage(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint):
        story.flip_one_bit(tmp_path, random.Random(0))


def test_a_worker_that_fails_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file where the root should be")
    log = tmp_path / "worker.log"
    with (
        Worker(tmp_path / "root", fast_plan(1), num_workers=0, log=log) as worker,
        pytest.raises(WorkerFailed, match="exit code 1"),
    ):
        worker.next_line(timeout_s=60.0)
    assert "Traceback" in log.read_text("utf-8")


def test_a_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    """The group of the worker holds its data workers too."""
    log = tmp_path / "worker.log"
    with Worker(tmp_path / "root", fast_plan(1), num_workers=2, log=log) as worker:
        while (line := worker.next_line(timeout_s=60.0)) is not None and line["kind"] != "step":
            pass
        leader = psutil.Process(worker.group)
        processes = [leader, *leader.children(recursive=True)]
        assert len(processes) >= 3
        worker.kill()
    deadline = time.monotonic() + 120.0
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "a process of the worker is still alive"


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that is dead and not yet collected by its new parent does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
def test_a_plan_whose_kill_never_comes_is_refused(tmp_path: Path) -> None:
    plan = fast_plan(1)
    kill = Kill(after_step=10**6, inside_save=False, moment=0.0, flip_bit=False)
    run = RunRecord(name="killed")
    with pytest.raises(UsageError, match="ended before its kill"):
        story.live(run, tmp_path / "root", plan, kill=kill)
