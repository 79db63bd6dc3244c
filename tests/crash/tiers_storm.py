"""SIGKILL storm over two tiers: kill a child that saves and sends, look, go on. Run as a script.

    python tests/crash/tiers_storm.py ROOT [--local FOLDER] [--machines new] [--mutant NAME]
        [--sealed] ...

ROOT is the remote tier: a folder or a URL. With `new` machines each child has an empty local tier
in `--local`. As `storm.py`, whose parts it takes; the kills strike uploads and the retention of
the remote tier, too. `test_tiers.py` and `tests/stores/test_storm.py` run it.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from storm import (
    Storm,
    arguments,
    expect_no_junk,
    expect_whole,
    live_on,
    new_state,
    rage,
    survey,
    tell_event,
)

from holdfast.encryption.store import sealing
from holdfast.keys import Encryption, SecretKey
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import EveryNth, Last
from holdfast.replication.mirror import Mirror
from holdfast.replication.queue import UploadQueue
from holdfast.root.catalog import Entry
from holdfast.root.upload_records import Ledger
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.local import LocalStore

MILESTONE = 5
"""Steps that the remote tier keeps for good."""
NUM_LATEST = 2
"""Checkpoints that it keeps beside them."""


SEALS = Encryption(keys=SecretKey(bytes(range(32))))


class Look:
    """How this run looks at its roots: with a key where it is sealed."""

    encryption: Encryption | None = None

    @classmethod
    def at(cls, root: str | Path) -> Store:
        """The store of a root."""
        return sealing(open_store(root), cls.encryption)


def work(local: Path, remote: str, num_elements: int, told: int, *, preflight: bool) -> None:
    """A child's life: it resumes, saves twice and sends; tells what is committed, and where."""
    state = new_state(num_elements)
    rule = Last(NUM_LATEST) | EveryNth(f"{MILESTONE}step")
    root = Tiered(local, remote, keep_local=Last(1), keep_remote=rule)
    sinks = (functools.partial(tell_event, told),)
    with CheckpointManager(
        root, state, sinks=sinks, preflight=preflight, encrypt=Look.encryption
    ) as manager:
        live_on(manager, state, told)


def look(local: Path, remote: str, saved: int, uploaded: int) -> None:
    """Nothing is torn in either tier, and nothing acknowledged is gone."""
    here, there = Look.at(local), Look.at(remote)
    in_local, in_remote = survey(here), survey(there)
    expect_whole(here, in_local)
    # Milestones are looked at when all is cleaned up: there are ever more of them.
    expect_whole(there, in_remote[: NUM_LATEST + 2])
    newest = max((entry.step for entry in in_remote), default=0)
    if max(newest, *(entry.step for entry in in_local), 0) < saved or newest < uploaded:
        raise AssertionError(f"lost: {saved} saved, {uploaded} sent; {newest} is there")
    expect_ledger_right(LocalStore(local), in_local, in_remote)


def expect_ledger_right(
    local: Store, in_local: tuple[Entry, ...], in_remote: tuple[Entry, ...]
) -> None:
    """What is noted as sent is there, unless the remote rule does not keep it any more."""
    kept_from = in_remote[NUM_LATEST - 1].step if len(in_remote) >= NUM_LATEST else 0
    notes = Ledger(local).read_notes()
    sent = {name for name, note in notes.items() if note is not None and note.state == "uploaded"}
    gone = sent - {entry.folder for entry in in_remote}
    lost = [
        entry.folder
        for entry in in_local
        if entry.folder in gone and (entry.step % MILESTONE == 0 or entry.step > kept_from)
    ]
    if lost:
        raise AssertionError(f"noted as sent, and not there: {lost}")


def clean(local: Path, remote: str, wanted: set[int]) -> None:
    """After a life to its end each tier has what its rule keeps, all of it, and no junk."""
    in_local = survey(Look.at(local))
    if len(in_local) != 1 or Ledger(LocalStore(local)).waiting():
        raise AssertionError(f"local: {os.listdir(local)}")
    store = Look.at(remote)
    in_remote = survey(store)
    expect_whole(store, in_remote)
    there = [entry.step for entry in in_remote]
    # Where a multiple was lost with its machine, the first step after it is the milestone.
    firsts = {step // MILESTONE: step for step in there if step >= MILESTONE}
    extra = {*there[NUM_LATEST:]} - {*firsts.values()}
    multiples = {step for step in wanted if step % MILESTONE == 0}
    missing = {in_local[0].step, *multiples}.difference(there)
    if extra or missing:
        raise AssertionError(f"remote: {there}, missing {missing}, too many {extra}")
    if Look.encryption is None:
        expect_no_junk(store, remote)
    elif (
        junk := {*os.listdir(remote)}
        - {e.folder for e in in_remote}
        - {"writers", "history", "latest"}
    ):
        raise AssertionError(f"remote: junk {junk}")


class TiersStorm(Storm):
    """As `Storm`, over the remote tier; tells apart what was saved and what was sent."""

    def __init__(
        self, root: str, local: Path, num_elements: int, rng: random.Random, *, is_new: bool
    ) -> None:
        super().__init__(root, num_elements, rng)
        self.place = local
        self.is_new = is_new
        self.number = self.uploaded = 0
        self.wanted: set[int] = set()

    @property
    def local(self) -> Path:
        """The local tier of this child."""
        return self.place / (f"{self.number}" if self.is_new else "local")

    def live(self, told: int) -> None:
        """See `work`."""
        work(self.local, self.root, self.num_elements, told, preflight=self.preflight)

    def heard(self, word: str, step: int) -> None:
        """What a child told."""
        if word == "remote-uploaded" or (word == "saved" and not self.is_new):
            self.wanted.add(step)
        if word == "remote-uploaded":
            self.uploaded = max(self.uploaded, step)
        super().heard(word, step)

    def trial(self, part: float | None, *, claimed: bool = False) -> None:
        """One child, on the same machine or on a new one."""
        self.number += 1
        if self.is_new:
            self.acknowledged = self.uploaded  # what only the lost machine had is lost
        super().trial(part, claimed=claimed)

    def check(self) -> None:
        """Count it when a promise is broken."""
        self.judge(lambda: look(self.local, self.root, self.acknowledged, self.uploaded))

    def clean_up(self) -> None:
        """Raises unless a life to its end leaves what it should."""
        clean(self.local, self.root, self.wanted)

    def counts(self) -> dict[str, Any]:
        """What is told at the end."""
        return {**super().counts(), "uploaded": self.uploaded}


def holds_nothing() -> None:
    """Mutant: local retention does not wait for the upload, of which each takes a while."""
    real_upload = Mirror._upload

    def upload(self: Mirror, entry: Entry) -> None:
        time.sleep(0.3)
        real_upload(self, entry)

    UploadQueue.holds = lambda self, entry: ""
    Mirror._upload = upload


MUTANTS = {"holds_nothing": holds_nothing}


def main() -> int:
    """A storm over a run in two tiers."""
    parser = arguments(MUTANTS)
    parser.add_argument("--local", type=Path, required=True, help="where local tiers are made")
    parser.add_argument("--machines", choices=["same", "new"], default="same")
    parser.add_argument("--sealed", action="store_true", help="both tiers, which are folders")
    options = parser.parse_args()
    Look.encryption = SEALS if options.sealed else None
    rng = random.Random(options.seed)
    is_new = options.machines == "new"
    storm = TiersStorm(options.root, options.local, options.size, rng, is_new=is_new)
    return rage(storm, options, MUTANTS)


if __name__ == "__main__":
    sys.exit(main())
