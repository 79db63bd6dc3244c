"""Runs both sides of the pages of docs/coming-from that have two, and compares the weights.

`python -m bench.ports` needs lightning, transformers and accelerate (the extra `bench`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

PAGES = Path(__file__).resolve().parent.parent / "docs" / "coming-from"
PORTS = ("lightning", "transformers", "plain")
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def is_same(page: str) -> bool:
    """Run all blocks of a page; returns whether both sides end with the same weights."""
    names: dict[str, Any] = {"__name__": page}
    for block in _BLOCK.findall((PAGES / f"{page}.md").read_text("utf-8")):
        exec(compile(block, page, "exec"), names)
    theirs, ours = names["theirs"], names["ours"]
    return len(theirs) == len(ours) and all(
        torch.equal(one, other) for one, other in zip(theirs.values(), ours.values(), strict=True)
    )


def num_lines(page: str) -> tuple[int, int]:
    """Lines of code of both sides of a page, theirs first; what they share is not counted."""
    _, theirs, ours = _BLOCK.findall((PAGES / f"{page}.md").read_text("utf-8"))[:3]
    counts = [sum(1 for line in block.splitlines() if line.strip()) for block in (theirs, ours)]
    return counts[0], counts[1]


def main() -> int:
    """Compare all pages; exit status 1 if one differs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    found = {}
    for page in PORTS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found[page] = is_same(page)
            os.chdir("/")
    for page, same in found.items():
        print(f"{page}: {'the same weights, bit for bit' if same else 'other weights'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
