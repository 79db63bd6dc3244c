"""Runs of a test as forks of its process, which has imported the framework; killed anywhere."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.manager import CheckpointManager
from holdfast.ranks.c10d import open_group

Say = Callable[..., None]
"""Notes a moment of the run at which it may be killed; takes and ignores any arguments."""
Job = Callable[[Path, Say], dict[str, Any]]
"""Trains in a root, from wherever that stands, and returns what is compared."""


def finish(job: Job, root: Path, *, kill_at: int = 0, at_calls: bool = False) -> int:
    """Run a job in a fork, which is killed at its moment number `kill_at`; return the exit code.

    With `at_calls` each call of a function is a moment, from the resume on; otherwise the job says
    which are. A job that ends by itself leaves its result in `root.result`.
    """
    pid = _fork()
    if pid == 0:
        _become(job, root, root.with_suffix(".result"), kill_at, at_calls)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, of which none matters here
        return os.fork()


def finish_ranks(
    job: Job, root: Path, num_ranks: int, *, kill: Kill | None = None, at_calls: bool = False
) -> list[int]:
    """Run a job in as many forks, which form a group of gloo; return the exit codes by rank.

    A rank that ends by itself leaves its result in `root.result` and its number. Ranks that fail
    because another was killed have a minute to end.
    """
    ranks: dict[int, int] = {}
    codes, killer = [0] * num_ranks, threading.Timer(60, _kill, [ranks])
    with _store_of_ranks() as port:
        try:
            for rank in range(num_ranks):
                pid = _fork()
                if pid == 0:
                    at = kill.moment if kill is not None and kill.rank == rank else 0
                    result = root.with_suffix(f".result{rank}")
                    with_group = partial(_in_group, job, port, rank, num_ranks)
                    _become(with_group, root, result, at, at_calls)
                ranks[pid] = rank
            while ranks:
                pid, status = os.wait()
                rank = ranks.pop(pid)
                codes[rank] = os.waitstatus_to_exitcode(status)
                if kill is not None and rank == kill.rank:
                    if kill.is_of_all:
                        _kill(ranks)
                    else:
                        killer.start()
        finally:
            killer.cancel()
            _kill(ranks)
    return codes


@contextlib.contextmanager
def _store_of_ranks() -> Iterator[int]:
    """Serve a store in a fork of its own, and yield its port.

    Its threads would be missing in forks of this process, and could hold a lock there for ever.
    """
    reading, writing = os.pipe()
    server = _fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
        os._exit(0)
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    try:
        yield port
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _kill(pids: Iterable[int]) -> None:
    for pid in [*pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _in_group(
    job: Job, port: int, rank: int, num_ranks: int, root: Path, say: Say
) -> dict[str, Any]:
    """Do a job as torchrun would have it done, with the group open already."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    names |= {"LOCAL_WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    open_group("gloo", timeout_s=120, store=store, rank=rank, world_size=num_ranks)
    dist.barrier()  # else a rank that is done would disconnect from one that connects
    found = job(root, say)
    dist.barrier()
    return found


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a rank at one of its moments, and of all others with it or not."""

    rank: int
    moment: int
    is_of_all: bool


def _become(job: Job, root: Path, result: Path, kill_at: int, at_calls: bool) -> NoReturn:
    moments = itertools.count(1)

    def say(*_: Any, **__: Any) -> None:
        if next(moments) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        warnings.simplefilter("ignore")
        if at_calls:
            _say_calls(say)
        found = job(root, say)
        sys.setprofile(None)
        torch.save({"moments": next(moments), "found": found}, result)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _say_calls(say: Say) -> None:
    """Note each call of a Python function in the main thread, once a manager resumes."""
    begin, has_begun = inspect.unwrap(CheckpointManager.resume).__code__, False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun
        if event == "call":
            has_begun = has_begun or frame.f_code is begin
            if has_begun:
                say()

    sys.setprofile(note)


def result(root: Path, rank: int | None = None) -> dict[str, Any]:
    """What the job that ended in this root returned, on a rank of several."""
    suffix = ".result" if rank is None else f".result{rank}"
    found: dict[str, Any] = torch.load(root.with_suffix(suffix), weights_only=False)
    return found


def assert_kills_change_nothing(
    job: Job, folder: Path, *, kills: int, seed: int, at_calls: bool = False
) -> None:
    """Kill a run that often, at random moments, and compare its end with that of one in one go."""
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    assert finish(job, undisturbed, at_calls=at_calls) == 0
    expected, draw = result(undisturbed), random.Random(seed)
    longest = max(min(expected["moments"] // 2, 3 * expected["moments"] // (2 * kills)), 2)
    for number in range(kills):
        code = finish(job, killed, kill_at=draw.randrange(1, longest), at_calls=at_calls)
        assert code == -signal.SIGKILL, f"life {number + 1} ended with {code}"
    assert finish(job, killed) == 0
    assert_equal(result(killed)["found"], expected["found"])


def assert_kills_of_ranks_change_nothing(
    job: Job, folder: Path, num_ranks: int, *, kills: int, seed: int
) -> None:
    """Kill one rank or all that often, at random calls; every rank ends as one undisturbed."""
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    assert finish_ranks(job, undisturbed, num_ranks, at_calls=True) == [0] * num_ranks
    expected, draw = [result(undisturbed, rank) for rank in range(num_ranks)], random.Random(seed)
    longest = max(expected[0]["moments"] * 3 // (2 * kills), expected[0]["moments"] // 4)
    for number in range(kills):
        kill = Kill(draw.randrange(num_ranks), draw.randrange(1, longest), draw.random() < 0.5)
        codes = finish_ranks(job, killed, num_ranks, kill=kill, at_calls=True)
        assert codes[kill.rank] == -signal.SIGKILL, f"life {number + 1} ended with {codes}"
        assert 0 not in codes, f"life {number + 1} ended with {codes}"
    assert finish_ranks(job, killed, num_ranks) == [0] * num_ranks
    for rank in range(num_ranks):
        assert_equal(result(killed, rank)["found"], expected[rank]["found"], f"rank {rank}")


def assert_equal(found: Any, expected: Any, at: str = "result") -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_equal(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{at}: {found} is not {expected}"
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{at}.{number}")
    else:
        assert found == expected, f"{at}: {found!r} is not {expected!r}"


def run_page(page: Path) -> dict[str, Any]:
    """Run the snippets of a page, one after the other; returns the names that they define."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        exec(compile(code, str(page), "exec"), names)
    return names


def run_example(path: Path) -> list[str]:
    """Run an example as a user runs it; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
