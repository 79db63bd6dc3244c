"""Loads as on a machine of two cores: large tensors are copied with the help of another thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads(_same_numerics: None) -> None:
    torch.set_num_threads(2)
