"""R33, R34, R38: several ranks save and load encrypted checkpoints, and say nothing in clear."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.encryption.test_store import AeadLog, stored
from typing_extensions import override

from allranks import Member, all_of, on_ranks, save_on
from holdfast import Encryption, errors
from holdfast.encryption.files import REDACTED
from holdfast.encryption.messages import EncryptedRanks, encrypted
from holdfast.encryption.store import SealedStore
from holdfast.format import layout, suites
from holdfast.format.manifest import Aborted
from holdfast.keys import PrivateKey, SecretKey, ServiceKey
from holdfast.maintenance.encrypted import rotate
from holdfast.maintenance.verify import verify_root
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Collected, Coordinator, RankFailure, Watch
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal

KEY = SecretKey(bytes(range(32)))
SEALS = Encryption(keys=KEY)
OTHER = Encryption(keys=SecretKey(bytes(range(1, 33))))
CANARY = "kanarienvogel"
BRIEF_S = 0.3
"""Deadline of what never comes."""


class Recording(Coordinator):
    """Coordinator that remembers what it carries, tags and all, and may change it."""

    def __init__(self, inner: Coordinator, log: list[bytes]) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner, self.log = inner, log
        self.change: Callable[[str, bytes], bytes] = lambda tag, data: data

    @override
    def number(self) -> int:
        return self.inner.number()

    def _carry(self, tag: str, data: bytes) -> bytes:
        changed = self.change(tag, data)
        self.log.append(tag.encode() + b"\n" + changed)
        return changed

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.inner.post(tag, self._carry(tag, data), timeout_s=timeout_s)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        self._carry(tag, msgspec.msgpack.encode(failure))
        self.inner.fail(tag, failure, timeout_s=timeout_s)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        return self.inner.collect(tag, timeout_s=timeout_s, watch=watch)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.inner.announce(tag, self._carry(tag, data), timeout_s=timeout_s)

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        carried = [self._carry(tag, data) for data in messages]
        self.inner.announce_each(tag, carried, timeout_s=timeout_s)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        return self.inner.hear(tag, timeout_s=timeout_s, watch=watch)


def recording(num_ranks: int) -> tuple[list[Recording], list[bytes]]:
    log: list[bytes] = []
    return [Recording(one, log) for one in ThreadCoordinator.for_ranks(num_ranks)], log


def resume_on(num_ranks: int, store: Store, **options: Any) -> list[dict[str, bytes]]:
    """Resume on so many ranks, from other bits; the bits of each rank afterwards."""
    ranks = [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)

    def work(member: Member) -> dict[str, bytes]:
        with torch.no_grad():
            member.model[0].weight.zero_()
        with member.manager(store, **{"encrypt": SEALS, **options}) as manager:
            assert manager.resume() is not None
        return member.bits()

    return all_of(on_ranks(ranks, work))


@pytest.mark.parametrize(("is_local", "compress"), diagonal([True, False], ["zstd", None]))
def test_any_number_of_ranks_loads_what_several_have_encrypted(
    compress: Any, is_local: bool, tmp_path: Path
) -> None:
    """Invariant 7: bit by bit, and with other keys after a rotation."""
    store = LocalStore(tmp_path) if is_local else MemoryStore()
    (bits, *_) = save_on(3, store, [1, 2], encrypt=SEALS, compress=compress)
    for entry in Catalog(SealedStore(store, SEALS)).checkpoints():
        assert entry.manifest.world_size == 3
    assert verify_root(SealedStore(store, SEALS)).ok
    assert verify_root(store).ok  # the stored bytes, without a key
    for num_ranks in (1, 2, 3):
        assert resume_on(num_ranks, store, compress=compress) == [bits] * num_ranks
    assert [done.outcome for done in rotate(store, [KEY], OTHER.sealing)] == ["done"] * 2
    assert resume_on(2, store, encrypt=OTHER) == [bits] * 2
    with pytest.raises(errors.WrongKey):
        resume_on(1, store)


def test_a_run_goes_on_with_the_manager_that_has_saved() -> None:
    """A follower that saved and loads again reads the files of the others, too."""
    store = MemoryStore()

    def work(member: Member) -> tuple[list[int], bool]:
        with member.manager(store, encrypt=SEALS, every="2step") as manager:
            for step in range(1, 5):
                member.train()
                manager.maybe_save(step)
            manager.wait()
            saved = member.bits()
            member.train()
            found = manager.resume()
            assert found is not None
        return [checkpoint.step for checkpoint in manager.list()], member.bits() == saved

    assert all_of(on_ranks(3, work)) == [([4, 2], True)] * 3


def test_an_unchanged_file_of_a_follower_is_linked(tmp_path: Path) -> None:
    """Its secret is in both manifests."""

    def work(member: Member) -> None:
        frozen = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))
        torch.nn.utils.vector_to_parameters(torch.ones(4 * 250_500), frozen.parameters())
        state = {"model": member.model, "frozen": frozen.requires_grad_(False)}
        with member.manager(tmp_path, encrypt=SEALS, state=state) as manager:
            for step in range(1, 6):
                member.train()
                manager.save(step).wait()
                manager.wait()

    all_of(on_ranks(2, work))
    shared = [path for path in tmp_path.rglob("file-*") if path.stat().st_nlink > 1]
    numbers = {int(path.name[5:10]) % 2 for path in shared}
    assert numbers == {0, 1}, "both ranks have linked a file"
    assert verify_root(SealedStore(LocalStore(tmp_path), SEALS)).ok


def canary_state(member: Member) -> dict[str, Any]:
    return {
        f"{CANARY}a": {f"{CANARY}leaf{n}": torch.full((40_000,), 3.1415927) for n in range(4)},
        f"{CANARY}b": {"text": f"{CANARY}text"},
        f"{CANARY}c": torch.Generator().manual_seed(0x5EC12E7 + member.rank),
        "model": member.model,
    }


def test_no_word_and_no_weight_is_told_or_stored_in_clear(tmp_path: Path) -> None:
    """R34: in saves, in a save of what was saved, in loads, and in failures."""
    ranks, log = recording(3)
    weights = torch.full((16,), 3.1415927).numpy().tobytes()

    def work(member: Member) -> list[str]:
        state, said = canary_state(member), []
        with member.manager(
            tmp_path, encrypt=SEALS, state=state, run_name=f"{CANARY}run"
        ) as manager:
            options: Any = {"tags": [f"{CANARY}tag"], "metrics": {f"{CANARY}m": 7.251953125}}
            manager.save(1, **options).wait()
            manager.save(1, **options).wait()
            manager.save(2, reason=f"{CANARY}reason").wait()
            manager.resume(1)
            # Only one rank differs: an error that names component and leaf, on all.
            state[f"{CANARY}b"]["text"] = f"{CANARY}{member.rank}"
            with pytest.raises(errors.HoldfastError) as raised:
                manager.save(3).wait()
            said.append(f"{raised.value} {raised.value.__cause__}")
        return said

    said = all_of(on_ranks(ranks, work))
    assert all(CANARY in word for of_rank in said for word in of_rank), said
    assert len(log) > 40
    hidden = (CANARY.encode(), weights, b"7.251953125", b"Linear", b"model", b"safetensors")
    kept = stored(LocalStore(tmp_path))
    for word in hidden:
        assert not [message for message in log if word in message]
        assert not [
            key
            for key, data in kept.items()
            if word in data or word.decode(errors="replace") in key
        ]


def kanarienvogel(now: Any, metrics: Any, event: Any) -> bool:
    """Due at once; its name is the reason of the save."""
    return True


def test_what_only_the_leader_knows_is_agreed_on_and_not_in_clear() -> None:
    """R34."""
    ranks, log = recording(3)
    store = MemoryStore()

    def work(member: Member) -> tuple[int, str]:
        with member.manager(store, encrypt=SEALS, every=kanarienvogel) as manager:
            for step in count(1):
                pending = manager.maybe_save(step)
                if pending is not None:
                    saved = pending.wait()
                    return saved.step, saved.reason
        raise AssertionError("it ends with a save")

    first, *others = all_of(on_ranks(ranks, work))
    assert others == [first] * 2
    assert CANARY in first[1]
    assert [message for message in log if b"where they save" in message]
    assert not [message for message in log if CANARY.encode() in message]


def test_no_key_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: neither the user's, nor that of a checkpoint, nor that of the messages."""
    secrets: list[bytes] = [bytes(range(32))]
    ranks, log = recording(2)
    made = suites.fresh_secret

    def noting(nbytes: int = suites.SECRET_NBYTES) -> bytes:
        secrets.append(made(nbytes))
        return secrets[-1]

    for module in ("encryption.store", "format.envelope"):
        monkeypatch.setattr(f"holdfast.{module}.fresh_secret", noting)
    keys: list[Any] = []
    opened = EncryptedRanks._share_key

    def keeping(one: EncryptedRanks, timeout_s: float, watch: Watch | None = None) -> float:
        left = opened(one, timeout_s, watch)
        keys.append(one._key)
        return left

    monkeypatch.setattr(EncryptedRanks, "_share_key", keeping)
    save_on(ranks, MemoryStore(), [1, 2], encrypt=SEALS)
    assert len({*keys}) == 1
    assert len(secrets) > 10
    for secret in {*secrets, *keys}:
        for shape in (secret, secret.hex().encode()):
            assert not [message for message in log if shape in message]


