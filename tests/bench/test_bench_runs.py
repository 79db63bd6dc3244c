"""The benchmarks run and print every row. They assert no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAVES = ("holdfast", "torch", "safetensors", "dcp", "dcp-2", "dcp-async", "dcp-async-kept")
LOADS = (
    "holdfast",
    "holdfast-resume",
    "torch-bare",
    "torch",
    "torch-mmap",
    "safetensors-bare",
    "safetensors",
    "dcp",
)


def test_every_row_of_both_states_is_measured_and_printed(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    figures = tmp_path / "figures.json"
    tiny = [
        "--no-settle",
        "--rounds",
        "1",
        "--warmup",
        "0",
        "--size-gb",
        "0.008",
        "--small-tensors",
        "200",
    ]
    where = ["--folder", str(tmp_path), "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.local", *tiny, *where],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more of them spin on a busy machine
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = {
        (c["state"], c["action"], c["case"]) for c in json.loads(figures.read_text())["cases"]
    }
    rows = [("limits", "limits")] + [("save", s) for s in SAVES] + [("load", r) for r in LOADS]
    assert measured == {(state, *row) for state in ("gpt", "small") for row in rows}
    assert done.stdout.count("| dcp.save, thread_count=2 |") == 2
    assert done.stdout.count("| holdfast, every byte verified |") == 2
    assert "failed" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_every_loop_around_a_step_is_measured_and_printed(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.trainer", "--rounds", "2", "--steps", "20"),
            *("--folder", str(tmp_path), "--json", str(figures)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(figures.read_text())["step_s"]
    assert [len(step_s) for step_s in measured.values()] == [2, 2, 2, 2]
    assert all(second > 0 for step_s in measured.values() for second in step_s)
    assert all(f"| {loop} |" in done.stdout for loop in measured)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
