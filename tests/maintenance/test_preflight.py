"""Claims about the check before the first save: every reason at once, and nothing left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    OutcomeUnknown,
    PreflightFailed,
    StoreError,
    StoreFull,
)
from holdfast.events import Event
from holdfast.keys import Encryption, Key, Passphrase, SecretKey, ServiceKey, generate
from holdfast.maintenance.preflight import preflight
from holdfast.manager import CheckpointManager
from holdfast.store.base import Buffer, FreeSpace, Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from rights import read_only
from runs import new_run

MIB = 1024 * 1024


class Cramped(LocalStore):
    """A real folder on a disk that says it has only so much room."""

    def __init__(self, root: Path, *, nbytes: int | None, inodes: int | None) -> None:
        super().__init__(root)
        self._space = FreeSpace(nbytes=nbytes, inodes=inodes)

    def free_space(self) -> FreeSpace:
        return self._space


class Overwriting(MemoryStore):
    """A store that ignores the condition of a put, as some do."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        super().put(key, data)


class Looking(MemoryStore):
    """A store that looks whether a key is free and then writes, as OpenStack Swift does."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Barrier(8)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        is_taken = key in {info.key for info in self.list()}
        if "race" in key:
            self._looked.wait(timeout=60)
        if if_absent and is_taken:
            raise AlreadyExists(key)
        super().put(key, data)


class Approximate(MemoryStore):
    """A store that gives what there is of a range."""

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        stop = None if nbytes is None else start + nbytes
        return super().get(key)[start:stop]


class Forgetful(MemoryStore):
    """A store that does not remove what it is told to."""

    def delete(self, key: str) -> None:
        pass


def problems(store: Store, *, kept: int | None = 3, nbytes: int = MIB) -> list[str]:
    try:
        preflight(store, nbytes_per_save=nbytes, saves_kept=kept, num_files=10)
    except PreflightFailed as error:
        return error.problems
    return []


def test_a_good_place_passes_and_nothing_is_left(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    assert problems(LocalStore(root)) == []
    assert list(root.iterdir()) == []
    store = MemoryStore()
    assert problems(store) == []
    assert list(store.list()) == []


@pytest.mark.parametrize("direct_io", [None, False])
def test_how_files_will_be_written_is_told_before_the_first_save(
    tmp_path: Path, direct_io: bool | None
) -> None:
    store = LocalStore(tmp_path, direct_io=direct_io)
    seen: list[Event] = []
    with CheckpointManager(store, {"tree": {"x": 1}}, sinks=[seen.append]) as manager:
        manager.save(1).wait()
        manager.save(2).wait()
    kinds = [event.kind for event in seen]
    assert kinds.count("preflight") == 1
    assert kinds.index("preflight") < kinds.index("save_started")
    told = seen[kinds.index("preflight")].message
    assert told == f"{tmp_path}: large files are written {store.probe()}"
    assert preflight(MemoryStore(), nbytes_per_save=1, saves_kept=1, num_files=1) is None


def test_foreign_files_in_the_root_do_not_matter_and_stay(tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("mine")
    (tmp_path / "writers").mkdir()
    (tmp_path / "preflight-mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert problems(LocalStore(tmp_path)) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_root_in_use_passes(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        assert problems(LocalStore(tmp_path)) == []


@pytest.mark.parametrize(("kept", "num_saves"), [(None, 1), (1, 2), (3, 4)])
def test_room_is_asked_for_what_is_kept_and_the_one_being_written(
    tmp_path: Path, kept: int | None, num_saves: int
) -> None:
    """R8: n kept ones and one more lie on the disk at the same time."""
    enough = num_saves * (100 * MIB + 100 * 4096)
    short = num_saves * 100 * MIB - 1
    assert (
        problems(Cramped(tmp_path, nbytes=enough, inodes=None), kept=kept, nbytes=100 * MIB) == []
    )
    found = problems(Cramped(tmp_path, nbytes=short, inodes=None), kept=kept, nbytes=100 * MIB)
    assert len(found) == 1
    assert f"{short} are free" in found[0]
    assert str(tmp_path) in found[0]


def test_inodes_are_asked_for_too(tmp_path: Path) -> None:
    """R8."""
    assert problems(Cramped(tmp_path, nbytes=None, inodes=4 * 14)) == []
    found = problems(Cramped(tmp_path, nbytes=None, inodes=4 * 10 - 1))
    assert len(found) == 1
    assert "inodes" in found[0]


def test_checkpoints_that_are_there_count_as_room(tmp_path: Path) -> None:
    """A run that is resumed on a full disk is not refused: what is kept is kept already."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()
        nbytes = manager.list()[0].nbytes
    num_files = 9
    one = nbytes + (num_files + 4) * 4096
    room = Cramped(tmp_path, nbytes=2 * one, inodes=None)
    preflight(room, nbytes_per_save=nbytes, saves_kept=1, num_files=num_files)
    less = Cramped(tmp_path, nbytes=one - 1, inodes=None)
    with pytest.raises(PreflightFailed, match="room"):
        preflight(less, nbytes_per_save=nbytes, saves_kept=1, num_files=num_files)


