"""Sealed checkpoints: whole runs through a store that seals, and attacks on what it stores."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from aead import noting
from holdfast import CheckpointManager, Last, errors, load_weights
from holdfast.encryption.files import REDACTED, redact_record
from holdfast.encryption.store import SealedStore, sealing
from holdfast.format import layout, suites
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Deleted, decode_register
from holdfast.format.records import AnswerRecord, Notes
from holdfast.format.suites import SEGMENT_NBYTES
from holdfast.keys import Encryption, Passphrase, SecretKey, ServiceKey, generate
from holdfast.maintenance.delete import preview
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify, verify_root
from holdfast.policy.rules import All
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from marks import full
from runs import Recorder, begun, new_run, remove_folder, retracted
from ways import Tiny

KEY = SecretKey(bytes(range(32)))
SEALS = Encryption(keys=KEY)
SUITES = ("aes-256-gcm", "chacha20-poly1305", "sm4-gcm")
CANARY = "kanarienvogel"


def stored(store: Any) -> dict[str, bytes]:
    """Every object as it is stored."""
    return {info.key: store.get(info.key) for info in store.list()}


def folders(store: Any) -> list[str]:
    return sorted(name.rstrip("/") for name in store.children() if name.startswith("step"))


def saved(store: Any, *steps: int, **options: Any) -> Tiny:
    tiny = Tiny()
    options = {"encrypt": SEALS, "sinks": (), "preflight": False, **options}
    with CheckpointManager(store, {"tiny": tiny.tree}, **options) as manager:
        manager.resume()
        for step in steps:
            tiny.become(step)
            manager.save(step).wait()
            manager.wait()
    return tiny


def resumed(store: Any, encrypt: Encryption | None = SEALS, **options: Any) -> int:
    tiny = Tiny()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=encrypt, sinks=(), preflight=False, takeover=True
    ) as manager:
        found = manager.resume(**options)
        assert found is not None
        assert found.step == tiny.step()
        return found.step


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_sealed_run_goes_on_bit_for_bit(
    suite: Any, compress: Any, is_local: bool, tmp_path: Path
) -> None:
    """Invariant 7: N+M steps, and N steps, a resume, M steps."""
    store = LocalStore(tmp_path / "root") if is_local else MemoryStore()
    options: dict[str, Any] = {
        "encrypt": Encryption(keys=KEY, suite=suite),
        "compress": compress,
        "preflight": is_local,
    }
    whole = new_run()
    whole.train(5)
    first = new_run()
    with first.manager(store, **options) as manager:
        first.train(3)
        manager.save(3, metrics={"loss": 0.5}, tags=["mark"]).wait()
    second = new_run(seed=9)
    with second.manager(store, **options) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.metrics, found.tags) == (3, {"loss": 0.5}, ("mark",))
        second.train(2)
    assert second.bits() == whole.bits()
    sealed = SealedStore(store, options["encrypt"])
    assert verify_root(sealed).ok
    assert verify_root(store).ok  # the stored bytes, without a key


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("nbytes", [0, 1, SEGMENT_NBYTES, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 12345])
def test_files_of_any_length_are_read_at_any_place(
    compress: Any, nbytes: int, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path)
    state = {"w": torch.randint(0, 9, (nbytes,), dtype=torch.uint8)}
    options: dict[str, Any] = {"encrypt": SEALS, "compress": compress, "sinks": ()}
    with CheckpointManager(store, {"state": state}, **options) as manager:
        manager.save(1).wait()
    again = {"w": torch.zeros(nbytes, dtype=torch.uint8)}
    with CheckpointManager(store, {"state": again}, **options) as manager:
        manager.resume()
    assert torch.equal(again["w"], state["w"])
    if compress is None:
        (folder,) = folders(store)
        sealed: Any = SealedStore(store, SEALS)
        key = f"{folder}/state-00000.safetensors"
        image = sealed.get(key)
        assert sealed.head(key).nbytes == len(image)
        rng = random.Random(nbytes)
        for _ in range(50):
            start = rng.randint(0, len(image))
            stop = rng.randint(start, min(len(image), start + 3 * SEGMENT_NBYTES))
            assert sealed.get(key, start, stop - start) == image[start:stop]
            buffer = bytearray(stop - start)
            pieces: list[bytes] = []
            sealed.read_into(
                key, start, memoryview(buffer), seen=lambda p, to=pieces: to.append(bytes(p))
            )
            assert b"".join(pieces) == bytes(buffer) == image[start:stop]
        with pytest.raises(errors.CorruptData):
            sealed.get(key, len(image), 1)


def canary_run(root: Path) -> list[str]:
    """A run whose every word is a canary; gives what a reader of the store must not find."""
    words = [f"{CANARY}{number}" for number in range(9)]
    weights = torch.full((1234567,), 3.1415927)
    run = {
        f"{CANARY}a": {words[0]: weights},
        f"{CANARY}b": {"text": words[1], words[2]: [1, 2]},
    }
    keep = Last(1) | All().then_drop(f"{CANARY}b")
    with CheckpointManager(
        root, run, encrypt=SEALS, keep=keep, sinks=(), run_name=words[3]
    ) as manager:
        for step in (1, 2, 3):
            manager.save(
                step, metrics={words[4]: 7.251953125}, tags=[words[5]] * (step == 2)
            ).wait()
            manager.wait()
            weights += 1
        manager.tag(3, words[6])
        manager.pin(3)
    # A flipped byte in the newest, whose tensor the rejection names.
    newest = max(root.glob("step-*"))
    largest = max(newest.glob("file-*"), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    with largest.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\0\xff\0")
    return [*words, CANARY, "1234567", "7.251953125"]


def test_no_word_and_no_weight_is_stored_in_clear(tmp_path: Path) -> None:
    """R34: names, shapes, metrics, tags, marks, dropped components and weights, in bytes, names
    and what is read without a key."""
    root = tmp_path / "root"
    hidden = canary_run(root)
    again = {f"{CANARY}a": {hidden[0]: torch.zeros(1234567)}, f"{CANARY}b": {}}
    with CheckpointManager(root, again, encrypt=SEALS, sinks=()) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        assert f"{CANARY}a.{hidden[0]}" in found.rejected[0][1]
    assert [*root.glob("step-*/rejected.json")]
    store = LocalStore(root)
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    assert [path for path in paths if "thinned-c1-" in path]
    for name in hidden:
        assert not [path for path in paths if name in path]
        assert not [key for key, data in stored(store).items() if name.encode() in data]
    weights = torch.full((16,), 3.1415927).numpy().tobytes()
    assert not [key for key, data in stored(store).items() if weights in data]
    assert CANARY not in repr(verify_root(store))


def test_a_tombstone_tells_no_rule(tmp_path: Path) -> None:
    """R34."""
    tiny = saved(tmp_path, 1, 2, 3, keep=Last(1))
    assert tiny.step() == 3
    words = b"".join(stored(LocalStore(tmp_path)).values())
    assert b"Last(" not in words  # four letters alone come in base64 by chance


WRONG: dict[str, Callable[[], Encryption]] = {
    "secret": lambda: Encryption(keys=generate()),
    "private": lambda: Encryption(keys=generate("private")),
    "service": lambda: Encryption(keys=ServiceKey("other", lambda d, c: d, lambda d, c: d)),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_key_is_an_error_of_its_own_and_shows_nothing(kind: str, tmp_path: Path) -> None:
    """R31: for 1,000 keys in all; nothing is changed, rejected or claimed."""
    hidden = canary_run(tmp_path / "root")
    store = MemoryStore()
    for key, data in stored(LocalStore(tmp_path / "root")).items():
        store.put(key, data)
    before = stored(store)
    for _ in range(334):
        live = {f"{CANARY}a": {hidden[0]: torch.zeros(1234567)}, f"{CANARY}b": {}}
        sealed = sealing(store, WRONG[kind]())
        with pytest.raises(errors.WrongKey, match="encrypted for secret") as caught:
            Catalog(sealed).find_checkpoint("latest")
        assert CANARY not in str(caught.value)
        assert CANARY not in repr(vars(sealed))
    with CheckpointManager(
        store, live, encrypt=WRONG[kind](), sinks=(), takeover=True, preflight=False
    ) as manager:
        with pytest.raises(errors.WrongKey):
            manager.resume()
        with pytest.raises(errors.WrongKey):
            manager.load(2)
    assert not any(live[f"{CANARY}a"][hidden[0]].flatten())
    assert stored(store) == before


def test_a_wrong_passphrase_and_a_wrong_context_are_wrong_keys() -> None:
    """R31: a service that binds the data key to its context refuses another's."""
    store = MemoryStore()
    saved(store, 1, encrypt=Encryption(keys=Passphrase("correct horse battery")))
    with pytest.raises(errors.WrongKey, match="encrypted for passphrase"):
        resumed(store, Encryption(keys=Passphrase("correct horse batterx")))
    assert resumed(store, Encryption(keys=Passphrase("correct horse battery"))) == 1

    vault: dict[bytes, tuple[bytes, dict[str, str]]] = {}

    def wrap(data: bytes, context: Any) -> bytes:
        vault[ticket := os.urandom(8)] = (data, dict(context))
        return ticket

    def unwrap(ticket: bytes, context: Any) -> bytes:
        data, known = vault[ticket]
        if known != context:
            raise PermissionError("another context")
        return data

    other = MemoryStore()
    service = Encryption(keys=ServiceKey("vault", wrap, unwrap))
    saved(other, 1, encrypt=service)
    assert resumed(other, service) == 1
    for ticket, (data, context) in vault.items():
        vault[ticket] = (data, {**context, "purpose": "something else"})
    with pytest.raises(errors.KeyUnavailable, match="vault refused: another context"):
        resumed(other, service)


