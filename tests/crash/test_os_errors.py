"""An error of the operating system at every single call of a save, a deletion and a resume.

The calls are those of the real store on a real folder; the k-th one fails with a chosen errno.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import errors
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.local import folders as localfolders
from holdfast.store.local.blocks import LocalBlockWriter
from marks import full
from ways import Way, save_and_go_on

CALLS = ("open", "pwrite", "fsync", "link", "replace", "mkdir", "unlink")
TENSORS = ".safetensors"
ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE)


class Injector:
    """Counts calls below a folder's operations and makes one of them fail."""

    def __init__(self, name: str, at: int, code: int) -> None:
        self.name, self.at, self.code = name, at, code
        self.seen = 0
        self.hits: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name.startswith("holdfast-heartbeat"):
                return real(*args, **options)
            with self._lock:
                number = self.seen
                self.seen += 1
            if number == self.at:
                self.hits.append(_what(args))
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **options)

        return call


def _what(args: tuple[Any, ...]) -> str:
    """The path or the file behind a descriptor, while it is open."""
    if args and isinstance(args[0], int):
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[0]) if args else ""


@contextmanager
def failing(name: str, at: int, code: int) -> Iterator[Injector]:
    """Make the `at`-th call of `os.<name>` fail."""
    injector = Injector(name, at, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, injector(getattr(os, name)))
        yield injector


def tree(step: int) -> dict[str, Any]:
    return {"step": step, "weights": [torch.full((3000,), float(step)) for _ in range(2)]}


def new_manager(root: Path, step: int) -> CheckpointManager:
    state = {"tree": tree(step)}
    return CheckpointManager(root, state, keep=Last(1), sinks=(), preflight=False)


@pytest.fixture
def roots(ram_path: Path) -> Iterator[Path]:
    """New roots, each with one committed checkpoint of step 1."""
    made = ram_path / "made"
    with new_manager(made, 1) as manager:
        manager.save(1).wait()
    copies = (ram_path / str(number) for number in itertools.count())
    return (shutil.copytree(made, root, symlinks=True) for root in copies)


def attempt(root: Path) -> tuple[bool, BaseException | None]:
    """Resume and save step 2; whether that was acknowledged, and what was raised."""
    manager = new_manager(root, 0)
    try:
        manager.resume()
        manager.state["tree"].update(tree(2))
        manager.save(2).wait()
        return True, None
    except errors.HoldfastError as error:
        return False, error
    finally:
        with suppress(errors.HoldfastError):
            manager.close()


def newest(root: Path) -> int:
    """The step that a new process resumes from, after checking every byte and every value."""
    store = LocalStore(root)
    for entry in Catalog(store).checkpoints():
        report = verify(store, entry.folder)
        assert report.ok, report.problems
    with new_manager(root, 0) as manager:
        found = manager.resume()
        assert found is not None
        loaded = manager.state["tree"]
        assert {float(value) for part in loaded["weights"] for value in part} == {found.step}
        return found.step


QUICK = ("fsync", "replace")


