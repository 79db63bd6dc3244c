"""The tutorial: its scripts run, the kill is one, and each command prints what the page shows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "tutorial.md").read_text("utf-8")
LAST_BEFORE_THE_KILL = "step 600: "
RUN = "from holdfast.cli import main; main()"


def script(title: str) -> str:
    """A script of the page, whose steps take less time than there."""
    (code,) = re.findall(rf'```python title="{re.escape(title)}"\n(.*?)```', PAGE, re.DOTALL)
    return str(code).replace("time.sleep(0.01)", "time.sleep(0.001)")


def shown() -> Iterator[tuple[list[str], str]]:
    """The words and the output of each command on the page."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for typed, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            yield typed.split(), output


def comparable(output: str) -> list[str]:
    """An output without what differs from machine to machine, or from kill to kill."""
    for pattern, mask in (
        (r"(step-\d{8})\.\d{4}-\d{6}-[0-9a-f]{8}", r"\1"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "TIME"),
        (r"[\d.]+ KiB", "KiB"),
        (r"\S+:\d+(?= +(?:the beginning|step ))", "HOST:PID"),
        (r"/\S+/runs/", "/runs/"),
        (r"loss [\d.e-]+", "LOSS"),
        (r"(the beginning|step \d+) +(\d+|–) +\d+  ", "STEPS "),
        (r" +", " "),
    ):
        output = re.sub(pattern, mask, output, flags=re.MULTILINE)
    return [line.rstrip() for line in output.splitlines() if line.strip()]


def steps_in(output: str) -> dict[str, float]:
    """The losses that a training has printed, by step."""
    return {
        step: float(loss) for step, loss in re.findall(r"^step (\d+): loss (.*)$", output, re.M)
    }


def killed(folder: Path) -> str:
    """Start the training, kill it once it has printed the last line of the page."""
    with warm.Popen(["train.py", "runs/sum"], cwd=folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith(LAST_BEFORE_THE_KILL):
            lines.append(process.stdout.readline())
            assert lines[-1], "the training has ended"
        process.kill()
    return "".join(lines)


@pytest.mark.full
def test_every_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    """R1: the resumed run is, loss by loss, the one that was not killed."""
    (tmp_path / "train.py").write_text(script("train.py"))
    (_, first), (again, second), (third, nothing), (other, undisturbed), *commands = shown()
    found = killed(tmp_path)
    (tmp_path / "train.py").write_text(script("train.py").replace("time.sleep(0.001)", "pass"))
    assert comparable(found + "Killed\n")[0] == comparable(first)[0]
    assert steps_in(found).keys() == steps_in(first).keys()
    assert again == third == ["python", "train.py", "runs/sum"]
    resumed = ran(["train.py", "runs/sum"], tmp_path)
    assert resumed.startswith("begins at step ")
    assert resumed.splitlines()[-5:-4] == found.splitlines()[-1:]
    assert [*steps_in(resumed)][-5:] == [*steps_in(second)]
    assert ran(["train.py", "runs/sum"], tmp_path) == nothing
    assert ran(other[1:], tmp_path).startswith(undisturbed.removesuffix("…\n"))
    assert [words[1] for words, _ in commands] == ["diff", "ls", "verify", "log", "export"]
    for words, output in commands:
        assert words[0] == "holdfast"
        got = ran(["-c", RUN, *words[1:]], tmp_path)
        assert comparable(got) == comparable(output)
    (tmp_path / "elsewhere.py").write_text(script("elsewhere.py"))
    assert ran(["elsewhere.py"], tmp_path) == ""


def ran(words: list[str], folder: Path) -> str:
    """The output of a program that has to succeed."""
    done = warm.run(words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_loop_of_before_runs(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(script("train.py, before"))
    assert len(steps_in(ran(["before.py"], tmp_path))) == 10


def test_what_has_changed_in_the_loop_is_what_the_page_says() -> None:
    """No line of the training itself."""
    before, after = (script(name).splitlines() for name in ("train.py, before", "train.py"))
    gone = [line.strip() for line in before if line not in after and f"    {line}" not in after]
    assert gone == [
        "from torch.utils.data import DataLoader, TensorDataset",
        "data = DataLoader(dataset, batch_size=20, shuffle=True)",
        "step = 0",
        "while step < 1000:",
        "for x, y in data:",
    ]
