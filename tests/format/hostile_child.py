"""Cases of test_hostile.py: hostile documents, each read in a fork under limits.

`python -m tests.format.hostile_child NAME...` The document is made first, so that only the reading
counts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.format.samples import cpu_budget_s
from tests.hostile.sandbox import MIB, forked, peak_nbytes

from holdfast.errors import FormatError
from holdfast.format import index, manifest, objects, records, tensors


def _tree(inner: bytes) -> bytes:
    return b'{"holdfast":1,"tree":' + inner + b"}"


def _header(data: bytes) -> None:
    tensors.parse_header(data, file_nbytes=2**62, what="w")


def _index(data: bytes) -> None:
    index.decode_index(data, files={}, what="w")


def _read_tree(data: bytes) -> None:
    objects.decode_tree(data, what="w")


def _bomb() -> bytes:
    tree: list[object] = [[0]]
    tree += [[{"$same": 1 + i}, {"$same": 1 + i}] for i in range(10_000)]
    return _tree(json.dumps(tree).encode())


def _colliding() -> bytes:
    return _tree(json.dumps({"$set": [i * (2**61 - 1) for i in range(100_000)]}).encode())


def _manifest(data: bytes) -> None:
    manifest.decode_register(data, what="w")


def _notes(data: bytes) -> None:
    records.Notes.decode(data, what="w")


CASES: dict[str, tuple[Callable[[], bytes], Callable[[bytes], None]]] = {
    "header of 2**60 bytes": (lambda: (2**60).to_bytes(8, "little") + b"{" * 100, _header),
    "header of 84 MB": (lambda: (84 * MIB).to_bytes(8, "little") + b" " * 84 * MIB, _header),
    "header of 16 MiB of opening brackets": (
        lambda: (16 * MIB).to_bytes(8, "little") + b"[" * 16 * MIB,
        _header,
    ),
    "header of 16 MiB of empty objects": (
        lambda: (16 * MIB).to_bytes(8, "little") + b"{}," * (16 * MIB // 3) + b" ",
        _header,
    ),
    "index of 100 MB": (lambda: b" " * 100 * MIB, _index),
    "index of 60 MiB of lists": (lambda: b"[" + b"[]," * (20 * MIB) + b"[]]", _index),
    "tree of 64 MiB of opening brackets": (lambda: _tree(b"[" * 63 * MIB), _read_tree),
    "tree of 64 MiB of small texts": (
        lambda: _tree(b"[" + b'"",' * 22_000_000 + b"1]"),
        _read_tree,
    ),
    "tree of 64 MiB of quotes": (lambda: b'"' * 64 * MIB, _read_tree),
    "tree of 64 MiB of backslashes": (lambda: b'"' + b"\\" * (64 * MIB - 1), _read_tree),
    "tree with an integer of 60 million digits": (lambda: _tree(b"9" * 60 * MIB), _read_tree),
    "tree with a float of 60 million digits": (lambda: _tree(b"0." + b"9" * 60 * MIB), _read_tree),
    "tree that names itself 2**10000 times": (_bomb, _read_tree),
    "tree with 100,000 keys of one hash": (_colliding, _read_tree),
    "manifest of 100 MB": (lambda: b"{" * 100 * MIB, _manifest),
    "manifest of 16 MiB without end": (lambda: b'{"holdfast": 1,' * MIB, _manifest),
    "notes of 100 MB": (lambda: b"{" * 100 * MIB, _notes),
}


def read_case(name: str) -> dict[str, Any]:
    """Read the document of one case; return what was wrong with that."""
    make, read = CASES[name]
    data = make()
    before = peak_nbytes()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, hard))
    began = time.process_time()
    try:
        read(data)
        problems = ["it was accepted"]
    except FormatError as error:
        problems = [f"a message of {len(str(error))} characters"] if len(str(error)) >= 500 else []
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    cpu_s, growth = time.process_time() - began, peak_nbytes() - before
    if growth > 64 * MIB + 2 * len(data):
        problems.append(f"it took {growth >> 20} MiB for {len(data) >> 20} MiB")
    if cpu_s > cpu_budget_s(len(data)):
        problems.append(f"it took {cpu_s:.1f} s")
    return {"problems": problems, "growth": growth}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        (found,) = forked([partial(read_case, case)])
        print(json.dumps({"name": case, **found}))
