"""CachedStore: what is read of checkpoints is copied, and nothing is believed because of a copy."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from holdfast import CachedStore, CheckpointManager, Encryption, Last, load_weights
from holdfast.encryption.store import sealing
from holdfast.errors import CorruptData, NoCheckpoint, NotFound, UsageError
from holdfast.format import layout
from holdfast.format.suites import SEGMENT_NBYTES, TAG_NBYTES
from holdfast.keys import PrivateKey, SecretKey
from holdfast.maintenance.verify import verify
from holdfast.store.base import Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.local.pieces import PIECE_NBYTES
from holdfast.store.memory import MemoryStore
from holdfast.store.remote import RemoteOptions, RemoteStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.testing.store_contract import StoreContract, noise
from rights import read_only
from runs import Recorder, Run, new_run
from tiers import LARGE, opened
from tiers import saved as saved_in
from ways import Tiny

ROOM = 1 << 30
ATTEMPT = "step-00000001.0001-000001-0123abcd"
FILE = f"{ATTEMPT}/model-00000.safetensors"


class Counted(MemoryStore):
    """Counts the bytes that are read of each object."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.nbytes: dict[str, int] = {}

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        data = super().get(key, start, nbytes)
        self.nbytes[key] = self.nbytes.get(key, 0) + len(data)
        return data

    def of_files(self) -> dict[str, int]:
        """Of what is written once in each checkpoint, since the last call."""
        found, self.nbytes = self.nbytes, {}
        wanted = (".safetensors", ".sealed", "-00000.json", "index.json", ".zst")
        return {key: nbytes for key, nbytes in found.items() if key.endswith(wanted)}


class Wrapper(WrappedStore):
    """What a user may put around a store: it says nothing of what is in it."""

    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        self.inner.read_into(key, start, buffer, **options)


WRAPPERS = {"as it is": lambda store: store, "faulty": FaultyStore, "a user's": Wrapper}


def cached(inner: Store, folder: Path, **options: Any) -> Any:
    return CachedStore(inner, folder, **{"max_nbytes": ROOM, **options})


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("0*") if path.is_file())


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def inner() -> Counted:
    return Counted()


@pytest.fixture
def saved(inner: Counted) -> Run:
    """A run with one checkpoint of two pieces and more."""
    run = new_run(width=1024)
    with run.manager(inner, sinks=()) as manager:
        manager.save(1).wait()
    inner.of_files()
    return run


def resume(store: Store, **options: Any) -> Run:
    run = new_run(seed=1, width=1024)
    with run.manager(store, sinks=(), **options) as manager:
        manager.resume()
    return run


@pytest.mark.full
class TestCachedMemory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store: Store = cached(MemoryStore("test"), tmp_path / "cache")
        return store


@pytest.mark.full
class TestCachedFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store: Store = cached(LocalStore(tmp_path / "root"), tmp_path / "cache")
        return store


