"""What an actor does to the root in one atomic step, with every outcome that it may have.

`run(world)` yields (reply, world afterwards) for each possible outcome. Everything between two
operations is an actor's own business and takes any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, product
from typing import Any, NamedTuple, Protocol

from .lineage import head
from .rules import Rules
from .world import (
    ABORTED,
    ABSENT,
    ALL_FILES,
    ATTEMPTS,
    COMMITTED,
    DELETED,
    FLAT,
    FOLDER,
    NO_FILES,
    NOTHING,
    NOWHERE,
    OK,
    THIN_FILES,
    Anchor,
    Claim,
    Folder,
    World,
)

DONE, EXISTS, LOST, GONE = "done", "exists", "lost", "gone"
"""Replies to a put: it took effect; the key is taken; no reply came; its folder was removed."""
ALL, FAILED, SILENT = "all", "failed", "silent"
"""What came of the followers: all posts; a failure; not everything by the deadline."""

Outcomes = Iterator[tuple[Any, World]]


class Operation(Protocol):
    """One step of an actor."""

    def run(self, world: World) -> Outcomes: ...


# Reads ------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """One field of an attempt's folder: a point read."""

    attempt: str
    field: str

    def run(self, world: World) -> Outcomes:
        yield getattr(world.folder(self.attempt), self.field), world


class IsBeingDeleted(NamedTuple):
    """Whether a deleter has marked the checkpoint, and is not known to be gone."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield world.is_being_deleted(self.attempt), world


class IsRead(NamedTuple):
    """Whether somebody who is not known to be dead has a lease on the checkpoint."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield world.is_read(self.attempt), world


class ReadClaim(NamedTuple):
    """The claim of an epoch, or None: the fence, and the reading back of a claim."""

    epoch: int

    def run(self, world: World) -> Outcomes:
        yield world.claims[self.epoch - 1] if len(world.claims) >= self.epoch else None, world


class ReadHighestEpoch(NamedTuple):
    """The number of the newest claim."""

    def run(self, world: World) -> Outcomes:
        yield len(world.claims), world


class ListAttempts(NamedTuple):
    """Names of all folders in which there is anything, newest first."""

    def run(self, world: World) -> Outcomes:
        there = [name for name in ATTEMPTS if _is_listed(world.folder(name))]
        yield tuple(sorted(there, key=world.order, reverse=True)), world


def _is_listed(folder: Folder) -> bool:
    return folder.register != ABSENT or folder.files != NO_FILES


class FindResumePoint(NamedTuple):
    """The latest usable checkpoint of the lineage (below the caller's own claim)."""

    rules: Rules
    below: int | None = None

    def run(self, world: World) -> Outcomes:
        yield head(world, self.rules, below=self.below, skips_marked=True), world


class IsEnded(NamedTuple):
    """Whether the epoch of an attempt closed cleanly or its process is known to be dead."""

    attempt: str
    believe_deaths: bool

    def run(self, world: World) -> Outcomes:
        epoch = world.folder(self.attempt).epoch
        if self.believe_deaths:
            yield epoch > 0 and world.has_ended(epoch), world
        else:
            yield epoch in world.closed, world


# Writes of a saver ------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Make an attempt's folder and put its files into it."""

    attempt: str
    epoch: int
    is_cached: bool
    """Whether a power cut may still take the files."""
    followers: frozenset[str] = frozenset()
    place: str = FLAT

    def run(self, world: World) -> Outcomes:
        late = world.owner_since(self.epoch)
        changes: dict[str, object] = {
            "epoch": self.epoch,
            "files": ALL_FILES,
            "begun_late": late,
        }
        if self.followers:
            changes |= {"ranks": self.followers, "place": self.place}
        if self.is_cached:
            changes["unsynced"] = frozenset({"files"})
        yield DONE, world.having(self.attempt, **changes)


