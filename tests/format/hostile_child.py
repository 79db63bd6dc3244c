"""Run by test_hostile.py in a process of its own: reads one hostile document under limits.

Prints the class of the error, by how many bytes the peak of resident memory grew, and the processor
time that it took. The document is made first, so that only the reading counts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import FormatError
from holdfast.format import index, manifest, objects, records, tensors

MIB = 2**20


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


def main(name: str) -> None:
    """Read the document of one case."""
    make, read = CASES[name]
    data = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, used + 256 * MIB))
    began = time.process_time()
    try:
        read(data)
        outcome, message = "accepted", ""
    except FormatError as err:
        outcome, message = type(err).__name__, str(err)
    cpu_s = time.process_time() - began
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    found = {"outcome": outcome, "growth": growth, "nbytes": len(data), "message": message}
    print(json.dumps({**found, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main(sys.argv[1])
