"""Trains as on macOS: `python macos_child.py ROOT [no-full-sync]`, and says how it went."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import torch
from torch import nn

from platforms import disguised


def main(root: str, *words: str) -> None:
    """Resume, save one step, reopen the root in the same process, and wait to be killed."""
    calls = disguised.as_macos(has_full_sync=not words)
    for module in disguised.modules():
        importlib.import_module(module)
    from holdfast.manager import CheckpointManager
    from holdfast.ownership import claim
    from holdfast.ownership.process import liveness, this_process

    claim.WATCH_S = None  # type: ignore[assignment]  # an error where it would watch heartbeats
    model = nn.Linear(4, 4)
    manager = CheckpointManager(root, {"model": model})
    said: dict[str, Any] = {"resumed": _step(manager.resume())}
    step = (said["resumed"] or 0) + 1
    with torch.no_grad():
        model.weight.fill_(step)
    manager.save(step=step)
    manager.wait()
    del manager
    manager = CheckpointManager(root, {"model": model})
    said["reopened"] = _step(manager.resume())
    us = this_process()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    said["liveness"] = {
        "us": liveness(us),
        "parent": liveness(msgspec.structs.replace(us, pid=os.getppid(), start="1.0")),
        "gone": liveness(msgspec.structs.replace(us, pid=gone.pid, start="1.0")),
        "another boot": liveness(msgspec.structs.replace(us, boot_id="another")),
    }
    said["synced"] = sorted({*calls})
    print(json.dumps(said), flush=True)
    sys.stdin.readline()  # until it is killed


def _step(resumed: Any) -> int | None:
    return None if resumed is None else int(resumed.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