def test_without_a_key_nothing_is_read_rejected_or_removed() -> None:
    """R31: and gc, without a key, knows what is committed."""
    store = MemoryStore()
    saved(store, 1, 2)
    before = stored(store)
    with pytest.raises(errors.MissingKey, match="no key was given"):
        resumed(store, None)
    assert collect_garbage(store).removed == []
    (report, _) = verify_root(store).checkpoints
    assert report.ok
    assert "encrypted" in report.notes[0]
    assert stored(store) == before


def test_what_is_not_sealed_is_refused_unless_it_is_accepted() -> None:
    """R32: nobody puts a plain checkpoint of his own in the place of a sealed one."""
    store = MemoryStore()
    saved(store, 1, encrypt=None)
    with pytest.raises(errors.NotSealed, match="accept_plain"):
        resumed(store)
    accepting = Encryption(keys=KEY, accept_plain=True)
    assert resumed(store, accepting) == 1
    saved(store, 2, encrypt=accepting, takeover=True)
    assert resumed(store) == 2
    assert not [key for key in stored(store) if key.endswith("rejected.json")]


def test_a_plain_checkpoint_among_sealed_ones_stops_nothing() -> None:
    """R32: whoever writes to the store can put one there; it is named, not marked, and stays."""
    store, other, recorder = MemoryStore(), MemoryStore(), Recorder()
    saved(store, 1, 2)
    saved(other, 1, 2, 3, encrypt=None)
    planted = folders(other)[-1]
    for key, data in stored(other).items():
        if key.startswith(planted):
            store.put(key, data)
    before = {key: data for key, data in stored(store).items() if key.startswith(planted)}
    catalog = Catalog(sealing(store, SEALS))
    assert catalog.find_checkpoint("latest").step == 2
    for named in (3, planted):
        with pytest.raises(errors.NotSealed, match="accept_plain"):
            catalog.find_checkpoint(named)
    with pytest.raises(errors.NotSealed, match="accept_plain"):
        catalog.find_checkpoint("step=99")
    assert resumed(store) == 2
    saved(store, 4, sinks=(recorder,), keep=Last(1))
    (event,) = [event for event in recorder.of("passed_over") if event.fields["folder"] == planted]
    assert "is not encrypted" in event.message
    assert resumed(store) == 4
    assert {key: data for key, data in stored(store).items() if key.startswith(planted)} == before


