"""What to keep, and why: a pure function of what the records say.

Deciding deletes nothing; a dry run, a report and a deletion share the same decisions. The rules
themselves are in `holdfast.policy.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.policy.rules import (
    All,
    AnyOf,
    Best,
    Budget,
    ByClass,
    Candidate,
    Daily,
    EveryNth,
    Hourly,
    Last,
    Rule,
    ThenDrop,
    Within,
    counting,
    join_reasons,
    quota,
)

__all__ = [
    "All",
    "AnyOf",
    "Best",
    "Budget",
    "ByClass",
    "Candidate",
    "Daily",
    "Decision",
    "EveryNth",
    "Hourly",
    "Last",
    "Rule",
    "ThenDrop",
    "Within",
    "decide",
    "quota",
]

_Order = tuple[int, int]
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to `entry`, and why."""

    entry: Candidate
    keep: bool
    reason: str
    drop: tuple[str, ...] = ()
    """Components that go while the rest stays."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """Why a rule keeps something, and what every rule that keeps it lets go."""

    reason: str
    drop: frozenset[str]


def decide(
    entries: Sequence[Candidate], rule: Rule, *, resumed_from: _Order | None = None
) -> tuple[Decision, ...]:
    """One decision for each entry, newest first.

    Whatever the rule says, these stay, and whole: pinned and tagged ones, the newest from which
    a run can resume, and the one at `resumed_from`, the order of the checkpoint at which the
    lineage stands. A rejected one stays until all that the rule keeps is newer; anything else
    goes only when something newer stays from which a run can resume.
    """
    ordered = sorted(entries, key=lambda entry: entry.order, reverse=True)
    picks = _picks(ordered, rule)
    newest = next((p for p in counting(ordered) if not ordered[p].dropped), None)
    if newest is not None:
        reason = join_reasons("newest", picks[newest].reason if newest in picks else None)
        picks[newest] = _Pick(reason, _NOTHING)
    kept = [ordered[p].order for p in picks if ordered[p].counts and not ordered[p].dropped]
    decisions: list[Decision] = []
    for position, entry in enumerate(ordered):
        pick, protection = picks.get(position), _protection(entry, resumed_from)
        if pick is None and not protection:
            decisions.append(_unpicked(entry, kept, rule))
            continue
        reason = join_reasons(protection, pick.reason if pick is not None else None)
        is_whole = protection or pick is None or position == newest
        drop = () if is_whole or pick is None else _goes(entry, pick.drop)
        decisions.append(Decision(entry=entry, keep=True, reason=reason, drop=drop))
    return tuple(decisions)


def _picks(newest_first: Sequence[Candidate], rule: Rule) -> dict[int, _Pick]:
    """What the parts of a rule keep; of each only what all of them would drop may go."""
    picks: dict[int, _Pick] = {}
    for part, drop in _flat(rule, _NOTHING):
        suffix = f" without {', '.join(sorted(drop))}" if drop else ""
        for position, why in part.picks(newest_first).items():
            if position not in range(len(newest_first)):
                raise UsageError(f"rule {part}: picks position {position} of {len(newest_first)}")
            if newest_first[position].retired:
                continue
            before = picks.get(position, _Pick("", drop))
            reason = join_reasons(before.reason, f"{why}{suffix}")
            picks[position] = _Pick(reason, before.drop & drop)
    return picks


def _flat(rule: Rule, drop: frozenset[str]) -> Iterator[tuple[Rule, frozenset[str]]]:
    """The simple rules in a rule, each with what its picks lose."""
    if isinstance(rule, AnyOf):
        for part in rule.rules:
            yield from _flat(part, drop)
    elif isinstance(rule, ThenDrop):
        yield from _flat(rule.rule, drop.union(rule.components))
    else:
        yield rule, drop


def _goes(entry: Candidate, drop: frozenset[str]) -> tuple[str, ...]:
    """The components that go now: of those that are there never all, and what was begun."""
    if not entry.counts:
        return ()
    there = set(entry.components)
    going = there & drop if there - drop else set()
    return tuple(sorted(going.union(entry.begun)))


def _protection(entry: Candidate, resumed_from: _Order | None) -> str:
    """Why no rule may drop `entry`, or nothing."""
    return join_reasons(
        "pinned" if entry.pinned else "",
        f"tagged {', '.join(entry.tags)}" if entry.tags else "",
        "the run went on from it" if entry.order == resumed_from else "",
    )


def _unpicked(entry: Candidate, kept: Sequence[_Order], rule: Rule) -> Decision:
    """The decision on what neither the rule nor a mark keeps; `kept` are those to resume from."""
    if entry.retired:
        if any(order > entry.order for order in kept):
            return Decision(entry=entry, keep=False, reason="its deletion was begun")
        return Decision(entry=entry, keep=True, reason="its deletion waits for something newer")
    if entry.rejected:
        if kept and min(kept) > entry.order:
            return Decision(entry=entry, keep=False, reason="rejected, and all that stays is newer")
        return Decision(entry=entry, keep=True, reason="rejected, stays to be looked at")
    if not any(order >= entry.order for order in kept):
        return Decision(entry=entry, keep=True, reason="nothing newer stays to resume from")
    return Decision(entry=entry, keep=False, reason=f"not kept by: {rule}")
