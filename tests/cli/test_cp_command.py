"""Claims about `holdfast cp`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, flip, folder_of

from holdfast import Encryption, keys
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import Deleted
from holdfast.maintenance.verify import verify_root
from holdfast.replication.copy_checkpoints import _expect_same_run, copy_checkpoints, plan_copies
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from marks import diagonal
from runs import new_run
from stops import stops

Command = Callable[..., Result]
THIN = ("--drop", "optimizer", "--yes", "--even-latest")


def steps(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(LocalStore(root)).checkpoints()]


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_copies_are_the_same_bytes_and_a_run_goes_on_from_them(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    copy_root = tmp_path / "copy"
    result = holdfast("cp", f"{root}@step=100", f"{root}@latest", copy_root, "--json")
    assert result.code == 0, result.err
    assert [item["outcome"] for item in result.document["checkpoints"]] == ["copied"] * 2
    for step in (100, 300):
        for path in folder_of(root, step).glob("[!n]*"):
            assert (copy_root / path.relative_to(root)).read_bytes() == path.read_bytes()
    assert holdfast("verify", copy_root).code == 0
    source, copied = new_run(), new_run()
    with source.manager(root) as one, copied.manager(copy_root) as other:
        assert one.resume().step == other.resume().step == 300  # type: ignore[union-attr]
        assert source.bits() == copied.bits()
        other.save(400).wait()
    assert steps(copy_root) == [400, 300, 100]


def test_pins_tags_and_later_metrics_are_copied(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    copy_root = tmp_path / "copy"
    assert holdfast("metric", f"{root}@paper", "acc=0.5", "loss=9", "--replace").code == 0
    assert holdfast("cp", root, copy_root, "--all").code == 0
    assert holdfast("show", f"{copy_root}@paper", "--json").document["checkpoint"]["step"] == 200
    listed = holdfast("ls", copy_root, "--json").document["checkpoints"]
    assert [entry["pinned"] for entry in listed] == [False, False, True]
    assert (listed[1]["metrics"]["acc"], listed[1]["metrics"]["loss"]) == (0.5, 9.0)


def test_a_copy_that_is_there_already_changes_nothing(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    copy_root = tmp_path / "copy"
    assert holdfast("cp", root, copy_root, "--all").code == 0
    before = names(copy_root)
    again = holdfast("cp", root, copy_root, "--all", "--json")
    assert {item["outcome"] for item in again.document["checkpoints"]} == {"already there"}
    assert names(copy_root) == before


def test_a_backup_grows_with_the_run(
    holdfast: Command, root: Path, saving: Callable[..., Any], tmp_path: Path
) -> None:
    """Claims of earlier copies give way to the claims of the run."""
    copy_root = tmp_path / "copy"
    for step in (400, 500):
        assert holdfast("cp", root, copy_root, "--all").code == 0
        manager = saving()
        manager.save(step).wait()
        manager.close()
    result = holdfast("cp", root, copy_root, "--all")
    assert result.code == 0, result.err
    assert steps(copy_root) == [500, 400, 300, 200, 100]
    assert holdfast("log", copy_root).code == holdfast("verify", copy_root).code == 0


def test_a_live_owner_of_the_source_is_no_obstacle(
    holdfast: Command, root: Path, saving: Callable[..., Any], tmp_path: Path
) -> None:
    saving().save(400).wait()
    result = holdfast("cp", f"{root}@latest", tmp_path / "copy")
    assert (result.code, steps(tmp_path / "copy")) == (0, [400]), result.err
    run = new_run()
    with run.manager(tmp_path / "copy") as manager:
        assert manager.resume().step == 400  # type: ignore[union-attr]


def test_a_live_owner_of_the_target_refuses_it(
    holdfast: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.ownership.claim._DROPPED_S", 0.0)
    copy_root = tmp_path / "copy"
    assert holdfast("cp", f"{root}@step=100", copy_root).code == 0
    run = new_run()
    with run.manager(copy_root) as manager:
        manager.resume()
        before = steps(copy_root)
        result = holdfast("cp", f"{root}@step=200", copy_root)
        assert result.code == 1
        assert "owns this run" in result.err
        assert steps(copy_root) == before


def test_a_training_that_claims_the_target_after_it_was_found_free_keeps_its_claim(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 9: a claim is replaced only if it was there before the target was found free."""
    source, target = LocalStore(root), LocalStore(tmp_path / "copy")
    target.make_folder("")
    planned = plan_copies(source, target, [folder_of(root, 100).name])
    with ExitStack() as training:

        def then_claimed(*given: Any) -> None:
            _expect_same_run(*given)
            if not Catalog(target).claims():
                manager = training.enter_context(new_run().manager(tmp_path / "copy"))
                manager.save(1).wait()

        monkeypatch.setattr("holdfast.replication.copy_checkpoints._expect_same_run", then_claimed)
        with pytest.raises(UsageError, match="holds another run"):
            [*copy_checkpoints(source, target, planned, emit=Emitter(()))]
    assert steps(tmp_path / "copy") == [1]