def resealed(data: bytes) -> bytes:
    """A document with its digest made right again, as an attacker makes it."""
    body = data[: data.rindex(b'"digest": ')]
    return body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()


def flip(data: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def flipped_within(data: bytes, rng: random.Random) -> bytes:
    """A document that stays one, in which a byte of what is sealed, or a digit, is another."""
    text = data.decode()
    if rng.random() < 0.5 and '"sealed": "' in text:
        head, _, rest = text.partition('"sealed": "')
        inner = base64.b64decode(rest.partition('"')[0])
        changed = base64.b64encode(flip(inner, rng)).decode()
        return resealed((head + '"sealed": "' + changed + rest[rest.index('"') :]).encode())
    found = rng.choice([*re.finditer(r"[0-9a-f]", text[: text.rindex('"digest"')])])
    digit = rng.choice([d for d in "0123456789abcdef" if d != found[0]])
    return resealed((text[: found.start()] + digit + text[found.end() :]).encode())


def attacked(objects: dict[str, bytes], folder: str, other: str, rng: random.Random) -> str:
    """Change something of `folder`, where `other` is a sealed checkpoint too; says what."""
    names = sorted(key.partition("/")[2] for key in objects if key.startswith(f"{folder}/"))
    files = [name for name in names if name.startswith("file-")]
    name, second = rng.choice(files), rng.choice(files)
    key = f"{folder}/{name}"
    kind = rng.choice(
        ["flip", "swap", "reorder", "truncate", "extend", "foreign", "document", "suite", "drop"]
    )
    if kind == "flip":
        objects[key] = flip(objects[key], rng)
    elif kind == "swap":
        objects[key] = objects[f"{folder}/{second}"]
    elif kind == "reorder":
        data = objects[key]
        cut = rng.randrange(1, len(data))
        objects[key] = data[cut:] + data[:cut]
    elif kind == "truncate":
        objects[key] = objects[key][: rng.randrange(len(objects[key]))]
    elif kind == "extend":
        objects[key] += bytes(rng.choice((1, 16, 4096)))
    elif kind == "foreign":
        name = rng.choice(names)
        objects[f"{folder}/{name}"] = objects[f"{other}/{name}"]
    elif kind == "document":
        key = f"{folder}/" + rng.choice(["manifest.json", "keys-0001.json"])
        objects[key] = flipped_within(objects[key], rng)
    elif kind == "suite":
        key = f"{folder}/manifest.json"
        worse = rng.choice(["chacha20-poly1305", "sm4-gcm", "none"]).encode()
        objects[key] = resealed(objects[key].replace(b"aes-256-gcm", worse))
    else:
        del objects[f"{folder}/{rng.choice(names)}"]
    return kind


def tamperings(number: int) -> int:
    """How many of `number` attacks went unnoticed by a load of everything."""
    store = MemoryStore()
    saved(store, 1, 2)
    older, newer = folders(store)
    clean = stored(store)
    rng = random.Random(7)
    for count in range(number):
        objects = dict(clean)
        kind = attacked(objects, newer, older, rng)
        if objects == clean:
            continue
        target = MemoryStore()
        for key, data in objects.items():
            target.put(key, data)
        tiny = Tiny()
        with CheckpointManager(
            target, {"tiny": tiny.tree}, encrypt=SEALS, sinks=(), preflight=False
        ) as manager:
            try:
                manager.load(newer)
            except errors.HoldfastError:
                assert tiny.tree["step"] == 0, (count, kind)
                continue
        assert tiny.step() == 2, (count, kind)
        # What is wrong must be in what a load need not read, and verify reads all; of a box of
        # keys only what opens the checkpoint means anything.
        changed = {key for key in {*objects, *clean} if objects.get(key) != clean.get(key)}
        is_box = changed == {f"{newer}/keys-0001.json"}
        assert is_box or not verify(SealedStore(target, SEALS), newer).ok, (count, kind)
    return 0


def test_tampering_is_noticed_whatever_it_is() -> None:
    """R32: flips, swaps, cuts, pieces of other checkpoints, other suites, repaired digests."""
    assert tamperings(400) == 0


@pytest.mark.long
def test_ten_thousand_tamperings_are_noticed() -> None:
    """R32."""
    assert tamperings(10_000) == 0


def test_tampering_is_not_a_wrong_key_and_names_the_tensor() -> None:
    """R32: and a resume takes the checkpoint before."""
    store = MemoryStore()
    saved(store, 1, 2)
    older, newer = folders(store)
    largest = max((info for info in store.list(f"{newer}/file-")), key=lambda info: info.nbytes)
    data = bytearray(store.get(largest.key))
    data[4200] ^= 1
    store.put(largest.key, data)
    tiny, recorder = Tiny(), Recorder()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=SEALS, sinks=(recorder,), preflight=False
    ) as manager:
        with pytest.raises(errors.Tampered, match=r"it holds (rng|tiny)\."):
            manager.load(newer)
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected[0][0]) == (1, newer)
    assert Catalog(SealedStore(store, SEALS)).marks(newer).rejected
    assert b"tensors" not in store.get(f"{newer}/rejected.json")
    assert older


