"""Exports are written past the page cache, for which these tests need a disk."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """A folder on a disk, as reads and writes past the page cache need one."""
    return disk_path
