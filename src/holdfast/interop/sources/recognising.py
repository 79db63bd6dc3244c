"""Reads the first bytes of a file, by which its format is recognised."""

from __future__ import annotations

from pathlib import Path


def first_bytes(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file, fewer if it is shorter; none of anything else."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(nbytes)