def test_a_checkpoint_under_another_label_is_not_taken_for_that_one() -> None:
    """R32: a label names a checkpoint, so it has its place as a step has."""
    store = MemoryStore()
    saved(store, 1, 2)
    older, newer = folders(store)
    for key, data in stored(store).items():
        if key.startswith(f"{older}/"):
            store.put(key.replace("step-00000001", "step-00000009"), data)
    remove_folder(store, older)
    with pytest.raises(errors.HoldfastError):
        resumed(store, which="step-00000009")
    with pytest.raises(errors.Tampered, match="under the label 'step-00000001'"):
        Catalog(SealedStore(store, SEALS)).find_checkpoint(folders(store)[1])
    assert resumed(store) == 2
    assert newer in folders(store)


def test_a_passing_error_is_not_taken_for_tampering() -> None:
    """The first read of any file, which is that of its tags, gives a flipped bit."""
    store = MemoryStore()
    saved(store, 1)
    keys = [key for key in stored(store) if key.endswith(".sealed")]
    assert len(keys) == 5
    for key in keys:
        fault = Fault(kind="flip", op="read_into", key=key)
        assert resumed_by_load(FaultyStore(store, [fault])) == 1
        assert fault.reached.is_set()


@pytest.mark.parametrize("at", range(4))
def test_a_range_is_read_again_after_a_passing_error(at: int) -> None:
    """The error may be in any read of the file, and the range may end within a segment."""
    store, nbytes = MemoryStore(), 3 * SEGMENT_NBYTES + 100
    state = {"w": torch.randint(0, 9, (nbytes,), dtype=torch.uint8)}
    with CheckpointManager(store, {"state": state}, encrypt=SEALS, sinks=()) as manager:
        manager.save(1).wait()
    key = f"{folders(store)[0]}/state-00000.safetensors"
    image = SealedStore(store, SEALS).get(key)
    for start, stop in ((0, len(image)), (7, len(image) - 7), (SEGMENT_NBYTES, 2 * SEGMENT_NBYTES)):
        fault = Fault(kind="flip", op="read_into", key="*.sealed", at=at)
        sealed = SealedStore(FaultyStore(store, [fault]), SEALS)
        buffer, pieces = bytearray(stop - start), bytearray()
        sealed.read_into(key, start, memoryview(buffer), seen=pieces.extend)
        assert pieces == buffer == image[start:stop]


