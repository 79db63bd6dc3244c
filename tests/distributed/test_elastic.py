"""R38: what one number of ranks saves in one way, another loads in another, bit by bit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.jobs import WAYS, make
from distributed.run import run_ranks
from holdfast import CheckpointManager

Saved = dict[str, dict[str, bytes]]
"""Bytes of whole tensors, by root and name."""
NUM_STEPS = 3


def save_all(folder: Path, rank: int) -> Saved:
    """Train in all ways that this number of ranks allows; save before and after the first step."""
    world_size, saved = dist.get_world_size(), {}
    for name, way in WAYS.items():
        if world_size not in way.ranks:
            continue
        job = make(name, seed=1)
        with CheckpointManager(folder / f"{name}-{world_size}", job.state) as manager:
            manager.save(0)
            for step in range(1, NUM_STEPS + 1):
                job.step()
                manager.save(step)
            manager.wait()
            assert [found.step for found in manager.list()] == [3, 2, 1, 0]
        saved[f"{name}-{world_size}"] = job.whole()
    return saved


def load_all(folder: Path, expected: Saved, way: str, rank: int) -> list[str]:
    """Resume each saved training in one way; return how many checkpoints were compared."""
    compared = []
    for root, whole in expected.items():
        job = make(way, seed=2)
        with CheckpointManager(folder / root, job.state) as manager:
            found = manager.resume()
            assert found is not None
            assert found.step == NUM_STEPS
            loaded = job.whole()
            assert loaded.keys() == whole.keys(), root
            differing = [name for name, data in loaded.items() if data != whole[name]]
            assert not differing, f"{root} as {way}"
            job.step()
            manager.save(found.step + 1, wait=True)
        compared.append(root)
    return compared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    folder = tmp_path_factory.mktemp("saved")
    expected: Saved = {}
    for num_ranks in (2, 4):
        results = run_ranks(num_ranks, partial(save_all, folder))
        expected |= results[0] or {}
    return folder, expected


def cases() -> list[tuple[str, int]]:
    """Every way on every number of ranks that it takes."""
    return [(name, ranks) for name, way in WAYS.items() for ranks in way.ranks]


@pytest.mark.full
@pytest.mark.parametrize(("way", "num_ranks"), cases())
def test_each_is_loaded_as_each(
    way: str, num_ranks: int, saved: tuple[Path, Saved], tmp_path: Path
) -> None:
    folder, expected = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    compared = run_ranks(num_ranks, partial(load_all, tmp_path, expected, way))
    assert compared == [[*expected]] * num_ranks
