"""R38: every way to lose a rank in every part of a save. Invariant 1: one checkpoint, or none.

A rank that dies is a thread whose store and whose messages end; one that is stopped hangs, and goes
on when the others are done. `tests/distributed` does some of it to processes.
"""

from __future__ import annotations

from itertools import product
from threading import Event
from typing import Any, Literal

import pytest
from typing_extensions import override

from allranks import Breaking, Member, Verb, all_of, on_ranks
from holdfast import Encryption, errors
from holdfast.control import exits
from holdfast.encryption.store import sealing
from holdfast.keys import SecretKey
from holdfast.maintenance.verify import verify
from holdfast.ranks.coordinator import Coordinator, RankFailure
from holdfast.root.catalog import Catalog
from holdfast.saving import distributed as together_module
from holdfast.store.base import BlockWriter, Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, OpName
from holdfast.testing.ranks import ThreadCoordinator

NUM_RANKS = 3
DEADLINE_S = 2.0
How = Literal["raise", "full disk", "die", "hang"]
_STORE_FAULTS: dict[str, Any] = {"raise": "fail", "full disk": "fail", "hang": "hang"}

OF_LEADER: dict[str, tuple[OpName, str] | tuple[Verb, str]] = {
    "plan": ("collect", "shares"),
    "announce the plan": ("announce", "plan"),
    "make the folder": ("make_folder", "step-00000002*"),
    "announce the folder": ("announce", "folder"),
    "write": ("write", "step-00000002*.safetensors"),
    "fsync": ("finish", "step-00000002*.safetensors"),
    "collect the files": ("collect", "files"),
    "put the index": ("put", "step-00000002*/index.json"),
    "look at sizes": ("list", "step-00000002*"),
    "commit": ("put", "step-00000002*/manifest.json"),
    "announce the outcome": ("announce", "outcome"),
}
OF_FOLLOWER: dict[str, tuple[OpName, str] | tuple[Verb, str]] = {
    "share": ("post", "shares"),
    "hear the plan": ("hear", "plan"),
    "hear the folder": ("hear", "folder"),
    "write": ("write", "step-00000002*.safetensors"),
    "fsync": ("finish", "step-00000002*.safetensors"),
    "post the files": ("post", "files"),
    "hear the outcome": ("hear", "outcome"),
}
QUICK = (
    "write",
    "put the index",
    "commit",
    "announce the outcome",
    "post the files",
    "hear the plan",
)
"""Places at which `make test` has an error."""
AGREEMENT = ("plan", "announce the plan", "share", "hear the plan")
"""Places that are in the caller's thread if the structure has changed."""
_VERBS = ("post", "collect", "announce", "hear")


def cases() -> list[Any]:
    """All of them; `make test` runs those in which no rank has to wait for a deadline, and one of
    each of the other kinds."""
    found = []
    brief = {(1, "share", "die"), (1, "fsync", "die"), (0, "commit", "hang")}
    for rank, places in ((0, OF_LEADER), (1, OF_FOLLOWER)):
        for place, how in product(places, ("raise", "full disk", "die", "hang")):
            op, _ = places[place]
            if how == "full disk" and op in _VERBS:
                continue
            is_slow = how in ("die", "hang") and (rank, place, how) not in brief
            is_full = is_slow or (how == "full disk" and place != "write")
            is_full |= how == "raise" and place not in QUICK
            marks = pytest.mark.full if is_full else ()
            name = f"{'follower' if rank else 'leader'}-{place}-{how}".replace(" ", "_")
            found.append(pytest.param(rank, place, how, False, marks=marks, id=name))
            if place in AGREEMENT:
                is_quick = place in ("share", "announce the plan") and how == "raise"
                marks = () if is_quick else pytest.mark.full
                found.append(pytest.param(rank, place, how, True, marks=marks, id=f"{name}-anew"))
    return found


