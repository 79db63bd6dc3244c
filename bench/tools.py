"""Commands that look into checkpoints, cold and with many tensors: `python -m bench.tools`.

Each row is a command in a process of its own. Beside it stands a direct read of the same files
right after it, and for `export` and `import` a direct write of as many bytes after that. What the
interpreter and the opening of the checkpoint take is measured by `holdfast tree` of the same
source, and left out of the share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.child import in_child
from bench.command import Bench, progress
from bench.goals import TOOLS_GOALS
from bench.limits import DiskProbe, ReadProbe
from bench.machine import drop_cache, files_under, fill_cache
from bench.report import megabytes, number, percent, results_table, seconds
from bench.results import Figures, Outcome, Results

NUM_SMALL = 20_000
_TENSOR_NBYTES = 20_800_000
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "tree": ("tree", "A"),
    "diff": ("diff", "A", "B"),
    "stats": ("stats", "A"),
    "verify": ("verify", "A"),
    "export": ("export", "A", "OUT", "--to", "safetensors", "--component", "model"),
    "import": ("import", "FILE", "OUT", "--step", "1"),
}
"""Name → arguments. A and B are two checkpoints, FILE is a safetensors file of the weights in A,
and OUT is written, then removed."""
_READ: Mapping[str, tuple[str, ...]] = {
    "tree": (),
    "diff": ("A", "B"),
    "stats": ("A",),
    "verify": ("A",),
    "export": ("A",),
    "import": ("FILE",),
}
"""Name → which of them it reads whole."""
_OPENED: Mapping[str, str] = {"import": "FILE"}
"""Name → what it opens, if not A."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="one checkpoint, in 1e9 bytes")
    parser.add_argument("--commands", nargs="+", choices=[*_COMMANDS], default=[*_COMMANDS])


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    results.titles["tools/large"] = f"{options.size_gb:g} GB, cold"
    results.titles["tools/many"] = f"{NUM_SMALL:,} tensors, warm"
    num_large = round(options.size_gb * 1e9 / _TENSOR_NBYTES)
    for place, numbers in (("large", (num_large, _TENSOR_NBYTES)), ("many", (NUM_SMALL, 1024))):
        root = folder / place
        if not root.exists():
            results.add(f"tools/made/{place}", in_child(_save, root, *numbers))
        for command in options.commands:
            progress(f"  tools/{place}/{command}")
            measure = partial(_measure, command, root, is_cold=place == "large")
            results.add(f"tools/{place}/{command}", _outcome(measure))


def _save(root: Path, num: int, nbytes: int) -> Figures:
    """Save two checkpoints, the second with every number changed."""
    from holdfast import CheckpointManager

    generator = torch.Generator().manual_seed(1)
    base = torch.randn(nbytes // 4, generator=generator).reshape(-1, 4)
    model = {f"h.{number}.weight": base * (1 + number / num) for number in range(num)}
    with CheckpointManager(root, {"model": model}, preflight=False, sinks=()) as manager:
        manager.save(1).wait()
        for tensor in model.values():
            tensor += 1e-3
        manager.save(2).wait()
    return {}


def _outcome(measure: partial[Figures]) -> Outcome:
    try:
        return Outcome(figures=measure())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Outcome(figures={}, error=str(error))


def _measure(command: str, root: Path, *, is_cold: bool) -> Figures:
    places = dict(zip("AB", sorted(root.glob("step-*")), strict=True))
    places["FILE"] = _file_of(places["A"], root.with_name(f"{root.name}-file"))
    places["OUT"] = root.with_name(f"{root.name}-out")
    prepare = drop_cache if is_cold else fill_cache
    read = [places[name] for name in _READ[command]]
    for name in ("A", "B", "FILE"):
        prepare(_folder(places[name]))
    opened = str(places[_OPENED.get(command, "A")])
    start_s, _, _ = _run(("tree", opened), {})
    for place in read:
        prepare(_folder(place))
    os.sync()
    load = os.getloadavg()[0]
    try:
        took_s, cpu_s, peak_nbytes = _run(_COMMANDS[command], places)
        written_nbytes = _nbytes(places["OUT"])
    finally:
        _remove(places["OUT"])
    figures = {
        "start_s": [start_s],
        "took_s": [took_s],
        "cpu_s": [cpu_s],
        "peak_nbytes": [peak_nbytes],
        "load": [load],
    }
    if is_cold and read:
        figures["work_s"] = [max(took_s - start_s, 1e-9)]
        disk_s = sum(ReadProbe(_folder(place)).read_s() for place in read)
        write_s = DiskProbe(root.parent).write_s(written_nbytes) if written_nbytes else 0.0
        figures["disk_s"], figures["read_and_write_s"] = [disk_s], [disk_s + write_s]
    return figures


def _file_of(checkpoint: Path, folder: Path) -> Path:
    """Return the weights of a checkpoint as a file, which is written the first time."""
    file = folder / "weights.safetensors"
    if not file.exists():
        folder.mkdir()
        _run(_COMMANDS["export"], {"A": checkpoint, "OUT": file})
    return file


def _folder(place: Path) -> Path:
    return place.parent if place.is_file() else place


def _nbytes(place: Path) -> int:
    if place.is_dir():
        return sum(path.stat().st_size for path in files_under(place))
    return place.stat().st_size if place.exists() else 0


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


_WATCH = """
import resource, subprocess, sys
from time import perf_counter
start = perf_counter()
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
took_s = perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(took_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, code)
"""
"""Runs a command from a small process: a forked child begins with the size of its parent."""


def _run(arguments: Sequence[str], places: Mapping[str, Path]) -> tuple[float, float, float]:
    """Run a command; return its seconds, those of processors, and its highest resident bytes."""
    words = [str(places.get(word, word)) for word in arguments]
    line = [sys.executable, "-c", _WATCH, sys.executable, "-m", "holdfast.cli", *words, "--json"]
    # As in an installation, whose modules are compiled once.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, check=True, timeout=600, env=environment
    )
    took_s, cpu_s, peak_nbytes, code = done.stdout.split()
    if code not in ("0", "1") or (code == "1" and arguments[0] != "diff"):
        raise RuntimeError(f"{' '.join(words)}: exit code {code}")
    return float(took_s), float(cpu_s), float(peak_nbytes)


def _tables(results: Results) -> list[str]:
    lines: list[str] = []
    for place in ("tools/large", "tools/many"):
        if not results.names(f"{place}/"):
            continue

        def row(case: str) -> list[str]:
            return [
                seconds(results.median(case, "took_s")),
                seconds(results.median(case, "start_s")),
                seconds(results.median(case, "cpu_s")),
                percent(results.ratio((case, "disk_s"), (case, "work_s"))),
                percent(results.ratio((case, "read_and_write_s"), (case, "work_s"))),
                megabytes(results.median(case, "peak_nbytes")),
                number(results.median(case, "load"), "{:.1f}"),
            ]

        titles = {f"{place}/{name}": f"`holdfast {name}`" for name in _COMMANDS}
        head = [
            results.titles[place],
            "whole",
            "of it the start",
            "processors",
            "of a read",
            "of a read and a write",
            "peak memory",
            "load",
        ]
        lines += [*results_table(results, f"{place}/", head, titles, row), ""]
    return lines


BENCH = Bench(
    name="tools",
    about="Commands that look into checkpoints: cold beside the disk, and with many tensors.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    goals=TOOLS_GOALS,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
