"""Retention from outside a run: claim the run, apply a rule once, release the run.

A claim that never commits changes nothing for the next resume (docs/design.md, rule 2).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from holdfast.errors import FormatError, NotSealed, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import Manifest
from holdfast.maintenance.resume_plan import obstacle_of
from holdfast.maintenance.retention import Deleter, PlannedDecision, Pruned, plan_retention
from holdfast.ownership.claim import Choice, Wait
from holdfast.ownership.leases import Readers
from holdfast.ownership.owner import Ownership
from holdfast.policy.retention import unmet
from holdfast.policy.rule import MAIN, Rule, savers_of
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import NotedUploads
from holdfast.store.base import Store


def preview(
    store: Store, rule: Rule, *, known: Mapping[str, Manifest] | None = None
) -> tuple[PlannedDecision, ...]:
    """Plan which checkpoints `prune_checkpoints` would delete now. Claims and writes nothing.

    `known`: manifests that were read before, by folder.
    """
    catalog = Catalog(store)
    point = standing(store).point
    attempts = (name.epoch for name in catalog.attempts())
    epoch = catalog.highest_epoch() or max(attempts, default=0)
    resumed_from = point.order if point else None
    entries, _ = catalog.survey(known=known)
    planned = plan_retention(catalog, entries, rule, epoch=epoch, resumed_from=resumed_from)
    known_savers = {MAIN}.union(*(item.decision.entry.savers for item in planned))
    if strangers := savers_of(rule) - known_savers:
        raise UsageError(
            f"{store.url}: nothing was deleted, because no saver is called "
            f"{', '.join(sorted(strangers))}; there are {', '.join(sorted(known_savers))}"
        )
    if lacks := unmet([item.decision.entry for item in planned], rule):
        raise UsageError(
            f"{store.url}: nothing was deleted, because the rule needs values that no checkpoint "
            "has: " + "; ".join(f"{part!r} needs {what}" for part, what in lacks.items())
        )
    return planned


def prune_checkpoints(
    store: Store, rule: Rule, *, emit: Emitter, watch: Wait | None = None
) -> Pruned:
    """Apply a retention rule once; claims the run while it deletes, if there is work.

    Checkpoints that are being read or wait for their upload stay. Readers on other hosts are
    detected by watching their leases for up to `SILENT_S` seconds (`watch(seconds)` waits; a test
    may pass its own).
    """
    planned = preview(store, rule)
    work = {item.entry.folder for item in planned if item.decision.drop or not item.decision.keep}
    if not work:
        return Pruned(planned=planned)
    readers = Readers(store)
    readers.watch_leases(work, wait=watch or threading.Event().wait, emit=emit)
    owner = Ownership(store, takeover=False, emit=emit)
    deleter = Deleter(store, rule, Emitter(()), readers=readers, waiting=NotedUploads(store))
    owner.claim_ownership(_standings(store))
    try:
        assert owner.claim is not None
        deleter.carry_out(owner.claim, has_committed=False)
    finally:
        owner.is_clean = deleter.report.is_clean
        owner.release_run()
    return deleter.report


def _standings(store: Store) -> Iterator[Choice]:
    while True:
        yield standing(store)


def standing(store: Store, *, without: str = "") -> Choice:
    """Find the newest checkpoint of the lineage from which the run would resume.

    `without`: the folder of a checkpoint to pass over, as if it were deleted.
    """
    catalog = Catalog(store)
    catalog.expect_rollback_target()
    passed_over: set[str] = set()
    unhealthy: Entry | None = None
    for name in catalog.lineage():
        if str(name) == without:
            passed_over.add(without)
            continue
        try:
            entry = catalog.entry(name)
        except (FormatError, NotSealed):
            passed_over.add(str(name))
            continue
        if entry is None:
            continue
        if obstacle_of(store, entry) is None:
            if not catalog.is_avoided(entry):
                return Choice(point=entry.reference, passed_over=frozenset(passed_over))
            unhealthy = unhealthy or entry
        passed_over.add(entry.folder)
    if unhealthy is None:
        return Choice(point=None, passed_over=frozenset(passed_over))
    passed_over.remove(unhealthy.folder)
    return Choice(point=unhealthy.reference, passed_over=frozenset(passed_over))
