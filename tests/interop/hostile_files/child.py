"""Opens hostile files and reads all of them, under a watch: what they made the process do."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - before the watch begins
import lz4.block  # noqa: F401

from holdfast.errors import HoldfastError
from holdfast.interop.opening import open_source
from holdfast.interop.reading import read_pieces

LIMIT_S = 10
WATCHED = ("open", "import", "exec", "compile", "pickle", "subprocess", "os.", "socket", "ctypes")

HARMLESS = ("os.listdir", "os.scandir", "ctypes.create_string_buffer")
"""The last is memory, for asking how much of a file is in the page cache."""

seen: list[str] = []
allowed = ""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not allowed or not event.startswith(WATCHED) or event in HARMLESS:
        return
    if event == "open" and os.fspath(arguments[0]).startswith(allowed):
        return
    seen.append(f"{event} {str(arguments[0])[:200]}")


def outcome(path: Path) -> str:
    """How opening and reading a file ended."""
    try:
        with open_source(str(path)) as source:
            wanted = [(name, key) for name, part in source.parts.items() for key in part.specs]
            for _ in read_pieces(source, wanted):
                pass
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main() -> None:
    global allowed
    folder = Path(sys.argv[1])
    # What is imported at the first use.
    for path in sorted((folder.parent / "warm").iterdir()):
        assert outcome(path) == "accepted", outcome(path)
    sys.addaudithook(watch)
    found = {}
    for path in sorted(folder.iterdir()):
        allowed = str(path)
        signal.alarm(LIMIT_S)  # which ends this process
        try:
            found[path.name] = outcome(path)
        except Exception as error:
            found[path.name] = f"unexpected {type(error).__name__}: {error}"
        signal.alarm(0)
        allowed = ""
    # Not ru_maxrss, which begins with what the parent had.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps({"found": found, "seen": seen, "peak_mib": peak_kib >> 10}))


main()