def test_no_key_meets_a_nonce_twice_and_no_name_is_used_by_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R33: also where processes draw the same random bytes."""
    log = AeadLog(monkeypatch)
    lock = threading.Lock()
    note = log.note

    def locked(key: bytes, nonce: bytes) -> None:
        with lock:
            note(key, nonce)

    monkeypatch.setattr(log, "note", locked)
    puts: list[str] = []
    store = MemoryStore()
    make = store.create

    def create(key: str, nbytes: int, **given: Any) -> Any:
        puts.append(key)
        return make(key, nbytes, **given)

    monkeypatch.setattr(store, "create", create)
    save_on(4, store, [1, 2, 3], encrypt=SEALS, compress="zstd")
    assert log.num_calls == len(log.seen) > 60
    assert len(puts) == len({*puts}) > 12
    ranks = {int(key.rpartition("-")[2][:5]) % 4 for key in puts}
    assert ranks == {0, 1, 2, 3}


Given = tuple[Encryption | None, Encryption | None]
UNLIKE: dict[str, tuple[Given, str, str]] = {
    "another key": ((SEALS, OTHER), "rank 1, in opening .*WrongKey", "WrongKey|keys given are"),
    "no key": (
        (SEALS, None),
        "rank 1.*give `encrypt` on all ranks",
        "encrypted message|this release",
    ),
    "another suite": (
        (SEALS, Encryption(keys=KEY, suite="chacha20-poly1305")),
        "rank 1.*suite='chacha20-poly1305'",
        "Give all ranks the same",
    ),
    "a public key": (
        (
            Encryption(keys=PrivateKey(bytes(range(32)))),
            Encryption(keys=PrivateKey(bytes(range(32))).public),
        ),
        "rank 1, in opening .*WrongKey: its keys are public",
        "needs a key that decrypts",
    ),
}


@pytest.mark.parametrize("verb", ["save", "resume"])
@pytest.mark.parametrize("case", UNLIKE)
def test_a_rank_with_other_keys_fails_all_by_its_name(case: str, verb: str) -> None:
    (of_leader, of_follower), by_leader, by_follower = UNLIKE[case]
    store = MemoryStore()
    save_on(2, store, encrypt=of_leader)
    before = stored(store)

    def work(member: Member) -> None:
        encrypt = of_follower if member.rank == 1 else of_leader
        with member.manager(store, encrypt=encrypt, takeover=True) as manager:
            if verb == "save":
                manager.save(2).wait()
            else:
                manager.resume()

    results = on_ranks(3, work)
    (leader, follower, third) = (f"{type(r).__name__} {r!r}" for r in results)
    for said in (leader, third):
        assert_matches(said, by_leader)
    assert_matches(follower, by_follower)
    after = stored(store)
    assert {key: after[key] for key in before if "writers" not in key} == {
        key: data for key, data in before.items() if "writers" not in key
    }


def assert_matches(text: str, pattern: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


def test_a_follower_that_alone_encrypts_is_named_at_the_deadline() -> None:
    def work(member: Member) -> None:
        encrypt = SEALS if member.rank == 1 else None
        with member.manager(MemoryStore(), encrypt=encrypt, save_timeout_s=BRIEF_S) as manager:
            manager.save(1).wait()

    leader, follower = on_ranks(2, work)
    assert_matches(repr(leader), "rank 1")
    assert_matches(repr(follower), "key 0 of messages.*`encrypt`.*rank 0")


def test_a_rank_that_cannot_open_an_older_checkpoint_fails_the_load_of_all() -> None:
    store = MemoryStore()
    save_on(2, store, encrypt=OTHER)

    def work(member: Member) -> None:
        also: Any = OTHER.keys if member.rank != 1 else ()
        with member.manager(store, encrypt=Encryption(keys=KEY, also_read=also)) as manager:
            manager.resume()

    for result in on_ranks(3, work):
        assert_matches(
            f"{type(result).__name__} {result}", "rank 1, in reading: .*encrypted for|WrongKey"
        )
        assert isinstance(result, errors.RanksFailed | errors.WrongKey)


def test_a_leader_whose_service_refuses_is_heard_at_once() -> None:
    def refuse(data: bytes, context: Any) -> bytes:
        raise OSError("no service")

    service = Encryption(keys=ServiceKey("kms", refuse, refuse))

    def work(member: Member) -> None:
        with member.manager(MemoryStore(), encrypt=service) as manager:
            manager.save(1).wait()

    leader, *followers = on_ranks(3, work)
    assert isinstance(leader, errors.KeyUnavailable)
    assert_matches(str(leader), "kms refused: no service")
    for follower in followers:
        assert isinstance(follower, errors.RanksFailed), follower
        assert_matches(str(follower), "rank 0.*KeyUnavailable: its keys are service kms")


def test_a_service_is_asked_for_each_checkpoint_once_by_the_leader_and_to_open_by_each() -> None:
    asked: list[tuple[str, str]] = []

    def seals(member: Member) -> Encryption:
        def wrap(data: bytes, context: Any) -> bytes:
            asked.append(("wrap", str(member.rank)))
            return bytes(255 - b for b in data)

        def unwrap(data: bytes, context: Any) -> bytes:
            asked.append(("unwrap", str(member.rank)))
            return bytes(255 - b for b in data)

        return Encryption(keys=ServiceKey("kms", wrap, unwrap))

    store = MemoryStore()

    def work(member: Member) -> None:
        with member.manager(store, encrypt=seals(member)) as manager:
            for step in (1, 2):
                member.train()
                manager.save(step).wait()

    all_of(on_ranks(2, work))
    # One more than the checkpoints: for the messages.
    assert sorted(asked) == [("unwrap", "1")] * 3 + [("wrap", "0")] * 3


def test_a_file_that_two_ranks_have_written_is_refused() -> None:
    folder = str(layout.attempt_name("step-1", 1, 1, "ab" * 16))
    store = MemoryStore()
    leader, *followers = (SealedStore(store, SEALS) for _ in range(3))
    for rank, one in enumerate((leader, *followers)):
        one.join_attempt(folder, rank, 3)
        one.put(f"{folder}/part-0000{rank}.safetensors", b"bytes")
    first, second = (
        one.describe_sealing(folder, f"part-0000{rank}.safetensors")
        for rank, one in enumerate(followers, 1)
    )
    leader.include(folder, "part-00001.safetensors", first)
    same = msgspec.structs.replace(
        second, seal=msgspec.structs.replace(second.seal, name=first.seal.name)
    )
    for name, written in product(["part-00000.safetensors", "part-00001.safetensors"], [second]):
        with pytest.raises(errors.AlreadyExists, match="written by two ranks"):
            leader.include(folder, name, written)
    with pytest.raises(errors.AlreadyExists, match="written by two ranks"):
        leader.include(folder, "part-00002.safetensors", same)
    leader.include(folder, "part-00002.safetensors", second)
    assert [info.nbytes for info in leader.list(f"{folder}/")] == [5, 5, 5]


def test_a_number_of_eight_digits_is_no_name_of_a_file() -> None:
    assert layout.is_stored_name(layout.stored_name(9_999_999))
    with pytest.raises(errors.LimitExceeded, match="10,000,000"):
        layout.stored_name(10_000_000)


def test_an_abort_marker_has_no_words() -> None:
    """R34: its reason is the error of a rank."""
    store = MemoryStore()
    folder = str(layout.attempt_name("step-1", 1, 1, "ab" * 16))
    assert mark_aborted(SealedStore(store, SEALS), folder, by="rank 1", reason=CANARY)
    found = Catalog(store).read(folder)
    assert found == Aborted(by="rank 1", reason=REDACTED)


class Pair:
    """A leader and a follower, whose messages may be changed on their way."""

    def __init__(self) -> None:
        self.ways, self.log = recording(2)
        self.leader, self.follower = (encrypted(one, SEALS) for one in self.ways)
        self.leader.announce("first", b"hello", timeout_s=60)
        assert self.follower.hear("first", timeout_s=60) == b"hello"


Change = Callable[[bytes, bytes], bytes]
CHANGES: dict[str, Change] = {
    "a bit": lambda data, before: data[:-1] + bytes([data[-1] ^ 1]),
    "the salt": lambda data, before: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data, before: data[:20],
    "empty": lambda data, before: b"",
    "an earlier one": lambda data, before: before,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_message_that_was_changed_or_moved_is_refused(change: str) -> None:
    """R33: tag, direction and rank are authenticated."""
    pair = Pair()
    before = {}

    def remember(tag: str, data: bytes) -> bytes:
        before[tag] = data
        return data

    for way in pair.ways:
        way.change = remember
    pair.leader.announce("second", b"a", timeout_s=60)
    pair.follower.post("second post", b"a", timeout_s=60)

    def changed(tag: str, data: bytes) -> bytes:
        return CHANGES[change](data, before[f"second{' post' * ('post' in tag)}"])

    for way in pair.ways:
        way.change = changed
    pair.leader.announce("third", b"b", timeout_s=60)
    with pytest.raises(errors.RanksError, match="third: the leader"):
        pair.follower.hear("third", timeout_s=60)
    pair.follower.post("third post", b"b", timeout_s=60)
    with pytest.raises(errors.RanksFailed, match=r"rank 1.*not encrypted with the leader's key"):
        pair.leader.collect("third post", timeout_s=BRIEF_S).expect_all("third")


def test_a_message_of_another_rank_is_not_taken_for_that_of_this_one() -> None:
    ways, _ = recording(3)
    leader, first, second = (encrypted(one, SEALS) for one in ways)
    sent = []
    ways[1].change = lambda tag, data: sent.append(data) or data  # type: ignore[func-returns-value]
    ways[2].change = lambda tag, data: sent[0]
    leader.announce("begin", b"", timeout_s=60)
    first.post("round", b"of the first", timeout_s=60)
    second.post("round", b"of the second", timeout_s=60)
    found = leader.collect("round", timeout_s=BRIEF_S)
    assert found.came == {1: b"of the first"}
    assert [*found.failed] == [2]


def test_a_failure_arrives_as_it_was_said_and_a_forged_one_is_none() -> None:
    pair = Pair()
    failure = RankFailure("writing", "disk full")
    pair.follower.fail("one", failure, timeout_s=60)
    assert pair.leader.collect("one", timeout_s=60).failed == {1: failure}
    pair.leader.fail("two", failure, timeout_s=60)
    with pytest.raises(errors.RanksFailed, match="rank 0, in writing: disk full"):
        pair.follower.hear("two", timeout_s=60)
    assert not [message for message in pair.log if b"disk" in message or b"writing" in message]
    said = RankFailure("an encrypted message, which a rank without `encrypt` cannot read", "AAAA")
    pair.ways[1].fail("three", said, timeout_s=60)
    failed = pair.leader.collect("three", timeout_s=60).failed
    assert failed[1].reason == "its message is not encrypted with the leader's key: give " + (
        "`encrypt` on all ranks"
    )


def test_a_rank_without_the_key_says_nothing_but_why() -> None:
    """R34: what else has failed there may have names, and is in its own error."""
    ways, log = recording(2)
    leader, follower = encrypted(ways[0], SEALS), encrypted(ways[1], OTHER)
    leader.announce("first", b"", timeout_s=60)
    follower.fail("round", RankFailure(f"phase of {CANARY}", CANARY), timeout_s=60)
    failure = leader.collect("round", timeout_s=60).failed[1]
    assert failure.phase == "opening the key of the ranks' messages"
    assert "WrongKey" in failure.reason
    assert not [message for message in log if CANARY.encode() in message]


def test_what_a_service_says_is_in_the_error_of_its_rank_only() -> None:
    """R34: it may have an address, or a token."""
    ways, log = recording(2)

    def wrap(data: bytes, context: Any) -> bytes:
        return data[::-1]

    def refuse(data: bytes, context: Any) -> bytes:
        raise RuntimeError(f"POST https://{CANARY}: Authorization: Bearer {CANARY}")

    leader, follower = (
        encrypted(way, Encryption(keys=ServiceKey("kms", wrap, unwrap)))
        for way, unwrap in zip(ways, (wrap, refuse), strict=True)
    )
    leader.announce("first", b"", timeout_s=60)
    with pytest.raises(errors.KeyUnavailable, match=CANARY):
        follower.hear("first", timeout_s=60)
    follower.fail("round", RankFailure("phase", "reason"), timeout_s=60)
    failure = leader.collect("round", timeout_s=60).failed[1]
    assert failure.reason == "KeyUnavailable: its keys are service kms; its own error says why"
    assert not [message for message in log if CANARY.encode() in message]


def test_a_thread_hears_within_its_own_limit_while_another_waits_for_the_key() -> None:
    """The thread of agreed saves ends for all time with any error but `RanksSilent`."""
    ways, _ = recording(2)
    leader, follower = (encrypted(way, SEALS) for way in ways)
    listens = threading.Event()
    hear = ways[1].inner.hear

    def listening(tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        listens.set()
        return hear(tag, timeout_s=timeout_s, watch=watch)

    ways[1].inner.hear = listening  # type: ignore[method-assign]
    poster = threading.Thread(
        target=follower.post, args=("save", b"x"), kwargs={"timeout_s": 60}, daemon=True
    )
    poster.start()
    assert listens.wait(60)
    with pytest.raises(errors.RanksSilent):
        follower.hear("question", timeout_s=BRIEF_S)
    leader.announce("question", b"end", timeout_s=60)
    assert follower.hear("question", timeout_s=60) == b"end"
    poster.join(60)
    assert leader.collect("save", timeout_s=BRIEF_S).came == {1: b"x"}


def test_a_service_slower_than_the_limit_is_a_silent_leader_to_who_hears() -> None:
    ways, _ = recording(2)
    asked, may_answer = threading.Event(), threading.Event()

    def wrap(data: bytes, context: Any) -> bytes:
        return data[::-1]

    def slow(data: bytes, context: Any) -> bytes:
        asked.set()
        may_answer.wait(60)
        return data[::-1]

    leader, follower = (
        encrypted(way, Encryption(keys=ServiceKey("kms", wrap, unwrap)))
        for way, unwrap in zip(ways, (wrap, slow), strict=True)
    )
    leader.announce("question", b"end", timeout_s=60)
    poster = threading.Thread(
        target=follower.post, args=("save", b"x"), kwargs={"timeout_s": 60}, daemon=True
    )
    poster.start()
    assert asked.wait(60)
    with pytest.raises(errors.RanksSilent):
        follower.hear("question", timeout_s=BRIEF_S)
    may_answer.set()
    poster.join(60)
    assert follower.hear("question", timeout_s=60) == b"end"


def test_a_box_of_the_leader_that_is_damaged_is_an_error() -> None:
    ways, _ = recording(2)
    leader, follower = (encrypted(one, SEALS) for one in ways)
    ways[0].change = lambda tag, data: data.replace(b'"wrapped": "', b'"wrapped": "00')
    leader.announce("first", b"hello", timeout_s=60)
    with pytest.raises((errors.FormatError, errors.RanksError)):
        follower.hear("first", timeout_s=60)


def test_one_rank_or_no_key_is_as_before() -> None:
    alone, (leader, _) = SingleProcess(), ThreadCoordinator.for_ranks(2)
    assert encrypted(alone, SEALS) is alone
    assert encrypted(leader, None) is leader
    assert leader.number() == 1  # counted as on a rank that encrypts
