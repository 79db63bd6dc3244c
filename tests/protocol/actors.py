"""The processes, written as the protocol reads: each `yield` is one atomic operation.

A process is a chain of stages. A stage is a generator; it returns the next stage, or None at the
end. What it hands to the next stage as arguments is all that the process still remembers, so
that the explorer can tell equal situations apart from different ones.

A pause or a crash needs no word: any process may stop before any of its operations for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from .operations import (
    ALL,
    DONE,
    EXISTS,
    GONE,
    LOST,
    SILENT,
    Announce,
    Begin,
    Collect,
    CutPower,
    FindResumePoint,
    Hear,
    HearFolder,
    IsBeingDeleted,
    IsEnded,
    IsRead,
    ListAttempts,
    Operation,
    Post,
    PutAborted,
    PutClaim,
    PutClosed,
    PutEnded,
    PutFollowersMarker,
    PutLease,
    PutManifest,
    PutPin,
    PutRetired,
    PutThinned,
    PutTombstone,
    Read,
    ReadClaim,
    ReadHighestEpoch,
    RemoveComponent,
    RemoveFiles,
    RemoveFolder,
    RemoveLease,
    RemoveManifest,
    RemoveName,
    RemoveShare,
    Sync,
    TellNothingFound,
    TellPinned,
    TellRank,
    TellReading,
    TellResumed,
    TellSaver,
    WriteShare,
)
from .rules import Rules
from .world import (
    ABORTED,
    ABSENT,
    ALL_FILES,
    COMMITTED,
    CONFLICT,
    DELETED,
    FLAT,
    FOLDER,
    NO_FILES,
    OK,
    SUPERSEDED,
    UNKNOWN,
    Claim,
)

Steps = Generator[Operation, Any, Optional["Stage"]]


class Stage(NamedTuple):
    """A stage of a process that is about to begin: the generator function and its arguments."""

    function: Callable[..., Steps]
    arguments: tuple[Any, ...]


def stage(function: Callable[..., Steps], *arguments: Any) -> Stage:
    """Go on with `function(*arguments)`."""
    return Stage(function, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What a process that owns the run, or will claim it, is going to do."""

    process: str
    resumes: str = "latest"
    """"latest", or the checkpoint that a person rolls back to."""
    saves: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    """What its retention deletes after its last save, in this order."""
    deletes_early: tuple[str, ...] = ()
    """What its retention deletes between resuming and its first save."""
    replaces: str | None = None
    """The checkpoint that its first save replaces."""
    thins: str | None = None
    """The checkpoint from which it drops a component after its last save."""
    lossy: tuple[str, ...] = ()
    """Attempts whose manifest is put over a bad network."""
    is_claim_lossy: bool = False
    is_cached: bool = False
    """Whether it works on a local disk with a cache that a power cut takes."""
    closes: bool = False
    """Whether it records a clean close at the end."""
    is_put_once: bool = False
    """Whether it works on a local disk, where what was committed has nothing in flight."""
    followers: tuple[str, ...] = ()
    """The other ranks of its run, which write files of its saves."""


class Own(NamedTuple):
    """What an owner remembers. `ended`: its attempts of which nothing can be in flight."""

    rules: Rules
    writer: Writer
    epoch: int
    ended: tuple[str, ...]


# The first owner, and claiming -------------------------------------------------------------------


def first_owner(rules: Rules, writer: Writer) -> Stage:
    """s1: it has owned the run since before the beginning, and committed c0 and c1."""
    return stage(work, Own(rules, writer, 1, ("c0", "c1")), writer.saves)


def claim(rules: Rules, writer: Writer) -> Steps:
    """Claim the epoch above the highest, going on from the latest or from a named checkpoint."""
    is_rollback = writer.resumes != "latest"
    point = writer.resumes
    if not is_rollback:
        point = yield FindResumePoint(rules)
    if point is not None and writer.is_cached and rules.synced_before_relied_on:
        yield Sync(point)
    epoch = (yield ReadHighestEpoch()) + 1
    if point is None or epoch > MAX_EPOCH:
        return None
    ours = Claim(writer.process, point, is_rollback)
    reply = yield PutClaim(epoch, ours, rules.claim_if_absent, writer.is_claim_lossy)
    if reply != DONE:
        found = yield ReadClaim(epoch)
        if found is None:
            return None  # unknown: it may still arrive
        if found != ours:
            return stage(claim, rules, writer)
    return stage(confirm, rules, writer, epoch, point)


