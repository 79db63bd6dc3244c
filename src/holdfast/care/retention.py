"""Carrying out what the retention rule decided, one checkpoint at a time, newest safe first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.catalog import Catalog, Entry
from holdfast.engine.claim import Claim, is_proven_dead
from holdfast.engine.commit import retract, settle
from holdfast.errors import HoldfastError, Superseded
from holdfast.policy.retention import Candidate, Decision, Rule, decide
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A decision together with the checkpoint that it is about."""

    entry: Entry
    decision: Decision


def plan(
    catalog: Catalog, rule: Rule, *, resumed_from: tuple[int, int] | None
) -> tuple[Planned, ...]:
    """What the rule says of every committed checkpoint now, newest first."""
    by_order = {entry.order: entry for entry in catalog.checkpoints()}
    decisions = decide(
        [candidate(entry) for entry in by_order.values()], rule, resumed_from=resumed_from
    )
    return tuple(
        Planned(entry=by_order[decision.entry.order], decision=decision) for decision in decisions
    )


def candidate(entry: Entry) -> Candidate:
    """What the rules may know of a checkpoint."""
    return Candidate(
        order=entry.order,
        timestamp=entry.manifest.timestamp,
        metrics=entry.manifest.metrics,
        tags=entry.tags,
        pinned=entry.marks.pinned,
        rejected=bool(entry.marks.rejected),
        retired=entry.marks.retired,
    )


def carry_out(
    store: Store,
    claim: Claim,
    rule: Rule,
    *,
    has_committed: bool,
    retracted: Callable[[Entry, str], None],
    failed: Callable[[Entry, HoldfastError], None],
) -> None:
    """Delete what the rule drops, oldest first, while this claim owns the run.

    Until this claim has committed (`has_committed`), the checkpoint that it went on from is kept.
    A deletion that fails is handed to `failed`; the next call tries again.

    Raises:
        Superseded: a later writer owns the run; it decides from now on.
    """
    point = claim.resumed_from
    keep = point.order if point is not None and not has_committed else None
    planned = plan(Catalog(store), rule, resumed_from=keep)
    drop = [item for item in reversed(planned) if not item.decision.keep]
    newest = next((item.entry for item in planned if item.decision.entry.counts), None)
    if not drop or newest is None:
        return
    settle(store, newest.folder)
    for item in drop:
        try:
            gone = retract(
                store,
                item.entry.folder,
                epoch=claim.epoch,
                reason=item.decision.reason,
                may_remove_whole=lambda epoch: nothing_in_flight(store, claim, epoch),
            )
        except Superseded:
            raise
        except HoldfastError as error:
            failed(item.entry, error)
        else:
            if gone:
                retracted(item.entry, item.decision.reason)


def nothing_in_flight(store: Store, claim: Claim, epoch: int) -> bool:
    """Whether no put of a committed checkpoint of `epoch` can still arrive.

    Of our own epoch: its manifest is there, so its put has arrived, and clients do not retry.
    """
    return epoch == claim.epoch or is_proven_dead(store, epoch)
