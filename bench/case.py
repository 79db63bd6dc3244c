"""What is measured on one state: the saves of a peer, a way to load them, the machine's limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from bench.child import settle
from bench.limits import DiskProbe, state_copies
from bench.limits import measure as measure_limits
from bench.machine import PeakMemory, disk_nbytes, drop_cache, fill_cache, written_nbytes
from bench.peers import PEERS
from bench.results import Figures
from bench.states import State, StateSpec, build

SEED = 7
SAVES = 3
WARM_LOADS = 2
FROZEN_SAVES = 5
FROZEN_WARMUP = 2
FROZEN_CHANGING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to measure on which state; `folder` holds one peer's files."""

    peer: str
    spec: StateSpec
    folder: Path
    settles: bool = True
    """Whether each measured call finds memory that exists and nothing left to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Of each save, the first one too."""

    stall_s: list[float]
    durable_s: list[float]
    written_nbytes: list[float]
    disk_s: list[float]
    """Of a plain direct write of the same bytes, right after the save."""


def saves(case: Case) -> Figures:
    """Saves of a state that changes in full between them; the first is not counted."""
    return _saves(case, num_saves=SAVES, num_warmup=1, changing=1.0)


def frozen_saves(case: Case) -> Figures:
    """Saves of a state of which nine tenths stay as they are; from the third on they count."""
    return _saves(case, num_saves=FROZEN_SAVES, num_warmup=FROZEN_WARMUP, changing=FROZEN_CHANGING)


def load(case: Case, reader_name: str) -> Figures:
    """One load from the disk and some from the page cache; the values are compared."""
    reader = PEERS[case.peer].readers[reader_name]
    state = build(case.spec)
    cold_share = drop_cache(case.folder)
    peak = PeakMemory()
    seconds = []
    for number in range(1 + WARM_LOADS):
        if number:
            fill_cache(case.folder)
        _settle(case, state)  # the last thing: free memory does not stay touched for long
        with peak.watch():
            start = perf_counter()
            loaded = reader.load(state, case.folder)
            seconds.append(perf_counter() - start)
        del loaded
    wrong = state.count_wrong(SEED, negated=SAVES % 2 == 0) if reader.applies else 0
    if wrong:
        raise RuntimeError(f"{reader_name}: {wrong} tensors are not what was saved")
    return {
        "cold_share": [cold_share],
        "cold_s": seconds[:1],
        "warm_s": seconds[1:],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
    }


def limits(case: Case) -> Figures:
    """What the machine itself does with as many bytes."""
    state = build(case.spec)
    settle_first = partial(_settle, case, state)
    tensors = [*state.flat().values()]
    copies = state_copies(tensors, change=state.negate, settle=settle_first)
    limits = measure_limits(state.nbytes, case.folder, num_files=SAVES, settle=settle_first)
    return limits | copies


def _saves(case: Case, *, num_saves: int, num_warmup: int, changing: float) -> Figures:
    state = build(case.spec)
    state.fill(SEED)
    probe = DiskProbe(case.folder.parent)
    peak = PeakMemory()
    saver = PEERS[case.peer].saver(state, case.folder)
    times = _Times(stall_s=[], durable_s=[], written_nbytes=[], disk_s=[])
    share = 1.0
    for number in range(num_saves):
        if number:
            share = state.negate(changing)
        _settle(case, state)
        before = written_nbytes()
        with peak.watch():
            start = perf_counter()
            begun = saver.begin(number)
            times.stall_s.append(perf_counter() - start)
            begun.wait()
            times.durable_s.append(perf_counter() - start)
        times.written_nbytes.append(float(written_nbytes() - before))
        times.disk_s.append(probe.write_s(state.nbytes))
    figures = {
        "nbytes": [float(state.nbytes)],
        "num_tensors": [float(state.num_tensors)],
        "changing_share": [share],
        "first_stall_s": times.stall_s[:1],
        "first_durable_s": times.durable_s[:1],
        "stall_s": times.stall_s[num_warmup:],
        "durable_s": times.durable_s[num_warmup:],
        "disk_s": times.disk_s[num_warmup:],
        "written_nbytes": times.written_nbytes[num_warmup:],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
        "disk_nbytes": [disk_nbytes(case.folder) / num_saves],
    }
    saver.close()
    return figures


def _settle(case: Case, state: State) -> None:
    """Memory for a copy and for pages of files."""
    if case.settles:
        settle(2 * state.nbytes)