MAX_EPOCH = 4
"""A claimer gives up here, so that the races of claimers end."""


def confirm(rules: Rules, writer: Writer, epoch: int, point: str) -> Steps:
    """Look again whether the resume point stands; else claim anew with another."""
    is_rollback = writer.resumes != "latest"
    if rules.reread_after_claim:
        doomed, register = yield from reread(rules, point)
        thinned = yield Read(point, "thinned")
        if doomed or thinned or register != COMMITTED:
            return None if is_rollback else stage(claim, rules, writer)
    if rules.resolve_again_after_claim and not is_rollback:
        latest = yield FindResumePoint(rules, below=epoch)
        if latest != point:
            return stage(claim, rules, writer)
    yield TellResumed(epoch, writer.process, point, is_rollback)
    if writer.deletes_early:
        protected = point if rules.resume_point_kept else writer.deletes_early[-1]
        olds = tuple(old for old in writer.deletes_early if old != protected)
        own = Own(rules, writer, epoch, ())
        return stage(prune, own, olds, stage(work, own, writer.saves))
    return stage(work, Own(rules, writer, epoch, ()), writer.saves)


def reread(rules: Rules, attempt: str) -> Generator[Operation, Any, tuple[bool, str]]:
    """Whether a deleter has marked the checkpoint, and its register, in the order that counts."""
    if rules.reread_retired_first:
        doomed = yield IsBeingDeleted(attempt)
        register = yield Read(attempt, "register")
    else:
        register = yield Read(attempt, "register")
        doomed = yield IsBeingDeleted(attempt)
    return doomed, register


# Saving ------------------------------------------------------------------------------------------


def work(own: Own, saves: tuple[str, ...]) -> Steps:
    """The next save; after the last one, housekeeping and the end."""
    rules, writer = own.rules, own.writer
    is_first = saves == writer.saves
    if saves:
        after = stage(save, own, saves)
        if is_first and writer.replaces and not rules.commit_before_replacing:
            return stage(prune, own, (writer.replaces,), after)
        return after
    all_ended = set(writer.saves) <= set(own.ended)
    if writer.closes and (all_ended or not rules.close_only_when_ended):
        yield PutClosed(own.epoch)
    return None


def save(own: Own, saves: tuple[str, ...]) -> Steps:
    """Files, fence, manifest, fence; then tell the caller."""
    rules, attempt = own.rules, saves[0]
    is_cached = own.writer.is_cached
    followers = frozenset(own.writer.followers)
    yield Begin(
        attempt, own.epoch, is_cached, followers, FOLDER if own.writer.is_put_once else FLAT
    )
    if followers and rules.all_have_posted:
        collected = yield Collect(attempt)
        if collected != ALL:
            return stage(end_unput, own, saves, collected)
    if is_cached and rules.files_synced_first:
        yield Sync(attempt)
    if rules.fence_before_put and (yield ReadClaim(own.epoch + 1)):
        yield TellSaver(attempt, SUPERSEDED)
        if followers:
            yield Announce(attempt, ABORTED)
        return None
    reply = yield PutManifest(attempt, attempt in own.writer.lossy, is_cached)
    if is_cached and rules.synced_before_told:
        yield Sync(attempt)
    outcome = yield from find_out(rules, attempt, reply)
    if (reply, outcome, is_cached) == (LOST, UNKNOWN, False):
        again = yield PutManifest(attempt, attempt in own.writer.lossy, is_cached)
        outcome = yield from find_out(rules, attempt, again)
        if not rules.put_again_is_not_ended:
            reply = again
    if reply == DONE or not rules.unclear_put_is_not_ended:
        own = own._replace(ended=(*own.ended, attempt))
    if followers and outcome != UNKNOWN:
        yield Announce(attempt, OK if outcome == OK else ABORTED)
    if outcome == OK and rules.fence_after_put and (yield ReadClaim(own.epoch + 1)):
        outcome = SUPERSEDED
    yield TellSaver(attempt, outcome)
    if outcome == SUPERSEDED:
        return None
    if outcome != OK:
        return stage(work, own, saves[1:])
    return housekeeping(own, saves)


