"""A training that dies: `python doomed.py ROOT LAST DIE_AFTER HOW`.

Resumes, saves at every step up to LAST, and ends after DIE_AFTER saves of this session: HOW is
`kill` (by SIGKILL, between two saves) or `ask` (sends SIGTERM to its supervisor, and when that
comes back saves once more and asks for a requeue).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from holdfast.manager import CheckpointManager


def main(root: str, last: int, die_after: int, how: str) -> None:
    state = {"step": 0, "x": torch.zeros(8)}
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with CheckpointManager(root, {"state": state}, sinks=(), preflight=False) as manager:
        manager.resume()
        for count in range(last - int(state["step"])):
            if count == die_after and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if count == die_after and how == "ask":
                os.kill(os.getppid(), signal.SIGTERM)
                while not asked:  # signal.pause() sleeps on when it came a moment before
                    time.sleep(0.01)
            state["step"] += 1
            state["x"] += 1
            manager.save(int(state["step"])).wait()
            if asked:
                sys.exit(75)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
