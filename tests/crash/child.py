"""A training process for tests: `python child.py ROOT JSON`; tells what it does line by line.

The options: `steps` (how many saves), `takeover`, `pause_before` (wait for a line on standard
input before the n-th save), `end` ("close", "leave" or "hang"), `no_fence` (a mutant of our code).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from holdfast import errors
from holdfast.manager import CheckpointManager
from holdfast.ownership import deletion
from holdfast.root import commit as commit_module


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(root: str, options: dict[str, Any]) -> None:
    if options.get("no_fence"):
        for module in (commit_module, deletion):
            module.check_ownership = lambda *args, **named: None
    tree: dict[str, Any] = {"step": 0, "x": torch.zeros(1000)}
    manager = CheckpointManager(
        root, {"tree": tree}, takeover=options.get("takeover", False), sinks=(), preflight=False
    )
    try:
        found = manager.resume()
        tell(resumed=found.step if found else None)
        for number in range(options.get("steps", 1)):
            if options.get("pause_before") == number:
                tell(waiting=number)
                sys.stdin.readline()
            tree["step"] += 1
            tree["x"].fill_(tree["step"])
            pending = manager.save(tree["step"])
            if options.get("end") == "leave":
                continue
            tell(saved=pending.wait().step)
    except errors.HoldfastError as error:
        tell(error=type(error).__name__, message=str(error))
    if options.get("end") == "hang":
        tell(hanging=True)
        time.sleep(600)
    if options.get("end") != "leave":
        manager.close()
    tell(done=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
