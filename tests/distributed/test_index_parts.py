"""R38: processes with FSDP2 and HSDP whose checkpoints have an index in parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager
from holdfast.format import index_parts, layout
from holdfast.maintenance.verify import verify_root
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.testing.faulty import FaultyStore
from marks import full


def save(folder: Path, way: str, rank: int) -> dict[str, bytes]:
    index_parts.MAX_FILES, index_parts.PART_WRITERS = 1, 1
    job = make(way, seed=1)
    with CheckpointManager(folder, job.state) as manager:
        for step in (1, 2):
            job.step()
            manager.save(step)
        manager.wait()
    return job.whole()


def load(folder: Path, way: str, expected: dict[str, bytes], rank: int) -> set[str]:
    """Return the documents of the index that this rank has read in the resume."""
    store = FaultyStore(LocalStore(folder))
    job = make(way, seed=2)
    with CheckpointManager(store, job.state) as manager:
        assert manager.resume(2) is not None
        names = {key.rpartition("/")[2] for op, key in store.ops if op == "read_into"}
        assert job.whole() == expected
        dist.barrier()
    return {name for name in names if layout.parse_part(name) is not None}


@pytest.mark.full
@pytest.mark.parametrize("way", ["fsdp", *full("hsdp", "fsdp_tp")])
def test_ranks_read_only_the_parts_with_their_boxes(way: str, tmp_path: Path) -> None:
    saved, *_ = run_ranks(4, partial(save, tmp_path, way))
    assert saved is not None
    report = verify_root(LocalStore(tmp_path))
    assert report.ok, report
    newest, *_ = Catalog(LocalStore(tmp_path)).checkpoints()
    parts = {name for name in newest.manifest.files if layout.parse_part(name) is not None}
    assert parts == {layout.part_name(number) for number in range(1, 5)}
    found = run_ranks(4, partial(load, tmp_path, way, saved))
    if way == "fsdp":
        # Plain tensors, as the steps of the optimizer, are those of the first rank.
        assert found == [{layout.part_name(1), layout.part_name(n)} for n in range(1, 5)]
    for num_ranks in (2,) if way != "fsdp" else (1, 2, 3):
        read = run_ranks(num_ranks, partial(load, tmp_path, "fsdp", saved))
        assert set().union(*(names for names in read if names is not None)) <= parts