class PutManifest(NamedTuple):
    """The commit: put if absent. With `is_lossy` every trouble of a network may befall it."""

    attempt: str
    is_lossy: bool
    is_cached: bool

    def run(self, world: World) -> Outcomes:
        if world.folder(self.attempt).register != ABSENT:
            yield EXISTS, world
            if self.is_lossy:
                yield LOST, world
            return
        applied = committed(world, self.attempt)
        if self.is_cached:
            unsynced = world.folder(self.attempt).unsynced | {"manifest"}
            applied = applied.having(self.attempt, unsynced=unsynced)
        yield DONE, applied
        if self.is_lossy:
            yield EXISTS, applied  # the reply was lost and the client asked again by itself
            for after in (world, applied):
                yield LOST, after
                yield LOST, after.having(self.attempt, in_flight=True)


def committed(world: World, attempt: str) -> World:
    """The world in which the attempt's manifest has just appeared."""
    late = world.owner_since(world.folder(attempt).epoch)
    return world.having(attempt, register=COMMITTED, appeared=True, put_late=late)


class Sync(NamedTuple):
    """Put what is cached of a folder on stable storage."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, unsynced=frozenset())


class CutPower(NamedTuple):
    """The power fails: of what is not synced, any part may be gone."""

    def run(self, world: World) -> Outcomes:
        cached = [
            (name, part)
            for name, folder in zip(ATTEMPTS, world.folders, strict=True)
            for part in sorted(folder.unsynced)
        ]
        for lost in product((False, True), repeat=len(cached)):
            after = world._replace(is_cut=True)
            for name, part in compress(cached, lost):
                gone = {"files": NO_FILES} if part == "files" else {"register": ABSENT}
                after = after.having(name, **gone)
            yield DONE, after


class TellSaver(NamedTuple):
    """Tell the caller of a save how it ended."""

    attempt: str
    outcome: str

    def run(self, world: World) -> Outcomes:
        told = world.having(self.attempt, told=self.outcome)
        epoch = world.folder(self.attempt).epoch
        if self.outcome == OK and epoch >= world.anchor.epoch:
            told = told._replace(anchor=Anchor(self.attempt, epoch, is_rollback=False))
        yield DONE, told


class PutClosed(NamedTuple):
    """Record that an epoch ended and that nothing of it is in flight."""

    epoch: int

    def run(self, world: World) -> Outcomes:
        yield DONE, world._replace(closed=world.closed | {self.epoch})


# Writes of a claimer ----------------------------------------------------------------------------


class PutClaim(NamedTuple):
    """Claim an epoch, if absent."""

    epoch: int
    claim: Claim
    if_absent: bool
    is_lossy: bool

    def run(self, world: World) -> Outcomes:
        if len(world.claims) < self.epoch:
            applied = world._replace(claims=(*world.claims, self.claim))
        elif self.if_absent:
            yield EXISTS, world
            return
        else:
            number = self.epoch - 1
            claims = (*world.claims[:number], self.claim, *world.claims[self.epoch :])
            applied = world._replace(claims=claims)
        yield DONE, applied
        if self.is_lossy:
            yield EXISTS, applied
            yield LOST, applied
            yield LOST, world


class TellResumed(NamedTuple):
    """Tell a process that it owns the run and goes on from a checkpoint."""

    epoch: int
    process: str
    attempt: str
    is_rollback: bool

    def run(self, world: World) -> Outcomes:
        alarms = world.alarms
        if any(epoch == self.epoch for epoch, _ in world.owners):
            alarms |= {"V11 two processes were told that they own one epoch"}
        if self.epoch > world.anchor.epoch and not self.is_rollback and _is_behind(world, self):
            alarms |= {"V10 a resume of the latest goes on from before an acknowledged checkpoint"}
        told = world._replace(owners=(*world.owners, (self.epoch, self.process)), alarms=alarms)
        if self.epoch >= world.anchor.epoch:
            told = told._replace(anchor=Anchor(self.attempt, self.epoch, self.is_rollback))
        yield DONE, told


def _is_behind(world: World, resumed: TellResumed) -> bool:
    """Whether something newer was acknowledged, still stands, and nobody has rolled back since."""
    told = world.folder(world.anchor.attempt)
    if world.is_being_deleted(world.anchor.attempt) or told.thinned:
        return False
    since = world.claims[world.anchor.epoch : resumed.epoch]
    was_rolled_back = any(claim.is_rollback for claim in since)
    return not was_rolled_back and world.order(resumed.attempt) < world.order(world.anchor.attempt)


# Writes of those who delete, pin and thin --------------------------------------------------------


class PutRetired(NamedTuple):
    """Mark a checkpoint as about to be deleted by this epoch."""

    attempt: str
    epoch: int
    is_shared: bool
    """Whether all epochs share one mark, which the first one wins."""

    def run(self, world: World) -> Outcomes:
        marks = world.folder(self.attempt).retired
        if not (self.is_shared and marks):
            marks |= {self.epoch}
        yield DONE, world.having(self.attempt, retired=marks)


class PutTombstone(NamedTuple):
    """Replace the manifest by a tombstone."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, register=DELETED, finished=True)


