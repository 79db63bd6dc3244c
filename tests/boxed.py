"""Checkpoints whose tensors are stored as several boxes, in the files of several writers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor

from holdfast.format import blocks, index_parts, layout
from holdfast.format.boxes import Boxes, Ragged, key_of_box
from holdfast.format.codec import CodecName, Compression, Encoding
from holdfast.format.index import Places, StoredBlocks, TensorTable, decode_index, encode_index
from holdfast.format.manifest import FileEntry, Manifest, decode_register, encode_manifest
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec, lay_out
from holdfast.state.shards import Box, whole_box

BLOCK_NBYTES = 4096
Cuts = Mapping[str, Sequence[Box]]
"""Boxes that tile each tensor of a component, by key. Other tensors are stored whole."""


def random_cuts(shape: Sequence[int], num: int, draw: random.Random) -> list[Box]:
    """At most `num` boxes that tile a tensor, in any order, and not always in a grid."""
    found = [whole_box(shape)]
    for _ in range(num - 1):
        offsets, sizes = found.pop(draw.randrange(len(found)))
        dims = [dim for dim, size in enumerate(sizes) if size > 1 and 0 not in sizes]
        if not dims:
            found.append(Box(offsets, sizes))
            continue
        dim = draw.choice(dims)
        at = draw.randrange(1, sizes[dim])
        found.append(Box(offsets, _with(sizes, dim, at)))
        found.append(
            Box(_with(offsets, dim, offsets[dim] + at), _with(sizes, dim, sizes[dim] - at))
        )
    draw.shuffle(found)
    return found


def grid_cuts(shape: Sequence[int], num: int, draw: random.Random) -> list[Box]:
    """About `num` boxes that are a grid, in any order."""
    sides = [[0, size] for size in shape]
    while sides and len([*itertools.product(*map(itertools.pairwise, sides))]) < num:
        side = draw.choice(sides)
        new = draw.randrange(1, max(side[-1], 2))
        if new in side or new >= side[-1]:
            break
        side[:] = sorted([*side, new])
    found = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(itertools.pairwise(side) for side in sides))
    ]
    draw.shuffle(found)
    return found


def reshard(
    folder: Path,
    cuts: Mapping[str, Cuts],
    *,
    num_writers: int = 1,
    codec: CodecName | None = None,
    writers_per_part: int = 0,
) -> Manifest:
    """Store the tensors of a plain checkpoint anew in boxes, each by the next of the writers.

    `cuts`: component → its tensors in several boxes. Trees stay as they are. With
    `writers_per_part` the index is in parts.
    """
    manifest = decode_register((folder / layout.MANIFEST).read_bytes(), what="")
    assert isinstance(manifest, Manifest)
    old = decode_index((folder / layout.INDEX).read_bytes(), files=manifest.files, what="")
    files: dict[str, FileEntry] = {}
    digests: dict[str, bytes] = {}
    stored: dict[str, StoredBlocks] = {}
    tables: dict[str, TensorTable] = {}
    components = dict(manifest.components)
    writers: dict[str, list[int]] = {}
    for name, table in old.components.items():
        component = components[name]
        values = {key: _bytes(folder, table, key) for key in table}
        tree, *before = component.files
        for file in before:
            (folder / file).unlink()
        contents, tables[name], writers[name] = _write(
            name, table, values, cuts.get(name, {}), num_writers
        )
        contents = {tree: (folder / tree).read_bytes(), **contents}
        own: list[str] = []
        for file, data in contents.items():
            is_stored = codec is not None and file != tree
            saved = layout.stored_file(file, codec) if is_stored and codec is not None else file
            own.append(saved)
            digests[saved] = blocks.digest_blocks(data, BLOCK_NBYTES)
            entry = FileEntry(
                nbytes=len(data), digest=blocks.file_digest(len(data), digests[saved])
            )
            if is_stored and codec is not None:
                encoded = _encoded(data, codec)
                data = b"".join(encoded)
                stored[saved] = StoredBlocks(
                    tuple(map(len, encoded)), b"".join(map(blocks.block_digest, encoded))
                )
                entry = msgspec.structs.replace(entry, stored=stored[saved].entry(codec))
            files[saved] = entry
            (folder / saved).write_bytes(data)
        tables[name] = tables[name].stored_as(dict(zip(contents, own, strict=True)))
        components[name] = msgspec.structs.replace(
            component, files=tuple(own), nbytes=sum(files[file].nbytes for file in own)
        )
    documents = {layout.INDEX: b""}
    if writers_per_part:
        lengths = {name: entry.nbytes for name, entry in files.items()}
        with mock.patch.object(index_parts, "PART_WRITERS", writers_per_part):
            documents = index_parts.encode_in_parts(
                tables, digests, lengths, writers, BLOCK_NBYTES, stored=stored
            )
    else:
        documents[layout.INDEX] = encode_index(tables, digests, BLOCK_NBYTES, stored=stored)
    for name, data in documents.items():
        of_index = blocks.digest_blocks(data, BLOCK_NBYTES)
        files[name] = FileEntry(nbytes=len(data), digest=blocks.file_digest(len(data), of_index))
        (folder / name).write_bytes(data)
    manifest = msgspec.structs.replace(
        manifest,
        files=files,
        components=components,
        block_nbytes=BLOCK_NBYTES,
        world_size=num_writers,
        sharded=any(table.boxes is not None for table in tables.values()),
    )
    (folder / layout.MANIFEST).write_bytes(encode_manifest(manifest))
    return manifest


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _bytes(
    folder: Path, table: TensorTable, key: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The elements of a tensor, each as a row of bytes."""
    (shard,) = table[key].shards
    data = (folder / shard.file).read_bytes()[shard.start : shard.start + shard.nbytes]
    spec = table.specs[key]
    return np.frombuffer(data, np.uint8).reshape(*spec.shape, ITEM_NBYTES[spec.dtype])


