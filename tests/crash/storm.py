"""SIGKILL storm: fork a saving child from a warm parent, kill it, look, go on. Run as a script.

    python tests/crash/storm.py ROOT --trials 50 --seed 0 [--mutant NAME] [--size 65536]

The moment of the kill is swept evenly over the life of a child, that is over resume, gc, two
saves and their retention, and over the check of the store in one of ten; every tenth trial kills
the recovering child, too. The parent stays single-threaded: whatever uses threads, also the
checks, runs in a forked child.

ROOT is a folder, or the URL of a place in an object store, whose credentials are in the
environment. Prints one JSON line; exit status 1 when a promise was broken. `test_storm.py` and
`tests/stores/test_storm.py` run it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from holdfast.care.gc import collect
from holdfast.care.verify import verify
from holdfast.engine.roots import commit as commit_module
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.saving import save as save_module
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Manifest
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


def advance(state: dict[str, Any], step: int) -> None:
    """Make it the state of that step, in place."""
    state["tree"]["step"] = step
    for tensor in state["tree"]["tensors"]:
        tensor.fill_(step)


def work(root: str, num_elements: int, told: int, *, preflight: bool) -> None:
    """A child's life: resume, then save twice; tells each acknowledged step."""
    state = new_state(num_elements)
    with CheckpointManager(root, state, keep=Last(2), sinks=(), preflight=preflight) as manager:
        manager.resume()
        first = step_of(state) + 1
        for step in range(first, first + SAVES_A_CHILD):
            advance(state, step)
            os.write(told, f"{manager.save(step).wait().step}\n".encode())


def expect_whole(store: Store, entries: Collection[Entry]) -> None:
    """Raises unless every byte of these checkpoints is there and right."""
    for entry in entries:
        report = verify(store, entry.folder)
        if not report.ok:
            raise AssertionError(f"{store.url}: {entry.folder}: {report.problems}")


def survey(store: Store) -> tuple[Entry, ...]:
    """The checkpoints of a root, newest first; raises when a manifest is damaged."""
    entries, damaged = Catalog(store).survey()
    if damaged:
        raise AssertionError(f"{store.url}: damaged: {damaged}")
    return entries


def look(root: str | Path, num_elements: int, acknowledged: int) -> None:
    """Every committed checkpoint is whole, and nothing acknowledged is gone."""
    store = open_store(root)
    entries = survey(store)
    expect_whole(store, entries[1:])
    state = new_state(num_elements)
    if entries:
        with CheckpointManager(store, state, sinks=()) as manager:
            found = manager.load()  # which checks its bytes
        if found.folder != entries[0].folder:
            raise AssertionError(f"{entries[0].folder} is not what loads: {found.folder} is")
    if step_of(state) < acknowledged:
        raise AssertionError(f"lost: step {acknowledged} was acknowledged, {step_of(state)} loads")


def clean_up(root: str | Path) -> None:
    """After gc nothing is left but what is committed."""
    store = open_store(root)
    collect(store)
    expect_no_junk(store, str(root))
    if not 1 <= len(survey(store)) <= 3:
        raise AssertionError(f"{len(survey(store))} checkpoints")


def expect_no_junk(store: Store, root: str) -> None:
    """Raises if there is anything but checkpoints, claims and, in an object store, abort markers.

    A put that a killed process has sent might still arrive there. The markers go when gc is told
    that those processes are dead.
    """
    committed = {entry.folder: entry.manifest for entry in survey(store)}
    if "://" not in root:
        _expect_bare_folder(Path(root), committed)
        return
    files = {
        f"{folder}/{file}"
        for folder, manifest in committed.items()
        for file in (*manifest.files, layout.MANIFEST)
    }
    attempts = {f"{name}/{layout.MANIFEST}" for name in Catalog(store).attempts()}
    _expect_objects(store, files | attempts)
    collect(store, dead_epochs=range(1, Catalog(store).highest_epoch() + 1))
    _expect_objects(store, files)


def _expect_bare_folder(root: Path, committed: dict[str, Manifest]) -> None:
    junk = set(os.listdir(root)) - set(committed)
    junk -= {layout.WRITERS, layout.READERS, layout.LATEST}
    if (root / layout.READERS).exists():  # whoever has loaded something has made it
        junk |= set(os.listdir(root / layout.READERS))
    for folder, manifest in committed.items():
        junk |= set(os.listdir(root / folder)) - set(manifest.files) - {layout.MANIFEST}
    junk |= {name for name in os.listdir(root / layout.WRITERS) if name.startswith(".")}
    if junk:
        raise AssertionError(f"{root}: junk: {sorted(junk)}")


