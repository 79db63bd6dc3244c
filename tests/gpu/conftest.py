"""Fixture of the device that these tests run on: CUDA if there is a GPU, else the CPU."""

from __future__ import annotations

import pytest
import torch

from gpu.states import DEVICE


def pytest_report_header() -> str:
    """Name the device in the header that pytest prints."""
    if DEVICE == "cuda":
        return f"tests/gpu: on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"tests/gpu: on CPU tensors, for there is no CUDA here, torch {torch.__version__}"


@pytest.fixture
def device() -> str:
    """The device type on which a test makes its tensors."""
    return DEVICE
