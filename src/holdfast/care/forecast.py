"""Forecast of retention in a root: its checkpoints, its owner, and the rule that it records.

Reads only. The decisions are made by `holdfast.policy.forecast`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.care.prune import standing
from holdfast.care.retention import candidate, share_files
from holdfast.engine.claims.claim import is_closed
from holdfast.engine.claims.leases import find_leases
from holdfast.engine.claims.process import liveness, utc_now
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.tiers.ledger import Ledger
from holdfast.errors import FormatError, NoCheckpoint, UsageError
from holdfast.format.manifest import RunPolicy
from holdfast.format.records import WriterRecord
from holdfast.policy.forecast import (
    Coming,
    Foreseen,
    Record,
    Situation,
    Sizes,
    coming_saves,
    foresee,
)
from holdfast.policy.retention import unmet
from holdfast.policy.rule import MAIN, Candidate, Rule
from holdfast.policy.rules import Nothing, best_rules
from holdfast.policy.savers import SavePolicy
from holdfast.policy.sharing import MIN_SHARED_NBYTES, Order, Sharing
from holdfast.policy.texts import policies_of, rule_of
from holdfast.store.base import Store

_STUCK = frozenset({"failed", "refused"})
"""States of uploads that are not taken to end soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Rule, interval and metrics that a user gives in place of those that the run records."""

    rule: Rule | None = None
    every: SavePolicy | None = None
    number: int = 10
    """How many saves to look ahead."""
    metrics: Mapping[str, float] | None = None
    """Metrics of the coming saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Coming saves of a run, and what retention does after each."""

    rule: Rule
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; None if it was given."""
    is_running: bool
    """Whether the process that owns the run lives, or may live."""
    entries: Sequence[Entry]
    """Checkpoints that exist, newest first."""
    held: Mapping[Order, str]
    """Why some are not deleted for now."""
    saves: Sequence[Foreseen]
    assumptions: Sequence[str]


def forecast(store: Store, entries: Sequence[Entry], wishes: Wishes) -> Forecast:
    """Preview retention for the next saves. `entries`: checkpoints of the root, newest first."""
    catalog = Catalog(store)
    view = _view(store, catalog, entries)
    recorded = next((entry for entry in view.history if entry.manifest.policy is not None), None)
    policy = None if recorded is None else recorded.manifest.policy
    rule = wishes.rule if wishes.rule is not None else _recorded_rule(store, recorded, policy)
    every = {} if policy is None or recorded is None else _recorded_every(recorded, policy)
    if wishes.every is not None:
        every = {**every, MAIN: wishes.every}
    candidates = {entry.order: candidate(store, entry) for entry in view.entries}
    sizes = {entry.order: _sizes(entry) for entry in view.entries}
    record = Record(
        history=[candidates[entry.order] for entry in view.history],
        policies=every,
        parts={} if policy is None else policy.parts,
        sizes=sizes,
        after=view.after,
        began="" if view.is_running else utc_now(),
    )
    coming = coming_saves(record, rule, wishes.number, wishes.metrics)
    if wishes.every is not None and not coming.is_by_interval:
        raise UsageError(
            f"{store.url}: no save follows from the given interval: between its newest checkpoints "
            "the run does not count what that is in. Give one in steps, or none"
        )
    held = _held(store, view.entries)
    situation = Situation(
        entries=[*candidates.values()],
        lineage=view.lineage,
        resumed_from=view.resumed_from,
        replaces=policy is not None and policy.replaces,
        held=held,
        sizes=sizes,
        sharing=_sharing(store, view),
    )
    return Forecast(
        rule=rule,
        recorded_by=None if wishes.rule is not None or recorded is None else recorded.folder,
        is_running=view.is_running,
        entries=view.entries,
        held=held,
        saves=[*foresee(situation, rule, coming)],
        assumptions=[*_assumptions(view, situation, rule, coming, wishes)],
    )


def _assumptions(
    view: _View, situation: Situation, rule: Rule, coming: Coming, wishes: Wishes
) -> Iterator[str]:
    saves = coming.saves
    if not coming.is_by_interval:
        first = saves[0].timestamp.step
        yield f"saves are as far apart as the last two, the next at step {first}"
    elif wishes.every is not None:
        yield "saves of the whole state are made at the given interval, and none by hand"
    else:
        yield "saves are made at the recorded intervals, and none by hand"
    yield from _about_metrics(rule, saves, wishes.metrics or {})
    for part, what in unmet([*situation.entries, *saves], rule).items():
        yield f"{part!r} keeps everything, as no checkpoint has {what}"
    if not view.is_running:
        yield f"the run resumes from {view.history[0].folder}"
    stay = ", and large files that did not change stay so" if situation.sharing.unchanged else ""
    yield f"each save is as large as the last one of its kind{stay}"
    yield "every save and every upload succeeds, and what is read back is whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The run as its next save finds it."""

    is_running: bool
    entries: Sequence[Entry]
    history: Sequence[Entry]
    """Those of the lineage, newest first."""
    lineage: Collection[Order]
    after: Order
    """Epoch of the next save, and the last sequence of that epoch."""
    resumed_from: Order | None
    """The checkpoint that the claim went on from, until it has committed something good."""
    went_on_from: Order | None
    """The checkpoint that the claim went on from."""


