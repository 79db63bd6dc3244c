"""Without a key the stored bytes of a sealed checkpoint are compared, and damage is found."""

from __future__ import annotations

import random

import pytest
from tests.engine.sealed.test_sealing import KEY, SEALS, folders, saved, stored

from holdfast import CheckpointManager, errors
from holdfast.care.verify import verify, verify_root
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
        if key.endswith("manifest.json"):
            with pytest.raises(errors.NoCheckpoint):
                verify(store, folder)
        else:
            assert verify(store, folder).ok is ("notes-" in key)
        store.put(key, data)
    assert verify_root(store).ok
    assert KEY.name not in repr(verify_root(store))


def test_a_passing_error_is_no_damage_and_junk_is_told() -> None:
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    store.put(f"{folder}/more.txt", b"junk")
    faulty = FaultyStore(store, [Fault(kind="flip", op="read_into", key="*file-00000.sealed")])
    report = verify(faulty, folder)
    assert report.ok
    assert "more.txt is not listed in the manifest" in report.notes
    failing = FaultyStore(store, [Fault(kind="fail", op="read_into", key="*file-0*", times=None)])
    report = verify(failing, folder)
    assert not report.ok
    assert not any(problem.is_damage for problem in report.problems)
