"""A reader for tests: `python lease_child.py SOURCE`; reads until it gets a line, or is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import holdfast


def main(source: str) -> None:
    """Say which folder is read, wait for a line, and read all of it."""
    with holdfast.reading(source) as checkpoint:
        print(checkpoint.folder, flush=True)
        sys.stdin.readline()
        files = [path for path in Path(checkpoint.path).iterdir() if path.suffix != ".json"]
        print(sum(len(path.read_bytes()) for path in files), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
