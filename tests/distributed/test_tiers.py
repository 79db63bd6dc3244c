"""R38: ranks with FSDP2 save into a local tier that they share, and load from either tier."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager, Encryption, Tiered
from holdfast.encryption.store import sealing
from holdfast.keys import SecretKey
from holdfast.maintenance.verify import verify_root
from holdfast.store.local import LocalStore
from marks import full

NUM_STEPS = 2


def seals(is_encrypted: bool) -> Encryption | None:
    return Encryption(keys=SecretKey(bytes(range(32)))) if is_encrypted else None


def save(folder: Path, is_encrypted: bool, rank: int) -> dict[str, bytes]:
    job = make("fsdp", seed=1)
    root = Tiered(folder / "local", folder / "remote")
    with CheckpointManager(root, job.state, encrypt=seals(is_encrypted)) as manager:
        for step in range(1, NUM_STEPS + 1):
            job.step()
            manager.save(step)
        manager.wait()
    return job.whole()


def load(folder: Path, is_encrypted: bool, expected: dict[str, bytes], rank: int) -> None:
    job = make("fsdp", seed=2)
    root = Tiered(folder / "local", folder / "remote")
    with CheckpointManager(root, job.state, encrypt=seals(is_encrypted)) as manager:
        found = manager.resume()
        assert found is not None
        assert job.whole() == expected
        job.step()
        manager.save(found.step + 1, wait=True)


@pytest.mark.full
@pytest.mark.parametrize("is_encrypted", [True, *full(False)])
def test_ranks_resume_from_the_local_tier_and_from_the_remote_one(
    is_encrypted: bool, tmp_path: Path
) -> None:
    saved, *_ = run_ranks(2, partial(save, tmp_path, is_encrypted))
    for tier in ("local", "remote"):
        report = verify_root(sealing(LocalStore(tmp_path / tier), seals(is_encrypted)))
        assert report.ok, report
    fresh = tmp_path / "fresh"
    shutil.copytree(tmp_path / "remote", fresh / "remote", symlinks=True)
    run_ranks(2, partial(load, tmp_path, is_encrypted, saved))
    run_ranks(3, partial(load, fresh, is_encrypted, saved))
    for folder in (tmp_path, fresh):
        remote = sealing(LocalStore(folder / "remote"), seals(is_encrypted))
        assert len(verify_root(remote).checkpoints) == NUM_STEPS + 1
