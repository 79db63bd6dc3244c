"""Where the run stands: the chain of claims, read from the top (docs/design.md, rule 2)."""

from __future__ import annotations

from .rules import Rules
from .world import ATTEMPTS, COMMITTED, World


def head(
    world: World, rules: Rules, *, below: int | None = None, skips_marked: bool = False
) -> str | None:
    """The checkpoint at which the lineage stands.

    `below`: as the claimer of that epoch sees it, whose own claim does not count.
    `skips_marked`: as a claimer chooses, who passes over what a deleter has marked.
    """

    def stands(attempt: str) -> bool:
        folder = world.folder(attempt)
        marked = world.is_being_deleted(attempt) or folder.thinned
        return folder.register == COMMITTED and not (skips_marked and marked)

    top = len(world.claims) if below is None else below - 1
    for epoch in range(top, 0, -1):
        commits = [name for name in attempts_of(world, epoch) if stands(name)]
        if commits:
            return commits[-1]
        claim = world.claims[epoch - 1]
        point = claim.resumes_from
        if point is None or not rules.claim_names_resume_point:
            continue
        if rules.latest_claim_is_transparent and not claim.is_rollback:
            continue
        if stands(point):
            return point
        if not rules.void_claims_skipped:
            return None
    return None


def attempts_of(world: World, epoch: int) -> list[str]:
    """The attempts of one epoch, oldest first."""
    folders = zip(ATTEMPTS, world.folders, strict=True)
    return [name for name, folder in folders if folder.epoch == epoch]