class PutAborted(NamedTuple):
    """Put the aborted marker, if absent."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        if world.folder(self.attempt).register != ABSENT:
            yield EXISTS, world
        else:
            yield DONE, world.having(self.attempt, register=ABORTED, finished=True)


class RemoveManifest(NamedTuple):
    """Remove the register, as if it had never been."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, register=ABSENT, finished=True)


class RemoveFiles(NamedTuple):
    """Remove every file of the folder but the register and the sidecars."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, files=NO_FILES, shares=frozenset())


class RemoveFolder(NamedTuple):
    """Remove all in the folder: files, sidecars and register. Whether its name is still there."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        bare = {"retired": frozenset(), "thinned": False, "pinned": False, "shares": frozenset()}
        gone = world.having(self.attempt, register=ABSENT, files=NO_FILES, finished=True, **bare)
        if world.folder(self.attempt).in_flight:
            gone = gone._replace(alarms=gone.alarms | {"V9 removed whole with a put in flight"})
        yield world.folder(self.attempt).place == FOLDER, gone


class RemoveName(NamedTuple):
    """Remove the name of an emptied folder. A folder into which something was put stays."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        folder = world.folder(self.attempt)
        is_empty = folder.register == ABSENT and not folder.shares
        yield DONE, world.having(self.attempt, place=NOWHERE) if is_empty else world


class PutEnded(NamedTuple):
    """Name an attempt in the record of those that have ended."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, listed=True)


class PutPin(NamedTuple):
    """Put a sidecar that pins a checkpoint."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, pinned=True)


class PutLease(NamedTuple):
    """Say in `readers/` that a process reads a checkpoint."""

    attempt: str
    process: str

    def run(self, world: World) -> Outcomes:
        leases = world.folder(self.attempt).leases | {self.process}
        yield DONE, world.having(self.attempt, leases=leases)


class RemoveLease(NamedTuple):
    """Take it back: from now on the process reads nothing of it."""

    attempt: str
    process: str

    def run(self, world: World) -> Outcomes:
        folder = world.folder(self.attempt)
        ours = {self.process}
        yield (
            DONE,
            world.having(self.attempt, leases=folder.leases - ours, read_by=folder.read_by - ours),
        )


class TellReading(NamedTuple):
    """Tell a process that the checkpoint stays while it reads."""

    attempt: str
    process: str

    def run(self, world: World) -> Outcomes:
        read_by = world.folder(self.attempt).read_by | {self.process}
        yield DONE, world.having(self.attempt, read_by=read_by)


class TellPinned(NamedTuple):
    """Tell a person that the pin holds."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, pin_told=True)