def resumed_by_load(store: Any) -> int:
    tiny = Tiny()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=SEALS, sinks=(), preflight=False
    ) as manager:
        return manager.load(1).step


def test_whoever_forgets_the_keys_writes_nothing_beside_what_is_sealed() -> None:
    """R34: and whoever brings keys writes nothing beside what is plain."""
    for before, after, wanted in (
        (SEALS, None, errors.MissingKey),
        (None, SEALS, errors.NotSealed),
    ):
        store = MemoryStore()
        saved(store, 1, encrypt=before)
        objects, tiny = stored(store), Tiny()
        tiny.become(2)
        with (
            CheckpointManager(
                store, {"tiny": tiny.tree}, encrypt=after, sinks=(), preflight=False
            ) as manager,
            pytest.raises(wanted),
        ):
            manager.save(2).wait()
        assert stored(store) == objects


class AeadLog:
    """Every (key, nonce) with which something was encrypted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[bytes, bytes]] = set()
        self.num_calls = 0
        monkeypatch.setattr(suites.Cipher, "__init__", noting(self.note))

    def note(self, key: bytes, nonce: bytes) -> None:
        assert (key, nonce) not in self.seen, "used twice"
        self.seen.add((key, nonce))
        self.num_calls += 1


def test_no_key_meets_a_nonce_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: over saves, kills with another try, links, tags, and processes that draw the same
    random bytes."""
    log = AeadLog(monkeypatch)
    for seed in range(4):
        rng = random.Random(1)  # the same bytes each time, as after a copy of the machine
        if seed:
            monkeypatch.setattr(suites.os, "urandom", rng.randbytes)
        store = MemoryStore()
        with suppress(Stopped, errors.HoldfastError):
            saved(FaultyStore(store, [Fault(kind="stop_before", at=40 * seed)]), 1, 2)
        saved(store, 3, 4, 5, takeover=True)
        with CheckpointManager(store, {"tiny": {}}, encrypt=SEALS, sinks=()) as manager:
            for number in range(5):
                manager.tag("latest", f"tag{number}")
    assert log.num_calls == len(log.seen) > 200


