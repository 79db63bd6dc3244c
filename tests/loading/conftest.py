"""Loads as on a machine of two cores: large tensors are copied with the help of another thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads(_same_numerics: None) -> None:
    torch.set_num_threads(2)


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """A folder on a disk, as reads and writes past the page cache need one."""
    return disk_path