def _view(store: Store, catalog: Catalog, entries: Sequence[Entry]) -> _View:
    attempts = catalog.attempts()
    epoch = catalog.highest_epoch() or max((name.epoch for name in attempts), default=0)
    claim = _claim(catalog, epoch)
    names, first = [*catalog.lineage()], catalog.fresh_epoch()
    known = {entry.order: entry for entry in entries}
    if claim is not None and not claim.purpose and _may_live(store, claim):
        lineage = {name.order for name in names}
        point = None if claim.resumed_from is None else claim.resumed_from.order
        own = [entry for entry in entries if entry.order[0] == epoch]
        has_good = any(not (e.manifest.lacks or e.manifest.unhealthy) for e in own)
        sequences = [name.sequence for name in attempts if name.epoch == epoch]
        is_running, after = True, (epoch, max(sequences, default=0))
        resumed_from = None if has_good else point
    else:
        choice = standing(store).point
        point = resumed_from = None if choice is None else choice.order
        lineage = {
            name.order
            for name in names
            if choice is not None and name.order <= choice.order and name.order in known
        }
        is_running, after = False, (epoch + 1, 0)
    history = [entry for entry in entries if entry.order in lineage]
    if not history:
        raise NoCheckpoint(f"{store.url}: no checkpoint from which the run could go on")
    return _View(
        is_running=is_running,
        entries=[entry for entry in entries if first <= entry.order[0] <= after[0]],
        history=history,
        lineage=lineage,
        after=after,
        resumed_from=resumed_from,
        went_on_from=point,
    )


def _sharing(store: Store, view: _View) -> Sharing:
    by_order = {entry.order: entry for entry in view.entries}

    def is_one_file(a: Order, b: Order) -> bool:
        return a in by_order and b in by_order and share_files(store, by_order[a], by_order[b])

    return Sharing(
        has_links=store.has_links,
        unchanged=_unchanged(view.history),
        is_one_file=is_one_file,
        excluded=view.went_on_from,
    )


def _unchanged(history: Sequence[Entry]) -> set[frozenset[str]]:
    """Return the kinds of checkpoints of which a large file is the same in the newest two."""
    kinds: dict[frozenset[str], list[Entry]] = {}
    for entry in history:
        kinds.setdefault(frozenset(entry.manifest.components), []).append(entry)
    return {
        kind
        for kind, (newest, *earlier) in kinds.items()
        if earlier
        and any(
            file.nbytes >= MIN_SHARED_NBYTES and earlier[0].manifest.files.get(name) == file
            for name, file in newest.manifest.files.items()
        )
    }


def _claim(catalog: Catalog, epoch: int) -> WriterRecord | None:
    try:
        return catalog.writer(epoch) if epoch else None
    except FormatError:
        return None


def _may_live(store: Store, claim: WriterRecord) -> bool:
    return not is_closed(store, claim.epoch) and liveness(claim.process) != "dead"


def _recorded_rule(store: Store, recorded: Entry | None, policy: RunPolicy | None) -> Rule:
    if policy is None or recorded is None:
        raise UsageError(
            f"{store.url}: no checkpoint records the rule of the run, as it was saved by an older "
            "version or imported: give the rule, as --keep last:3"
        )
    is_remote = policy.keep_remote is not None and Ledger(store).tiers() is None
    text = policy.keep_remote if is_remote else policy.keep
    if not text:
        raise UsageError(
            f"{recorded.folder}: the rule of the run has no text, as one that a user wrote: give "
            "one that has, as --keep last:3"
        )
    try:
        rule = rule_of(text)
    except UsageError as error:
        raise UsageError(f"{recorded.folder} records a wrong rule: {error}. Give --keep") from error
    if isinstance(rule, Nothing):
        tiers = Ledger(store).tiers()
        remote = "the remote root" if tiers is None else tiers.remote
        raise UsageError(
            f"{store.url}: with keep_local=0 each checkpoint is deleted here once it is uploaded: "
            f"preview {remote} instead"
        )
    return rule


def _recorded_every(recorded: Entry, policy: RunPolicy) -> dict[str, SavePolicy]:
    try:
        return policies_of(policy.every)
    except UsageError as error:
        raise UsageError(f"{recorded.folder} records a wrong interval: {error}") from error


def _held(store: Store, entries: Sequence[Entry]) -> dict[Order, str]:
    """Map checkpoints that somebody reads, or whose upload does not get on, to the reason."""
    leases = [lease for lease in find_leases(store) if lease.state != "dead"]
    reasons = {lease.folder: f"{lease.who} reads it" for lease in leases}
    for folder, note in Ledger(store).waiting().items():
        if note is not None and note.state in _STUCK:
            reasons.setdefault(folder, f"its upload to {note.remote} {note.state}")
    return {entry.order: reasons[entry.folder] for entry in entries if entry.folder in reasons}


def _sizes(entry: Entry) -> Sizes:
    files = entry.manifest.files
    components = {
        name: sum(files[file].stored_nbytes for file in part.files)
        for name, part in entry.manifest.components.items()
    }
    return Sizes(entry.manifest.nbytes, components)


def _about_metrics(rule: Rule, saves: Sequence[Candidate], given: Mapping[str, float]) -> list[str]:
    texts = [f"every save has {name} {value:.6g}" for name, value in given.items()]
    for best in best_rules(rule):
        if best.metric in given or not saves:
            continue
        value = saves[0].metrics.get(best.metric)
        if value is None:
            texts.append(f"no save has {best.metric}, which the newest lacks")
        else:
            texts.append(f"no save is a new best: every one has {best.metric} {value:.6g}")
    return texts
