"""Pytest plugin of the runs on mutants: notes which test began and which failed.

It reads two variables of the environment: `MUTANT_SOURCE`, the folder from which `holdfast` has to
be imported, and `MUTANT_NOTES`, the file for the notes.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

WRONG_SOURCE = 90
"""The exit status when another `holdfast` would be tested."""


def pytest_configure(config: pytest.Config) -> None:
    """End at once where the mutated source would not be the one that is imported."""
    spec = importlib.util.find_spec("holdfast")
    found = Path(spec.origin if spec is not None and spec.origin else "/").resolve()
    if Path(os.environ["MUTANT_SOURCE"]).resolve() not in found.parents:
        pytest.exit(f"holdfast would come from {found}", returncode=WRONG_SOURCE)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins: where the process ends in it, nothing else tells its name."""
    _note("began", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note that a test failed."""
    if report.failed:
        _note("failed", report.nodeid)


def _note(what: str, nodeid: str) -> None:
    with open(os.environ["MUTANT_NOTES"], "a", encoding="utf-8") as notes:
        notes.write(json.dumps([what, nodeid]) + "\n")
