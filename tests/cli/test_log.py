"""Claims about `holdfast log`: each session of a run, and what it changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.roots import Result, flip, folder_of

from holdfast import CheckpointManager, Last, Tiered
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from runs import new_run, retracted

Command = Callable[..., Result]


def session(root: Path, *steps: int, which: str = "latest", **options: Any) -> None:
    with new_run().manager(root, **options) as manager:
        manager.resume(which)
        for step in steps:
            manager.save(step, reason="interval", wait=True)


def sessions(holdfast: Command, root: Path, *members: str) -> list[tuple[Any, ...]]:
    found = holdfast("log", root, "--json").document["sessions"]
    return [tuple(one[member] for member in members) for one in found]


def test_each_life_is_listed_with_its_steps_its_place_and_its_end(
    holdfast: Command, tmp_path: Path
) -> None:
    session(tmp_path, 1, 2)
    session(tmp_path, 3)
    session(tmp_path, 4, which="step=2")
    members = ("epoch", "from_step", "to_step", "num_checkpoints", "rollback", "ending", "reason")
    assert sessions(holdfast, tmp_path, *members) == [
        (1, 0, 2, 2, False, "closed", "interval"),
        (2, 2, 3, 1, False, "closed", "interval"),
        (3, 2, 4, 1, True, "closed", "interval"),
    ]
    (first, second, _) = sessions(holdfast, tmp_path, "pid", "host", "resumed_from")
    assert first == (os.getpid(), os.uname().nodename, None)
    assert second[2] == folder_of(tmp_path, 2).name
    lines = holdfast("log", tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["session", "1", "2", "3"]
    columns = [re.split(r" {2,}", line.strip())[3:] for line in lines[1:]]
    assert columns == [
        ["resumed from", "last save", "kept", "ending"],
        ["the beginning", "2", "2", "closed"],
        ["step 2", "3", "1", "closed"],
        ["step 2 (rollback)", "4", "1", "closed"],
    ]


def test_what_a_life_has_changed_is_known_after_its_checkpoints_are_deleted(
    holdfast: Command, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"batch_size": 2, "lr": 0.1, "name": "a"}
    session(tmp_path, 1, config=given)
    session(tmp_path, 2, config={**given, "batch_size": 4, "layers": [1, 2]})
    session(tmp_path, 3, config=given)
    session(tmp_path, 4, config=given, keep=Last(1))
    members = ("from_step", "to_step", "num_checkpoints", "changes")
    assert sessions(holdfast, tmp_path, *members) == [
        (0, 1, 0, []),
        (1, 2, 0, ["batch_size: 2 → 4", "layers: none → [1, 2]"]),
        (2, 3, 0, ["batch_size: 4 → 2", "layers: [1, 2] → none"]),
        (3, 4, 1, []),
    ]
    assert "session 2 changed batch_size: 2 → 4" in holdfast("log", tmp_path).out
    shown = holdfast("show", tmp_path, "--json").document["checkpoint"]
    assert shown["config"]["batch_size"] == "2"
    assert [change["epoch"] for change in shown["changes"]] == [2, 3]


@pytest.mark.full
def test_a_process_that_was_killed_is_told_from_one_that_ended(
    holdfast: Command, tmp_path: Path
) -> None:
    script = (
        "import os, sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from runs import new_run\n"
        "manager = new_run().manager(sys.argv[1])\n"
        "manager.save(1, wait=True)\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=120)
    assert sessions(holdfast, tmp_path, "ending", "to_step") == [("failed", 1)]
    with new_run().manager(tmp_path) as manager:
        manager.resume()
        assert sessions(holdfast, tmp_path, "ending", "to_step") == [
            ("failed", 1),
            ("running", None),
        ]
        killed, running = holdfast("log", tmp_path).out.splitlines()[2:]
        assert re.split(r" {2,}", killed)[-3:] == ["1", "1", "crashed or killed"]
        assert re.split(r" {2,}", running)[-4:] == ["step 1", "–", "0", "running"]


def test_a_lost_claim_and_a_damaged_manifest_are_named(holdfast: Command, tmp_path: Path) -> None:
    session(tmp_path, 1)
    session(tmp_path, 2)
    (tmp_path / "writers" / "00000001.json").unlink()
    assert sessions(holdfast, tmp_path, "epoch", "began", "to_step")[0] == (1, None, 1)
    flip(folder_of(tmp_path, 1) / "manifest.json", 100)
    result = holdfast("log", tmp_path)
    assert result.code == 0
    assert "claim lost" in result.out
    assert "cannot be read: step-00000001" in result.out


@pytest.mark.parametrize("exists", [True, False])
def test_a_place_without_a_run_is_nothing(holdfast: Command, tmp_path: Path, exists: bool) -> None:
    result = holdfast("log", tmp_path if exists else tmp_path / "no")
    assert result.code == 3


def test_each_save_is_listed_with_its_reason_and_what_became_of_it(
    holdfast: Command, tmp_path: Path
) -> None:
    session(tmp_path, 1, 2, 3)
    session(tmp_path, 4, which="step=2")
    leave = ("--yes", "--reason", "diverged", "--even-latest")
    assert holdfast("rm", f"{tmp_path}@step=4", *leave).code == 0
    saves = [save for one in sessions(holdfast, tmp_path, "saves") for save in one[0]]
    assert [(save["step"], save["reason"], save["state"]) for save in saves] == [
        (1, "interval", "kept"),
        (2, "interval", "kept"),
        (3, "interval", "left behind"),
        (4, "interval", "deleted"),
    ]
    assert "diverged" in saves[-1]["why"]
    assert saves[-1]["deleted"] >= saves[-1]["created"]
    text = holdfast("log", tmp_path, "--saves").out
    assert "left behind" in text
    assert "permanent" in text


def test_a_deletion_of_which_a_record_is_left_is_explained(holdfast: Command) -> None:
    """A tombstone stays where a put may still arrive."""
    root = "memory://log-of-deletions"
    with new_run().manager(root, preflight=False) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    store = open_store(root)
    assert retracted(store, str(Catalog(store).attempts()[1]))
    (save, _) = holdfast("log", root, "--json").document["sessions"][0]["saves"]
    assert (save["step"], save["state"], save["why"]) == (1, "deleted", "test (writer 1)")


def test_what_each_save_took_is_told(holdfast: Command, tmp_path: Path) -> None:
    state = {"frozen": {"w": torch.ones(400_000)}, "live": {"w": torch.ones(10)}}
    with CheckpointManager(tmp_path, state, preflight=False, sinks=()) as manager:
        for step in range(1, 5):
            state["live"]["w"] += 1
            manager.save(step, wait=True)
    (session,) = holdfast("log", tmp_path, "--saves", "--json").document["sessions"]
    costs = [save["cost"] for save in session["saves"]]
    for cost in costs:
        assert cost["stall_s"] > 0
        assert cost["durable_s"] == cost["stall_s"] + cost["write_s"]
        assert cost["new_nbytes"] + cost["linked_nbytes"] == cost["nbytes"]
        assert (cost["upload"], cost["upload_s"]) == (None, None)
    is_linked = [cost["linked_nbytes"] > 1_600_000 for cost in costs]
    assert is_linked == [False, False, True, True]
    assert costs[2]["new_nbytes"] < 100_000
    (session,) = holdfast("log", tmp_path, "--json").document["sessions"]
    assert {save["cost"]["linked_nbytes"] for save in session["saves"]} == {None}


def test_how_long_after_the_commit_an_upload_ended_is_told(
    holdfast: Command, tmp_path: Path
) -> None:
    root = Tiered(tmp_path / "local", tmp_path / "remote")
    with CheckpointManager(root, {"m": {"w": torch.ones(3)}}, preflight=False) as manager:
        manager.save(1, wait=True)
    (session,) = holdfast("log", tmp_path / "local", "--saves", "--json").document["sessions"]
    cost = session["saves"][0]["cost"]
    assert cost["upload"] == "uploaded"
    assert 0 <= cost["upload_s"] < 60
    (session,) = holdfast("log", tmp_path / "remote", "--json").document["sessions"]
    assert session["saves"][0]["cost"]["upload"] is None
