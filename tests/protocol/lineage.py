"""Where the run stands: the chain of claims, read from the top (docs/design.md, rule 2)."""

from __future__ import annotations

from .rules import Rules
from .world import ATTEMPTS, COMMITTED, World


def resume_point(world: World, rules: Rules, below: int | None = None) -> str | None:
    """The checkpoint that a claimer of the latest would choose in this world.

    `below`: as seen by the claimer of that epoch, whose own claim does not count.
    """
    top = len(world.claims) if below is None else below - 1
    for epoch in range(top, 0, -1):
        commits = [name for name in attempts_of(world, epoch) if can_resume(world, name)]
        if commits:
            return commits[-1]
        claim = world.claims[epoch - 1]
        point = claim.goes_on_from
        if point is None or not rules.claim_names_resume_point:
            continue
        if rules.latest_claim_is_transparent and not claim.is_rollback:
            continue
        if can_resume(world, point):
            return point
        if not rules.void_claims_skipped:
            return None
    return None


def can_resume(world: World, attempt: str) -> bool:
    """Whether a claimer may choose it: committed, not marked by a deleter, not thinned."""
    folder = world.folder(attempt)
    return folder.register == COMMITTED and not folder.is_doomed and not folder.thinned


def attempts_of(world: World, epoch: int) -> list[str]:
    """The attempts of one epoch, oldest first."""
    folders = zip(ATTEMPTS, world.folders, strict=True)
    return [name for name, folder in folders if folder.epoch == epoch]
