"""Fingerprint of the numeric settings and the environment of a process, for its checkpoints."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from holdfast.version import __version__


def numerics(world_size: int = 1) -> dict[str, Any]:
    """Read the torch and device settings that bit-exact results depend on (invariant 7).

    Never initialises a device.
    """
    found: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": _setting(torch.get_float32_matmul_precision),
        "world_size": world_size,
        "device": "cpu",
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= _cuda()
    return found


def _cuda() -> dict[str, Any]:
    backends = torch.backends
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda or "",
        "cudnn": backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "tf32_matmul": _setting(lambda: backends.cuda.matmul.allow_tf32),
        "tf32_cudnn": _setting(lambda: backends.cudnn.allow_tf32),
    }


def _setting(read: Callable[[], Any]) -> Any:
    """Read a setting; "set per operator" if torch refuses, as after use of its newer names."""
    try:
        return read()
    except RuntimeError:
        return "set per operator"


def differences(stored: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[str, ...]:
    """List the settings that differ from the stored ones, which can break bit-exact resumes."""
    return tuple(
        f"numerics differ: {name} was {stored.get(name)!r}, is {live.get(name)!r}"
        for name in sorted(set(stored) | set(live))
        if stored.get(name) != live.get(name)
    )


@lru_cache(maxsize=1)
def environment() -> Mapping[str, Any]:
    """Describe this process: Python, libraries, host, program and git commit; cached."""
    return {
        "python": platform.python_version(),
        "holdfast": __version__,
        "platform": platform.platform(),
        "numpy": np.__version__,
        "host": socket.gethostname(),
        "program": os.path.basename(sys.argv[0]) if sys.argv else "",
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Return the git commit of the working folder; None if git or a checkout is missing."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
