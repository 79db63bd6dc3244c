"""The examples run as a user runs them, and say in the end what they set out to show."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))

SAYS = {
    "accumulate_mixed.py": [
        "undisturbed: ended with status 0",
        "killed: ended with status -9",
        "killed: ended with status 0",
        "weights and averaged weights are the same bits",
    ],
    "dcp.py": [
        "2 ranks: trained to step 20",
        "3 ranks: trained to step 40",
        "what two ranks saved, three have loaded, bit for bit: True",
        "and one process loads what three have saved: True",
    ],
    "fine_tune.py": [
        r"small, on code: \d\.\d\d",
        r"large, on documentation: \d\.\d\d, and \d\.\d\d from nothing",
        "what the small model knew helps the large one",
    ],
    "fsdp2.py": [
        "killed after a checkpoint was committed",
        "the same weights, bit for bit: True",
    ],
    "gan.py": [
        "killed: ended with status -9",
        "started again: ended with status 0",
        "the same bits: True",
    ],
    "trainer_ranks.py": [
        "killed after a checkpoint was committed",
        "the same weights, bit for bit: True",
    ],
    "plain_loop.py": [
        "undisturbed: begins at step 0",
        "interrupted: begins at step 0",
        "interrupted: begins at step 200",
        "both runs end with the same bits",
    ],
    "preemption.py": [
        "undisturbed: nothing was sent, the status is 0",
        "preempted: begins at step 0",
        "preempted: SIGTERM was sent, the status is 75",
        r"preempted: begins at step 1\d\d",
        "preempted: SIGUSR1 was sent, the status is 75",
        r"preempted: begins at step [234]\d\d",
        "preempted: nothing was sent, the status is 0",
        "the job that was preempted twice ends with the same bits",
    ],
    "several_savers.py": [
        r"step 400: by main and weights, \d+ kB",
        r"step 360: by weights, \d+ kB",
        r"step 300: by main, \d+ kB",
        r"the average of the newest four has a loss of \d\.\d\d",
        "weights of many steps are left, and the whole state of two",
    ],
    "trainer_best.py": [
        "goal reached at step 600",
        r"12 validations, the best at step \d+: \d\.\d{3}",
        "the best checkpoint is still there, and gives the same loss again",
    ],
}
"""What each prints, among other lines, in this order."""


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_it_runs_from_anywhere_and_says_what_it_shows(name: str, tmp_path: Path) -> None:
    """Invariant 7, R1: those that are killed or preempted compare the bits themselves."""
    folder, temporary = tmp_path / "here", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", FOLDER / name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = iter(done.stdout.splitlines())
    missing = [
        wanted
        for wanted in SAYS[name]
        if not any(re.fullmatch(wanted, line) is not None for line in lines)
    ]
    assert missing == [], done.stdout
    assert list(folder.iterdir()) == []
    # torch has folders of its own there.
    assert [path.name for path in temporary.iterdir() if path.name.startswith("tmp")] == []


def test_every_example_is_listed() -> None:
    index = (FOLDER / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[([\w/]+\.\w+)\]\(\1\) \|", index, re.MULTILINE)
    files = [path for path in FOLDER.rglob("*.*") if path.is_file() and path.suffix != ".pyc"]
    names = {str(path.relative_to(FOLDER)) for path in files}
    assert sorted(listed) == sorted(names - {"README.md"})
    assert sorted(SAYS) == FILES
    links = re.findall(r"\]\(([^)]+)\)", index)
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("name", FILES)
def test_it_says_how_to_run_it_and_is_short(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    assert f"\n    python examples/{name}\n" in text
    assert len(text.splitlines()) <= 110


@pytest.mark.parametrize("name", FILES)
def test_it_needs_nothing_that_holdfast_does_not(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text("utf-8"))
    names = [
        *(a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names),
        *(str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)),
    ]
    known = {*sys.stdlib_module_names, "torch", "holdfast"}
    assert {name.split(".")[0] for name in names} <= known
