"""Version of this package, which the build reads here, and description of a saving process."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

__version__ = "0.1.0.dev0"


@lru_cache(maxsize=1)
def environment() -> Mapping[str, Any]:
    """Describe this process: Python, libraries, host, program and git commit; cached."""
    import numpy as np  # late: most commands do without

    return {
        "python": platform.python_version(),
        "holdfast": __version__,
        "platform": platform.platform(),
        "numpy": np.__version__,
        "host": socket.gethostname(),
        "program": os.path.basename(sys.argv[0]) if sys.argv else "",
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Return the git commit of the working folder; None if git or a checkout is missing."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
