"""Child process of test_hostile.py, which runs every reader on hostile roots and watches it.

`python -m tests.hostile.child SHARE NUM_SHARES SIZE` prints one JSON object a case; SIZE is that of
`cases`, or `mutants`. Cases run in forks, several in each, under a limit of address space and of
time. An audit hook records the events that no reader may cause.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.hostile import mutants
from tests.hostile.cases import Case, cases
from tests.hostile.roots import Draft, Live, changed, honest
from tests.hostile.sandbox import (
    MAX_GROWTH_TOGETHER,
    MIB,
    Watch,
    each_forked,
    peak_nbytes,
    print_cases,
    print_mutants,
)

import holdfast
from holdfast.cli.gc import clean
from holdfast.cli.ls import list_root
from holdfast.cli.output import Answer, give
from holdfast.cli.show import show
from holdfast.cli.verify import verify_target
from holdfast.errors import HoldfastError
from holdfast.format.records import Rejected
from holdfast.ownership import claim
from holdfast.store.local.syscalls import is_cached
from holdfast.weights import load_weights

TIME_LIMIT_S = 20
"""Processor time of a case."""
MEMORY_LIMIT = 640 * MIB
"""Address space that a case may add to that of the process; a thread's stack takes 8 MiB."""

_M_ARENA_MAX = -8
_TAKES_PATHS = ("os.scandir", "os.listdir", "os.remove", "os.rename", "os.mkdir", "os.rmdir")
_TAKES_PATHS += ("os.link", "os.symlink", "os.truncate", "os.utime", "os.chdir")
_SYSTEM = ("/proc/", "/sys/devices/system/cpu")
_SOURCES = (str(Path(__file__).parent), str(Path(holdfast.__file__).parent))
"""Python reads these again to show the line of a warning."""


WARM = (
    *("manifest with codec", "manifest requires 'sharding'", "claim 2, empty"),
    *("pickle in place of index.json", "a tombstone", "an abort", "attempt of epoch 9999"),
    *("zstd: honest", "lz4: honest", "blosc2: honest", "blosc2: byte 3 is 0"),
)
"""Cases that together cause every late import.

They have one that loads, every kind of document, every codec, and an error for which a library
makes a traceback.
"""


class RootWatch(Watch):
    """What no reader of a root may do."""

    takes_paths = _TAKES_PATHS

    def may_open(self, path: Any, flags: int) -> bool:
        is_source = isinstance(path, str) and path.startswith(_SOURCES) and path.endswith(".py")
        if is_source or (isinstance(path, str) and path.startswith(_SYSTEM)):
            return flags & (os.O_WRONLY | os.O_RDWR) == 0
        # A name alone is looked up in a folder that is open; the last link must not be followed.
        is_safe = flags & (os.O_NOFOLLOW | getattr(os, "O_TMPFILE", 0)) != 0
        if isinstance(path, str) and self.root.startswith(path.rstrip("/") + "/"):
            # To make the root's own name durable, and to see whether it lies in another root.
            return flags & os.O_DIRECTORY != 0
        return self.is_inside(path) and (path in (self.root, 0) or is_safe)

    def is_inside(self, path: Any) -> bool:
        if path is None or isinstance(path, int) or path == self.root:
            return True
        text = os.fsdecode(path)
        return ("/" not in text and text != "..") or text.startswith("/proc/self/fd/")


