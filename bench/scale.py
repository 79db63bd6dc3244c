"""Saves of thousands of simulated ranks, beside the planner of DCP: `python -m bench.scale`.

Seconds are those of one processor that does nothing else, in one process. In each cluster every
rank makes its part of the first save by the real code; of the later one, 32 ranks and the leader.

The planner of DCP gets the same boxes, from pickled plans of all ranks, as `gather_object` brings
them; it merges them, and pickles the plan of each rank and the metadata.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import resource
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import log2
from time import process_time
from typing import TYPE_CHECKING

from bench.child import in_child
from bench.command import progress
from bench.report import table
from bench.results import Figures, Outcome
from holdfast.testing.cluster import Cluster, measure_saves

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

BOX_NBYTES = 256 << 10
TIMEOUT_S = 4 * 3600.0
"""Limit for one cluster: 16,384 ranks take 15 minutes on one free processor."""
DCP_NBYTES = 4 << 30
"""Memory that the planner of DCP gets."""
GOALS = {
    "plan_s": 30.0,
    "peak_nbytes": 4 << 30,
    "rank_s": 0.05,
    "later_rank_s": 0.05,
    "imbalance": 1.1,
    "first_nbytes": 64e6,
    "later_nbytes": 16e6,
}
"""Most of each at 16,384 ranks."""


def measure_holdfast(cluster: Cluster) -> Figures:
    """Costs of the first and of a later save; prints the progress."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    first, later = measure_saves(cluster)
    return {
        "plan_s": [first.plan_s],
        "leader_s": [first.leader_s],
        "peak_nbytes": [float(first.peak_nbytes or 0)],
        "rank_s": [first.rank_s],
        "first_nbytes": [float(first.received_nbytes + first.sent_nbytes)],
        "imbalance": [first.imbalance],
        "index_nbytes": [float(first.index_nbytes)],
        "later_leader_s": [later.leader_s],
        "later_rank_s": [later.rank_s],
        "later_nbytes": [float(later.received_nbytes + later.sent_nbytes)],
    }


def measure_dcp(cluster: Cluster) -> Figures:
    """Costs of DCP's global plan, with its default settings."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (DCP_NBYTES, hard))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        posts = [pickle.dumps(_save_plan(cluster, rank)) for rank in range(cluster.num_ranks)]
        received_nbytes = sum(map(len, posts))
        planner = DefaultSavePlanner()
        began_s = process_time()
        plans = [pickle.loads(post) for post in posts]
        del posts
        plans, metadata = planner.create_global_plan(plans)
        sent_nbytes = sum(len(pickle.dumps(plan)) for plan in plans)
        metadata_nbytes = len(pickle.dumps(metadata))
        plan_s = process_time() - began_s
    except MemoryError:
        raise MemoryError(f"more than {DCP_NBYTES >> 30} GiB") from None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "plan_s": [plan_s],
        "peak_nbytes": [1024.0 * peak],
        "nbytes": [float(received_nbytes + sent_nbytes)],
        "metadata_nbytes": [float(metadata_nbytes)],
    }


def _save_plan(cluster: Cluster, rank: int) -> SavePlan:
    """What DCP's planner makes of the boxes of a rank."""
    from torch.distributed.checkpoint.planner import SavePlan

    items = [*_write_items(cluster, rank)]
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def _write_items(cluster: Cluster, rank: int) -> Iterator[WriteItem]:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch.float32)
    for key, shape, offsets, sizes in cluster.list_boxes(rank):
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        is_sharded = sizes != shape
        yield WriteItem(
            index=MetadataIndex(key, chunk.offsets if is_sharded else torch.Size(offsets)),
            type=WriteItemType.SHARD if is_sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape)),
        )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _row(outcome: Outcome) -> list[str]:
    if outcome.error:
        return [outcome.error, *[""] * 9]
    found = {figure: values[0] for figure, values in outcome.figures.items()}
    return [
        f"{found['plan_s']:.2f}",
        f"{found['leader_s']:.2f}",
        f"{found['peak_nbytes'] / 2**20:,.0f}",
        f"{found['rank_s'] * 1e3:.1f}",
        f"{found['imbalance']:.3f}",
        _megabytes(found["first_nbytes"]),
        _megabytes(found["later_nbytes"]),
        f"{found['later_leader_s']:.2f}",
        f"{found['later_rank_s'] * 1e3:.1f}",
        _megabytes(found["index_nbytes"]),
    ]


