"""The scheduler itself: one at a time, by the seed, with every fault that it promises."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import AlreadyExists, DeadlineExceeded, OutcomeUnknown
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore

from .scheduler import Faults, Trace, run


def _writer(name: str, told: list[str]) -> object:
    def actor(store: Store) -> None:
        try:
            store.put("prize", name.encode(), if_absent=True)
        except AlreadyExists:
            return
        told.append(name)

    return actor


def _careless(name: str, told: list[str]) -> object:
    """Looks first and then puts: the race that `if_absent` is for."""

    def actor(store: Store) -> None:
        if "prize" in store.children():
            return
        store.put("prize", name.encode())
        told.append(name)

    return actor


def _race(seed: int, make: object, faults: Faults | None = None) -> tuple[list[str], Trace]:
    told: list[str] = []
    actors = {name: make(name, told) for name in ("one", "two", "three")}  # type: ignore[operator]
    return told, run(seed, actors, faults)


def test_put_if_absent_has_one_winner_under_every_seed() -> None:
    """R10: of three writers of one key exactly one is told that it won."""
    winners = {tuple(_race(seed, _writer)[0]) for seed in range(100)}
    assert winners == {("one",), ("two",), ("three",)}


def test_a_careless_race_is_found() -> None:
    """R10: the scheduler does find the interleaving in which looking first is not enough."""
    assert max(len(_race(seed, _careless)[0]) for seed in range(100)) > 1


def test_the_same_seed_gives_the_same_run() -> None:
    """R22: a failing seed can be run again."""
    faults = Faults(lose_reply=0.3, delay=0.3, crash=0.1, pause=0.2)
    for seed in range(50):
        first, second = _race(seed, _writer, faults)[1], _race(seed, _writer, faults)[1]
        assert first.steps == second.steps
        assert first.crashed == second.crashed


def test_a_lost_reply_leaves_the_effect() -> None:
    """R10: a put whose reply is lost has happened."""
    store = MemoryStore()
    done = run(1, {"one": lambda s: s.put("a", b"1")}, Faults(lose_reply=1.0), store=store)
    assert isinstance(done.errors["one"], OutcomeUnknown)
    assert store.get("a") == b"1"


def test_a_put_in_flight_lands_later_or_never() -> None:
    """R22: it takes effect after its caller has gone on, and does not overwrite."""
    fates = set()
    for seed in range(40):
        store = MemoryStore()
        seen: list[bool] = []

        def actor(scheduled: Store, seen: list[bool] = seen) -> None:
            with pytest.raises(OutcomeUnknown):
                scheduled.put("a", b"1", if_absent=True)
            seen.append("a" in scheduled.children())

        run(seed, {"one": actor}, Faults(delay=1.0), store=store)
        fates.add((seen[0], "a" in store.children()))
    assert fates >= {(False, True), (False, False)}


def test_a_crashed_actor_does_nothing_more() -> None:
    """R22: not even what stands in a `finally`."""

    def actor(store: Store) -> None:
        try:
            store.put("a", b"1")
        finally:
            store.put("b", b"1")

    store = MemoryStore()
    done = run(1, {"one": actor}, Faults(crash=1.0), store=store)
    assert done.crashed == ["one"]
    assert store.children() == ()


def test_a_folder_is_deleted_one_object_at_a_time() -> None:
    """R11: others can look in between, and do."""
    seen: set[int] = set()
    for seed in range(20):
        store = MemoryStore()
        for name in "abc":
            store.put(f"f/{name}", b"1")
        run(
            seed,
            {"deleter": lambda s: s.delete("f/")},
            store=store,
            watch=lambda inner: seen.add(len(inner.children("f"))),
        )
        assert store.children("f") == ()
    assert seen == {0, 1, 2}


def test_what_watch_raises_ends_the_run_and_its_threads() -> None:
    """R22: a broken invariant stops the run at the step that broke it."""

    def watch(store: MemoryStore) -> None:
        assert "b" not in store.children(), "b appeared"

    def actor(store: Store) -> None:
        for name in "abc":
            store.put(name, b"1")

    store = MemoryStore()
    with pytest.raises(AssertionError, match="b appeared"):
        run(1, {"one": actor, "two": actor}, store=store, watch=watch)
    assert store.children() == ("a", "b")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor-")]


def test_an_actor_that_does_not_come_back_is_named() -> None:
    """R22: no wait without a deadline."""
    release = threading.Event()
    with pytest.raises(DeadlineExceeded, match="actor stuck"):
        run(1, {"stuck": lambda store: release.wait(30)}, deadline_s=0.05)
    release.set()