def test_a_file_too_long_for_one_key_is_refused() -> None:
    """R33: at most 2**32 messages under one key."""
    sealed: Any = SealedStore(MemoryStore(), SEALS)
    with pytest.raises(errors.LimitExceeded, match="under one key"):
        sealed.create("step-1.0001-000001-01234567/a-00000.json", 2**32 * SEGMENT_NBYTES)


def test_what_is_older_than_what_was_seen_is_refused() -> None:
    """R37: whatever earlier state of the store is put back, or left out of it."""
    store, states, seen = MemoryStore(), [], []
    tiny = Tiny()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=SEALS, sinks=(), preflight=False
    ) as manager:
        for step in range(1, 6):
            tiny.become(step)
            seen.append(manager.save(step).wait().seen)
            manager.wait()
            states.append(stored(store))
    for number, state in enumerate(states):
        for later in range(5):
            target = MemoryStore()
            for key, data in state.items():
                target.put(key, data)
            if later <= number:
                assert resumed(target, seen=seen[later]) == number + 1
                continue
            before = stored(target)
            with pytest.raises(errors.RolledBack, match="is newer than"):
                resumed(target, seen=seen[later])
            assert stored(target) == before
    with pytest.raises(errors.RolledBack, match="no checkpoint found"):
        resumed(MemoryStore(), seen=seen[0])
    with pytest.raises(errors.RolledBack, match="another save"):
        resumed(store, seen=seen[4][:-1] + ("0" if seen[4][-1] != "0" else "1"))
    with pytest.raises(errors.UsageError, match="seen"):
        resumed(store, seen="latest")
    target = MemoryStore()
    for key, data in states[4].items():
        if folders(store)[4] not in key:
            target.put(key, data)
    with pytest.raises(errors.RolledBack):
        resumed(target, seen=seen[4])


def test_unchanged_files_are_linked_and_stand_alone(tmp_path: Path) -> None:
    """Invariant 10: the manifest of each has the secrets of the files that it names."""
    base = torch.randn(2 * BLOCK_NBYTES // 4)
    state = {"base": {"w": base}, "head": {"w": torch.zeros(4)}}
    with CheckpointManager(tmp_path, state, encrypt=SEALS, sinks=()) as manager:
        for step in (1, 2, 3):
            state["head"]["w"] += 1
            manager.save(step, tags=("first",) if step == 1 else ()).wait()
            manager.wait()
        found = manager.list()
    decided = preview(SealedStore(LocalStore(tmp_path), SEALS), Last(1))
    assert "share a file" in decided[1].decision.reason, "step 2 stays: steps 3 and 1 share"
    links = [path.stat().st_nlink for path in sorted(tmp_path.glob("step-*/file-*"))]
    assert max(links) == 2
    for folder in (found[2].folder, found[1].folder):
        remove_folder(LocalStore(tmp_path), folder)
    again = {"base": {"w": torch.zeros_like(base)}, "head": {"w": torch.zeros(4)}}
    with CheckpointManager(tmp_path, again, encrypt=SEALS, sinks=()) as manager:
        manager.load(found[0].folder)
    assert torch.equal(again["base"]["w"], base)
    assert verify_root(SealedStore(LocalStore(tmp_path), SEALS)).ok


def test_a_service_that_refuses_costs_a_save_and_leaves_nothing() -> None:
    """Asked before anything is written; the save after it is made."""
    store, refuses = MemoryStore(), [True]

    def wrap(data: bytes, context: Any) -> bytes:
        if refuses[0]:
            raise ConnectionError("no route")
        return data

    encrypt = Encryption(keys=ServiceKey("vault", wrap, lambda data, context: data))
    tiny = Tiny()
    with CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=encrypt, sinks=(), preflight=False
    ) as manager:
        tiny.become(1)
        with pytest.raises(errors.SaveFailed, match="vault refused: no route"):
            manager.save(1).wait()
        assert folders(store) == []
        refuses[0] = False
        manager.save(1).wait()
    assert resumed(store, encrypt) == 1


def steps(store: Any) -> Iterator[int]:
    """Three saves of which one is kept; gives each step that was acknowledged."""
    tiny = Tiny()
    manager = CheckpointManager(
        store, {"tiny": tiny.tree}, encrypt=SEALS, keep=Last(1), sinks=(), preflight=False
    )
    try:
        manager.resume()
        for step in (1, 2, 3):
            tiny.become(step)
            yield manager.save(step).wait().step
        manager.wait()
    finally:
        with suppress(errors.HoldfastError, Stopped):
            manager.close()


