"""What a root costs whose run was killed often: `python -m bench.kills`.

Each life of the run is a process in a process namespace of its own, as in a container of its own,
so that none can prove that the one before is dead. It resumes, saves twice, and is killed somewhere
in the third save. Then the requests of a resume and of three saves are counted, beside those in a
root that was killed once. Wants the right to make namespaces (root, or CAP_SYS_ADMIN).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench.child import in_child
from bench.command import Bench, progress
from bench.remote import Place, server
from bench.report import results_table
from bench.results import Figures, Results
from holdfast import CheckpointManager, Last
from holdfast.ownership import claim
from holdfast.store import open_store
from holdfast.testing import Fault, FaultyStore

STORES = ("local", "moto")
_NEW_PROCESSES, _NEW_MOUNTS = 0x20000000, 0x00020000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_PAGE = 1000
"""Names that an object store gives in one reply."""
_MOST_OPERATIONS = 12
"""Of a save in its own folder, its manifest's put among the last."""
_SEED = 7


class Counting(FaultyStore):
    """A store whose requests are counted: one an operation, and for a long list one a page."""

    _num_more_pages = 0

    def children(self, folder: str = "") -> tuple[str, ...]:
        found = super().children(folder)
        self._num_more_pages += max(0, len(found) - 1) // _PAGE
        return found

    @property
    def num_requests(self) -> int:
        """Those so far."""
        return len(self.ops) + self._num_more_pages


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=1000, help="lives that are killed")
    parser.add_argument("--stores", nargs="*", choices=STORES, default=[*STORES])
    parser.set_defaults(url=None, server="moto")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    results.titles["kills"] = f"{options.kills} kills"
    for store in options.stores:
        place = server(options, folder) if store == "moto" else nullcontext(None)
        with place as found:
            for name, num_kills in (("fresh", 1), ("killed", options.kills)):
                url = f"{found.url}/{name}" if found else str(folder / name)
                progress(f"  {store}: {num_kills} kills")
                _kill(url, found, num_kills)
                results.add(f"kills/{store}-{name}", in_child(_costs, url, found, 3 * num_kills))


def _kill(url: str, place: Place | None, num_kills: int) -> None:
    choice = random.Random(_SEED)
    with ExitStack() as namespaces:  # held, for the number of one that is gone is given again
        for number in range(num_kills):
            at = choice.randrange(_MOST_OPERATIONS)
            found = _live_and_die(url, place, first=3 * number, at=at)
            namespaces.callback(os.close, found)


def _prepare(place: Place | None) -> None:
    os.environ.update(place.environment if place else {})
    torch.set_num_threads(1)
    claim.WATCH_S = 0.03  # the heartbeat of a claim from elsewhere is watched for half a minute


def _live_and_die(url: str, place: Place | None, *, first: int, at: int) -> int:
    """One life, killed at that operation of its third save; an open file of its namespace."""
    reading, writing = os.pipe()
    reading_more, writing_more = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(writing_more)
        _keep(url, place, first, at, writing, reading_more)
    os.close(writing)
    os.close(reading_more)
    if not os.read(reading, 1):
        raise RuntimeError("a life ended before it was killed; what it said stands above")
    namespace = os.open(f"/proc/{keeper}/ns/pid_for_children", os.O_RDONLY)
    os.close(writing_more)
    os.close(reading)
    os.waitpid(keeper, 0)
    return namespace


def _keep(url: str, place: Place | None, first: int, at: int, writing: int, until: int) -> NoReturn:
    """Begin a life in a namespace of its own, and kill it."""
    try:
        _prepare(place)
        _expect_done(_libc().unshare(_NEW_PROCESSES | _NEW_MOUNTS), "unshare")
        child = os.fork()
        if child == 0:
            _live(url, first, at, writing)
        os.close(writing)
        os.read(until, 1)  # it is closed when the life has come so far
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except BaseException as error:
        print(f"a life: {error!r}", file=sys.stderr, flush=True)
    os._exit(0)


def _live(url: str, first: int, at: int, writing: int) -> NoReturn:
    try:
        # As in a container: what is in /proc are the processes of the new namespace.
        libc = _libc()
        _expect_done(libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None), "mount /")
        _expect_done(libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
        killed = Fault(kind="hang", key=f"step-{first + 2:08d}.*", at=at)
        manager = _manager(FaultyStore(open_store(url), [killed]))
        manager.resume()
        for step in (first, first + 1):
            manager.save(step).wait()
        manager.wait()
        pending = manager.save(first + 2)
        while not (killed.reached.wait(0.01) or pending.committed.done()):
            pass
        os.write(writing, b"x")
        time.sleep(60)
    except BaseException as error:
        print(f"a life: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def _costs(url: str, place: Place | None, first: int) -> Figures:
    """Requests and seconds of a resume, and requests of three saves."""
    _prepare(place)
    store = Counting(open_store(url))
    with _manager(store) as manager:
        began = time.perf_counter()
        manager.resume()
        manager.wait()
        figures = {"resume_s": time.perf_counter() - began, "resume_requests": store.num_requests}
        for number in range(3):
            before = store.num_requests
            manager.save(first + number).wait()
            manager.wait()
            figures[f"save{number}_requests"] = store.num_requests - before
        names = store.children()
        figures["names"] = len(names)
    return {name: [float(value)] for name, value in figures.items()}


def _manager(store: Any) -> CheckpointManager:
    state = {"model": {"w": torch.zeros(1 << 10)}}
    return CheckpointManager(store, state, keep=Last(2), takeover=True, sinks=())


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _expect_done(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def tables(results: Results) -> list[str]:
    """Requests of each store, fresh and after the kills."""
    titles = {
        f"kills/{store}-{name}": f"{store}, {'one kill' if name == 'fresh' else kills}"
        for kills in [results.titles.get("kills", "many kills")]
        for store in STORES
        for name in ("fresh", "killed")
    }

    def row(case: str) -> list[str]:
        def figure(name: str) -> float:
            return results.median(case, name) or 0.0

        saves = [f"{figure(f'save{number}_requests'):.0f}" for number in range(3)]
        resume = f"{figure('resume_requests'):.0f} ({figure('resume_s'):.2f} s)"
        return [resume, *saves, f"{figure('names'):.0f}"]

    head = ["store", "resume", "first save", "second", "third", "names in the root"]
    return results_table(results, "kills", head, titles, row)


BENCH = Bench(
    name="kills",
    about=__doc__,
    add_options=_add_options,
    measure_round=_measure_round,
    tables=tables,
    rounds=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    return BENCH.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