def _dcp_row(outcome: Outcome) -> list[str]:
    if outcome.error:
        return [outcome.error, "", "", ""]
    found = {figure: values[0] for figure, values in outcome.figures.items()}
    return [
        f"{found['plan_s']:.2f}",
        f"{found['peak_nbytes'] / 2**20:,.0f}",
        _megabytes(found["nbytes"]),
        _megabytes(found["metadata_nbytes"]),
    ]


def _growth(smallest: tuple[int, float], largest: tuple[int, float]) -> str:
    """The growth of a figure from one number of ranks to another, beside n log n."""
    (few, low), (many, high) = smallest, largest
    allowed = many * log2(many) / (few * log2(few))
    return f"{high / low:.0f} times for {many // few} times the ranks; n log n: {allowed:.0f}"


def main() -> None:
    """Print both tables as they grow, and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--boxes", type=int, default=1000, help="of each rank (%(default)s)")
    parser.add_argument(
        "--dcp-ranks", type=int, default=4096, help="most for DCP's planner (%(default)s)"
    )
    given = parser.parse_args()
    own: dict[tuple[int, int], dict[str, float]] = {}
    rows: dict[str, list[str]] = {}
    dcp_rows: dict[str, list[str]] = {}
    for replicas, ranks in product(given.replicas, given.ranks):
        cluster = Cluster(
            num_ranks=ranks, num_boxes=given.boxes, num_replicas=replicas, box_nbytes=BOX_NBYTES
        )
        name = f"{ranks:,} {'FSDP' if replicas == 1 else f'HSDP, {replicas} replicas'}"
        outcome = in_child(partial(measure_holdfast, cluster), timeout_s=TIMEOUT_S)
        if not outcome.error:
            own[replicas, ranks] = {n: values[0] for n, values in outcome.figures.items()}
        rows[name] = _row(outcome)
        progress(f"{name}: {' | '.join(rows[name])}")
        if ranks <= given.dcp_ranks:
            dcp_rows[name] = _dcp_row(in_child(partial(measure_dcp, cluster)))
            progress(f"{name}, DCP: {' | '.join(dcp_rows[name])}")
    print(f"{given.boxes:,} boxes a rank. The first save, and a later one:\n")
    head = ["ranks", "plan s", "leader s", "leader MiB", "rank ms", "imbalance", "messages MB"]
    head += ["later messages MB", "later leader s", "later rank ms", "index MB"]
    print("\n".join(table(head, {name: name for name in rows}, rows.__getitem__)))
    print("\nThe planner of DCP:\n")
    head = ["ranks", "plan s", "MiB", "messages MB", "metadata MB"]
    print("\n".join(table(head, {name: name for name in dcp_rows}, dcp_rows.__getitem__)))
    print("\nGoals:\n")
    for replicas in given.replicas:
        found = {ranks: own[replicas, ranks] for ranks in given.ranks if (replicas, ranks) in own}
        if not found:
            continue
        few, many = min(found), max(found)
        for figure, most in GOALS.items():
            value = found[many][figure]
            kept = "kept" if value <= most else "missed"
            print(f"{replicas} replicas, {many:,} ranks: {figure} {value:,.3f} of {most:,}: {kept}")
        for figure in ("plan_s", "first_nbytes"):
            ends = (few, found[few][figure]), (many, found[many][figure])
            print(f"{replicas} replicas: {figure} grows {_growth(*ends)}")


if __name__ == "__main__":
    main()
