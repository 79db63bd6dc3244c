"""What is read where, when a run has two tiers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.errors import StoreError, TransientStoreError
from holdfast.maintenance.verify import verify
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import diagonal, full
from runs import remove_folder
from tiers import LARGE, Noted, Switch, opened, saved, steps_in, unopened
from ways import Tiny

Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(path, bytes(data))


def cut(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-1])


def lose(path: Path) -> None:
    path.unlink()


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture
def remote() -> MemoryStore:
    return MemoryStore("remote")


@pytest.fixture
def local(ram_path: Path, remote: MemoryStore) -> LocalStore:
    """A local tier with two checkpoints, both of which the remote tier has."""
    store, tiny = LocalStore(ram_path / "local"), Tiny(LARGE)
    with opened(Tiered(store, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    return store


@pytest.mark.parametrize(
    ("damage", "file"),
    diagonal(
        [flip, cut, lose],
        ["tiny-00000.safetensors", "tiny-00000.json", "index.json", "manifest.json"],
        ids=["flip", "cut", "lose"],
    ),
)
def test_a_damaged_local_copy_is_read_from_the_remote_tier_and_mended(
    local: LocalStore, remote: MemoryStore, damage: Damage, file: str
) -> None:
    """R19, D31: the newest is taken all the same, and whole again afterwards."""
    folder = Catalog(local).checkpoints()[0].folder
    damage(Path(local.url) / folder / file)
    tiny, noted = Tiny(LARGE), Noted()
    with opened(Tiered(local, remote), tiny, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, tiny.step(), found.rejected) == (2, 2, ())
        saved(manager, tiny, 3)
        assert noted.wait_for("mended").fields["files"] == (file,)
    assert verify(local, folder).ok
    assert steps_in(local) == [3, 2, 1]
    assert [name for name in local.children() if name.startswith("sending-")] == []


@pytest.mark.parametrize("damage", [lose, cut], ids=["lose", "cut"])
def test_the_local_copy_stays_where_the_manifest_of_the_remote_one_is_lost(
    local: LocalStore, ram_path: Path, damage: Damage
) -> None:
    """What is left there stays too, and a warning names it: a look at the remote tier says what it
    has, and not a note that it was sent once."""
    there, noted, tiny = LocalStore(ram_path / "remote"), Noted(), Tiny(LARGE)
    here = LocalStore(ram_path / "here")
    with opened(Tiered(here, there), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    folder = Catalog(there).checkpoints()[0].folder
    damage(Path(there.url) / folder / "manifest.json")
    files = {path.name for path in (Path(there.url) / folder).iterdir()}
    with opened(Tiered(here, there, keep_local=Last(1)), tiny, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        saved(manager, tiny, 3, 4)
        manager.wait()
    assert 2 in steps_in(here)
    assert {path.name for path in (Path(there.url) / folder).iterdir()} >= files
    assert any(folder in event.message for event in noted.of("warning"))


def test_what_was_read_in_the_remote_tier_vouches_for_no_local_copy(
    local: LocalStore, remote: MemoryStore
) -> None:
    """Invariant 4, R17: of the three local ones only the first is whole, so it stays."""
    folder = Catalog(local).checkpoints()[0].folder
    flip(Path(local.url) / folder / "tiny-00000.safetensors")
    unmended = Fault(kind="fail", op="make_folder", key="sending-*", times=None)
    rotting = Fault(kind="flip", op="write", key="*tiny-00000.safetensors")
    tiny, noted = Tiny(LARGE), Noted()
    tiered = Tiered(FaultyStore(local, [unmended, rotting]), remote, keep_local=Last(2))
    with opened(tiered, tiny, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.folder, tiny.step()) == (folder, 2)
        saved(manager, tiny, 3)
    assert noted.of("retracted") == []
    assert verify(local, Catalog(local).checkpoints()[-1].folder).ok


def test_what_is_damaged_in_both_tiers_is_passed_over(
    local: LocalStore, remote: MemoryStore
) -> None:
    """R19."""
    folder = Catalog(local).checkpoints()[0].folder
    flip(Path(local.url) / folder / "tiny-00000.safetensors")
    key = f"{folder}/tiny-00000.safetensors"
    data = bytearray(remote.get(key))
    data[-1] ^= 1
    remote.put(key, data)
    tiny = Tiny(LARGE)
    with opened(Tiered(local, remote), tiny) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, tiny.step()) == (1, 1)
        assert [name for name, _ in found.rejected] == [folder]


def test_a_load_by_name_finds_what_only_the_remote_tier_has(
    local: LocalStore, remote: MemoryStore
) -> None:
    remove_folder(local, Catalog(local).checkpoints()[1].folder)
    tiny = Tiny(LARGE)
    with opened(Tiered(local, remote), tiny) as manager:
        found = manager.load("step=1")
        assert (found.step, tiny.step(), found.root) == (1, 1, "memory://remote")
        assert [(c.step, c.root) for c in manager.list()] == [
            (2, local.url),
            (1, "memory://remote"),
        ]
    assert steps_in(local) == [2]


@pytest.mark.full
def test_a_load_by_name_takes_the_whole_copy(local: LocalStore, remote: MemoryStore) -> None:
    flip(Path(local.url) / Catalog(local).checkpoints()[1].folder / "tiny-00000.safetensors")
    tiny = Tiny(LARGE)
    with opened(Tiered(local, remote), tiny) as manager:
        assert manager.load("step=1").root == "memory://remote"
        assert tiny.step() == 1


def test_the_local_copy_is_read_where_it_is_whole(local: LocalStore, remote: MemoryStore) -> None:
    """Not one tensor is fetched."""
    switch = Switch()
    switch._objects = remote._objects
    tiny = Tiny(LARGE)
    with opened(Tiered(local, switch, close_timeout_s=0), tiny) as manager:
        switch.error = TransientStoreError("no network")
        found = manager.resume()
        assert found is not None
        assert (found.step, found.root) == (2, local.url)


def test_what_was_read_in_the_remote_tier_lets_nothing_go_in_the_local_one(
    local: LocalStore, remote: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: where it could not be mended, the one before is the only whole one here."""

    def fail(*args: object, **options: object) -> None:
        raise TransientStoreError("no network")

    monkeypatch.setattr("holdfast.replication.mirror.repair_checkpoint", fail)
    flip(Path(local.url, str(Catalog(local).attempts()[0]), "tiny-00000.safetensors"))
    tiny = Tiny(LARGE)
    with opened(Tiered(local, remote, keep_local=Last(1)), tiny) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        manager.wait()
    assert len(Catalog(local).checkpoints()) == 2


