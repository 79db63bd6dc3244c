"""One case in a process of its own: all saves of one peer, one way to load, or the limits."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from bench.limits import measure as measure_limits
from bench.machine import PeakMemory, back_memory, disk_nbytes, drop_cache
from bench.peers import PEERS
from bench.states import StateSpec, build

SEED = 7
SAVES = 3
WARM_LOADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run. `action` is `save`, `load` or `limits`; `folder` holds one peer's files."""

    action: str
    peer: str
    reader: str
    spec: StateSpec
    folder: Path
    settles: bool = True
    """Whether each measured call finds memory that exists and nothing left to be written."""

    @property
    def name(self) -> str:
        """The row of the table that it belongs to."""
        return {"save": self.peer, "load": self.reader}.get(self.action, self.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures by name (seconds, bytes, shares), lists where a thing was done again, or an error."""

    figures: dict[str, list[float]]
    error: str | None = None


def run(case: Case, reply: Connection) -> None:
    """Measure and send the outcome; called in a fresh child process."""
    warnings.simplefilter("ignore")
    try:
        outcome = Outcome(figures=_ACTIONS[case.action](case))
    except Exception as err:
        traceback.print_exc()
        outcome = Outcome(figures={}, error=f"{type(err).__name__}: {err}")
    reply.send(outcome)
    reply.close()


def _save(case: Case) -> dict[str, list[float]]:
    state = build(case.spec)
    state.fill(SEED)
    peak = PeakMemory()
    saver = PEERS[case.peer].saver(state, case.folder)
    stalls, durables = [], []
    for number in range(SAVES):
        _settle(case, state.nbytes)
        with peak.watch():
            start = perf_counter()
            finish = saver.begin(number)
            stalls.append(perf_counter() - start)
            finish()
            durables.append(perf_counter() - start)
    figures = {
        "nbytes": [float(state.nbytes)],
        "num_tensors": [float(state.num_tensors)],
        "first_stall_s": stalls[:1],
        "first_durable_s": durables[:1],
        "stall_s": stalls[1:],
        "durable_s": durables[1:],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
        "disk_nbytes": [disk_nbytes(case.folder) / SAVES],
    }
    saver.close()
    return figures


def _load(case: Case) -> dict[str, list[float]]:
    reader = PEERS[case.peer].readers[case.reader]
    state = build(case.spec)
    cold_share = drop_cache(case.folder)
    peak = PeakMemory()
    seconds = []
    for _ in range(1 + WARM_LOADS):
        _settle(case, state.nbytes)
        with peak.watch():
            start = perf_counter()
            loaded = reader.load(state, case.folder)
            seconds.append(perf_counter() - start)
        del loaded
    wrong = state.count_wrong(SEED) if reader.applies else 0
    if wrong:
        raise RuntimeError(f"{case.reader}: {wrong} tensors are not what was saved")
    return {
        "cold_share": [cold_share],
        "cold_s": seconds[:1],
        "warm_s": seconds[1:],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
    }


def _limits(case: Case) -> dict[str, list[float]]:
    nbytes = build(case.spec).nbytes
    figures = measure_limits(
        nbytes, case.folder, num_files=SAVES, settle=lambda: _settle(case, nbytes)
    )
    return {"nbytes": [float(nbytes)]} | figures


def _settle(case: Case, nbytes: int) -> None:
    """Before each measured call: no garbage, no writes of others, memory for copy and files."""
    if case.settles:
        gc.collect()
        os.sync()
        back_memory(2 * nbytes)


def preload() -> None:
    """Import what the cases use, so that no import falls into a measured time."""
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The first optimizer imports half of torch.
    build(StateSpec(kind="gpt", gpt_nbytes=1, num_small=0))


_LIBRARIES = (
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict_saver",
    "safetensors.torch",
    "holdfast.manager",
)
_ACTIONS = {"save": _save, "load": _load, "limits": _limits}
preload()
