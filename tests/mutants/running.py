"""Copies of the project, in each of which one mutant at a time is tested."""

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
from tests.mutants.tables import PROJECT, find_file, mutated

TIERS = {
    "test": "not full and not long and not stores",
    "full": "full and not long and not stores",
}
"""Tier → the marker expression that selects the tests which it adds to the tier before."""
BOTH = "not long and not stores"
TEST_TIMEOUT_S = 60
"""Time limit of each test that sets none itself."""
NEAR_TIMEOUT_S = 900
WHOLE_TIMEOUT_S = 7200
_PASSED, _FAILED, _NOTHING_TO_RUN = 0, 1, 5
_LINKED = (".servers",)
"""Folders that git ignores and the tests need; the copies share them by symbolic links."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one run of pytest."""

    failed: tuple[str, ...]
    """Ids of the tests that failed, or in which the process ended or hung."""
    has_passed: bool
    is_complete: bool
    """Whether pytest ran to its end."""
    is_cut_off: bool
    """Whether it was killed because its time was over."""
    seconds: float
    output: str
    """The last part of what was printed."""


class Tree:
    """A copy of the project with its own folder for temporary files."""

    def __init__(self, folder: Path, origin: Path = PROJECT) -> None:
        """Copy every file that git does not ignore, tracked or not."""
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._running: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        _copy(origin, self.root)
        for name in _LINKED:
            (PROJECT / name).mkdir(exist_ok=True)
            (self.root / name).symlink_to(PROJECT / name)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Apply the mutant to the copy's source while the block runs."""
        path = find_file(mutant, self.root)
        source = path.read_text("utf-8")
        try:
            _write(path, mutated(mutant, self.root))
            yield
        finally:
            _write(path, source)

    def run(self, tests: Sequence[str], *, marks: str, timeout_s: float, stops: bool = True) -> Run:
        """Run these tests, or all if none are given; with `stops`, up to the first failure."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        self._temporary.mkdir()
        os.chmod(self._temporary, 0o1777)  # the permissions of /tmp
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
                self._kill()
        if self._has_ended:
            raise RuntimeError("stopped")
        seconds = time.monotonic() - began
        text = log.read_text("utf-8", "replace")[-3000:]
        if status == WRONG_SOURCE:
            raise RuntimeError(text)
        has_passed = status in (_PASSED, _NOTHING_TO_RUN)
        failed = () if has_passed else _failed(notes)
        return Run(
            failed=failed,
            has_passed=has_passed,
            is_complete=has_passed or status == _FAILED,
            is_cut_off=status is None,
            seconds=seconds,
            output=text,
        )

    def end(self) -> None:
        """Kill what runs; no further run gives a result."""
        self._has_ended = True
        self._kill()

    def _kill(self) -> None:
        """Kill the running pytest, with every process that it started."""
        process, self._running = self._running, None
        if process is not None:
            _kill_all(f"MUTANT_SOURCE={self.root / 'src'}".encode())
            process.wait()


@contextmanager
def trees(number: int) -> Iterator[list[Tree]]:
    """Make a number of identical copies of the project, removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="hm-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # some tests run as other users
        first = Tree(Path(folder, "0"))
        made = [first, *(Tree(Path(folder, str(n)), first.root) for n in range(1, number))]
        try:
            yield made
        finally:
            for tree in made:
                tree.end()


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
    # Python takes bytecode for current if the source's length and whole second are the same.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _failed(notes: Path) -> tuple[str, ...]:
    """Return the tests that failed; if none did, the one in which the process ended, if any."""
    with suppress(FileNotFoundError):
        lines = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
        failed = tuple(dict.fromkeys(nodeid for what, nodeid in lines if what == "failed"))
        return failed or (lines[-1][1],)
    return ()


def _kill_all(variable: bytes) -> None:
    # By environment: an orphan has another parent, and may have a session of its own.
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if variable in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