def test_a_store_whose_puts_are_not_atomic_is_found_out() -> None:
    """R25, R10: it honours the condition when nobody else puts."""
    found = problems(Looking())
    assert len(found) == 1
    assert "8 of 8 puts of one key" in found[0]
    assert "memory://" in found[0]


def test_a_store_that_gives_other_ranges_is_found_out() -> None:
    found = problems(Approximate())
    assert len(found) == 1
    assert "past the end" in found[0]


def test_a_store_that_ignores_if_absent_is_found_out() -> None:
    """R25: before any data is trusted to it."""
    store = Overwriting()
    found = problems(store)
    assert len(found) == 1
    assert "two writers would destroy each other's checkpoints" in found[0]
    assert list(store.list()) == []


def test_a_store_that_does_not_delete_is_found_out() -> None:
    found = problems(Forgetful())
    assert len(found) == 1
    assert found[0].startswith("deleting: ")


def test_a_store_that_gives_other_bytes_back_is_found_out() -> None:
    store = FaultyStore(MemoryStore(), [Fault(kind="flip", op="get", times=None)])
    assert set(problems(store)) == {
        "reading back returned different bytes from those written: memory://"
    }


@pytest.mark.parametrize(
    ("op", "at", "start"),
    [
        ("make_folder", 0, "making a folder: "),
        ("put", 0, "putting an object that is not there yet: "),
        ("put", 1, "putting over a taken key: refused with the wrong error: "),
        ("put", 2, "replacing an object: "),
        ("get", 0, "reading back: "),
        ("create", 0, "creating a file: "),
        ("write", 1, "writing a file: "),
        ("finish", 0, "writing a file: "),
        ("delete", 0, "deleting: "),
        ("free_space", 0, "room: "),
        ("probe", 0, "trying how to write: "),
    ],
)
def test_each_refusal_is_a_problem_that_says_what_failed(
    tmp_path: Path, op: str, at: int, start: str
) -> None:
    """R6."""
    fault = Fault(kind="fail", op=op, at=at, error=AccessDenied("Permission denied (EACCES)"))  # type: ignore[arg-type]
    found = problems(FaultyStore(LocalStore(tmp_path), [fault]))
    assert found == [f"{start}Permission denied (EACCES)"]
    if op != "delete":
        assert list(tmp_path.iterdir()) == []


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    full = StoreFull("No space left on device (ENOSPC)")
    store = FaultyStore(
        Cramped(tmp_path, nbytes=5, inodes=2),
        [
            Fault(kind="fail", op="put", error=full),
            Fault(kind="fail", op="create", error=full),
            Fault(kind="fail", op="delete", error=full),
        ],
    )
    found = problems(store)
    assert [problem.split(":")[0] for problem in found] == [
        "room",
        "room",
        "putting an object that is not there yet",
        "creating a file",
        "deleting",
    ]


