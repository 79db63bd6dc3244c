"""R38: one load by several ranks. Invariants 6 and 7: all take one checkpoint, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from allranks import Breaking, Member, Verb, all_of, on_ranks, save_on
from holdfast import errors
from holdfast.checkpoints import StateHooks
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal


def coordinators(num_ranks: int) -> Sequence[Coordinator]:
    return [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)


def newest(store: Store) -> str:
    return max(entry.folder for entry in Catalog(store).checkpoints())


@pytest.mark.parametrize(("num_before", "kind"), diagonal([1, 2, 3], ["local", "memory"]))
def test_any_number_of_ranks_goes_on_bit_for_bit(
    num_before: int, kind: str, ram_path: Path
) -> None:
    store = MemoryStore() if kind == "memory" else LocalStore(ram_path / "run")
    (bits, *_) = save_on(coordinators(num_before), store, [1, 2])
    for num_ranks in (1, 2, 4):

        def work(member: Member) -> tuple[int, dict[str, bytes], int]:
            with torch.no_grad():
                member.model[0].weight.zero_()
            with member.manager(store) as manager:
                found = manager.resume(2)
                assert found is not None
                loaded = member.bits()
                member.train()
                pending = manager.save(3).wait()
            return found.step, loaded, pending.step

        assert all_of(on_ranks(coordinators(num_ranks), work)) == [(2, bits, 3)] * num_ranks


def test_generators_are_those_of_the_rank_and_of_the_rank_modulo_the_old_number() -> None:
    store = MemoryStore()

    def save(member: Member) -> bytes:
        noise = torch.Generator().manual_seed(100 + member.rank)
        with member.manager(store, state={**member.state, "noise": noise}) as manager:
            manager.save(1).wait()
        return noise.get_state().numpy().tobytes()

    saved = all_of(on_ranks(2, save))
    assert saved[0] != saved[1]

    def load(member: Member) -> tuple[bytes, tuple[str, ...]]:
        noise = torch.Generator().manual_seed(7)
        with member.manager(store, state={**member.state, "noise": noise}) as manager:
            found = manager.resume()
        assert found is not None
        return noise.get_state().numpy().tobytes(), found.notes

    for num_ranks in (1, 2, 3, 4):
        loaded = all_of(on_ranks(coordinators(num_ranks), load))
        assert [state for state, _ in loaded] == [saved[rank % 2] for rank in range(num_ranks)]
        for _, notes in loaded:
            assert any("modulo the old number" in note for note in notes) == (num_ranks != 2)


def test_a_named_checkpoint_is_loaded_and_rolled_back_to_by_all() -> None:
    store = MemoryStore()
    save_on(3, store, [1, 2, 3])
    (bits, *_) = save_on(3, MemoryStore(), [1, 2])

    def work(member: Member) -> list[Any]:
        with member.manager(store) as manager:
            before = manager.load(2).step, member.bits() == bits
            newest_ = manager.load().step
            found = manager.resume(2)
            assert found is not None
            after = found.step, member.bits() == bits
            member.train()
            manager.save(9).wait()
            again = manager.resume()
            assert again is not None
            steps = sorted(one.step for one in manager.list())
        return [before, newest_, after, again.step, steps]

    first = [(2, True), 3, (2, True), 9, [1, 2, 3, 9]]
    assert all_of(on_ranks(3, work)) == [first] * 3


def test_a_run_without_a_checkpoint_begins_anew_on_all_ranks_under_one_claim() -> None:
    store = MemoryStore()

    def work(member: Member) -> tuple[object, int]:
        with member.manager(store) as manager:
            found = manager.resume()
            claim = manager._session.owner.claim
            assert claim is not None
            manager.save(1).wait()
        return found, claim.epoch

    assert all_of(on_ranks(3, work)) == [(None, 1)] * 3


def test_a_name_that_does_not_exist_is_an_error_on_all_ranks_at_once() -> None:
    store = MemoryStore()
    save_on(2, store, [1])

    def work(member: Member) -> str:
        manager = member.manager(store, save_timeout_s=300)
        with manager, pytest.raises(errors.HoldfastError) as caught:
            manager.load(7)
        return str(caught.value)

    said = all_of(on_ranks(2, work))
    assert "7" in said[0]
    assert "rank 0, in loading" in said[1]


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("way", ["resume", "load"])
def test_a_state_that_does_not_fit_on_one_rank_changes_nothing_on_any(way: str, odd: int) -> None:
    store = MemoryStore()
    save_on(3, store, [1])
    claims = len(Catalog(store).store.children("writers"))

    def work(member: Member) -> tuple[str, bool]:
        member = Member(member.coordinator, seed=1, width=17 if member.rank == odd else 16)
        before = member.bits()
        with member.manager(store) as manager:
            with pytest.raises(errors.HoldfastError) as caught:
                getattr(manager, way)()
            is_whole = manager._session.applier.half_loaded is None
        return str(caught.value), is_whole and member.bits() == before

    found = all_of(on_ranks(3, work))
    assert all(unchanged for _, unchanged in found)
    assert all("0.weight" in said for said, _ in found), found
    if odd:
        assert f"rank {odd}" in found[0][0]
    assert len(store.children("writers")) == claims


@pytest.mark.parametrize(("odd", "in_place"), diagonal([0, 1, 2], [None, False]))
def test_damage_that_one_rank_reads_makes_all_go_to_the_one_before(
    odd: int, in_place: bool | None
) -> None:
    store = MemoryStore()
    (bits, *_) = save_on(3, MemoryStore(), [1])
    save_on(3, store, [1, 2])
    damaged = newest(store)
    flip = Fault(kind="flip", op="read_into", key=f"{damaged}/model*.safetensors", times=None)
    views = [FaultyStore(store, [flip] if rank == odd else []) for rank in range(3)]

    def work(member: Member) -> tuple[int, bool, list[str]]:
        with member.manager(views[member.rank]) as manager:
            found = manager.resume(in_place=in_place)
            assert found is not None
        return found.step, member.bits() == bits, [folder for folder, _ in found.rejected]

    assert all_of(on_ranks(3, work)) == [(1, True, [damaged])] * 3
    assert f"{damaged}/rejected.json" in {found.key for found in store.list()}


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_with_nothing_usable_left_are_mixed_until_a_whole_load(odd: int) -> None:
    store = MemoryStore()
    save_on(2, store, [1])
    flip = Fault(kind="flip", op="read_into", key="*/model*.safetensors", times=None)

    def work(member: Member) -> tuple[str, str]:
        view = FaultyStore(store, [flip] if member.rank == odd else [])
        with member.manager(view) as manager:
            with pytest.raises(errors.HoldfastError) as caught:
                manager.resume()
            with pytest.raises(errors.ManagerUnusable, match="half loaded") as unusable:
                manager.save(2)
        return str(caught.value), str(unusable.value)

    for said, unusable in all_of(on_ranks(2, work)):
        assert "none can be used. The state is mixed" in said
        assert newest(store) in unusable


class ClaimedFirst(WrappedStore):
    """Notes for each read of the model whether the second claim of the run was there."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.claimed: set[bool] = set()

    @override
    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        if "model" in key and key.endswith(".safetensors"):
            self.claimed.add("writers/00000002.json" in {one.key for one in self.inner.list()})
        self.inner.read_into(key, start, buffer, **options)


