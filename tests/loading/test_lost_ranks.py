"""R38: every way to lose a rank in every part of a load. Invariant 6: half loaded is said.

A rank that dies is a thread whose store and whose messages end; one that is stopped hangs, and goes
on when the others are done.
"""

from __future__ import annotations

from itertools import product
from threading import Event
from typing import Any, Literal

import pytest

from allranks import Breaking, Member, Verb, all_of, on_ranks, save_on
from holdfast import errors
from holdfast.control import exits
from holdfast.loading import distributed as together_module
from holdfast.ranks.coordinator import Coordinator
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, OpName
from holdfast.testing.ranks import ThreadCoordinator

NUM_RANKS = 3
DEADLINE_S = 2.0
How = Literal["raise", "die", "hang"]

# Messages of a load of one candidate: 1 read it, 2 apply it, 3 all have applied it.
OF_LEADER: dict[str, tuple[OpName, str] | tuple[Verb, str]] = {
    "announce the candidate": ("announce", "message 1"),
    "read": ("read_into", "step-*/model*.safetensors"),
    "collect who is ready": ("collect", "message 1"),
    "claim": ("put", "writers/*"),
    "announce the claim": ("announce", "message 2"),
    "collect who has applied": ("collect", "message 2"),
    "announce the end": ("announce", "message 3"),
}
OF_FOLLOWER: dict[str, tuple[OpName, str] | tuple[Verb, str]] = {
    "hear the candidate": ("hear", "message 1"),
    "read": ("read_into", "step-*/model*.safetensors"),
    "post that it is ready": ("post", "message 1"),
    "hear the claim": ("hear", "message 2"),
    "post that it has applied": ("post", "message 2"),
    "hear the end": ("hear", "message 3"),
}
_VERBS = ("post", "collect", "announce", "hear")


def cases() -> list[Any]:
    """All of them; `make test` runs those in which no rank has to wait for a deadline."""
    found = []
    for rank, places in ((0, OF_LEADER), (1, OF_FOLLOWER)):
        for place, how in product(places, ("raise", "die", "hang")):
            marks = () if how == "raise" else pytest.mark.full
            name = f"{'follower' if rank else 'leader'}-{place}-{how}".replace(" ", "_")
            found.append(pytest.param(rank, place, how, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("odd", "place", "how"), cases())
def test_the_living_ranks_have_all_loaded_or_all_say_that_they_have_not(
    odd: int, place: str, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "GRACE_S", 0.5)
    store = MemoryStore()
    (bits, *_) = save_on(NUM_RANKS, store, [1])
    ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(NUM_RANKS)]
    views: list[Store] = [store] * NUM_RANKS
    op, where = (OF_FOLLOWER if odd else OF_LEADER)[place]
    if op in _VERBS:
        broken = Breaking(ranks[odd], op, where, how)  # type: ignore[arg-type]
        release = broken.release
    else:
        fault = Fault(
            kind={"raise": "fail", "die": "stop_before", "hang": "hang"}[how],  # type: ignore[arg-type]
            op=op,  # type: ignore[arg-type]
            key=where,
            times=None if how == "raise" else 1,
            error=errors.TransientStoreError("injected"),
        )
        broken = Breaking(ranks[odd], "hear", "nothing", "die")
        if how == "die":
            broken.died = fault.reached
        views[odd], release = FaultyStore(store, [fault]), fault.release
    ranks[odd] = broken
    are_done = [Event() for _ in ranks]

    def load(member: Member) -> tuple[str, bool, bool, bool]:
        """What the rank says; whether its state is the old, the stored one, or half loaded."""
        manager = member.manager(views[member.rank], save_timeout_s=DEADLINE_S)
        before, said = member.bits(), "loaded"
        try:
            manager.resume()
        except errors.HoldfastError as error:
            said = str(error)
        finally:
            are_done[member.rank].set()
            if all(event.is_set() for rank, event in enumerate(are_done) if rank != odd):
                release.set()
            if (member.rank, how) == (odd, "die"):
                exits.unregister(manager)
        half = manager._session.applier.half_loaded is not None
        manager.close()
        return said, member.bits() == before, member.bits() == bits, half

    found = on_ranks(ranks, load)
    living = all_of([one for rank, one in enumerate(found) if rank != odd])
    assert len({said == "loaded" for said, *_ in living}) == 1, living
    for said, is_old, is_stored, is_half in living:
        if said == "loaded":
            assert is_stored
            assert not is_half
        else:
            assert f"rank {odd}" in said, living
            assert is_old or is_half
    own = found[odd]
    if how != "die":
        assert isinstance(own, tuple), own
        said, is_old, is_stored, is_half = own
        assert (is_stored and not is_half) if said == "loaded" else (is_old or is_half)

    def go_on(member: Member) -> tuple[int | None, bool]:
        with member.manager(store, takeover=True) as manager:
            found = manager.resume()
        return found and found.step, member.bits() == bits

    assert all_of(on_ranks(2, go_on)) == [(1, True)] * 2