def test_an_error_of_the_program_still_removes_the_scratch_folder(tmp_path: Path) -> None:
    class Broken(LocalStore):
        def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        problems(Broken(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = problems(LocalStore(tmp_path / "file" / "root"))
    assert found[-1].startswith("making a folder: ")
    assert all("not a folder" in problem for problem in found)


def test_a_folder_without_permission_is_refused(open_path: Path) -> None:
    with read_only(open_path):
        found = problems(LocalStore(open_path / "root"))
    assert len(found) == 1
    assert "EACCES" in found[0]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that takes no files")
def test_a_file_system_that_takes_no_files_is_refused() -> None:
    assert problems(LocalStore("/proc/self/holdfast"))


def test_a_manager_refuses_to_begin_where_saves_would_fail(tmp_path: Path) -> None:
    """R8: nothing is claimed, so nothing has to be cleaned up."""
    manager = new_run().manager(Cramped(tmp_path, nbytes=100, inodes=None))
    with pytest.raises(PreflightFailed, match="100 are free"):
        manager.save(1)
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_store_errors_are_the_only_ones_that_count_as_problems() -> None:
    store = FaultyStore(MemoryStore(), [Fault(kind="stop_before", op="put")])
    with pytest.raises(BaseException) as caught:
        problems(store)
    assert not isinstance(caught.value, StoreError | PreflightFailed)


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
@pytest.mark.parametrize(("key", "at"), [("register", 0), ("register", 1), ("race-0", 0)])
def test_a_reply_that_a_network_loses_is_no_refusal(kind: Any, key: str, at: int) -> None:
    """R25: only what a commit could not live with is one."""
    lost = OutcomeUnknown("no reply")
    fault = Fault(kind=kind, op="put", key=f"*/{key}", at=at, error=lost)
    store = FaultyStore(MemoryStore(), [fault])
    preflight(store, nbytes_per_save=1, saves_kept=None, num_files=1)
    assert fault.reached.is_set()
    assert store.children() == ()


class Vault:
    """A service that keeps what it wraps, and counts how often it is asked."""

    def __init__(self, *, unwraps: bool = True, gives: bytes | None = None) -> None:
        self.wrapped: dict[bytes, bytes] = {}
        self.num_unwraps = 0
        self._unwraps, self._gives = unwraps, gives

    def wrap(self, data: bytes, context: Any) -> bytes:
        ticket = os.urandom(8)
        self.wrapped[ticket] = data
        return ticket

    def unwrap(self, ticket: bytes, context: Any) -> bytes:
        self.num_unwraps += 1
        if not self._unwraps:
            raise PermissionError("kms:Decrypt is not allowed")
        return self.wrapped[ticket] if self._gives is None else self._gives

    @property
    def key(self) -> ServiceKey:
        return ServiceKey("vault", self.wrap, self.unwrap)


@pytest.mark.parametrize(
    ("vault", "why"),
    [
        (Vault(unwraps=False), "kms:Decrypt is not allowed"),
        (Vault(gives=bytes(32)), "not the data key"),
        (Vault(gives=b""), "instead of bytes"),
    ],
)
def test_a_service_that_wraps_and_does_not_unwrap_is_found_before_the_first_save(
    vault: Vault, why: str
) -> None:
    """R31: nobody could read what was saved, and nobody would know before it is needed."""
    store = MemoryStore()
    encrypt = Encryption(keys=[generate(), vault.key])
    with new_run().manager(store, encrypt=encrypt, sinks=()) as manager:
        with pytest.raises(
            PreflightFailed, match="service vault cannot decrypt what it encrypted"
        ) as e:
            manager.save(1)
        assert why in str(e.value)
    assert [*store.list()] == []


def test_keys_are_tried_once_for_a_manager() -> None:
    vault = Vault()
    with new_run().manager(MemoryStore(), encrypt=Encryption(keys=vault.key), sinks=()) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()
    assert vault.num_unwraps == 1
    assert len(vault.wrapped) == 1 + 3


def _public() -> Key:
    private = generate("private")
    assert not isinstance(private, SecretKey)
    return private.public


@pytest.mark.parametrize(
    "key",
    [
        _public,
        lambda: ServiceKey("vault", Vault().wrap, None),
        lambda: generate("private"),
        lambda: Passphrase("correct horse battery"),
    ],
)
def test_a_key_that_is_only_to_wrap_is_taken_at_its_word(key: Any) -> None:
    """And read back by the process that wrote it, for as long as that lives."""
    store = MemoryStore()
    with new_run().manager(store, encrypt=Encryption(keys=key()), sinks=()) as manager:
        manager.save(1).wait()
        assert [found.step for found in manager.list()] == [1]