@pytest.mark.parametrize("in_place", [None, False])
def test_the_first_resume_of_ranks_reads_tensors_once_the_run_is_claimed(
    in_place: bool | None,
) -> None:
    store = MemoryStore()
    (bits, *_) = save_on(2, store, [1])

    def work(member: Member) -> set[bool]:
        view = ClaimedFirst(store)
        with member.manager(view) as manager:
            manager.resume(in_place=in_place)
        assert member.bits() == bits
        return view.claimed

    assert all_of(on_ranks(2, work)) == [{in_place is None}] * 2


def test_a_rank_that_cannot_read_for_a_moment_makes_no_checkpoint_damaged() -> None:
    store = MemoryStore()
    save_on(2, store, [1, 2])
    brief = Fault(kind="fail", op="read_into", key="*/index.json")
    lasting = Fault(kind="fail", op="read_into", key="*/index.json", times=None)

    def work(fault: Fault, member: Member) -> int | str:
        view = FaultyStore(store, [fault] if member.rank == 1 else [])
        with member.manager(view) as manager:
            try:
                found = manager.resume()
            except errors.HoldfastError as error:
                return str(error)
        assert found is not None
        assert not found.rejected
        return found.step

    assert all_of(on_ranks(2, lambda member: work(brief, member))) == [2, 2]
    said = all_of(on_ranks(2, lambda member: work(lasting, member)))
    assert all("rank 1" in str(one) for one in said), said
    assert all_of(on_ranks(2, lambda member: work(brief, member))) == [2, 2]
    assert not any(key.key.endswith("rejected.json") for key in store.list())


