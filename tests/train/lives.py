"""Trainings in processes of their own, which are killed at any moment."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Sequence

import warm


class Life:
    """A process that trains, prints a line after each update, and is killed at the `with`'s end."""

    def __init__(self, words: Sequence[object]) -> None:
        self.process = warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def ends(self) -> None:
        """Wait for its end, which must be a good one."""
        _, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, errors

    def updates(self, count: int, then_s: float) -> None:
        """Wait for so many updates, and then for the next one, but not longer than `then_s`."""
        assert self.process.stdout is not None
        for _ in range(count):
            assert self.process.stdout.readline() == "updated\n", "it ended before it was killed"
        select.select([self.process.stdout], [], [], then_s)
