"""Saving works on macOS and reading on Windows; tried on Linux without what those lack."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from holdfast.manager import CheckpointManager

HERE = Path(__file__).resolve().parent
SRC = HERE.parent.parent / "src" / "holdfast"
WAIT_S = 120


def _life(root: Path, *words: str) -> dict[str, Any]:
    """One life of a training on macOS, which ends by SIGKILL."""
    script = [HERE / "macos_child.py", root, *words]
    child = warm.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    line = child.stdout.readline()
    child.kill()
    child.wait(WAIT_S)
    child.stdin.close()  # type: ignore[union-attr]
    child.stdout.close()
    said: dict[str, Any] = json.loads(line)
    return said


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="full sync"),
        pytest.param(("no-full-sync",), marks=pytest.mark.full, id="no full sync"),
    ],
)
def test_on_macos_a_killed_run_goes_on_at_once_and_a_process_reopens_its_root(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """R1, invariant 2: processes are known without /proc, and syncs go to the disk itself."""
    first, second = _life(tmp_path, *words), _life(tmp_path, *words)
    assert (first["resumed"], first["reopened"]) == (None, 1)
    assert (second["resumed"], second["reopened"]) == (1, 2)
    assert first["liveness"] == {
        "us": "ours",
        "parent": "dead",  # another process has that number
        "gone": "dead",
        "another boot": "unknown",
    }
    how = "plain" if words else "full"
    assert first["synced"] == [f"{how} file", f"{how} folder"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root with one checkpoint, and beside it the weights as a file."""
    from safetensors.torch import save_file

    model = torch.nn.Linear(4, 4)
    with CheckpointManager(tmp_path / "run", {"model": model}) as manager:
        manager.save(step=3).wait()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_on_windows_all_modules_import_and_checkpoints_are_read_and_nothing_is_saved(
    saved: Path,
) -> None:
    """Invariant 2: what cannot be made durable is refused before anything is written."""
    before = sorted(saved.rglob("*"))
    done = warm.run(
        [HERE / "windows_child.py", saved / "run", saved / "model.safetensors"], timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [item["step"] for item in said["ls"]["checkpoints"]] == [3]
    assert said["verify"]["ok"], said["verify"]
    weight = torch.tensor(said["weights"])
    assert weight.numpy().tobytes().hex() == said["file"]
    assert (said["step"], said["checkpoint"]) == (3, said["file"])
    assert len(said["refused"]) == 8
    assert all("save on Linux or macOS" in text for text in said["refused"])
    assert sorted(saved.rglob("*")) == before


def test_proc_is_named_in_one_module_alone() -> None:
    """So that a test can take it away."""
    named = [path.name for path in SRC.rglob("*.py") if '"/proc' in path.read_text("utf-8")]
    assert named == ["system.py"]
