"""Reads the first bytes of a file, by which its format is recognised."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import StoreError


def first_bytes(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file, fewer if it is shorter; none of anything else."""
    if not os.path.isfile(path):
        return b""
    try:
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as err:
        raise StoreError(f"{path}: cannot be opened: {err.strerror}") from err
