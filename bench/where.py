"""Where the time of a save or a load goes, sampled by py-spy: `python -m bench.where`.

A process does the same again and again; py-spy looks at it some hundred times a second. Counted is
what the caller's thread does inside the call, and all that Holdfast's threads do; a thread that
waits is not counted. Shares are spoilt less by a busy machine than times are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.command import Bench, progress
from bench.machine import drop_cache, fill_cache
from bench.peers import PEERS
from bench.report import percent, seconds, table
from bench.results import Outcome, Results
from bench.slowdown import Loop, Training
from bench.states import StateSpec, build

_RATE = 400
"""Looks a second."""
_SHOWN = 0.03
"""Share of the call's time from which on a function has a row."""
_CALLER, _OTHERS = "the caller", "threads"
_TIMEOUT_S = 600.0
_NOWHERE = subprocess.DEVNULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to be done again and again."""

    title: str
    kind: str
    """Of the state, as in `StateSpec`."""
    calls: Callable[[StateSpec, Path], Iterator[float]]
    """Does it once more for each item, which is the seconds that the caller spent."""


def _saves(peer: str, *, until_durable: bool = False) -> Callable[[StateSpec, Path], Any]:
    def calls(spec: StateSpec, folder: Path) -> Iterator[float]:
        state = build(spec)
        saver = PEERS[peer].saver(state, folder)
        for number in range(1, 10**6):
            state.negate()
            os.sync()  # meanwhile the housekeeping of the save before ends
            began = perf_counter()
            begun = measured(lambda number=number: saver.begin(number))
            call_s = perf_counter() - began
            begun.wait()
            yield perf_counter() - began if until_durable else call_s
            delete_old(folder)

    return calls


def delete_old(folder: Path) -> None:
    """All checkpoints of Holdfast but the last two, which the next save may need."""
    for old in sorted(folder.glob("step-*"))[:-2]:
        shutil.rmtree(old)


def _loads(reader: str, *, is_cold: bool = False) -> Callable[[StateSpec, Path], Any]:
    def calls(spec: StateSpec, folder: Path) -> Iterator[float]:
        state = build(spec)
        saver = PEERS["holdfast"].saver(state, folder)
        saver.begin(1).wait()
        saver.close()
        while True:
            (drop_cache if is_cold else fill_cache)(folder)
            began = perf_counter()
            measured(lambda: PEERS["holdfast"].readers[reader].load(state, folder))
            yield perf_counter() - began

    return calls


def _trainings(peer: str) -> Callable[[StateSpec, Path], Any]:
    def calls(spec: StateSpec, folder: Path) -> Iterator[float]:
        training = Training(peer=peer, spec=spec, folder=folder, steps=1, until_done=True)
        loop = Loop(training)
        loop.warm_up()
        for number in range(1, 10**6):
            began = perf_counter()
            measured(lambda number=number: loop.save_and_train(number))
            yield perf_counter() - began
            loop.rest()
            delete_old(folder)

    return calls


WORKS: Mapping[str, Work] = {
    "save": Work(title="save(), all of it changed", kind="gpt", calls=_saves("holdfast")),
    "awaited": Work(
        title="save(wait=True)", kind="gpt", calls=_saves("holdfast-awaited", until_durable=True)
    ),
    "training": Work(
        title="save() and the steps of a training, until the one in which it is durable",
        kind="gpt",
        calls=_trainings("holdfast"),
    ),
    "training-overlap": Work(
        title="the same with overlap", kind="gpt", calls=_trainings("holdfast-overlap")
    ),
    "cold": Work(
        title="load in place, cold", kind="gpt", calls=_loads("holdfast-in-place", is_cold=True)
    ),
    "warm": Work(title="load in place, warm", kind="gpt", calls=_loads("holdfast-in-place")),
    "warm-unverified": Work(
        title="load in place, verify=False, warm",
        kind="gpt",
        calls=_loads("holdfast-in-place-unverified"),
    ),
    "apart-cold": Work(title="load, cold", kind="gpt", calls=_loads("holdfast", is_cold=True)),
    "apart": Work(title="load, warm", kind="gpt", calls=_loads("holdfast")),
    "unverified": Work(
        title="load, verify=False, warm", kind="gpt", calls=_loads("holdfast-unverified")
    ),
    "small": Work(title="load of small tensors, warm", kind="small", calls=_loads("holdfast")),
}


def measured(call: Callable[[], Any]) -> Any:
    """A frame of its own, by which the samples of a call are known."""
    return call()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")
    parser.add_argument("--small-tensors", type=int, default=20_000, help="of 256 bytes each")
    parser.add_argument("--only", nargs="+", choices=[*WORKS], default=[*WORKS], help="works")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each work (%(default)s)")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    if shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None:
        results.notes.update(dict.fromkeys(options.only, "py-spy is not installed"))
        return
    for name in options.only:
        progress(f"  where/{name}")
        own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
        results.add(f"where/{name}", _sampled(name, options, own))
        shutil.rmtree(own)


def _sampled(name: str, options: argparse.Namespace, folder: Path) -> Outcome:
    """py-spy looks from the second call on: the first takes memory that later ones have."""
    stacks = folder / "stacks"
    child = [sys.executable, "-m", "bench.where", "--in-child", name, str(folder)]
    child += [str(options.size_gb), str(options.small_tensors), str(options.seconds)]
    spy = [str(Path(sys.executable).parent / "py-spy"), "record", "--rate", str(_RATE)]
    spy += ["--format", "raw", "--threads", "--function", "--nonblocking", "--output", str(stacks)]
    spy += ["--duration", "unlimited"]
    with subprocess.Popen(
        child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        if not worker.stdout.readline():
            return Outcome(figures={}, error="the process that is to be sampled died")
        command = [*spy, "--pid", str(worker.pid)]
        with subprocess.Popen(command, stdout=_NOWHERE, stderr=subprocess.PIPE) as looker:
            printed, _ = worker.communicate("go\n", timeout=_TIMEOUT_S)
            _, said = looker.communicate(timeout=_TIMEOUT_S)
    if not stacks.exists():
        return Outcome(figures={}, error=said.decode()[-200:] or "py-spy wrote nothing")
    called = json.loads(printed)
    shares = _shares(stacks.read_text(encoding="utf-8"), called["seconds"])
    return Outcome(figures={"call_s": [called["seconds"] / called["calls"]], **shares})


def _shares(stacks: str, calls_s: float) -> dict[str, list[float]]:
    """By `thread: function`: its share of the time of the calls; and by file, of the caller's."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        found = _function(frames.split(";"))
        if found is not None:
            counts[found] += int(count)
            if found.startswith(_CALLER):
                counts[f"{_CALLER}, all of {found.rpartition(' in ')[2]}"] += int(count)
    return {name: [count / _RATE / calls_s] for name, count in counts.items()}


