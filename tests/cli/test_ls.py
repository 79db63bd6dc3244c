"""Claims about `holdfast ls`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.roots import Result, cut_off, flip, folder_of, overwrite

from holdfast.format.manifest import Manifest, decode_register, encode_manifest
from runs import new_run

Command = Callable[..., Result]


def test_checkpoints_are_listed_newest_first(holdfast: Command, root: Path) -> None:
    result = holdfast("ls", root)
    assert result.code == 0
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "300", "200", "100"]
    assert folder_of(root, 300).name in lines[1]
    assert "loss 0.1, odd nan" in lines[1]
    assert lines[1].endswith("latest")
    assert lines[2].endswith("#paper")
    assert lines[3].endswith("pinned")


def test_json_has_what_the_text_says(holdfast: Command, root: Path) -> None:
    document = holdfast("ls", root, "--json").document
    assert document["holdfast"] == 1
    assert document["root"] == str(root)
    assert document["head"] == folder_of(root, 300).name
    assert document["best"] is None
    assert document["owner"]["state"] == "closed"
    newest, tagged, pinned = document["checkpoints"]
    assert [newest["step"], tagged["tags"], pinned["pinned"]] == [300, ["paper"], True]
    assert newest["metrics"] == {"loss": 0.1, "odd": "nan"}
    assert newest["timestamp"]["epoch"] == 1
    assert newest["reason"] == "interval"
    assert newest["in_lineage"] is True
    assert set(newest["components"]) == {"counters", "model", "optimizer", "rng", "scheduler"}


def test_what_the_run_left_behind_is_marked(holdfast: Command, root: Path) -> None:
    run = new_run()
    with run.manager(root) as manager:
        manager.resume("step=100")
        manager.save(150).wait()
    lines = holdfast("ls", root).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["150", "300", "200", "100"]
    assert "latest" in lines[1]
    assert ["left behind" in line for line in lines[1:]] == [False, True, True, False]
    parents = [entry["parent"] for entry in holdfast("ls", root, "--json").document["checkpoints"]]
    assert parents == [folder_of(root, 100).name, None, None, None]


def test_the_best_is_marked(holdfast: Command, tmp_path: Path) -> None:
    """By the run's rule; a tag of that name goes before it."""
    path = tmp_path / "run"
    with new_run().manager(path, keep="last:9,best:score:max") as manager:
        for step, score in ((1, 0.5), (2, 0.9), (3, 0.7)):
            manager.save(step, metrics={"score": score}, wait=True)
    marks = [line.split()[-1] for line in holdfast("ls", path).out.splitlines()[1:]]
    assert marks == ["latest", "best", "0.5"]
    assert holdfast("ls", path, "--json").document["best"] == folder_of(path, 2).name
    shown = holdfast("show", f"{path}@best", "--json").document["checkpoint"]
    assert shown["folder"] == folder_of(path, 2).name
    assert holdfast("tag", f"{path}@step=1", "best").code == 0
    assert holdfast("ls", path, "--json").document["best"] == folder_of(path, 1).name


def test_a_metric_that_is_added_later_is_listed_and_counts_for_best(
    holdfast: Command, root: Path
) -> None:
    added = holdfast("metric", f"{root}@step=200", "eval/acc=0.61", "top=5=1e-3", "--json")
    assert added.document["metrics"]["top=5"] == 0.001
    row = holdfast("ls", root).out.splitlines()[2]
    assert "eval/acc 0.61" in row
    assert holdfast("show", f"{root}@best:eval/acc", "--json").document["checkpoint"]["step"] == 200
    assert holdfast("metric", f"{root}@step=200", "eval/acc=0.7").code == 2
    assert holdfast("metric", f"{root}@step=200", "eval/acc=0.7", "--replace").code == 0
    for wrong in ("eval/acc", "=1", "acc=high"):
        assert holdfast("metric", f"{root}@step=200", wrong).code == 2


def test_many_metrics_make_no_wide_column(holdfast: Command, tmp_path: Path) -> None:
    """Those of the rules come first, then losses."""
    path = tmp_path / "run"
    metrics = {f"eval_{name}": 1.0 for name in ("bleu", "loss", "runtime", "samples_per_second")}
    with new_run().manager(path, keep="best:score:max") as manager:
        manager.save(1, metrics={"accuracy": 0.1, "score": 2.0, **metrics}, wait=True)
    assert "score 2, eval_loss 1, accuracy 0.1, 3 more  " in holdfast("ls", path).out
    (one,) = holdfast("ls", path, "--json").document["checkpoints"]
    assert len(one["metrics"]) == 6