class TestCopiesOfEverything(StoreContract):
    """As if every key were that of a file of a checkpoint."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr("holdfast.loading.cached_store._is_lasting", lambda key: True)
        monkeypatch.setattr("holdfast.format.layout.parse_attempt", lambda folder: folder)
        store: Store = cached(MemoryStore("test"), tmp_path / "cache")
        return store

    def test_what_was_read_is_not_shown_after_it_was_replaced(self, store: Any) -> None:
        for data in (noise(10), noise(20, seed=1), noise(5, seed=2)):
            store.put("a", data)
            assert read(store, "a", 0, len(data)) == data
        store.delete("a")
        with pytest.raises(NotFound):
            read(store, "a", 0, 1)


def read(store: Store, key: str, start: int, nbytes: int, **options: Any) -> bytes:
    memory = bytearray(nbytes)
    store.read_into(key, start, memoryview(memory), **options)
    return bytes(memory)


# What it offers


def test_it_offers_what_the_store_offers(tmp_path: Path) -> None:
    for inner in (MemoryStore(), LocalStore(tmp_path), FaultyStore(MemoryStore())):
        store = cached(inner, tmp_path)
        for name in ("url", "has_folders", "has_links", "writes_in_place"):
            assert getattr(store, name) == getattr(inner, name)
        assert not store.reads_origin
        assert store.uncached() is inner
        assert cached(store, tmp_path / "other").uncached() is inner


def test_a_url_will_do_for_a_store(tmp_path: Path) -> None:
    assert CachedStore("memory://one", tmp_path, max_nbytes=ROOM).url == "memory://one"


@pytest.mark.parametrize("wrong", [{"max_nbytes": 10}, {"max_nbytes": 1e9}, {"wait_s": -1}])
def test_wrong_options_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        cached(MemoryStore(), tmp_path, **wrong)


def test_it_goes_to_a_process_that_is_spawned(tmp_path: Path) -> None:
    """Forked ones cannot use a store that was used before."""
    options = RemoteOptions(max_concurrency=3)
    store = CachedStore(RemoteStore("s3://b-1/run", options=options), tmp_path, max_nbytes=ROOM)
    found = pickle.loads(pickle.dumps(store))
    assert found.url == store.url
    assert isinstance(found, CachedStore)
    assert not found.has_folders
    assert found.inner._given == store.inner._given
    assert vars(found._pieces) == vars(store._pieces)


# What is copied


def test_a_second_load_reads_no_file_again(inner: Counted, saved: Run, tmp_path: Path) -> None:
    """What is read is what was saved, and each byte of a file came once."""
    manifest_files = {i.key: i.nbytes for i in inner.list() if "0001-000001" in i.key}
    for number in range(2):
        assert resume(cached(inner, tmp_path)).bits() == saved.bits()
        found = inner.of_files()
        if number == 0:
            assert {key: manifest_files[key] for key in found} == found
            assert sum(found.values()) > PIECE_NBYTES // 100
        else:
            assert found == {}


def test_weights_are_loaded_through_a_store(inner: Counted, saved: Run, tmp_path: Path) -> None:
    with saved.manager(inner, sinks=()) as manager:
        manager.resume()
        saved.train()
        manager.save(2).wait()
    model = new_run(seed=1, width=1024).model
    assert load_weights(cached(inner, tmp_path), model).step == 2
    assert load_weights(cached(inner, tmp_path), model, which="step=1").step == 1
    assert load_weights(inner, model, which=1).step == 1
    with pytest.raises(UsageError, match="@step=1"):
        load_weights(str(tmp_path), model, which="step=1")


@pytest.mark.parametrize(
    ("key", "is_kept"),
    [
        (FILE, True),
        (f"{ATTEMPT}/index.json", True),
        (f"{ATTEMPT}/model-00000.json", True),
        (f"{ATTEMPT}/model-00000.json.zst", True),
        (f"{ATTEMPT}/file-00000.sealed", True),
        (f"{ATTEMPT}/manifest.json", False),
        (f"{ATTEMPT}/keys-0001.json", False),
        (f"{ATTEMPT}/notes-0001.json", False),
        (f"{ATTEMPT}/rejected.json", False),
        (f"{ATTEMPT}/retired-00000003.json", False),
        (f"{ATTEMPT}/thinned-optimizer-00000003.json", False),
        (f"{ATTEMPT}/deeper/model-00000.json", False),
        ("writers/00000001.json", False),
        ("writers/00000001.alive.json", False),
        (f"readers/{ATTEMPT}.0123456789abcdef.json", False),
        ("requests/0123.answer", False),
        ("uploads/tiers.json", False),
        ("preflight-0123456789abcdef/model-00000.json", False),
        ("sending-0123456789abcdef/model-00000.json", False),
        ("latest", False),
        ("model-00000.json", False),
    ],
)
def test_only_what_is_written_once_is_copied(
    inner: Counted, tmp_path: Path, key: str, is_kept: bool
) -> None:
    """A manifest is asked for anew each time: a deleted checkpoint is gone for every reader."""
    inner.put(key, b"12345")
    store = cached(inner, tmp_path)
    assert [read(store, key, 1, 3) for _ in range(3)] == [b"234"] * 3
    assert inner.nbytes[key] == (5 if is_kept else 9)
    assert len(copies(tmp_path)) == is_kept
    assert store.get(key) == b"12345"
    assert inner.nbytes[key] == (10 if is_kept else 14)


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [
        (0, 2 * PIECE_NBYTES + 5),
        (0, PIECE_NBYTES),
        (PIECE_NBYTES - 1, 2),
        (PIECE_NBYTES + 3, PIECE_NBYTES),
        (2 * PIECE_NBYTES, 5),
        (2 * PIECE_NBYTES + 4, 1),
    ],
)
def test_any_range_is_exact_from_the_store_and_from_copies(
    tmp_path: Path, start: int, nbytes: int
) -> None:
    inner, data = MemoryStore(), noise(2 * PIECE_NBYTES + 5)
    inner.put(FILE, data)
    store = cached(inner, tmp_path)
    for _ in range(2):
        seen = bytearray()
        assert read(store, FILE, start, nbytes, seen=seen.extend) == data[start : start + nbytes]
        assert seen == data[start : start + nbytes]
    assert [path.stat().st_size for path in copies(tmp_path)] == [
        min(PIECE_NBYTES, len(data) - at)
        for at in range(start - start % PIECE_NBYTES, start + nbytes, PIECE_NBYTES)
    ]
    with pytest.raises(CorruptData):
        read(store, FILE, start, len(data) - start + 1)


# Damage


def test_a_damaged_copy_costs_one_more_read_and_condemns_nothing(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    """R15: and the checkpoint that is there is not rejected for it."""
    resume(cached(inner, tmp_path))
    inner.of_files()
    found = copies(tmp_path)
    assert len(found) > 5
    for path in found:
        flip(path, -1)
    assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    assert len(inner.of_files()) == len(found)
    assert not [info for info in inner.list() if info.key.endswith(layout.REJECTED)]
    assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    assert len(inner.of_files()) == len(found)  # the damaged ones were dropped, so these are kept
    assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    assert inner.of_files() == {}


@pytest.mark.parametrize(("where", "most"), [("bytes", 1), ("tags", 2)])
def test_a_damaged_copy_of_what_is_sealed_costs_a_request_for_each_piece(
    tmp_path: Path, where: str, most: int
) -> None:
    """And not some for each of its segments; with the tags behind them it may be one more."""
    inner, tiny, encrypt = MemoryStore(), Tiny(2 * LARGE), Encryption(keys=SecretKey(bytes(32)))

    def load(store: Store) -> Tiny:
        found = Tiny(2 * LARGE)
        with opened(cached(store, tmp_path), found, encrypt=encrypt, takeover=True) as manager:
            manager.resume()
        return found

    with opened(inner, tiny, encrypt=encrypt) as manager:
        saved_in(manager, tiny, 1)
    assert load(inner).step() == 1
    key = max(inner.list(), key=lambda info: info.nbytes).key
    pieces = [path for path in copies(tmp_path) if str(path.parent).endswith(key)]
    assert len(pieces) > 2
    if where == "tags":
        for number in range(2, 20):
            flip(pieces[-1], -number * TAG_NBYTES)
    else:
        for path in pieces:
            for at in range(0, path.stat().st_size, SEGMENT_NBYTES):
                flip(path, at)
    counted = FaultyStore(inner)
    assert load(counted).step() == 1
    gets = [op for op in counted.ops if op in (("get", key), ("read_into", key))]
    assert 1 <= len(gets) <= most * len(pieces)


@pytest.mark.full
@pytest.mark.parametrize("harm", ["cut", "longer", "folder", "unreadable", "link", "fifo"])
def test_a_copy_that_is_no_copy_is_passed_over(
    inner: Counted, saved: Run, tmp_path: Path, harm: str
) -> None:
    resume(cached(inner, tmp_path))
    for path in copies(tmp_path):
        data = path.read_bytes()
        path.unlink()
        if harm == "folder":
            path.mkdir()
        elif harm == "fifo":
            os.mkfifo(path)
        elif harm == "link":
            path.symlink_to("/etc/passwd")
        else:
            path.write_bytes({"cut": data[:-1], "longer": data + b"x"}.get(harm, data))
            path.chmod(0o000 if harm == "unreadable" else 0o600)
    for _ in range(2):
        assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    inner.of_files()
    assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    assert inner.of_files() == {}


def test_damage_of_the_checkpoint_itself_is_damage(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    """R15, invariant 3."""
    (key,) = [i.key for i in inner.list() if i.key.endswith("model-00000.safetensors")]
    spoil(inner, key)
    for _ in range(2):
        with pytest.raises(CorruptData, match=r"model-00000\.safetensors"):
            load_weights(cached(inner, tmp_path), saved.model)


def test_verification_reads_the_store_and_no_copy(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    """R18: neither does a sound copy hide damage, nor a damaged one make it up."""
    store = cached(inner, tmp_path)
    resume(store)
    (key,) = [i.key for i in inner.list() if i.key.endswith(layout.INDEX)]
    folder = key.partition("/")[0]
    for path in copies(tmp_path):
        flip(path, -1)
    assert verify(store, folder).ok
    resume(store)
    resume(store)
    spoil(inner, f"{folder}/model-00000.safetensors")
    assert not verify(store, folder).ok


def test_what_is_loaded_without_digests_is_not_taken_from_copies(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    """Nothing would tell that a copy is damaged."""
    resume(cached(inner, tmp_path))
    for path in copies(tmp_path):
        flip(path, -1)
    run = new_run(seed=1, width=1024)
    with run.manager(cached(inner, tmp_path), sinks=()) as manager:
        manager.load(verify=False)
    assert run.bits() == saved.bits()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_load_from_copies_does_not_vouch_for_the_checkpoint(
    inner: Counted, saved: Run, tmp_path: Path, recorder: Recorder, wrapper: str
) -> None:
    """Invariant 4, R17: what was not read where it lies proves nothing, so nothing goes for it."""
    with saved.manager(inner, sinks=()) as manager:
        manager.resume()
        saved.train()
        second = manager.save(2).wait()
    resume(cached(inner, tmp_path))
    spoil(inner, f"{second.folder}/model-00000.safetensors")
    key = "*model-00000.safetensors"
    rotting = FaultyStore(
        inner, [Fault(kind="flip", op="write", key=key), Fault(kind="flip", op="put", key=key)]
    )
    run = new_run(seed=1, width=1024)
    store = WRAPPERS[wrapper](cached(rotting, tmp_path))
    with run.manager(store, keep=Last(2), sinks=(recorder,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == second.folder  # of which there are sound copies
        run.train()
        manager.save(3).wait()
        manager.wait()
    # Of the three only the first is whole in the store, and so it is still there.
    assert recorder.of("retracted") == []
    assert load_weights(inner, run.model, which="step=1").step == 1


def spoil(store: MemoryStore, key: str) -> None:
    """Flip a bit of what is stored."""
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


# Deletion


def test_a_deleted_checkpoint_is_gone_for_whoever_has_copies(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    store = cached(inner, tmp_path)
    resume(store)
    (key,) = [i.key for i in inner.list() if i.key.endswith("model-00000.safetensors")]
    with CheckpointManager(store, saved.state, keep=Last(1), sinks=()) as manager:
        manager.resume()
        saved.train()
        manager.save(2).wait()
        manager.wait()
    with pytest.raises(NotFound):
        store.head(key)
    with pytest.raises(NoCheckpoint):
        load_weights(store, saved.model, which="step=1")
    assert key.partition("/")[0] not in {path.parent.parent.name for path in copies(tmp_path)}


# Encryption


def test_under_encryption_the_copies_are_sealed(inner: Counted, tmp_path: Path) -> None:
    """What is copied is what the store holds."""
    encrypt = Encryption(keys=SecretKey(bytes(range(32))))
    run = new_run(width=1024)
    with run.manager(inner, sinks=(), encrypt=encrypt) as manager:
        manager.save(1).wait()
    inner.of_files()
    assert resume(cached(inner, tmp_path), encrypt=encrypt).bits() == run.bits()
    found = inner.of_files()
    assert all(inner.head(key).nbytes == nbytes for key, nbytes in found.items())
    weights = run.model.state_dict()["0.weight"].numpy().tobytes()
    assert not any(weights[:64] in path.read_bytes() for path in copies(tmp_path))
    for path in copies(tmp_path):
        flip(path, path.stat().st_size // 2)
    assert resume(cached(inner, tmp_path), encrypt=encrypt).bits() == run.bits()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_under_encryption_verification_reads_the_store(
    inner: Counted, tmp_path: Path, wrapper: str
) -> None:
    """R18: the tags at the ends of files, too."""
    encrypt = Encryption(keys=SecretKey(bytes(range(32))))
    run = new_run(width=1024)
    with run.manager(inner, sinks=(), encrypt=encrypt) as manager:
        saved = manager.save(1).wait()
    store = sealing(WRAPPERS[wrapper](cached(inner, tmp_path)), encrypt)
    assert verify(store, saved.folder).ok
    assert copies(tmp_path) == []


def test_who_has_only_a_public_key_reads_back_what_he_wrote_through_copies_too(
    inner: Counted, tmp_path: Path
) -> None:
    """What this process sealed it can open, whichever way it reads."""
    public = PrivateKey(bytes(range(32))).public
    store = sealing(cached(inner, tmp_path), Encryption(keys=public))
    with new_run().manager(store, sinks=()) as manager:
        folder = manager.save(1).wait().folder
        assert verify(store, folder).ok


# What may go wrong here


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("no more copies" in record.message for record in caplog.records)


def test_a_file_where_the_folder_should_be_costs_a_warning(
    inner: Counted, saved: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"")
    store = cached(inner, tmp_path / "cache")
    for _ in range(2):
        assert resume(store).bits() == saved.bits()
    assert warnings(caplog) == 1


def test_a_folder_that_may_not_be_written_costs_a_warning(
    inner: Counted, saved: Run, open_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with read_only(open_path):
        store = cached(inner, open_path)
        for _ in range(2):
            assert resume(store).bits() == saved.bits()
    assert warnings(caplog) == 1
    assert os.listdir(open_path) == []


def test_copies_in_a_folder_that_may_not_be_written_any_more_are_read(
    inner: Counted, saved: Run, tmp_path: Path
) -> None:
    resume(cached(inner, tmp_path))
    inner.of_files()
    for folder in sorted(path for path in tmp_path.rglob("*") if path.is_dir()):
        folder.chmod(0o500)
    assert resume(cached(inner, tmp_path)).bits() == saved.bits()
    assert inner.of_files() == {}


def test_a_full_disk_costs_a_warning(
    inner: Counted, saved: Run, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R8: a load is not a save, so nothing is refused for want of room."""
    free = os.statvfs(small_disk)
    with open(small_disk / "ballast", "wb") as file:
        file.write(b"1" * (free.f_bavail * free.f_frsize - 64 * 1024))
    store = cached(inner, small_disk)
    for _ in range(2):
        assert resume(store).bits() == saved.bits()
    assert warnings(caplog) == 1
    assert sum(path.stat().st_size for path in copies(small_disk)) <= 64 * 1024
    assert not list(small_disk.rglob("*.part"))