def test_a_rank_that_does_not_see_the_storage_is_named_and_nothing_is_rejected() -> None:
    store = MemoryStore()
    save_on(2, store, [1])

    def work(member: Member) -> str:
        manager = member.manager(store if member.rank == 0 else MemoryStore())
        with manager, pytest.raises(errors.RanksFailed) as caught:
            manager.resume()
        return str(caught.value)

    said = all_of(on_ranks(2, work))
    assert all("rank 1" in one and "same storage" in one for one in said), said
    assert all_of(on_ranks(2, lambda member: member.manager(store).resume())) is not None


def test_an_error_of_the_users_hook_on_one_rank_reaches_all_at_once() -> None:
    store = MemoryStore()
    save_on(2, store, [1])

    def work(member: Member) -> str:
        def edit(stored: Any) -> None:
            if member.rank == 1:
                raise ValueError("my own mistake")

        hooks = StateHooks(edit_load=edit)
        manager = member.manager(store, hooks=hooks, save_timeout_s=300)
        with manager, pytest.raises((errors.RanksFailed, ValueError)) as caught:
            manager.resume()
        return f"{type(caught.value).__name__} {caught.value}"

    said = all_of(on_ranks(2, work))
    assert said[1] == "ValueError my own mistake"
    assert said[0].startswith("RanksFailed")
    assert "rank 1, in reading: ValueError: my own mistake" in said[0]


class Refusing:
    """A component whose load fails after others were loaded."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def check_state_dict(self, state: dict[str, int]) -> None:
        """Accept any state."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise RuntimeError("refused while it is applied")


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_while_it_applies_leaves_all_half_loaded(odd: int) -> None:
    store = MemoryStore()

    def save(member: Member) -> None:
        with member.manager(store, state={**member.state, "z": Refusing(fails=False)}) as manager:
            manager.save(1).wait()

    all_of(on_ranks(3, save))

    def work(member: Member) -> tuple[str, str, int]:
        component = Refusing(fails=member.rank == odd)
        state = {**member.state, "z": component}
        with member.manager(store, state=state, save_timeout_s=300) as manager:
            with pytest.raises(errors.HoldfastError) as caught:
                manager.resume()
            with pytest.raises(errors.ManagerUnusable, match="half loaded") as unusable:
                manager.save(2)
            component.fails = False
            found = manager.resume()
            assert found is not None
            step = manager.save(3).wait().step
        return str(caught.value), str(unusable.value), step

    for said, unusable, step in all_of(on_ranks(3, work)):
        assert "refused while it is applied" in said
        assert "half loaded" in unusable
        assert step == 3


@pytest.mark.parametrize("verb", ["post", "hear"])
def test_a_rank_that_misses_the_order_to_apply_does_not_save(verb: Verb) -> None:
    store = MemoryStore()
    save_on(3, store, [1])
    ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(3)]
    ranks[1] = Breaking(ranks[1], verb, "message 1" if verb == "post" else "message 2", "raise")

    def work(member: Member) -> tuple[bool, str]:
        before, refusal = member.bits(), ""
        with member.manager(store, save_timeout_s=300) as manager:
            with pytest.raises(errors.RanksError):
                manager.resume()
            if member.rank == 1:
                with pytest.raises(errors.ManagerUnusable) as caught:
                    manager.save(2)
                refusal = str(caught.value)
            is_old = member.bits() == before
            assert manager.resume() is not None
            assert manager.save(3).wait().step == 3
        return is_old, refusal

    is_old, refusal = all_of(on_ranks(ranks, work))[1]
    assert is_old
    assert "other ranks may have loaded step-00000001" in refusal


@pytest.mark.parametrize("part", ["message 1", "message 2"])
def test_a_follower_that_dies_is_named_and_who_has_applied_says_so(part: str) -> None:
    store = MemoryStore()
    save_on(3, store, [1])
    ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(3)]
    ranks[2] = Breaking(ranks[2], "post", part, "die")

    def work(member: Member) -> tuple[str, bool]:
        manager = member.manager(store, save_timeout_s=1.5)
        with pytest.raises(errors.HoldfastError) as caught:
            manager.resume()
        is_half = manager._session.applier.half_loaded is not None
        manager.close()
        return str(caught.value), is_half

    first, second, _ = on_ranks(ranks, work)
    for found in (first, second):
        assert not isinstance(found, BaseException), found
        assert found[1] == (part == "message 2")
        assert "rank 2" in found[0]
