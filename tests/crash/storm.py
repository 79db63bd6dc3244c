"""SIGKILL storm: fork a saving child from a warm parent, kill it, look, go on. Run as a script.

    python tests/crash/storm.py ROOT --kills 50 --seed 0 [--mutant NAME] [--size 65536]

The moment of the kill is swept evenly, in one of four trials over the life of a child, that is
over claim, gc, resume, two saves and their retention, in the others over what comes after the
claim. One in ten checks the store, too; every tenth trial kills the recovering child as well. It
goes on until so many children were killed: some end before. The parent stays single-threaded:
whatever uses threads, also the checks, runs in a forked child.

ROOT is a folder, or the URL of a place in an object store, whose credentials are in the
environment. Prints one JSON line, with the last that the killed had told of themselves (`struck`);
exit status 1 when a promise was broken. `test_storm.py` and
`tests/stores/test_storm.py` run it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from holdfast.events import Event
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Manifest
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.root import commit as commit_module
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.history import read_history
from holdfast.saving import save as save_module
from holdfast.store import open_store
from holdfast.store.base import Store

NUM_TENSORS = 8
SAVES_A_CHILD = 2
GOLDEN = 0.6180339887498949
"""Steps of this size round a circle are spread evenly, however many they are."""


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


def tell(told: int, word: str, step: int | None = None) -> None:
    """Have the parent read this, also when it kills us at once."""
    os.write(told, f"{word} {step or 0}\n".encode())


def tell_event(told: int, event: Event) -> None:
    """A sink of events: `committed`, or `remote-uploaded`, and the step."""
    tier = "remote-" if event.fields.get("tier") == "remote" else ""
    tell(told, tier + event.kind, event.step)


def live_on(manager: CheckpointManager, state: dict[str, Any], told: int) -> None:
    """Resume, then save twice; tells each acknowledged step."""
    manager.resume()
    first = step_of(state) + 1
    for step in range(first, first + SAVES_A_CHILD):
        advance(state, step)
        metrics = {"loss": float(step), "half": step / 2}
        tell(told, "saved", manager.save(step, metrics=metrics).wait().step)


def work(root: str, num_elements: int, told: int, *, preflight: bool) -> None:
    """A child's life."""
    state = new_state(num_elements)
    sinks = (functools.partial(tell_event, told),)
    with CheckpointManager(root, state, keep=Last(2), sinks=sinks, preflight=preflight) as manager:
        live_on(manager, state, told)


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


def look(
    root: str | Path,
    state: dict[str, Any],
    acknowledged: int,
    *,
    step_of: Callable[[dict[str, Any]], int] = step_of,
) -> None:
    """Every committed checkpoint is whole, and nothing acknowledged is gone. `state` is a new one,
    into which the newest is loaded."""
    store = open_store(root)
    entries = survey(store)
    expect_whole(store, entries[1:])
    if entries:
        with CheckpointManager(store, state, sinks=()) as manager:
            found = manager.load()  # which checks its bytes
        if found.folder != entries[0].folder:
            raise AssertionError(f"{entries[0].folder} is not what loads: {found.folder} is")
    if step_of(state) < acknowledged:
        raise AssertionError(f"lost: step {acknowledged} was acknowledged, {step_of(state)} loads")


def expect_history(store: Store, acknowledged: int) -> None:
    """Every metric up to the acknowledged step is in the history, and no segment is torn."""
    history = read_history(store)
    if history.unread:
        raise AssertionError(f"{store.url}: {history.unread}")
    expected = list(range(1, acknowledged + 1))
    for name, factor in (("loss", 1.0), ("half", 0.5)) if expected else ():
        curve = history.curves[name]
        steps, values = [*curve.steps[:acknowledged]], [*curve.values[:acknowledged]]
        if (steps, values) != (expected, [factor * step for step in expected]):
            raise AssertionError(f"{store.url}: {name} up to {acknowledged}: {steps}, {values}")


def clean_up(root: str | Path, *, most: int = 3) -> None:
    """After gc nothing is left but what is committed, at most so many."""
    store = open_store(root)
    collect_garbage(store)
    expect_no_junk(store, str(root))
    if not 1 <= len(survey(store)) <= most:
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
    collect_garbage(store, dead_epochs=range(1, Catalog(store).highest_epoch() + 1))
    _expect_objects(store, files)


def _expect_bare_folder(root: Path, committed: dict[str, Manifest]) -> None:
    junk = {name for name in os.listdir(root) if layout.parse_ended(name) is None} - set(committed)
    junk -= {layout.WRITERS, layout.READERS, layout.HISTORY, layout.LATEST}
    if (root / layout.READERS).exists():  # whoever has loaded something has made it
        junk |= set(os.listdir(root / layout.READERS))
    for folder, manifest in committed.items():
        junk |= set(os.listdir(root / folder)) - set(manifest.files) - {layout.MANIFEST}
    for folder in filter(Path.exists, (root / layout.WRITERS, root / layout.HISTORY)):
        junk |= {name for name in os.listdir(folder) if name.startswith(".")}
    if junk:
        raise AssertionError(f"{root}: junk: {sorted(junk)}")


