"""Being somebody who may not write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take the right to write into `folder` away; root has to be somebody else for that.

    Everybody must be able to enter it, so that pytest's own folders will not do.
    """
    before, mode = os.geteuid(), folder.stat().st_mode
    folder.chmod(0o555)
    try:
        if before == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(before)
        folder.chmod(mode)
