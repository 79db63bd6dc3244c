"""Two tiers that are sealed: the same sealed bytes in both, and nothing else in the remote one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3

from holdfast import CheckpointManager, errors
from holdfast.encryption.files import SealedFile
from holdfast.encryption.store import sealing
from holdfast.errors import AccessDenied, TransientStoreError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.envelope import decode_visible
from holdfast.format.manifest import Deleted, encode_manifest
from holdfast.format.records import WriterRecord
from holdfast.keys import Encryption, Passphrase, SecretKey, generate
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.maintenance.encrypted import rotate
from holdfast.maintenance.verify import verify_root
from holdfast.ownership.claim import Claim
from holdfast.ownership.deletion import thin
from holdfast.ownership.leases import Readers
from holdfast.ownership.tiered import share_claims
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.replication.copy_checkpoints import copy_checkpoints, plan_copies
from holdfast.replication.mirror import Mirror, repair_checkpoint
from holdfast.replication.upload import Sender, UploadInterrupted
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import diagonal, full
from runs import remove_folder
from tiers import LARGE, Noted, Switch, opened, saved, sent_nbytes, steps_in, without_backoff
from ways import Tiny

KEY = SecretKey(bytes(range(32)))
SEALS = Encryption(keys=KEY)
NEW = SecretKey(bytes(range(32, 64)))
CANARY = "kanarienvogel"


def opened_steps(store: Store, encryption: Encryption = SEALS) -> list[int]:
    """As `steps_in`, of sealed checkpoints; and they are whole for whoever has no key, too."""
    assert verify_root(store).ok
    return steps_in(sealing(store, encryption))


def newest(store: Store) -> str:
    return str(Catalog(store).attempts()[0])


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture(params=["memory", *full("folder")])
def remote(request: pytest.FixtureRequest, ram_path: Path) -> Store:
    """A remote tier of either kind."""
    return LocalStore(ram_path / "remote") if request.param == "folder" else MemoryStore("remote")


@pytest.fixture
def local(ram_path: Path) -> LocalStore:
    """The local tier."""
    return LocalStore(ram_path / "local")


@pytest.mark.parametrize(("size", "compress"), diagonal([LARGE, 64], ["zstd", None]))
def test_a_sealed_checkpoint_is_the_same_bytes_in_both_tiers(
    local: LocalStore, remote: Store, size: int, compress: Any
) -> None:
    tiny = Tiny(size)
    tiered = Tiered(local, remote, read_back=True)
    with opened(tiered, tiny, encrypt=SEALS, compress=compress, preflight=True) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    for store in (local, remote):
        assert opened_steps(store) == [2, 1]
    files = [info.key for info in local.list("step-")]
    assert files == [info.key for info in remote.list("step-")]
    assert all(local.get(key) == remote.get(key) for key in files)
    assert {key.rpartition("/")[2].split("-")[0] for key in files} == {
        "file",
        "keys",
        "manifest.json",
    }


def test_no_word_and_no_weight_crosses_in_clear(
    local: LocalStore, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R34: nor is one in the notes on uploads of either tier, in names or in errors."""
    without_backoff(monkeypatch)
    root, noted = LocalStore(ram_path / "remote"), Noted()
    words = [f"{CANARY}{number}" for number in range(6)]
    state = {f"{CANARY}a": {words[0]: torch.full((LARGE,), 3.1415927), "text": words[1]}}
    refused = AccessDenied(f"403: {CANARY}")
    faulty = FaultyStore(
        root, [Fault(kind="fail", op="put", key="*/keys-*", times=3, error=refused)]
    )
    tiered = Tiered(local, faulty, keep_local=Last(1), keep_remote=Last(2), tries=1)
    seen: list[bytes] = []
    with CheckpointManager(
        tiered, state, encrypt=SEALS, sinks=(noted, lambda _: seen.extend(notes(local)))
    ) as manager:
        manager.resume()
        for step in (1, 2, 3):
            manager.save(step, metrics={words[2]: 7.25}, tags=[words[3]] * (step == 2)).wait()
            state[f"{CANARY}a"][words[0]] += 1
        manager.tag(2, words[4])
        manager.wait()
    assert CANARY in noted.wait_for("upload_failed").message
    assert any(b"hidden" in note for note in seen)
    # Damaged here and whole there, so that it is named and mended.
    path = max(Path(local.url, newest(local)).glob("file-*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    overwrite(path, bytes(data))
    again: dict[str, Any] = {f"{CANARY}a": {words[0]: torch.zeros(LARGE), "text": ""}}
    with CheckpointManager(Tiered(local, root), again, encrypt=SEALS, sinks=(noted,)) as manager:
        assert manager.resume() is not None
        manager.wait()
    assert noted.wait_for("mended").fields["files"] == (path.name,)
    stored = [store.get(info.key) for store in (local, root) for info in store.list()]
    names = [str(path) for path in ram_path.rglob("*")]
    assert not [data for data in stored if CANARY.encode() in data]
    # Four letters come up by chance in so many megabytes that are sealed.
    documents = [data for data in stored if len(data) < 1 << 20]
    for hidden in (CANARY, "7.25", "Last"):
        assert not [name for name in names if hidden in name]
        assert not [data for data in (*documents, *seen) if hidden.encode() in data]
    weights = torch.full((16,), 3.1415927).numpy().tobytes()
    assert not [data for data in stored if weights in data]


def notes(local: Store) -> list[bytes]:
    return [local.get(info.key) for info in local.list("uploads/")]


def test_a_fresh_machine_goes_on_and_both_tiers_open(local: LocalStore, remote: Store) -> None:
    tiny = Tiny()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    other, again = LocalStore(f"{local.url}2"), Tiny()
    with opened(Tiered(other, remote), again, encrypt=SEALS) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, again.step(), found.root) == (2, 2, remote.url)
        saved(manager, again, 3)
    assert opened_steps(other) == [3]
    assert opened_steps(remote) == [3, 2, 1]


def test_what_a_forerunner_left_is_sent_and_no_file_is_opened_for_it(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a file that is whole there, not one byte again."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(LARGE), Noted()
    faulty = FaultyStore(remote, [Fault(kind="fail", op="put", key="*/keys-*", times=None)])
    tiered = Tiered(local, faulty, close_timeout_s=0, tries=1)
    with opened(tiered, tiny, encrypt=SEALS, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        noted.wait_for("upload_failed")
    arrived = sum(info.nbytes for info in remote.list("step-"))
    assert arrived > 10 * LARGE
    num_reads, again = [0], Noted()
    real = SealedFile.decrypt_range

    def read(self: SealedFile, *args: Any, **options: Any) -> None:
        num_reads[0] += 1
        real(self, *args, **options)

    monkeypatch.setattr(SealedFile, "decrypt_range", read)
    with opened(Tiered(local, remote), Tiny(LARGE), encrypt=SEALS, sinks=(again,)) as manager:
        assert manager.resume() is not None
        num_before = num_reads[0]
        manager.wait()
        assert num_reads[0] == num_before
    assert opened_steps(remote) == [1]
    assert sent_nbytes(again) < 20_000


LOST_OR_NOT: dict[str, Callable[[Path], None]] = {
    "flip": lambda path: overwrite(
        path, path.read_bytes()[:-9] + bytes([path.read_bytes()[-9] ^ 1]) + path.read_bytes()[-8:]
    ),
    "cut": lambda path: overwrite(path, path.read_bytes()[:-1]),
    "lose": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("damage", "file"), diagonal([*LOST_OR_NOT], ["smallest", "largest", "manifest.json"])
)
def test_a_damaged_local_copy_is_read_from_the_remote_tier_and_mended(
    local: LocalStore, remote: Store, damage: str, file: str
) -> None:
    """R19, R32, D31: with the bytes that it had."""
    tiny, noted = Tiny(LARGE), Noted()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    folder = newest(local)
    files = sorted(Path(local.url, folder).glob("file-*"), key=lambda path: path.stat().st_size)
    path = {"smallest": files[0], "largest": files[-1]}.get(file, Path(local.url, folder, file))
    before = path.read_bytes()
    LOST_OR_NOT[damage](path)
    with opened(Tiered(local, remote), Tiny(LARGE), encrypt=SEALS, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected) == (2, ())
        saved(manager, tiny, 3)
        if (file, damage) == ("manifest.json", "lose"):
            # Without a manifest it is no checkpoint of the local tier, which is no damage.
            assert found.root == remote.url
            return
        assert path.name in noted.wait_for("mended").fields["files"]
    assert path.read_bytes() == before
    assert opened_steps(local) == [3, 2, 1]
    assert [name for name in local.children() if name.startswith("sending-")] == []


@pytest.mark.parametrize("damage", LOST_OR_NOT)
def test_keys_that_are_lost_are_wrapped_anew_for_those_of_the_run(
    local: LocalStore, damage: str
) -> None:
    """R19, R36: not brought back from a tier in which they were not changed yet."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    folder = newest(local)
    assert {one.outcome for one in rotate(local, [KEY], [NEW])} == {"done"}
    LOST_OR_NOT[damage](Path(local.url, folder, "keys-0002.json"))
    both = Encryption(keys=NEW, also_read=KEY)
    with opened(Tiered(local, remote), tiny, encrypt=both, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected) == (2, ())
        saved(manager, tiny, 3)
        mended = noted.wait_for("mended").fields["files"]
    assert [name for name in local.children(folder) if name.startswith("keys-")] == [*mended]
    assert opened_steps(local, Encryption(keys=NEW)) == [3, 2, 1]
    with pytest.raises(errors.WrongKey):
        Catalog(sealing(local, SEALS)).read(folder)


@pytest.fixture(params=["local", "remote"])
def only(request: pytest.FixtureRequest, local: LocalStore) -> Tiered:
    """Tiers of which one has two checkpoints, and the other one has nothing."""
    tiny, other = Tiny(), MemoryStore("other")
    with opened(Tiered(local, MemoryStore("gone")), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    remove_folder(local, "uploads")
    if request.param == "local":
        return Tiered(local, other, close_timeout_s=0)
    return Tiered(other, local, close_timeout_s=0)


def everything(tiered: Tiered) -> dict[str, bytes]:
    stores = [store for store in (tiered.local, tiered.remote) if isinstance(store, Store)]
    return {f"{s.url}/{info.key}": s.get(info.key) for s in stores for info in s.list()}


@pytest.mark.parametrize(
    ("encrypt", "error"),
    [(None, errors.MissingKey), (Encryption(keys=generate()), errors.WrongKey)],
    ids=["missing", "wrong"],
)
def test_a_missing_and_a_wrong_key_are_errors_of_their_own_in_either_tier(
    only: Tiered, encrypt: Any, error: type[Exception]
) -> None:
    """R31: nothing is changed, rejected, claimed or sent."""
    before = everything(only)
    tiny = Tiny()
    with opened(only, tiny, encrypt=encrypt, takeover=True) as manager:
        with pytest.raises(error):
            manager.resume()
        with pytest.raises(error):
            manager.load(1)
        with pytest.raises(error):
            manager.save(1)
    assert everything(only) == before


def test_tampering_is_damage_in_either_tier(only: Tiered, local: LocalStore) -> None:
    """R32: not a wrong key; and a resume takes the checkpoint before."""
    folder = newest(local)
    path = max(Path(local.url, folder).glob("file-*"), key=lambda path: path.stat().st_size)
    LOST_OR_NOT["flip"](path)
    tiny = Tiny()
    with opened(only, tiny, encrypt=SEALS, takeover=True) as manager:
        with pytest.raises(errors.Tampered):
            manager.load(2)
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected[0][0]) == (1, folder)


def forged(path: Path) -> None:
    """Another time in what is visible, in a document whose digest is right again."""
    data = path.read_bytes()
    body = data[: data.rindex(b'"digest": ')].replace(b'"created": "2', b'"created": "3', 1)
    overwrite(path, body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode())


@pytest.mark.parametrize("file", ["file-00002.sealed", "manifest.json"])
def test_what_was_tampered_with_is_never_sent(
    local: LocalStore, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R32, D14: neither bytes that differ from their digest, nor a digest that nobody sealed."""
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    with opened(
        Tiered(local, remote, close_timeout_s=0), tiny, encrypt=SEALS, sinks=(noted,)
    ) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2)
        noted.wait_for("upload_failed")
        path = Path(local.url, newest(local), file)
        (forged if file == "manifest.json" else LOST_OR_NOT["flip"])(path)
        remote.error = None
        manager.wait()
        assert "cannot be sent" in noted.of("upload_failed")[-1].message
    assert opened_steps(remote) == [1]
    assert f"{newest(local)}/manifest.json" not in [info.key for info in remote.list()]
    assert Path(local.url, newest(local)).exists()


def test_what_is_from_before_the_run_was_sealed_is_not_sent_in_clear(local: LocalStore) -> None:
    """R34: and it stays in the local tier."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(local, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    accepting = Encryption(keys=KEY, accept_plain=True)
    tiered = Tiered(local, remote, keep_local=Last(1), close_timeout_s=0)
    with opened(tiered, tiny, encrypt=accepting, sinks=(noted,)) as manager:
        assert manager.resume() is not None
        saved(manager, tiny, 2)
        manager.wait()
    assert "would not be encrypted" in noted.wait_for("upload_failed").message
    assert opened_steps(remote) == [2]
    assert opened_steps(local, accepting) == [2, 1]


def test_a_copy_is_pinned_if_its_tags_cannot_be_copied(local: LocalStore) -> None:
    """R34: tags of a checkpoint from before the run was sealed do not cross in clear."""
    target, tiny = MemoryStore("target"), Tiny()
    with opened(local, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        folder = newest(local)
        [*copy_checkpoints(local, target, plan_copies(local, target, [folder]), emit=Emitter(()))]
        manager.tag(1, CANARY)
    accepting = Encryption(keys=KEY, accept_plain=True)
    ours, theirs = sealing(local, accepting), sealing(target, accepting)
    [*copy_checkpoints(ours, theirs, plan_copies(ours, theirs, [folder]), emit=Emitter(()))]
    marks = Catalog(target).marks(folder)
    assert marks.pinned
    assert not marks.tags


def test_tags_of_what_is_from_before_the_run_was_sealed_do_not_cross_in_clear(
    local: LocalStore, ram_path: Path
) -> None:
    """R34: what they keep is kept in the remote tier all the same."""
    remote, tiny = LocalStore(ram_path / "remote"), Tiny()
    accepting = Encryption(keys=KEY, accept_plain=True)
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
        manager.wait()
    with opened(local, tiny, takeover=True) as manager:
        manager.tag(1, f"{CANARY}-1")  # while nobody sends
    with opened(Tiered(local, remote), tiny, encrypt=accepting) as manager:
        manager.resume()
        for which in (1, 3):
            with pytest.raises(errors.NotSealed, match="in plain text"):
                manager.tag(which, f"{CANARY}-2")
        manager.pin(2)
    tiered = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(1))
    with opened(tiered, tiny, encrypt=accepting) as manager:
        manager.resume()
        tiny.become(3)
        manager.save(3, tags=[f"{CANARY}-3"]).wait()
        saved(manager, tiny, 4)
        manager.wait()
    assert steps_in(sealing(remote, accepting)) == [4, 3, 2, 1]
    stored = {info.key: remote.get(info.key) for info in remote.list()}
    assert not [key for key, data in stored.items() if CANARY.encode() in data]
    assert not [key for key, data in stored.items() if b"Last" in data]


def plain(data: bytes) -> bytes:
    """A manifest that is not sealed, in the place of a sealed one."""
    store, tiny = MemoryStore(), Tiny()
    with opened(store, tiny) as manager:
        saved(manager, tiny, 1)
    manifest = Catalog(store).checkpoints()[0].manifest
    sealed = decode_visible(data, what="manifest")
    names = ("save_id", "label", "epoch", "sequence")
    return encode_manifest(
        msgspec.structs.replace(manifest, **{name: getattr(sealed, name) for name in names})
    )


def test_a_plain_manifest_in_the_remote_tier_stops_nothing(local: LocalStore) -> None:
    """R32: whoever may write there has put it in the place of one that is only there."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    tiered = Tiered(local, remote, keep_local=0)
    with opened(tiered, tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        manager.wait()
    folder = newest(remote)
    key = f"{folder}/manifest.json"
    remote.put(key, plain(remote.get(key)))
    remove_folder(local, folder)
    with opened(tiered, tiny, encrypt=SEALS, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1
        assert found.rejected == ((folder, found.rejected[0][1]),)
        assert "is not encrypted" in noted.wait_for("passed_over").message
        saved(manager, tiny, 3)
        manager.wait()
    assert [entry.step for entry in Catalog(sealing(remote, SEALS)).checkpoints()] == [3, 1]


def test_a_plain_manifest_in_the_local_tier_is_tampering_and_is_mended(local: LocalStore) -> None:
    """R19, R32: what is whole in the remote tier is read there."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    key = f"{newest(local)}/manifest.json"
    before = local.get(key)
    local.put(key, plain(before))
    with opened(Tiered(local, remote), tiny, encrypt=SEALS, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected) == (2, ())
        saved(manager, tiny, 3)
        assert noted.wait_for("mended").fields["files"] == ("manifest.json",)
    assert local.get(key) == before
    assert opened_steps(local) == [3, 2, 1]


def test_a_local_copy_stays_while_nobody_can_open_the_remote_one(
    local: LocalStore, remote: Store
) -> None:
    """R1: its keys are gone there."""
    tiny, noted = Tiny(), Noted()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    remote.delete(f"{newest(remote)}/keys-0001.json")
    tiered = Tiered(local, remote, keep_local=0, close_timeout_s=0)
    with opened(tiered, tiny, encrypt=SEALS, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 2)
        manager.wait()
    assert any("lacks keys-0001.json" in event.message for event in noted.of("warning"))
    assert steps_in(sealing(local, SEALS)) == [1]


def test_a_local_copy_that_was_sent_stays_until_somebody_has_looked_at_the_remote_one(
    local: LocalStore, remote: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1, D19: saves of a new process may be faster than its first look there."""
    tiny, looks, real = Tiny(), threading.Event(), Mirror._claim_remote

    def begin(self: Mirror) -> None:
        assert looks.wait(60), "the test did not let it look"
        real(self)

    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    remote.delete(f"{newest(remote)}/keys-0001.json")
    monkeypatch.setattr(Mirror, "_claim_remote", begin)
    tiered = Tiered(local, remote, keep_local=0, close_timeout_s=0)
    with opened(tiered, tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 2, 3)
        assert 1 in steps_in(sealing(local, SEALS))
        looks.set()
        manager.wait()
    assert steps_in(sealing(local, SEALS)) == [1]


def test_a_local_copy_stays_while_nobody_can_open_what_is_left_of_the_remote_one(
    local: LocalStore, ram_path: Path
) -> None:
    """R1: where retention has dropped a part of it there, its keys are needed all the same."""
    remote, state = LocalStore(ram_path / "remote"), {"a": {"x": torch.zeros(4)}, "b": {"y": 1}}
    options: dict[str, Any] = {"encrypt": SEALS, "sinks": (), "preflight": False}
    with CheckpointManager(Tiered(local, remote), state, **options) as manager:
        manager.resume()
        for step in (1, 2, 3):
            manager.save(step).wait()
    sealed, folder = sealing(remote, SEALS), str(Catalog(local).attempts()[1])
    readers = Readers(sealed)
    claim = Claim(epoch=1, nonce="", resumed_from=None)
    removal = thin(sealed, folder, ["b"], claim=claim, reason="not needed", readers=readers)
    assert removal.is_done
    remote.delete(f"{folder}/keys-0001.json")
    tiered = Tiered(local, remote, keep_local=Last(1))
    with CheckpointManager(tiered, state, **options) as manager:
        assert manager.resume() is not None
        manager.wait()
    assert opened_steps(local) == [3, 2]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_local_copy_stays_while_the_remote_one_lacks_files(
    local: LocalStore, remote: Store, is_changed: bool
) -> None:
    """R1: also where the keys were changed in the local tier and not yet in the remote one."""
    tiny, noted, encrypt = Tiny(), Noted(), SEALS
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
    if is_changed:
        encrypt = Encryption(keys=NEW)
        assert {one.outcome for one in rotate(local, [KEY], [NEW])} == {"done"}
    remote.delete(f"{Catalog(local).attempts()[1]}/file-00001.sealed")
    tiered = Tiered(local, remote, keep_local=Last(1))
    with opened(tiered, tiny, encrypt=encrypt, sinks=(noted,)) as manager:
        assert manager.resume() is not None
        manager.wait()
    assert "lacks" in noted.of("warning")[0].message
    assert opened_steps(local, encrypt) == [3, 2], noted.events


def test_what_waits_for_its_upload_does_so_while_other_keys_are_in_use(
    local: LocalStore, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: its note stays, and so does what has arrived of it."""
    without_backoff(monkeypatch)
    root, tiny, noted = LocalStore(ram_path / "remote"), Tiny(), Noted()
    refusing = FaultyStore(root, [Fault(kind="fail", op="put", key="*/keys-*", times=None)])
    tiered = Tiered(local, refusing, close_timeout_s=0)
    with opened(tiered, tiny, encrypt=SEALS, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        noted.wait_for("upload_failed")
    folder, both = newest(local), Encryption(keys=NEW, also_read=KEY)
    arrived = [info.key for info in root.list(f"{folder}/")]
    with opened(local, tiny, encrypt=both) as manager:
        manager.resume()
        saved(manager, tiny, 2)
    with opened(Tiered(local, root), tiny, encrypt=Encryption(keys=NEW)) as manager:
        manager.resume()
        saved(manager, tiny, 3)
        manager.wait()
    assert [info.key for info in root.list(f"{folder}/")] == arrived
    report = prune_checkpoints(sealing(local, both), Last(1), emit=Emitter(()))
    assert report.postponed == [(folder, f"it waits for its upload to {root.url}")]
    with opened(Tiered(local, root), tiny, encrypt=both) as manager:
        manager.resume()
        manager.wait()
    assert 1 in opened_steps(root, both)


def test_a_run_goes_on_locally_beside_what_is_sealed_for_others(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31: also while the remote tier is away; what was left behind is no reason to stop."""
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    tiered = Tiered(local, remote, close_timeout_s=0)
    for step, encrypt in ((1, SEALS), (2, Encryption(keys=NEW, also_read=KEY))):
        with opened(tiered, tiny, encrypt=encrypt) as manager:
            manager.resume()
            saved(manager, tiny, step)
    for error in (None, TransientStoreError("no network")):
        remote.error = error
        with opened(tiered, tiny, encrypt=SEALS) as manager:
            found = manager.resume("step=1" if error is None else "latest")
            assert found is not None
            assert found.step == 1


def test_a_process_with_public_keys_only_keeps_house_in_both_tiers(
    local: LocalStore, remote: Store
) -> None:
    """It can read what it has written itself, and that is the same there."""
    pair = generate("private")
    tiny, noted = Tiny(), Noted()
    tiered = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(2))
    with opened(tiered, tiny, encrypt=Encryption(keys=pair.public), sinks=(noted,)) as manager:
        manager.resume()
        for step in (1, 2, 3, 4):
            saved(manager, tiny, step)
            manager.wait()
    assert opened_steps(local, Encryption(keys=pair)) == [4]
    assert opened_steps(remote, Encryption(keys=pair)) == [4, 3]
    assert noted.of("housekeeping_failed") == noted.of("upload_failed") == []


@pytest.mark.parametrize("new", [SecretKey(os.urandom(32)), Passphrase("a new one, long enough")])
def test_keys_are_changed_in_each_root_and_what_waits_goes_with_the_new_ones(
    local: LocalStore, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: a remote tier that was away meanwhile gets nothing that the old key opens."""
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    tiered = Tiered(local, remote, close_timeout_s=0)
    with opened(tiered, tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2)
    remote.error = None
    for store in (local, remote):
        assert {one.outcome for one in rotate(store, [KEY], [new])} == {"done"}
    with opened(tiered, tiny, encrypt=SEALS) as manager, pytest.raises(errors.WrongKey):
        manager.resume()
    with opened(tiered, tiny, encrypt=Encryption(keys=new)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        manager.wait()
    for store in (local, remote):
        assert opened_steps(store, Encryption(keys=new)) == [2, 1]
        for folder in map(str, Catalog(store).attempts()):
            with pytest.raises(errors.WrongKey):
                Catalog(sealing(store, SEALS)).read(folder)


def test_nothing_is_put_back_beside_what_was_deleted_meanwhile(local: LocalStore) -> None:
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    folder = newest(local)
    Path(local.url, folder, "keys-0001.json").unlink()
    tombstone = Deleted(save_id="0" * 32, by="writer 1", reason="no longer wanted")
    local.put(f"{folder}/manifest.json", tombstone.encode())
    with pytest.raises(errors.NoCheckpoint, match="any more"):
        repair_checkpoint(sealing(local, SEALS), sealing(remote, SEALS), folder, epoch=1)
    assert "keys-0001.json" not in local.children(folder)


def test_a_claim_forged_in_the_remote_tier_is_noticed_by_who_pins_the_newest(
    local: LocalStore, remote: Store
) -> None:
    """R37: before anything is claimed, or goes in the local one."""
    tiny = Tiny()
    with opened(Tiered(local, remote), tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        seen = manager.list()[0].seen
    older = Catalog(sealing(local, SEALS)).checkpoints()[1].reference
    claim = WriterRecord.decode(remote.get(layout.writer_key(1)), what="claim")
    changes: dict[str, Any] = {"epoch": 2, "nonce": "0" * 32, "rollback": True}
    forged = msgspec.structs.replace(claim, resumed_from=older, **changes)
    remote.put(layout.writer_key(2), forged.encode())
    before = {info.key: local.get(info.key) for info in local.list()}
    tiered = Tiered(local, remote)
    with opened(tiered, tiny, encrypt=SEALS) as manager, pytest.raises(errors.RolledBack):
        manager.resume(seen=seen)
    after = {info.key: local.get(info.key) for info in local.list()}
    assert {key: after[key] for key in before} == before


def test_nothing_is_mended_from_another_checkpoint_that_our_keys_open(
    local: LocalStore, ram_path: Path
) -> None:
    """R32: whoever writes to the remote tier can put it there, and must not reach the local one."""
    remote, other, tiny = LocalStore(ram_path / "remote"), LocalStore(ram_path / "other"), Tiny()
    for root in (Tiered(local, remote), other):
        with opened(root, tiny, encrypt=SEALS) as manager:
            manager.resume()
            saved(manager, tiny, 1)
    folder = newest(remote)
    shutil.rmtree(Path(remote.url, folder))
    shutil.copytree(Path(other.url, newest(other)), Path(remote.url, folder))
    lost = max(Path(local.url, folder).glob("file-*"), key=lambda path: path.stat().st_size)
    whole = lost.read_bytes()
    lost.unlink()
    before = {info.key: local.get(info.key) for info in local.list()}
    with pytest.raises(errors.CorruptData, match="the manifest there belongs to"):
        repair_checkpoint(sealing(local, SEALS), sealing(remote, SEALS), folder, epoch=1)
    assert {info.key: local.get(info.key) for info in local.list()} == before
    lost.write_bytes(whole)
    assert opened_steps(local) == [1]


def test_it_ends_soon_when_it_is_interrupted_while_it_compares(local: LocalStore) -> None:
    """And nothing was sent by then."""
    tiny, remote = Tiny(LARGE), MemoryStore("remote")
    with opened(local, tiny, encrypt=SEALS) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    share_claims(local, remote)
    slow = Fault(kind="hang", op="get", key="*/file-*", at=1)
    sender = Sender(sealing(FaultyStore(local, [slow]), SEALS), remote, num_threads=1, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            sender.upload_checkpoint,
            newest(local),
            epoch=1,
            on_progress=lambda cost: None,
            unclear=set(),
        )
        assert slow.reached.wait(60)
        sender.background.ask_to_stop()
        slow.release.set()
        with pytest.raises(UploadInterrupted):
            sending.result(60)
    sender.background.stop_jobs()
    assert [info.key for info in remote.list("step-")] == []


def test_a_store_that_seals_already_is_refused(local: LocalStore) -> None:
    tiered = Tiered(sealing(local, SEALS), MemoryStore("remote"))
    with pytest.raises(errors.UsageError, match="encrypt= applies to both"):
        CheckpointManager(tiered, {"a": {"b": 1}})


def test_errors_in_notes_are_stored_without_words(local: LocalStore) -> None:
    """R34: whoever writes them."""
    from holdfast.format.records import TiersRecord, UploadRecord

    ledger = Ledger(sealing(local, SEALS))
    folder = "step-00000001.0001-000001-01234567"
    ledger.put_note(
        folder,
        UploadRecord(remote="r", state="failed", nbytes=1, changed="now", error=f"no {CANARY}"),
    )
    ledger.note_tiers(TiersRecord(remote="r", changed="now", error=f"no {CANARY}"))
    for told in (ledger.read_notes()[folder], ledger.tiers()):
        assert told is not None
        assert told.error is not None
        assert CANARY not in told.error
