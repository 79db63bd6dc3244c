"""SIGKILL at random moments of a process that saves to a real server (tests/crash/storm.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servers.client import broken_uploads
from servers.fixtures import on
from servers.program import Service

STORM = Path(__file__).parent.parent / "crash" / "storm.py"
SMALL = "4096"
"""Elements of each of eight tensors: files of one request."""
LARGE = str(640 * 1024)
"""20 MiB a save: a multipart upload."""


def storm(root: str, *options: str) -> dict[str, Any]:
    """Run a storm on a URL; its counts. `root` has put the credentials into the environment."""
    done = subprocess.run(
        [sys.executable, str(STORM), root, *options],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    counts["said"] = done.stderr
    return counts


def check_storm(service: Service, root: str, *, trials: int, size: str) -> None:
    """Nothing acknowledged is lost, nothing is torn, and gc leaves neither junk nor uploads."""
    counts = storm(root, "--trials", str(trials), "--size", size)
    print(counts)
    assert (counts["bad"], counts["stuck"]) == (0, 0), counts
    assert counts["killed"] >= trials * 0.5
    assert counts["last_step"] >= max(4, trials / 4)
    assert broken_uploads(service, root) == []


@on("moto", "gcs", "azurite")
def test_kills_of_a_saving_process_lose_nothing(service: Service, root: str) -> None:
    """R1, R9, R26: and the next process goes on from the newest checkpoint."""
    check_storm(service, root, trials=7, size=SMALL)


@on("localstack")
def test_kills_in_multipart_uploads_leave_no_uploads(service: Service, root: str) -> None:
    """R1, R9, R26."""
    check_storm(service, root, trials=6, size=LARGE)


@pytest.mark.stores
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@on("localstack", "gcs", "azurite", "ceph")
def test_hundreds_of_kills_lose_nothing(service: Service, root: str, size: str) -> None:
    """R1, R9, R26."""
    check_storm(service, root, trials=450 if size == SMALL else 50, size=size)


@on("gcs")
def test_the_storm_catches_a_manifest_that_comes_first(service: Service, root: str) -> None:
    """R1: our own code with its order broken does not pass."""
    counts = storm(root, "--trials", "12", "--size", SMALL, "--mutant", "manifest_first")
    assert counts["bad"] > 0, counts
