"""R38: what is marked `PerRank` is saved for each rank, and each rank gets its own back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from allranks import Member, all_of, on_ranks
from holdfast import CheckpointManager, PerRank, errors, load_weights
from holdfast.format.layout import MAX_TREE_NBYTES
from holdfast.maintenance.verify import verify
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog
from holdfast.saving.save_messages import expand_tree, shorten_tree
from holdfast.store.memory import MemoryStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal


def coordinators(num_ranks: int) -> Sequence[Coordinator]:
    return [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)


class Queue:
    """An object with a state of its own."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


class Versioned(nn.Module):
    """A module whose loading code looks at the version."""

    _version = 3

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((3,), value))
        self.loaded: int | None = None

    @override
    def _load_from_state_dict(self, *args: Any) -> None:
        self.loaded = args[2].get("version")
        super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call]


def make(kind: str, number: int) -> Any:
    """A component of each kind, with contents that tell the number."""
    if kind == "tree":
        return {"n": number, "more": [{"t": torch.full((3,), float(number))}], "$ranks": "text"}
    if kind == "object":
        return Queue([number, torch.full((2,), number)])
    return Versioned(number)


def told(component: Any) -> int:
    """The number in a component; all of it must tell the same."""
    if isinstance(component, dict):
        assert component["more"][0]["t"].tolist() == [component["n"]] * 3
        assert component["$ranks"] == "text"
        return int(component["n"])
    if isinstance(component, Queue):
        assert component.items[1].tolist() == [component.items[0]] * 2
        return int(component.items[0])
    assert component.loaded in (None, 3)
    return int(component.value[0])


def save(kind: str, num_ranks: int, store: Any) -> None:
    def work(member: Member) -> None:
        own = PerRank(make(kind, 10 + member.rank))
        with member.manager(store, state={**member.state, "own": own}) as manager:
            manager.save(1).wait()

    all_of(on_ranks(coordinators(num_ranks), work))


def load(kind: str, num_ranks: int, store: Any) -> list[tuple[int, tuple[str, ...]]]:
    def work(member: Member) -> tuple[int, tuple[str, ...]]:
        own = make(kind, 0)
        with member.manager(store, state={**member.state, "own": PerRank(own)}) as manager:
            found = manager.resume()
            assert found is not None
        return told(own), found.notes

    return all_of(on_ranks(coordinators(num_ranks), work))


@pytest.mark.parametrize(("kind", "num_before"), diagonal(["tree", "object", "module"], [1, 3]))
def test_each_rank_gets_its_own_and_otherwise_that_of_the_rank_modulo_the_old_number(
    kind: str, num_before: int
) -> None:
    store = MemoryStore()
    save(kind, num_before, store)
    for num_ranks in (1, 2, 3, 4):
        found = load(kind, num_ranks, store)
        assert [number for number, _ in found] == [10 + r % num_before for r in range(num_ranks)]
        for _, notes in found:
            assert any("whatever is per rank" in note for note in notes) == (
                num_ranks != num_before
            )
    for entry in Catalog(store).checkpoints():
        assert verify(store, entry.folder).ok


def test_an_optimizer_may_be_of_each_rank() -> None:
    store = MemoryStore()

    def work(member: Member) -> bool:
        member.train()
        for slots in member.optimizer.state.values():
            slots["exp_avg"].fill_(member.rank)
        member.optimizer.param_groups[0]["lr"] = 0.1 * (1 + member.rank)
        bits, rate = member.bits(), member.optimizer.param_groups[0]["lr"]
        state = {"model": member.model, "optimizer": PerRank(member.optimizer)}
        with member.manager(store, state=state) as manager:
            manager.save(1).wait()
            member.optimizer.param_groups[0]["lr"] = 1.0
            member.train()
            manager.load(1)
        return member.bits() == bits and member.optimizer.param_groups[0]["lr"] == rate

    assert all_of(on_ranks(3, work)) == [True] * 3


def test_shapes_that_differ_are_for_the_same_number_of_ranks_only() -> None:
    store = MemoryStore()

    def work(member: Member) -> str | None:
        saves = member.coordinator.world_size == 2 and not Catalog(store).checkpoints()
        own = {"t": torch.full((2 + member.rank if saves else 1,), member.rank)}
        state = {**member.state, "own": PerRank(own)}
        with member.manager(store, state=state, save_timeout_s=300) as manager:
            if saves:
                manager.save(1).wait()
                return None
            try:
                manager.load()
            except errors.HoldfastError as error:
                manager.load(skip=["own"])
                return str(error)
        assert own["t"].tolist() == [member.rank] * (2 + member.rank)
        return "loaded"

    assert all_of(on_ranks(2, work)) == [None, None]
    assert all_of(on_ranks(2, work)) == ["loaded", "loaded"]
    for num_ranks in (1, 3):
        for said in all_of(on_ranks(coordinators(num_ranks), work)):
            assert "own does not fit" in str(said)
            assert "those of ranks 0 and 1 differ in the shapes of tensors (t)" in str(said)
            assert "Load on 2 ranks" in str(said)