class PutThinned(NamedTuple):
    """Put the sidecar that says which component was dropped."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        yield DONE, world.having(self.attempt, thinned=True)


class RemoveComponent(NamedTuple):
    """Remove the files of one component."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        files = world.folder(self.attempt).files
        yield DONE, world.having(self.attempt, files=THIN_FILES if files == ALL_FILES else files)


# Ranks --------------------------------------------------------------------------------------------


class Collect(NamedTuple):
    """The leader waits for the posts of all followers, up to a deadline."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        folder = world.folder(self.attempt)
        if {name for name, is_durable in folder.posts if is_durable} == folder.ranks:
            yield ALL, world
        if any(not is_durable for _, is_durable in folder.posts):
            yield FAILED, world
        yield SILENT, world


class Announce(NamedTuple):
    """The leader knows what became of the save, and tells its followers."""

    attempt: str
    outcome: str

    def run(self, world: World) -> Outcomes:
        learned = world.folder(self.attempt).learned | {self.outcome}
        yield DONE, world.having(self.attempt, announced=self.outcome, learned=learned)


class HearFolder(NamedTuple):
    """A follower waits until the leader has made the folder."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        if world.folder(self.attempt).epoch:
            yield DONE, world


class WriteShare(NamedTuple):
    """Write the files of a follower. The write may hang, and land at any later time."""

    attempt: str
    follower: str

    def run(self, world: World) -> Outcomes:
        folder = world.folder(self.attempt)
        ours = {self.follower}
        if folder.takes_files:
            applied = world.having(self.attempt, shares=folder.shares | ours)
            yield DONE, applied
            if folder.place == FLAT:  # a client that sends twice leaves a copy under way
                yield DONE, applied.having(self.attempt, hanging=folder.hanging | ours)
        else:
            yield GONE, world
        yield LOST, world.having(self.attempt, hanging=folder.hanging | ours)


class RemoveShare(NamedTuple):
    """Remove the files of a follower."""

    attempt: str
    follower: str

    def run(self, world: World) -> Outcomes:
        shares = world.folder(self.attempt).shares - {self.follower}
        yield DONE, world.having(self.attempt, shares=shares)


class Post(NamedTuple):
    """Tell the leader that the files are durable, or that they are not. It may arrive though the
    follower is told that it did not."""

    attempt: str
    follower: str
    is_durable: bool

    def run(self, world: World) -> Outcomes:
        posts = world.folder(self.attempt).posts | {(self.follower, self.is_durable)}
        yield DONE, world.having(self.attempt, posts=posts)
        yield LOST, world.having(self.attempt, posts=posts)


class Hear(NamedTuple):
    """A follower waits for the outcome, up to a deadline."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        announced = world.folder(self.attempt).announced
        if announced != NOTHING:
            yield announced, world
        yield SILENT, world


class PutFollowersMarker(NamedTuple):
    """A follower puts the abort marker, if absent. Where requests get lost it may land later."""

    attempt: str

    def run(self, world: World) -> Outcomes:
        folder = world.folder(self.attempt)
        if not folder.takes_files:
            yield GONE, world
            return
        if folder.register != ABSENT:
            yield EXISTS, world
        else:
            yield DONE, world.having(self.attempt, register=ABORTED, finished=True)
        if folder.place == FLAT:
            yield LOST, world.having(self.attempt, marker_in_flight=True)


class TellRank(NamedTuple):
    """Tell the caller of a follower's save how it ended: OK or ABORTED."""

    attempt: str
    outcome: str

    def run(self, world: World) -> Outcomes:
        learned = world.folder(self.attempt).learned | {self.outcome}
        yield DONE, world.having(self.attempt, learned=learned)


# What a reader says -----------------------------------------------------------------------------


class TellNothingFound(NamedTuple):
    """Tell a person that there is no checkpoint."""

    def run(self, world: World) -> Outcomes:
        alarms = world.alarms
        if any(folder.is_whole for folder in world.folders):
            alarms |= {"V7 a reader finds no checkpoint although one stands"}
        yield DONE, world._replace(alarms=alarms)
