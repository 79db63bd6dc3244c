"""The index of a checkpoint of many ranks, in one document and in parts: `python -m bench.boxes`.

One document has a million boxes. In parts, each of 1,024 ranks writes 3,000 boxes: FSDP.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping
from functools import partial
from time import perf_counter, process_time

import numpy as np

from bench.child import in_child
from bench.results import Figures
from holdfast.format.blocks import DIGEST_NBYTES, file_digest
from holdfast.format.index import Places, TensorTable, decode_index, encode_index
from holdfast.format.index_parts import encode_in_parts, open_index
from holdfast.format.layout import BLOCK_NBYTES, INDEX, tensor_file, tree_file
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import TensorSpec

COLUMNS = 64
"""Columns of each tensor, of 4-byte elements; a box is one row."""
NBYTES = 4 * COLUMNS
GOAL_NBYTES = 1 << 30


def written_and_read(num_boxes: int, num_ranks: int) -> Figures:
    """Encode and decode an index of so many boxes; seconds, and peak memory of the process."""
    entries, digests = _files(num_boxes, num_ranks)
    began = perf_counter()
    table = _table(num_boxes, num_ranks)
    data = encode_index({"model": table}, digests)
    write_s = perf_counter() - began
    del table
    began = perf_counter()
    boxes = decode_index(data, files=entries, what="index").components["model"].boxes
    read_s = perf_counter() - began
    if boxes is None or len(boxes.tensor) != num_boxes:
        raise RuntimeError("the index does not have the boxes that were written")
    return {"write_s": [write_s], "read_s": [read_s], **_peak()}


def written_and_read_in_parts(num_boxes: int, num_ranks: int) -> Figures:
    """Encode and decode the same in parts: all of it, and by a process that needs a rank's boxes.

    The latter decodes the root, one part, and the places of that rank's boxes.
    """
    entries, digests = _files(num_boxes, num_ranks)
    lengths = {name: entry.nbytes for name, entry in entries.items()}
    began_cpu_s, began = process_time(), perf_counter()
    table = _table(num_boxes, num_ranks)
    writers = {"model": [1] * num_ranks}
    documents = encode_in_parts({"model": table}, digests, lengths, writers, stored={})
    write_s = perf_counter() - began
    del table
    entries |= {
        name: FileEntry(nbytes=len(data), digest="blake3:" + 64 * "0")
        for name, data in documents.items()
    }
    read_names: list[str] = []

    def read(name: str) -> bytes:
        read_names.append(name)
        return documents[name]

    began = perf_counter()
    index = open_index(read(INDEX), read, files=entries, what=INDEX)
    of_model = index.components["model"]
    if len(of_model.shards_in(tensor_file("model", num_ranks // 2))) != num_boxes // num_ranks:
        raise RuntimeError("the index does not have the boxes that were written")
    rank_s, num_read = perf_counter() - began, len(read_names)
    began = perf_counter()
    index = open_index(read(INDEX), read, files=entries, what=INDEX)
    boxes, _ = index.components["model"].boxes, index.components["model"].shards
    read_s = perf_counter() - began
    if boxes is None or len(boxes.tensor) != num_boxes or {*read_names} != {*documents}:
        raise RuntimeError("the index does not have the boxes that were written")
    nbytes = sum(map(len, documents.values()))
    return {
        "write_s": [write_s],
        "read_s": [read_s],
        "rank_s": [rank_s],
        "cpu_s": [process_time() - began_cpu_s],
        "documents": [float(len(documents))],
        "rank_documents": [float(num_read)],
        "nbytes": [float(nbytes)],
        **_peak(),
    }


def _peak() -> Figures:
    return {"peak_nbytes": [1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]}


def _table(num_boxes: int, num_ranks: int) -> TensorTable:
    numbers = np.arange(num_boxes)
    tensor, row = numbers // num_ranks, numbers % num_ranks
    keys = [f"layer{number}.weight" for number in range(num_boxes // num_ranks)]
    return TensorTable.of_corners(
        {key: TensorSpec(key, "F32", (num_ranks, COLUMNS)) for key in keys},
        Places(
            [tensor_file("model", number) for number in range(num_ranks)],
            row,
            BLOCK_NBYTES + tensor * NBYTES,
            np.full(num_boxes, NBYTES),
        ),
        tensor,
        row * COLUMNS,
        row * COLUMNS + COLUMNS - 1,
    )


def _files(num_boxes: int, num_ranks: int) -> tuple[dict[str, FileEntry], Mapping[str, bytes]]:
    nbytes = BLOCK_NBYTES + num_boxes // num_ranks * NBYTES
    sizes = {tree_file("model"): 100}
    sizes |= {tensor_file("model", number): nbytes for number in range(num_ranks)}
    digests = {
        name: bytes(DIGEST_NBYTES) * -(-size // BLOCK_NBYTES) for name, size in sizes.items()
    }
    entries = {
        name: FileEntry(nbytes=size, digest=file_digest(size, digests[name]))
        for name, size in sizes.items()
    }
    return entries, digests


def main() -> None:
    """Print how long it took, and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--boxes", type=int, default=1_000_000, help="in one document (%(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=1024, help="in parts (%(default)s)")
    parser.add_argument("--of-rank", type=int, default=3000, help="boxes of each (%(default)s)")
    given = parser.parse_args()
    runs = {
        f"one document, {given.boxes:,} boxes": partial(
            written_and_read, given.boxes // 1000 * 1000, 1000
        ),
        f"in parts, {given.ranks:,} ranks of {given.of_rank:,} boxes": partial(
            written_and_read_in_parts, given.ranks * given.of_rank, given.ranks
        ),
    }
    for name, run in runs.items():
        found = {figure: values[0] for figure, values in in_child(run).figures.items()}
        peak = found.pop("peak_nbytes") / 2**20
        figures = ", ".join(f"{figure} {value:,.2f}" for figure, value in found.items())
        print(f"{name}: {figures}; peak {peak:.0f} MiB (goal {GOAL_NBYTES / 2**20:.0f})")


if __name__ == "__main__":
    main()