class Trial:
    """A run of every reader on one root, and what each of them did."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root = root
        self.folder = folder
        self.outcomes: dict[str, str] = {}
        self.problems: list[str] = []

    def run(self, *, is_refused: bool = False, skips_verify: bool = False) -> None:
        root, name = self.root, str(self.root)
        live = Live()
        with live.manager(root) as reading:
            self._try("list", reading.list)
            self._load("load by name", live, lambda: reading.load(self.folder))
        if not skips_verify:
            self._try("verify", lambda: self._told(verify_target(name)))
        live = Live()
        self._load("load_weights", live, lambda: load_weights(root, live.model))
        self._try("ls", lambda: self._told(list_root(name)))
        self._try("show", lambda: self._told(show(f"{name}@{self.folder}", tensors=True)))
        self._try("gc --dry-run", lambda: self._told(clean(name, dry_run=True, dead_epochs=())))
        live = Live()
        manager = live.manager(root)
        self._load("resume", live, manager.resume)
        self._try("close", manager.close)
        if is_refused:
            for reader in ("load by name", "resume"):
                if self.outcomes[reader] == "2":
                    self.problems.append(f"{reader}: the hostile checkpoint was taken")

    def _load(self, name: str, live: Live, load: Callable[[], Any]) -> None:
        before = live.bits(), _global_bits()
        found = self._try(name, load)
        if found is not None:
            self.outcomes[name] = str(found.step)
            live.use()
        elif self.outcomes[name] == "OpaqueLoadFailed":
            return  # the one error that says that the state is mixed
        elif (live.bits(), _global_bits()) != before:
            self.problems.append(f"{name}: refused, and live state changed")

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            found = action()
        except HoldfastError as error:
            self.outcomes[name] = type(error).__name__
            if len(str(error)) > 20_000:
                self.problems.append(f"{name}: a message of {len(str(error))} characters")
            return None
        except BaseException as error:
            self.outcomes[name] = "foreign"
            self.problems.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
            return None
        self.outcomes[name] = str(found)[:20] if isinstance(found, bool | None) else "done"
        return found

    def _told(self, answer: Answer) -> None:
        """Print the answer as text and as JSON; control characters in the text are a problem."""
        text, document = io.StringIO(), io.StringIO()
        with redirect_stdout(text):
            give(answer, as_json=False)
        with redirect_stdout(document):
            give(answer, as_json=True)
        json.loads(document.getvalue())
        shown = text.getvalue()
        if not shown.replace("\n", "").isprintable():
            self.problems.append("a control character was printed")


def _global_bits() -> str:
    state: Any = np.random.get_state()
    torch_bits = torch.get_rng_state().numpy().tobytes()
    return repr((random.getstate(), state[1].tobytes(), state[2], torch_bits))


def run_case(base: Path, draft: Draft, case: Case, watch: Watch) -> dict[str, Any]:
    """Run a case in this process, and return its outcomes, problems and memory growth."""
    root = Path(tempfile.mkdtemp(dir=base / "roots"))
    mine = changed(draft, case.change)
    mine.write(root)
    before = _snapshot(base, root)
    trial = Trial(root, draft.folder)
    peak = peak_nbytes()
    memory = (resource.RLIMIT_AS, MEMORY_LIMIT)
    with watch.watched(root, trial.problems, memory=memory, time_s=TIME_LIMIT_S):
        trial.run(is_refused=case.is_refused, skips_verify=case.skips_verify)
    if _snapshot(base, root) != before:
        trial.problems.append("something outside of the root changed")
    growth = peak_nbytes() - peak
    shutil.rmtree(root)
    return {"outcomes": trial.outcomes, "problems": trial.problems, "growth": growth}


def _snapshot(base: Path, root: Path) -> list[str]:
    outside = [path for path in (base / "outside").iterdir() if path.name != f"{root.name}-twin"]
    names = [*base.iterdir(), *root.parent.iterdir(), *outside]
    return [*sorted(map(str, names)), (base / "outside" / "canary").read_text()]


def warm_up(base: Path, draft: Draft) -> None:
    """Cause all late imports now, so that any further import is one that a root caused."""
    by_name = {case.name: case for case in cases()}
    for number, name in enumerate(WARM):
        root = base / "warm" / str(number)
        changed(draft, by_name[name].change).write(root)
        Trial(root, draft.folder).run()
    rejected = Rejected(by="us", reasons=("a reason",)).encode()
    Rejected.decode(rejected, what="a mark")  # the first read inspects the types
    with open(__file__, "rb") as file:
        is_cached(file.fileno(), 0, 1)  # the first call looks up a function of libc
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(timeout=1)


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a temporary folder for roots, with a file outside of them that no reader may touch."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="holdfast-hostile-") as folder:
        base = Path(folder)
        (base / "roots").mkdir()
        (base / "outside").mkdir()
        (base / "outside" / "canary").write_text("not yours")
        yield base


def main(share: int, num_shares: int, size: str) -> None:
    # One malloc arena, because each reserves address space, which is what is limited.
    assert ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) == 1
    claim.WATCH_S = 0.03  # else a claim of another host is watched for half a minute
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # printing one would open the source
    with workplace() as base:
        draft = honest(base / "honest")
        warm_up(base, draft)
        watch = RootWatch()
        gc.freeze()  # so that forks share the memory of existing objects
        chosen = cases() if size == "mutants" else cases(size)[share::num_shares]  # type: ignore[arg-type]
        actions = {case.name: partial(run_case, base, draft, case, watch) for case in chosen}
        if size == "mutants":
            print_mutants(mutants.MUTANTS, actions)
            run_together()
        else:
            print_cases(actions)


def run_together() -> None:
    """Run actions of which some fail or grow, and print how many ran before each in its fork."""
    ran: list[int] = []

    def action(problems: tuple[str, ...] = (), nbytes: int = 0) -> dict[str, Any]:
        ran.append(len(b"x" * nbytes))
        return {"problems": problems, "growth": nbytes, "before": len(ran) - 1}

    def crash() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    failing, growing = partial(action, ("bad",)), partial(action, nbytes=2 * MAX_GROWTH_TOGETHER)
    for found in each_forked([action, crash, action, failing, growing, action, action]):
        print(json.dumps({"name": "together", **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