def end_unput(own: Own, saves: tuple[str, ...], collected: str) -> Steps:
    """A leader whose followers failed or are silent: its manifest was not put, and never will."""
    attempt = saves[0]
    if collected == SILENT:
        if own.rules.leader_marks_silence:
            yield PutAborted(attempt)
    elif (yield RemoveFolder(attempt)):
        yield RemoveName(attempt)
    yield Announce(attempt, ABORTED)
    return stage(work, own._replace(ended=(*own.ended, attempt)), saves[1:])


def find_out(rules: Rules, attempt: str, reply: str) -> Generator[Operation, Any, str]:
    """What became of a manifest's put: read back unless the reply said "done"."""
    if reply == DONE:
        return OK
    if reply == EXISTS and not rules.read_back_after_conflict:
        return CONFLICT
    if reply != EXISTS and not rules.read_back_after_lost_reply:
        return OK
    register = yield Read(attempt, "register")
    if register == ABSENT:
        return UNKNOWN
    return OK if register == COMMITTED else CONFLICT


def housekeeping(own: Own, saves: tuple[str, ...]) -> Stage:
    """After a commit: retract what was replaced; after the last one prune and thin too."""
    writer = own.writer
    newest, later = saves[0], saves[1:]
    olds: tuple[str, ...] = ()
    if saves == writer.saves and writer.replaces and own.rules.commit_before_replacing:
        olds += (writer.replaces,)
    if not later:
        olds += tuple(old for old in writer.deletes if old != newest)
    if not later and writer.thins:
        return stage(prune, own, olds, stage(thin, own, writer.thins))
    return stage(prune, own, olds, stage(work, own, later))


# Deleting, thinning ------------------------------------------------------------------------------


def prune(own: Own, olds: tuple[str, ...], after: Stage) -> Steps:
    """Delete one checkpoint after the other; stop for good when the run was taken over."""
    if not olds:
        return after
    rules, old = own.rules, olds[0]
    following = stage(prune, own, olds[1:], after)
    epoch, register = yield Read(old, "state")
    if register != COMMITTED or (epoch > own.epoch and rules.later_epochs_untouched):
        return following
    if rules.retired_before_deleting:
        yield PutRetired(old, own.epoch, not rules.mark_for_each_epoch)
    if rules.fence_after_retired and (yield ReadClaim(own.epoch + 1)):
        return None
    if rules.pins_after_retired and (yield Read(old, "pinned")):
        return following
    if rules.leases_after_retired and (yield IsRead(old)):
        return following
    if rules.tombstone:
        yield PutTombstone(old)
    else:
        yield RemoveManifest(old)
    yield RemoveFiles(old)
    if old in own.ended or own.writer.is_put_once:
        if (yield RemoveFolder(old)):
            yield RemoveName(old)
    elif not rules.tombstone_stays:
        yield RemoveManifest(old)
    return following


def thin(own: Own, attempt: str) -> Steps:
    """Drop a component of a checkpoint: say so first, then read the fence."""
    if own.rules.thinned_mark_first:
        yield PutThinned(attempt)
    if own.rules.thin_reads_fence and (yield ReadClaim(own.epoch + 1)):
        return None
    if own.rules.leases_after_thinned and (yield IsRead(attempt)):
        return stage(work, own, ())
    yield RemoveComponent(attempt)
    return stage(work, own, ())


# Followers ----------------------------------------------------------------------------------------


def follow(rules: Rules, follower: str, attempts: tuple[str, ...], owed: str | None) -> Steps:
    """A follower: write, post, hear the outcome, or find it out. `owed`: an earlier save of which
    it has not found it out, though it should."""
    if not attempts:
        return None if owed is None else stage(give_up, rules, owed, None)
    attempt = attempts[0]
    following = stage(follow, rules, follower, attempts[1:], owed)
    yield HearFolder(attempt)
    written = yield WriteShare(attempt, follower)
    is_durable = written == DONE or not rules.posted_when_durable
    posted = yield Post(attempt, follower, is_durable)
    if posted == LOST and not rules.follower_removes_nothing:
        yield RemoveShare(attempt, follower)
    heard = yield Hear(attempt)
    if heard != SILENT:
        yield TellRank(attempt, heard)
        return following
    if not rules.one_save_at_a_time and attempts[1:]:
        return stage(follow, rules, follower, attempts[1:], attempt)
    return stage(give_up, rules, attempt, following)


