"""Saves and loads of a state on a GPU, as shares of what its bus can do: `python -m bench.gpu`.

Without CUDA it says so and measures nothing; `--device cpu` runs everything on CPU tensors, which
shows that it works and no more.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from bench.child import in_child
from bench.command import Bench, progress
from bench.peers import PEERS
from bench.report import megabytes, number, percent, results_table, seconds, table, times
from bench.results import Figures, Results
from bench.slowdown import NONE, Training, add_training_options, measure_peer, titles
from bench.states import StateSpec, build

CASES = (
    NONE,
    "holdfast",
    "holdfast-overlap",
    "dcp-async",
    "dcp-async-pinned",
    "torch_checkpointing",
)
READERS = {"holdfast": "holdfast", "dcp": "dcp-async"}
"""Reader → the peer whose files it loads."""
_PIECE_NBYTES = 1 << 30
_REPEATS = 3


def bus_limits(nbytes: int, device: str) -> Figures:
    """Seconds for as many bytes between the device and pinned host memory, either way."""
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


def load(peer: str, reader: str, spec: StateSpec, folder: Path, device: str) -> Figures:
    """Save once, set everything to zero, load twice; the second load is the one that counts."""
    state = build(spec, device)
    for tensor in state.flat().values():
        tensor.detach().uniform_(0, 1)
    sums = state.sums()
    saver = PEERS[peer].saver(state, folder)
    saver.begin(0).wait()
    saver.close()
    seconds_of = []
    for _ in range(2):
        for tensor in state.flat().values():
            tensor.detach().zero_()
        _synchronize(device)
        start = perf_counter()
        PEERS[reader].readers[reader].load(state, folder)
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


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--size-gb", type=float, nargs="+", default=[10.0, 40.0], help="states, in 1e9 bytes"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases")
    parser.add_argument("--loads", action=argparse.BooleanOptionalAction, default=True)
    add_training_options(parser)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        results.notes["gpu"] = "there is no CUDA here; --device cpu runs it on CPU tensors"
        return
    for size_gb in options.size_gb:
        spec = StateSpec(kind="gpt", gpt_nbytes=round(size_gb * 1e9), num_small=0)
        _measure_state(f"gpu/{size_gb:g} GB", spec, options, folder, results)


def _measure_state(
    place: str, spec: StateSpec, options: argparse.Namespace, folder: Path, results: Results
) -> None:
    results.titles[place] = f"{spec.title}, on {_device_name(options.device)}"
    progress(f"  {place}/limits")
    results.add(f"{place}/limits", in_child(bus_limits, spec.gpt_nbytes, options.device))

    def make(peer: str, own: Path) -> Training:
        return Training(
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

    for peer in options.only:
        measure_peer(f"{place}/save", peer, results, folder, make)
    for reader, peer in READERS.items() if options.loads else ():
        progress(f"  {place}/load/{reader}")
        own = Path(tempfile.mkdtemp(dir=folder))
        outcome = in_child(load, peer, reader, spec, own, options.device)
        results.add(f"{place}/load/{reader}", outcome)
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
    names = {"d2h_s": "device to pinned memory", "h2d_s": "pinned memory to device"}

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
    return results_table(results, f"{place}/save/", head, titles(f"{place}/save"), row)


def _load_table(results: Results, place: str) -> list[str]:
    def row(case: str) -> list[str]:
        return [
            seconds(results.median(case, "warm_s")),
            percent(results.ratio((f"{place}/limits", "h2d_s"), (case, "warm_s"))),
            megabytes(results.median(case, "nbytes")),
        ]

    names = {f"{place}/load/{name}": PEERS[name].readers[name].title for name in READERS}
    head = ["load, warm", "time", "of the bus", "state"]
    return results_table(results, f"{place}/load/", head, names, row)


BENCH = Bench(
    name="gpu",
    about="Saves and loads of a state on a GPU, as shares of what its bus can do.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
