"""The index of a checkpoint of many ranks, with a million boxes: `python -m bench.boxes`."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping
from time import perf_counter

import numpy as np

from bench.child import in_child
from bench.results import Figures
from holdfast.format.blocks import DIGEST_NBYTES, file_digest
from holdfast.format.index import Places, TensorTable, decode_index, encode_index
from holdfast.format.layout import BLOCK_NBYTES, tensor_file, tree_file
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import TensorSpec

ROWS, COLUMNS = 1000, 64
"""Shape of each tensor; a box is one row."""
FILES = 64
"""Files, one of each rank."""
GOAL_S = 5.0
GOAL_NBYTES = 1 << 30


def written_and_read(num_boxes: int) -> Figures:
    """Encode and decode an index of so many boxes; seconds, and peak memory of the process."""
    table = _table(num_boxes)
    entries, digests = _files(num_boxes)
    began = perf_counter()
    data = encode_index({"model": table}, digests)
    write_s = perf_counter() - began
    del table
    began = perf_counter()
    index = decode_index(data, files=entries, what="index")
    read_s = perf_counter() - began
    boxes = index.components["model"].boxes
    if boxes is None or len(boxes.tensor) != num_boxes:
        raise RuntimeError("the index does not have the boxes that were written")
    peak_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"write_s": [write_s], "read_s": [read_s], "peak_nbytes": [float(peak_nbytes)]}


def _table(num_boxes: int) -> TensorTable:
    numbers = np.arange(num_boxes)
    keys = [f"layer{number}.weight" for number in range(num_boxes // ROWS)]
    nbytes = 4 * COLUMNS
    return TensorTable.of_boxes(
        {key: TensorSpec(key, "F32", (ROWS, COLUMNS)) for key in keys},
        Places(
            [tensor_file("model", number) for number in range(FILES)],
            numbers % FILES,
            BLOCK_NBYTES + numbers // FILES * nbytes,
            np.full(num_boxes, nbytes),
        ),
        numbers // ROWS,
        [(row, 0) for _ in keys for row in range(ROWS)],
        [(1, COLUMNS)] * num_boxes,
    )


def _files(num_boxes: int) -> tuple[Mapping[str, FileEntry], Mapping[str, bytes]]:
    nbytes = BLOCK_NBYTES + (num_boxes // FILES + 1) * 4 * COLUMNS
    sizes = {tree_file("model"): 100}
    sizes |= {tensor_file("model", number): nbytes for number in range(FILES)}
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
    parser.add_argument("--boxes", type=int, default=1_000_000, help="(%(default)s)")
    num_boxes = parser.parse_args().boxes // ROWS * ROWS
    found = in_child(written_and_read, num_boxes).figures
    for name in ("write_s", "read_s"):
        print(f"{num_boxes:,} boxes, {name}: {found[name][0]:.2f} (goal {GOAL_S:g})")
    print(
        f"peak memory: {found['peak_nbytes'][0] / 2**20:.0f} MiB (goal {GOAL_NBYTES / 2**20:.0f})"
    )


if __name__ == "__main__":
    main()
