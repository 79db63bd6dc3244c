"""The real engine under a seeded scheduler keeps the invariants that the model promises."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import pytest

from holdfast.errors import HoldfastError
from holdfast.maintenance import retention
from holdfast.ownership import leases
from holdfast.ownership.claim import Claim
from holdfast.ownership.leases import Readers
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore

from . import crew
from .crew import Record
from .scheduler import Actor, Faults, Trace, run

Cast = Callable[[MemoryStore, Record, Claim], Mapping[str, Actor]]


def _takeover(store: MemoryStore, record: Record, claim: Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3),
        "s2": crew.taker(record, rolls_back=False),
        "gc": crew.collector(),
        "reader": crew.reader(record),
    }


def _rollback(store: MemoryStore, record: Record, claim: Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3),
        "s2": crew.taker(record, rolls_back=True),
        "gc": crew.collector(),
        "pinner": crew.pinner(record),
    }


def _two_takeovers(store: MemoryStore, record: Record, claim: Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3, num_saves=1),
        "s2": crew.taker(record, rolls_back=False),
        "s3": crew.taker(record, rolls_back=False),
        "gc": crew.collector(),
    }


def _thinning(store: MemoryStore, record: Record, claim: Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.thinner(claim),
        "s2": crew.taker(record, rolls_back=True),
        "s3": crew.taker(record, rolls_back=False),
        "pinner": crew.pinner(record),
    }


def _leases(store: MemoryStore, record: Record, claim: Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3),
        "s2": crew.taker(record, rolls_back=False),
        "gc": crew.collector(),
        "e1": crew.leaser(record),
        "e2": crew.leaser(record),
    }


CASTS: dict[str, Cast] = {
    "takeover": _takeover,
    "rollback": _rollback,
    "two takeovers": _two_takeovers,
    "thinning": _thinning,
    "leases": _leases,
}
FAULTS = Faults(lose_reply=0.1, delay=0.1, crash=0.01, pause=0.03, strikes=crew.is_lossy)


PAIRS: dict[str, Cast] = {
    "deleter and pinner": lambda store, record, claim: {
        "s1": crew.deleter(claim),
        "pinner": crew.pinner(record),
    },
    "deleter and rollback": lambda store, record, claim: {
        "s1": crew.deleter(claim),
        "s2": crew.taker(record, rolls_back=True, num_saves=0, point=crew.oldest(store)),
    },
    "thinner and rollback": lambda store, record, claim: {
        "s1": crew.thinner(claim),
        "s2": crew.taker(record, rolls_back=True, num_saves=0, point=crew.oldest(store)),
    },
    "thinner and pinner": lambda store, record, claim: {
        "s1": crew.thinner(claim),
        "pinner": crew.pinner(record),
    },
    "deleter and leaser": lambda store, record, claim: {
        "s1": crew.deleter(claim),
        "e1": crew.leaser(record),
    },
    "thinner and leaser": lambda store, record, claim: {
        "s1": crew.thinner(claim),
        "e1": crew.leaser(record),
    },
    "saver and gc": lambda store, record, claim: {
        "s1": crew.saver(claim, record, first=3, num_saves=1),
        "gc": crew.collector(),
    },
    "saver and takeover": lambda store, record, claim: {
        "s1": crew.saver(claim, record, first=3, num_saves=1),
        "s2": crew.taker(record, rolls_back=False, num_saves=0),
    },
    "deleter and reader": lambda store, record, claim: {
        "s1": crew.saver(claim, record, first=3, num_saves=1),
        "reader": crew.reader(record),
    },
}
"""Two actors of which each preempts the other once, at every pair of places."""


@pytest.fixture(autouse=True)
def no_threads_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler orders actors of one thread each, so they read manifests one by one."""
    monkeypatch.setattr(Catalog, "_map", lambda self, read, items: map(read, items))


