"""Runs the storms of kills, which are scripts in `tests/crash/`: their parent must fork cleanly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from children import environment

CRASH = Path(__file__).with_name("crash")


def storm(script: str, root: str | Path, *options: str) -> dict[str, Any]:
    """What a storm over a root counted: `killed`, `bad`, … and what it `said`."""
    done = subprocess.run(
        [sys.executable, str(CRASH / f"{script}.py"), str(root), *options],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env=environment(),
    )
    assert done.stdout, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    counts["said"] = done.stderr
    return counts


def harmless(counts: dict[str, Any]) -> dict[str, Any]:
    """The counts, after checking that no promise was broken and nothing was stuck."""
    print(counts)
    assert (counts["bad"], counts["stuck"]) == (0, 0), counts
    return counts
