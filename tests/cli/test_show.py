"""Claims about `holdfast show`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result, cut_off, flip, folder_of

from boxed import reshard
from holdfast.state.shards import Box

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("which", "step"),
    [
        ("", 300),
        ("@latest", 300),
        ("@step=200", 200),
        ("@paper", 200),
        ("@step-00000100", 100),
        ("@best:loss", 300),
        ("@best:loss:max", 100),
    ],
)
def test_a_checkpoint_is_found_by_what_people_call_it(
    holdfast: Command, root: Path, which: str, step: int
) -> None:
    document = holdfast("show", f"{root}{which}", "--json").document
    assert document["checkpoint"]["step"] == step
    assert document["checkpoint"]["folder"] == folder_of(root, step).name
    assert holdfast("show", f"{root}@{folder_of(root, step).name}").code == 0


def test_everything_that_the_manifest_says_is_shown(holdfast: Command, root: Path) -> None:
    result = holdfast("show", f"{root}@paper")
    assert result.code == 0
    for text in (
        folder_of(root, 200).name,
        "interval, permanent",
        "epoch 1",
        "loss 0.15, odd nan",
        "paper",
        "torch=",
        "python=",
        "capture_s",
        "optimizer-00000.safetensors",
    ):
        assert text in result.out
    assert "model.0.weight" not in result.out


def test_json_has_what_the_text_says(holdfast: Command, root: Path) -> None:
    document = holdfast("show", root, "--json").document
    checkpoint = document["checkpoint"]
    assert {"files", "numerics", "environment", "timings", "world_size"} <= set(checkpoint)
    assert checkpoint["components"]["model"]["files"][0] == "model-00000.json"
    assert checkpoint["files"]["index.json"]["digest"].startswith("blake3:")


def test_tensors_are_listed_when_asked_for(holdfast: Command, root: Path) -> None:
    result = holdfast("show", root, "--tensors")
    assert result.code == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("model.0.weight ")]
    assert line.split() == ["model.0.weight", "F32", "16×8", "512", "B", "model-00000.safetensors"]
    tensors = holdfast("show", root, "--tensors", "--json").document["tensors"]
    weight = next(t for t in tensors if (t["component"], t["key"]) == ("model", "0.weight"))
    assert weight["shape"] == [16, 8]
    assert weight["shards"][0]["file"] == "model-00000.safetensors"


def test_a_checkpoint_in_boxes_is_listed_shown_and_verified(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 300)
    boxes = [Box((0, 0), (16, 3)), Box((0, 3), (7, 5)), Box((7, 3), (9, 5))]
    reshard(folder, {"model": {"0.weight": boxes}}, num_writers=2)
    assert "300" in holdfast("ls", root).out
    result = holdfast("show", root, "--tensors")
    assert result.code == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("model.0.weight ")]
    assert line.split()[:5] == ["model.0.weight", "F32", "16×8", "512", "B"]
    files = "".join(line.split()[5:]).split(",")
    assert sorted(files) == ["model-00000.safetensors", "model-00001.safetensors"]
    tensors = holdfast("show", root, "--tensors", "--json").document["tensors"]
    weight = next(t for t in tensors if (t["component"], t["key"]) == ("model", "0.weight"))
    found = [(tuple(of["offsets"]), tuple(of["sizes"])) for of in weight["shards"]]
    assert found == [tuple(box) for box in boxes]
    assert holdfast("verify", root).code == 0
    flip(folder / "model-00001.safetensors", 4096)
    result = holdfast("verify", root)
    assert result.code == 1
    assert "model-00001.safetensors" in result.out
    assert "0.weight" in result.out


def test_a_damaged_index_is_an_error_only_for_tensors(holdfast: Command, root: Path) -> None:
    """R15."""
    flip(folder_of(root, 300) / "index.json", 100)
    assert holdfast("show", root).code == 0
    result = holdfast("show", root, "--tensors")
    assert result.code == 1
    assert "index.json: its bytes have changed" in result.err


def test_a_damaged_manifest_is_an_error(holdfast: Command, root: Path) -> None:
    """R19: where it was named, and where it may be the latest."""
    folder = folder_of(root, 300)
    flip(folder / "manifest.json", 100)
    for target in (f"{root}@{folder.name}", root, f"{root}@latest"):
        result = holdfast("show", target)
        assert result.code == 1
        assert "manifest.json" in result.err
    assert "step=200" in result.err
    assert holdfast("show", f"{root}@step=200", "--json").document["checkpoint"]["step"] == 200


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_wrong_name_lists_what_is_there(holdfast: Command, root: Path, command: str) -> None:
    result = holdfast(command, f"{root}@step=250")
    assert (result.code, result.out) == (3, "")
    assert "no checkpoint for 'step=250'" in result.err
    assert f"{folder_of(root, 200).name} (step 200)" in result.err
    document = holdfast(command, f"{root}@step=250", "--json").document
    assert document["holdfast"] == 1
    assert document["error"]["kind"] == "NoCheckpoint"


def test_a_copied_folder_is_shown_and_verified(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    """Invariant 10."""
    copy = shutil.copytree(folder_of(root, 200), tmp_path / "backup")
    document = holdfast("show", copy, "--json").document
    assert (document["checkpoint"]["folder"], document["checkpoint"]["step"]) == ("backup", 200)
    assert holdfast("show", copy, "--tensors").code == 0
    result = holdfast("verify", copy)
    assert result.code == 0
    assert "note: a copy of" in result.out


def test_a_folder_with_an_at_in_its_name_is_found(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(root, tmp_path / "run@step=100", symlinks=True)
    assert holdfast("show", other, "--json").document["checkpoint"]["step"] == 300
    assert holdfast("show", f"{other}@step=200", "--json").document["checkpoint"]["step"] == 200


@pytest.mark.parametrize("target", ["@", "@latest", "x@", ""])
def test_half_a_target_is_a_wrong_call(holdfast: Command, target: str) -> None:
    assert holdfast("show", target).code == 2
    assert holdfast("verify", target).code == 2


def test_an_uncommitted_folder_is_no_checkpoint(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 300)
    cut_off(folder)
    for command in ("show", "verify"):
        result = holdfast(command, f"{root}@{folder.name}")
        assert result.code == 3
        assert "not committed" in result.err
