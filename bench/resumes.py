"""The first `resume()` of a process, as a script meets it: `python -m bench.resumes`.

Each row is a fresh process. It has built a model whose memory is touched; its optimizer has made
its slots already (`stepped`) or not yet (`new`, as at the start of a script). The checkpoint's
files are in the page cache (`warm`) or not (`cold`). Free memory is such as the machine has at hand
(`ready`), or was given back to the machine's host some seconds ago, so that each page that is newly
taken is faulted in by the host (`given back`). One row is below `holdfast run --memory`, which has
the state of the ended process in shared memory.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from bench.case import SEED
from bench.child import in_child
from bench.command import Bench, progress
from bench.goals import RESUME_GOALS
from bench.limits import ReadProbe
from bench.machine import back_memory, drop_cache, files_under, fill_cache, newest_under
from bench.peers import PEERS
from bench.report import percent, results_table, seconds, times
from bench.results import Figures, Results
from bench.states import State, StateSpec, build
from holdfast.cli.run import StagingMemory
from holdfast.launched import MEMORY

GIVEN_BACK_S = 5.0
"""Until free pages have been reported to the host; Linux does so every two seconds."""
_PIECE_NBYTES = 1 << 20
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SAVERS = ("holdfast", "safetensors")
_IMPORTED = ("holdfast.manager", "safetensors.torch")


def _resume(
    state: State, folder: Path, *, in_place: bool | None = None, memory_budget: int | None = None
) -> None:
    from holdfast import CheckpointManager

    manager = CheckpointManager(folder, state.components, memory_budget=memory_budget)
    if manager.resume(in_place=in_place) is None:
        raise RuntimeError("nothing was resumed")


def _plain(state: State, folder: Path) -> None:
    """Read the files into memory of the state, piece by piece, and digest each piece, by as many
    threads as there are cores. What it leaves in the tensors is in no order."""
    targets = [_bytes_of(tensor) for tensor in _with_slots(state)]
    pieces = list(_pieces(files_under(newest_under(folder)), targets))

    def read(piece: tuple[int, int, Any]) -> None:
        fd, start, target = piece
        digest = blake3()
        for at in range(0, len(target), _PIECE_NBYTES):
            part = target[at : at + _PIECE_NBYTES]
            os.preadv(fd, [part], start + at)
            digest.update(part)
        digest.digest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(read, pieces))
    for fd in {fd for fd, _, _ in pieces}:
        os.close(fd)


def _safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import load_file

    tensors = _with_slots(state)
    loaded = load_file(newest_under(folder) / "state.safetensors")
    with torch.no_grad():
        for tensor, found in zip(tensors, _in_order(state, loaded), strict=True):
            tensor.copy_(found)


_READERS: Mapping[str, tuple[str, str, Callable[[State, Path], None]]] = {
    "plain": ("holdfast", "plain read and digest into the state", _plain),
    "default": ("holdfast", "holdfast, `resume()`", _resume),
    "apart": ("holdfast", "holdfast, `in_place=False`", partial(_resume, in_place=False)),
    "twice": (
        "holdfast",
        "holdfast, verified first: `in_place=False`, memory_budget of 64 MiB",
        partial(_resume, in_place=False, memory_budget=1 << 26),
    ),
    "memory": ("holdfast", "holdfast, `resume()` after `holdfast run --memory`", _resume),
    "safetensors": ("safetensors", "safetensors load_file + copy, not verified", _safetensors),
}
"""Name → whose files, title, what is called."""
_HEATS, _SLOTS, _MEMORIES = ("warm", "cold"), ("stepped", "new"), ("ready", "given back")
_CONDITIONS = tuple(itertools.product(_HEATS, _SLOTS, _MEMORIES))


def _with_slots(state: State) -> list[torch.Tensor]:
    """The tensors of a state; an optimizer that has no slots yet gets memory for them."""
    model, optimizer = state.components["model"], state.components["optimizer"]
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        found.append(parameter.detach())
        slots = optimizer.state[parameter]
        if not slots:
            slots["step"] = torch.empty(())
            slots |= {name: torch.empty_like(parameter.detach()) for name in _MOMENTS}
        found += [slots["step"], *(slots[name] for name in _MOMENTS)]
    return found


def _in_order(state: State, loaded: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a file, in the order of `_with_slots`."""
    names = [name for name, _ in state.components["model"].named_parameters()]
    return [
        loaded[key]
        for number, name in enumerate(names)
        for key in (
            f"model.{name}",
            *(f"optimizer.state.{number}.{slot}" for slot in ("step", *_MOMENTS)),
        )
    ]


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _pieces(paths: Sequence[Path], targets: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """(descriptor, start, memory): the files' bytes, as far as there is memory for them."""
    memory = iter(targets)
    target = np.empty(0, np.uint8)
    for path in sorted(paths):
        fd, start = os.open(path, os.O_RDONLY), 0
        left = path.stat().st_size
        while left:
            if not len(target):
                found = next(memory, None)
                if found is None:
                    return
                target = found
            nbytes = min(len(target), left, 8 * _PIECE_NBYTES)
            yield fd, start, target[:nbytes]
            target, start, left = target[nbytes:], start + nbytes, left - nbytes


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="state, in 1e9 bytes")
    parser.add_argument("--readers", nargs="+", choices=[*_READERS], default=[*_READERS])
    parser.add_argument("--heats", nargs="+", choices=_HEATS, default=_HEATS)
    parser.add_argument("--slots", nargs="+", choices=_SLOTS, default=_SLOTS)
    parser.add_argument("--memories", nargs="+", choices=_MEMORIES, default=_MEMORIES)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    spec = StateSpec(kind="gpt", gpt_nbytes=round(options.size_gb * 1e9), num_small=0)
    results.titles["resumes"] = spec.title
    for saver in _SAVERS:
        if not (folder / saver).exists():
            (folder / saver).mkdir()
            shared = _shared_folder(spec) if "memory" in options.readers else ""
            results.add(f"made/{saver}", in_child(_save, saver, spec, folder / saver, shared))
    for heat, slots, memory in itertools.product(options.heats, options.slots, options.memories):
        for reader in options.readers:
            saver = _READERS[reader][0]
            name = f"resumes/{heat}, {slots}, {memory}/{reader}"
            progress(f"  {name}")
            conditions = heat, slots, memory
            shared = _shared_folder(spec) if reader == "memory" else ""
            case = reader, spec, folder / saver, shared
            results.add(name, in_child(_measure, *case, *conditions))


