"""A training that can be asked for saves: `python asked.py ROOT [HOW]`.

Resumes, says `ready`, and trains step after step until a file `ROOT/stop` is there. HOW is `broken`
(every save fails: its state cannot be captured any more) or `stuck` (it never comes to an end of a
step).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from holdfast.manager import CheckpointManager


def main(root: str, how: str) -> None:
    state = {"step": 0, "x": torch.zeros(8)}
    pause = threading.Event()
    with CheckpointManager(root, {"state": state}, sinks=(), preflight=False) as manager:
        manager.resume()
        print("ready", flush=True)
        if how == "broken":
            state["lock"] = threading.Lock()
        while not Path(root, "stop").exists():
            state["step"] += 1
            state["x"] += 1
            if how != "stuck":
                try:
                    manager.maybe_save(int(state["step"]))
                except Exception as error:
                    print(error, file=sys.stderr)
            pause.wait(0.002)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
