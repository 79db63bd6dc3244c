"""The commands that the README and docs/looking.md show print what is shown."""

from __future__ import annotations

import doctest
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import readme
import warm
from holdfast.cli import main

Expect = Callable[[list[str], str], None]
ROOT = Path(__file__).resolve().parents[2]


def shown_in(page: Path) -> Iterator[tuple[list[str], str]]:
    """The arguments and the output of each command in the console blocks of a page."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for typed, output in re.findall(r"^\$ holdfast (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            yield typed.split(), output


def comparable(output: str, home: Path) -> str:
    """An output without what differs from run to run: random numbers, sizes of records."""
    output = output.replace(str(home), "/home/ada")
    output = re.sub(r"(step-\d{8}\.\d{4}-\d{6})-[0-9a-f]{8}", r"\1", output)
    output = re.sub(r"[\d.]+ KiB", "… KiB", output)
    output = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "0000-00-00 00:00", output)
    output = re.sub(r"\bloss [\d.e-]+ *", "loss … ", output)
    output = re.sub(r"  \S+:\d+ +(?=the beginning|step )", "  HOST:PID ", output)
    output = re.sub(r"\((1|none) inside a save.*?\)", "(… inside a save)", output)
    output = re.sub(r"where +(?=resumed from)", "where  ", output)  # as wide as the longest
    return "\n".join(line.rstrip() for line in output.splitlines())


@pytest.fixture
def expect_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Expect:
    """Runs a command in an empty folder, also what it does in a child; checks its output."""
    monkeypatch.chdir(tmp_path)

    def expect(arguments: list[str], output: str) -> None:
        monkeypatch.setattr("sys.argv", ["holdfast", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main()
        captured = capfd.readouterr()
        assert comparable(captured.out, tmp_path) == comparable(output, tmp_path), captured.err

    return expect


@pytest.mark.full  # The loop alone, and a proof, run in every tier.
@pytest.mark.timeout(450)
def test_the_commands_of_the_readme_print_what_it_shows(
    expect_shown: Expect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1, invariant 7: also a run that is killed in step 1,200 and started again."""
    script = Path(readme.__file__)
    for words, code in ((["killed", "1200"], -9), (["killed"], 0)):
        root, *more = words
        done = warm.run([script, f"runs/{root}", *more], cwd=tmp_path)
        assert done.returncode == code, done.stderr
    shown = [(tuple(arguments), output) for arguments, output in shown_in(ROOT / "README.md")]
    # The proof is shown twice, and `serve` runs until Ctrl-C.
    commands = [one for one in dict.fromkeys(shown) if one[0][0] != "serve"]
    assert [arguments[0] for arguments, _ in commands] == ["prove", "ls", "log", "export"]
    program = f"import sys\nsys.path.append({str(script.parent)!r})\nimport readme\n"
    Path("train.py").write_text(f"{program}readme.prove(sys.argv[1])", "utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    for arguments, output in commands:
        expect_shown([*arguments], output)


@pytest.mark.full  # Two of its child processes import torch.
@pytest.mark.filterwarnings("ignore")
def test_the_page_on_out_and_in_prints_what_it_shows(expect_shown: Expect, tmp_path: Path) -> None:
    page = ROOT / "docs" / "out-and-in.md"
    names = readme.run_blocks(page)
    Path("old.pt").unlink()
    model = names["new_model"]()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 500}
    torch.save(saved, "old.pt")
    commands = [*shown_in(page)]
    assert len(commands) == 5
    for arguments, output in commands:
        expect_shown(arguments, output)


def test_the_code_on_out_and_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme.run_blocks(ROOT / "docs" / "out-and-in.md")


def test_the_commands_of_the_page_on_looking_print_what_it_shows(expect_shown: Expect) -> None:
    page = ROOT / "docs" / "looking.md"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.testfile(str(page), module_relative=False, optionflags=flags)
    commands = [one for one in shown_in(page) if "runs/gpt" not in one[0]]
    assert len(commands) == 5
    for arguments, output in commands:
        expect_shown(arguments, output)