def test_a_mark_on_one_rank_only_is_named() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        own: Any = {"n": 1}
        state = {**member.state, "own": PerRank(own) if member.rank else own}
        manager = member.manager(store, state=state, save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return f"{error} {error.__cause__}"
        return "committed"

    for said in all_of(on_ranks(2, work)):
        assert "own (tree, per rank)" in said
        assert "own (tree)" in said


def test_what_is_not_marked_and_differs_is_refused_with_the_way_on() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        state = {**member.state, "own": {"n": member.rank}}
        manager = member.manager(store, state=state, save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return f"{error} {error.__cause__}"
        return "committed"

    assert all("holdfast.PerRank" in said for said in all_of(on_ranks(2, work)))


@pytest.mark.parametrize("changes", [True, False])
def test_a_save_of_the_same_step_commits_only_what_has_changed(changes: bool) -> None:
    store = MemoryStore()

    def work(member: Member) -> bool:
        own = {"n": member.rank}
        with member.manager(store, state={**member.state, "own": PerRank(own)}) as manager:
            manager.save(0).wait()  # all have made their models, with the generators they share
            first = manager.save(1).wait().folder
            if changes and member.rank == 1:
                own["n"] = 5
            return manager.save(1).wait().folder == first

    assert all_of(on_ranks(2, work)) == [not changes] * 2


def test_leaves_that_a_rank_does_not_take_of_its_own_are_refused() -> None:
    """Those of another rank are no excuse."""
    store = MemoryStore()

    def work(member: Member) -> str:
        own = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in "ab"})
        state = {**member.state, "own": PerRank(own)}
        with member.manager(store, state=state) as manager:
            manager.save(1).wait()
        if member.rank == 1:
            del own["b"]
        manager = member.manager(store, state=state, save_timeout_s=300)
        with manager, pytest.raises(errors.HoldfastError) as caught:
            manager.load()
        return str(caught.value)

    assert all("own.b" in said for said in all_of(on_ranks(2, work)))


def test_the_mark_is_of_whole_components_and_of_managers(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="marks a component of a CheckpointManager"):
        CheckpointManager(tmp_path, {"x": PerRank(PerRank({}))})
    with pytest.raises(errors.UsageError, match="a int cannot be a component"):
        CheckpointManager(tmp_path, {"x": PerRank(5)})
    with pytest.raises(errors.UnsupportedState, match=r"x\.inner"):
        CheckpointManager(tmp_path, {"x": {"inner": PerRank({})}}, sinks=())


def test_weights_of_which_each_rank_has_its_own_are_loaded_by_managers_only() -> None:
    store = MemoryStore()

    def work(member: Member) -> None:
        with member.manager(store, state={"model": PerRank(make("module", member.rank))}) as saving:
            saving.save(1).wait()

    all_of(on_ranks(2, work))
    model = make("module", 7)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(errors.UsageError, match="each rank saved its own 'model'"):
        load_weights(store, model)
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("lengths", [(9, 9, 40_000), (40_000, 9, 40_000), (9, 9, 9)])
def test_trees_of_any_length_come_from_other_ranks_whole(lengths: tuple[int, ...]) -> None:
    """They are sent as differences from the leader's tree, if zlib can refer to all of it."""
    store = MemoryStore()

    def value(rank: int) -> list[int]:
        return [*range(rank, lengths[rank] + rank)]

    def work(member: Member) -> bool:
        own = {"values": value(member.rank)}
        with member.manager(store, state={"own": PerRank(own)}) as manager:
            manager.save(1).wait()
        own["values"] = []
        with member.manager(store, state={"own": PerRank(own)}) as manager:
            manager.resume()
        return own["values"] == value(member.rank)

    assert all_of(on_ranks(3, work)) == [True] * 3


def test_a_shortened_tree_is_whole_or_refused() -> None:
    base, tree = b"a tree of the leader, 0", b"a tree of the leader, 1"
    short = shorten_tree(tree, base)
    assert len(short) < len(tree)
    assert expand_tree(short, base) == tree
    with pytest.raises(errors.FormatError, match="damaged"):
        expand_tree(short[:-2], base)
    with pytest.raises(errors.FormatError, match="damaged"):
        expand_tree(b"\xff" + short, base)
    with pytest.raises(errors.FormatError, match="damaged"):
        expand_tree(shorten_tree(bytes(MAX_TREE_NBYTES + 1), base), base)