@pytest.mark.parametrize("is_local", [False, *full(True)])
@pytest.mark.parametrize("stride", [43, *full(7), pytest.param(1, marks=pytest.mark.long)])
def test_a_stop_at_any_operation_leaves_what_was_acknowledged(
    is_local: bool, stride: int, tmp_path: Path
) -> None:
    """R1, R2: with the box of keys among what must be there before the manifest."""
    clean = FaultyStore(LocalStore(tmp_path / "clean") if is_local else MemoryStore())
    assert [*steps(clean)] == [1, 2, 3]
    for at in range(0, len(clean.ops), stride):
        for kind in ("stop_before", "stop_after"):
            inner = LocalStore(tmp_path / f"{at}{kind}") if is_local else MemoryStore()
            told = [0]
            with suppress(Stopped, errors.HoldfastError):
                told.extend(steps(FaultyStore(inner, [Fault(kind=kind, at=at)])))
            sealed = SealedStore(inner, SEALS)
            assert verify_root(sealed).ok, (at, kind)
            found = Catalog(sealed).latest()
            assert (found.step if found else 0) >= told[-1], (at, kind)
            if found:
                assert resumed(inner) == found.step


def test_gc_removes_what_a_killed_save_left_without_a_key() -> None:
    store = MemoryStore()
    saved(store, 1)
    folder = begun(store, label="step-00000002", epoch=1, sequence=2).folder
    store.put(f"{folder}/file-00000.sealed", b"junk")
    store.put(f"{folder}/keys-0001.json", b'{"holdfast": 1')
    store.delete(layout.closed_key(1))
    report = collect_garbage(store, dead_epochs=[1])
    assert [name for name, _ in report.removed] == [folder]
    assert resumed(store) == 1


def test_what_was_committed_meanwhile_is_not_aborted_without_a_key() -> None:
    """As when gc has found no manifest, and then there is one."""
    store = MemoryStore()
    saved(store, 1)
    assert not mark_aborted(store, folders(store)[0], by="gc", reason="not committed")
    assert resumed(store) == 1


def test_load_weights_and_copies_of_one_checkpoint_are_opened(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path / "root", encrypt=SEALS) as manager:
        run.train()
        folder = manager.save(1).wait().folder
    (tmp_path / "root" / folder).rename(tmp_path / "best")
    model = new_run(seed=5).model
    load_weights(tmp_path / "best", model, encrypt=SEALS)
    assert torch.equal(model[0].weight, run.model[0].weight)
    with pytest.raises(errors.MissingKey):
        load_weights(tmp_path / "best", model)


def test_answers_to_requests_tell_no_names() -> None:
    """R34: an error may name parts of the state."""
    told = {"folder": None, "error": CANARY, "created": "now", "asker": None}
    answer = AnswerRecord(**told).encode()
    data = redact_record("requests/x.answer", answer)
    assert CANARY not in json.dumps(bytes(data).decode())
    assert redact_record("requests/x.json", answer) == answer


def test_what_is_no_part_of_a_checkpoint_is_neither_sealed_for_nobody_nor_stored_in_clear() -> None:
    """R34: a part of Holdfast that keeps something new in the root has to say which of both."""
    store = MemoryStore()
    sealed: Any = SealedStore(store, SEALS)
    with pytest.raises(errors.FormatError):  # notes on uploads pass, and nothing else there
        sealed.put("uploads/step.json", CANARY.encode())
    for key in ("sending-0123456789abcdef/a", "best/a-00000.json"):
        with pytest.raises(errors.UsageError, match="accepts only folders of saves"):
            sealed.put(key, CANARY.encode())
    assert not stored(store)


