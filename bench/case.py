"""What is measured on one state: the saves of a peer, a way to load them, the machine's limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from bench.child import settle
from bench.limits import DiskProbe, ReadProbe, state_copies
from bench.limits import measure as measure_limits
from bench.machine import (
    PeakMemory,
    disk_nbytes,
    drop_cache,
    fill_cache,
    newest_under,
    written_nbytes,
)
from bench.peers import PEERS
from bench.plain import state_walks
from bench.results import Figures
from bench.states import State, StateSpec, build

SEED = 7
COUNTED = 3
"""Saves that count, with memory made ready right before each or without."""
COUNTED_LOADS = 2
"""From the disk, and as many from the page cache."""
FROZEN_WARMUP = 4
"""Two show what does not change; the next two put the rest into files of their own, which do not
share."""
FROZEN_CHANGING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to measure on which state; `folder` holds one peer's files."""

    peer: str
    spec: StateSpec
    folder: Path
    settles: bool = True
    """Whether calls that newly take memory find memory that exists."""


@dataclass(frozen=True, slots=True)
class _Save:
    """What one save took."""

    stall_s: float
    durable_s: float
    written_nbytes: float
    disk_s: float
    """Of a plain direct write of the same bytes, right after the save."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What one load took."""

    took_s: float
    cold_share: float
    """Of the files, in the page cache before."""
    disk_s: float
    """Of a plain direct read of the same files, right after the load."""


def saves(case: Case) -> Figures:
    """Saves of a state that changes in full between them; the first is not counted."""
    return _saves(case, num_warmup=1, changing=1.0)


def frozen_saves(case: Case) -> Figures:
    """Saves of a state of which nine tenths stay as they are; from the fourth on they count."""
    return _saves(case, num_warmup=FROZEN_WARMUP, changing=FROZEN_CHANGING)


def load(case: Case, reader_name: str) -> Figures:
    """Loads from the disk and from the page cache; the values of the last are compared."""
    reader = PEERS[case.peer].readers[reader_name]
    state = build(case.spec)
    newest = newest_under(case.folder)
    probe = ReadProbe(newest)
    peak = PeakMemory()
    cold: list[_Load] = []
    warm: list[_Load] = []
    for is_cold in (*[True] * COUNTED_LOADS, *[False] * COUNTED_LOADS):
        cold_share = drop_cache(newest)
        if not is_cold:
            fill_cache(newest)
        if ("cold" if is_cold else "warm") in reader.takes_memory:
            _settle(case, state)  # the last thing: free memory does not stay touched for long
        with peak.watch():
            start = perf_counter()
            loaded = reader.load(state, case.folder)
            took_s = perf_counter() - start
        del loaded
        disk_s = probe.read_s() if is_cold else 0.0
        (cold if is_cold else warm).append(_Load(took_s, cold_share, disk_s))
    num_changes = COUNTED * len(_ways(case))
    wrong = state.count_wrong(SEED, negated=num_changes % 2 == 1) if reader.applies else 0
    if wrong:
        raise RuntimeError(f"{reader_name}: {wrong} tensors are not what was saved")
    return {
        "cold_share": [max(load.cold_share for load in cold)],
        "cold_s": [load.took_s for load in cold],
        "disk_s": [load.disk_s for load in cold],
        "warm_s": [load.took_s for load in warm],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
    }


def limits(case: Case) -> Figures:
    """What the machine itself does with as many bytes."""
    state = build(case.spec)
    copies = state_copies([*state.flat().values()], change=state.negate)
    walks = state_walks(state, change=state.negate)
    settle_first = partial(_settle, case, state)
    limits = measure_limits(state.nbytes, case.folder, num_files=1 + COUNTED, settle=settle_first)
    return limits | copies | walks


def _saves(case: Case, *, num_warmup: int, changing: float) -> Figures:
    state = build(case.spec)
    state.fill(SEED)
    probe = DiskProbe(case.folder.parent)
    peak = PeakMemory()
    saver = PEERS[case.peer].saver(state, case.folder)
    saves: dict[bool, list[_Save]] = {False: [], True: []}
    ways = [ready for ready in _ways(case) for _ in range(COUNTED)]
    share = 1.0
    for number, ready in enumerate([True, *ways[:1] * (num_warmup - 1), *ways]):
        if number:
            share = state.negate(changing)
        if ready:
            drop_cache(case.folder)
            _settle(case, state)
        else:
            os.sync()
        before = written_nbytes()
        with peak.watch():
            start = perf_counter()
            begun = saver.begin(number)
            stall_s = perf_counter() - start
            begun.wait()
            durable_s = perf_counter() - start
        written = float(written_nbytes() - before)
        save = _Save(stall_s, durable_s, written, probe.write_s(state.nbytes))
        if not number:
            first = save
        if number >= num_warmup:
            saves[ready].append(save)
    durable = saves["durable" in PEERS[case.peer].takes_memory]
    stalled = saves["stall" in PEERS[case.peer].takes_memory]
    figures = {
        "nbytes": [float(state.nbytes)],
        "num_tensors": [float(state.num_tensors)],
        "changing_share": [share],
        "first_stall_s": [first.stall_s],
        "first_durable_s": [first.durable_s],
        "stall_s": [save.stall_s for save in stalled],
        "durable_s": [save.durable_s for save in durable],
        "disk_s": [save.disk_s for save in durable],
        "written_nbytes": [save.written_nbytes for save in durable],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
        "disk_nbytes": [disk_nbytes(case.folder) / (num_warmup + len(ways))],
    }
    saver.close()
    return figures


def _ways(case: Case) -> list[bool]:
    """Whether memory is made ready before a save; both, where that helps only a part of it."""
    takes = PEERS[case.peer].takes_memory
    return sorted({"stall" in takes, "durable" in takes})


def _settle(case: Case, state: State) -> None:
    """Memory for a copy and for pages of files."""
    if case.settles:
        settle(2 * state.nbytes)
