"""What a call of `save()` with overlap is made of, by the clock: `python -m bench.parts`.

It takes a few milliseconds, too short for py-spy to look at. So functions of Holdfast that follow
one another in the call are timed, each without those inside it that are timed too. That costs some
microseconds of the call.

Each call comes after all of the state was changed, which fills the processor's cache with other
memory, as a training does; or right after the same state was captured by another capturer, which
leaves tensors and code in the cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from bench.child import in_child
from bench.command import Bench, progress
from bench.peers import PEERS
from bench.plain import walk_s
from bench.report import percent, seconds, table
from bench.results import Figures, Results
from bench.states import StateSpec, build
from bench.where import delete_old

_CALLS = 8
"""Counted calls of each kind in a round."""
_KINDS = {"cold": "after a change of all", "hot": "right after a capture"}
PARTS: Mapping[str, str] = {
    "names": "names of the parameters, by a look at the modules",
    "model": "the model, recalled",
    "optimizer": "the optimizer, recalled",
    "rng": "the random generators: read and encoded",
    "capture": "the rest of the capture",
    "guard": "guards: versions, and memory held",
    "layout": "where it goes; small tensors that cannot wait",
    "wake": "handing over to the threads",
    "rest": "all else: checks, threads, events, the pending save",
}


def _places() -> Mapping[str, tuple[Any, str]]:
    """By part: the class and the name of its function."""
    from holdfast.staging.guard import Overlapped
    from holdfast.staging.overlap import Overlap
    from holdfast.staging.stage import Stager
    from holdfast.state.capture.capture import Capturer

    return {
        "names": (Capturer, "_name_parameters"),
        "model": (Capturer, "_module"),
        "optimizer": (Capturer, "_optimizer"),
        "rng": (Capturer, "_rng"),
        "capture": (Capturer, "capture"),
        "guard": (Overlap, "guard"),
        "layout": (Stager, "prepare_staging"),
        "wake": (Overlapped, "start_copying"),
    }


class _Clock:
    """Seconds by part of a call; a part inside another one counts for itself only."""

    def __init__(self) -> None:
        self.took: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        """Of each part that has begun: seconds of the parts inside it."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time the parts of what is called inside."""
        with ExitStack() as patches:
            for part, (owner, name) in _places().items():
                timed = self._timed(part, getattr(owner, name))
                patches.enter_context(patch.object(owner, name, timed))
            yield

    def call(self, part: str, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call, and count the time for a part."""
        self._inside.append(0.0)
        began = perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            all_s = perf_counter() - began
            self.took[part] += all_s - self._inside.pop()
            if self._inside:
                self._inside[-1] += all_s

    def _timed(self, part: str, function: Any) -> Any:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            return self.call(part, function, *arguments, **named)

        return timed


def calls(spec: StateSpec, folder: Path, kind: str) -> Figures:
    """Seconds by part of saves of one kind, of whole calls, and of plain walks in the same place;
    the first three saves, which lay out what later ones keep, do not count."""
    from holdfast.state.capture.capture import Capturer

    state = build(spec)
    saver = PEERS["holdfast-overlap"].saver(state, folder)
    other, clock = Capturer(state.components), _Clock()
    found: dict[str, list[float]] = defaultdict(list)

    def make_ready() -> None:
        state.negate()
        os.sync()
        if kind == "hot":
            other.capture()

    with clock.watch():
        for number in range(3 + _CALLS):
            make_ready()
            clock.took.clear()
            began = perf_counter()
            begun = clock.call("rest", saver.begin, number)
            took_s = perf_counter() - began
            begun.wait()
            if number >= 3:
                for part in PARTS:
                    found[f"{part}_s"].append(clock.took[part])
                found["call_s"].append(took_s)
            saver.rest()
            delete_old(folder)
            make_ready()
            found["walk_s"].append(walk_s(state))
    saver.close()
    return dict(found)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    spec = StateSpec(kind="gpt", gpt_nbytes=round(options.size_gb * 1e9), num_small=0)
    results.titles["parts"] = f"A call of save() with overlap; {spec.title}"
    for kind in _KINDS:
        progress(f"  parts/{kind}")
        own = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=folder))
        results.add(f"parts/{kind}", in_child(calls, spec, own, kind))
        shutil.rmtree(own)


def _tables(results: Results) -> list[str]:
    cases = results.names("parts/")
    if not cases:
        return ["Nothing was timed."]
    failed = [f"{case} failed: {results.error(case)}" for case in cases if results.error(case)]
    titles = {**PARTS, "call": "**the call**", "walk": "a plain walk that asks each tensor"}

    def row(part: str) -> list[str]:
        cells = []
        for case in cases:
            cells.append(seconds(results.median(case, f"{part}_s")))
            cells.append(percent(results.ratio((case, f"{part}_s"), (case, "call_s"))))
        return cells

    head: Sequence[str] = ["part"]
    for case in cases:
        head = [*head, _KINDS[case.removeprefix("parts/")], "of the call"]
    return [f"### {results.titles['parts']}", "", *table(head, titles, row), *failed]


BENCH = Bench(
    name="parts",
    about="What a call of save() with overlap is made of.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
