"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings

from holdfast.system import memory_limit
from runs import Recorder
from ways import WAYS, Way, possible_ways

pytest_plugins = ["servers.fixtures"]

# All tests share one server of forks. Ranks and killed runs inherit what it has imported, which
# saves each of them three seconds for torch._dynamo (the first optimizer imports it), two for
# torchmetrics, and a tenth for the modules that every test file imports.
multiprocessing.set_forkserver_preload(
    [
        "holdfast.testing.resume",
        "holdfast.train",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torchmetrics",
        "torchmetrics.classification",
        "holdfast.manager",
        "holdfast.ranks.c10d",
        "holdfast.store.local",
        "holdfast.testing",
        "holdfast.testing.faulty",
        "holdfast.weights",
        "pytest",
        # Last. It is found only if pytest runs in the project's folder; else forks are slower.
        "tests.frozen",
    ]
)

# Before the first import: so that a failure in the shipped suite shows its values.
pytest.register_assert_rewrite("holdfast.testing.store_contract")

MEMORY = "/dev/shm"
MEMORY_NBYTES = 4 << 30
"""Free memory from which tests use it; they take up to 0.5 GiB, and failed ones keep theirs."""
LONG_TIMEOUT_S = 1800

settings.register_profile("full", deadline=None, print_blob=True, max_examples=150)
settings.register_profile("quick", settings.get_profile("full"), max_examples=30)


def pytest_configure(config: pytest.Config) -> None:
    """Give property tests fewer examples in `make test`, and in no tier a limit of time."""
    is_quick = "not full" in str(config.option.markexpr)
    settings.load_profile("quick" if is_quick else "full")
    if is_quick:
        _use_memory()


def _use_memory() -> None:
    """Put temporary folders into memory if it has room: on a disk, half of the time is fsync."""
    if not os.access(MEMORY, os.W_OK):
        return
    free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
    limit = memory_limit()
    if free >= MEMORY_NBYTES and (limit is None or limit >= 2 * MEMORY_NBYTES):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


_FROZEN_MODULES = [0]
THRESHOLDS = (10_000, 20)
"""Of the garbage collector: tests make many objects, and at Python's 700 a tenth of their time is
its searches."""
_MANY_MODULES = 100


def _freeze() -> None:
    """Keep what was imported out of the collections of garbage that tests cause, and out of the
    search of each manager's first save for objects that are not in the state."""
    gc.collect()
    gc.freeze()
    _FROZEN_MODULES[0] = len(sys.modules)


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are collected, where it would search all that they import."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests more time than the 300 s of others, also on slow and busy machines."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Freeze what was collected, with what the first optimizer of a worker would import."""
    gc.enable()
    gc.set_threshold(*THRESHOLDS)
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module("torch._dynamo")
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what the tests of a file have imported, once its fixtures are gone."""
    yield
    is_last = nextitem is not None and nextitem.path != item.path
    if is_last and len(sys.modules) > _FROZEN_MODULES[0] + _MANY_MODULES:
        _freeze()


def pytest_sessionfinish() -> None:
    """Look for garbage once: pytest does five times, in all that the tests have imported."""
    _freeze()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_numerics() -> None:
    """One thread, whatever the machine has: the workers of a run share its cores, and threads that
    wait for each other there cost more than the tests. Seeds are each test's own business."""
    torch.set_num_threads(1)


@pytest.fixture
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait whether another manager of this process has been dropped."""
    monkeypatch.setattr("holdfast.ownership.claim._DROPPED_S", 0.0)


@pytest.fixture
def recorder() -> Recorder:
    """A fresh event recorder."""
    return Recorder()


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """A folder in memory where there is one: for tests whose many fsyncs prove nothing."""
    base = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder on a disk, for tests of what a disk does; `tmp_path` may be in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Each way to save."""
    return WAYS[request.param]


@pytest.fixture
def way_path(way: Way, ram_path: Path, disk_path: Path) -> Path:
    """A folder in which that way can be gone: on a disk where the disk is to be written directly,
    else in memory."""
    if not way.direct_io:
        return ram_path
    if way.name not in possible_ways(disk_path):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("this file system refuses O_DIRECT")
    return disk_path


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that everybody may enter, as nobody else may those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB with 500 inodes, in memory; needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=64m,nr_inodes=500"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(f"mount is refused, so this promise is not tested: {done.stderr}")
        pytest.skip(f"mount is refused: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
