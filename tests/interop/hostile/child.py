"""Child process of test_hostile.py, which opens hostile files of other libraries and watches it.

`python -m tests.interop.hostile.child CHOICE` prints one JSON object a case; CHOICE is `cases`,
`bombs` or `mutants`. Each case runs in a fork of its own, under a limit of memory and of processor
time. An audit hook records the events that no reader may cause.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tests.interop.hostile.cases as hostile
from tests.interop.hostile.cases import Case, bombs, cases

from holdfast.errors import HoldfastError
from holdfast.format.objects import document
from holdfast.interop.opening import open_source
from holdfast.interop.pickles import budget, machine, names
from holdfast.interop.reading import read_pieces
from holdfast.interop.sources import tars, zips

MIB = 1 << 20
MEMORY_LIMIT = 256 * MIB
"""Private memory that a case may add to that of the process."""
TIME_LIMIT_S = 10
"""Processor time of a case."""
MAX_READ_NBYTES = 64 * MIB

_RUNS = (
    *("exec", "compile", "import", "pickle.", "marshal.", "code.__new__", "function.__new__"),
    *("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("pty.", "socket.", "ctypes.", "urllib.", "webbrowser.", "shutil.", "os.putenv", "os.kill"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"),
)
_MEMORY = "ctypes.create_string_buffer"
"""Memory for asking how much of a file is in the page cache."""


class Watch:
    """Audit hook that records the events which no reader of the folder may cause."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event.startswith(_RUNS) and event != _MEMORY:
            self.events.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and not self._may_open(*arguments):
            self.events.append(f"open {arguments!r}"[:200])
        elif event in ("os.scandir", "os.listdir") and not self._is_inside(arguments[0]):
            self.events.append(f"{event} {arguments!r}"[:200])

    def _may_open(self, path: Any, mode: Any, flags: int) -> bool:
        if path == tempfile.gettempdir():  # a folder: it can only be opened for a nameless file
            return True
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        return isinstance(path, int) or (not writes and self._is_inside(path))

    def _is_inside(self, path: Any) -> bool:
        if isinstance(path, int):
            return True
        text = os.path.normpath(os.fsdecode(path))
        return f"{text}/".startswith(self._folder)


def open_and_read(folder: Path, case: Case) -> str:
    """Do with a source what any tool does; return the error, or what was left out."""
    path = folder / next(iter(case.files)) if len(case.files) == 1 else folder
    try:
        with open_source(str(path)) as source:
            read = 0
            for name, part in source.parts.items():
                len(part.leaves)
                with contextlib.suppress(HoldfastError):
                    document(part.tree)
                for key, spec in part.specs.items():
                    read += spec.nbytes
                    if read <= MAX_READ_NBYTES:
                        for _ in read_pieces(source, [(name, key)]):
                            pass
            return f"left out {len(source.left_out)}" if source.left_out else "read"
    except HoldfastError as error:
        if len(str(error)) > 20_000:
            return "a long message"
        return type(error).__name__


