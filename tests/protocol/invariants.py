"""What must hold in every world, as sentences. One function each; `violations` asks them all."""

from __future__ import annotations

from collections.abc import Iterator

from .lineage import head
from .rules import Rules
from .world import (
    ABORTED,
    ABSENT,
    ALL_FILES,
    ATTEMPTS,
    COMMITTED,
    CONFLICT,
    DELETED,
    NO_FILES,
    OK,
    THIN_FILES,
    Folder,
    World,
)


def violations(world: World, rules: Rules, *, is_strict: bool) -> tuple[str, ...]:
    """Every invariant that this world breaks."""
    found = list(world.alarms)
    for folder in world.folders:
        found += _broken_in_folder(folder)
        if not folder.is_whole and not folder.read_by <= world.dead:
            found.append("V13 a checkpoint lost files while a process read it under a lease")
    found += _broken_records(world)
    found += _broken_ownership(world)
    found += _broken_standing(world, rules, is_strict)
    return tuple(found)


def _broken_in_folder(folder: Folder) -> Iterator[str]:
    if folder.register == COMMITTED:
        if folder.files == NO_FILES or (folder.files == THIN_FILES and not folder.thinned):
            yield "V1 a committed manifest lists files that are gone"
        if not folder.has_shares:
            yield "V1 a committed manifest lists files of a follower that are not there"
        if folder.listed:
            yield "V15 an attempt is committed that the record of ended ones names"
        if folder.finished:
            yield "V2 an attempt that was aborted or deleted is committed"
        if folder.begun_late:
            yield "V12 a save that began after the run was taken over has committed"
    if folder.told == OK:
        if not folder.appeared:
            yield "V3 a saver was told OK though nothing was committed"
        if folder.put_late:
            yield "V3 a saver was told OK though the run had been taken over before the commit"
    if folder.told == CONFLICT and folder.register == COMMITTED:
        yield "V3 a saver was told of a conflict though its own commit stands"
    if {OK, ABORTED} <= folder.learned:
        yield "V16 two ranks were told different outcomes of one save"
    if OK in folder.learned and not folder.appeared:
        yield "V16 a rank was told of a commit though nothing was committed"
    if folder.pin_told and folder.register != COMMITTED:
        yield "V8 a checkpoint is gone whose pin was acknowledged"


def _broken_records(world: World) -> Iterator[str]:
    """V14: what shows that a manifest was lost shows it of no attempt that never had one."""
    named = {claim.resumes_from for claim in world.claims}
    for attempt, folder in zip(ATTEMPTS, world.folders, strict=True):
        never = folder.register == ABSENT and not folder.appeared
        is_shown = attempt in named or folder.epoch in world.closed
        if never and folder.files == ALL_FILES and folder.has_shares and is_shown:
            yield "V14 records show a commit of an attempt that never committed"


def _broken_ownership(world: World) -> Iterator[str]:
    anchor = world.anchor
    has_committed = any(
        folder.epoch == anchor.epoch and folder.register in (COMMITTED, DELETED)
        for folder in world.folders
    )
    is_owner = anchor.epoch > 1 and len(world.claims) == anchor.epoch
    if is_owner and not has_committed and not world.folder(anchor.attempt).is_whole:
        yield "V5 what the owner resumed from is gone or thinned before it committed"


def _broken_standing(world: World, rules: Rules, is_strict: bool) -> Iterator[str]:
    """V4, V6: the run stands where people were last told, or at something newer.

    What the next claimer would choose must be right. One excuse, unless strict:
    a stale deleter has marked a resume point after its claimer looked, and cannot delete it.
    """
    chosen = _is_allowed(world, head(world, rules, skips_marked=True))
    is_resume_point = world.folder(world.anchor.attempt).epoch < world.anchor.epoch
    is_excused = is_resume_point and not is_strict and _is_allowed(world, head(world, rules))
    if not (chosen or is_excused):
        if world.anchor.is_rollback:
            yield "V6 a rollback that was claimed does not hold: the run stands elsewhere"
        else:
            yield "V4 the newest acknowledged checkpoint of the lineage is lost"


def _is_allowed(world: World, point: str | None) -> bool:
    anchor = world.anchor
    if point is None or not world.folder(point).is_whole:
        return False
    if point == anchor.attempt:
        return True
    # Who merely resumed the latest has not undone a rollback that was claimed since its commit.
    since = anchor.epoch if anchor.is_rollback else world.folder(anchor.attempt).epoch
    if _is_rolled_back_to(world, point, above=since):
        return True
    epoch = world.folder(point).epoch
    if anchor.is_rollback:
        return epoch >= anchor.epoch
    return world.order(point) > world.order(anchor.attempt)


def _is_rolled_back_to(world: World, point: str, *, above: int) -> bool:
    """Whether a person has had the run rolled back to `point` since."""
    later = world.claims[above:]
    return any(claim.is_rollback and claim.resumes_from == point for claim in later)