def give_up(rules: Rules, attempt: str, following: Stage | None) -> Steps:
    """A follower that heard nothing: abort marker if absent, register, fence."""
    reply = GONE
    if rules.follower_marks_silence:
        reply = yield PutFollowersMarker(attempt)
    register = ABORTED
    if reply in (EXISTS, LOST) or not rules.follower_marks_silence:
        register = yield Read(attempt, "register")
    if reply == LOST and register == ABSENT:
        return following  # unknown: it may still arrive
    epoch, _ = yield Read(attempt, "state")
    if register in (COMMITTED, DELETED):
        yield TellRank(attempt, OK)
    elif not (rules.follower_reads_fence and (yield ReadClaim(epoch + 1))):
        yield TellRank(attempt, ABORTED)
    return following


# gc, pins, readers -------------------------------------------------------------------------------


def collect(
    rules: Rules, attempts: tuple[str, ...], believe_deaths: bool, is_put_once: bool
) -> Steps:
    """gc: end and clear every attempt that has not committed."""
    there = yield ListAttempts()
    targets = tuple(attempt for attempt in attempts if attempt in there)
    return stage(collect_one, rules, targets, believe_deaths, is_put_once)


def collect_one(
    rules: Rules, attempts: tuple[str, ...], believe_deaths: bool, is_put_once: bool
) -> Steps:
    """gc of the first of some attempts."""
    if not attempts:
        return None
    attempt = attempts[0]
    following = stage(collect_one, rules, attempts[1:], believe_deaths, is_put_once)
    register = yield Read(attempt, "register")
    if register == COMMITTED:
        return following
    if register in (ABORTED, DELETED) or not rules.listed_when_final:
        yield PutEnded(attempt)
    if register == ABSENT and rules.abort_marker_first and (yield PutAborted(attempt)) == EXISTS:
        return following
    yield RemoveFiles(attempt)
    if (register == DELETED and is_put_once) or (yield IsEnded(attempt, believe_deaths)):
        if (yield RemoveFolder(attempt)):
            yield RemoveName(attempt)
    elif register != DELETED and not rules.marker_stays:
        yield RemoveManifest(attempt)
    return following


def pin(rules: Rules, attempt: str) -> Steps:
    """A person pins a checkpoint."""
    if (yield Read(attempt, "register")) != COMMITTED:
        return None
    yield PutPin(attempt)
    if rules.pin_reads_retired and (yield IsBeingDeleted(attempt)):
        return None
    if rules.pin_reads_manifest and (yield Read(attempt, "register")) != COMMITTED:
        return None
    yield TellPinned(attempt)
    return None


def read_leased(rules: Rules, process: str, attempt: str) -> Steps:
    """A process reads a checkpoint that must not go meanwhile: lease, marks, register, read."""
    yield PutLease(attempt, process)
    doomed = rules.lease_reads_retired and (yield IsBeingDeleted(attempt))
    doomed = doomed or (rules.lease_reads_thinned and (yield Read(attempt, "thinned")))
    if rules.lease_reads_manifest:
        doomed = doomed or (yield Read(attempt, "register")) != COMMITTED
    if not doomed:
        yield TellReading(attempt, process)
    yield RemoveLease(attempt, process)
    return None


def look(rules: Rules, seen_before: tuple[Any, ...]) -> Steps:
    """A reader: try all, newest first; start again until two rounds saw the same."""
    seen: list[Any] = []
    names = yield ListAttempts()
    for attempt in names:
        register = yield Read(attempt, "register")
        files = (yield Read(attempt, "files")) if register == COMMITTED else NO_FILES
        if files == ALL_FILES:
            return None
        seen.append((attempt, register, files))
    if not rules.reader_lists_again:
        has_changed = False
    elif rules.reader_compares_registers:
        has_changed = tuple(seen) != seen_before
    else:
        has_changed = (yield ListAttempts()) != names
    if has_changed:
        return stage(look, rules, tuple(seen))
    yield TellNothingFound()
    return None


def cut_power() -> Steps:
    """The power fails once, at any time."""
    yield CutPower()
    return None
