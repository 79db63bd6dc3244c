"""Pytest plugin that records which tests began and which failed, for runs on mutants.

It reads two environment variables: `MUTANT_SOURCE`, the folder from which `holdfast` has to be
imported, and `MUTANT_NOTES`, the file of the records.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

WRONG_SOURCE = 90
"""Exit status if the tests would import another copy of `holdfast`."""


def pytest_configure(config: pytest.Config) -> None:
    """Stop pytest at once if it would not import `holdfast` from the mutated source."""
    spec = importlib.util.find_spec("holdfast")
    found = Path(spec.origin if spec is not None and spec.origin else "/").resolve()
    if Path(os.environ["MUTANT_SOURCE"]).resolve() not in found.parents:
        pytest.exit(f"holdfast would come from {found}", returncode=WRONG_SOURCE)
    # Without a search for the smallest example, which takes a minute; and a test that failed has to
    # fail again when it runs alone.
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", phases=phases, derandomize=True)
    settings.load_profile("mutants")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins, because a process that dies in it reports nothing."""
    _note("began", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record that a test failed."""
    if report.failed:
        _note("failed", report.nodeid)


def _note(what: str, nodeid: str) -> None:
    with open(os.environ["MUTANT_NOTES"], "a", encoding="utf-8") as notes:
        notes.write(json.dumps([what, nodeid]) + "\n")
