"""Mending a local checkpoint: by right bytes only, and by its owner only."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.events import Emitter
from holdfast.maintenance.verify import verify
from holdfast.ownership.annotations import reject
from holdfast.ownership.claim import Choice, claim_run
from holdfast.ownership.tiered_options import Tiered
from holdfast.replication.mirror import repair_checkpoint
from holdfast.replication.upload import UploadInterrupted
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from holdfast.threads.workers import Background
from marks import full
from tiers import LARGE, opened, saved
from ways import Tiny

FILE = "tiny-00000.safetensors"


@pytest.fixture
def remote() -> MemoryStore:
    return MemoryStore("remote")


@pytest.fixture
def local(ram_path: Path, remote: MemoryStore) -> LocalStore:
    """A local tier with a checkpoint whose largest file has a flipped bit."""
    store, tiny = LocalStore(ram_path / "local"), Tiny(LARGE)
    with opened(Tiered(store, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    path = Path(store.url) / folder_of(store) / FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    return store


def folder_of(store: LocalStore) -> str:
    return Catalog(store).checkpoints()[0].folder


def test_it_replaces_what_is_damaged_and_nothing_else(
    local: LocalStore, remote: MemoryStore
) -> None:
    folder = folder_of(local)
    reject(local, folder, by="resume", reason="a flipped bit")
    untouched = Path(local.url) / folder / "rng-00000.safetensors"
    before = untouched.stat().st_ino
    assert repair_checkpoint(local, remote, folder, epoch=1) == (FILE,)
    assert untouched.stat().st_ino == before
    assert verify(local, folder).ok
    assert not Catalog(local).marks(folder).rejected
    assert repair_checkpoint(local, remote, folder, epoch=1) == ()


def test_wrong_bytes_do_not_mend(local: LocalStore, remote: MemoryStore) -> None:
    """D14: the damaged file stays as it is."""
    folder = folder_of(local)
    damaged = local.get(f"{folder}/{FILE}")
    data = bytearray(remote.get(f"{folder}/{FILE}"))
    data[-1] ^= 1
    remote.put(f"{folder}/{FILE}", data)
    with pytest.raises(errors.CorruptData):
        repair_checkpoint(local, remote, folder, epoch=1)
    assert local.get(f"{folder}/{FILE}") == damaged
    assert [name for name in local.children() if name.startswith("sending-")] == []


def test_who_was_superseded_mends_nothing(local: LocalStore, remote: MemoryStore) -> None:
    """R10."""
    folder = folder_of(local)
    damaged = local.get(f"{folder}/{FILE}")
    claim_run(local, repeat(Choice(point=None, is_rollback=True)), takeover=True, emit=Emitter(()))
    with pytest.raises(errors.Superseded):
        repair_checkpoint(local, remote, folder, epoch=1)
    assert local.get(f"{folder}/{FILE}") == damaged


def test_an_interrupted_repair_leaves_the_file(local: LocalStore, remote: MemoryStore) -> None:
    """The run may be claimed, or the process end, before all of it was fetched."""
    folder, background = folder_of(local), Background("a test", num_threads=2)
    damaged = local.get(f"{folder}/{FILE}")
    background.ask_to_stop()
    with pytest.raises(UploadInterrupted):
        repair_checkpoint(local, remote, folder, epoch=1, background=background)
    assert local.get(f"{folder}/{FILE}") == damaged
    assert [name for name in local.children() if name.startswith("sending-")] == []
    background.proceed()
    assert repair_checkpoint(local, remote, folder, epoch=1, background=background) == (FILE,)


@pytest.mark.parametrize("kind", ["stop_after", *full("stop_before")])
def test_a_stop_anywhere_leaves_what_can_be_mended(
    local: LocalStore, remote: MemoryStore, kind: str
) -> None:
    """R1."""
    folder, at = folder_of(local), 0
    while True:
        faulty = FaultyStore(local, [Fault(kind=kind, at=at)])  # type: ignore[arg-type]
        try:
            repair_checkpoint(faulty, remote, folder, epoch=1)
        except Stopped:
            at += 1
            continue
        break
    assert at > 5
    repair_checkpoint(local, remote, folder, epoch=1)
    assert verify(local, folder).ok
