"""Kills, forks and equal random bytes while much is encrypted: is a nonce used twice? A script.

    python tests/crash/nonces_storm.py FOLDER --segments 10000000 [--mutant NAME]

Each round forks two children at the same moment, which draw the same "random" bytes, as two copies
of a virtual machine do, and so do those of every other round. Each resumes a sealed run of its own
in FOLDER and saves; one of four lives to its end, and the others are killed, unless they are
quicker. Segments have 64 bytes, so that there are many. What is encrypted is noted beforehand, in a
file that survives the kill. Prints one JSON line; `test_nonces.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from storm import advance, forked, new_state, step_of

from aead import noting
from holdfast.encryption import files
from holdfast.format import suites
from holdfast.keys import Encryption, SecretKey
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last

SEGMENT_NBYTES = 64
SUITES: tuple[suites.SuiteName, ...] = ("aes-256-gcm", "chacha20-poly1305")
NOTE_NBYTES = 8
"""Of the digest of a key and a nonce. Equal ones are found for certain; among ten million different
ones two are taken for equal once in 370,000 runs."""
NUM_ELEMENTS = 32 * 1024
SAVES = 3


def live(root: Path, notes: Path, suite: suites.SuiteName) -> None:
    """A child's life: resume, and save some more."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(key: bytes, nonce: bytes) -> None:
        os.write(file, blake2b(nonce, key=key, digest_size=NOTE_NBYTES).digest())

    suites.Cipher.__init__ = noting(note)
    os.urandom = random.Random(1).randbytes
    state = new_state(NUM_ELEMENTS)
    seals = Encryption(keys=SecretKey(bytes(32)), suite=suite)
    with CheckpointManager(
        root, state, keep=Last(2), encrypt=seals, sinks=(), preflight=False
    ) as manager:
        manager.resume()
        first = step_of(state) + 1
        for step in range(first, first + SAVES):
            advance(state, step)
            manager.save(step).wait()


class Counts:
    """What children have done, and what they encrypted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.touch()
        self.killed = self.finished = self.stuck = 0

    @property
    def num_segments(self) -> int:
        """How many messages were encrypted."""
        return self.notes.stat().st_size // NOTE_NBYTES

    def round(self, number: int, rng: random.Random, life_s: float) -> None:
        """Two children at once, each killed within `life_s` or not; with 0 none is."""
        suite = SUITES[number % len(SUITES)]
        pids = [
            forked(lambda name=name: live(self.folder / f"{name}-{suite}", self.notes, suite))
            for name in ("one", "other")
        ]
        for pid in pids:
            if life_s and rng.random() < 0.75:
                time.sleep(rng.uniform(0, life_s))
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.killed += status == -signal.SIGKILL
            self.finished += status == 0
            self.stuck += status not in (0, -signal.SIGKILL)

    def to_dict(self) -> dict[str, int]:
        """What is told at the end."""
        names = ("killed", "finished", "stuck")
        noted = np.fromfile(self.notes, dtype=np.uint64)
        repeats = len(noted) - len(np.unique(noted))
        return {name: getattr(self, name) for name in names} | {
            "segments": len(noted),
            "repeats": repeats,
        }


def only_random() -> None:
    """Mutant: secrets are what the operating system draws, and nothing else."""
    suites.fresh_secret = lambda nbytes=suites.SECRET_NBYTES: os.urandom(nbytes)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("holdfast.") and hasattr(
            module, "fresh_secret"
        ):
            vars(module)["fresh_secret"] = suites.fresh_secret


MUTANTS: dict[str, Callable[[], None]] = {"only_random": only_random}


def main() -> int:
    """Rounds until enough was encrypted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    suites.SEGMENT_NBYTES = files.SEGMENT_NBYTES = SEGMENT_NBYTES
    if options.mutant:
        MUTANTS[options.mutant]()
    counts, rng, life_s = Counts(options.folder), random.Random(0), 0.0
    for number in range(options.segments // 1000 + 3):
        if counts.num_segments >= options.segments:
            break
        began = time.perf_counter()
        counts.round(number, rng, life_s if number % 10 else 0.0)
        if number % 10 == 0:
            life_s = (time.perf_counter() - began) / 2
    told: dict[str, Any] = counts.to_dict()
    print(json.dumps(told))
    return 1 if told["repeats"] or counts.stuck else 0


if __name__ == "__main__":
    sys.exit(main())
