"""Saves and loads of a sharded state by several processes: `python -m bench.ranks`.

In each round, as many processes as there are ranks form a group of gloo, shard a model by FSDP2 and
take a step of AdamW. Then bare writers, Holdfast and DCP save the same bytes in turns, and Holdfast
and DCP load them. A time is that of the slowest rank. DCP writes with `sync_files=True`, its
default: it syncs each file, and no folder; it computes no digests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.child import settle
from bench.command import Bench, progress
from bench.goals import RANKS_GOALS
from bench.limits import DiskProbe
from bench.machine import drop_cache, fill_cache, written_nbytes
from bench.report import megabytes, results_table, seconds, times
from bench.results import Outcome, Results

if TYPE_CHECKING:
    from holdfast import CheckpointManager

NUM_SAVES = 3
"""By each saver in each round; the first plans and makes buffers."""
NUM_TINY_SAVES = 6
NUM_LOADS = 5
"""Of each library in each round, in turns."""
_BYTES_A_WEIGHT = 12
"""The weight and the two moments of AdamW, in float32."""
Closing: TypeAlias = Callable[[], None]
"""What ends a load, and belongs to none: a run goes on with its manager."""
_UNITS: Mapping[str, int] = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SAVES: Mapping[str, str] = {
    "ranks/save/bare": "bare writers: `write` and `fsync` of each rank",
    "ranks/save/direct": "bare writers, O_DIRECT and several threads",
    "ranks/save/holdfast": "holdfast, `save(step)`",
    "ranks/save/holdfast-overlap": "holdfast, `overlap=True`: forward and backward go on at once",
    "ranks/save/dcp": "dcp.save",
    "ranks/save/dcp-async": "dcp.async_save, the stager it makes itself",
    "ranks/save/dcp-async-kept": "dcp.async_save, kept stager",
}
_LOADS: Mapping[str, str] = {
    "ranks/load/holdfast": "holdfast, `resume()`, every byte checked",
    "ranks/load/dcp": "dcp.load, not checked",
}
_TINY: Mapping[str, str] = {
    "ranks/tiny/ranks": "tiny state, all ranks",
    "ranks/tiny/alone": "tiny state, one rank alone, `ranks=None`",
}

_PARTS = ("saves", "loads")
_COPIES: Mapping[str, str] = {
    "ranks/copies": "every rank has the whole state: samples of it in every tenth save",
}

Measured: TypeAlias = dict[str, dict[str, list[float]]]
"""Case → figures of one rank."""


class Sharded:
    """A model sharded by FSDP2 over all ranks and its AdamW, after one step."""

    def __init__(self, nbytes: int) -> None:
        torch.manual_seed(0)
        width = 1024 if nbytes >= 100_000_000 else 64
        depth = max(1, round(nbytes / (_BYTES_A_WEIGHT * width * width)))
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(8, width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def locals(self) -> list[Tensor]:
        """This rank's parts of the weights and moments."""
        held = [*self.model.parameters()]
        held += [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return [tensor.to_local() for tensor in held if isinstance(tensor, DTensor)]

    def change(self) -> None:
        """Give every local tensor other values."""
        with torch.no_grad():
            for tensor in self.locals():
                tensor.mul_(0.999)

    def sums(self) -> list[float]:
        """A figure of each local tensor, to see that a load brought it back."""
        return [float(tensor.detach().double().sum()) for tensor in self.locals()]

    def nested(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class Round:
    """What one rank measures in one round."""

    def __init__(self, folder: Path, nbytes: int, *, is_settled: bool) -> None:
        self.figures: Measured = defaultdict(lambda: defaultdict(list))
        self._folder = folder
        self._nbytes = nbytes
        self._is_settled = is_settled
        self.state = Sharded(nbytes)
        self.components = {"model": self.state.model, "optimizer": self.state.optimizer}

    def bare(self) -> None:
        """Write this rank's bytes to a file and sync it."""
        with self.in_folder("bare") as folder:
            self.get_ready()
            with self._written("ranks/save/bare"):
                start = perf_counter()
                with open(folder / f"rank{dist.get_rank()}", "wb", buffering=0) as file:
                    for tensor in self.state.locals():
                        left = memoryview(tensor.detach().reshape(-1).numpy()).cast("B")
                        while left:
                            left = left[file.write(left) :]
                    os.fsync(file.fileno())
                self.add("ranks/save/bare", "durable_s", perf_counter() - start)

    def direct(self) -> None:
        """Write as many bytes past the page cache: the disk's limit."""
        with self.in_folder("direct") as folder:
            mine = folder / str(dist.get_rank())
            mine.mkdir()
            probe = DiskProbe(mine)
            self.get_ready()
            nbytes = sum(tensor.nbytes for tensor in self.state.locals())
            with self._written("ranks/save/direct"):
                self.add("ranks/save/direct", "durable_s", probe.write_s(nbytes))

    def holdfast(self) -> None:
        """Save by a manager, the plan unchanged from the second save on."""
        from holdfast import CheckpointManager

        for case, overlap in (
            ("ranks/save/holdfast-overlap", True),
            ("ranks/save/holdfast", False),
        ):
            with (
                self.in_folder("holdfast") as folder,
                CheckpointManager(folder, self.components, overlap=overlap) as manager,
            ):
                self._save_by(manager, case)

    def _save_by(self, manager: CheckpointManager, case: str) -> None:
        for number in range(NUM_SAVES):
            self.state.change()
            self.get_ready()
            with self._written(case):
                start = perf_counter()
                manager.save(number)
                stall_s = perf_counter() - start
                manager.wait()
                self.add_save(case, number, stall_s, perf_counter() - start)

    def dcp(self) -> None:
        """`dcp.save`."""
        import torch.distributed.checkpoint as dcp

        with self.in_folder("dcp") as folder:
            for number in range(NUM_SAVES):
                self.state.change()
                self.get_ready()
                with self._written("ranks/save/dcp"):
                    start = perf_counter()
                    writer = dcp.FileSystemWriter(folder / str(number), sync_files=True)
                    dcp.save(self.state.nested(), storage_writer=writer)
                    took_s = perf_counter() - start
                    self.add_save("ranks/save/dcp", number, took_s, took_s)

    def loads(self) -> None:
        """Load what both libraries have saved, in turns: cold, and then warm."""
        import torch.distributed.checkpoint as dcp

        from holdfast import CheckpointManager

        with self.in_folder("loads") as folder:
            ours, theirs = folder / "holdfast", folder / "dcp"
            with CheckpointManager(ours, self.components) as manager:
                manager.save(0, wait=True)
            dcp.save(self.state.nested(), storage_writer=dcp.FileSystemWriter(theirs))
            saved = self.state.sums()
            for _ in range(NUM_LOADS):
                for name, place, load in (
                    ("holdfast", ours, self._resume),
                    ("dcp", theirs, self._load_by_dcp),
                ):
                    for figure in ("cold_s", "warm_s"):
                        took_s = self._time_load(place, load, saved, is_cold=figure == "cold_s")
                        self.add(f"ranks/load/{name}", figure, took_s)

    def _resume(self, folder: Path) -> Closing:
        from holdfast import CheckpointManager

        manager = CheckpointManager(folder, self.components)
        manager.resume()
        return manager.close

    def _load_by_dcp(self, folder: Path) -> Closing:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        nested = self.state.nested()
        dcp.load(nested, storage_reader=dcp.FileSystemReader(folder))
        set_state_dict(
            self.state.model,
            self.state.optimizer,
            model_state_dict=nested["model"],
            optim_state_dict=nested["optimizer"],
        )
        return lambda: None

    def _time_load(
        self, folder: Path, load: Callable[[Path], Closing], saved: list[float], *, is_cold: bool
    ) -> float:
        """Load from files that are in the page cache, or not; the values must be those saved."""
        self.state.change()
        if dist.get_rank() == 0:
            (drop_cache if is_cold else fill_cache)(folder)
        self.get_ready()
        start = perf_counter()
        close = load(folder)
        took_s = perf_counter() - start
        close()
        if self.state.sums() != saved:
            raise RuntimeError(f"{folder.name}: the values are not those that were saved")
        return took_s

    def dcp_async(self) -> None:
        """`dcp.async_save` with a new stager each time."""
        self._save_async("ranks/save/dcp-async", None)

    def dcp_async_kept(self) -> None:
        """The same with one stager for all saves, whose memory is there from the second on."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._save_async("ranks/save/dcp-async-kept", DefaultStager(options))

    def _save_async(self, case: str, stager: AsyncStager | None) -> None:
        """Save by `dcp.async_save`, durable when its future is done."""
        import torch.distributed.checkpoint as dcp

        with self.in_folder("dcp-async") as folder:
            for number in range(NUM_SAVES):
                self.state.change()
                self.get_ready()
                with self._written(case):
                    start = perf_counter()
                    nested = self.state.nested()
                    self.add(case, "state_dict_s", perf_counter() - start)
                    writer = dcp.FileSystemWriter(folder / str(number), sync_files=True)
                    found: Any = dcp.async_save(nested, storage_writer=writer, async_stager=stager)
                    stall_s = perf_counter() - start
                    getattr(found, "upload_completion", found).result()
                    self.add_save(case, number, stall_s, perf_counter() - start)

    def tiny(self) -> None:
        """Save next to nothing: by all ranks, and by one of them alone."""
        from holdfast import CheckpointManager

        tiny = nn.Linear(8, 8)
        with self.in_folder("alone") as folder:
            if dist.get_rank() == 0:
                with CheckpointManager(folder, {"model": tiny}, ranks=None) as manager:
                    self._save_tiny("ranks/tiny/alone", manager, tiny)
        fully_shard(tiny)
        with (
            self.in_folder("tiny") as folder,
            CheckpointManager(folder, {"model": tiny}) as manager,
        ):
            self._save_tiny("ranks/tiny/ranks", manager, tiny, dist.barrier)

    def copies(self) -> None:
        """Save a state that every rank has; time what finds copies that differ beside it."""
        from holdfast import CheckpointManager
        from holdfast.state.samples import sample

        width = 1024 if self._nbytes >= 100_000_000 else 64
        depth = max(1, round(self._nbytes / (_BYTES_A_WEIGHT * width * width)))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
        tensors = [tensor.detach() for tensor in (*model.parameters(), *slots)]
        components = {"model": model, "optimizer": optimizer}
        with (
            self.in_folder("copies") as folder,
            CheckpointManager(folder, components) as manager,
        ):
            for number in range(NUM_SAVES):
                with torch.no_grad():
                    for tensor in tensors:
                        tensor.mul_(0.999)
                self.get_ready()
                start = perf_counter()
                manager.save(number)
                stall_s = perf_counter() - start
                manager.wait()
                self.add_save("ranks/copies", number, stall_s, perf_counter() - start)
                dist.barrier()
                start = perf_counter()
                sample(tensors, number).digests()
                self.add("ranks/copies", "compared_s", perf_counter() - start)

    def _save_tiny(
        self, case: str, manager: Any, tiny: nn.Module, meet: Callable[[], Any] = lambda: None
    ) -> None:
        for number in range(NUM_TINY_SAVES):
            with torch.no_grad():
                for parameter in tiny.parameters():
                    parameter.mul_(0.9)
            meet()
            start = perf_counter()
            manager.save(number)
            stall_s = perf_counter() - start
            manager.wait()
            self.add_save(case, number, stall_s, perf_counter() - start)

    def get_ready(self) -> None:
        if self._is_settled:
            dist.barrier()
            settle(2 * self._nbytes // dist.get_world_size())
        dist.barrier()

    @contextmanager
    def in_folder(self, name: str) -> Iterator[Path]:
        """A folder that all ranks see, deleted when all are done."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        yield folder
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()

    @contextmanager
    def _written(self, case: str) -> Iterator[None]:
        before = written_nbytes()
        yield
        self.add(case, "written_nbytes", written_nbytes() - before)

    def add_save(self, case: str, number: int, stall_s: float, durable_s: float) -> None:
        first = "" if number else "first_"
        self.add(case, f"{first}stall_s", stall_s)
        self.add(case, f"{first}durable_s", durable_s)

    def add(self, case: str, figure: str, value: float) -> None:
        self.figures[case][figure].append(value)


Measure: TypeAlias = Callable[["Round", argparse.Namespace], None]


def _in_rank(
    rank: int,
    port: int,
    kind: type[Round],
    measure: Measure,
    options: argparse.Namespace,
    folder: Path,
    found: Any,
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # As torchrun sets it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks)}
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    dist.barrier()
    mine = kind(folder, options.size, is_settled=options.settle)
    measure(mine, options)
    found.put({case: dict(figures) for case, figures in mine.figures.items()})
    dist.barrier()
    dist.destroy_process_group()


def _measure(mine: Round, options: argparse.Namespace) -> None:
    if "saves" in options.only:
        for measure in (mine.holdfast, mine.dcp, mine.dcp_async, mine.dcp_async_kept):
            mine.bare()  # beside each, as a disk that others use changes within seconds
            mine.direct()
            measure()
        mine.copies()
        mine.tiny()
    if "loads" in options.only:
        mine.loads()


def _joined(ranks: list[Measured]) -> Measured:
    """The figures of the group: the slowest rank's times, the sums of bytes, their balance."""
    joined: Measured = {}
    for case in {case: None for measured in ranks for case in measured}:
        figures = joined[case] = {}
        having = [measured[case] for measured in ranks if case in measured]
        for name in having[0]:
            by_save = [*zip(*(one[name] for one in having), strict=True)]
            is_time = name.endswith("_s")
            figures[name] = [max(values) if is_time else sum(values) for values in by_save]
            if not is_time:
                figures["largest_over_mean"] = [
                    max(values) * len(values) / sum(values) for values in by_save if sum(values)
                ]
    return joined


def _nbytes(text: str) -> int:
    """Bytes of a text such as 512MB."""
    number, unit = text[:-2], text[-2:].upper()
    try:
        return round(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512MB") from None


def add_size(parser: argparse.ArgumentParser) -> None:
    """The options of each benchmark of several processes."""
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--size", type=_nbytes, default="512MB", help="state of all ranks (%(default)s)"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_size(parser)
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS)


def measure_ranks(
    name: str,
    kind: type[Round],
    measure: Measure,
    options: argparse.Namespace,
    folder: Path,
    results: Results,
) -> None:
    """Measure one round in as many processes as there are ranks, which form a group."""
    results.titles[name] = f"{options.size / 1e6:g} MB over {options.ranks} ranks"
    progress(f"  {results.titles[name]}")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload"])
    found = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.start_processes(
            _in_rank,
            (store.port, kind, measure, options, folder, found),
            nprocs=options.ranks,
            start_method="forkserver",
        )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(error, file=sys.stderr)
        results.add(name, Outcome(figures={}, error=str(error).strip().splitlines()[-1]))
        return
    for case, figures in _joined([found.get() for _ in range(options.ranks)]).items():
        takes_turns = case.startswith(("hosts/", "ranks/load/"))
        for outcome in _turns(figures) if takes_turns else [figures]:
            results.add(case, Outcome(figures=outcome))


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    measure_ranks("ranks", Round, _measure, options, folder, results)


def _turns(figures: dict[str, list[float]]) -> list[dict[str, list[float]]]:
    """The figures of each turn, so that a ratio is of calls that followed one another."""
    numbers = range(max(map(len, figures.values())))
    return [{name: values[n : n + 1] for name, values in figures.items()} for n in numbers]


def _tables(results: Results) -> list[str]:
    if not results.cases:
        return ["Nothing was measured."]

    def beside(case: str, figure: str, other: str) -> str:
        return times(results.ratio((other, figure), (case, figure)))

    def save(case: str) -> list[str]:
        return [
            seconds(results.median(case, "first_stall_s")),
            seconds(results.median(case, "first_durable_s")),
            seconds(results.median(case, "stall_s")),
            seconds(results.median(case, "durable_s")),
            beside(case, "durable_s", "ranks/save/bare"),
            beside(case, "durable_s", "ranks/save/direct"),
            beside(case, "durable_s", "ranks/save/dcp"),
            times(results.ratio((case, "stall_s"), ("ranks/save/dcp-async", "stall_s"))),
            megabytes(results.median(case, "written_nbytes")),
            times(results.median(case, "largest_over_mean")),
        ]

    def load(case: str) -> list[str]:
        return [
            seconds(results.median(case, "cold_s")),
            beside(case, "cold_s", "ranks/load/dcp"),
            seconds(results.median(case, "warm_s")),
            beside(case, "warm_s", "ranks/load/dcp"),
        ]

    def tiny(case: str) -> list[str]:
        figures = ("first_durable_s", "stall_s", "durable_s")
        return [seconds(results.median(case, figure)) for figure in figures]

    def copies(case: str) -> list[str]:
        figures = ("first_durable_s", "stall_s", "durable_s", "compared_s")
        share = results.ratio((case, "compared_s"), (case, "durable_s"))
        return [
            *(seconds(results.median(case, figure)) for figure in figures),
            "–" if share is None else f"{100 * share:.2f}%",
        ]

    saves = [
        *("save", "first stall", "first durable", "stall", "durable", "throughput of bare"),
        *(
            "of O_DIRECT",
            "of dcp.save",
            "stall vs. dcp.async_save",
            "written",
            "largest over mean",
        ),
    ]
    loads = ["load", "cold", "speed of dcp.load", "warm", "speed of dcp.load"]
    return [
        f"### {results.titles['ranks']}",
        "",
        "DCP syncs its files (`FileSystemWriter(sync_files=True)`, its default), and no folder. "
        "`get_state_dict`, which its saves and stalls include, takes "
        f"{seconds(results.median('ranks/save/dcp-async', 'state_dict_s'))}.",
        "",
        *results_table(results, "ranks/save/", saves, _SAVES, save),
        "",
        *results_table(results, "ranks/load/", loads, _LOADS, load),
        "",
        *results_table(
            results,
            "ranks/copies",
            ["copies", "first durable", "stall", "durable", "samples", "share of a durable save"],
            _COPIES,
            copies,
        ),
        "",
        *results_table(
            results,
            "ranks/tiny/",
            ["agreement: plan unchanged, commit round, syncs", "first", "stall", "durable"],
            _TINY,
            tiny,
        ),
    ]


BENCH = Bench(
    name="ranks",
    about="Saves and loads of a sharded state by several processes, beside bare writers and DCP.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    goals=RANKS_GOALS,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
