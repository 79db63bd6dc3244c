"""Claims about `holdfast doctor` and `holdfast completion`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, flip, folder_of

from children import environment
from holdfast.cli import doctor as doctor_module
from holdfast.cli.doctor import LEAST_VERSIONS
from holdfast.store.base import FreeSpace
from holdfast.store.local import LocalStore

Command = Callable[..., Result]


def findings(result: Result) -> dict[str, Any]:
    return {found["check"]: found for found in result.document["findings"]}


def test_a_good_root_has_no_failed_line_and_stays_as_it_was(holdfast: Command, root: Path) -> None:
    before = sorted(path for path in root.rglob("*"))
    result = holdfast("doctor", root, "--json")
    assert result.code == 0, result.out
    found = findings(result)
    assert {"python", "torch", "root", "saving", "room", "clock", "hard links"} <= {*found}
    assert all(found[name]["status"] == "ok" for name in ("saving", "clock", "root"))
    assert "3 checkpoints" in found["root"]["found"]
    assert sorted(path for path in root.rglob("*")) == before


def test_a_root_that_does_not_exist_is_not_made(holdfast: Command, tmp_path: Path) -> None:
    result = holdfast("doctor", tmp_path / "a" / "b")
    assert (result.code, "does not exist yet" in result.out) == (0, True)
    assert not (tmp_path / "a").exists()


def test_without_a_root_the_machine_is_checked(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert holdfast("doctor").code == 0
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(tmp_path / "no-key"))
    result = holdfast("doctor")
    assert (result.code, "name a file with keys" in result.out) == (1, True)


@pytest.mark.parametrize(
    ("trouble", "check", "status"),
    [
        ("damaged", "manifests", "fail"),
        ("full", "room", "fail"),
        ("skewed", "clock", "warn"),
        pytest.param("unlinkable", "hard links", "warn", marks=pytest.mark.full),
        pytest.param("other", "root", "warn", marks=pytest.mark.full),
        pytest.param("readonly", "saving", "fail", marks=pytest.mark.full),
    ],
)
def test_each_trouble_has_a_line_that_says_what_to_do(
    holdfast: Command,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
    check: str,
    status: str,
) -> None:
    if trouble == "damaged":
        flip(folder_of(root, 300) / "manifest.json", 100)
    elif trouble == "full":
        monkeypatch.setattr(LocalStore, "free_space", lambda _: FreeSpace(20_000, 10**6))
    elif trouble == "skewed":
        monkeypatch.setattr(doctor_module.time, "time", lambda: 0.0)
    elif trouble == "unlinkable":
        monkeypatch.setattr(LocalStore, "link", lambda *_: False)
    elif trouble == "other":
        root = root.parent
        (root / "notes").write_text("mine")
    else:
        monkeypatch.setattr(LocalStore, "make_folder", _refused)
    result = holdfast("doctor", root, "--json")
    found = findings(result)[check]
    assert (found["status"], bool(found["do"])) == (status, True)
    assert result.code == (1 if status == "fail" else 0)


def _refused(store: LocalStore, folder: str, **_: object) -> None:
    from holdfast.errors import AccessDenied

    raise AccessDenied(f"{store.url}/{folder}: permission denied")


def test_the_least_versions_are_those_of_the_extras() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    for extra, packages in LEAST_VERSIONS.items():
        (line,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        for package, version in packages.items():
            assert re.search(rf'"{package}(\[\w+\])?>={re.escape(version)}[";]', line), package


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_asks_for_completions(holdfast: Command, shell: str) -> None:
    result = holdfast("completion", shell)
    assert (result.code, f"_HOLDFAST_COMPLETE={shell}_complete" in result.out) == (0, True)


def test_a_shell_that_asks_gets_the_commands_that_begin_so() -> None:
    asked = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": "holdfast v", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli"],
        env=environment() | asked,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "plain,verify\n")


def test_bash_can_run_the_script(holdfast: Command, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(holdfast("completion", "bash").out)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    assert os.path.getsize(script) > 100
