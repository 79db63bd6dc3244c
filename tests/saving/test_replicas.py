"""What several ranks hold under one name is compared, and a difference is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allranks import Member, all_of, on_ranks
from holdfast import PerRank
from holdfast.errors import HoldfastError
from holdfast.root.catalog import Catalog
from holdfast.saving import distributed
from holdfast.store.memory import MemoryStore
from stages import Stage

State = dict[str, Any]
Change = Callable[[State, int], None]


class Trained(nn.Module):
    """A layer and the statistics of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40)
        self.norm = nn.BatchNorm1d(40)

    def forward(self, batch: Tensor) -> Tensor:
        """Normalize, and apply the layer."""
        return self.layer(self.norm(batch))  # type: ignore[no-any-return]


def trained() -> State:
    """The same state on all ranks, after one step."""
    noise = torch.Generator().manual_seed(0)
    model = Trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 40, generator=noise)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def stages_with_equal_names(state: State, rank: int) -> None:
    part = Stage([0], seed=rank)
    state |= {"model": part.model, "optimizer": part.optimizer}


def experts_with_equal_names(state: State, rank: int) -> None:
    part = Stage([], seed=rank + 1, router=99)
    part.model["expert"] = Stage([rank]).model["layers"][str(rank)]
    part.model["router"] = Stage([], router=99).model["router"]
    state |= {"model": part.model, "optimizer": torch.optim.SGD(part.model.parameters())}


def tensor_parallelism_by_hand(state: State, rank: int) -> None:
    noise = torch.Generator().manual_seed(rank)
    state["model"].layer.weight.data = torch.randn(40, 40, generator=noise)


def a_forgotten_ddp(state: State, rank: int) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(1 + rank)


def momenta_of_their_owner(state: State, rank: int) -> None:
    """Muon over ranks steps each parameter on one of them, which alone has its momentum."""
    state["optimizer"].state[state["model"].layer.weight]["exp_avg"].mul_(float(rank == 0))


def statistics_of_batches(state: State, rank: int) -> None:
    state["model"].norm.running_mean.add_(rank)


def a_tensor_in_a_dict(state: State, rank: int) -> None:
    state["seen"] = {"by_class": torch.arange(3) + rank}


WAYS: dict[Change, str] = {
    stages_with_equal_names: "model.layers.0.weight",
    experts_with_equal_names: "model.expert.weight",
    tensor_parallelism_by_hand: "model.layer.weight",
    a_forgotten_ddp: "model.layer.weight",
    momenta_of_their_owner: "optimizer.layer.weight.exp_avg",
    statistics_of_batches: "model.norm.running_mean",
    a_tensor_in_a_dict: "seen.by_class",
}


def saved(member: Member, store: Any, state: State, steps: range = range(1, 2)) -> str:
    """What the saves of some steps say: "committed", or the first error."""
    with member.manager(store, state=state) as manager:
        try:
            for step in steps:
                manager.save(step, wait=True)
        except HoldfastError as error:
            return str(error)
    return "committed"


def of_state(change: Change, member: Member) -> State:
    state = trained()
    change(state, member.rank)
    return state


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_what_differs_is_refused_with_path_ranks_and_values(change: Change, num_ranks: int) -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        return saved(member, store, of_state(change, member))

    for said in all_of(on_ranks(num_ranks, work)):
        path, others = re.escape(WAYS[change]), "rank 1" if num_ranks == 2 else "ranks 1 to 3"
        found = re.search(rf"{path}: rank 0 and {others} hold .*: at \[.*\] (.*) and (.*) \(", said)
        assert found, said
        assert found[1] != found[2]
    assert not Catalog(store).checkpoints()


def test_values_are_those_of_the_ranks() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        part = {"seen": {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0 + member.rank]])}}
        return saved(member, store, part)

    for said in all_of(on_ranks(3, work)):
        assert "at [1, 1] 4.0 and 5.0 (1 of 4 elements compared differ)" in said


def test_bits_are_compared_so_nan_is_equal_and_zeros_of_two_signs_are_not() -> None:
    def work(member: Member, store: MemoryStore, zero: float) -> str:
        values = torch.tensor([float("nan"), zero if member.rank else 0.0])
        return saved(member, store, {"seen": {"a": values}})

    store = MemoryStore()
    assert all_of(on_ranks(2, lambda m: work(m, store, 0.0))) == ["committed"] * 2
    store = MemoryStore()
    for said in all_of(on_ranks(2, lambda m: work(m, store, -0.0))):
        assert "at [1] 0.0 and -0.0" in said


def test_a_rank_that_holds_other_values_later_is_found_by_the_next_comparison() -> None:
    store = MemoryStore()
    every = distributed._COMPARED_EVERY

    def work(member: Member) -> str:
        state = trained()
        with member.manager(store, state=state) as manager:
            manager.save(1, wait=True)
            a_forgotten_ddp(state, member.rank)
            try:
                for step in range(2, 2 + every):
                    manager.save(step, wait=True)
            except HoldfastError as error:
                return f"{step} {error}"
        return "committed"

    for said in all_of(on_ranks(2, work)):
        assert said.startswith(f"{1 + every} "), said
        assert "model.layer.weight: rank 0 and rank 1" in said
    assert len(Catalog(store).checkpoints()) == every


def test_after_a_refusal_the_next_save_compares_again_and_a_repair_commits() -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        state = trained()
        first = state["model"].layer.weight.detach().clone()
        a_forgotten_ddp(state, member.rank)
        answers = []
        with member.manager(store, state=state) as manager:
            for step in (1, 2, 3):
                if step == 3:
                    for parameter in state["model"].parameters():
                        parameter.data.div_(1 + member.rank)
                try:
                    manager.save(step, wait=True)
                    answers.append("committed")
                except HoldfastError as error:
                    answers.append(
                        "refused" if "hold different values" in str(error) else str(error)
                    )
        assert torch.equal(state["model"].layer.weight, first)
        return answers

    assert all_of(on_ranks(2, work)) == [["refused", "refused", "committed"]] * 2


def test_ranks_may_differ_in_what_each_has_for_itself() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        state = trained()
        state["queue"] = PerRank({"a": torch.full((3,), float(member.rank))})
        state["noise"] = torch.Generator().manual_seed(member.rank)
        return saved(member, store, state, range(1, 2 + distributed._COMPARED_EVERY))

    assert all_of(on_ranks(3, work)) == ["committed"] * 3


def test_buffers_of_any_size_come_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under DDP, which copies them from there; compared, they are equal."""
    store = MemoryStore()
    monkeypatch.setattr(distributed, "synchronized_names", lambda modules: ["large"])

    def work(member: Member) -> list[float]:
        model = nn.Module()
        model.register_buffer("large", torch.full((100_000,), float(member.rank)))
        model.register_parameter("weight", nn.Parameter(torch.ones(300_000)))
        assert saved(member, store, {"model": model}) == "committed"
        with member.manager(store, state={"model": model}) as manager:
            manager.resume()
        return model.large.unique().tolist()  # type: ignore[operator, no-any-return]

    assert all_of(on_ranks(3, work)) == [[0.0]] * 3
