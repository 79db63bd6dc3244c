"""docs/operations.md: each message on it is one that Holdfast gives in the scene it stands for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.mistakes.user import copied, made
from tests.operations.scenes import SCENES, Scene, full_disk, late_upload

from holdfast.cli.app import load_command
from holdfast.errors import HoldfastError
from marks import full

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
SHOWN = re.findall(r"```(?:text|console)\n(.*?)```", PAGE, re.DOTALL)
SLOW = (full_disk, late_upload)
MASKS = (
    (r"(?:memory|s3)://", "s3://"),
    (r"(?<![\w/:])/(?:[\w.-]+/)*?(?=(?:runs/)?(?:first|second|new)(?:/|:| |$))", "/"),
    (r"(step-\d{8}\.\d{4}-\d{6})-[0-9a-f]{8}", r"\1"),
    (r"\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b", "DIGEST"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\+00:00)?)?", "TIME"),
    (r"process \d+ on \S+", "PROCESS"),
    (r"\S+:\d+(?= +(?:the beginning|step ))", "PROCESS"),
    (r"(tried again +\d+ B +)\d+$", r"\1N"),
    (r"[\d.]+ (KiB|B|bytes|inodes|more bytes|are free)", r"N \1"),
    (r"-{3,}|  +", " "),
)
"""What differs from one machine or moment to another."""


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints."""
    root = tmp_path_factory.mktemp("operations") / "template"
    made(root)
    return root


@pytest.mark.parametrize(
    "scene",
    [*full(*SLOW), *(scene for scene in SCENES if scene not in SLOW)],
    ids=lambda scene: scene.__name__,
)
def test_what_the_page_shows_is_what_is_said(
    scene: Callable[[Scene], None],
    template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """R8, R11, R14: disk full, damage, keys, owners, deletions, uploads, clocks, kills."""
    disk = request.getfixturevalue("small_disk") if scene.__name__ == "full_disk" else None
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    played = Scene(copied(template, home), disk)
    scene(played)
    with contextlib.suppress(HoldfastError):  # of a run that was taken over
        played.user.doing.close()
    assert played.said
    on_page = {masked(text) for text in SHOWN}
    assert [text for text in played.said if masked(text) not in on_page] == []


def test_every_message_on_the_page_is_of_a_scene() -> None:
    """Else one would stand there that nothing compares."""
    assert len(SHOWN) == 23


def test_the_commands_of_the_page_exist_with_their_options() -> None:
    commands = re.findall(r"^holdfast (?:--key-file \S+ )?([a-z]+)(.*)$", PAGE, re.MULTILINE)
    assert len(commands) > 10
    for name, rest in commands:
        command = load_command(name)
        known = {option for parameter in command.params for option in parameter.opts}
        assert {*re.findall(r" (--[\w-]+)", rest)} <= known, name
