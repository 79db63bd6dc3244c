"""Changing keys: only boxes are written, and a stop anywhere leaves checkpoints that open."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.encryption.test_store import KEY, SEALS, Tiny, folders, resumed, saved, stored

from holdfast import CheckpointManager, errors
from holdfast.encryption.store import SealedStore
from holdfast.format.envelope import MAX_STRETCHING_KIB, KeyBox, decode_box, encode_box
from holdfast.keys import Encryption, Passphrase, PrivateKey, SecretKey, ServiceKey, generate
from holdfast.maintenance.encrypted import (
    Rekeyed,
    Sealed,
    read_sealed_manifest,
    rotate,
    sealed_in,
)
from holdfast.maintenance.verify import verify_root
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from marks import full

NEW = SecretKey(bytes(range(32, 64)))
OPENS_NEW = Encryption(keys=NEW)


def test_after_a_rotation_the_new_keys_open_and_the_old_ones_do_not() -> None:
    """R36: nothing but boxes is written, so that the rest is as it was, byte by byte."""
    store = MemoryStore()
    saved(store, 1, 2)
    before = stored(store)
    done = [*rotate(store, [KEY], [NEW])]
    assert [item.outcome for item in done] == ["done", "done"]
    assert resumed(store, OPENS_NEW) == 2
    with pytest.raises(errors.WrongKey):
        resumed(store, SEALS)
    after = stored(store)
    assert {k: v for k, v in after.items() if k in before and "/keys-" not in k} == {
        k: v for k, v in before.items() if "/keys-" not in k
    }
    assert sorted(key.rpartition("/")[2] for key in after if "/keys-" in key) == [
        "keys-0002.json",
        "keys-0002.json",
    ]
    assert [item.outcome for item in rotate(store, [KEY], [NEW])] == ["was so", "was so"]


def test_old_keys_may_be_kept_and_several_keys_can_open() -> None:
    store = MemoryStore()
    saved(store, 1)
    private = generate("private")
    assert isinstance(private, PrivateKey)
    [done] = rotate(store, [KEY], [NEW, private.public], keeps_old=True)
    assert done.outcome == "done"
    (folder,) = folders(store)
    found = read_sealed_manifest(store, folder)
    assert found is not None
    assert len(found.recipients) == 3
    assert verify_root(store).ok
    for key in (KEY, NEW, private):
        assert verify_root(SealedStore(store, Encryption(keys=key))).ok


def test_a_wrong_key_rotates_nothing_and_says_so() -> None:
    store = MemoryStore()
    saved(store, 1, encrypt=None)
    plain = folders(store)
    saved(store, 2, 3, encrypt=Encryption(keys=KEY, accept_plain=True), takeover=True)
    before = stored(store)
    done = [*rotate(store, [generate()], [NEW])]
    assert [item.outcome for item in done] == ["failed", "failed"]
    assert "encrypted for secret" in done[0].reason
    assert stored(store) == before
    assert read_sealed_manifest(store, plain[0]) is None


def test_a_run_under_way_goes_on_with_the_keys_that_it_was_given() -> None:
    """And opens what was rotated meanwhile, because it has opened it before."""
    store = MemoryStore()
    tiny = Tiny()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=SEALS, sinks=(), preflight=False
    ) as manager:
        tiny.become(1)
        manager.save(1).wait()
        assert [item.outcome for item in rotate(store, [KEY], [NEW])] == ["done"]
        tiny.become(2)
        manager.save(2).wait()
        manager.load(1)
        assert tiny.step() == 1
    both = Encryption(keys=NEW, also_read=KEY)
    assert resumed(store, both) == 1  # where the run went back to
    assert [item.outcome for item in rotate(store, [KEY], [NEW])] == ["done", "was so"]
    assert verify_root(SealedStore(store, OPENS_NEW)).ok


@pytest.mark.parametrize("stride", [9, *full(1)])
def test_a_stop_at_any_operation_leaves_every_checkpoint_readable(stride: int) -> None:
    """R36: with the old or the new key; and running it again finishes it."""
    clean = MemoryStore()
    saved(clean, 1, 2, 3)
    objects = stored(clean)

    def copy() -> MemoryStore:
        store = MemoryStore()
        for key, data in objects.items():
            store.put(key, data)
        return store

    counted: Any = FaultyStore(copy())
    assert len([*rotate(counted, [KEY], [NEW])]) == 3
    for at in range(0, len(counted.ops), stride):
        for kind in ("stop_before", "stop_after", "fail", "lose_reply"):
            store = copy()
            faulty = FaultyStore(store, [Fault(kind=kind, at=at)])  # type: ignore[arg-type]
            with suppress(Stopped, errors.HoldfastError):
                list(rotate(faulty, [KEY], [NEW]))
            both = SealedStore(store, Encryption(keys=NEW, also_read=KEY))
            assert verify_root(both).ok, (at, kind)
            assert all(item.outcome != "failed" for item in rotate(store, [KEY], [NEW]))
            assert verify_root(SealedStore(store, OPENS_NEW)).ok, (at, kind)
            names = [key for key in stored(store) if "/keys-" in key]
            assert len(names) == 3, (at, kind)


def test_a_damaged_box_is_passed_over_while_another_opens() -> None:
    store = MemoryStore()
    saved(store, 1)
    [*rotate(store, [KEY], [NEW], keeps_old=True)]
    (folder,) = folders(store)
    store.put(f"{folder}/keys-0002.json", b"junk")
    assert resumed(store, SEALS) == 1
    with pytest.raises(errors.WrongKey):
        resumed(store, OPENS_NEW)
    store.put(f"{folder}/keys-0001.json", store.get(f"{folder}/manifest.json"))
    with pytest.raises(errors.NoUsableCheckpoint, match="keys-000"):
        resumed(store, SEALS)
    (found,) = sealed_in(store)
    assert isinstance(found, Rekeyed)
    assert not isinstance(found, Sealed)
    assert found.outcome == "failed"


def test_a_key_that_was_replaced_is_in_no_box_that_is_left() -> None:
    """R36: neither beside a key that was named twice, nor in a box that could not be read."""
    store = MemoryStore()
    saved(store, 1, encrypt=Encryption(keys=[KEY, NEW]))
    (folder,) = folders(store)
    assert [item.outcome for item in rotate(store, [KEY], [NEW, NEW])] == ["done"]
    with pytest.raises(errors.WrongKey):
        resumed(store, SEALS)
    third = generate()
    for number in ("0001", "0007"):
        box = store.get(f"{folder}/keys-0002.json")
        store.put(f"{folder}/keys-{number}.json", box[:-1])
    assert [item.outcome for item in rotate(store, [NEW], [third])] == ["done"]
    assert [key for key in stored(store) if "/keys-" in key] == [f"{folder}/keys-0003.json"]
    assert resumed(store, Encryption(keys=third)) == 1


def test_a_box_under_the_last_number_costs_no_checkpoint() -> None:
    """R36: who may only add objects cannot make a rotation remove every key."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    store.put(f"{folder}/keys-9999.json", store.get(f"{folder}/keys-0001.json"))
    before = stored(store)
    (done,) = rotate(store, [KEY], [NEW])
    assert (done.outcome, "no number is left" in done.reason) == ("failed", True)
    assert stored(store) == before
    store.delete(f"{folder}/keys-9999.json")
    assert [item.outcome for item in rotate(store, [KEY], [NEW])] == ["done"]
    assert resumed(store, OPENS_NEW) == 1


