"""Record of the checkpoints that a run commits, kept by hard links from the run's own deletions.

It watches folder names only, so it depends on nothing that the script does.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import StoreError
from holdfast.format import layout
from holdfast.format.layout import AttemptName

_DISCOVER_S = 0.2
"""Seconds between searches for roots: scripts make them below the given folder, too."""
_DEPTH = 3
_HEAD_NBYTES = 2048
_COMMITTED = re.compile(rb'"kind": "(?:checkpoint|sealed)"')
_STEP = re.compile(rb'"timestamp": \{\s*"step": (\d+)')
_LABEL_STEP = re.compile(r"step-(\d+)", re.ASCII)


@dataclass(slots=True, kw_only=True)
class SeenSave:
    """A save as seen from outside: when its folder and its manifest were first seen."""

    name: AttemptName
    folder: Path
    began_s: float
    step: int = 0
    """Step of its manifest, or of its label before the commit; 0 if neither shows it."""
    committed_s: float | None = None


class CheckpointRecord:
    """All saves of a run below a folder; times are of `time.monotonic`."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder = folder
        self._kept = kept
        self._next_search_s = 0.0
        self.roots: list[Path] = []
        """Roots in the folder, relative to it, in the order of their first saves."""
        self.saves: dict[str, SeenSave] = {}
        """Saves of the first root, by folder."""
        self._others: dict[Path, dict[str, SeenSave]] = {}

    def look_again(self) -> None:
        """Note new saves and commits, and link the files of what is committed."""
        if time.monotonic() >= self._next_search_s:
            self._next_search_s = time.monotonic() + _DISCOVER_S
            self._find_roots()
        for root in self.roots:
            self._look_into(root, self.saves_of(root))

    def saves_of(self, root: Path) -> dict[str, SeenSave]:
        """Return the saves of a root by folder."""
        return self.saves if root == self.roots[0] else self._others.setdefault(root, {})

    def is_unfinished(self, save: SeenSave) -> bool:
        """Whether a save of the first root has no manifest at this moment."""
        return not read_manifest(self._folder / save.folder)

    def committed(self) -> list[SeenSave]:
        """List the committed saves of the first root, in the order of commits."""
        done = [save for save in self.saves.values() if save.committed_s is not None]
        return sorted(done, key=lambda save: save.name.order)

    def unfinished(self, epoch: int) -> list[SeenSave]:
        """List the saves of a claim that have begun and not committed."""
        return [
            save
            for save in self.saves.values()
            if save.committed_s is None and save.name.epoch == epoch
        ]

    @property
    def newest_step(self) -> int:
        """Highest step of a committed save; -1 if there is none."""
        return max((save.step for save in self.committed()), default=-1)

    @property
    def newest_epoch(self) -> int:
        """Epoch of the newest claim; 0 if there is none."""
        if not self.roots:
            return 0
        names = _list_names(self._folder / self.roots[0] / layout.WRITERS)
        return max((layout.parse_writer(name) or 0 for name in names), default=0)

    def _find_roots(self) -> None:
        for found in _folders_below(self._folder, _DEPTH):
            if found not in self.roots and (self._folder / found / layout.WRITERS).is_dir():
                self.roots.append(found)

    def _look_into(self, root: Path, saves: dict[str, SeenSave]) -> None:
        for folder in _list_names(self._folder / root):
            if folder not in saves and (name := layout.parse_attempt(folder)) is not None:
                labelled = _LABEL_STEP.fullmatch(name.label)
                saves[folder] = SeenSave(
                    name=name,
                    folder=root / folder,
                    began_s=time.monotonic(),
                    step=int(labelled[1]) if labelled else 0,
                )
        for save in saves.values():
            if save.committed_s is None and (head := read_manifest(self._folder / save.folder)):
                save.committed_s = time.monotonic()
                if found := _STEP.search(head):
                    save.step = int(found[1])
                _link_files(self._folder / save.folder, self._kept / save.folder)


def read_manifest(folder: Path) -> bytes:
    """Read the beginning of a save's manifest; empty if it has none, or has a marker of gc."""
    try:
        with (folder / layout.MANIFEST).open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except OSError:
        return b""
    return head if _COMMITTED.search(head) else b""


def _link_files(folder: Path, kept: Path) -> None:
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name in _list_names(folder):
            if (folder / name).is_file():
                _link_or_copy(folder / name, kept / name)
    except FileNotFoundError:  # Deleted in the meantime.
        shutil.rmtree(kept, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be kept for the comparison: {error}") from error


def _link_or_copy(file: Path, kept: Path) -> None:
    try:
        os.link(file, kept)
    except FileNotFoundError:
        raise
    except OSError:  # Another file system, or one without hard links.
        shutil.copyfile(file, kept)


def _folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder and those inside, relative to it, without attempts and records."""
    pending = [(Path(), depth)]
    while pending:
        path, left = pending.pop(0)
        yield path
        for name in sorted(_list_names(folder / path)) if left else []:
            is_own = name in layout.FOLDERS or layout.parse_attempt(name) is not None
            if not is_own and (folder / path / name).is_dir():
                pending.append((path / name, left - 1))


def _list_names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []
