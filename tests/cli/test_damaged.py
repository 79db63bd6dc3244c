"""Claims about `holdfast gc --damaged`, which deletes what no rule does (issue 20, line 11)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, flip, folder_of, overwrite

from holdfast import keys
from holdfast.format.manifest import Aborted, Deleted
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from runs import Recorder, new_run

Command = Callable[..., Result]


def damage(folder: Path) -> None:
    flip(folder / "manifest.json", 100)


def lose(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.fixture(params=[damage, lose])
def damaged(root: Path, request: pytest.FixtureRequest) -> str:
    """The newest checkpoint, which `latest` names, with a manifest that is damaged or lost."""
    folder = folder_of(root, 300)
    request.param(folder)
    return folder.name


def everything(root: Path) -> dict[str, bytes]:
    """All files of a root."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_it_is_shown_first_and_nothing_is_deleted(
    holdfast: Command, root: Path, damaged: str
) -> None:
    before = everything(root)
    for sure in ([], ["--yes", "--dry-run"]):
        result = holdfast("gc", root, "--damaged", damaged, *sure)
        assert result.code == 1
        assert result.out.startswith(f"{damaged}: ")
        assert "the latest" in result.out
        assert "model-00000.safetensors" in result.out
        assert f"without it the run resumes from {folder_of(root, 200).name}" in result.out
        assert result.out.endswith(
            f"nothing was deleted. To delete it: holdfast gc {root} --damaged {damaged} --yes\n"
        )
        assert everything(root) == before


def test_a_plain_gc_says_how_to_look(holdfast: Command, root: Path, damaged: str) -> None:
    assert (
        f"to look at {damaged}: holdfast gc {root} --damaged {damaged}\n"
        in holdfast("gc", root).out
    )