def test_a_name_of_a_metric_stays_short_and_on_its_line(holdfast: Command, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with new_run().manager(path) as manager:
        manager.save(1, metrics={"x" * 5000: 1.0, "a\nb\x1b[2J": float("nan")}, wait=True)
    (line,) = holdfast("ls", path).out.splitlines()[1:]
    assert f"a\\x0ab\\x1b[2J nan, {'x' * 39}… 1  latest" in line


def test_a_live_owner_is_named(holdfast: Command, root: Path, saving: Callable[..., Any]) -> None:
    saving()
    result = holdfast("ls", root)
    assert result.code == 0
    assert f"process {os.getpid()} on" in result.out
    assert "(alive)" in result.out
    assert holdfast("ls", root, "--json").document["owner"]["state"] == "alive"


def test_a_damaged_manifest_is_told_beside_the_others(holdfast: Command, root: Path) -> None:
    """R15, R19."""
    damaged = folder_of(root, 300)
    flip(damaged / "manifest.json", 200)
    result = holdfast("ls", root)
    assert result.code == 1
    assert f"cannot be read: {damaged.name}: " in result.out
    document = holdfast("ls", root, "--json").document
    assert [entry["folder"] for entry in document["damaged"]] == [damaged.name]
    assert document["head"] == folder_of(root, 200).name


def test_attempts_that_did_not_commit_are_counted(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 300)
    cut_off(folder)
    result = holdfast("ls", root)
    assert result.code == 0
    assert "not committed: 1" in result.out
    assert holdfast("ls", root, "--json").document["unfinished"] == [folder.name]


def test_a_rejected_one_is_marked(holdfast: Command, root: Path) -> None:
    """R19."""
    flip(folder_of(root, 300) / "model-00000.safetensors", 5000)
    with new_run().manager(root, sinks=()) as manager:
        assert manager.resume() is not None
    rejected = holdfast("ls", root, "--json").document["checkpoints"][0]["rejected"]
    assert len(rejected) == 1
    assert "model-00000.safetensors" in rejected[0]
    assert "rejected" in holdfast("ls", root).out.splitlines()[1]


@pytest.mark.parametrize("command", ["ls", "gc", "verify", "show"])
def test_where_there_is_nothing_one_line_says_so(
    holdfast: Command, tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("mine")
    for name, message in (
        ("missing", "there is no such folder"),
        ("empty", "empty; there are no checkpoints here"),
        ("other", "not a root of Holdfast; it holds other files"),
        ("other/file.txt", "not a folder"),
    ):
        result = holdfast(command, tmp_path / name)
        assert (result.code, result.out) == (3, "")
        assert result.err == f"holdfast: {tmp_path / name}: {message}\n"
        assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_root_without_checkpoints_is_told_apart(
    holdfast: Command, root: Path, command: str
) -> None:
    for step in (100, 200, 300):
        shutil.rmtree(folder_of(root, step))
    (root / "latest").unlink()
    result = holdfast(command, root)
    assert result.code == 3
    assert "no checkpoint" in result.err
    assert len(result.err.splitlines()) == 1


def test_a_checkpoint_is_no_root(holdfast: Command, root: Path) -> None:
    for command in ("ls", "gc"):
        assert holdfast(command, f"{root}@latest").code == 2
        result = holdfast(command, folder_of(root, 300))
        assert result.code == 2
        assert "this command takes the root it is in" in result.err


def test_text_of_others_cannot_steer_the_terminal(holdfast: Command, root: Path) -> None:
    """What a manifest says was written by somebody else."""

    path = folder_of(root, 300) / "manifest.json"
    manifest = decode_register(path.read_bytes(), what="manifest")
    assert isinstance(manifest, Manifest)
    nasty = "\x1b[2J\x07[bold]"
    hostile = msgspec.structs.replace(manifest, tags=(nasty,), reason=nasty, metrics={nasty: 1.0})
    overwrite(path, encode_manifest(hostile))
    for command in ("ls", "show", "verify"):
        result = holdfast(command, root)
        assert result.code == 0
        assert "\x1b" not in result.out
        assert "\x07" not in result.out
    assert "\\x1b[2J\\x07[bold]" in holdfast("ls", root).out


def test_a_checkpoint_whose_files_are_missing_or_cut_is_marked(
    holdfast: Command, root: Path
) -> None:
    """Line 16 of the review: it looked whole."""
    assert holdfast("ls", root).code == 0
    lost, cut = folder_of(root, 200), folder_of(root, 100)
    (lost / "model-00000.safetensors").unlink()
    overwrite(cut / "model-00000.safetensors", b"short")
    result = holdfast("ls", root)
    assert result.code == 1
    whole, *damaged = result.out.splitlines()[1:4]
    assert "missing" not in whole
    for line in damaged:
        assert "1 files missing or cut: model-00000.safetensors" in line
    listed = holdfast("ls", root, "--json").document["checkpoints"]
    assert [one["missing"] for one in listed] == [[], *[["model-00000.safetensors"]] * 2]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_folder_that_is_a_link_is_named(
    holdfast: Command, root: Path, tmp_path: Path, command: str
) -> None:
    """Line 26 of the review."""
    folder = folder_of(root, 200)
    moved = tmp_path / "disk"
    folder.rename(moved)
    folder.symlink_to(moved)
    result = holdfast(command, root)
    assert result.code == 1
    assert folder.name in result.out
    assert "symbolic link" in result.out