@functools.cache
def _shared_folder(spec: StateSpec) -> str:
    """The folder of a supervisor with room for the state, until this process ends."""
    memory = StagingMemory(f"{spec.gpt_nbytes + (1 << 28)}B").__enter__()
    atexit.register(memory.__exit__, None, None, None)
    return memory.environment[MEMORY]


def _save(saver: str, spec: StateSpec, folder: Path, shared: str) -> Figures:
    if shared:
        os.environ[MEMORY] = shared
    state = build(spec)
    state.fill(SEED)
    found = PEERS[saver].saver(state, folder)
    begun = found.begin(1)
    begun.wait()
    found.close()
    return {}


def _measure(
    reader: str, spec: StateSpec, folder: Path, shared: str, heat: str, slots: str, memory: str
) -> Figures:
    if shared:
        os.environ[MEMORY] = shared
    state = build(spec)
    if slots == "new":
        state.components["optimizer"].state.clear()
    newest = newest_under(folder)
    probe = ReadProbe(newest)
    drop_cache(newest)
    if heat == "warm":
        fill_cache(newest)
    gc.collect()
    os.sync()
    back_memory(2 * spec.gpt_nbytes)
    if memory == "given back":
        time.sleep(GIVEN_BACK_S)
    _, _, load = _READERS[reader]
    for module in _IMPORTED:
        import_module(module)  # a script has done so when it begins
    start = perf_counter()
    load(state, folder)
    took_s = perf_counter() - start
    figures = {"took_s": [took_s]}
    if load is not _plain:
        wrong = state.count_wrong(SEED)
        if wrong:
            raise RuntimeError(f"{reader}: {wrong} tensors are not what was saved")
    if heat == "cold":
        figures["disk_s"] = [probe.read_s()]
    return figures


def _tables(results: Results) -> list[str]:
    lines = [f"### {results.titles['resumes']}", ""]
    for condition in _CONDITIONS:
        place = f"resumes/{', '.join(condition)}/"
        if not results.names(place):
            continue
        titles = {f"{place}{name}": title for name, (_, title, _) in _READERS.items()}

        def row(case: str, place: str = place) -> list[str]:
            return [
                seconds(results.median(case, "took_s")),
                times(results.ratio((case, "took_s"), (f"{place}plain", "took_s"))),
                percent(results.ratio((case, "disk_s"), (case, "took_s"))),
            ]

        head = [", ".join(condition), "time", "vs. plain", "of disk"]
        lines += [*results_table(results, place, head, titles, row), ""]
    return lines


BENCH = Bench(
    name="resumes",
    about="The first resume of a process, warm and cold, into memory that is there or is not.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    goals=RESUME_GOALS,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
