"""A copy of the project in which one mutant at a time is tested."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.noting import WRONG_SOURCE
from tests.mutants.tables import PROJECT, SOURCE, mutated

TIERS = {
    "test": "not full and not long and not stores",
    "full": "full and not long and not stores",
}
"""What each tier adds, as pytest's markers; the names are those of the Makefile's targets."""
BOTH = "not long and not stores"
TEST_TIMEOUT_S = 60
"""The most for one test that names no time of its own."""
NEAR_TIMEOUT_S = 900
WHOLE_TIMEOUT_S = 7200
_PASSED, _NOTHING_TO_RUN = 0, 5
_LINKED = (".servers",)
"""Ignored by git and needed by the tests: made once, and shared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one run of pytest."""

    failed: tuple[str, ...]
    """Ids of the tests that failed, or in which the process ended or hung."""
    has_passed: bool
    seconds: float
    output: str
    """The end of what was printed."""


class Tree:
    """A copy of the project with its own folder for temporary files."""

    def __init__(self, folder: Path, origin: Path = PROJECT) -> None:
        """Copy what git tracks, and what it does not and does not ignore either."""
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._running: subprocess.Popen[bytes] | None = None
        _copy(origin, self.root)
        for name in _LINKED:
            (PROJECT / name).mkdir(exist_ok=True)
            (self.root / name).symlink_to(PROJECT / name)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant in the source while the block lasts."""
        path = self.root / SOURCE / mutant.file
        source = path.read_text("utf-8")
        try:
            _write(path, mutated(mutant, source))
            yield
        finally:
            _write(path, source)

    def run(self, tests: Sequence[str], *, marks: str, timeout_s: float, stops: bool = True) -> Run:
        """Run these tests, or all where none are given; with `stops` up to the first failure."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        self._temporary.mkdir()
        notes, log = self._temporary / "notes", self._temporary / "log"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", marks),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutants.noting"),
            *(f"--timeout={TEST_TIMEOUT_S}", f"--basetemp={self._temporary / 'pytest'}"),
            *("--ignore=tests/mutants", *(["-x"] if stops else []), *tests),
        ]
        environment = {
            **os.environ,
            "MUTANT_NOTES": str(notes),
            "MUTANT_SOURCE": str(self.root / "src"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.root / "src"),
            "TMPDIR": str(self._temporary),
        }
        began = time.monotonic()
        with log.open("wb") as output:
            self._running = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = self._running.wait(timeout_s)
            finally:
                self.stop()
        seconds = time.monotonic() - began
        text = log.read_text("utf-8", "replace")[-3000:]
        if status == WRONG_SOURCE:
            raise RuntimeError(text)
        has_passed = status in (_PASSED, _NOTHING_TO_RUN)
        failed = () if has_passed else _failed(notes)
        return Run(failed=failed, has_passed=has_passed, seconds=seconds, output=text)

    def stop(self) -> None:
        """Kill what runs, with every process of its session."""
        process, self._running = self._running, None
        if process is not None:
            _kill_session(process.pid)
            process.wait()


@contextmanager
def trees(number: int) -> Iterator[list[Tree]]:
    """So many copies of the project, all of the same moment."""
    with tempfile.TemporaryDirectory(prefix="hm-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # some tests are other users
        first = Tree(Path(folder, "0"))
        made = [first, *(Tree(Path(folder, str(n)), first.root) for n in range(1, number))]
        try:
            yield made
        finally:
            for tree in made:
                tree.stop()


def _copy(origin: Path, target: Path) -> None:
    if origin != PROJECT:
        shutil.copytree(origin, target, symlinks=True, ignore=shutil.ignore_patterns(*_LINKED))
        return
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=origin,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if (origin / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin / name, target / name, follow_symlinks=False)


def _write(path: Path, source: str) -> None:
    path.write_text(source, "utf-8")
    # It tells sources apart by length and whole seconds.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _failed(notes: Path) -> tuple[str, ...]:
    """The tests that failed; else the one in which the process ended, if any had begun."""
    with suppress(FileNotFoundError):
        lines = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
        failed = tuple(dict.fromkeys(nodeid for what, nodeid in lines if what == "failed"))
        return failed or (lines[-1][1],)
    return ()


def _kill_session(leader: int) -> None:
    # By session and not by parent: an orphan has another parent, and keeps its session.
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)
