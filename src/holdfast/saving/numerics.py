"""Fingerprint of the numeric settings of a process, for its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


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
    """List the settings that differ from the stored ones, which can break bit-exact resumes.

    A checkpoint without any was imported: how it was computed is not known.
    """
    if not stored:
        return ()
    return tuple(
        f"numerics differ: {name} was {stored.get(name)!r}, is {live.get(name)!r}"
        for name in sorted(set(stored) | set(live))
        if stored.get(name) != live.get(name)
    )
