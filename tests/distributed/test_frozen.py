"""Frozen parameters by digest on several ranks: one record for all, or an error that names them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from allranks import Member, all_of, on_ranks
from distributed.run import run_ranks
from holdfast.errors import HoldfastError
from holdfast.events import Event
from holdfast.interop.opening import open_source
from holdfast.manager import CheckpointManager

BASE = {"0.weight", "0.bias"}


def freeze_base(member: Member) -> None:
    member.model[0].requires_grad_(False)
    member.optimizer = torch.optim.AdamW(member.model[1].parameters(), lr=0.1)


def records_of(root: Path) -> tuple[set[str], set[str]]:
    """Names that are recorded by digest, and those that are saved."""
    with open_source(str(root)) as source:
        part = source.parts["model"]
        return {*part.frozen}, {*part.leaves}


def test_replicas_record_one_digest_and_any_number_of_ranks_resumes(tmp_path: Path) -> None:
    def work(member: Member, steps: range) -> dict[str, bytes]:
        freeze_base(member)
        with member.manager(tmp_path, frozen="by digest") as manager:
            manager.resume()
            for step in steps:
                member.train()
                manager.save(step, wait=True)
            return member.bits()

    first = all_of(on_ranks(2, partial(work, steps=range(1, 3))))
    assert first[0] == first[1]
    assert records_of(tmp_path) == (BASE, {"1.weight", "1.bias"})
    assert all_of(on_ranks(3, partial(work, steps=range(0)))) == [first[0]] * 3
    alone = Member(all_alone())
    work(alone, range(3, 4))
    assert records_of(tmp_path)[0] == BASE


def all_alone() -> Any:
    from holdfast.testing.ranks import ThreadCoordinator

    return ThreadCoordinator.for_ranks(1)[0]


@pytest.mark.parametrize("when", ["from the beginning", "by training"])
def test_another_base_on_one_rank_is_refused_by_name(tmp_path: Path, when: str) -> None:
    def work(member: Member) -> str:
        freeze_base(member)
        if when == "from the beginning":
            member.model[0].weight.data[0, 0] += member.rank
        with member.manager(tmp_path, frozen="by digest") as manager:
            manager.resume()
            member.model[0].weight.data[0, 0] += member.rank * (when == "by training")
            try:
                manager.save(1, wait=True)
            except HoldfastError as error:
                return str(error)
        return "committed"

    for said in all_of(on_ranks(2, work)):
        assert re.search(r"model\.(frozen\.)?0\.weight", said), said


def test_a_rank_with_another_base_cannot_resume(tmp_path: Path) -> None:
    def work(member: Member, offset: float) -> str:
        freeze_base(member)
        member.model[0].weight.data[0, 0] += offset * member.rank
        with member.manager(tmp_path, frozen="by digest") as manager:
            try:
                manager.resume()
            except HoldfastError as error:
                return str(error)
            manager.save(1, wait=True)
        return ""

    assert all_of(on_ranks(2, partial(work, offset=0.0))) == ["", ""]
    for said in all_of(on_ranks(2, partial(work, offset=1.0))):
        assert "1 of 2 frozen parameters" in said


def shard_and_save(root: Path, rank: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    events: list[Event] = []
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root, state, frozen="by digest", sinks=[events.append]) as manager:
        manager.resume()
        manager.save(1, wait=True)
    return [event.message for event in events if event.kind == "warning"]


def test_sharded_parameters_are_saved_with_a_warning(tmp_path: Path) -> None:
    messages = run_ranks(2, partial(shard_and_save, tmp_path))
    assert any("model.0.weight (a DTensor" in text for text in messages[0] or ())
    assert records_of(tmp_path) == (set(), {"0.weight", "0.bias", "1.weight", "1.bias"})


def load_sharded(root: Path, rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with CheckpointManager(root, {"model": model}, preflight=False) as manager:
        try:
            manager.load(components=["model"])
        except HoldfastError as error:
            return str(error)
    return ""


def test_a_recorded_base_is_not_compared_with_shards(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        freeze_base(member)
        with member.manager(tmp_path, frozen="by digest") as manager:
            manager.save(1, wait=True)

    all_of(on_ranks(1, work))
    for said in run_ranks(2, partial(load_sharded, tmp_path)):
        assert "0.weight (cannot be compared here: a DTensor" in (said or "")
