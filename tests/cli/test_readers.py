"""What the commands say of those who read a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, folder_of

from holdfast.format import layout
from holdfast.ownership.leases import leased
from holdfast.store.local import LocalStore
from runs import new_run

Command = Callable[..., Result]


@pytest.fixture
def unmarked(tmp_path: Path) -> Path:
    """Two checkpoints, without pins and tags."""
    with new_run().manager(tmp_path / "unmarked", sinks=()) as manager:
        for step in (100, 200):
            manager.save(step)
    return tmp_path / "unmarked"


def test_ls_and_prune_name_the_reader(holdfast: Command, unmarked: Path) -> None:
    folder = folder_of(unmarked, 100).name
    with leased(LocalStore(unmarked), folder):
        assert f"{folder} is read by process {os.getpid()} on " in holdfast("ls", unmarked).out
        (reader,) = holdfast("ls", unmarked, "--json").document["readers"]
        assert (reader["folder"], reader["pid"], reader["state"]) == (folder, os.getpid(), "alive")
        pruned = holdfast("prune", unmarked, "--keep", "last:1", "--json").document
        assert pruned["postponed"][0]["folder"] == folder
        assert folder not in pruned["deleted"]
        assert f"reads {folder}" in holdfast("gc", unmarked).out
    assert holdfast("ls", unmarked, "--json").document["readers"] == []
    assert holdfast("prune", unmarked, "--keep", "last:1").code == 0
    assert not list(unmarked.glob(f"{folder}/model*"))


def test_an_unreadable_lease_is_listed_with_what_is_known(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 100).name
    path = root / layout.lease_key(folder, "0" * 32)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x00")
    (reader,) = holdfast("ls", root, "--json").document["readers"]
    expected: dict[str, Any] = {"host": None, "pid": None, "since": None, "state": "unknown"}
    assert reader == {"folder": folder, **expected}
    result = holdfast("ls", root)
    assert result.code == 0
    assert f"{folder} is read by a process whose lease" in result.out
