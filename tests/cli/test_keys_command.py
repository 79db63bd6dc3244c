"""`holdfast keys`, and keys before other commands."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result
from tests.encryption.test_store import saved

from holdfast import keys
from holdfast.keys import Encryption

Command = Callable[..., Result]


@pytest.fixture
def sealed(tmp_path: Path, holdfast: Command) -> tuple[Path, Path]:
    """A root of two sealed checkpoints, and the file with its key."""
    key = tmp_path / "run.key"
    assert holdfast("keys", "generate", str(key)).code == 0
    root = tmp_path / "root"
    saved(root, 1, 2, encrypt=Encryption(keys=keys.from_file(key)))
    return root, key


def test_a_new_key_is_for_its_owner_and_never_overwrites(tmp_path: Path, holdfast: Command) -> None:
    path = tmp_path / "a.key"
    made = holdfast("keys", "generate", str(path), "--pair", "--json")
    assert made.code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert text.strip() not in made.out
    assert json.loads(made.out)["public_path"] == f"{path}.pub"
    (public,) = keys.from_file(f"{path}.pub")
    assert public.name.removeprefix("public") in json.loads(made.out)["key"]
    assert holdfast("keys", "generate", str(path)).code == 2
    assert path.read_text() == text


def test_a_new_key_is_on_stable_storage_with_its_name(
    tmp_path: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sealed with it is; without the key it would be lost by a power cut."""
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def noting(fd: int) -> None:
        found = os.fstat(fd)
        synced.append((found.st_dev, found.st_ino))
        sync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    path = tmp_path / "a.key"
    assert holdfast("keys", "generate", str(path)).code == 0
    expected = [path.stat(), tmp_path.stat()]
    assert synced == [(found.st_dev, found.st_ino) for found in expected]


def test_commands_open_with_a_key_and_refuse_without(
    sealed: tuple[Path, Path], holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31: `ls`, `show`, `verify`, `pin` and `prune`; keys from a file, a variable, a command."""
    root, key = sealed
    other = tmp_path / "other.key"
    holdfast("keys", "generate", str(other))
    monkeypatch.setenv("RUN_KEY", key.read_text())
    before = {path: path.read_bytes() for path in root.rglob("*.*") if path.is_file()}
    for command in (("ls",), ("show",), ("prune", "--keep", "last:1")):
        refused = holdfast(command[0], str(root), *command[1:])
        assert (refused.code, "no key was given" in refused.err) == (1, True)
        wrong = holdfast("--key-file", str(other), command[0], str(root), *command[1:])
        assert (wrong.code, "encrypted for secret" in wrong.err) == (1, True)
    assert {path: path.read_bytes() for path in before} == before
    assert holdfast("verify", str(root)).code == 0
    assert holdfast("gc", str(root)).code == 0
    for given in (
        ("--key-file", str(key)),
        ("--key-env", "RUN_KEY"),
        ("--key-command", f"cat {key}"),
    ):
        found = json.loads(holdfast(*given, "ls", str(root), "--json").out)
        assert [item["step"] for item in found["checkpoints"]] == [2, 1]
        assert holdfast(*given, "verify", str(root)).code == 0
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key))
    assert holdfast("tag", f"{root}@step=1", "paper").code == 0
    assert "#paper" in holdfast("ls", str(root)).out
    assert holdfast("prune", str(root), "--keep", "last:1").code == 0


def test_what_is_not_sealed_is_refused_with_a_key(
    sealed: tuple[Path, Path], holdfast: Command, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    saved(plain, 1, encrypt=None)
    given = ("--key-file", str(sealed[1]))
    assert holdfast(*given, "ls", str(plain)).code == 1
    assert holdfast(*given, "--accept-plain", "ls", str(plain)).code == 0


def test_a_commit_that_was_seen_must_be_there(sealed: tuple[Path, Path], holdfast: Command) -> None:
    """R37."""
    root, key = sealed
    found = json.loads(holdfast("--key-file", str(key), "ls", str(root), "--json").out)
    newest = found["checkpoints"][0]
    seen = f"{newest['epoch']:04d}-{newest['sequence']:06d}-{newest['save_id']}"
    given = ("--key-file", str(key), "verify", str(root), "--seen")
    assert holdfast(*given, seen).code == 0
    for path in (root / newest["folder"]).iterdir():
        path.unlink()
    (root / newest["folder"]).rmdir()
    gone = holdfast(*given, seen)
    assert gone.code == 1
    assert "is newer than" in gone.err
    assert holdfast(*given, "something").code == 2


def test_a_key_file_in_the_environment_may_have_a_space_in_its_path(
    sealed: tuple[Path, Path], holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, key = sealed
    (tmp_path / "my keys").mkdir()
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(key.rename(tmp_path / "my keys" / "run.key")))
    assert holdfast("ls", str(root)).code == 0


def test_keys_are_listed_and_rotated(
    sealed: tuple[Path, Path], holdfast: Command, tmp_path: Path
) -> None:
    """R36."""
    root, key = sealed
    new = tmp_path / "new.key"
    holdfast("keys", "generate", str(new))
    (old_key,), (new_key,) = keys.from_file(key), keys.from_file(new)
    listed = holdfast("keys", "list", str(root))
    assert listed.out.count(old_key.name.removeprefix("secret key ")) == 2
    assert holdfast("keys", "rotate", str(root), "--to-file", str(new)).code == 2
    assert holdfast("--key-file", str(key), "keys", "rotate", str(root)).code == 2
    third = tmp_path / "third.key"
    holdfast("keys", "generate", str(third))
    wrong = holdfast("--key-file", str(new), "keys", "rotate", str(root), "--to-file", str(third))
    assert (wrong.code, "keep the old keys" in wrong.out) == (1, True)
    rotated = holdfast("--key-file", str(key), "keys", "rotate", str(root), "--to-file", str(new))
    assert (rotated.code, rotated.out.count("done")) == (0, 2)
    documents = json.loads(holdfast("keys", "list", str(root), "--json").out)["checkpoints"]
    expected = f"secret {new_key.name.removeprefix('secret key ')}"
    assert [item["recipients"] for item in documents] == [[expected]] * 2
    assert holdfast("--key-file", str(new), "verify", str(root)).code == 0
    assert holdfast("--key-file", str(key), "ls", str(root)).code == 1