def _expect_objects(store: Store, expected: set[str]) -> None:
    found = {info.key for info in store.list()}
    junk = {key for key in found - expected if not key.startswith(f"{layout.WRITERS}/")}
    junk -= {layout.LATEST}
    if junk or not expected <= found:
        raise AssertionError(
            f"{store.url}: junk: {sorted(junk)}, missing: {sorted(expected - found)}"
        )


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


def warm(url: str) -> None:
    """Read once what every child would read again: megabytes of JSON. Starts no thread."""
    if url.startswith("s3://"):
        import botocore.session
        from botocore.loaders import create_loader

        botocore.session.create_loader = functools.lru_cache(create_loader)
        botocore.session.Session().create_client("s3")


class Storm:
    """The parent: what was acknowledged, and what went wrong."""

    def __init__(self, root: str, num_elements: int, rng: random.Random) -> None:
        self.root = root
        self.num_elements = num_elements
        self.rng = rng
        self.preflight = True
        # In an object store each kill leaves a marker, over which later lives are slower.
        self.rest_every = 10 if "://" in root else 25
        self.acknowledged = 0
        self.killed = self.finished = self.bad = self.stuck = 0
        self.lives_s = deque([1.0], maxlen=3)
        """How long the last children lived that nobody killed. It changes with what earlier ones
        have left, and kills are to strike everywhere."""

    def trial(self, part: float | None) -> None:
        """One child, killed after this part of a life unless it ended before."""
        self.preflight = part is not None and self.rng.random() < 0.1
        read, write = os.pipe()
        began = time.perf_counter()
        pid = forked(lambda: self.live(write))
        os.close(write)
        if part is not None:
            time.sleep(part * statistics.median(self.lives_s))
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
            self.lives_s.append(lived_s)
        else:
            self.stuck += 1

    def live(self, told: int) -> None:
        """What a child does."""
        work(self.root, self.num_elements, told, preflight=self.preflight)

    def heard(self, line: str) -> None:
        """What a child told."""
        self.acknowledged = max(self.acknowledged, int(line))

    def check(self) -> None:
        """Count it when a promise is broken."""
        self.judge(lambda: look(self.root, self.num_elements, self.acknowledged))

    def judge(self, job: Callable[[], None]) -> None:
        """Count it when a check raises."""
        if not succeeds(job):
            self.bad += 1

    def run(self, trials: int, *, until_bad: bool = False) -> None:
        """So many kills, or lives that were too short for them; or fewer, until one did harm."""
        warm(self.root)
        for _ in range(3):
            self.trial(None)
        parts = [(number + 0.5) / trials * 1.1 for number in range(trials)]
        self.rng.shuffle(parts)
        for number, part in enumerate(parts, 1):
            if until_bad and self.bad:
                return
            self.trial(part)
            if number % 10 == 0:
                self.trial(self.rng.uniform(0, 0.5))
            self.check()
            if number % self.rest_every == 0 or number == trials:
                self.rest()

    def rest(self) -> None:
        """One child that is not killed, and everything cleaned up."""
        self.trial(None)
        self.check()
        self.judge(self.clean_up)

    def clean_up(self) -> None:
        """Raises unless a life to its end leaves what it should."""
        clean_up(self.root)

    def counts(self) -> dict[str, int]:
        """What is told at the end."""
        names = ("killed", "finished", "stuck", "bad")
        return {name: getattr(self, name) for name in names} | {"last_step": self.acknowledged}


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

    def lineage(self: Catalog, *, below: int | None = None) -> Iterator[AttemptName]:
        names = [*real(self, below=below)]
        return iter(names[1:] or names)

    Catalog.lineage = lineage


MUTANTS = {"manifest_first": manifest_first, "forgets_the_newest": forgets_the_newest}


def arguments(mutants: Collection[str]) -> argparse.ArgumentParser:
    """What every storm is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=65536, help="elements of each tensor")
    parser.add_argument("--mutant", choices=sorted(mutants))
    return parser


def rage(storm: Storm, options: argparse.Namespace, mutants: dict[str, Callable[[], None]]) -> int:
    """Run a storm and print its counts; the exit status."""
    torch.set_num_threads(1)
    if options.mutant:
        mutants[options.mutant]()
    storm.run(options.trials, until_bad=bool(options.mutant))
    print(json.dumps(storm.counts()))
    return 1 if storm.bad or storm.stuck else 0


def main() -> int:
    """A storm over a root of one tier."""
    options = arguments(MUTANTS).parse_args()
    return rage(Storm(options.root, options.size, random.Random(options.seed)), options, MUTANTS)


if __name__ == "__main__":
    sys.exit(main())
