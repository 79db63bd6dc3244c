"""SIGKILL storm: fork a saving child from a warm parent, kill it, look, go on. Run as a script.

    python tests/crash/storm.py ROOT --trials 50 --seed 0 [--mutant NAME] [--size 65536]

The moment of the kill is swept evenly over the life of a child, that is over resume, gc, two
saves and their retention; every tenth trial kills the recovering child, too. The parent stays
single-threaded: whatever uses threads, also the checks, runs in a forked child.

ROOT is a folder, or the URL of a place in an object store, whose credentials are in the
environment. Prints one JSON line; exit status 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from holdfast.care.gc import collect
from holdfast.care.verify import verify
from holdfast.engine import commit as commit_module
from holdfast.engine import save as save_module
from holdfast.engine.catalog import Catalog
from holdfast.format import layout
from holdfast.manager import CheckpointManager
from holdfast.policy.retention import Last
from holdfast.store import open_store
from holdfast.store.base import Store

NUM_TENSORS = 8
SAVES_A_CHILD = 2


def new_state(num_elements: int) -> dict[str, Any]:
    """A state whose tensors all hold the step at which it was saved."""
    tensors = [torch.zeros(num_elements) for _ in range(NUM_TENSORS)]
    return {"tree": {"step": 0, "tensors": tensors}}


def step_of(state: dict[str, Any]) -> int:
    """The step of a loaded state; fails when parts are of different steps."""
    step = state["tree"]["step"]
    for number, tensor in enumerate(state["tree"]["tensors"]):
        low, high = int(tensor.min()), int(tensor.max())
        if not low == high == step:
            raise AssertionError(f"torn: step {step}, tensor {number} from {low} to {high}")
    return int(step)


def work(root: str | Path, num_elements: int, told: int) -> None:
    """A child's life: resume, then save twice; tells each acknowledged step."""
    state = new_state(num_elements)
    with CheckpointManager(root, state, keep=Last(2), sinks=()) as manager:
        manager.resume()
        first = step_of(state) + 1
        for step in range(first, first + SAVES_A_CHILD):
            state["tree"]["step"] = step
            for tensor in state["tree"]["tensors"]:
                tensor.fill_(step)
            os.write(told, f"{manager.save(step).wait().step}\n".encode())


def look(root: str | Path, num_elements: int, acknowledged: int) -> None:
    """Every committed checkpoint is whole, and nothing acknowledged is gone."""
    store = open_store(root)
    entries, damaged = Catalog(store).survey()
    if damaged:
        raise AssertionError(f"damaged: {damaged}")
    for entry in entries:
        report = verify(store, entry.folder)
        if not report.ok:
            raise AssertionError(f"{entry.folder}: {report.problems}")
    state = new_state(num_elements)
    if entries:
        manager = CheckpointManager(root, state, sinks=())
        manager.load()
        manager.close()
    if step_of(state) < acknowledged:
        raise AssertionError(f"lost: step {acknowledged} was acknowledged, {step_of(state)} loads")


def clean_up(root: Path) -> None:
    """After gc nothing is left but what is committed."""
    store = open_store(root)
    collect(store)
    committed = {entry.folder: entry.manifest for entry in Catalog(store).checkpoints()}
    if not 1 <= len(committed) <= 3:
        raise AssertionError(f"{len(committed)} checkpoints")
    junk = set(os.listdir(root)) - set(committed)
    junk -= {layout.WRITERS, layout.READERS, layout.LATEST}
    if (root / layout.READERS).exists():  # whoever has loaded something has made it
        junk |= set(os.listdir(root / layout.READERS))
    for folder, manifest in committed.items():
        junk |= set(os.listdir(root / folder)) - set(manifest.files) - {layout.MANIFEST}
    junk |= {name for name in os.listdir(root / layout.WRITERS) if name.startswith(".")}
    if junk:
        raise AssertionError(f"junk: {sorted(junk)}")


def clean_up_objects(url: str) -> None:
    """The same in an object store, where gc is told that the killed processes are dead.

    By itself it leaves their abort markers: a put that they sent might still arrive.
    """
    store = open_store(url)
    collect(store)
    marked = {str(name) for name in Catalog(store).attempts()}
    committed = {entry.folder: entry.manifest for entry in Catalog(store).checkpoints()}
    files = {
        f"{folder}/{file}"
        for folder, manifest in committed.items()
        for file in (*manifest.files, layout.MANIFEST)
    }
    files |= {f"{folder}/{layout.MANIFEST}" for folder in marked}
    _check_objects(store, files)
    collect(store, dead_epochs=range(1, Catalog(store).highest_epoch() + 1))
    _check_objects(store, {key for key in files if key.partition("/")[0] in committed})
    if not 1 <= len(committed) <= 3:
        raise AssertionError(f"{len(committed)} checkpoints")