def run(case: Case, watch: Watch, folder: Path) -> dict[str, Any]:
    """Write and open a case in a fork; return what happened."""
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.write(theirs, json.dumps(_in_fork(case, watch, folder)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    for name in case.files:
        (folder / name).unlink()
    if not told:
        return {"problems": [f"ended by signal {os.WTERMSIG(status)}"], "outcome": "", "s": 0}
    found: dict[str, Any] = json.loads(told)
    return found


def _in_fork(case: Case, watch: Watch, folder: Path) -> dict[str, Any]:
    limit = _private_nbytes() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT_S + 1, TIME_LIMIT_S + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    problems: list[str] = []
    outcome = ""
    began = time.process_time()
    watch.is_on = True
    try:
        outcome = open_and_read(folder, case)
    except BaseException as error:
        problems.append(f"{type(error).__name__}: {str(error)[:300]}")
    watch.is_on = False
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    took = time.process_time() - began
    if took > TIME_LIMIT_S:
        problems.append(f"took {took:.1f} s")
    if case.is_refused and (outcome.startswith("left out") or outcome in ("read", "")):
        problems.append(f"was not refused: {outcome}")
    return {"problems": problems + watch.events, "outcome": outcome, "s": took}


def _private_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


MUTANTS: dict[str, tuple[str, str]] = {
    "one more global": ("pickle: os.system, alone", "os.system"),
    "a module is imported": ("pickle: antigravity, alone", "import"),
    "an unpickler is used": ("pickle: INST, alone", "pickle.find_class"),
    # Python 3.13.0 loses the MemoryError of a set that cannot grow.
    "memory is not charged": ("bomb: many sets", "MemoryError|error return without exception set"),
    "links are read": ("zip: a link", "was not refused"),
    "archives have no bound": ("bomb: a bomb in a tar", "was not refused"),
}
"""Defects of our own readers: the case that has to show each, and a pattern of the problem."""


def break_(name: str) -> None:
    """Put a defect into the readers."""
    if name == "one more global":
        names.CONSTRUCTORS["os.system"] = lambda machine, args: os.system(*args)  # type: ignore[index]
    elif name == "a module is imported":
        real = machine.Machine.find_class

        def careless(self: Any, module: Any, attribute: Any) -> Any:
            __import__(module)
            return real(self, module, attribute)

        machine.Machine.find_class = careless  # type: ignore[method-assign]
    elif name == "an unpickler is used":
        machine.Machine.read_pickle = lambda self: pickle.load(self._file)  # type: ignore[method-assign]
    elif name == "memory is not charged":
        budget.PickleBudget.charge = lambda self, nbytes: None  # type: ignore[method-assign]
    elif name == "links are read":
        zips._LINK = -1
    elif name == "archives have no bound":
        tars._Bound.spend = lambda self, nbytes: None  # type: ignore[method-assign]


def main(choice: str) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(folder)
        warm_up(folder)
        gc.freeze()
        if choice == "mutants":
            run_mutants(watch, folder)
            return
        chosen: Iterable[Case] = bombs() if choice == "bombs" else cases()
        for case in chosen:
            print(json.dumps({"name": case.name, **run(case, watch, folder)}), flush=True)


def warm_up(folder: Path) -> None:
    """Cause every late import of what is honest."""
    honest = {
        "x.pt": hostile._honest(),
        "x.tar": hostile.tarred((hostile._info(hostile.STATES), hostile._honest())),
        "x.zst": hostile.TARS["zstd that is none"][1],
        "x.lz4": hostile.TARS["lz4 that is none"][1],
        "y.pkl": pickle.dumps({"a": np.arange(2), "b": np.float32(1)}, 2),
        "w.pkl": pickle.dumps({"a": "ä", "b": np.arange(2)}, 0),
        "large.pkl": pickle.dumps({"a": np.zeros(1 << 17)}),
        "z.pkl": b"\x80\x02}" + hostile.text("a") + b"X\x01\x00\x00\x00\xff",
    }
    for name, data in honest.items():
        (folder / name).write_bytes(data)
        open_and_read(folder, Case(name, {name: data}))
        (folder / name).unlink()
    two = {"trainer_state.json": b"{}", "optimizer.pt": hostile._honest()}
    for name, data in two.items():
        (folder / name).write_bytes(data)
    open_and_read(folder, Case("folder", two))
    for name in two:
        (folder / name).unlink()


def run_mutants(watch: Watch, folder: Path) -> None:
    everything = {case.name: case for case in (*cases(), *bombs_named(MUTANTS))}
    for name, (wanted, _) in MUTANTS.items():
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            break_(name)
            found = run(everything[wanted], watch, folder)
            os.write(theirs, json.dumps({"name": name, **found}).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            print(pipe.read().decode(), flush=True)
        os.waitpid(child, 0)


def bombs_named(wanted: dict[str, tuple[str, str]]) -> list[Case]:
    """The bombs that mutants ask for; others are not made."""
    names = {name.removeprefix("bomb: ") for name, _ in wanted.values()}
    found = [
        Case(f"bomb: {name}", {"x.pkl": make()}, is_refused=False)
        for name, make in hostile.BOMBS.items()
        if name in names
    ]
    for name, (file, make) in hostile.ARCHIVE_BOMBS.items():
        if name in names:
            found.append(Case(f"bomb: {name}", {file: make()}))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
