"""The demo in examples/demo as a whole, with a tiny model: real processes, real kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples.demo.gpt import FAST, GPT, Plan, Windows

import holdfast

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "demo" / "demo.py"


def run_demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--out", out, "--fast", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.full
@pytest.mark.timeout(450)
def test_three_kills_leave_no_trace_in_the_result(tmp_path: Path) -> None:
    """R1, invariants 4 and 7: killed thrice, one time inside a save."""
    out = tmp_path / "out"
    done = run_demo(out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal, bit for bit, after 3 kills" in done.stdout
    assert done.stderr.count(": SIGKILL to all processes after step ") == 3
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name in ("undisturbed", "killed"):
        with holdfast.reading(f"{out}/{name}@final") as checkpoint:
            assert checkpoint.step == FAST.num_steps


def test_it_takes_only_a_new_folder(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert (done.returncode, "name a new folder" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_byte_is_predicted_from_those_before_it_only() -> None:
    torch.manual_seed(0)
    model = GPT(Plan(width=16, num_layers=2, context=12)).eval()
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_the_offset_of_a_window_is_drawn_from_torchs_generator() -> None:
    windows = Windows(16)
    torch.manual_seed(1)
    first = [windows[3] for _ in range(20)]
    torch.manual_seed(1)
    assert all(torch.equal(windows[3], one) for one in first)
    assert len({one.tolist()[0] for one in first}) > 1
    assert {len(one) for one in first} == {17}