@pytest.mark.parametrize("name", [*QUICK, *full(*(name for name in CALLS if name not in QUICK))])
def test_an_error_at_every_call_is_reported_and_harms_nothing(
    name: str, roots: Iterator[Path]
) -> None:
    """R6, R7, D8, D37: no "OK but not there", no old one lost; the message names the errno."""
    codes = itertools.cycle(ERRNOS)
    for at, root in zip(range(400), roots, strict=False):
        code = next(codes)
        with failing(name, at, code) as injector:
            saved, error = attempt(root)
        if not injector.hits:
            assert at > 0, f"os.{name} is never called; the list of calls is out of date"
            break
        step = newest(root)
        assert step == 2 if saved else step in (1, 2), (at, saved, error)
        if error is not None:
            assert_names_the_cause(error, code)
            if step == 2:
                assert_says_unknown(error)
    else:
        pytest.fail("more calls than expected")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A save of which one call failed, or that made fewer calls."""

    hits: list[str]
    """What the call that failed was made on."""
    before: int
    """The step that was acknowledged before."""
    step: int
    error: BaseException | None


def save_so(root: Path, way: Way, name: str, at: int, code: int) -> Tried:
    """Resume, save that way, and have one call of the last of these saves fail."""
    state = way.new_state()
    manager = way.manager(root, state, preflight=False)
    error = None
    try:
        found = manager.resume()
        before = found.step if found is not None else 0
        assert state.step() == before
        for _ in range(way.num_before):
            before = save_and_go_on(manager, state, before + 1).step
        manager.wait()
        with failing(name, at, code) as injector:
            try:
                save_and_go_on(manager, state, before + 1)
                manager.wait()
            except errors.HoldfastError as raised:
                error = raised
    finally:
        with suppress(errors.HoldfastError):
            manager.close()
    return Tried(hits=injector.hits, before=before, step=before + 1, error=error)


STRIDES = {"open": 31, "pwrite": 5, "fsync": 5, "link": 5, "replace": 5, "mkdir": 1, "unlink": 7}
"""Every so many calls of a save one fails, where not all are tried."""


def assert_errors_harm_nothing(root: Path, way: Way, strides: Mapping[str, int]) -> None:
    """One run goes through an error at each of these calls."""
    codes, store, before = itertools.cycle(ERRNOS), LocalStore(root), 0
    for name in CALLS:
        for at in range(0, 1000, strides.get(name, 1)):
            code = next(codes)
            tried = save_so(root, way, name, at, code)
            assert tried.before == before + way.num_before, tried
            collect_garbage(store)
            for entry in Catalog(store).checkpoints():
                report = verify(store, entry.folder)
                assert report.ok, report.problems
            head = Catalog(store).head()
            before = head.step if head is not None else 0
            assert before == tried.step or (tried.error and before == tried.before), tried
            if name in ("pwrite", "fsync") and any(TENSORS in hit for hit in tried.hits):
                assert tried.error is not None
            if tried.error is not None:
                assert_names_the_cause(tried.error, code)
                if before == tried.step:
                    assert_says_unknown(tried.error)
            if not tried.hits:
                assert at > 0, f"os.{name} is never called; the list of calls is out of date"
                break
        else:
            pytest.fail("more calls than expected")


@pytest.mark.full
def test_nor_does_an_error_in_a_save_made_otherwise(
    way_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6, R7, D8, D37; invariants 1, 2, 4, 10: while training goes on, a few blocks at a time, with
    files of the checkpoint before, and past the page cache."""
    shown: list[str] = []
    way.have_noted(monkeypatch.setattr, partial(shown.append, way.name))
    assert_errors_harm_nothing(way_path, way, STRIDES)
    assert len(shown) >= 20


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nor_does_one_at_any_call_of_it(way_path: Path, way: Way) -> None:
    """R6, R7; invariants 1, 2, 4, 10."""
    assert_errors_harm_nothing(way_path, way, {})


def assert_names_the_cause(error: BaseException, code: int) -> None:
    """The message says what the system said, or the error is of a class that does."""
    text = str(error)
    assert os.strerror(code) in text or f"errno {code}" in text, text
    assert "/" in text, text


def assert_says_unknown(error: BaseException) -> None:
    """A save that failed and yet is there must not have claimed to know that it failed."""
    cause = error.__cause__
    assert isinstance(cause, errors.OutcomeUnknown), (error, cause)


def test_a_failed_fsync_is_never_repeated_on_the_same_file(roots: Iterator[Path]) -> None:
    """R7; invariant 2: after EIO the kernel may have dropped the pages."""
    for at, root in zip(range(60), roots, strict=False):
        synced: list[tuple[int, int, bool]] = []
        with failing("fsync", at, errno.EIO) as injector, recorded_fsyncs(synced):
            attempt(root)
        if not injector.hits:
            assert at > 5
            return
        device, inode, is_folder = synced[at]
        assert is_folder or synced.count((device, inode, is_folder)) == 1, injector.hits
    pytest.fail("more calls than expected")


def test_a_mutant_that_repeats_a_failed_fsync_is_caught(
    roots: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: the second fsync "succeeds", and the bytes may be gone."""
    real = LocalBlockWriter.finish

    def finish(self: LocalBlockWriter, nbytes: int | None = None) -> None:
        try:
            real(self, nbytes)
        except errors.StoreError:
            os.fsync(self._fd)

    monkeypatch.setattr(LocalBlockWriter, "finish", finish)
    with pytest.raises(AssertionError):
        test_a_failed_fsync_is_never_repeated_on_the_same_file(roots)


@contextmanager
def recorded_fsyncs(seen: list[tuple[int, int, bool]]) -> Iterator[None]:
    """Write down device, inode and kind of everything that is synced."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if not threading.current_thread().name.startswith("holdfast-heartbeat"):
            found = os.fstat(fd)
            seen.append((found.st_dev, found.st_ino, stat.S_ISDIR(found.st_mode)))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def test_a_mutant_that_swallows_errors_is_caught(
    roots: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: with write errors ignored the test above must fail."""
    real = localfolders.write_all

    def careless(fd: int, data: memoryview, start: int) -> None:
        with suppress(OSError):
            real(fd, data, start)

    monkeypatch.setattr(localfolders, "write_all", careless)
    with pytest.raises((AssertionError, errors.HoldfastError)):
        test_an_error_at_every_call_is_reported_and_harms_nothing("pwrite", roots)
