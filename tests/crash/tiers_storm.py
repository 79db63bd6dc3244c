"""SIGKILL storm over two tiers: kill a child that saves and sends, look, go on. Run as a script.

    python tests/crash/tiers_storm.py ROOT --trials 50 --seed 0 [--machines new] [--mutant NAME]
        [--sealed]

With `new` machines each child has an empty local tier. As `storm.py`, whose parts it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from storm import Storm, new_state, step_of, succeeds

from holdfast.care import mirror as mirror_module
from holdfast.care.verify import verify
from holdfast.engine.catalog import Catalog, Entry
from holdfast.engine.sealing import sealing
from holdfast.engine.tiers.ledger import Ledger
from holdfast.engine.tiers.tiered import Tiered
from holdfast.events import Event
from holdfast.keys import Encryption, SecretKey
from holdfast.manager import CheckpointManager
from holdfast.policy.retention import EveryNth, Last
from holdfast.store.base import Store
from holdfast.store.local import LocalStore

MILESTONE = 3
"""Steps that the remote tier keeps for good."""


SEALS = Encryption(keys=SecretKey(bytes(range(32))))


class Look:
    """How this run looks at its roots: with a key where it is sealed."""

    encryption: Encryption | None = None

    @classmethod
    def at(cls, root: Path) -> Store:
        """The store of a root."""
        return sealing(LocalStore(root), cls.encryption)


def work(local: Path, remote: Path, num_elements: int, told: int) -> None:
    """A child's life: resume, save twice and send; tells what is committed, and where."""

    def tell(event: Event) -> None:
        if event.kind == "uploaded":
            os.write(told, f"U{event.step}\n".encode())

    state = new_state(num_elements)
    rule = Last(2) | EveryNth(f"{MILESTONE}step")
    root = Tiered(local, remote, keep_local=Last(1), keep_remote=rule)
    with CheckpointManager(root, state, sinks=(tell,), encrypt=Look.encryption) as manager:
        manager.resume()
        first = step_of(state) + 1
        for step in range(first, first + 2):
            state["tree"]["step"] = step
            for tensor in state["tree"]["tensors"]:
                tensor.fill_(step)
            os.write(told, f"S{manager.save(step).wait().step}\n".encode())


def newest(root: Path) -> int:
    """The newest step of a root, all of whose checkpoints are whole."""
    store = Look.at(root)
    entries, damaged = Catalog(store).survey()
    problems = [str(verify(store, entry.folder).problems) for entry in entries]
    if damaged or any(problem != "()" for problem in problems):
        raise AssertionError(f"{root}: {damaged} {problems}")
    return max((entry.step for entry in entries), default=0)


def look(local: Path, remote: Path, saved: int, uploaded: int) -> None:
    """Nothing is torn in either tier, and nothing acknowledged is gone."""
    here, there = newest(local), newest(remote)
    if max(here, there) < saved or there < uploaded:
        raise AssertionError(f"lost: {saved} saved, {uploaded} sent; now {here} and {there}")


def clean(local: Path, remote: Path, wanted: set[int]) -> None:
    """After a life to its end each tier has what its rule keeps, all of it, and no junk."""
    here = [entry.step for entry in Catalog(Look.at(local)).checkpoints()]
    if len(here) != 1 or Ledger(LocalStore(local)).waiting():
        raise AssertionError(f"local: {os.listdir(local)}")
    entries = Catalog(Look.at(remote)).checkpoints()
    there = [entry.step for entry in entries]
    extra = [step for step in there[2:] if step % MILESTONE]
    missing = {*here, *(step for step in wanted if step % MILESTONE == 0)}.difference(there)
    junk = {*os.listdir(remote)} - {entry.folder for entry in entries} - {"writers", "latest"}
    if extra or missing or junk:
        raise AssertionError(f"remote: {there}, missing {missing}, too many {extra}, junk {junk}")


class TiersStorm(Storm):
    """As `Storm`; tells apart what was saved and what was sent."""

    def __init__(self, root: Path, num_elements: int, rng: random.Random, *, is_new: bool) -> None:
        super().__init__(root, num_elements, rng)
        self.place = root
        self.is_new = is_new
        self.lives = self.uploaded = 0
        self.wanted: set[int] = set()

    @property
    def local(self) -> Path:
        return self.place / (f"local{self.lives}" if self.is_new else "local")

    def live(self, told: int) -> None:
        work(self.local, self.place / "remote", self.num_elements, told)

    def heard(self, line: str) -> None:
        step = int(line[1:])
        if line[0] == "U" or not self.is_new:
            self.wanted.add(step)
        if line[0] == "U":
            self.uploaded = max(self.uploaded, step)
        else:
            self.acknowledged = max(self.acknowledged, step)

    def trial(self, delay_s: float | None) -> float:
        self.lives += 1
        if self.is_new:
            self.acknowledged = self.uploaded  # what only the lost machine had is lost
        return super().trial(delay_s)

    def check(self) -> None:
        local, remote = self.local, self.place / "remote"
        if not succeeds(lambda: look(local, remote, self.acknowledged, self.uploaded)):
            self.bad += 1

    def clean_up(self) -> None:
        clean(self.local, self.place / "remote", self.wanted)


def holds_nothing() -> None:
    """Mutant: local retention does not wait for the upload, of which each takes a while."""
    real_upload = mirror_module.Mirror._upload

    def upload(self: mirror_module.Mirror, entry: Entry) -> None:
        time.sleep(0.3)
        real_upload(self, entry)

    mirror_module.Mirror.holds = lambda self, entry: ""
    mirror_module.Mirror._upload = upload


MUTANTS = {"holds_nothing": holds_nothing}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=65536, help="elements of each tensor")
    parser.add_argument("--machines", choices=["same", "new"], default="same")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--sealed", action="store_true")
    options = parser.parse_args()
    Look.encryption = SEALS if options.sealed else None
    torch.set_num_threads(1)
    if options.mutant:
        MUTANTS[options.mutant]()
    rng = random.Random(options.seed)
    storm = TiersStorm(options.root, options.size, rng, is_new=options.machines == "new")
    storm.run(options.trials)
    names = ("killed", "finished", "stuck", "bad", "uploaded")
    print(json.dumps({name: getattr(storm, name) for name in names}))
    return 1 if storm.bad or storm.stuck else 0


if __name__ == "__main__":
    sys.exit(main())
