"""Time of DDP's steps where gradients are always summed in one order: `python -m bench.buckets`.

In each round a group of processes (gloo) trains a transformer of many small layers with tiny
batches, the worst case, with torch's defaults and in the ways of `_WAYS` that make a resume exact.
The ways take turns of a few steps, whose order changes; each is compared with torch's in its turn.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.command import Bench
from bench.report import number, results_table, seconds
from bench.results import Outcome, Results

_PLAIN = "buckets/rebuilt"
_WIDTH, _NUM_LAYERS, _LENGTH = 96, 24, 16
_WAYS: Mapping[str, str] = {
    "buckets/rebuilt": "torch's default: buckets are rebuilt after the first step",
    "buckets/settled": "the Trainer: buckets are settled before the first step",
    "buckets/unused": "`find_unused_parameters=True`",
    "buckets/single": "a hook that reduces each gradient alone",
}


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, _NUM_LAYERS, enable_nested_tensor=False)


def _rebuilt() -> DistributedDataParallel:
    return DistributedDataParallel(_model())


def _settled() -> DistributedDataParallel:
    from holdfast.train.strategies import settle_buckets

    wrapped = _rebuilt()
    settle_buckets(wrapped)
    return wrapped


def _unused() -> DistributedDataParallel:
    return DistributedDataParallel(_model(), find_unused_parameters=True)


def _single() -> DistributedDataParallel:
    wrapped = _rebuilt()
    # A lambda, as torch refuses annotations that are text.
    wrapped.register_comm_hook(None, lambda _, bucket: _reduce_each(bucket))
    return wrapped


def _reduce_each(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    works = [dist.all_reduce(gradient, async_op=True) for gradient in bucket.gradients()]
    for work in works:
        work.wait()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


_MAKE: Mapping[str, Callable[[], DistributedDataParallel]] = {
    "buckets/rebuilt": _rebuilt,
    "buckets/settled": _settled,
    "buckets/unused": _unused,
    "buckets/single": _single,
}


def _steps_s(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, inputs: Tensor, steps: int
) -> float:
    """Train some steps; return the mean seconds of one, until all ranks have ended it."""
    dist.barrier()
    start = perf_counter()
    for _ in range(steps):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return (perf_counter() - start) / steps


def _in_rank(rank: int, port: int, options: argparse.Namespace, found: Any) -> None:
    import holdfast.train  # noqa: F401  # not to be timed

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    inputs = torch.randn(1, _LENGTH, _WIDTH)
    ways = [*options.only]
    figures: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ways}
    trainings = {}
    for way in ways:
        dist.barrier()
        start = perf_counter()
        model = _MAKE[way]()
        dist.barrier()
        figures[way]["made_s"].append(perf_counter() - start)
        trainings[way] = (model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for turn in range(options.turns + 1):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            took_s = _steps_s(*trainings[way], inputs, options.steps)
            if turn:  # not the first, in which torch rebuilds its buckets
                figures[way]["step_s"].append(took_s)
    plain = figures[_PLAIN]["step_s"]
    for of_way in figures.values():
        pairs = zip(of_way["step_s"], plain, strict=True)
        of_way["of_plain"] = [mine / other for mine, other in pairs]
    if rank == 0:
        found.put({way: dict(of_way) for way, of_way in figures.items()})
    dist.barrier()
    dist.destroy_process_group()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=3, help="processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=40, help="turns of each way (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=[*_MAKE], default=[*_MAKE], help="ways, torch's among them"
    )


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload"])
    found = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(
        _in_rank, (store.port, options, found), nprocs=options.ranks, start_method="forkserver"
    )
    for way, figures in found.get().items():
        results.add(way, Outcome(figures=figures))


def _tables(results: Results) -> list[str]:
    if not results.cases:
        return ["Nothing was measured."]
    num_weights = sum(weight.numel() for weight in _model().parameters())
    size = f"{num_weights / 1e6:.1f}M parameters in {len([*_model().parameters()])} tensors"

    def row(way: str) -> list[str]:
        by_round = [ratio for ratio in results.by_round(way, "of_plain") if ratio is not None]
        return [
            seconds(results.median(way, "made_s")),
            seconds(results.median(way, "step_s")),
            number(results.median(way, "of_plain"), "{:.3f}"),
            f"{min(by_round):.3f} to {max(by_round):.3f}",
        ]

    head = ["DDP", "made in", "a step", "torch's = 1", "by round"]
    return [f"A transformer of {size}.", "", *results_table(results, "buckets/", head, _WAYS, row)]


BENCH = Bench(
    name="buckets",
    about="Steps of DDP on several ranks, in ways that make a resume exact and as torch does it.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
