"""Retention decisions: which checkpoints to keep, and why. A pure function of the records.

Deciding deletes nothing; a dry run, a report and a deletion share the same decisions. Here are
the cases that no rule may delete (tests/policy/test_retention.py); rules are in `policy.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.policy.rule import (
    MAIN,
    Candidate,
    Rule,
    flat,
    groups,
    join_reasons,
    picks_of,
    picks_of_others,
    positions_of,
    savers_of,
)
from holdfast.policy.rules import Best

_Order = tuple[int, int]
_NOTHING: frozenset[str] = frozenset()
_MANY = 10
"""Number of checkpoints kept for want of a metric for which a warning is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision on one checkpoint: whether `entry` is kept, and why."""

    entry: Candidate
    keep: bool
    reason: str
    drop: tuple[str, ...] = ()
    """Components that are deleted while the rest stays."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """Reason for keeping a checkpoint, and the components that all rules which keep it drop."""

    reason: str
    drop: frozenset[str]


def decide(
    entries: Sequence[Candidate],
    rule: Rule,
    *,
    resumed_from: _Order | None = None,
    lineage: Collection[_Order] | None = None,
    replaces: bool = False,
) -> tuple[Decision, ...]:
    """Decide which checkpoints to keep under `rule`; returns a decision on each, newest first.

    Independent of the rule, these checkpoints are kept whole: pinned and tagged ones; the newest,
    the newest resumable and the newest healthy resumable one; the same three of `lineage` (orders
    of the run's own checkpoints; None: all); and the one with the order `resumed_from`, from which
    the lineage continues. A rejected one is kept until all that the rule keeps is newer; any other
    is deleted only if a kept, newer one replaces it (`stands_in`).
    With `replaces` the rule does not see a checkpoint that a newer one of the same step replaces,
    if that is of the same savers and of no lower class.

    Checkpoints of the main saver before the first of `lineage` belong to a run that this one did
    not resume: they are deleted only if a newer, resumable one is kept.
    """
    ordered = sorted(entries, key=lambda entry: entry.order, reverse=True)
    replaced = _replaced(ordered) if replaces else frozenset()
    seen = [position for position in range(len(ordered)) if position not in replaced]
    picks = {seen[p]: pick for p, pick in _picks([ordered[p] for p in seen], rule).items()}
    for position, why in _newest_of(ordered, lineage, picks).items():
        reason = join_reasons(why, picks[position].reason if position in picks else None)
        picks[position] = _Pick(reason, _NOTHING)
    stay = [(ordered[position], pick.drop) for position, pick in sorted(picks.items())]
    begin = min(lineage, default=None) if lineage is not None else None
    decisions: list[Decision] = []
    for position, entry in enumerate(ordered):
        pick, protection = picks.get(position), _protection(entry, resumed_from)
        if pick is None and not protection:
            is_of_another = begin is not None and entry.order < begin and _is_of_main(entry)
            bases = [
                base.order
                for base, drop in stay
                if stands_in(base, entry, drop=drop) and (base.is_resumable or not is_of_another)
            ]
            why = f"not kept by: {rule}" if entry.healthy else "not healthy, and a newer one is"
            if position in replaced:
                why = f"replaced by a newer one of step {entry.timestamp.step}"
            decisions.append(_unpicked(entry, bases, why))
            continue
        reason = join_reasons(protection, pick.reason if pick is not None else None)
        drop = () if protection or pick is None else _components_to_drop(entry, pick.drop)
        decisions.append(Decision(entry=entry, keep=True, reason=reason, drop=drop))
    return tuple(decisions)


def judge(
    entries: Sequence[Candidate],
    rule: Rule,
    *,
    resumed_from: _Order | None,
    lineage: Collection[_Order],
    replaces: bool,
    share_files: Callable[[_Order, _Order], bool],
) -> tuple[Decision, ...]:
    """Decide as `decide`, and keep one more where the newest two that stay share a file.

    `share_files` tells whether two checkpoints are hard-linked to a common file, so that damage
    hits both.
    """
    decisions = decide(entries, rule, resumed_from=resumed_from, lineage=lineage, replaces=replaces)
    # Among all checkpoints, and among the run's own lineage, along which a resume goes back.
    for orders in ({entry.order for entry in entries}, lineage):
        decisions = _with_one_apart(decisions, orders, share_files)
    return decisions


def may_rest_on(base: Decision, item: Decision) -> bool:
    """Whether `base` stays, is newer and replaces `item`, which may then be deleted."""
    if not base.keep or base.entry.order <= item.entry.order:
        return False
    return stands_in(base.entry, item.entry, drop=base.drop)


def unmet(entries: Sequence[Candidate], rule: Rule, *, of_metrics: bool = True) -> dict[str, str]:
    """Map parts of a rule, as text, to what each needs and no checkpoint has, such as a metric.

    Such a part keeps all checkpoints that it applies to, and whole. For messages to the user, who
    may have mistyped a metric or does not pass a counter. `of_metrics`: also rules `Best`.
    """
    return {
        str(part) if saver == MAIN else f"{saver}: {part}": lack
        for part, saver, _ in flat(rule)
        if of_metrics or not isinstance(part, Best)
        for lack, _ in _lacking(part, saver, entries)
    }


def renamed(decisions: Sequence[Decision], rule: Rule) -> Iterator[tuple[Best, list[str]]]:
    """Yield rules `Best` that keep checkpoints of the newest session only because none has the
    metric, with the names of new metrics; or without names, if there are `_MANY` of them.

    For messages to the user, who may have renamed the metric.
    """
    for part, _, _ in flat(rule):
        if not isinstance(part, Best):
            continue
        why = _unmeasured_reason(part)
        concerned = [made for made in decisions if made.keep and why in made.reason]
        known = {name for d in decisions if d not in concerned for name in d.entry.metrics}
        new = {name for made in concerned for name in made.entry.metrics} - known
        alone = sum(made.reason == why for made in concerned)
        if alone and (new or alone >= _MANY):
            yield part, sorted(new)


def _unmeasured_reason(rule: Best) -> str:
    return f"{rule} keeps all, as none since the last resume has the metric {rule.metric!r}"


def _unmeasured(rule: Best, saver: str, newest_first: Sequence[Candidate]) -> list[int]:
    """Return the positions in the newest writer's epoch if none there has the metric of a rule.

    It may be measured later, or under another name since the run was resumed.
    """
    newest = max((entry.order[0] for entry in newest_first), default=0)
    own = [p for p in positions_of(saver, newest_first) if newest_first[p].order[0] == newest]
    return [] if rule.wait or any(rule.metric in newest_first[p].metrics for p in own) else own


def stands_in(base: Candidate, entry: Candidate, *, drop: Collection[str] = ()) -> bool:
    """Whether `base` without `drop` replaces `entry`, so that `entry` may be deleted.

    True if `base` is healthy and resumable, and lacks the generators only if `entry` does. Where
    `entry` was saved without other components, it is enough that `base` is healthy and has those
    that `entry` has. Which one is newer is not checked.
    """
    if not base.counts:
        return False
    has_all = set(entry.components) <= set(base.components).difference(drop)
    if entry.lacks:
        return has_all
    return base.is_resumable and not drop and (has_all or not base.left_out)


def _with_one_apart(
    decisions: tuple[Decision, ...],
    orders: Collection[_Order],
    share_files: Callable[[_Order, _Order], bool],
) -> tuple[Decision, ...]:
    """Keep one more checkpoint where the newest two whole ones that stay share a file.

    Only checkpoints of `orders` count. The one more is the newest that shares no file with the
    newest that stays.
    """
    ours = (made for made in decisions if made.entry.order in orders)
    whole = [made for made in ours if made.entry.is_resumable and made.entry.healthy]
    staying = [made for made in whole if made.keep and not made.drop]
    if len(staying) < 2 or not share_files(staying[0].entry.order, staying[1].entry.order):
        return decisions
    newest = staying[0]
    for made in whole[whole.index(newest) + 1 :]:
        if not share_files(newest.entry.order, made.entry.order):
            why = "the two newest that would be kept share a file, and this one shares none"
            spared = replace(made, keep=True, drop=(), reason=why)
            return tuple(spared if other is made else other for other in decisions)
    return decisions


def _is_of_main(entry: Candidate) -> bool:
    return not entry.savers or MAIN in entry.savers


def _newest_of(
    newest_first: Sequence[Candidate],
    lineage: Collection[_Order] | None,
    picked: Collection[int],
) -> dict[int, str]:
    """Map the newest of all checkpoints and of the lineage, which no rule deletes, to reasons.

    After a rollback the newest of all are not on the lineage.
    """
    reasons = _map_newest(newest_first)
    if lineage is not None:
        own = [p for p, entry in enumerate(newest_first) if entry.order in lineage]
        for position, why in _map_newest([newest_first[p] for p in own]).items():
            reasons.setdefault(own[position], f"{why} of the run's own line")
        usable = [p for p in own if newest_first[p].is_resumable and newest_first[p].healthy]
        between = range(usable[0], usable[1]) if len(usable) > 1 else range(0)
        left_behind = (p for p in between if p in picked and p not in own)
        if any(newest_first[p].is_resumable for p in left_behind):
            # Quotas may be full of checkpoints of abandoned branches, which no resume uses.
            reasons.setdefault(usable[1], "the one before it on the run's own line")
    return reasons


def _map_newest(newest_first: Sequence[Candidate]) -> dict[int, str]:
    """Map the newest usable, resumable and healthy checkpoint, by position, to reasons."""
    usable = [p for p, entry in enumerate(newest_first) if entry.is_usable]
    resumable = [p for p in usable if newest_first[p].is_resumable]
    healthy = [p for p in resumable if newest_first[p].healthy]
    kinds = (
        (usable, "newest"),
        (resumable, "newest to resume from"),
        (healthy, "newest healthy to resume from"),
    )
    reasons: dict[int, str] = {}
    for positions, reason in kinds:
        for position in positions[:1]:
            reasons.setdefault(position, reason)
    return reasons


def _picks(newest_first: Sequence[Candidate], rule: Rule) -> dict[int, _Pick]:
    """Merge the picks of a rule's parts; only components that all of them drop are dropped."""
    picks: dict[int, _Pick] = {}
    others = {} if rule.is_for_all else picks_of_others(newest_first, savers_of(rule))
    reasons_and_drops = [(others, _NOTHING)]
    for part, saver, drop in flat(rule):
        spared = {
            position: f"{part} keeps all, as no checkpoint has {lack}"
            for lack, positions in _lacking(part, saver, newest_first)
            for position in positions
        }
        if isinstance(part, Best) and not spared:
            why = _unmeasured_reason(part)
            spared = dict.fromkeys(_unmeasured(part, saver, newest_first), why)
        picked = picks_of(part, saver, newest_first)
        reasons_and_drops.append((spared, _NOTHING))
        unspared = {p: why for p, why in picked.items() if p not in spared}
        reasons_and_drops.append((unspared, drop))
    for reasons, drop in reasons_and_drops:
        suffix = f" without {', '.join(sorted(drop))}" if drop else ""
        for position, why in reasons.items():
            if newest_first[position].retired:
                continue
            before = picks.get(position, _Pick("", drop))
            reason = join_reasons(before.reason, f"{why}{suffix}")
            picks[position] = _Pick(reason, before.drop & drop)
    return picks


def _lacking(
    part: Rule, saver: str, entries: Sequence[Candidate]
) -> Iterator[tuple[str, list[int]]]:
    """Yield (need, positions) for groups in which no checkpoint has what a simple rule needs.

    For whole checkpoints a whole one must have it; for partial ones any of the saver's counts.
    """
    whole, *others = groups(entries, saver)
    for positions, asked in ((whole, whole), *((o, [*whole, *o]) for o in others)):
        counting = [entries[position] for position in asked if entries[position].counts]
        lack = part.missing(counting) if positions and counting else ""
        if lack:
            yield lack, positions


def _components_to_drop(entry: Candidate, drop: frozenset[str]) -> tuple[str, ...]:
    """Return the components to delete: never all that exist; also those whose deletion began."""
    if not entry.is_usable:
        return ()
    existing = set(entry.components)
    dropped = existing & drop if existing - drop else set()
    return tuple(sorted(dropped.union(entry.begun)))


def _protection(entry: Candidate, resumed_from: _Order | None) -> str:
    """Return the reason why no rule may delete `entry`; empty if there is none."""
    return join_reasons(
        "pinned" if entry.pinned else "",
        f"tagged {', '.join(entry.tags)}" if entry.tags else "",
        "the run resumed from it" if entry.order == resumed_from else "",
    )


def _replaced(newest_first: Sequence[Candidate]) -> frozenset[int]:
    """Return the positions of checkpoints that a newer one of the same step replaces."""
    return frozenset(
        position
        for position, entry in enumerate(newest_first)
        if any(
            newer.timestamp.step == entry.timestamp.step and _replaces(newer, entry)
            for newer in newest_first[:position]
        )
    )


def _replaces(newer: Candidate, entry: Candidate) -> bool:
    """Whether `newer` replaces `entry` for each of its savers, in the same class or a higher."""
    savers = set(newer.savers or (MAIN,))
    if not savers.issuperset(entry.savers or (MAIN,)):
        return False
    if (entry.save_class, newer.save_class) == ("permanent", "ephemeral"):
        return False
    return stands_in(newer, entry)


def _unpicked(entry: Candidate, kept: Sequence[_Order], why: str) -> Decision:
    """Decide on a checkpoint that no rule, pin or tag keeps; any of `kept` may replace it."""
    if entry.retired:
        if any(order > entry.order for order in kept):
            return Decision(entry=entry, keep=False, reason="its deletion was begun")
        return Decision(entry=entry, keep=True, reason="its deletion waits for a newer checkpoint")
    if entry.rejected:
        if kept and min(kept) > entry.order:
            return Decision(entry=entry, keep=False, reason="rejected, and all kept are newer")
        return Decision(entry=entry, keep=True, reason="rejected, kept for inspection")
    if not any(order >= entry.order for order in kept):
        return Decision(entry=entry, keep=True, reason="no newer one is left to resume from")
    return Decision(entry=entry, keep=False, reason=why)
