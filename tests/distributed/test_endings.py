"""R38: what becomes of saves where a manager, a group or a process ends before the others."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allranks import Member
from distributed.run import run_ranks
from distributed.test_alike import said_by
from holdfast import CheckpointManager
from holdfast.control.stop import Stop
from holdfast.ranks.c10d import C10d, open_group
from marks import full

PATIENCE_S = 60.0
DEADLINE_S = 3.0


def new_store(folder: Path, rank: int) -> dist.Store:
    """A store whose server is in rank 0, as without torchrun."""
    place = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(f"{store.port}")
        os.replace(folder / "new", place)
        return store
    end = time.monotonic() + PATIENCE_S
    while not place.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), wait_for_workers=False)


def end_the_group_first(folder: Path, rank: int) -> list[int]:
    """Close the manager when its process group is gone, with a save under way."""
    dist.destroy_process_group()
    store = new_store(folder, rank)
    open_group("gloo", timeout_s=PATIENCE_S, store=store, rank=rank, world_size=2)
    del store
    state = {"model": {"weight": torch.ones(1000)}}
    with Stop() as stop:
        manager = CheckpointManager(
            folder / "run", state, every="1step", stop=stop, save_timeout_s=PATIENCE_S
        )
        manager.resume()
        manager.maybe_save(1)
        dist.barrier()
        dist.destroy_process_group()
        manager.maybe_save(2)
        manager.close()
    return [one.step for one in manager.list()]


def test_a_manager_outlives_its_process_group(tmp_path: Path) -> None:
    assert run_ranks(2, partial(end_the_group_first, tmp_path)) == [[2, 1]] * 2


def close_on_one_rank(root: Path, odd: int, calls: bool, rank: int) -> str:
    """Save while the manager of one rank is closed, which is told so if it calls."""
    member = Member(C10d.of_default_group())
    manager = member.manager(
        root, every="1step", save_timeout_s=300.0 if calls else DEADLINE_S, on_failure="warn"
    )
    manager.resume()
    assert said_by(manager.maybe_save, 1) == "done"
    said = ""
    if rank == odd:
        manager.close()
    if rank != odd or calls:
        said = said_by(manager.maybe_save, 2)
    dist.barrier()
    if rank != odd:
        manager.wait()
        manager.close()
    return said


@pytest.mark.parametrize("calls", [True, *full(False)])
@pytest.mark.parametrize("odd", [0, *full(1)])
def test_a_manager_that_is_closed_on_one_rank_is_named_on_the_others(
    odd: int, calls: bool, tmp_path: Path
) -> None:
    """At once if that rank goes on to call it, else at the deadline."""
    said = run_ranks(3, partial(close_on_one_rank, tmp_path / "run", odd, calls))
    for rank, one in enumerate(said):
        assert one is not None
        assert rank == odd or f"rank {odd}" in one, said
        assert not calls or "this manager is closed" in one, said


def search(folder: Path, rank: int) -> list[int]:
    """Make managers one after the other; return the number of keys in the store after each."""
    group, sizes = dist.group.WORLD, []
    assert group is not None
    for number in range(5):
        state = {"model": {"weight": torch.ones(10)}}
        with CheckpointManager(folder / f"run{number}", state, every="1step", sinks=()) as manager:
            manager.resume()
            for step in (1, 2, 3):
                manager.maybe_save(step)
        sizes.append(group.get_group_store().num_keys())
    return sizes


@pytest.mark.full
def test_many_managers_in_one_process_do_not_fill_the_store_of_the_group(tmp_path: Path) -> None:
    """As in a search over settings. Before, each left about 26 keys."""
    sizes = run_ranks(2, partial(search, tmp_path))[0]
    assert sizes is not None
    assert max(sizes) < sizes[0] + 10, sizes