def _check_objects(store: Store, expected: set[str]) -> None:
    found = {info.key for info in store.list()}
    junk = {key for key in found - expected if not key.startswith(f"{layout.WRITERS}/")}
    junk -= {layout.LATEST}
    if junk or not expected <= found:
        raise AssertionError(f"junk: {sorted(junk)}, missing: {sorted(expected - found)}")


def forked(job: Callable[[], None]) -> int:
    """Start a child that does `job`; its status tells whether it succeeded."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        job()
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def succeeds(job: Callable[[], None]) -> bool:
    """Whether a child that does `job` ends well."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(job), 0)[1]) == 0


class Storm:
    """The parent: what was acknowledged, and what went wrong."""

    def __init__(self, root: str, num_elements: int, rng: random.Random) -> None:
        self.root = root
        self.num_elements = num_elements
        self.rng = rng
        self.acknowledged = 0
        self.killed = self.finished = self.bad = self.stuck = 0

    def trial(self, delay_s: float | None) -> float:
        """One child, killed after `delay_s` unless it ended before; returns its life in s."""
        read, write = os.pipe()
        began = time.perf_counter()
        pid = forked(lambda: self.live(write))
        os.close(write)
        if delay_s is not None:
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lived_s = time.perf_counter() - began
        with os.fdopen(read) as told:
            for line in told:
                self.heard(line)
        if status == -signal.SIGKILL:
            self.killed += 1
        elif status == 0:
            self.finished += 1
        else:
            self.stuck += 1
        return lived_s

    def live(self, told: int) -> None:
        """What a child does."""
        work(self.root, self.num_elements, told)

    def heard(self, line: str) -> None:
        """What a child told."""
        self.acknowledged = max(self.acknowledged, int(line))

    def check(self) -> None:
        if not succeeds(lambda: look(self.root, self.num_elements, self.acknowledged)):
            self.bad += 1

    def run(self, trials: int) -> None:
        life_s = sorted(self.trial(None) for _ in range(3))[1]
        moments = [(number + 0.5) / trials * life_s * 1.1 for number in range(trials)]
        self.rng.shuffle(moments)
        for number, moment in enumerate(moments):
            self.trial(moment)
            if number % 10 == 9:
                self.trial(self.rng.uniform(0, life_s / 2))
            self.check()
            if number % 25 == 24:
                # In an object store each kill leaves a marker, over which later lives are slower.
                self.rest()
        self.rest()

    def rest(self) -> None:
        """One child that is not killed, and everything cleaned up."""
        self.trial(None)
        self.check()
        if not succeeds(self.clean_up):
            self.bad += 1

    def clean_up(self) -> None:
        """Raises unless a life to its end leaves what it should."""
        if "://" in self.root:
            clean_up_objects(self.root)
        else:
            clean_up(Path(self.root))


def manifest_first() -> None:
    """Mutant: commits before the files are written.

    It waits in between as long as the child has lived, so that many kills strike there, however
    slow the machine is.
    """
    real_commit = commit_module.commit

    def commit(store: Any, attempt: Any, manifest: Any) -> None:
        aside = [(i.key, store.get(i.key)) for i in store.list(f"{attempt.folder}/")]
        for key, _ in aside:
            store.delete(key)
        real_commit(store, attempt, manifest)
        time.sleep(max(0.02, time.time() - psutil.Process().create_time()))
        for key, data in aside:
            store.put(key, data)

    save_module.commit = commit


def forgets_the_newest() -> None:
    """Mutant: resume takes the second newest checkpoint."""
    real = Catalog.lineage
    Catalog.lineage = lambda self: iter(list(real(self))[1:] or list(real(self)))


MUTANTS = {"manifest_first": manifest_first, "forgets_the_newest": forgets_the_newest}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=65536, help="elements of each tensor")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.mutant:
        MUTANTS[options.mutant]()
    storm = Storm(options.root, options.size, random.Random(options.seed))
    storm.run(options.trials)
    counts = {name: getattr(storm, name) for name in ("killed", "finished", "stuck", "bad")}
    print(json.dumps({**counts, "trials": options.trials, "last_step": storm.acknowledged}))
    return 1 if storm.bad or storm.stuck else 0


if __name__ == "__main__":
    sys.exit(main())
