"""What saving costs a training in all, not only in the call: `python -m bench.slowdown`.

A GPT-like model trains; at every so many steps it is saved. The time of all those steps and of the
call, less the time of as many steps without a save of the same process, is what a save *adds*.
Steps without a save come before and after it: a shared machine is another one later.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch

from bench.child import in_child, settle
from bench.command import Bench, progress
from bench.machine import own_children, own_threads, processor_s, threads_s
from bench.peers import PEERS, Begun, Saver
from bench.plain import PlainSave
from bench.report import number, percent, results_table, seconds, times
from bench.results import Figures, Results
from bench.states import State, StateSpec, build, train_step

NONE = "none"
PLAIN = "plain"
"""What every save with digests has to do, in a plain loop."""
CASES = (
    NONE,
    PLAIN,
    "holdfast",
    "holdfast-overlap",
    "dcp-async",
    "dcp-async-shared",
    "torch_checkpointing",
    "torch",
)
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training to be saved by one peer; `peer` is `none` for one that is not saved."""

    peer: str
    spec: StateSpec
    folder: Path
    device: str = "cpu"
    num_threads: int = 2
    tokens: int = 32
    """In a batch, of one sequence."""
    steps: int = 20
    """From one save to the next."""
    num_saves: int = 1
    """Counted ones; there is one before them."""
    settles: bool = True
    until_done: bool = False
    """Whether the steps go on until the save is done, however long it takes."""

    num_quiet: int = 4
    """Steps without a save, before the first save and after each; the median of those around a save
    is what its steps are compared with."""

    def saver(self, state: State) -> Saver:
        """What saves the state; not asked where nothing does."""
        make = PlainSave if self.peer == PLAIN else PEERS[self.peer].saver
        return make(state, self.folder)


def train(training: Training) -> Figures:
    """Train, with a save every so many steps; a figure for each counted save."""
    loop = Loop(training)
    loop.warm_up()
    for save in range(1, 1 + training.num_saves):
        if training.settles:
            settle(2 * loop.state.nbytes)
        loop.save_and_train(save)
        loop.rest()
        loop.train_quietly()
    loop.close()
    return loop.figures()


class Loop:
    """The training and its clock."""

    def __init__(self, training: Training) -> None:
        torch.set_num_threads(training.num_threads)
        self.training = training
        self.state = build(training.spec, training.device)
        torch.manual_seed(_SEED)
        with torch.no_grad():
            for parameter in self.state.components["model"].parameters():
                parameter.normal_(std=0.02)
        self._saver: Saver | None = None
        width = self.state.components["model"]["norm"].weight.numel()
        self._batch = torch.randint(width, (1, min(training.tokens, width)), device=training.device)
        self._threads: frozenset[int] = frozenset()
        """Those of the training, from its first step on."""
        self._begun: Begun | None = None
        self._began_s = 0.0
        self._quiet: list[list[float]] = []
        """Seconds of steps without a save: before the first save, after it, after the next one."""
        self._busy: list[float] = []
        self._periods: list[tuple[float, int]] = []
        """Seconds and steps from one save to the next."""
        self._stalls: list[float] = []
        self._done: list[float] = []
        self._core_s: list[float] = []

    def warm_up(self) -> None:
        """The first steps and the first save, which make what later ones use, do not count."""
        self.step()
        self.know_threads()
        if self.training.peer != NONE:
            self._saver = self.training.saver(self.state)
            self._saver.begin(0).wait()
        self.step()
        self.rest()
        self.train_quietly()

    def know_threads(self) -> None:
        """All threads that there are now are the training's, and whatever comes later the saver's.

        Of up to two; with more of them torch may end some and start others.
        """
        self._threads = own_threads()

    def rest(self) -> None:
        """Return when nothing is left to do of what was saved."""
        if self._saver is not None:
            self._saver.rest()
        os.sync()

    def train_quietly(self) -> None:
        """Some steps while nothing is saved."""
        self._quiet.append([self.step() for _ in range(self.training.num_quiet)])

    def save_and_train(self, number: int) -> None:
        """One save and the steps up to the next; returns when the save is done, too."""
        before_s = self.savers_s()
        if self._saver is not None:
            before_s += self._own_s()
            self._began_s = perf_counter()
            self._begun = self._saver.begin(number)
            self._stalls.append(perf_counter() - self._began_s)
            before_s -= self._own_s()
            self._look()
        else:
            self._began_s = perf_counter()
        num_steps = 0
        while num_steps < self.training.steps or (self.training.until_done and self._begun):
            is_busy = self._begun is not None
            took_s = self.step()
            if is_busy:
                self._busy.append(took_s)
            num_steps += 1
        self._periods.append((perf_counter() - self._began_s, num_steps))
        self.finish()
        if self._saver is not None:
            self._core_s.append(self.savers_s() - before_s)

    def savers_s(self) -> float:
        """Seconds that threads have computed that are not the training's, and other processes that
        this one has started."""
        others_s = process_time() - threads_s(self._threads)
        ended_s = sum(os.times()[2:4])
        return others_s + ended_s + processor_s(own_children())

    def _own_s(self) -> float:
        """Seconds that the training's threads have computed."""
        process_time()  # has the system count up to now what runs
        return threads_s(self._threads)

    def step(self) -> float:
        """One step; the seconds that it took."""
        guard = self._saver.guard() if self._begun and self._saver else nullcontext()
        start = perf_counter()
        train_step(self.state, self._batch, guard)
        _synchronize(self.training.device)
        took_s = perf_counter() - start
        self._look()
        return took_s

    def _look(self) -> None:
        if self._begun is not None and self._begun.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._begun is not None:
            self._begun.wait()
            self._done.append(perf_counter() - self._began_s)
            self._begun = None

    def close(self) -> None:
        """Give the saver's threads and memory back."""
        if self._saver is not None:
            self._saver.close()

    def figures(self) -> Figures:
        """Of the counted saves, and of the steps without one."""
        around = [median(before + after) for before, after in pairwise(self._quiet)]
        periods = [(*one, quiet_s) for one, quiet_s in zip(self._periods, around, strict=True)]
        busy = {"busy_step_s": [median(self._busy)]} if self._busy else {}
        if self._core_s:
            busy |= {"core_s": self._core_s}
        return busy | {
            "nbytes": [float(self.state.nbytes)],
            "quiet_step_s": around,
            "added_s": [took_s - steps * quiet_s for took_s, steps, quiet_s in periods],
            "added_share": [took_s / (steps * quiet_s) - 1 for took_s, steps, quiet_s in periods],
            "stall_s": self._stalls,
            "done_s": self._done,
        }


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_peer(
    place: str, peer: str, results: Results, folder: Path, make: Callable[[str, Path], Training]
) -> None:
    """Add the outcome of one training, or why there is none."""
    why = PEERS[peer].lacks("gpt") if peer in PEERS else None
    if why:
        results.notes[f"{place}/{peer}"] = why
        return
    progress(f"  {place}/{peer}")
    own = Path(tempfile.mkdtemp(prefix=f"{peer}-", dir=folder))
    results.add(f"{place}/{peer}", in_child(train, make(peer, own)))
    shutil.rmtree(own)


