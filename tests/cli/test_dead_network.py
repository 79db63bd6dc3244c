"""Claims about `--timeout`: no command waits long for an object store that does not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cli.roots import Result

from holdfast.cli.app import app
from marks import full

ROOT = "s3://bucket/run"
FOLDER = "step-00000001.0001-000001-00000000"
COMMANDS = {
    "ls": [ROOT],
    "log": [ROOT],
    "resume-plan": [ROOT],
    "show": [f"{ROOT}@latest"],
    "verify": [f"{ROOT}/{FOLDER}"],
    "gc": [ROOT],
    "prune": [ROOT, "--keep", "all"],
    "forecast": [ROOT],
    "pin": [f"{ROOT}@latest"],
    "unpin": [f"{ROOT}@latest"],
    "tag": [f"{ROOT}@latest", "x"],
    "untag": [f"{ROOT}@latest", "x"],
    "metric": [f"{ROOT}@latest", "x=1"],
    "evaluate": [ROOT, "--metric", "x", "--", "true", "{checkpoint}"],
    "save": [ROOT],
    "uploads": [ROOT],
    "advise": [ROOT],
    "plot": [ROOT],
    "cp": [f"{ROOT}@latest", "copy"],
    "rm": [f"{ROOT}/{FOLDER}", "--yes", "--reason", "x"],
    "thin": [f"{ROOT}@latest", "--drop", "x", "--yes"],
    "scrub": [ROOT],
    "watch": [ROOT, "--once"],
    "doctor": [ROOT],
    "serve": [ROOT],
    "run": ["--root", ROOT, "true"],
    "keys list": [ROOT],
    "tree": [ROOT],
    "cat": [ROOT, "x"],
    "diff": [ROOT, f"{ROOT}@latest"],
    "stats": [ROOT],
    "du": [ROOT],
    "export": [ROOT, "out.safetensors", "--to", "safetensors"],
}
"""Each command that talks to a store, with arguments."""
QUICK = ("cp", "doctor", "rm", "watch")
ELSEWHERE = {"keys", "completion", "schema", "import", "prove"}
"""Those that talk to none, or (import) look at their file first."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", [*QUICK, *full(*(c for c in COMMANDS if c not in QUICK))])
def test_a_command_gives_up_a_dead_endpoint_after_its_timeout(
    holdfast: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Without the option, retries go on for two minutes."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    result = holdfast("--timeout", "0.3s", *command.split(), *COMMANDS[command])
    assert result.code == 1, result.err
    assert "Check the address" in result.err + result.out


def test_no_command_is_forgotten() -> None:
    tested = {name.partition(" ")[0] for name in COMMANDS}
    assert tested | ELSEWHERE >= {*app.commands}