def encrypted_cases() -> list[Any]:
    """Without one file: that of the index, whose name does not tell."""
    found = []
    for rank, places in ((0, OF_LEADER), (1, OF_FOLLOWER)):
        for place, how in product(places, ("raise", "die")):
            if place != "put the index":
                is_quick = how == "raise" and place in ("commit", "write", "post the files")
                marks = () if is_quick else pytest.mark.full
                name = f"{'follower' if rank else 'leader'}-{place}-{how}".replace(" ", "_")
                found.append(pytest.param(rank, place, how, marks=marks, id=name))
    return found


class Scene:
    """Ranks of which one meets a fault in its second save."""

    def __init__(
        self,
        store: Store,
        odd: int,
        place: str,
        how: How,
        *,
        anew: bool,
        encrypt: Encryption | None = None,
    ) -> None:
        ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(NUM_RANKS)]
        self.odd, self.how, self.anew, self.ranks = odd, how, anew, ranks
        self.encrypt = encrypt
        self.views: list[Store] = [store] * NUM_RANKS
        op, where = (OF_FOLLOWER if odd else OF_LEADER)[place]
        if encrypt is not None:
            where = where.replace(".safetensors", ".sealed")
        never: Verb = "hear"
        if op in _VERBS:
            tag = f"save 2 of manager 1, {where}"
            broken = Breaking(ranks[odd], op, tag, how)  # type: ignore[arg-type]
            self.release = broken.release
        else:
            fault = Fault(
                kind=_STORE_FAULTS.get(how, "stop_before"),
                op=op,  # type: ignore[arg-type]
                key=where,
                times=None if how == "full disk" else 1,
                error=(errors.StoreFull if how == "full disk" else errors.StoreError)("injected"),
            )
            broken = Breaking(ranks[odd], never, "nothing", "die")
            if how == "die":
                broken.died = fault.reached
            self.views[odd] = FaultyStore(store, [fault])
            self.release = fault.release
        ranks[odd] = broken
        self.living_are_done = [Event() for _ in ranks]

    def save_twice(self, member: Member) -> str:
        """Save steps 1 and 2; returns what the rank says of step 2."""
        manager = member.manager(
            self.views[member.rank], save_timeout_s=DEADLINE_S, encrypt=self.encrypt
        )
        if not self.anew:
            member.train()  # else the optimizer gets its slots between the saves
        manager.save(1).wait(60)
        member.train()
        said = "committed"
        try:
            # A dead rank may never say what became of its save, and one that hangs does so late.
            limit_s = {"die": 1, "hang": 60}.get(self.how) if member.rank == self.odd else None
            manager.save(2).wait(limit_s)
        except errors.HoldfastError as error:
            said = f"{error} {error.__cause__}"
        finally:
            self.living_are_done[member.rank].set()
            others = [e for rank, e in enumerate(self.living_are_done) if rank != self.odd]
            if all(event.is_set() for event in others):
                self.release.set()
            if (member.rank, self.how) == (self.odd, "die"):
                exits.unregister(manager)
        manager.close()
        return said


@pytest.mark.parametrize(("odd", "place", "how", "anew"), cases())
def test_the_living_ranks_agree_with_the_register_and_the_run_goes_on(
    odd: int, place: str, how: How, anew: bool, ram_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "GRACE_S", 0.5)
    store = LocalStore(ram_path / "run")
    expect_agreement(store, Scene(store, odd, place, how, anew=anew))


@pytest.mark.parametrize(("odd", "place", "how"), encrypted_cases())
def test_so_do_ranks_that_encrypt(
    odd: int, place: str, how: How, ram_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "GRACE_S", 0.5)
    seals = Encryption(keys=SecretKey(bytes(range(32))))
    store = LocalStore(ram_path / "run")
    expect_agreement(store, Scene(store, odd, place, how, anew=False, encrypt=seals))


