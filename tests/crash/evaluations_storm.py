"""SIGKILLs of a training and of two `holdfast evaluate` beside it. Run as a script.

    python tests/crash/evaluations_storm.py ROOT --kills 50 --seed 0 [--only-evaluators]

One of the three is killed at a random moment and started again, until there were so many kills.
Then the training ends, and the evaluators must end by themselves. Each program of an evaluation
notes its begin. Prints one JSON line; exit status 1 when a promise was broken:

* A checkpoint is evaluated once, and again only if the process that evaluated it was killed before.
* No checkpoint is deleted without a value, and each that is left has one, which never changed.
* `best` is the best of all that were ever saved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.format.records import Notes
from holdfast.root.catalog import Catalog
from holdfast.store import open_store

METRIC = "eval/acc"
KEEP = f"last:1,best:{METRIC}:max:1:wait=1000"
PROGRAM = """
import os, sys, time
begun, step = sys.argv[1], int(sys.argv[2].rpartition("step-")[2][:8])
log = os.open(begun, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(log, f"{time.time()} {os.getppid()} {step}\\n".encode())
time.sleep(step * 37 % 10 / 40)
print('{"METRIC": %f}' % (step * 7919 % 10007))
""".replace("METRIC", METRIC)


def value_of(step: int) -> float:
    """The value of a step, no two of which are equal."""
    return float(step * 7919 % 10007)


def train(root: str, saved: Path, stop: Path) -> None:
    """Save a step each 50 ms until a file is there, and note each that is acknowledged."""
    import torch

    from holdfast.manager import CheckpointManager

    state = {"tree": {"x": torch.zeros(8)}}
    with CheckpointManager(root, state, sinks=(), preflight=False, keep=KEEP) as manager:
        found = manager.resume()
        step = found.step if found is not None else 0
        while not stop.exists():
            step += 1
            state["tree"]["x"] += 1
            manager.save(step).wait()
            with saved.open("a") as file:
                file.write(f"{step}\n")
            time.sleep(0.05)


class Crew:
    """A training and two evaluators, which are started again when they are killed."""

    def __init__(self, root: str, folder: Path, linger_s: int) -> None:
        self.saved, self.begun, self.stop = (folder / n for n in ("saved", "begun", "stop"))
        this = [sys.executable, __file__, root]
        evaluate = [sys.executable, "-m", "holdfast.cli", "evaluate", root, "--follow"]
        evaluate += ["--interval", "0.1s", "--linger", f"{linger_s}s", "--metric", METRIC, "--"]
        evaluate += [sys.executable, "-S", "-c", PROGRAM, str(self.begun), "{checkpoint}"]
        training = [*this, "--train", str(self.saved), str(self.stop)]
        self._commands = [training, evaluate, evaluate]
        self.processes = [self._start(0)]
        while not self.saved.exists():
            time.sleep(0.05)
        self.processes += [self._start(number) for number in (1, 2)]
        self.killed: dict[int, float] = {}
        """Process → when it was killed."""
        self.started = {process.pid for process in self.processes}

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(self._commands[number], stdout=quiet, stderr=quiet)

    def wait_for_work(self, number: int) -> None:
        """Wait until one has saved or evaluated since it was started, or has nothing to do."""
        process, until = self.processes[number], time.monotonic() + 20
        num_saved = len(self.saved.read_text())
        while time.monotonic() < until and process.poll() is None:
            if number == 0 and len(self.saved.read_text()) > num_saved:
                return
            if number > 0 and f" {process.pid} " in self.begun.read_text():
                return
            time.sleep(0.02)

    def kill_one(self, number: int) -> None:
        """Kill one and start it again; none of them may have ended by itself."""
        process = self.processes[number]
        if process.poll() is not None:
            raise AssertionError(f"{number} has ended with {process.returncode}")
        self.killed[process.pid] = time.time()
        process.kill()
        process.wait()
        self.processes[number] = self._start(number)
        self.started.add(self.processes[number].pid)

    def end(self) -> None:
        """Let the training end, and wait for all."""
        self.stop.touch()
        codes = [process.wait(240) for process in self.processes]
        if any(codes):
            raise AssertionError(f"ended with {codes}")


def check_begins(crew: Crew) -> set[int]:
    """Each evaluation but the last of a checkpoint was by a process that had been killed."""
    begins: dict[int, list[tuple[float, int]]] = {}
    for line in crew.begun.read_text().splitlines():
        when, worker, step = line.split()
        begins.setdefault(int(step), []).append((float(when), int(worker)))
    for step, each in begins.items():
        for (_, worker), (when, _) in itertools.pairwise(each):
            # A program whose parent is none of them began after that was killed.
            if worker in crew.started and crew.killed.get(worker, float("inf")) > when:
                told = f"{worker} lives until {crew.killed.get(worker)}"
                raise AssertionError(f"step {step} is evaluated again, but {told}: {each}")
    return {*begins}


def check_values(root: str) -> int:
    """All that is left has its value, which was put once; returns the step of the best."""
    store = open_store(root)
    for entry in Catalog(store).checkpoints():
        if entry.metrics.get(METRIC) != value_of(entry.step):
            raise AssertionError(f"step {entry.step} has {entry.metrics}")
        for name in store.children(entry.folder):
            if name.startswith("notes-"):
                data = store.get(f"{entry.folder}/{name}")
                found = Notes.decode(data, what=name).metrics.get(METRIC, value_of(entry.step))
                if found != value_of(entry.step):
                    raise AssertionError(f"step {entry.step}: {name} had {found}")
    return Catalog(store).find_checkpoint(f"best:{METRIC}:max").step


def run_storm(root: str, num_kills: int, seed: int, *, spares_training: bool) -> dict[str, Any]:
    """Kill, and check; returns the counts."""
    dice = random.Random(seed)
    folder = Path(f"{root}.logs")
    folder.mkdir(parents=True)
    crew = Crew(root, folder, 2 if spares_training else 60)
    try:
        while not crew.begun.exists():
            time.sleep(0.05)
        for _ in range(num_kills):
            victim = dice.choice((1, 2) if spares_training else (0, 1, 1, 2, 2))
            crew.wait_for_work(victim)
            time.sleep(dice.uniform(0, 0.5))
            crew.kill_one(victim)
        crew.end()
    finally:
        for process in crew.processes:
            process.kill()
    begun = check_begins(crew)
    saved = {int(line) for line in crew.saved.read_text().split()}
    if not saved <= begun:
        raise AssertionError(f"deleted without a value: {sorted(saved - begun)}")
    best = check_values(root)
    if best != max(saved | begun, key=value_of):
        raise AssertionError(f"the best is not step {best}")
    num_begins = len(crew.begun.read_text().splitlines())
    return {
        "killed": num_kills,
        "saved": len(saved),
        "begun": num_begins,
        "again": num_begins - len(begun),
    }


def main() -> int:
    """Parse the arguments, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--train", nargs=2, type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-evaluators", action="store_true")
    given = parser.parse_args()
    if given.train:
        train(given.root, *given.train)
        return 0
    counts: dict[str, Any] = {"bad": 0, "stuck": 0}
    try:
        counts |= run_storm(
            given.root, given.kills, given.seed, spares_training=given.only_evaluators
        )
    except (AssertionError, subprocess.TimeoutExpired) as broken:
        print(broken, file=sys.stderr)
        counts["bad"] = 1
    print(json.dumps(counts))
    return counts["bad"]


if __name__ == "__main__":
    sys.exit(main())