def play(
    cast: Cast,
    seed: int,
    *,
    faults: Faults = FAULTS,
    plan: Iterable[str] = (),
    checks_standing: bool = False,
) -> Trace:
    """One seeded run of a cast; raises where an invariant broke."""
    store, record = MemoryStore("crew"), Record()
    claim = crew.first_run(store, record)
    trace = run(
        seed,
        cast(store, record, claim),
        faults,
        store=store,
        plan=plan,
        watch=lambda inner: crew.check(inner, record),
    )
    strange = {n: e for n, e in trace.errors.items() if not isinstance(e, HoldfastError)}
    assert not strange, f"{strange}\n{trace}"
    crew.check(store, record)
    if checks_standing:
        crew.check_standing(store, record)
    return trace


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """One actor runs at a time: to wake it on another core takes longer than its step. To the
    engine it is a machine of one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


def _play_seeds(name: str, seeds: range, *, checks_standing: bool = False) -> None:
    for seed in seeds:
        try:
            play(CASTS[name], seed, checks_standing=checks_standing)
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error


@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_of_a_few_breaks_an_invariant(name: str) -> None:
    """R10, R20, R22: nothing is torn, resurrected, lost, or deleted against a promise."""
    _play_seeds(name, range(15), checks_standing=True)


@pytest.mark.full
@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_breaks_an_invariant(name: str) -> None:
    """R10, R20, R22: the same for 100 seeds."""
    _play_seeds(name, range(100))


@pytest.mark.long
@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_of_many_breaks_an_invariant(name: str) -> None:
    """R10, R20, R22: the same for 667 more seeds."""
    _play_seeds(name, range(100, 767))


@pytest.mark.full
@pytest.mark.parametrize("name", CASTS)
def test_the_run_stands_where_people_were_told(name: str) -> None:
    """R10, R22: a takeover never leaves an acknowledged checkpoint behind."""
    _play_seeds(name, range(60), checks_standing=True)


@pytest.mark.parametrize("name", PAIRS)
def test_two_actors_interrupt_each_other_at_some_places(name: str) -> None:
    """R10, R20, R22: an interruption at every step of the first actor; the second's step varies."""
    interrupt_anywhere(name, stride=29)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_two_actors_interrupt_each_other_anywhere(name: str) -> None:
    """R10, R20, R22: every schedule of two actors in which each is interrupted at most once."""
    interrupt_anywhere(name)


def _nobody_reads(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Mutant: the deleter looks for leases before its mark only."""
    real = getattr(retention, function)
    monkeypatch.setattr(
        retention,
        function,
        lambda *args, **options: real(*args, **{**options, "readers": Readers(MemoryStore())}),
    )


def _reader_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the reader trusts its lease at once."""
    monkeypatch.setattr(leases, "_expect_standing", lambda store, folder: None)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        pytest.param(
            "deleter and leaser",
            partial(_nobody_reads, function="delete_checkpoint"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "thinner and leaser", partial(_nobody_reads, function="thin"), marks=pytest.mark.full
        ),
        ("deleter and leaser", _reader_does_not_look),
    ],
)
def test_a_lease_that_one_side_does_not_look_for_is_caught(
    name: str,
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R11: each breaks our own code; the test above must notice."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="V13"):
        interrupt_anywhere(name)


def interrupt_anywhere(name: str, stride: int = 1) -> None:
    """Schedules of a pair in which each is interrupted at most once: all, or one in `stride`."""
    store, record = MemoryStore(), Record()
    one, two = PAIRS[name](store, record, crew.first_run(store, record))
    steps = play(PAIRS[name], 0, faults=Faults(), plan=[one] * 500 + [two] * 500).steps
    num_first = sum(step.startswith(f"{one}:") for step in steps)
    num_second = len(steps) - num_first
    for before in range(num_first + 1):
        for between in range(-before % stride, num_second + 2, stride):
            plan = [one] * before + [two] * between + [one] * 500 + [two] * 500
            try:
                play(PAIRS[name], 0, faults=Faults(), plan=plan)
            except AssertionError as error:
                raise AssertionError(f"{name} at {before}, {between}: {error}") from error