def test_the_remote_tier_is_a_root_of_its_own(local: LocalStore, remote: MemoryStore) -> None:
    tiny = Tiny(LARGE)
    with opened(remote, tiny) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, tiny.step()) == (2, 2)
        saved(manager, tiny, 3)
    with opened(Tiered(local, remote), tiny) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 3


def test_one_failure_does_not_hide_the_remote_tier_for_good(
    local: LocalStore, remote: MemoryStore
) -> None:
    """R1: what comes next looks there again, also while the run is owned."""
    remove_folder(local, Catalog(local).checkpoints()[1].folder)
    switch, tiny, noted = Switch(), Tiny(LARGE), Noted()
    switch._objects = remote._objects
    with opened(Tiered(local, switch), tiny, sinks=(noted,)) as manager:
        manager.resume()
        manager.wait()
        for looks_again in (
            lambda: [one.step for one in manager.list()] == [2, 1],
            lambda: manager.load("step=1", components=["tiny"]).step == 1,
            lambda: manager.tag("step=1", "kept") is None,
        ):
            switch.error = TransientStoreError("no network")
            assert [one.step for one in manager.list()] == [2]
            switch.error = None
            assert looks_again()
        assert manager.list()[1].tags == ("kept",)
    assert len(noted.of("warning")) == 3


def test_an_upload_that_arrives_shows_that_the_remote_tier_can_be_read(
    local: LocalStore, remote: MemoryStore
) -> None:
    """So that a save does not make anew what is only there."""
    remove_folder(local, Catalog(local).checkpoints()[1].folder)
    switch, tiny = Switch(), Tiny(LARGE)
    switch._objects = remote._objects
    with opened(Tiered(local, switch), tiny, on_existing="error") as manager:
        manager.resume()
        manager.wait()
        switch.error = TransientStoreError("no network")
        manager.list()
        switch.error = None
        saved(manager, tiny, 3)
        manager.wait()
        with pytest.raises(errors.UsageError, match="checkpoint of step 1 already"):
            manager.save(1)


def test_damage_without_a_remote_copy_is_named(local: LocalStore, remote: MemoryStore) -> None:
    entry = Catalog(local).checkpoints()[0]
    remove_folder(remote, entry.folder)
    flip(Path(local.url) / entry.folder / "tiny-00000.safetensors")
    with (
        opened(Tiered(local, remote), Tiny(LARGE)) as manager,
        pytest.raises(errors.CorruptData, match="tiny"),
    ):
        manager.load("step=2")


@pytest.mark.parametrize("op", ["get", *full("head", "children", "put")])
def test_a_remote_tier_that_fails_amid_a_resume_hides_no_damage(
    ram_path: Path, remote: MemoryStore, op: Any
) -> None:
    """Line 20: the newest is damaged here and whole there. Whichever request fails there, the run
    goes on from it, or names it, or raises: it does not go on from an older one in silence."""
    store, tiny = LocalStore(ram_path / "local"), Tiny()
    with opened(Tiered(store, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        newest = manager.list()[0]
    for at in range(12):
        copies = LocalStore(ram_path / f"local-{at}"), MemoryStore("remote")
        shutil.copytree(ram_path / "local", ram_path / f"local-{at}")
        copies[1].__dict__.update(_objects=dict(remote._objects))
        flip(next((ram_path / f"local-{at}" / newest.folder).glob("*.safetensors")))
        faulty = FaultyStore(copies[1], [Fault(kind="fail", op=op, at=at, times=3)])
        with unopened(Tiered(copies[0], faulty), tiny) as manager, suppress(StoreError):
            found = manager.resume()
            assert found is not None
            assert found.step == 2 or newest.folder in [folder for folder, _ in found.rejected]
