"""Processes of a test that say how far they are, and wait to be told to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import warm

T = TypeVar("T", bound="Child")


def environment() -> dict[str, str]:
    """That of a process which finds the modules that its test finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Child:
    """`python SCRIPT WORD...`, forked warm, which is killed at the end of the `with`."""

    def __init__(self, script: Path, *words: object) -> None:
        pipe = subprocess.PIPE
        self.process = warm.Popen([script, *words], stdin=pipe, stdout=pipe)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def says(self) -> str:
        """The next line that it prints; nothing when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def expect(self, line: str) -> None:
        """Wait for a line, which must be this one."""
        assert self.says() == line

    def go_on(self) -> None:
        """Let it go on, which waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(60)
