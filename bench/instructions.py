"""Instructions that planning a save takes, which no busy machine changes:
`python -m bench.instructions`.

Counted by `perf stat` where the processor lets it, else by valgrind's callgrind, which needs about
a minute to import torch; without either, it says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.command import Bench, progress
from bench.plans import Plan, plan
from bench.report import number, table
from bench.results import Outcome, Results
from bench.states import State, StateSpec, build
from holdfast.format.index import decode_index, encode_index
from holdfast.state.capture.capture import capture

_TIMEOUT_S = 900.0
_REPEATS = 3
_MISSING = "needs `perf` with a processor that counts, or `valgrind` (apt install valgrind)"


def works(num_small: int) -> Mapping[str, Callable[[], object]]:
    """What is counted: name → one call."""
    found: dict[str, Callable[[], object]] = {}
    for spec in (
        StateSpec(kind="gpt", gpt_nbytes=1, num_small=0),
        StateSpec(kind="small", gpt_nbytes=0, num_small=num_small),
    ):
        state = build(spec)

        name = f"{state.num_tensors:,} tensors"
        planned = _plan_of(state)
        index = encode_index(planned.files, planned.digests)
        found[f"{name}: capture, layout, index encoded"] = partial(_encode, state)
        found[f"{name}: index decoded"] = partial(
            decode_index, index, files=planned.entries, what="index"
        )
    return found


def _encode(state: State) -> bytes:
    planned = _plan_of(state)
    return encode_index(planned.files, planned.digests)


def _plan_of(state: State) -> Plan:
    components = capture(state.components).components
    return plan({name: component.specs for name, component in components.items()})


def run_works(num_small: int, only: int | None, repeats: int) -> None:
    """In the counted process: everything once, with a call of getppid between, or one repeatedly.

    callgrind writes its counters down, and starts anew, whenever getppid is called.
    """
    calls = list(works(num_small).items())
    if only is not None:
        for _ in range(repeats):
            calls[only][1]()
        return
    for _, work in calls:
        work()  # what a first call makes does not count
    for name, work in calls:
        os.getppid()
        work()
        os.getppid()
        print(name)


def count_by_callgrind(num_small: int) -> dict[str, float]:
    """Instructions of each work; all in one process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--dump-before=getppid", "--dump-line=no"]
        names = _run([*command, f"--callgrind-out-file={out}"], num_small).splitlines()
        # Dump 1 is what came before the first call; then every second one is a work.
        return {name: _total(Path(f"{out}.{2 * i + 2}")) for i, name in enumerate(names)}


def count_by_perf(num_small: int) -> dict[str, float]:
    """Instructions of each work: those of many calls less those of one, each in a process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["perf", "stat", "-x,", "-e", "instructions:u", "-o", str(out), "--"]
        for number_of, name in enumerate(works(num_small)):
            counts = []
            for repeats in (1, 1 + _REPEATS):
                arguments = ["--only", str(number_of), "--repeats", str(repeats)]
                _run(command, num_small, *arguments)
                counts.append(_perf_count(out.read_text()))
            found[name] = (counts[1] - counts[0]) / _REPEATS
    return found


def perf_counts() -> bool:
    """Whether there is perf, and the machine lets it count instructions."""
    if shutil.which("perf") is None:
        return False
    command = ["perf", "stat", "-x,", "-e", "instructions:u", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and "<not" not in done.stderr


def _perf_count(text: str) -> float:
    line = next(line for line in text.splitlines() if "instructions" in line)
    return float(line.split(",")[0])


def _total(path: Path) -> float:
    found = re.search(r"^totals: (\d+)", path.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"callgrind wrote no totals to {path.name}")
    return float(found[1])


def _run(tool: list[str], num_small: int, *arguments: str) -> str:
    """Run the works under a tool, with nothing random; returns their names."""
    child = [
        sys.executable,
        "-m",
        "bench.instructions",
        "--works",
        "--small-tensors",
        str(num_small),
    ]
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*tool, *child, *arguments], env=env, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{tool[0]}: {done.stderr[-300:]}")
    return done.stdout


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small-tensors", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--works", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=1, help=argparse.SUPPRESS)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    count = _counter()
    if count is None:
        results.notes["instructions"] = _MISSING
        return
    progress(f"  instructions, {count.__name__.replace('_', ' ')}")
    for name, found in count(options.small_tensors).items():
        figures = {"instructions_count": [found]}
        results.add(f"instructions/{name}", Outcome(figures=figures))


def _counter() -> Callable[[int], dict[str, float]] | None:
    if perf_counts():
        return count_by_perf
    return count_by_callgrind if shutil.which("valgrind") else None


def _tables(results: Results) -> list[str]:
    cases = results.names("instructions/")
    if not cases:
        return ["Nothing was counted."]

    def row(case: str) -> list[str]:
        found = results.median(case, "instructions_count")
        return [number(found / 1e6 if found is not None else None, "{:,.2f}")]

    titles = {case: case.removeprefix("instructions/") for case in cases}
    return table(["planning", "million instructions"], titles, row)


BENCH = Bench(
    name="instructions",
    about="Instructions that planning a save takes.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    rounds=1,
)

if __name__ == "__main__":
    asked = BENCH.parse(None)
    if asked.works:
        run_works(asked.small_tensors, asked.only, asked.repeats)
    else:
        sys.exit(BENCH.main())
