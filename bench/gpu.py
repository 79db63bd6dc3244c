"""Benchmark of saves and loads on a GPU, beside the limit of its bus: `python -m bench.gpu`.

Without CUDA it says so and measures nothing; `--device cpu` runs everything on CPU tensors, which
only shows that it works. A case that does not fit the machine, or the time of `--budget-s`, is left
out, and its row says why. `make gpu` runs this after the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.child import in_child
from bench.command import Bench, keep, progress
from bench.machine import files_under
from bench.peers import PEERS, Begun, Saver
from bench.report import megabytes, number, percent, results_table, seconds, table, times
from bench.results import Figures, Outcome, Results
from bench.slowdown import NONE, Training, add_training_options, measure_peer, titles
from bench.states import State, StateSpec, build

CASES = (
    NONE,
    "holdfast",
    "holdfast-overlap",
    "dcp-async",
    "dcp-async-pinned",
    "torch_checkpointing",
)
READERS = {
    "holdfast-resume": ("holdfast", "holdfast"),
    "holdfast": ("holdfast", "holdfast"),
    "dcp": ("dcp", "dcp-async"),
}
"""Reader → the peer that it belongs to, and the peer whose files it loads."""
SHARED_MEMORY = Path("/dev/shm")
STAGED_IN_SHARED_MEMORY = ("dcp-async-shared", "dcp-async-pinned", "torch_checkpointing")
"""Peers that stage their copy of the state in files there."""
_SAVES = 2
"""Saves of each peer: one that is not counted, and one that is."""
_PIECE_NBYTES = 1 << 30
_REPEATS = 3
_OUTSIDE_S = 15.0
"""Part of `--budget-s` for the start before the clock, with torch's import, and for the end."""
_CUT_OFF = "no time: it was cut off"
_START_S = 5.0
"""Approximate time of a process that does not grow with the state: its start."""
_PACE = 5e8
"""Assumed bytes per second of a case that has not been measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that are free on the machine."""

    device: int
    memory: int
    shared: int
    """For files in `/dev/shm`; part of `memory`."""
    disk: int

    def largest(self, *, is_in_memory: bool) -> int:
        """Estimate the largest state that fits, with its checkpoint on the disk or in memory.

        The device also holds gradients and what an optimizer's step needs, host memory a copy.
        """
        found = [self.device / 1.8]
        if is_in_memory:
            found += [self.memory / 2.2, self.shared / 1.05]
        else:
            found += [self.memory / 1.2, self.disk / 1.05]
        return int(min(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the checkpoints of one state are written, and how large that state may be."""

    folder: Path
    nbytes: int
    is_in_memory: bool


def place_for(nbytes: int, room: Room, folder: Path, *, is_slow: bool) -> Place:
    """Choose where the checkpoints are written, and a smaller state if the wanted one does not fit.

    The disk is chosen unless only memory has room, or the disk is too slow for the time. If neither
    has room, the place with more of it is chosen.
    """
    on_disk, in_memory = (room.largest(is_in_memory=way) for way in (False, True))
    if on_disk >= nbytes and not (is_slow and in_memory >= nbytes):
        is_in_memory = False
    else:
        is_in_memory = in_memory >= nbytes or in_memory > on_disk
    fits = min(nbytes, in_memory if is_in_memory else on_disk)
    if fits < nbytes:
        unit = 10**9 if fits >= 10**9 else 10**7
        fits = fits // unit * unit
    place = SHARED_MEMORY if is_in_memory else folder
    return Place(folder=place, nbytes=fits, is_in_memory=is_in_memory)


@dataclass(slots=True, kw_only=True)
class Clock:
    """The time that is left, and estimates of how long a case takes from smaller ones."""

    budget_s: float | None
    """None: there is no limit."""
    _begun_s: float = field(default_factory=perf_counter)
    _took: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        spent_s = perf_counter() - self._begun_s
        return float("inf") if self.budget_s is None else self.budget_s - spent_s

    def note(self, case: str, took_s: float, nbytes: int) -> None:
        """Remember how long a case took."""
        self._took[case] = took_s, nbytes

    def why_not(self, case: str, nbytes: int) -> str | None:
        """Explain why there is no time for a case; None: there is time."""
        wanted_s = _START_S + nbytes / _PACE
        if case in self._took:
            took_s, of_nbytes = self._took[case]
            wanted_s = _START_S + max(0.0, took_s - _START_S) * nbytes / of_nbytes
        if wanted_s <= self.left_s:
            return None
        return f"no time: it would take about {wanted_s:.0f} s, {max(0.0, self.left_s):.0f} s left"


def _clock(budget: str) -> Clock:
    """Start the clock of a run with the value of `--budget-s`."""
    return Clock(budget_s=float(budget) - _OUTSIDE_S)


class OneAtATime(Saver):
    """Saver that keeps only the newest checkpoint of a peer, to save room."""

    def __init__(self, saver: Saver, folder: Path) -> None:
        self._saver, self._folder = saver, folder

    def begin(self, number: int) -> Begun:
        """Save as the peer does."""
        return self._saver.begin(number)

    def guard(self) -> AbstractContextManager[Any]:
        """Return the guard of the peer."""
        return self._saver.guard()

    def rest(self) -> None:
        """Truncate the large files of the checkpoint, because the next one needs their room."""
        self._saver.rest()
        for path in files_under(self._folder):
            if path.stat().st_size >= 1 << 20:
                os.truncate(path, 0)

    def close(self) -> None:
        """Close the peer."""
        self._saver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTraining(Training):
    """Training that keeps one checkpoint, because there is no room for two."""

    def saver(self, state: State) -> Saver:
        """Return the peer's saver, which keeps only the newest checkpoint."""
        return OneAtATime(Training.saver(self, state), self.folder)


def bus_limits(nbytes: int, device: str) -> Figures:
    """Measure the seconds that copies between device and pinned host memory take, either way."""
    piece = min(nbytes, _PIECE_NBYTES)
    live = torch.ones(piece, dtype=torch.uint8, device=device)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=device != "cpu")
    host.fill_(1)
    ways = {"d2h_s": (host, live), "h2d_s": (live, host)}
    found = {
        name: [_copy_s(*way, device) for _ in range(1 + _REPEATS)] for name, way in ways.items()
    }
    return {name: [s * nbytes / piece for s in values[1:]] for name, values in found.items()} | {
        "nbytes": [float(nbytes)]
    }


def load(saved_by: str, reader: str, spec: StateSpec, folder: Path, device: str) -> Figures:
    """Measure loads: save once, then twice set all tensors to zero and load; the second counts."""
    state = build(spec, device)
    for tensor in state.flat().values():
        tensor.detach().uniform_(0, 1)
    sums = state.sums()
    saver = PEERS[saved_by].saver(state, folder)
    saver.begin(0).wait()
    saver.close()
    reads = PEERS[READERS[reader][0]].readers[reader].load
    seconds_of = []
    for _ in range(2):
        for tensor in state.flat().values():
            tensor.detach().zero_()
        _synchronize(device)
        start = perf_counter()
        reads(state, folder)
        _synchronize(device)
        seconds_of.append(perf_counter() - start)
    if state.sums() != sums:
        raise RuntimeError(f"{reader}: the tensors are not what was saved")
    return {"nbytes": [float(state.nbytes)], "warm_s": seconds_of[1:]}


def _copy_s(target: torch.Tensor, source: torch.Tensor, device: str) -> float:
    _synchronize(device)
    start = perf_counter()
    target.copy_(source, non_blocking=True)
    _synchronize(device)
    return perf_counter() - start


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def disk_limit(nbytes: int, folder: Path) -> Figures:
    """Measure the seconds that a plain write of `nbytes` into a file takes, with fsync."""
    piece = min(nbytes, _PIECE_NBYTES)
    data = memoryview(os.urandom(1 << 20) * 16)
    path = folder / "limit"
    start = perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, piece // len(data))):
            file.write(data)
        os.fsync(file.fileno())
    took_s = perf_counter() - start
    written = path.stat().st_size
    path.unlink()
    return {"disk_s": [took_s * nbytes / written]}


def room_of(folder: Path, device: str, memory_nbytes: int | None) -> Room:
    """Find what is free now; `memory_nbytes` replaces the host memory that the system reports."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    memory = available if memory_nbytes is None else memory_nbytes
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Room(
        device=memory // 2 if device == "cpu" else torch.cuda.mem_get_info()[0],
        memory=memory // 2 if device == "cpu" else memory,
        shared=shared,
        disk=shutil.disk_usage(folder).free,
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--size-gb", type=float, nargs="+", default=[10.0, 40.0], help="states, in 1e9 bytes"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases")
    parser.add_argument("--loads", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--budget-s",
        type=_clock,
        default=Clock(budget_s=None),
        dest="clock",
        metavar="SECONDS",
        help="for all rounds; cases for which no time is left are left out (no limit)",
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        help="host memory that may be used, in 1e9 bytes (what the system reports as available)",
    )
    add_training_options(parser)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        results.notes["gpu"] = "there is no CUDA here; --device cpu runs it on CPU tensors"
        return
    places = [f"gpu/{size_gb:g} GB" for size_gb in options.size_gb]
    planned = [case for place in places for case in _cases(place, options)]
    for case in planned:  # if this process is ended early, these remain
        _leave_out(case, _CUT_OFF, results)
    keep("bench.gpu", options, results)
    for place, size_gb in zip(places, options.size_gb, strict=True):
        _measure_state(place, round(size_gb * 1e9), options, folder, results)


def _leave_out(case: str, why: str, results: Results) -> None:
    """Note why a case is left out, unless an earlier round measured it: then it has its row."""
    if case not in results.cases:
        results.notes[case] = why


def _cases(place: str, options: argparse.Namespace) -> list[str]:
    readers = READERS if options.loads else ()
    return [
        *(f"{place}/save/{peer}" for peer in options.only),
        *(f"{place}/load/{reader}" for reader in readers),
    ]


def _measure_state(
    place: str, wanted: int, options: argparse.Namespace, folder: Path, results: Results
) -> None:
    clock: Clock = options.clock
    memory_nbytes = None if options.memory_gb is None else round(options.memory_gb * 1e9)
    room = room_of(folder, options.device, memory_nbytes)
    progress(f"  {place}/limits")
    found_limits = [
        in_child(bus_limits, wanted, options.device),
        in_child(disk_limit, wanted, folder),
    ]
    limits = {name: value for one in found_limits for name, value in one.figures.items()}
    found = place_for(wanted, room, folder, is_slow=_is_slow(limits, options, clock))
    spec = StateSpec(kind="gpt", gpt_nbytes=found.nbytes, num_small=0)
    where = "in memory" if found.is_in_memory else "on the disk"
    results.titles[place] = f"{spec.title}, on {_device_name(options.device)}, files {where}"
    if found.nbytes < wanted:
        results.titles[place] += f"; {wanted / 1e9:g} GB do not fit: free are {_told(room)}"
    scale = found.nbytes / wanted
    scaled = {name: [value * scale for value in values] for name, values in limits.items()}
    error = next((one.error for one in found_limits if one.error), None)
    results.add(f"{place}/limits", Outcome(figures=scaled, error=error))
    own = Path(tempfile.mkdtemp(prefix="holdfast-gpu-", dir=found.folder))
    try:
        for case in _cases(place, options):
            results.notes.pop(case, None)
            name = case.removeprefix(f"{place}/")
            why = _no_room(name, found, room) or clock.why_not(name, found.nbytes)
            if why:
                _leave_out(case, why, results)
                continue
            begun_s = perf_counter()
            _measure_case(place, name, spec, options, own, results)
            clock.note(name, perf_counter() - begun_s, found.nbytes)
            keep("bench.gpu", options, results)
    finally:
        shutil.rmtree(own)


def _is_slow(
    limits: Mapping[str, Sequence[float]], options: argparse.Namespace, clock: Clock
) -> bool:
    """Whether writing all checkpoints would alone take more than half of the time left."""
    num_saves = _SAVES * len(options.only) + len(READERS) * options.loads
    return any(num_saves * value > clock.left_s / 2 for value in limits.get("disk_s", ()))


def _told(room: Room) -> str:
    names = ("device", "memory", "shared", "disk")
    return ", ".join(f"{getattr(room, name) / 1e9:.0f} GB {name}" for name in names)


def _no_room(name: str, place: Place, room: Room) -> str | None:
    """Explain why a peer cannot stage so large a state; None: it can."""
    taken = place.nbytes if place.is_in_memory else 0
    if name.removeprefix("save/") not in STAGED_IN_SHARED_MEMORY:
        return None
    if (place.nbytes + taken) * 1.05 <= room.shared:
        return None
    return (
        f"no room: it stages {place.nbytes / 1e9:g} GB in {SHARED_MEMORY}, of which "
        f"{(room.shared - taken) / 1e9:.0f} GB are free"
    )


def _measure_case(
    place: str,
    name: str,
    spec: StateSpec,
    options: argparse.Namespace,
    folder: Path,
    results: Results,
) -> None:
    def make(peer: str, own: Path) -> Training:
        return LargeTraining(
            peer=peer,
            spec=spec,
            folder=own,
            device=options.device,
            num_threads=options.threads,
            tokens=options.tokens,
            steps=options.steps,
            num_saves=options.saves,
            settles=options.settle and options.device == "cpu",
        )

    kind, _, which = name.partition("/")
    if kind == "save":
        measure_peer(f"{place}/save", which, results, folder, make)
        return
    progress(f"  {place}/{name}")
    own = Path(tempfile.mkdtemp(dir=folder))
    outcome = in_child(load, READERS[which][1], which, spec, own, options.device)
    results.add(f"{place}/{name}", outcome)
    shutil.rmtree(own)


def _device_name(device: str) -> str:
    return "CPU tensors" if device == "cpu" else torch.cuda.get_device_name()


def _tables(results: Results) -> list[str]:
    if not results.cases:
        return ["Nothing was measured."]
    lines = []
    for place, title in results.titles.items():
        lines += [f"### {title}", "", *_limits_table(results, place), ""]
        lines += [*_save_table(results, place), "", *_load_table(results, place), ""]
    return lines


def _limits_table(results: Results, place: str) -> list[str]:
    case = f"{place}/limits"
    names = {
        "d2h_s": "device to pinned memory",
        "h2d_s": "pinned memory to device",
        "disk_s": "a file on the disk, written and synced",
    }

    def row(figure: str) -> list[str]:
        value, nbytes = results.median(case, figure), results.median(case, "nbytes")
        return [
            seconds(value),
            number(nbytes / value / 1e9 if value and nbytes else None, "{:.1f}"),
        ]

    return table(["limit", "time", "GB/s"], names, row, dict.fromkeys(names, results.error(case)))


def _save_table(results: Results, place: str) -> list[str]:
    def row(case: str) -> list[str]:
        busy = results.ratio((case, "busy_step_s"), (case, "quiet_step_s"))
        return [
            seconds(results.median(case, "stall_s")),
            percent(results.ratio((f"{place}/limits", "d2h_s"), (case, "stall_s"))),
            number(results.median(case, "added_s"), "{:+.2f} s"),
            percent(results.median(case, "added_share")),
            seconds(results.median(case, "done_s")),
            seconds(results.median(case, "quiet_step_s")),
            times(busy),
        ]

    head = ["training", "stall", "of the bus", "added by a save", "of the run", "done after"]
    head += ["a step", "a step while a save runs"]
    names = titles(f"{place}/save")
    return [
        *results_table(results, f"{place}/save/", head, names, row),
        *_left_out(results, names, len(head)),
    ]


def _left_out(results: Results, names: Mapping[str, str], num_columns: int) -> list[str]:
    """Make the rows of the cases that were not measured, with the reason."""
    found = ((title, results.notes[case]) for case, title in names.items() if case in results.notes)
    return [f"| {title} | left out: {why} |" + " |" * (num_columns - 2) for title, why in found]


def _load_table(results: Results, place: str) -> list[str]:
    def row(case: str) -> list[str]:
        return [
            seconds(results.median(case, "warm_s")),
            percent(results.ratio((f"{place}/limits", "h2d_s"), (case, "warm_s"))),
            megabytes(results.median(case, "nbytes")),
        ]

    names = {
        f"{place}/load/{name}": PEERS[peer].readers[name].title
        for name, (peer, _) in READERS.items()
    }
    head = ["load, warm", "time", "of the bus", "state"]
    return [
        *results_table(results, f"{place}/load/", head, names, row),
        *_left_out(results, names, len(head)),
    ]


BENCH = Bench(
    name="gpu",
    about="Saves and loads of a state on a GPU, as shares of what its bus can do.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    # Ended by SIGTERM, it still deletes its files, which may be in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(BENCH.main())