def expect_agreement(root: Store, scene: Scene) -> None:
    """All living ranks say of the second save what the register says, and the run goes on."""
    store, odd, how = sealing(root, scene.encrypt), scene.odd, scene.how
    said = on_ranks(scene.ranks, scene.save_twice)
    entries = Catalog(store).checkpoints()
    for entry in entries:
        assert verify(store, entry.folder).ok
    steps = sorted(entry.step for entry in entries)
    assert steps[0] == 1
    has_committed = steps == [1, 2]

    living = [one for rank, one in enumerate(said) if rank != odd]
    assert all(isinstance(one, str) for one in living), living
    assert all((one == "committed") == has_committed for one in living), said
    if how in ("raise", "full disk", "hang"):
        own = said[odd]
        assert isinstance(own, str), own
        is_in_doubt = "may or may not have committed" in own
        assert is_in_doubt or (own == "committed") == has_committed, said
    if not has_committed:
        assert all(f"rank {odd}" in str(one) for one in living), said

    def go_on(member: Member) -> tuple[int, int]:
        with member.manager(root, takeover=True, encrypt=scene.encrypt) as manager:
            found = manager.resume()
            assert found is not None
            return found.step, manager.save(3).wait().step

    assert all_of(on_ranks(2, go_on)) == [(steps[-1], 3)] * 2


class Unsure(Breaking):
    """Coordinator of a rank whose post of its files arrives, although the rank sees an error."""

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.inner.post(tag, data, timeout_s=timeout_s)
        self._meet("post", tag)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        self._meet("post", tag)  # it cannot say so, either


def test_a_follower_whose_post_may_have_arrived_waits_for_the_outcome() -> None:
    """Else it would say that the save failed, and the leader that it committed."""
    store, ranks = MemoryStore(), ThreadCoordinator.for_ranks(2)
    unsure = Unsure(ranks[1], "post", "files", "raise")

    def work(member: Member) -> str:
        with member.manager(store) as manager:
            return manager.save(1).wait().folder

    leader, follower = all_of(on_ranks([ranks[0], unsure], work))
    assert unsure.reached.is_set()
    assert leader == follower


def test_a_follower_that_cannot_read_the_manifest_is_in_doubt() -> None:
    """The leader has committed, so the follower must not say that the save failed."""
    store = MemoryStore()
    damaged = FaultyStore(store, [Fault(kind="flip", op="get", key="*/manifest.json", times=None)])

    def work(member: Member) -> str:
        manager = member.manager([store, damaged][member.rank])
        error = manager.save(1).committed.exception(60)
        if error is not None:
            with pytest.raises(errors.SaveFailed):
                manager.close()
        return str(error)

    leader, follower = all_of(on_ranks(2, work))
    assert leader == "None"
    assert "may or may not have committed" in follower


class Late(FaultyStore):
    """A view of a store whose files vanish while they are made, once an event is set."""

    def __init__(self, inner: Store, vanished: Event) -> None:
        super().__init__(inner)
        self._vanished = vanished

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        assert self._vanished.wait(60)
        raise errors.NotFound(f"{key}: its folder is gone")


def test_a_follower_whose_files_the_leader_has_removed_says_why_the_leader_gave_up() -> None:
    """In this order: the leader fails and removes the files, then the follower finds them gone."""
    store = MemoryStore()
    full = Fault(kind="fail", op="create", error=errors.StoreFull("no room left"), times=None)
    has_failed = Event()
    views = [FaultyStore(store, [full]), Late(store, has_failed)]

    def work(member: Member) -> str:
        manager = member.manager(views[member.rank], save_timeout_s=300.0)
        pending = manager.save(1)
        error = pending.committed.exception(60)
        if member.rank == 0:
            has_failed.set()
        with pytest.raises(errors.SaveFailed):
            manager.close()
        return f"{error} {error.__cause__ if error else None}"

    leader, follower = all_of(on_ranks(2, work))
    assert "no room left" in leader
    assert "rank 0, in " in follower
    assert "no room left" in follower
    assert "same storage" not in follower
