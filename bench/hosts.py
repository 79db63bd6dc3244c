"""Saves to the disks of hosts, and resumes from each source: `python -m bench.hosts`.

Each rank is a host, whose disk is a folder; all of them, and the remote tier, are on one disk here.
Saves take turns: to one shared folder, to disks of hosts, and to these with second copies. Then
ranks resume from what one of them saved, in turns from each source, with cold files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch.distributed as dist

from bench.command import Bench
from bench.goals import HOSTS_GOALS
from bench.machine import drop_cache
from bench.ranks import Round, add_size, measure_ranks
from bench.report import results_table, seconds, times
from bench.results import Results
from holdfast.cli.run import StagingMemory
from holdfast.launched import MEMORY

if TYPE_CHECKING:
    from holdfast import CheckpointManager

NUM_TURNS = 5
"""In each round, of saves and of resumes."""
_SAVES: Mapping[str, str] = {
    "hosts/save/shared": "one shared folder",
    "hosts/save/apart": "`HostTiers`",
    "hosts/save/partner": "`HostTiers`, `partner=True`: twice the bytes",
}
_SOURCES: Mapping[str, str] = {
    "hosts/resume/shared": "one shared folder",
    "hosts/resume/own": "own disk",
    "hosts/resume/partner": "own disk; one host's is lost: its partner's",
    "hosts/resume/remote": "remote tier; all disks are lost",
    "hosts/resume/memory": "memory of `holdfast run --memory`",
}


class HostsRound(Round):
    """What one rank measures in one round."""

    def saves(self) -> None:
        """Save by three managers in turns."""
        with self.in_folder("saves") as folder:
            managers = {
                "hosts/save/shared": self._manager(folder / "shared"),
                "hosts/save/apart": self._manager(folder / "apart", partner=False),
                "hosts/save/partner": self._manager(folder / "partner", partner=True),
            }
            for number in range(1 + NUM_TURNS):
                for case, manager in managers.items():
                    self.state.change()
                    self.get_ready()
                    start = perf_counter()
                    begun = manager.save(number)
                    stall_s = perf_counter() - start
                    begun.wait()
                    self.add_save(case, number, stall_s, perf_counter() - start)
                    manager.wait()  # for uploads
            for manager in managers.values():
                manager.close()

    def resumes(self, memory: str) -> None:
        """Resume from each source in turns; `memory` is a folder for staging."""
        with self.in_folder("shared") as shared, self.in_folder("hosts") as hosts:
            with self._manager(shared) as manager:
                manager.save(0, wait=True)
            with self._staging_in(memory), self._manager(hosts, partner=True) as manager:
                manager.save(0, wait=True)
                manager.wait()
            saved = self.state.sums()
            dist.barrier()
            keep = hosts.with_name("kept")
            if dist.get_rank() == 0:
                hosts.rename(keep)
            dist.barrier()
            last = dist.get_world_size() - 1
            losses = {"own": (), "partner": (last,), "remote": range(last + 1), "memory": ()}
            for _ in range(NUM_TURNS):
                self._time("shared", shared, saved, lambda: self._manager(shared))
                for source, lost in losses.items():
                    if dist.get_rank() == 0:
                        shutil.rmtree(hosts, ignore_errors=True)
                        shutil.copytree(keep, hosts, symlinks=True, copy_function=os.link)
                        for rank in lost:
                            shutil.rmtree(hosts / f"host{rank}")
                    dist.barrier()
                    with self._staging_in(memory if source == "memory" else ""):
                        self._time(source, hosts, saved, lambda: self._manager(hosts, partner=True))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(keep)

    def _manager(self, folder: Path, *, partner: bool | None = None) -> CheckpointManager:
        from holdfast import CheckpointManager, HostTiers

        if partner is None:
            return CheckpointManager(folder, self.components)
        host = folder / f"host{dist.get_rank()}"
        root = HostTiers(host, folder / "remote", partner=partner)
        return CheckpointManager(root, self.components)

    def _time(
        self, source: str, folder: Path, saved: list[float], make: Callable[[], CheckpointManager]
    ) -> None:
        """Resume from cold files; the values must be those saved."""
        self.state.change()
        if dist.get_rank() == 0:
            drop_cache(folder)
        self.get_ready()
        start = perf_counter()
        manager = make()
        found = manager.resume()
        self.add(f"hosts/resume/{source}", "took_s", perf_counter() - start)
        if found is None or self.state.sums() != saved:
            raise RuntimeError(f"{source}: the values are not those that were saved")
        manager.close()
        dist.barrier()

    @contextmanager
    def _staging_in(self, folder: str) -> Iterator[None]:
        """Let managers use shared memory, or none if it has no name."""
        if folder:
            os.environ[MEMORY] = folder
        yield
        os.environ.pop(MEMORY, None)


def _measure(mine: Round, options: argparse.Namespace) -> None:
    assert isinstance(mine, HostsRound)
    mine.saves()
    mine.resumes(options.memory)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    with StagingMemory(f"{options.size + (1 << 28)}B") as memory:
        options.memory = memory.environment[MEMORY]
        measure_ranks("hosts", HostsRound, _measure, options, folder, results)


def _tables(results: Results) -> list[str]:
    def save(case: str) -> list[str]:
        found = []
        for figure in ("stall_s", "durable_s"):
            ratio = results.ratio((case, figure), ("hosts/save/shared", figure))
            found += [seconds(results.median(case, figure)), times(ratio)]
        return found

    def resume(case: str) -> list[str]:
        ratio = results.ratio((case, "took_s"), ("hosts/resume/own", "took_s"))
        return [seconds(results.median(case, "took_s")), times(ratio)]

    beside = "of the shared folder"
    saves = ["save", "stall", beside, "durable", beside]
    return [
        f"### {results.titles['hosts']}",
        "",
        *results_table(results, "hosts/save/", saves, _SAVES, save),
        "",
        *results_table(
            results, "hosts/resume/", ["resume", "time", "of own disk"], _SOURCES, resume
        ),
    ]


BENCH = Bench(
    name="hosts",
    about="Saves and resumes of ranks whose hosts have a disk each, beside one shared folder.",
    add_options=add_size,
    measure_round=_measure_round,
    tables=_tables,
    goals=HOSTS_GOALS,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
