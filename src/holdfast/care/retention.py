"""Carrying out what the retention rule decided, one checkpoint at a time, newest safe first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.care.verify import verify
from holdfast.engine.catalog import Catalog, Entry
from holdfast.engine.claim import Claim, nothing_in_flight
from holdfast.engine.commit import retract, settle
from holdfast.errors import CorruptData, HoldfastError, Superseded
from holdfast.policy.retention import Candidate, Decision, Rule, decide
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A decision together with the checkpoint that it is about."""

    entry: Entry
    decision: Decision


def plan(
    catalog: Catalog, rule: Rule, *, epoch: int, resumed_from: tuple[int, int] | None
) -> tuple[Planned, ...]:
    """What the rule says of every committed checkpoint of this run, newest first.

    Those of epochs after `epoch`, the caller's, are not its to judge.
    """
    by_order = {entry.order: entry for entry in catalog.checkpoints() if entry.name.epoch <= epoch}
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


class Deleter:
    """Deletes what the rule drops, oldest first, while a claim owns the run.

    At least one checkpoint that stays has been read back and found whole: what this process
    resumed from, or else the newest, which is read before anything is deleted (invariant 4).
    """

    def __init__(
        self,
        store: Store,
        rule: Rule,
        *,
        retracted: Callable[[Entry, str], None],
        failed: Callable[[Entry, HoldfastError], None],
    ) -> None:
        self._store = store
        self._rule = rule
        self._retracted = retracted
        self._failed = failed
        self._verified: set[str] = set()

    def trust(self, entry: Entry) -> None:
        """Every byte of this one was read and found right."""
        self._verified.add(entry.manifest.save_id)

    def carry_out(self, claim: Claim, *, has_committed: bool) -> None:
        """Delete what the rule drops now. A deletion that fails is told and tried again next time.

        Until this claim has committed (`has_committed`), what it went on from is kept.

        Raises:
            Superseded: a later writer owns the run; it decides from now on.
        """
        point = claim.resumed_from
        keep = point.order if point is not None and not has_committed else None
        catalog = Catalog(self._store)
        planned = plan(catalog, self._rule, epoch=claim.epoch, resumed_from=keep)
        drop = [item for item in reversed(planned) if not item.decision.keep]
        stay = [item.entry for item in planned if item.decision.keep and item.decision.entry.counts]
        if not drop or not self._has_proof(stay):
            return
        settle(self._store, stay[0].folder)
        for item in drop:
            self._retract(claim, item)

    def _has_proof(self, stay: Sequence[Entry]) -> bool:
        """Whether one of those that stay is known to be whole; reads them until one is."""
        if any(entry.manifest.save_id in self._verified for entry in stay):
            return True
        for entry in stay:
            report = verify(self._store, entry.folder)
            if report.ok:
                self.trust(entry)
                return True
            problems = "; ".join(str(problem) for problem in report.problems[:3])
            self._failed(entry, CorruptData(f"read back, it is damaged: {problems}"))
        return False

    def _retract(self, claim: Claim, item: Planned) -> None:
        try:
            gone = retract(
                self._store,
                item.entry.folder,
                epoch=claim.epoch,
                reason=item.decision.reason,
                may_remove_whole=lambda epoch: may_remove_whole(self._store, claim, epoch),
            )
        except Superseded:
            raise
        except HoldfastError as error:
            self._failed(item.entry, error)
        else:
            if gone:
                self._retracted(item.entry, item.decision.reason)


def may_remove_whole(store: Store, claim: Claim, epoch: int) -> bool:
    """Whether the marker of a deleted checkpoint of `epoch` may go with its folder.

    Of our own epoch: its manifest is there, so its put has arrived, and clients do not retry.
    """
    return epoch == claim.epoch or nothing_in_flight(store, epoch)
