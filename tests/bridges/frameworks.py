"""The frameworks of the bridges: a test of one is left out only where it cannot be installed."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import pytest

MODULES = {
    "accelerate": "accelerate",
    "ignite": "ignite.engine",
    "lightning": "lightning",
    "sentence_transformers": "sentence_transformers",
    "torchtitan": "torchtitan.components.checkpointer",
    "transformers": "transformers",
    "trl": "trl",
}


def needed(name: str) -> Any:
    """Import a framework. Without it the test is skipped, and fails where `CI` is set.

    torchtitan and trl are for Python 3.11 and newer.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the framework, version by version
            return importlib.import_module(MODULES[name])
    except ImportError as error:
        why = f"{name} is not here, so its bridge is not tested: {error}"
        is_impossible = name in ("torchtitan", "trl") and sys.version_info < (3, 11)
        if os.environ.get("CI") and not is_impossible:
            pytest.fail(why)
        pytest.skip(why, allow_module_level=True)


def say_accelerator() -> None:
    """Have Accelerate shard on the CPU, which it does for kinds of accelerators only."""
    import accelerate

    accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
