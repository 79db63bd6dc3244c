"""The demo in examples/demo as a whole, with a tiny model: real processes, real kills."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
def test_three_kills_and_a_flipped_bit_leave_no_trace_in_the_result(tmp_path: Path) -> None:
    """R1, R15, R19, D14, D31, invariants 3, 4 and 7: killed thrice, one time inside a save."""
    done = run_demo(tmp_path / "out", "--seed", "11")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same run, bit for bit.\n" in done.stdout
    assert "Losses that differ, of 300 steps: 0\n" in done.stdout
    kills = re.findall(r"resumed at step (\d+), SIGKILL at (\d+)(, saving)?", done.stdout)
    assert len(kills) >= 3
    assert any(saving for *_, saving in kills)
    assert all(int(start) <= int(reached) for start, reached, _ in kills)
    (damaged,) = re.findall(r"Flipped: bit \d of byte \d+ of (\S+)/(\S+)\.\n", done.stdout)
    (rejected,) = re.findall(r"Rejected: (.*)\n", done.stdout)
    assert rejected.startswith(f"{damaged[0]}: ")
    assert damaged[1] in rejected
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name in ("undisturbed", "killed"):
        with holdfast.reading(f"{tmp_path}/out/{name}@final") as checkpoint:
            assert checkpoint.step == FAST.num_steps


def test_it_takes_only_a_new_folder(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert (done.returncode, "delete it, or name another folder" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.timeout(450)
def test_another_run_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import demo

    def train_otherwise(root: Path, arguments: list[str], usual: Any) -> list[Any]:
        process = demo.Process()
        demo.run_process(root, ["12", "--fast"], process, None)
        return [process]

    monkeypatch.setattr(demo, "train_with_kills", train_otherwise)
    given = ["demo.py", "--out", str(tmp_path / "out"), "--fast", "--seed", "11"]
    monkeypatch.setattr(sys, "argv", given)
    assert demo.main() == 1
    assert "THE RUNS DIFFER." in capsys.readouterr().out


def test_a_training_that_fails_is_reported_with_its_log(tmp_path: Path) -> None:
    from examples.demo import demo

    (tmp_path / "root").write_text("a file where the root should be")
    with pytest.raises(SystemExit, match="status 1: see "):
        demo.run_process(tmp_path / "root", ["1", "--fast"], demo.Process(), None)
    assert "Traceback" in (tmp_path / "root.log").read_text("utf-8")


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
