"""Tiers, compression, encryption, waves and overlap with each other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager, Encryption, Last, Tiered, keys
from holdfast.format.layout import BLOCK_NBYTES
from marks import full

CANARY = "canary_of_a_name"
WORDS = (CANARY, "a secret word", "a-secret-tag", "a_secret_metric", "noise")
WAYS = pytest.mark.parametrize(
    "options",
    [*full({}, {"overlap": True}), {"memory_budget": "32MiB"}],
    ids=["plain", "overlap", "waves"],
)


def state(seed: int) -> dict[str, Any]:
    """More than one block that compresses, and some that does not."""
    torch.manual_seed(seed)
    noise = torch.randn(BLOCK_NBYTES // 4 + 1000)
    return {CANARY: torch.arange(5_000_000) + seed, "noise": noise, "text": "a secret word"}


def is_state(live: dict[str, Any], seed: int) -> bool:
    return all(torch.equal(live[key], state(seed)[key]) for key in (CANARY, "noise"))


@WAYS
def test_a_fresh_machine_resumes_what_was_compressed_sealed_and_sent(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """R34: and neither tier says anything in clear."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    both: dict[str, Any] = {"encrypt": Encryption(keys=keys.generate()), "compress": "zstd"}
    tiers = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(2))
    live = state(0)
    with CheckpointManager(tiers, {"model": live}, **both, **options) as manager:
        manager.resume()
        for step in (1, 2, 3):
            live.update(state(step))
            manager.save(step, wait=True)
        manager.wait()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert not [word for word in WORDS if word in path.name]
        assert not [word for word in WORDS if word.encode() in path.read_bytes()]
    shutil.rmtree(local)
    live = state(9)
    with CheckpointManager(tiers, {"model": live}, **both, **options) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 3
        assert is_state(live, 3)
