"""Plans the files of an export, and writes them under a temporary name that is renamed at last."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import StoreError, UsageError
from holdfast.interop.source import LeftOut

_PART = ".part-"


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
    """What is in another form than in the source, such as a path as text; some are found only when
    the files are written."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def write_plan(plan: ExportPlan, out: Path) -> None:
    """Write all files of a plan to `out`, which appears when it is whole and durable.

    Raises:
        UsageError: `out` exists.
        StoreError: a file cannot be written.
    """
    try:
        with new_output(out) as path:
            for file in plan.files:
                inside = path / file.name if file.name else path
                inside.parent.mkdir(parents=True, exist_ok=True)
                with inside.open("xb") as opened:
                    file.write(opened)
                    opened.flush()
                    os.fsync(opened.fileno())
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error}") from error


@contextmanager
def new_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path beside `out`; rename it to `out` at the end of the block.

    After an error nothing is left. What an export that was killed has left goes first.

    Raises:
        UsageError: `out` exists, and is not an empty folder; or its own folder does not exist.
    """
    expect_free(out)
    remove_leftovers(out)
    path = out.with_name(f".{out.name}{_PART}{secrets.token_hex(4)}")
    try:
        yield path
        if path.is_dir():
            _sync_folders(path)
        expect_free(out)
        os.replace(path, out)
        _sync_folder(out.parent)
    except BaseException:
        _remove(path)
        raise


def expect_free(out: Path) -> None:
    """Raise `UsageError` unless a path can become the output of an export."""
    if not out.name or not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent} to write it in")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: exists already; give a name that is still free")


def remove_leftovers(out: Path) -> None:
    """Remove what killed exports to the same output have left."""
    for path in out.parent.iterdir():
        if path.name.startswith(f".{out.name}{_PART}"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return  # folders cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
