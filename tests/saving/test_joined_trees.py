"""R38: ranks that hold different parts of a module make one checkpoint, that any cut loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from allranks import Member, all_of, on_ranks
from holdfast import errors
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal
from stages import NUM_LAYERS, Stage, union

Saved = tuple[MemoryStore, dict[str, bytes]]


def coordinators(num_ranks: int) -> Sequence[Coordinator]:
    return [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)


def experts(rank: int, num_ranks: int, seed: int = 1) -> Stage:
    """A router that all have, and every so many-th expert."""
    return Stage(range(rank, NUM_LAYERS, num_ranks), seed=seed, router=99)


def stage(rank: int, num_ranks: int, seed: int = 1) -> Stage:
    return Stage.of(rank, num_ranks, seed=seed)


CUTS = {"stages": stage, "experts": experts}


def save(cut: str, num_ranks: int, store: Any) -> dict[str, bytes]:
    def work(member: Member) -> dict[str, bytes]:
        part = CUTS[cut](member.rank, num_ranks)
        with member.manager(store, state=part.state) as manager:
            manager.save(0).wait()
            for step in (1, 2):
                part.train()
                manager.save(step).wait()
        return part.bits()

    return union(all_of(on_ranks(coordinators(num_ranks), work)))


@pytest.mark.parametrize(("cut", "num_before"), diagonal([*CUTS], [1, 2, 4]))
def test_any_other_cut_goes_on_bit_for_bit(cut: str, num_before: int) -> None:
    store = MemoryStore()
    bits = save(cut, num_before, store)
    for num_ranks in (1, 2, 3, 4):

        def work(
            member: Member, num_ranks: int = num_ranks
        ) -> tuple[dict[str, bytes], tuple[str, ...]]:
            part = CUTS[cut](member.rank, num_ranks, seed=2)
            with member.manager(store, state=part.state) as manager:
                found = manager.resume(2)
                assert found is not None
                loaded = part.bits()
                part.train()
                manager.save(2 + num_ranks).wait()
            return loaded, found.notes

        found = all_of(on_ranks(coordinators(num_ranks), work))
        assert union([loaded for loaded, _ in found]) == bits
        assert not [
            note for _, notes in found for note in notes if "in the checkpoint only" in note
        ]
    for entry in Catalog(store).checkpoints():
        assert verify(store, entry.folder).ok


def test_the_checkpoint_is_that_of_one_process_by_name() -> None:
    """Whoever knows nothing of ranks reads it."""
    apart, whole = MemoryStore(), MemoryStore()
    save("stages", 4, apart)
    save("stages", 1, whole)
    found = [
        {entry.step: entry.manifest.components for entry in Catalog(store).checkpoints()}
        for store in (apart, whole)
    ]
    for step in (0, 1, 2):
        for name in ("model", "optimizer"):
            assert found[0][step][name].num_tensors == found[1][step][name].num_tensors


def test_a_rank_without_a_parameter_takes_part() -> None:
    store = MemoryStore()

    def part_of(member: Member, seed: int) -> Stage:
        return Stage([0] if member.rank == 1 else [], seed=seed)

    def work(member: Member) -> dict[str, bytes]:
        part = part_of(member, 1)
        part.train()
        part.optimizer.param_groups[1]["lr"] = 0.01
        with member.manager(store, state=part.state) as manager:
            manager.save(1).wait()
        again = part_of(member, 2)
        with member.manager(store, state=again.state) as manager:
            assert manager.resume() is not None
        assert again.bits() == part.bits()
        return part.bits()

    bits = union(all_of(on_ranks(3, work)))
    assert bits["lr 1"] == b"(0.01, 0.0)"


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_leaf_that_no_rank_takes_is_an_error_on_all_and_a_note_if_that_is_wanted(
    is_strict: bool,
) -> None:
    store = MemoryStore()
    save("stages", 2, store)

    def work(member: Member) -> tuple[str, bool]:
        part = Stage([n for n in (0, 1, 2, 4, 5, 6, 7) if n % 3 == member.rank], seed=2)
        before = part.bits()
        with member.manager(store, state=part.state, save_timeout_s=300) as manager:
            try:
                found = manager.load(strict=is_strict)
                said = "\n".join(found.notes)
            except errors.HoldfastError as error:
                said = str(error)
        return said, part.bits() == before

    for said, is_as_before in all_of(on_ranks(3, work)):
        assert is_as_before == is_strict
        assert "model.layers.3.weight" in said
        assert "optimizer.layers.3.bias" in said
        assert "layers.2" not in said


@pytest.mark.parametrize("odd", [0, 1])
def test_a_leaf_that_the_checkpoint_lacks_is_an_error_on_all(odd: int) -> None:
    store = MemoryStore()
    save("stages", 2, store)

    def work(member: Member) -> tuple[str, bool]:
        more = [NUM_LAYERS] if member.rank == odd else []
        part = Stage([*range(member.rank, NUM_LAYERS, 2), *more], seed=2)
        before = part.bits()
        manager = member.manager(store, state=part.state, save_timeout_s=300)
        with manager, pytest.raises(errors.HoldfastError) as caught:
            manager.resume()
        return str(caught.value), part.bits() == before

    for said, is_as_before in all_of(on_ranks(2, work)):
        assert is_as_before
        assert "model.layers.8.weight" in said


def test_one_process_misses_what_another_rank_would_take() -> None:
    store = MemoryStore()
    save("stages", 2, store)
    part = Stage(range(4), seed=2)
    manager = CheckpointManager(store, part.state, ranks=None, sinks=())
    with manager, pytest.raises(errors.MismatchError, match=r"layers\.7\.weight"):
        manager.resume()


def test_what_ranks_hold_differently_is_refused_with_every_path() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        part = Stage([member.rank], router=99)
        part.train()
        if member.rank == 1:
            part.optimizer.param_groups[0]["lr"] = 0.2
            part.optimizer.param_groups[1]["betas"] = (0.8, 0.9)
        with member.manager(store, state=part.state, save_timeout_s=300) as manager:
            try:
                manager.save(1).wait()
            except errors.HoldfastError as error:
                said = f"{error} {error.__cause__}"
            part.optimizer.param_groups[0]["lr"] = 0.1
            part.optimizer.param_groups[1]["betas"] = (0.9, 0.999)
            manager.save(2).wait()
        return said

    for said in all_of(on_ranks(3, work)):
        assert "optimizer.param_groups.0.lr: on rank 0 it is 0.1, on rank 1 0.2" in said
        assert "optimizer.param_groups.1.betas" in said
    assert [entry.step for entry in Catalog(store).checkpoints()] == [2]


def test_a_parameter_of_two_shapes_is_refused_by_path() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        part = Stage([member.rank], router=99)
        if member.rank == 1:
            part.model["router"].weight.data = torch.ones(3, 6)
        manager = member.manager(store, state=part.state, save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return f"{error} {error.__cause__}"
        return ""

    assert all("model.router.weight" in said for said in all_of(on_ranks(2, work)))


@pytest.mark.parametrize("changes", [True, False])
def test_a_save_of_the_same_step_commits_only_what_has_changed(changes: bool) -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        part = stage(member.rank, 2)
        part.train()
        folders = []
        with member.manager(store, state=part.state) as manager:
            manager.save(0).wait()  # all have made their layers, with the generators they share
            folders.append(manager.save(1).wait().folder)
            if changes and member.rank == 1:
                with torch.no_grad():
                    part.model["layers"]["7"].weight.add_(1)
            folders.append(manager.save(1).wait().folder)
        return folders

    for first, second in all_of(on_ranks(2, work)):
        assert (first == second) != changes


def test_kinds_of_components_that_differ_are_named() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        part = stage(member.rank, 2)
        state = {**part.state, "more": [1] if member.rank else torch.nn.Linear(1, 1)}
        manager = member.manager(store, state=state, save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return f"{error} {error.__cause__}"
        return ""

    for said in all_of(on_ranks(2, work)):
        assert "more (module)" in said
        assert "more (tree)" in said
