"""Without a key the stored bytes of a sealed checkpoint are compared, and damage is found."""

from __future__ import annotations

import random

import pytest
import torch
from tests.encryption.test_store import KEY, SEALS, folders, saved, stored

from holdfast import CheckpointManager, errors
from holdfast.format import layout
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Deleted
from holdfast.format.records import Thinned
from holdfast.maintenance import verify_reads
from holdfast.maintenance.verify import verify, verify_root
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore


def test_damage_is_found_without_a_key_in_any_object() -> None:
    """R15, R18: a flipped bit of any file, box, mark or manifest; and no false alarm."""
    store = MemoryStore()
    saved(store, 1)
    with CheckpointManager(store, {"tiny": {}}, encrypt=SEALS, sinks=()) as manager:
        manager.tag(1, "paper")
    (folder,) = folders(store)
    assert verify(store, folder).ok
    clean, rng = stored(store), random.Random(0)
    for key, data in clean.items():
        if not key.startswith(f"{folder}/"):
            continue
        for _ in range(5):
            position = rng.randrange(len(data))
            bit = bytes([data[position] ^ 1 << rng.randrange(8)])
            store.put(key, data[:position] + bit + data[position + 1 :])
            report = verify(store, folder)
            assert [problem.file for problem in report.problems] == [key.rpartition("/")[2]]
        store.put(key, data[:-1])
        assert not verify(store, folder).ok
        store.delete(key)
        assert verify(store, folder).ok is ("notes-" in key)
        store.put(key, data)
    assert verify_root(store).ok
    assert KEY.name not in repr(verify_root(store))


def test_all_damage_is_found_without_a_key_not_only_the_first() -> None:
    """R18: a file with other bytes, one that is cut and one that is missing, at once."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    flipped, cut, gone, *_ = files = sorted(
        info.key for info in store.list(f"{folder}/") if info.key.endswith(".sealed")
    )
    data = store.get(flipped)
    store.put(flipped, data[:-1] + bytes([data[-1] ^ 1]))
    store.put(cut, store.get(cut)[:-1])
    store.delete(gone)
    problems = {problem.file: problem.message for problem in verify(store, folder).problems}
    names = [key.rpartition("/")[2] for key in files[:3]]
    messages = ["other bytes than written", "wrong length", "is missing"]
    assert problems == dict(zip(names, messages, strict=True))


def test_a_passing_error_is_no_damage_and_junk_is_told() -> None:
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    store.put(f"{folder}/more.txt", b"junk")
    faulty = FaultyStore(store, [Fault(kind="flip", op="read_into", key="*file-00000.sealed")])
    report = verify(faulty, folder)
    assert report.ok
    assert "more.txt is not listed in the manifest" in report.notes
    for error, is_damage in ((None, False), (errors.StoreError("(EIO)"), True)):
        fault = Fault(kind="fail", op="read_into", key="*file-0*", times=None, error=error)
        problems = verify(FaultyStore(store, [fault]), folder).problems
        assert problems
        assert all(problem.is_damage is is_damage for problem in problems)


NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def large() -> MemoryStore:
    """One file of many blocks."""
    store = MemoryStore()
    state = {"model": {"w": torch.zeros(NUM_BLOCKS * BLOCK_NBYTES // 4 - 1000)}}
    with CheckpointManager(store, state, encrypt=SEALS, sinks=()) as manager:
        manager.save(1).wait()
    return store


def largest(store: MemoryStore) -> str:
    return max(store.list(), key=lambda info: info.nbytes).key


def test_a_file_is_given_up_at_its_first_block_that_cannot_be_read(
    large: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try may take all the time that a store has for its own."""
    monkeypatch.setattr(verify_reads, "NUM_AHEAD", 2)
    (folder,) = folders(large)
    failing = FaultyStore(
        large, [Fault(kind="fail", key=largest(large), op="read_into", times=None)]
    )
    told: list[tuple[int, int]] = []
    report = verify(failing, folder, progress=lambda _, done, total: told.append((done, total)))
    assert [problem.file for problem in report.problems] == [largest(large).rpartition("/")[2]]
    assert failing.ops.count(("read_into", largest(large))) <= 2 * 3
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == report.nbytes


def test_one_of_many_blocks_that_is_wrong_is_found_and_once_is_no_damage(
    large: MemoryStore,
) -> None:
    (folder,) = folders(large)
    for times, is_ok in ((1, True), (None, False)):
        fault = Fault(kind="flip", key=largest(large), op="read_into", at=5, times=times)
        told: list[tuple[int, int]] = []
        report = verify(
            FaultyStore(large, [fault]),
            folder,
            progress=lambda _, done, total: told.append((done, total)),  # noqa: B023
        )
        assert report.ok is is_ok
        assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("dropped", ["all", "a file"])
def test_what_retention_takes_meanwhile_is_no_damage(
    large: MemoryStore, dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_reads, "NUM_AHEAD", 2)  # so that most is read after it was taken
    store = MemoryStore()
    for info in large.list():
        store.put(info.key, large.get(info.key))
    (folder,) = folders(store)
    file = largest(store)

    def retire(_: str, done_nbytes: int, total_nbytes: int) -> None:
        if dropped == "all":
            tombstone = Deleted(save_id="0" * 32, by="writer 1", reason="last 1")
            store.put(f"{folder}/manifest.json", tombstone.encode())
        else:
            mark = Thinned(by="writer 1", component="c0", reason="last 1").encode()
            store.put(f"{folder}/{layout.thinned_name('c0', 1)}", mark)
        store.delete(file)

    if dropped == "all":
        with pytest.raises(errors.NoCheckpoint, match="deleted"):
            verify(store, folder, progress=retire)
    else:
        assert not any(
            problem.file in file for problem in verify(store, folder, progress=retire).problems
        )


def test_a_users_file_with_the_name_of_a_mark_hides_no_missing_file() -> None:
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    store.put(f"{folder}/{layout.thinned_name('c0', 1)}", b"mine")
    assert verify(store, folder).ok
    store.delete(largest(store))
    assert not verify(store, folder).ok