def _function(frames: list[str]) -> str | None:
    """Whose time it is: the innermost function of Holdfast. None: not of a measured call."""
    is_caller = "MainThread" in frames[0]
    if is_caller and not any(frame.startswith("measured (") for frame in frames):
        return None
    own = [frame for frame in frames if "holdfast/" in frame and "bench/" not in frame]
    if not own:
        return None
    name, _, place = own[-1].removesuffix(")").partition(" (")
    module = place.split("holdfast/")[-1].split(":")[0]
    return f"{_CALLER if is_caller else _OTHERS}: `{name}` in {module}"


def _tables(results: Results) -> list[str]:
    lines = []
    for name in results.names("where/"):
        figures = results.cases[name][0].figures
        call_s = results.median(name, "call_s")
        rows = sorted(
            ((sum(values), key) for key, values in figures.items() if key != "call_s"),
            reverse=True,
        )
        titles = {key: key for share, key in rows if share >= _SHOWN}
        work = WORKS.get(name.removeprefix("where/"))  # an earlier run may have had others
        lines += [f"### {work.title if work else name}: {seconds(call_s)} a call", ""]
        lines += table(
            ["function", "share of the call's time"],
            titles,
            lambda key, figures=figures: [percent(sum(figures[key]))],
        )
        lines += [""]
    return lines or ["Nothing was sampled."]


def _in_child(name: str, folder: str, size_gb: str, num_small: str, limit_s: str) -> None:
    """What py-spy looks at: a first call, then calls for so long, at least three."""
    work = WORKS[name]
    spec = StateSpec(
        kind=work.kind, gpt_nbytes=round(float(size_gb) * 1e9), num_small=int(num_small)
    )
    calls = work.calls(spec, Path(folder))
    next(calls)
    _let_be_traced()
    print("ready", flush=True)
    sys.stdin.readline()
    found: list[float] = []
    began = perf_counter()
    while len(found) < 3 or perf_counter() - began < float(limit_s):
        found.append(next(calls))
    print(json.dumps({"calls": len(found), "seconds": sum(found)}), flush=True)


def _let_be_traced() -> None:
    """By any process of this user, where only parents may otherwise."""
    pr_set_ptracer, anybody = 0x59616D61, -1
    ctypes.CDLL(None).prctl(pr_set_ptracer, ctypes.c_long(anybody), 0, 0, 0)


BENCH = Bench(
    name="where",
    about="Where the time of a save or a load goes.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    rounds=1,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-child"]:
        _in_child(*sys.argv[2:])
    else:
        sys.exit(BENCH.main())