def test_it_is_gone_afterwards_and_the_run_resumes_from_the_one_before(
    holdfast: Command, root: Path, damaged: str
) -> None:
    """Nothing but its folder goes, and nobody complains of it any more."""
    before = everything(root)
    result = holdfast("gc", root, "--damaged", f"{damaged}/", "--yes")
    assert result.code == 0
    assert "deleted; " in result.out
    assert not (root / damaged).exists()
    after = everything(root)
    assert {n for n in before if n not in after} == {n for n in before if n.startswith(damaged)}
    assert all(after[name] == before[name] for name in before if name in after)
    assert holdfast("ls", root).code == holdfast("verify", root).code == 0
    assert holdfast("gc", root).code == 0
    run, noted = new_run(), Recorder()
    with run.manager(root, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 200
        assert noted.of("warning") == noted.of("rejected") == []
        manager.save(201).wait()
    assert holdfast("verify", root).code == 0


def test_the_only_one_is_deleted_too_after_that_was_said(holdfast: Command, tmp_path: Path) -> None:
    root = tmp_path / "one"
    with new_run().manager(root) as manager:
        manager.save(1).wait()
    damage(folder_of(root, 1))
    name = folder_of(root, 1).name
    assert (
        "the run cannot resume from any other checkpoint"
        in holdfast("gc", root, "--damaged", name).out
    )
    assert holdfast("gc", root, "--damaged", name, "--yes").code == 0
    with new_run().manager(root) as manager:
        assert manager.resume() is None


def test_a_pinned_one_is_named_so_and_goes_because_a_person_says_so(
    holdfast: Command, root: Path
) -> None:
    folder = folder_of(root, 100)
    damage(folder)
    document = holdfast("gc", root, "--damaged", folder.name, "--json").document
    assert (document["pinned"], document["is_latest"], document["deleted"]) == (True, False, False)
    assert document["resumes_from"] == folder_of(root, 300).name
    assert "; pinned" in holdfast("gc", root, "--damaged", folder.name).out
    document = holdfast("gc", root, "--damaged", folder.name, "--yes", "--json").document
    assert document["deleted"] is True
    assert not folder.exists()


def test_what_is_not_damaged_so_is_refused(holdfast: Command, root: Path) -> None:
    """Bad input never costs data."""
    sound = folder_of(root, 300)
    flip(folder_of(root, 200) / "model-00000.safetensors", 5000)
    before = everything(root)
    for name, word, code in (
        (sound.name, "its manifest is intact", 2),
        (folder_of(root, 200).name, "its manifest is intact", 2),
        (sound.name.replace("step", "stop"), "no such folder", 3),
        ("step=300", "not the name of a checkpoint's folder", 2),
        ("../run", "not the name of a checkpoint's folder", 2),
        ("writers", "not the name of a checkpoint's folder", 2),
        ("", "not the name of a checkpoint's folder", 2),
    ):
        result = holdfast("gc", root, "--damaged", name, "--yes")
        assert (result.code, word in result.err) == (code, True), (name, result)
    assert everything(root) == before


def test_what_never_committed_and_what_was_deleted_is_for_a_plain_gc(
    holdfast: Command, root: Path
) -> None:
    folder = folder_of(root, 300)
    for name in ("manifest.json", "index.json"):
        (folder / name).unlink()
    (root / "latest").unlink()
    aborted = Aborted(by="gc", reason="not committed").encode()
    deleted = Deleted(save_id=32 * "0", by="writer 1", reason="old").encode()
    for register, what in (
        (b"", "never became a checkpoint"),
        (aborted, "never became a checkpoint"),
        (deleted, "was deleted"),
    ):
        if register:
            (folder / "manifest.json").write_bytes(register)
        result = holdfast("gc", root, "--damaged", folder.name, "--yes")
        assert result.code == 2
        assert f"it {what}; `holdfast gc` without --damaged" in result.err
        assert folder.exists()


def test_a_renamed_folder_is_not_damaged(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 300)
    renamed = folder.rename(root / folder.name.replace("-000003-", "-000009-"))
    before = everything(root)
    result = holdfast("gc", root, "--damaged", renamed.name, "--yes")
    assert (result.code, f"a folder named {folder.name}; rename it" in result.err) == (2, True)
    assert everything(root) == before


@pytest.mark.parametrize("byte", [100, -100])
def test_one_that_is_sealed_needs_its_key(holdfast: Command, tmp_path: Path, byte: int) -> None:
    """Damage of the envelope and of what is inside."""
    root, key = tmp_path / "run", tmp_path / "key"
    assert holdfast("keys", "generate", key).code == 0
    with new_run().manager(root, encrypt=Encryption(keys=keys.from_file(key))) as manager:
        manager.save(1).wait()
        manager.save(2).wait()
    newest = folder_of(root, 2)
    flip(newest / "manifest.json", byte)
    before = everything(root)
    assert holdfast("gc", root, "--damaged", newest.name, "--yes").code == 1
    assert everything(root) == before
    result = holdfast("--key-file", key, "gc", root, "--damaged", newest.name)
    assert f"resumes from {folder_of(root, 1).name}" in result.out
    result = holdfast("--key-file", key, "gc", root, "--damaged", newest.name, "--yes")
    assert (result.code, newest.exists()) == (0, False), result
    assert holdfast("--key-file", key, "verify", root).code == 0


def test_a_newer_version_is_no_damage(
    holdfast: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.errors import UnsupportedVersion
    from holdfast.format import strictjson

    def refuse(*args: Any, **options: Any) -> Any:
        raise UnsupportedVersion("written by a newer Holdfast; upgrade")

    before = everything(root)
    with monkeypatch.context() as patch:
        patch.setattr(strictjson, "decode_checked", refuse)
        result = holdfast("gc", root, "--damaged", folder_of(root, 300).name, "--yes")
    assert (result.code, "newer Holdfast" in result.err) == (1, True)
    assert everything(root) == before


@pytest.mark.usefixtures("refused_at_once")
def test_a_live_owner_keeps_it(
    holdfast: Command, root: Path, damaged: str, saving: Callable[..., Any]
) -> None:
    saving()
    result = holdfast("gc", root, "--damaged", damaged, "--yes")
    assert (result.code, "owns this run" in result.err) == (1, True)
    assert (root / damaged).exists()


def test_options_that_do_not_go_together_are_refused(holdfast: Command, root: Path) -> None:
    name = folder_of(root, 300).name
    assert holdfast("gc", root, "--yes").code == 2
    assert holdfast("gc", root, "--damaged", name, "--dead-epoch", "1").code == 2


def test_what_the_other_tier_has_is_mended_and_not_deleted(
    holdfast: Command, tmp_path: Path
) -> None:
    """Where that tier cannot be asked, nobody knows, and it stays as well."""
    here, there = tmp_path / "here", tmp_path / "there"
    run = new_run()
    with CheckpointManager(Tiered(here, there), run.state) as manager:
        manager.save(1).wait()
    folder = folder_of(here, 1)
    damage(folder)
    result = holdfast("gc", here, "--damaged", folder.name, "--yes")
    assert (result.code, "A resume with both tiers repairs" in result.err) == (2, True)
    away = there.rename(tmp_path / "away")
    result = holdfast("gc", here, "--damaged", folder.name, "--yes")
    assert (result.code, "Could not check whether" in result.err) == (1, True)
    assert folder.exists()
    shutil.move(away, there)
    record = here / "uploads" / "tiers.json"
    sound = record.read_bytes()
    flip(record, 50)
    assert holdfast("gc", here, "--damaged", folder.name, "--yes").code == 1
    assert folder.exists()
    overwrite(record, sound)
    with CheckpointManager(Tiered(here, there), new_run().state) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1
    assert holdfast("verify", here).code == 0


def test_from_a_remote_tier_there_is_a_warning(holdfast: Command, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with CheckpointManager(Tiered(here, there), new_run().state) as manager:
        manager.save(1).wait()
    folder = folder_of(there, 1)
    damage(folder)
    result = holdfast("gc", there, "--damaged", folder.name)
    assert "the run has two tiers, and this root does not name the other" in result.out
    damage(folder_of(here, 1))
    assert holdfast("gc", here, "--damaged", folder.name, "--yes").code == 0
    assert not (here / folder.name).exists()
    assert folder.exists()