def _expect_objects(store: Store, expected: set[str]) -> None:
    found = {info.key for info in store.list()}
    kept = (f"{layout.WRITERS}/", f"{layout.HISTORY}/")
    junk = {key for key in found - expected if not key.startswith(kept)}
    junk = {key for key in junk - {layout.LATEST} if layout.parse_ended(key) is None}
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


def modules_of(job: Callable[[], None]) -> set[str]:
    """Names of the modules that a child imports which does `job`."""
    read, write = os.pipe()
    before = set(sys.modules)

    def do() -> None:
        job()
        os.write(write, " ".join(set(sys.modules) - before).encode())

    pid = forked(do)
    os.close(write)
    with os.fdopen(read) as told:
        names = told.read().split()
    os.waitpid(pid, 0)
    return set(names)


def warm(url: str, live: Callable[[], None]) -> None:
    """Do once what every child that lives so would do again: kills are to strike its work.

    Imports, of which object stores have many, and megabytes of JSON. Starts no thread.
    """
    for name in sorted(modules_of(live)):
        with suppress(ImportError):
            importlib.import_module(name)
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
        self.struck = Counter[str]()
        self.lives_s = deque([1.0], maxlen=3)
        """How long the last children lived that nobody killed. It changes with what earlier ones
        have left, and kills are to strike everywhere."""
        self.works_s = deque([1.0], maxlen=3)
        """How long they lived after they had claimed the run."""

    def trial(self, part: float | None, *, claimed: bool = False) -> None:
        """One child, killed after this part of a life unless it ended before.

        With `claimed` it is the part of what comes after the claim.
        """
        self.preflight = part is not None and self.rng.random() < 0.1
        read, write = os.pipe()
        began = time.perf_counter()
        pid = forked(lambda: self.live(write))
        os.close(write)
        words = ["began"]
        with os.fdopen(read) as told:
            if part is None or claimed:
                self.listen(told, words, until="claimed")
            worked = time.perf_counter()
            if part is not None:
                time.sleep(part * statistics.median(self.works_s if claimed else self.lives_s))
                os.kill(pid, signal.SIGKILL)
            self.listen(told, words)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == -signal.SIGKILL:
            self.killed += 1
            self.struck[words[-1]] += 1
        elif status == 0:
            self.finished += 1
        else:
            self.stuck += 1
        if part is None and status == 0:
            self.lives_s.append(time.perf_counter() - began)
            self.works_s.append(time.perf_counter() - worked)

    def listen(self, told: TextIO, words: list[str], until: str = "") -> None:
        """Hear what a child tells until it ends, or has told this word."""
        for line in told:
            word, step = line.split()
            words.append(word)
            self.heard(word, int(step))
            if word == until:
                return

    def live(self, told: int) -> None:
        """What a child does."""
        work(self.root, self.num_elements, told, preflight=self.preflight)

    def heard(self, word: str, step: int) -> None:
        """What a child told."""
        if word == "saved":
            self.acknowledged = max(self.acknowledged, step)

    def check(self) -> None:
        """Count it when a promise is broken."""
        state = new_state(self.num_elements)
        self.judge(lambda: look(self.root, state, self.acknowledged))
        self.judge(lambda: expect_history(open_store(self.root), self.acknowledged))

    def judge(self, job: Callable[[], None]) -> None:
        """Count it when a check raises."""
        if not succeeds(job):
            self.bad += 1

    def run(self, kills: int, *, until_bad: bool = False) -> None:
        """Trials until so many children were killed; or until one did harm."""
        with open(os.devnull, "wb") as nobody:
            warm(self.root, lambda: self.live(nobody.fileno()))
        for _ in range(3):
            self.trial(None)
        place = self.rng.random()
        for number in itertools.count(1):
            place = (place + GOLDEN) % 1
            self.trial(place * 1.1, claimed=number % 4 != 0)
            if number % 10 == 0:
                self.trial(self.rng.uniform(0, 0.5))
            self.check()
            if until_bad and self.bad:
                return
            # Children that always end too early, or not well, would keep it going for ever.
            if self.killed >= kills or number >= 3 * kills + 10:
                break
            if number % self.rest_every == 0:
                self.rest()
        self.rest()

    def rest(self) -> None:
        """One child that is not killed, and everything cleaned up."""
        self.trial(None)
        self.check()
        self.judge(self.clean_up)

    def clean_up(self) -> None:
        """Raises unless a life to its end leaves what it should."""
        clean_up(self.root)

    def counts(self) -> dict[str, Any]:
        """What is told at the end."""
        names = ("killed", "finished", "stuck", "bad", "struck")
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
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=65536, help="elements of each tensor")
    parser.add_argument("--mutant", choices=sorted(mutants))
    return parser


def rage(storm: Storm, options: argparse.Namespace, mutants: dict[str, Callable[[], None]]) -> int:
    """Run a storm and print its counts; the exit status."""
    torch.set_num_threads(1)
    if options.mutant:
        mutants[options.mutant]()
    storm.run(options.kills, until_bad=bool(options.mutant))
    print(json.dumps(storm.counts()))
    return 1 if storm.bad or storm.stuck else 0


def main() -> int:
    """A storm over a root of one tier."""
    options = arguments(MUTANTS).parse_args()
    return rage(Storm(options.root, options.size, random.Random(options.seed)), options, MUTANTS)


if __name__ == "__main__":
    sys.exit(main())
