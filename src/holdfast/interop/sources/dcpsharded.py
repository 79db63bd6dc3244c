"""Finds the tensors in folders of torch's `HuggingFaceStorageWriter(…, save_distributed=True)`.

Each rank has written its chunks to safetensors files, which say where in its tensor each belongs.
No file says how large a tensor is: it ends where the last of its chunks does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format import strictjson
from holdfast.format.tensors import (
    ITEM_NBYTES,
    MAX_HEADER_NBYTES,
    METADATA,
    header_nbytes,
)
from holdfast.interop.files import LocalFile
from holdfast.interop.sources.dcpchunks import expect_inside, read_header
from holdfast.interop.sources.dcpmetadata import (
    MAX_FILES,
    ChunkedTensor,
    FolderMetadata,
    ItemPlace,
    check_tiling,
)

_PATTERN = "shard-*-model-*.safetensors"
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_MAX_INT = 2**53


def recognises_sharded(folder: Path) -> bool:
    """Whether a folder has files that are named as shards are."""
    return folder.is_dir() and any(True for _ in folder.glob(_PATTERN))


def read_sharded(folder: Path) -> FolderMetadata:
    """Find the chunks of all tensors in a folder, and check that they tile them."""
    found = FolderMetadata(files=sorted(path.name for path in folder.glob(_PATTERN)))
    if len(found.files) > MAX_FILES:
        raise LimitExceeded(f"{folder}: more than {MAX_FILES:,} files")
    _check_numbers(folder, found.files)
    chunks: dict[str, list[_Chunk]] = {}
    for number, name in enumerate(found.files):
        file = LocalFile.open_regular(expect_inside(folder, folder / name))
        try:
            for key, chunk in _chunks_of(file, number).items():
                chunks.setdefault(key, []).append(chunk)
        finally:
            file.close()
    found.tensors = {key: _join_chunks(folder, key, several) for key, several in chunks.items()}
    check_tiling(str(folder), [*found.tensors.values()])
    return found


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Expect shards 1 to the last that exists; no file records how many there were."""
    numbers = {int(text) for name in names if (text := name.split("-")[1]).isdigit()}
    missing = sorted({*range(1, len(numbers) + 1)} - numbers)
    if missing:
        raise CorruptData(f"{folder}: no file of shard {missing[0]}; there are others behind it")


_Chunk = tuple[str, tuple[int, ...], tuple[int, ...], ItemPlace]
"""Dtype, first coordinates, sizes and place of a chunk."""


def _chunks_of(file: LocalFile, number: int) -> dict[str, _Chunk]:
    header = read_header(file)
    sharding = _sharding(file)
    found: dict[str, _Chunk] = {}
    for key, (dtype, sizes, _) in header.items():
        said = sharding.get(key)
        offsets = said.get(_OFFSETS) if isinstance(said, dict) else None
        if type(offsets) is not list or len(offsets) != len(sizes):
            raise FormatError(f"{file.name}: does not say where {key!r:.200} belongs")
        if any(type(one) is not int or not 0 <= one < _MAX_INT for one in offsets):
            raise FormatError(f"{file.name}: {key!r:.200}: offsets that are none")
        nbytes = int(np.prod(sizes, dtype=object)) * ITEM_NBYTES[dtype]
        found[key] = dtype, tuple(offsets), sizes, ItemPlace(number, 0, nbytes)
    return found


def _sharding(file: LocalFile) -> Mapping[str, Any]:
    length = header_nbytes(file.read(0, 8), file_nbytes=file.nbytes, what=file.name)
    entries = _parsed(file, file.read(8, length - 8))
    beside = entries.get(METADATA)
    text = beside.get(_SHARDING) if isinstance(beside, dict) else None
    if type(text) is not str:
        raise FormatError(f"{file.name}: no {_SHARDING}, which torch's writer of shards adds")
    return _parsed(file, text.encode())


def _parsed(file: LocalFile, text: bytes) -> Mapping[str, Any]:
    found = strictjson.loads(
        text, what=file.name, max_nbytes=MAX_HEADER_NBYTES, max_values=2_000_000
    )
    if not isinstance(found, dict):
        raise FormatError(f"{file.name}: the header is not an object")
    return found


def _join_chunks(folder: Path, key: str, chunks: list[_Chunk]) -> ChunkedTensor:
    dtypes = {dtype for dtype, _, _, _ in chunks}
    dims = {len(sizes) for _, _, sizes, _ in chunks}
    if len(dtypes) != 1 or len(dims) != 1:
        raise FormatError(f"{folder}: {key!r:.200}: its chunks differ in dtype or dimensions")
    boxes = [
        (offsets or (0,), tuple(a + b for a, b in zip(offsets, sizes, strict=True)) or (1,))
        for _, offsets, sizes, _ in chunks
    ]
    shape = tuple(max(stop) for stop in zip(*(stops for _, stops in boxes), strict=True))
    places = [place for _, _, _, place in chunks]
    [dtype], [num_dims] = dtypes, dims
    return ChunkedTensor(key, dtype, shape if num_dims else (), np.array(boxes, np.int64), places)