@pytest.mark.parametrize("answer", [ConnectionError("no route"), b"1" * 32, None])
def test_old_keys_go_only_when_the_new_ones_open(answer: object) -> None:
    """R36: a service that wraps and does not unwrap would be the only one left."""

    def unwrap(data: bytes, context: object) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    store = MemoryStore()
    saved(store, 1)
    before = stored(store)
    service = ServiceKey("vault", lambda data, context: data, unwrap)
    (done,) = rotate(store, [KEY], [service])
    assert (done.outcome, "vault" in done.reason) == ("failed", True)
    assert stored(store) == before
    assert [item.outcome for item in rotate(store, [KEY], [generate("private").public])]  # type: ignore[union-attr]


def test_hostile_passphrases_in_many_boxes_are_not_tried() -> None:
    """R29: together they take as much as one box may; the keys beside them still open."""
    store = MemoryStore()
    phrase = Passphrase("correct horse battery")
    saved(store, 1, encrypt=Encryption(keys=[KEY, phrase]))
    (folder,) = folders(store)
    box = decode_box(store.get(f"{folder}/keys-0001.json"), what="box")
    recipient = box.recipients[1]
    assert recipient.argon2 is not None
    for number in range(2, 12):
        how = msgspec.structs.replace(
            recipient.argon2, salt=f"{number:032x}", memory_kib=2**20, passes=15
        )
        part = msgspec.structs.replace(recipient, argon2=how)
        bad = KeyBox(commitment=box.commitment, recipients=(part,))
        store.put(f"{folder}/keys-{number:04d}.json", encode_box(bad))
    found = read_sealed_manifest(store, folder)
    assert found is not None
    assert sorted(found.boxes) == [1, 11]
    assert sum(part.stretching_kib for part in found.boxes.values()) <= MAX_STRETCHING_KIB
    assert resumed(store, SEALS) == 1