def titles(place: str) -> Mapping[str, str]:
    """Rows of a table of trainings."""
    found = {f"{place}/{name}": peer.title for name, peer in PEERS.items()}
    bounds = {NONE: "no save", PLAIN: "plain copy, digest and direct write"}
    return {f"{place}/{name}": title for name, title in bounds.items()} | found


def add_training_options(parser: argparse.ArgumentParser, *, num_saves: int = 1) -> None:
    """What a training is made of."""
    parser.add_argument("--threads", type=int, default=2, help="of torch (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="in a batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="between saves (%(default)s)")
    parser.add_argument(
        "--saves", type=int, default=num_saves, help="counted in a round (%(default)s)"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="the state, in 1e9 bytes")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases")
    add_training_options(parser, num_saves=2)


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    spec = StateSpec(kind="gpt", gpt_nbytes=round(options.size_gb * 1e9), num_small=0)
    results.titles["slowdown"] = f"{spec.title}; a save every {options.steps} steps"

    def make(peer: str, own: Path) -> Training:
        return Training(
            peer=peer,
            spec=spec,
            folder=own,
            device="cpu",
            num_threads=options.threads,
            tokens=options.tokens,
            steps=options.steps,
            num_saves=options.saves,
            settles=options.settle,
        )

    for peer in options.only:
        measure_peer("slowdown", peer, results, folder, make)


def _tables(results: Results) -> list[str]:
    def row(case: str) -> list[str]:
        busy = results.ratio((case, "busy_step_s"), (case, "quiet_step_s"))
        return [
            number(results.median(case, "added_s"), "{:+.2f} s"),
            percent(results.median(case, "added_share")),
            percent(_plain_share(results, case)),
            times(_whole_run(results, case)),
            seconds(results.median(case, "stall_s")),
            seconds(results.median(case, "done_s")),
            seconds(results.median(case, "core_s")),
            seconds(results.median(case, "quiet_step_s")),
            times(busy),
        ]

    head = [
        "training",
        "added by a save",
        "of the run",
        "plain",
        "whole run",
        "stall",
        "done after",
        "core seconds",
    ]
    head += ["a step", "a step while a save runs"]
    title = f"### {results.titles.get('slowdown', 'Slow-down')}"
    return [title, "", *results_table(results, "slowdown/", head, titles("slowdown"), row)]


def _whole_run(results: Results, case: str) -> float | None:
    """All of the steps with the saves among them, beside the training without a save: here counts
    what a saver costs while it saves nothing, too, and what one process is slower than another."""
    own, none = (_with_saves(results, name) for name in (case, f"slowdown/{NONE}"))
    found = [mine / other for mine, other in zip(own, none, strict=False) if mine and other]
    return median(found) if found else None


def _with_saves(results: Results, case: str) -> list[float | None]:
    """By round: seconds of a step, with what saves add to each."""
    figures = (results.by_round(case, name) for name in ("quiet_step_s", "added_share"))
    pairs = zip(*figures, strict=True)
    return [None if None in pair else pair[0] * (1 + pair[1]) for pair in pairs]


def _plain_share(results: Results, case: str) -> float | None:
    """What a plain save adds beside what this one does; both without the noise of the round, which
    the training without a save shows."""
    none = f"slowdown/{NONE}"
    added = (results.added(name, none, "added_s") for name in (f"slowdown/{PLAIN}", case))
    found = [plain / own for plain, own in zip(*added, strict=False) if plain and own]
    return median(found) if found and case != none else None


BENCH = Bench(
    name="slowdown",
    about="What saving costs a CPU-bound training in all, beside the peers.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
