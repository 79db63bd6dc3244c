"""Training data of the demo: the source text of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def standard_library_text(max_nbytes: int) -> bytes:
    """Read the first `max_nbytes` bytes of the standard library's modules, in order of names.

    The same interpreter always gives the same bytes; nothing is downloaded.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces, nbytes = [], 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_bytes())
        nbytes += len(pieces[-1])
        if nbytes >= max_nbytes:
            break
    return b"\n".join(pieces)[:max_nbytes]


class Windows(Dataset[Tensor]):
    """Windows of `length + 1` bytes, each at a random offset near its own place.

    The offset is drawn from torch's global generator, as augmentation is in real training: an
    exact resume must bring back the draws as well as the position.
    """

    def __init__(self, text: bytes, length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return len(self._text) // self._length - 2

    def __getitem__(self, index: int) -> Tensor:
        shift = int(torch.randint(self._length, ()))
        start = index * self._length + shift
        return self._text[start : start + self._length + 1].long()
