"""What docs/looking.md shows works, and its commands exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from holdfast.cli.app import load_command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "looking.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_the_examples_give_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=FLAGS)
    assert found.attempted > 15
    assert found.failed == 0


def test_the_commands_are_there_with_their_options() -> None:
    shown = re.findall(r"^\$ holdfast (\w+)(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name for name, _ in shown} == {"tree", "cat", "diff", "stats", "du"}
    for name, rest in shown:
        known = {option for parameter in load_command(name).params for option in parameter.opts}
        assert {*re.findall(r"--[\w-]+", rest)} <= known
