"""The real engine under a seeded scheduler keeps the invariants that the model promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.store.memory import MemoryStore

from . import crew
from .crew import Record
from .scheduler import Actor, Faults, Trace, run

Cast = Callable[[Record, crew.Claim], Mapping[str, Actor]]


def _takeover(record: Record, claim: crew.Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3),
        "s2": crew.taker(record, rolls_back=False),
        "gc": crew.collector(),
        "reader": crew.reader(record),
    }


def _rollback(record: Record, claim: crew.Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3),
        "s2": crew.taker(record, rolls_back=True),
        "gc": crew.collector(),
        "pinner": crew.pinner(record),
    }


def _two_takeovers(record: Record, claim: crew.Claim) -> Mapping[str, Actor]:
    return {
        "s1": crew.saver(claim, record, first=3, num_saves=1),
        "s2": crew.taker(record, rolls_back=False),
        "s3": crew.taker(record, rolls_back=False),
        "gc": crew.collector(),
    }


CASTS: dict[str, Cast] = {
    "takeover": _takeover,
    "rollback": _rollback,
    "two takeovers": _two_takeovers,
}
FAULTS = Faults(lose_reply=0.1, delay=0.1, crash=0.01, pause=0.03, strikes=crew.is_lossy)


def play(cast: Cast, seed: int, *, checks_standing: bool) -> Trace:
    """One seeded run of a cast; raises where an invariant broke."""
    store, record = MemoryStore("crew"), Record()
    claim = crew.first_run(store, record)
    trace = run(
        seed,
        cast(record, claim),
        FAULTS,
        store=store,
        watch=lambda inner: crew.check(inner, record),
    )
    strange = {n: e for n, e in trace.errors.items() if not isinstance(e, crew.EXPECTED)}
    assert not strange, f"{strange}\n{trace}"
    if checks_standing:
        crew.check_standing(store, record)
    return trace
