"""Plans the files of an export, and writes them under a temporary name that is renamed at last."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import StoreError, UsageError
from holdfast.interop.source import LeftOut
from holdfast.store.base import proof_of
from holdfast.system import CLOSED_ON_EXEC, sync, sync_folder_path, try_lock

_PART = ".part-"
_PART_NBYTES = 4
"""Random bytes in the name of an output that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that an export will write."""

    name: str
    """Its path in the folder; empty for an export that is one file."""
    nbytes: int
    """Its length, as far as it is known before: without small headers."""
    write: Callable[[BinaryIO], None]
    """Function that writes it."""


@dataclass(kw_only=True)
class ExportPlan:
    """Files that an export will write, and what of the source is not in them."""

    files: Sequence[PlannedFile]
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Values in another form than in the source, such as a path as text; some are found only when
    the files are written."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def write_plan(plan: ExportPlan, out: Path) -> None:
    """Write all files of a plan to `out`, which appears when it is whole and durable."""
    try:
        with new_output(out, is_folder=any(file.name for file in plan.files)) as path:
            free_nbytes = shutil.disk_usage(path.parent).free
            if plan.nbytes > free_nbytes:
                raise StoreError(
                    f"{out}: takes {plan.nbytes:,} bytes, and {free_nbytes:,} are free. Nothing "
                    "was written"
                )
            for file in plan.files:
                inside = path / file.name if file.name else path
                inside.parent.mkdir(parents=True, exist_ok=True)
                with inside.open("xb" if file.name else "r+b") as opened:
                    file.write(opened)
                    opened.flush()
                    sync(opened.fileno())
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error}") from error


@contextmanager
def new_output(out: Path, *, is_folder: bool) -> Iterator[Path]:
    """Make an empty file or folder, renamed to `out` at the end, or removed after an error."""
    _expect_free(out, is_folder=is_folder)
    remove_leftovers(out)
    name = f".{out.name}{_PART}{secrets.token_hex(_PART_NBYTES)}"
    path = out.with_name(f"{name}-{proof_of(name)}")
    try:
        path.mkdir() if is_folder else path.touch(exist_ok=False)
        with _lock_output(path):
            yield path
            for folder, _, _ in os.walk(path) if is_folder else ():
                sync_folder_path(folder)
            _expect_free(out, is_folder=is_folder)
            os.replace(path, out)
            sync_folder_path(out.parent)
    except BaseException:
        _remove_path(path)
        raise


def expect_free(out: Path) -> None:
    """Raise `UsageError` unless a path can become the output of an export."""
    if not out.name or not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent} to write it in")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: already exists; choose a name that is not in use")


def _expect_free(out: Path, *, is_folder: bool) -> None:
    expect_free(out)
    if not is_folder and os.path.lexists(out):
        raise UsageError(f"{out}: is a folder, and the export is one file; give its name, too")


def remove_leftovers(out: Path) -> None:
    """Remove what killed exports to the same output have left."""
    for path in out.parent.iterdir():
        name, _, proof = path.name.rpartition("-")
        if not name.startswith(f".{out.name}{_PART}") or proof != proof_of(name):
            continue
        with _lock_output(path) as is_ours:
            if not is_ours:
                raise UsageError(f"{out}: another process is writing it now, as {path.name}")
            _remove_path(path)


@contextmanager
def _lock_output(path: Path) -> Iterator[bool]:
    """Lock an output while it is written, if the system can; False if another process has it."""
    is_ours, fd = True, -1
    try:
        with suppress(OSError):
            fd = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | CLOSED_ON_EXEC)
            is_ours = try_lock(fd)
        yield is_ours
    finally:
        if fd >= 0:
            os.close(fd)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
