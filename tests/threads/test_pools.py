"""Threads: who reads, who uses what was read, and how much lies between the two."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from holdfast import errors
from holdfast.threads import workers
from holdfast.threads.workers import NUM_AHEAD, Threads, Use


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close_pools()


def name_of_thread() -> str:
    return threading.current_thread().name


def read_all(threads: Threads, *reads: object, timeout_s: float = 60.0) -> None:
    threads.read_all(reads, timeout_s=timeout_s, what="the test")  # type: ignore[arg-type]


def test_what_was_read_is_used_by_other_threads_than_those_that_read(threads: Threads) -> None:
    """So that the disk has something to do although every core is busy."""
    readers: list[str] = []
    users: list[str] = []

    def read() -> Use:
        readers.append(name_of_thread())
        return lambda: users.append(name_of_thread())

    read_all(threads, *[read] * 40)
    assert len(readers) == len(users) == 40
    assert all(name.startswith("holdfast-disk") for name in readers)
    assert all(name.startswith("holdfast-io") for name in users)


def test_reads_of_which_nothing_is_left_to_do_end_at_once(threads: Threads) -> None:
    done: list[int] = []
    read_all(threads, *[lambda: done.append(1)] * 3)
    assert done == [1] * 3


def test_a_future_has_what_the_use_gives_or_why_there_is_none(threads: Threads) -> None:
    def fail() -> int:
        raise errors.CorruptData("wrong")

    assert threads.submit_read(lambda: lambda: 5).result(timeout=60) == 5
    for read in (lambda: fail, fail):
        failed = threads.submit_read(read)  # type: ignore[arg-type,return-value]
        with pytest.raises(errors.CorruptData, match="wrong"):
            failed.result(timeout=60)
    threads.close_pools()
    with pytest.raises(errors.ManagerUnusable):
        threads.submit_read(lambda: lambda: 5)


def test_so_many_are_read_and_not_used_and_no_more(threads: Threads) -> None:
    """Each has memory; with nobody to use them, more would take all there is."""
    go, lock, full = threading.Event(), threading.Lock(), threading.Event()
    num_open, most = 0, 0

    def read() -> Use:
        nonlocal num_open, most
        with lock:
            num_open += 1
            most = max(most, num_open)
            if num_open == NUM_AHEAD:
                full.set()
        return use

    def use() -> None:
        nonlocal num_open
        assert go.wait(60)
        with lock:
            num_open -= 1

    whole = threading.Thread(target=read_all, args=(threads, *[read] * (4 * NUM_AHEAD)))
    whole.start()
    assert full.wait(60)
    assert not go.wait(0.2)  # one more would begin now
    assert most == NUM_AHEAD
    go.set()
    whole.join(60)
    assert not whole.is_alive()
    assert (num_open, most) == (0, NUM_AHEAD)


@pytest.mark.parametrize("fails", ["the read", "the use"])
def test_after_the_first_error_no_more_reads_are_begun(
    threads: Threads, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised when those that run have ended; what waited for room is not begun either."""
    begun: list[int] = []
    go = threading.Event()
    real = workers.cancel

    def cancel(futures: Collection[Future[Any]], *, timeout_s: float) -> None:
        for future in futures:
            future.cancel()
        go.set()
        real(futures, timeout_s=timeout_s)

    def fail() -> None:
        while len(begun) < NUM_AHEAD:
            go.wait(0.01)
        raise errors.CorruptData("it is damaged")

    def read() -> Use | None:
        begun.append(1)
        if len(begun) == 1:
            return fail() if fails == "the read" else fail
        return use

    def use() -> None:
        assert go.wait(60)

    monkeypatch.setattr(workers, "cancel", cancel)
    with pytest.raises(errors.CorruptData, match="it is damaged"):
        read_all(threads, *[read] * 200)
    # The one that failed made room for one more.
    assert NUM_AHEAD <= len(begun) <= NUM_AHEAD + 1
    before = len(begun)
    read_all(threads, *[lambda: None] * NUM_AHEAD)
    assert len(begun) == before


@pytest.mark.parametrize("num_hanging", [1, 4 * NUM_AHEAD])
def test_what_hangs_is_named_and_keeps_no_later_read_from_its_turn(
    threads: Threads, num_hanging: int
) -> None:
    """Also when it takes all the room there is, for which others wait."""
    go, ended = threading.Event(), threading.Event()

    def hang() -> Use:
        def use() -> None:
            assert go.wait(60)
            ended.set()

        return use

    with pytest.raises(errors.DeadlineExceeded, match="the test"):
        read_all(threads, *[hang] * num_hanging, timeout_s=0.5)
    done: list[int] = []
    read_all(threads, *[lambda: done.append(1)] * (2 * NUM_AHEAD), timeout_s=60.0)
    assert len(done) == 2 * NUM_AHEAD
    assert not ended.is_set()
    go.set()
    assert ended.wait(60)


def test_what_was_read_is_used_although_the_threads_were_closed_meanwhile() -> None:
    """Whoever uses it gives back what the read took (invariant 9)."""
    threads, users = Threads(), []

    def read() -> Use:
        threads.close_pools()
        return lambda: users.append(name_of_thread())

    read_all(threads, read)
    assert len(users) == 1
    assert users[0].startswith("holdfast-disk")
    with pytest.raises(errors.ManagerUnusable):
        read_all(threads, read)
    assert len(users) == 1