def test_another_run_is_not_mixed_in(holdfast: Command, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with new_run(1).manager(other) as manager:
        manager.save(1).wait()
    before = names(other)
    result = holdfast("cp", f"{root}@latest", other)
    assert result.code == 2
    assert "holds another run" in result.err
    assert names(other) == before


def test_two_runs_are_not_copied_into_one_root(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    other, copy_root = tmp_path / "other", tmp_path / "copy"
    with new_run(1).manager(other) as manager:
        manager.save(1).wait()
    result = holdfast("cp", f"{root}@latest", f"{other}@latest", copy_root, "--json")
    assert result.code == 1
    assert [item["outcome"] for item in result.document["checkpoints"]] == ["copied", "failed"]
    assert "holds another run" in result.document["checkpoints"][1]["why"]
    assert steps(copy_root) == [300]
    assert holdfast("verify", copy_root).code == 0


def test_a_target_with_another_run_copied_by_hand_is_refused(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    other, by_hand = tmp_path / "other", tmp_path / "by-hand"
    with new_run(1).manager(other) as manager:
        manager.save(1).wait()
    shutil.copytree(folder_of(other, 1), by_hand / folder_of(other, 1).name)
    assert "holds another run" in holdfast("cp", f"{root}@latest", by_hand).err


def test_a_checkpoint_without_claims_is_copied_and_resumed(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    by_hand, copy_root = tmp_path / "by-hand", tmp_path / "copy"
    shutil.copytree(folder_of(root, 200), by_hand / folder_of(root, 200).name)
    result = holdfast("cp", f"{by_hand}@step=200", copy_root)
    assert result.code == 0, result.err
    with new_run().manager(copy_root) as manager:
        assert manager.resume().step == 200  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sources", "to", "said"),
    [
        (["{root}"], "{tmp}/copy", "name one checkpoint"),
        (["{root}@latest"], "{root}", "both copied from and copied to"),
        pytest.param(
            ["{root}@latest"], "{tmp}/copy@latest", "the root to copy to", marks=pytest.mark.full
        ),
        pytest.param(["{root}@latest"], "{tmp}", "holds other files", marks=pytest.mark.full),
        pytest.param(
            ["{root}@step=7"], "{tmp}/copy", "no checkpoint for 'step=7'", marks=pytest.mark.full
        ),
    ],
)
def test_a_mistyped_command_writes_nothing(
    holdfast: Command, root: Path, tmp_path: Path, sources: list[str], to: str, said: str
) -> None:
    before = names(tmp_path)
    texts = [text.format(root=root, tmp=tmp_path) for text in (*sources, to)]
    result = holdfast("cp", *texts)
    assert (result.code in (2, 3), said in result.err) == (True, True), result.err
    assert names(tmp_path) == before


def test_a_dry_run_writes_nothing(holdfast: Command, root: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    result = holdfast("cp", root, tmp_path / "copy", "--all", "--dry-run", "--json")
    assert {item["outcome"] for item in result.document["checkpoints"]} == {"to copy"}
    assert names(tmp_path) == before


def test_damage_is_not_copied(holdfast: Command, root: Path, tmp_path: Path) -> None:
    flip(folder_of(root, 200) / "model-00000.safetensors", 5000)
    result = holdfast("cp", root, tmp_path / "copy", "--all", "--json")
    assert result.code == 1
    outcomes = [item["outcome"] for item in result.document["checkpoints"]]
    assert outcomes == ["copied", "failed", "copied"]
    assert "do not match their digest" in result.document["checkpoints"][1]["why"]
    assert steps(tmp_path / "copy") == [300, 100]


def test_a_copy_of_all_says_what_it_leaves_out(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    assert holdfast("thin", f"{root}@step=300", *THIN).code == 0
    result = holdfast("cp", root, tmp_path / "copy", "--all", "--json")
    assert (result.code, steps(tmp_path / "copy")) == (0, [200, 100])
    assert result.document["checkpoints"][0]["outcome"] == "left out"
    flip(folder_of(root, 200) / "manifest.json", 100)
    again = holdfast("cp", root, tmp_path / "copy", "--all")
    assert (again.code, "FAILED step-00000200" in again.out) == (1, True)
    dry = holdfast("cp", root, tmp_path / "copy", "--all", "--dry-run", "--json")
    outcomes = [item["outcome"] for item in dry.document["checkpoints"]]
    assert (dry.code, outcomes) == (1, ["failed", "left out", "already there"])


def test_other_bytes_under_the_same_name_are_left_alone(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    copy_root = tmp_path / "copy"
    shutil.copytree(root, copy_root, symlinks=True)
    flip(folder_of(copy_root, 300) / "manifest.json", 100)
    before = (folder_of(copy_root, 300) / "manifest.json").read_bytes()
    result = holdfast("cp", f"{root}@latest", copy_root)
    assert result.code == 1, result.out
    assert (folder_of(copy_root, 300) / "manifest.json").read_bytes() == before


def test_a_copy_of_all_leaves_out_what_was_deleted_or_differs_there(
    holdfast: Command, root: Path, tmp_path: Path
) -> None:
    copy_root = tmp_path / "copy"
    assert holdfast("cp", f"{root}@step=100", f"{root}@step=200", copy_root).code == 0
    entry = Catalog(LocalStore(copy_root)).find_checkpoint("step=100")
    gone = Deleted(save_id=entry.manifest.save_id, by="writer 9", reason="test")
    LocalStore(copy_root).put(f"{entry.folder}/manifest.json", gone.encode())
    result = holdfast("cp", root, copy_root, "--all", "--json")
    outcomes = [item["outcome"] for item in result.document["checkpoints"]]
    assert (result.code, outcomes) == (0, ["left out", "already there", "copied"])
    assert "deleted there" in result.document["checkpoints"][0]["why"]
    flip(folder_of(copy_root, 200) / "manifest.json", 100)
    result = holdfast("cp", root, copy_root, "--all")
    assert (result.code, "FAILED step-00000200" in result.out) == (1, True)
    assert holdfast("cp", f"{root}@step=100", copy_root).code == 3


def test_a_thinned_checkpoint_is_refused(holdfast: Command, root: Path, tmp_path: Path) -> None:
    assert holdfast("thin", f"{root}@step=300", *THIN).code == 0
    result = holdfast("cp", f"{root}@step=300", tmp_path / "copy")
    assert (result.code, "optimizer was dropped from it" in result.err) == (2, True)


@pytest.mark.parametrize("has_key", [True, False])
def test_encrypted_checkpoints_stay_encrypted(
    holdfast: Command, tmp_path: Path, has_key: bool
) -> None:
    key, source, target = tmp_path / "key", tmp_path / "run", tmp_path / "copy"
    assert holdfast("keys", "generate", key).code == 0
    encrypt = Encryption(keys=keys.from_file(key))
    with new_run().manager(source, encrypt=encrypt) as manager:
        manager.save(1).wait()
    (folder,) = (path.name for path in source.glob("step-*"))
    keyed = ("--key-file", key) if has_key else ()
    what = "latest" if has_key else folder
    result = holdfast(*keyed, "cp", f"{source}@{what}", target, "--json")
    assert result.code == 0, result.err
    assert result.document["checkpoints"][0]["step"] == (1 if has_key else None)
    for path in (source / folder).iterdir():
        assert (target / folder / path.name).read_bytes() == path.read_bytes()
    every = holdfast(*keyed, "cp", source, "--all", tmp_path / "all", "--json")
    assert (every.code, [one["folder"] for one in every.document["checkpoints"]]) == (0, [folder])
    with new_run().manager(target, encrypt=encrypt) as manager:
        assert manager.resume().step == 1  # type: ignore[union-attr]


# A stop at every operation


def resumed_twice() -> MemoryStore:
    """A run of two sessions: the second one's claim names a checkpoint of the first."""
    store = MemoryStore()
    for step in (1, 2):
        with new_run().manager(store, preflight=False) as manager:
            manager.resume()
            manager.save(step).wait()
    return store


def copied(source: MemoryStore, target: Any) -> None:
    folders = [entry.folder for entry in Catalog(source).checkpoints()]
    for _ in copy_checkpoints(
        source, target, plan_copies(source, target, folders), emit=Emitter(())
    ):
        pass


def test_a_killed_copy_does_not_keep_a_backup_from_growing() -> None:
    """On an object store it is never proven dead."""
    source, target = resumed_twice(), MemoryStore()
    (second, first) = [entry.folder for entry in Catalog(source).checkpoints()]

    def copied_one(store: Any, folder: str) -> None:
        for _ in copy_checkpoints(
            source, store, plan_copies(source, store, [folder]), emit=Emitter(())
        ):
            pass

    fault = Fault(kind="stop_after", op="put", at=2)
    with suppress(Stopped):
        copied_one(FaultyStore(target, [fault]), first)
    assert Catalog(target).highest_epoch() == 2
    copied_one(target, second)
    copied_one(target, first)
    assert [entry.step for entry in Catalog(target).checkpoints()] == [2, 1]


KINDS = ("stop_before", "stop_after")


@pytest.mark.parametrize(("kind", "is_local"), diagonal(KINDS, (True, False)))
def test_after_a_stop_anywhere_the_copy_verifies_and_can_be_repeated(
    tmp_path: Path, kind: Any, is_local: bool
) -> None:
    """Also in an object store, and where a later claim names what is being copied."""
    source = resumed_twice()

    def target(number: int) -> Any:
        return LocalStore(tmp_path / str(number)) if is_local else MemoryStore()

    clean = FaultyStore(target(0))
    copied(source, clean)
    for number, fault in enumerate([*stops(kind, clean)][::3], start=1):
        store = target(number)
        with suppress(Stopped, HoldfastError):
            copied(source, FaultyStore(store, [fault]))
        assert verify_root(store).ok, fault
        copied(source, store)
        assert [entry.step for entry in Catalog(store).checkpoints()] == [2, 1], fault
        assert verify_root(store).ok, fault
        assert Catalog(store).find_checkpoint().step == 2
