"""Claims about `holdfast verify`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.cli.roots import Result, cut_off, flip, folder_of, overwrite

Command = Callable[..., Result]
MODEL = "model-00000.safetensors"


def test_a_sound_root_is_said_to_be_sound(holdfast: Command, root: Path) -> None:
    """R18."""
    result = holdfast("verify", root)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["ok", "step", "300"],
        ["ok", "step", "200"],
        ["ok", "step", "100"],
    ]
    assert lines[3].startswith("3 verified, ")
    assert lines[3].endswith("every byte is intact")


def test_damage_is_named_with_file_block_and_tensors(holdfast: Command, root: Path) -> None:
    """R15, R18."""
    flip(folder_of(root, 200) / MODEL, 5000)
    result = holdfast("verify", root)
    assert result.code == 1
    assert f"DAMAGED     step 200  {folder_of(root, 200).name}" in result.out
    assert f"  {MODEL} block 0 (byte 0): other bytes than written: expected " in result.out
    assert "tensors: 1.num_batches_tracked, 0.weight" in result.out
    assert result.out.splitlines()[-1].endswith("1 bad")


def test_json_has_what_the_text_says(holdfast: Command, root: Path) -> None:
    flip(folder_of(root, 200) / MODEL, 5000)
    (folder_of(root, 300) / MODEL).unlink()
    result = holdfast("verify", root, "--json")
    assert result.code == 1
    document = result.document
    assert document["ok"] is False
    newest, damaged, sound = document["checkpoints"]
    assert newest["problems"][0]["message"] == "is missing"
    assert newest["problems"][0]["block"] is None
    problem = damaged["problems"][0]
    assert (problem["file"], problem["block"], problem["start"]) == (MODEL, 0, 0)
    assert "0.weight" in problem["tensors"]
    assert problem["expected"] != problem["found"]
    assert (sound["ok"], sound["step"], sound["problems"]) == (True, 100, [])


def test_one_checkpoint_can_be_verified_alone(holdfast: Command, root: Path) -> None:
    flip(folder_of(root, 300) / MODEL, 5000)
    result = holdfast("verify", f"{root}@paper")
    assert result.code == 0
    assert result.out.count("step") == 2
    assert holdfast("verify", f"{root}@latest").code == 1


def test_a_damaged_manifest_is_reported_by_name_and_in_the_root(
    holdfast: Command, root: Path
) -> None:
    """R15."""
    folder = folder_of(root, 300)
    flip(folder / "manifest.json", 100)
    for target in (root, f"{root}@{folder.name}", folder):
        result = holdfast("verify", target)
        assert result.code == 1
        assert f"UNREADABLE  {folder.name}" in result.out
        assert "manifest.json: " in result.out


def test_a_newer_format_is_told_from_damage(holdfast: Command, root: Path) -> None:
    """R21."""
    path = folder_of(root, 300) / "manifest.json"
    body = path.read_bytes()
    body = body[: body.rindex(b'"digest"')].replace(b'"holdfast": 1', b'"holdfast": 2', 1)
    seal = f'"digest": "blake3:{blake3(body).hexdigest()}"}}\n'.encode()
    overwrite(path, body + seal)
    for command in ("verify", "ls"):
        result = holdfast(command, root)
        assert result.code == 1
        assert "has version 2, but this Holdfast reads 1; upgrade Holdfast" in result.out
    assert "0 bad, 1 could not be read" in holdfast("verify", root).out
    result = holdfast("show", f"{root}@{folder_of(root, 300).name}")
    assert result.code == 1
    assert "has version 2" in result.err


@pytest.mark.parametrize("which", ["step=abc", "step=", "step=-1", "step=1.5"])
def test_a_step_that_is_no_number_is_wrong_usage(holdfast: Command, root: Path, which: str) -> None:
    result = holdfast("verify", f"{root}@{which}")
    assert result.code == 2
    assert "a step is a whole number" in result.err


def test_a_damaged_claim_is_reported(holdfast: Command, root: Path) -> None:
    """R15."""
    flip(root / "writers" / "00000001.json", 100)
    result = holdfast("verify", root)
    assert result.code == 1
    assert "UNREADABLE  writers/00000001.json: " in result.out
    assert result.out.count("ok  ") == 3


def test_verifying_beside_a_live_owner_is_fine(
    holdfast: Command, root: Path, saving: Callable[..., Any]
) -> None:
    """Invariant 11."""
    manager = saving()
    assert holdfast("verify", root).code == 0
    manager.save(400).wait()
    assert holdfast("verify", f"{root}@step=400").code == 0


def test_a_file_that_may_not_be_read_is_reported_not_raised(
    holdfast: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: permissions do not bind the superuser, so the system call is made to say no."""
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if os.fspath(path) == MODEL:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    result = holdfast("verify", f"{root}@latest")
    assert result.code == 1
    assert "Permission denied (EACCES)" in result.out


def test_a_root_that_may_not_be_read_is_one_clear_line(
    holdfast: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if os.fspath(path) == str(root):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    for command in ("ls", "show", "verify", "gc"):
        result = holdfast(command, root)
        assert result.code == 1
        assert result.err.startswith("holdfast: ")
        assert "Permission denied (EACCES)" in result.err
        assert len(result.err.splitlines()) == 1


def test_a_lost_manifest_is_damage(holdfast: Command, root: Path) -> None:
    """Records tell that it was committed; `ls` names it, and `gc` leaves the rest alone."""
    folder = folder_of(root, 300)
    (folder / "manifest.json").unlink()
    for target in (root, f"{root}@{folder.name}"):
        result = holdfast("verify", target)
        assert result.code == 1
        assert f"UNREADABLE  {folder.name}" in result.out
        assert "manifest.json is missing, though it was committed" in result.out
    assert holdfast("verify", root, "--json").document["ok"] is False
    listed = holdfast("ls", root, "--json")
    assert listed.code == 1
    assert [item["folder"] for item in listed.document["damaged"]] == [folder.name]
    assert listed.document["unfinished"] == []
    collected = holdfast("gc", root)
    assert collected.code == 1
    assert f"FAILED {folder.name}" in collected.out
    assert (folder / "index.json").exists()


def test_attempts_under_way_are_noted(holdfast: Command, root: Path) -> None:
    cut_off(folder_of(root, 300))
    result = holdfast("verify", root)
    assert result.code == 0
    assert f"note: {folder_of(root, 300).name}: not committed" in result.out