def test_a_small_file_is_put_as_in_a_plain_checkpoint() -> None:
    """A store in a network sends it again where the first put may have been lost."""
    names: list[str] = []

    class Noting(MemoryStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if if_absent and key.startswith("step-"):
                names.append(key.rpartition("/")[2])

    saved(Noting(), 1)
    assert names == ["manifest.json"]


def test_a_document_is_fetched_and_opened_once() -> None:
    """By its length and its bytes it would be opened twice."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    noted = FaultyStore(store)
    document = SealedStore(noted, SEALS).get_whole(f"{folder}/manifest.json", max_nbytes=1 << 20)
    assert document == SealedStore(store, SEALS).get(f"{folder}/manifest.json")
    assert noted.ops.count(("get", f"{folder}/manifest.json")) == 1
    sealed = SealedStore(store, SEALS)
    for name in ("manifest.json", "tiny-00000.json"):
        nbytes = sealed.head(f"{folder}/{name}").nbytes
        whole = sealed.get_whole(f"{folder}/{name}", max_nbytes=nbytes)
        assert whole == sealed.get(f"{folder}/{name}")
        with pytest.raises(errors.LimitExceeded):
            sealed.get_whole(f"{folder}/{name}", max_nbytes=nbytes - 1)


def test_a_file_that_has_another_length_than_was_sealed_is_not_read() -> None:
    """R28: the length that is sealed is a number that somebody wrote, and memory would be taken for
    so much."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    sealed = SealedStore(store, SEALS)
    key = f"{folder}/tiny-00000.json"
    nbytes = sealed.head(key).nbytes
    (stored_key,) = (
        info.key
        for info, plain in zip(store.list(folder + "/"), sealed.list(folder + "/"), strict=True)
        if plain.key == key
    )
    store.put(stored_key, store.get(stored_key)[:-1])
    with pytest.raises(errors.CorruptData, match=f"has {nbytes - 1} bytes, expected {nbytes}"):
        sealed.get_whole(key, max_nbytes=nbytes)


def test_files_are_deleted_by_the_names_that_they_are_stored_under() -> None:
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    before = stored(store)
    sealed = SealedStore(store, SEALS)
    names = [name for name in sealed.children(folder) if name.startswith("tiny")]
    sealed.delete_many([*(f"{folder}/{name}" for name in names), "writers/00000001.closed.json"])
    assert names
    assert {*sealed.children(folder)}.isdisjoint(names)
    assert len(before) - len(stored(store)) == len(names) + 1
    assert f"{folder}/manifest.json" in stored(store)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_what_is_sealed_and_harms_nothing_of_its_parent(
    tmp_path: Path,
) -> None:
    """In the thread that forked, whose memory it takes over."""
    saved(tmp_path, 1)
    store: Any = SealedStore(LocalStore(tmp_path), SEALS)
    (folder,) = folders(store)
    index = store.get(f"{folder}/index.json")

    def read() -> None:
        sealed: Any = SealedStore(LocalStore(tmp_path), SEALS)
        assert sealed.get(f"{folder}/index.json") == index

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    read()


def test_a_manifest_that_was_replaced_is_noticed_by_who_had_opened_it_before() -> None:
    """R32: what was opened once is believed only as long as the same bytes lie there."""
    store = MemoryStore()
    saved(store, 1, 2)
    older, newer = folders(store)
    sealed: Any = SealedStore(store, SEALS)
    key = f"{newer}/{layout.MANIFEST}"
    assert sealed.get(key)
    store.put(key, store.get(f"{older}/{layout.MANIFEST}"))
    with pytest.raises((errors.SealError, errors.FormatError)):
        sealed.get(key)


def test_notes_in_clear_beside_a_sealed_checkpoint_are_not_believed() -> None:
    """R32: whoever can write there could pin and tag else."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    key = f"{folder}/{layout.notes_name(1)}"
    store.put(key, Notes(tags=("forged",), pinned=True).encode())
    sealed: Any = SealedStore(store, SEALS)
    with pytest.raises(errors.Tampered, match="not encrypted"):
        sealed.get(key)


def test_a_tombstone_does_not_tell_in_clear_why_a_checkpoint_went() -> None:
    """R34: reasons name metrics and components."""
    store = MemoryStore()
    saved(store, 1)
    (folder,) = folders(store)
    sealed: Any = SealedStore(store, SEALS)
    assert retracted(sealed, folder)
    register = decode_register(store.get(f"{folder}/{layout.MANIFEST}"), what="register")
    assert isinstance(register, Deleted)
    assert register.reason == REDACTED


def test_options_that_cannot_be_are_refused() -> None:
    for options in (
        {"keys": ()},
        {"keys": "secret"},
        {"keys": KEY, "suite": "aes-128-cbc"},
        {"keys": KEY, "also_read": 7},
        {"keys": KEY, "accept_plain": "yes"},
    ):
        with pytest.raises(errors.UsageError):
            Encryption(**options)
    with pytest.raises(errors.UsageError, match="Encryption"):
        CheckpointManager(MemoryStore(), {"a": {}}, encrypt=KEY)  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="seals already"):
        CheckpointManager(SealedStore(MemoryStore(), SEALS), {"a": {}}, encrypt=SEALS)
