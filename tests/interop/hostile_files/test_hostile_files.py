"""Hostile files of weights: nothing runs, nothing outside is read, in 256 MiB and 10 s each."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tests.interop.hostile_files.cases import make_cases, make_harmless, tell

CHILD = Path(__file__).with_name("child.py")
MOST_MIB = 256
OPENED = 0x20  # IN_OPEN


class Watch:
    """Tells whether a file was opened by any process, also below Python."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._queue, str(path).encode(), OPENED) >= 0

    def was_opened(self) -> bool:
        try:
            return bool(os.read(self._queue, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._queue)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of every case, in a process of its own."""
    base = tmp_path_factory.mktemp("hostile")
    folder, outside = base / "cases", base / "outside.safetensors"
    folder.mkdir()
    make_harmless(base / "warm")
    for path in (outside, base / "warm" / "x.mdl"):
        with h5py.File(path, "w") as file:
            tell(file.create_dataset("w", data=np.arange(8, dtype="f4")))
    names = [name for name, _ in make_cases(folder, outside)]
    watch = Watch(outside)
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    found["outside"] = watch.was_opened()
    outside.read_bytes()
    assert watch.was_opened(), "the watch works"
    watch.close()
    assert [*sorted(names)] == [*sorted(found["found"])]
    return found


def test_there_are_enough_cases(report: dict[str, Any]) -> None:
    assert len(report["found"]) >= 130


def test_each_is_refused_with_an_error_of_ours(report: dict[str, Any]) -> None:
    wrong = {
        name: how
        for name, how in report["found"].items()
        if how == "accepted" or how.startswith("unexpected")
    }
    assert wrong == {}


def test_each_refusal_names_the_file(report: dict[str, Any]) -> None:
    assert [name for name, how in report["found"].items() if name not in how] == []


def test_nothing_runs_and_nothing_outside_is_read(report: dict[str, Any]) -> None:
    assert report["seen"] == []
    assert not report["outside"]


def test_no_case_needs_much_memory(report: dict[str, Any]) -> None:
    assert report["peak_mib"] < MOST_MIB
