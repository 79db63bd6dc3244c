"""These tests are about a disk, so their temporary folders are on one."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """A folder on a disk, also where other tests use memory."""
    return disk_path