def _write(
    component: str,
    table: TensorTable,
    values: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]],
    cuts: Cuts,
    num_writers: int,
) -> tuple[dict[str, bytes], TensorTable, list[int]]:
    """The tensor files by plain name, what is where in them, and the files of each writer."""
    of_writers: list[dict[str, tuple[TensorSpec, bytes]]] = [{} for _ in range(num_writers)]
    rows: list[tuple[int, Box, int, str]] = []
    for number, (key, spec) in enumerate(table.specs.items()):
        for box in cuts.get(key, [whole_box(spec.shape)]):
            name = key if box == whole_box(spec.shape) else key_of_box(key, *box)
            writer = len(rows) % num_writers
            inside = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
            data = np.ascontiguousarray(values[key][inside]).tobytes()
            of_writers[writer][name] = TensorSpec(name, spec.dtype, box.sizes), data
            rows.append((number, box, writer, name))
    contents: dict[str, bytes] = {}
    counts: list[int] = []
    at: dict[tuple[int, str], tuple[int, int]] = {}
    for writer, of_writer in enumerate(of_writers):
        specs = [spec for spec, _ in of_writer.values()]
        files = lay_out(component, specs, first_number=len(contents))
        counts.append(len(files))
        for file in files:
            data = bytearray(file.nbytes)
            data[: len(file.header)] = file.header
            for spec, start in zip(file.specs, file.starts, strict=True):
                data[start : start + spec.nbytes] = of_writer[spec.key][1]
                at[writer, spec.key] = len(contents), start
            contents[file.name] = bytes(data)
    places = [(*at[writer, name], len(of_writers[writer][name][1])) for *_, writer, name in rows]
    columns = np.array(places, np.int64).reshape(-1, 3).T
    boxes = Boxes(
        np.array([number for number, *_ in rows], np.int64),
        Ragged.from_lists([box.offsets for _, box, *_ in rows]),
        Ragged.from_lists([box.sizes for _, box, *_ in rows]),
    )
    return contents, TensorTable(table.specs, Places([*contents], *columns), boxes), counts


def _encoded(data: bytes, codec: CodecName) -> list[bytes]:
    parts = blocks.list_blocks(len(data), BLOCK_NBYTES)
    encoding = Encoding(Compression(codec=codec), [1] * len(parts))
    plain = memoryview(data)
    return [
        bytes(encoding.encode(number, plain[start:stop]))
        for number, (start, stop) in enumerate(parts)
    ]
