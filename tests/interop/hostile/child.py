"""Child process of test_hostile.py, which opens hostile files of other libraries and watches it.

`python -m tests.interop.hostile.child CHOICE`; CHOICE is `cases`, `bombs` or `mutants`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lz4.block  # noqa: F401 - before the watch begins
import numpy as np
import tests.interop.hostile.cases as hostile
from tests.hostile.sandbox import (
    MIB,
    RUNS_CODE,
    Mutant,
    Watch,
    print_cases,
    print_mutants,
)
from tests.interop.hostile import weights
from tests.interop.hostile.cases import Case, bombs, cases

from holdfast.errors import HoldfastError
from holdfast.format.objects import document
from holdfast.interop.opening import open_source
from holdfast.interop.pickles import machine, names
from holdfast.interop.pickles.values import PickleBudget
from holdfast.interop.source import read_pieces
from holdfast.interop.sources import tars, zips

MEMORY = (resource.RLIMIT_DATA, 256 * MIB)
TIME_LIMIT_S = 20
"""Processor time of a case."""
MAX_READ_NBYTES = 64 * MIB
IN_OPEN = 0x20


class FolderWatch(Watch):
    """What no reader of the files of a folder may do."""

    forbidden = (
        *RUNS_CODE,
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"),
    )

    def may_open(self, path: Any, flags: int) -> bool:
        if path == tempfile.gettempdir():  # a folder: it can only be opened for a nameless file
            return True
        return isinstance(path, int) or (
            flags & (os.O_WRONLY | os.O_RDWR) == 0 and self.is_inside(path)
        )

    def is_inside(self, path: Any) -> bool:
        if path is None or isinstance(path, int):
            return True
        return f"{os.path.normpath(os.fsdecode(path))}/".startswith(f"{self.root}/")


class Opened:
    """Whether a file was opened by any process, also below Python."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._queue, str(path).encode(), IN_OPEN) >= 0

    def __call__(self) -> bool:
        try:
            return bool(os.read(self._queue, 4096))
        except BlockingIOError:
            return False


def open_and_read(path: Path) -> str:
    """Do with a source what any tool does; return the error, or what was left out."""
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
        return f"{type(error).__name__}: {error}"


def run(case: Case, watch: FolderWatch, base: Path) -> dict[str, Any]:
    """Write and open a case; return what happened."""
    folder = Path(tempfile.mkdtemp(dir=base))
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    path = folder / name if len(case.files) == 1 else folder
    problems: list[str] = []
    outcome = ""
    with watch.watched(folder, problems, memory=MEMORY, time_s=TIME_LIMIT_S):
        try:
            outcome = open_and_read(path)
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {str(error)[:300]}")
    if len(outcome) > 20_000:
        problems.append("a long message")
    if case.is_refused and (outcome.startswith("left out") or outcome in ("read", "")):
        problems.append(f"was not refused: {outcome}")
    if case.is_named and path.name not in outcome:
        problems.append(f"is not named: {outcome[:300]}")
    return {"problems": problems, "outcome": outcome[:100]}


def _call_system() -> None:
    names.CONSTRUCTORS["os.system"] = lambda machine, args: os.system(*args)  # type: ignore[index]


def _import_modules() -> None:
    real = machine.Machine.find_class

    def careless(self: Any, module: Any, attribute: Any) -> Any:
        __import__(module)
        return real(self, module, attribute)

    machine.Machine.find_class = careless  # type: ignore[method-assign]


def _unpickle() -> None:
    machine.Machine.read_pickle = lambda self: pickle.load(self._file)  # type: ignore[method-assign]


def _charge_nothing() -> None:
    PickleBudget.charge = lambda self, nbytes: None  # type: ignore[method-assign]


def _read_links() -> None:
    zips._LINK = -1


def _spend_without_end() -> None:
    tars._Bound.spend = lambda self, nbytes: None  # type: ignore[method-assign]


def _mutant(break_: Any, case: str, shows: str) -> Mutant:
    return Mutant(break_=break_, cases=(case,), shows=shows)


MUTANTS = {
    "one more global": _mutant(_call_system, "pickle: os.system, alone", "os.system"),
    "a module is imported": _mutant(_import_modules, "pickle: antigravity, alone", "import"),
    "an unpickler is used": _mutant(_unpickle, "pickle: INST, alone", "pickle.find_class"),
    # Python 3.13.0 loses the MemoryError of a set that cannot grow.
    "memory is not charged": _mutant(
        _charge_nothing, "bomb: many sets", "MemoryError|error return without exception set"
    ),
    "links are read": _mutant(_read_links, "zip: a link", "was not refused"),
    "archives have no bound": _mutant(_spend_without_end, "bomb: a bomb in a tar", "not refused"),
}
"""Defects of our own readers."""


def main(choice: str) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outside = folder / "outside.safetensors"
        weights.write_tensor(outside)
        watch = FolderWatch()
        for case in honest():
            run(case, watch, folder)
        chosen: Iterable[Case] = cases()
        if choice == "cases":
            chosen = [*cases(), *weights.cases(outside)]
        elif choice == "bombs":
            chosen = bombs()
        elif choice == "mutants":
            chosen = [*cases(), *bombs_of(MUTANTS.values())]
        gc.freeze()
        actions = {case.name: partial(run, case, watch, folder) for case in chosen}
        if choice == "mutants":
            print_mutants(MUTANTS, actions)
            return
        was_opened = Opened(outside)
        print_cases(actions)
        problems = ["a file outside was opened"] if was_opened() else []
        outside.read_bytes()
        assert was_opened(), "the watch works"
        print(json.dumps({"name": "outside", "problems": problems, "growth": 0}))


def honest() -> Iterable[Case]:
    """Cases that cause every late import of what is honest."""
    files = {
        "x.pt": hostile._honest(),
        "x.tar": hostile.tarred((hostile._info(hostile.STATES), hostile._honest())),
        "x.zst": hostile.TARS["zstd that is none"][1],
        "x.lz4": hostile.TARS["lz4 that is none"][1],
        "y.pkl": pickle.dumps({"a": np.arange(2), "b": np.float32(1)}, 2),
        "w.pkl": pickle.dumps({"a": "ä", "b": np.arange(2)}, 0),
        "large.pkl": pickle.dumps({"a": np.zeros(1 << 17)}),
        "z.pkl": b"\x80\x02}" + hostile.text("a") + b"X\x01\x00\x00\x00\xff",
    }
    yield from (Case(name, {name: data}) for name, data in files.items())
    yield Case("folder", {"trainer_state.json": b"{}", "optimizer.pt": hostile._honest()})
    yield from weights.harmless()


def bombs_of(mutants: Iterable[Mutant]) -> Iterable[Case]:
    """The bombs that mutants ask for; others are not made."""
    wanted = {case for mutant in mutants for case in mutant.cases}
    return list(bombs(wanted))


if __name__ == "__main__":
    main(sys.argv[1])
