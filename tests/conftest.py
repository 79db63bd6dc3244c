"""Fixtures that many tests share."""

from __future__ import annotations

import pytest
import torch
from runs import Recorder


@pytest.fixture(autouse=True)
def _same_numerics() -> None:
    """Two threads, as on the smallest machine; seeds are each test's own business."""
    torch.set_num_threads(2)


@pytest.fixture
def recorder() -> Recorder:
    """A fresh event recorder."""
    return Recorder()
