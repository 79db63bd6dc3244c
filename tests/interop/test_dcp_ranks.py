"""DCP on Holdfast with several ranks: FSDP2, other numbers of ranks, saves in the background."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from distributed.jobs import Job, make
from distributed.run import run_ranks
from holdfast import load_weights
from holdfast.interop.dcp import (
    HoldfastReader,
    HoldfastWriter,
    export_folder,
    import_folder,
)
from holdfast.maintenance.verify import verify
from holdfast.ownership.access import locate
from holdfast.root.catalog import Catalog
from holdfast.store import open_store

Bits = dict[str, bytes]


class Counting(DefaultSavePlanner):
    """A planner that caches its plans, in a cache of its own."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def state_of(job: Job) -> dict[str, Any]:
    """The state as torchtitan or Lightning give it to DCP."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optimizer": optimizer, "progress": {"step": 3, "seen": torch.ones(2)}}


def save(root: Path, rank: int, *, steps: int = 1, planner: bool = False) -> Bits:
    """Train and save by DCP; return the bits after the last save."""
    job = make("fsdp", seed=1)
    own = Counting() if planner else None
    for step in range(1, steps + 1):
        job.step()
        dcp.save(state_of(job), storage_writer=HoldfastWriter(root, step=step), planner=own)
    return job.whole()


def load(root: Path, rank: int, *, which: str | None = None) -> Bits:
    """Load by DCP into a training of other weights."""
    job = make("fsdp", seed=2)
    job.step()
    state = state_of(job)
    state["progress"] = {"step": 0, "seen": torch.zeros(2)}
    dcp.load(state, checkpoint_id=which, storage_reader=HoldfastReader(root))
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert state["progress"]["step"] == 3
    assert state["progress"]["seen"].tolist() == [1, 1]
    return job.whole()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bits]:
    """A root with a checkpoint of two ranks, and the bits that were saved."""
    root = tmp_path_factory.mktemp("dcp") / "run"
    bits, _ = run_ranks(2, partial(save, root))
    assert bits is not None
    return root, bits


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_what_two_ranks_save_any_number_loads(saved: tuple[Path, Bits], num_ranks: int) -> None:
    """R38: DCP saves and loads, only the storage is another; every bit comes back."""
    root, bits = saved
    assert run_ranks(num_ranks, partial(load, root)) == [bits] * num_ranks


def test_it_is_one_checkpoint_with_boxes(saved: tuple[Path, Bits]) -> None:
    """What reads a checkpoint of this library reads one that DCP has saved."""
    root, bits = saved
    store, entry = locate(root)
    assert (entry.manifest.sharded, entry.manifest.world_size) == (True, 2)
    assert [*entry.manifest.components] == ["model", "optimizer", "progress"]
    assert verify(store, entry.folder).ok
    model = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 7))
    load_weights(root, model)
    assert {name: t.detach().numpy().tobytes() for name, t in model.named_parameters()} == {
        name: data for name, data in bits.items() if name.count(".") == 1
    }


@pytest.mark.full
def test_cached_plans_are_saved_into_new_folders(tmp_path: Path) -> None:
    """A planner that sends its plan once does for every save, also for those of new writers."""
    bits, _ = run_ranks(2, partial(save, tmp_path / "run", steps=3, planner=True))
    assert [one.step for one in Catalog(open_store(tmp_path / "run")).checkpoints()] == [3, 2, 1]
    assert run_ranks(2, partial(load, tmp_path / "run")) == [bits] * 2


def load_folder(folder: Path, rank: int) -> Bits:
    """Load a folder of DCP with DCP's own reader."""
    job = make("fsdp", seed=2)
    job.step()
    state = state_of(job)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return job.whole()


@pytest.mark.full
def test_dcp_itself_loads_what_was_exported_on_any_number_of_ranks(
    saved: tuple[Path, Bits], tmp_path: Path
) -> None:
    """Boxes become DCP's chunks."""
    root, bits = saved
    export_folder(root, tmp_path / "dcp")
    assert run_ranks(3, partial(load_folder, tmp_path / "dcp")) == [bits] * 3


def save_folder(folder: Path, rank: int) -> Bits:
    """Save by DCP with DCP's own writer."""
    job = make("fsdp", seed=1)
    job.step()
    dcp.save(state_of(job), checkpoint_id=folder)
    return job.whole()


@pytest.mark.full
def test_a_folder_of_several_ranks_is_imported_as_it_is_cut(tmp_path: Path) -> None:
    """DCP's chunks become boxes."""
    bits, _ = run_ranks(2, partial(save_folder, tmp_path / "dcp"))
    import_folder(tmp_path / "dcp", tmp_path / "run", step=3)
    assert locate(tmp_path / "run")[1].manifest.sharded
    assert run_ranks(2, partial(load, tmp_path / "run")) == [bits] * 2


class Failing(DefaultSavePlanner):
    """A planner that cannot give the data of one rank."""

    def resolve_data(self, write_item: Any) -> Any:
        """Raise on rank 1."""
        if dist.get_rank() == 1:
            raise RuntimeError("injected")
        return super().resolve_data(write_item)


def fail_and_save(root: Path, rank: int) -> list[int]:
    """Save, fail on one rank, save again; return how many attempts are there after each."""
    job, found = make("fsdp", seed=1), []
    for step, planner in ((1, None), (2, Failing()), (3, None)):
        job.step()
        writer = HoldfastWriter(root, step=step)
        if planner is None:
            dcp.save(state_of(job), storage_writer=writer)
        else:
            with pytest.raises(CheckpointException, match="injected"):
                dcp.save(state_of(job), storage_writer=writer, planner=planner)
        dist.barrier()
        found.append(sum((root / name).is_dir() for name in os.listdir(root) if "step" in name))
        dist.barrier()
    return found


def test_a_rank_that_fails_leaves_no_checkpoint_and_the_next_save_cleans(tmp_path: Path) -> None:
    """Invariant 1: DCP tells the writer nothing of it; the attempt ends as an aborted one."""
    root = tmp_path / "run"
    run_ranks(2, partial(fail_and_save, root))
    assert [one.step for one in Catalog(open_store(root)).checkpoints()] == [3, 1]
    [aborted] = root.glob("step-00000002.*")
    assert [path.name for path in aborted.iterdir()] == ["manifest.json"]


def save_beside(root: Path, kind: AsyncCheckpointerType, rank: int) -> Bits:
    """Save twice in the background, and once more in the foreground, as torchtitan ends."""
    job = make("fsdp", seed=1)
    writer = HoldfastWriter(root)
    group = dist.new_group(backend="gloo")  # DCP's collectives would mix with those of training
    for step in (1, 2):
        job.step()
        if step == 2:
            before = job.whole()
        pending = dcp.async_save(
            state_of(job),
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=kind,
        )
        job.step()  # what was staged does not change
        pending.result(timeout=120)
    dcp.save(state_of(job), storage_writer=HoldfastWriter(root, step=9))
    return before


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        AsyncCheckpointerType.THREAD,
        pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.full),
    ],
)
def test_saves_in_the_background_commit_where_they_run(
    tmp_path: Path, kind: AsyncCheckpointerType
) -> None:
    """By a thread, or by a process, which then owns the run until its save has ended."""
    root = tmp_path / "run"
    bits, _ = run_ranks(2, partial(save_beside, root, kind))
    assert [one.step for one in Catalog(open_store(root)).checkpoints()] == [9, 2, 1]
    assert run_ranks(2, partial(load, root, which="step-2")) == [bits] * 2
