"""What the tests of the command line share: results, and damage to the files of a root."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of that step."""
    (found,) = root.glob(f"step-{step:08d}.*")
    return found


def cut_off(folder: Path) -> None:
    """Make of the newest checkpoint what a save leaves that did not come to its end."""
    for path in (folder / "manifest.json", folder / "index.json", folder.parent / "latest"):
        path.unlink()


def overwrite(path: Path, data: bytes) -> None:
    """Put other bytes into a file of a checkpoint, which nobody may write."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, byte: int) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    overwrite(path, bytes(data))
