"""R38: real ranks that hold stages or experts save one checkpoint, and any other cut loads it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distributed.run import run_ranks
from holdfast import CheckpointManager, errors
from stages import NUM_LAYERS, Stage, union

Bits = dict[str, bytes]
Cut = Callable[[int, int], Stage]


def stages(rank: int, num_ranks: int) -> Stage:
    """A pipeline: layers in a row."""
    return Stage.of(rank, num_ranks)


def experts(rank: int, num_ranks: int) -> Stage:
    """A router that all have, and every so many-th expert."""
    return Stage(range(rank, NUM_LAYERS, num_ranks), router=99)


def sharded_stages(rank: int, num_ranks: int) -> Stage:
    """Two stages, each of which is sharded over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("pp", "dp"))
    stage = Stage.of(rank // (num_ranks // 2), 2)
    for layer in stage.model["layers"].values():
        fully_shard(layer, mesh=mesh["dp"])
    return Stage.around(stage.model)


CUTS: Mapping[str, Cut] = {
    "stages": stages,
    "experts": experts,
    "sharded": sharded_stages,
}
SAVED = [("stages", 2), ("stages", 4), ("experts", 4), ("sharded", 4)]


def whole(stage: Stage) -> Bits:
    """The bits of all tensors of this rank, shards gathered."""
    return stage.bits(of=_gathered)


def _gathered(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def save(folder: Path, cut: str, rank: int) -> Bits:
    stage = CUTS[cut](rank, dist.get_world_size())
    with CheckpointManager(folder, stage.state) as manager:
        for step in range(3):
            manager.save(step)
            stage.train()
        manager.save(3, wait=True)
    return whole(stage)


def load(folder: Path, cut: str, rank: int) -> Bits:
    stage = CUTS[cut](rank, dist.get_world_size())
    with torch.no_grad():
        for parameter in stage.model.parameters():
            parameter.zero_()
    with CheckpointManager(folder, stage.state) as manager:
        found = manager.resume()
        assert found is not None
        loaded = whole(stage)
        stage.train()
        manager.save(found.step + 1, wait=True)
        assert manager.load().step == found.step + 1
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Bits]]:
    folder = tmp_path_factory.mktemp("saved")
    expected = {}
    for cut, num_ranks in SAVED:
        parts = run_ranks(num_ranks, partial(save, folder / f"{cut}-{num_ranks}", cut))
        expected[f"{cut}-{num_ranks}"] = union([part for part in parts if part is not None])
    return folder, expected


@pytest.mark.parametrize(
    ("cut", "num_ranks", "root"),
    [
        ("stages", 3, "stages-2"),
        ("experts", 2, "experts-4"),
        pytest.param("stages", 1, "stages-4", marks=pytest.mark.full),
        pytest.param("stages", 2, "sharded-4", marks=pytest.mark.full),
        pytest.param("stages", 2, "stages-4", marks=pytest.mark.full),
        pytest.param("stages", 4, "stages-2", marks=pytest.mark.full),
        pytest.param("stages", 1, "sharded-4", marks=pytest.mark.full),
        pytest.param("sharded", 4, "stages-4", marks=pytest.mark.full),
        pytest.param("sharded", 2, "sharded-4", marks=pytest.mark.full),
        pytest.param("experts", 3, "experts-4", marks=pytest.mark.full),
        pytest.param("experts", 1, "experts-4", marks=pytest.mark.full),
    ],
)
def test_another_cut_goes_on_bit_for_bit(
    cut: str, num_ranks: int, root: str, saved: tuple[Path, dict[str, Bits]], tmp_path: Path
) -> None:
    folder, expected = saved
    shutil.copytree(folder / root, tmp_path / "run")
    parts = run_ranks(num_ranks, partial(load, tmp_path / "run", cut))
    found = union([part for part in parts if part is not None])
    differing = [name for name in expected[root] if found.get(name) != expected[root][name]]
    assert not differing
    assert found.keys() == expected[root].keys()


def save_conflict(folder: Path, rank: int) -> str:
    stage = Stage([rank], router=99)
    if rank == 1:
        stage.optimizer.param_groups[0]["lr"] = 0.2
    with CheckpointManager(folder, stage.state) as manager:
        try:
            manager.save(1, wait=True)
        except errors.HoldfastError as error:
            return f"{error} {error.__cause__}"
    return "committed"


def test_a_conflict_is_refused_with_its_path(tmp_path: Path) -> None:
    for said in run_ranks(2, partial(save_conflict, tmp_path)):
        assert "optimizer.param_groups.0.lr: on rank 0 it is 0.1, on rank 1 0.2" in str(said)
