"""Reads one safetensors file: a header that is checked whole, and bytes at fixed places."""

from __future__ import annotations

import os
from pathlib import Path

from typing_extensions import override

from holdfast.errors import CorruptData
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import (
    MAX_HEADER_NBYTES,
    METADATA,
    TensorSpec,
    header_nbytes,
    parse_header,
)
from holdfast.interop.source import Part, Source

MODEL = "model"
"""Component of weights that come without a name of their own."""


def recognises(path: Path) -> bool:
    """Whether a file begins as a safetensors file does: a length, and a JSON object."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(9)
    return (
        len(first) == 9
        and first[8:] == b"{"
        and int.from_bytes(first[:8], "little") <= MAX_HEADER_NBYTES
    )


class SafetensorsFile(Source):
    """The weights in one safetensors file, as the component `model`."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            self._places = self._read_header()
        except BaseException:
            self.close()
            raise
        specs = {
            key: TensorSpec(key, dtype, shape)
            for key, (dtype, shape, _, _) in sorted(self._places.items(), key=lambda one: one[1][2])
        }
        tree = {key: TensorRef(key) for key in self._places}
        self.parts = {MODEL: Part(kind="module", tree=tree, specs=specs)}

    def _read_header(self) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        nbytes = os.fstat(self._file).st_size
        length = header_nbytes(os.pread(self._file, 8, 0), file_nbytes=nbytes, what=self.url)
        head = os.pread(self._file, length, 0)
        found = parse_header(head, file_nbytes=nbytes, what=self.url)
        return {key: place for key, place in found.items() if key != METADATA}

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        position = self._places[key][2] + start
        while memory.nbytes:
            count = os.preadv(self._file, [memory], position)
            if not count:
                raise CorruptData(f"{self.url}: ends at byte {position:,}, inside {key!r}")
            position += count
            memory = memory[count:]

    @override
    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
