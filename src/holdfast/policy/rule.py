"""Retention rules: their interface, and rules that combine others.

A rule is a pure function of what the manifests recorded: it uses no clock, no file time and no
setting of today's run. Order is the recorded (epoch, sequence) and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import ClassVar, Literal, TypeAlias

from holdfast.arguments import format_call
from holdfast.errors import UsageError
from holdfast.format.layout import check_component
from holdfast.format.manifest import Timestamp, needed_of

MAIN = "main"
"""Name of the saver of the whole state, which owns every checkpoint that names no saver."""
SaveClass: TypeAlias = Literal["permanent", "ephemeral"]
"""Class of a checkpoint: an ephemeral one may be replaced by later saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Recorded facts about a committed checkpoint, from which rules decide."""

    order: tuple[int, int]
    """(epoch, sequence) as recorded; decides which one is newer."""
    timestamp: Timestamp
    created: str = ""
    """Time of the save, ISO 8601; for the rules that count by the calendar."""
    save_class: SaveClass = "permanent"
    """`permanent` or `ephemeral`, as decided when it was saved."""
    nbytes: int = 0
    """Bytes of the files that still exist."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pinned: bool = False
    rejected: bool = False
    """Whether a resume found it unusable."""
    retired: bool = False
    """Whether its deletion has begun."""
    components: tuple[str, ...] = ()
    """Components whose files all exist."""
    begun: tuple[str, ...] = ()
    """Components of which some files were deleted and some are left."""
    dropped: tuple[str, ...] = ()
    """Components that cannot be loaded any more; with any of these, no run can resume from it."""
    healthy: bool = True
    """Whether nothing was known to be wrong with the state."""
    savers: tuple[str, ...] = ()
    """Savers that requested the save; empty: `main`."""
    left_out: tuple[str, ...] = ()
    """Components that were not saved; see `lacks`."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """Components that were not saved and that a resume needs."""
        return needed_of(self.left_out)

    @property
    def is_usable(self) -> bool:
        """Whether the checkpoint was neither rejected nor retired."""
        return not (self.rejected or self.retired)

    @property
    def counts(self) -> bool:
        """Whether the checkpoint counts towards quotas."""
        return self.is_usable and self.healthy

    @property
    def is_resumable(self) -> bool:
        """Whether a run can resume from the checkpoint, healthy or not."""
        return self.is_usable and not (self.dropped or self.lacks)

    @property
    def is_held(self) -> bool:
        """Whether the checkpoint is pinned or tagged."""
        return self.pinned or bool(self.tags)


class Rule(ABC):
    """A retention rule: picks checkpoints to keep. `a | b` keeps what either picks."""

    __slots__ = ()

    spelled: ClassVar[str] = ""
    """Name in texts such as `last:3`; empty: it cannot be written as text."""

    is_for_all: ClassVar[bool] = False
    """Whether the rule applies to checkpoints of all savers; otherwise those of others are kept."""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule from the text after its name and a colon.

        Raises:
            UsageError: the text is not valid for this rule.
        """
        raise UsageError(f"{cls.__name__} cannot be written as text")

    @abstractmethod
    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Pick checkpoints to keep: returns position → reason."""

    def missing(self, counting: Sequence[Candidate]) -> str:
        """Name what the rule needs and none of `counting` has, such as a metric or a counter.

        Empty if nothing is missing. `counting` is not empty, and all in it count towards quotas.
        While something is missing, `decide` keeps all that the rule applies to, and does not call
        `picks`. For rules made of others it is called on their parts only.
        """
        return ""

    def quota(self) -> int | None:
        """Return the largest number of checkpoints that the rule keeps; None: no known limit."""
        return None

    def __repr__(self) -> str:
        return format_call(self) if is_dataclass(self) else object.__repr__(self)

    def __or__(self, other: Rule) -> Rule:
        if not isinstance(other, Rule):
            return NotImplemented
        return AnyRule((*_list_rules(self), *_list_rules(other)))

    def then_drop(self, *components: str) -> Rule:
        """Return this rule with `components`, such as `optimizer`, dropped from what it picks.

        A checkpoint that another rule picks, too, keeps what that rule does not drop.
        """
        return ThenDrop(self, tuple(sorted({*components}, key=str)))


@dataclass(frozen=True, slots=True, repr=False)
class AnyRule(Rule):
    """Keep what any of `rules` picks."""

    rules: tuple[Rule, ...]

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Merge the picks of all rules, with all their reasons."""
        reasons: dict[int, str] = {}
        for rule in self.rules:
            for position, reason in rule.picks(newest_first).items():
                reasons[position] = join_reasons(reasons.get(position), reason)
        return reasons

    def quota(self) -> int | None:
        """Return the sum of the rules' quotas."""
        parts = [rule.quota() for rule in self.rules]
        return None if None in parts else sum(part for part in parts if part is not None)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def __str__(self) -> str:
        return " | ".join(str(rule) for rule in self.rules)


@dataclass(frozen=True, slots=True, repr=False)
class ThenDrop(Rule):
    """Keep what `rule` picks, without `components`; made by `Rule.then_drop`."""

    rule: Rule
    components: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.components:
            raise UsageError("then_drop: name at least one component")
        for component in self.components:
            check_component(component, what="then_drop: components: ")

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Return the picks of `rule`, with the dropped components added to their reasons."""
        suffix = f"without {', '.join(self.components)}"
        return {p: f"{reason} {suffix}" for p, reason in self.rule.picks(newest_first).items()}

    def quota(self) -> int | None:
        """Return the quota of `rule`."""
        return self.rule.quota()

    def __repr__(self) -> str:
        rule = f"({self.rule!r})" if isinstance(self.rule, AnyRule) else repr(self.rule)
        return f"{rule}.then_drop({', '.join(map(repr, self.components))})"

    def __str__(self) -> str:
        return f"{_grouped(self.rule)} without {', '.join(self.components)}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class BySaver(Rule):
    """Apply a separate rule to each saver's checkpoints; it sees no others.

        BySaver({"main": Last(3), "weights": Last(24)})

    A checkpoint of several savers is kept while one of their rules keeps it. A saver without a
    rule keeps everything. A rule that is not in a `BySaver` applies to `main`.
    """

    rules: tuple[tuple[str, Rule], ...]

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise UsageError(f"BySaver: rules={rules!r} must name a rule for at least one saver")
        for saver, rule in rules.items():
            check_component(saver)
            if not isinstance(rule, Rule):
                raise UsageError(f"BySaver: {saver}={rule!r} must be a rule such as Last(3)")
            if _names_savers(rule):
                raise UsageError(f"BySaver: the rule for {saver} names savers itself: {rule}")
        object.__setattr__(self, "rules", tuple(rules.items()))

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        """Merge the picks of the savers' rules."""
        reasons = picks_of_others(newest_first, savers_of(self))
        for saver, rule in self.rules:
            for position, reason in picks_of(rule, saver, newest_first).items():
                reasons[position] = join_reasons(reasons.get(position), reason)
        return reasons

    def quota(self) -> int | None:
        """Return the quota of `main`: checkpoints of other savers have another size."""
        main = dict(self.rules).get(MAIN)
        return main.quota() if main is not None else None

    def __repr__(self) -> str:
        return f"BySaver({dict(self.rules)!r})"

    def __str__(self) -> str:
        return ", ".join(f"{saver}: {_grouped(rule)}" for saver, rule in self.rules)


def positions_of(saver: str, newest_first: Sequence[Candidate]) -> list[int]:
    """Return the positions of the checkpoints that a saver requested."""
    return [p for p, entry in enumerate(newest_first) if saver in (entry.savers or (MAIN,))]


def picks_of(rule: Rule, saver: str, newest_first: Sequence[Candidate]) -> dict[int, str]:
    """Apply a rule to one saver's checkpoints, of which whole and partial ones count apart."""
    picks: dict[int, str] = {}
    for positions in groups(newest_first, saver):
        group = [newest_first[position] for position in positions]
        for position, reason in rule.picks(group).items():
            if position not in range(len(group)):
                raise UsageError(f"rule {rule}: picks position {position} of {len(group)}")
            picks[positions[position]] = reason if saver == MAIN else f"{saver}: {reason}"
    return picks


def picks_of_others(newest_first: Sequence[Candidate], savers: frozenset[str]) -> dict[int, str]:
    """Pick all checkpoints of savers other than `savers`, which have no rule."""
    others = (
        (position, [name for name in entry.savers or (MAIN,) if name not in savers])
        for position, entry in enumerate(newest_first)
    )
    return {position: f"{names[0]}: all are kept" for position, names in others if names}


def flat(
    rule: Rule, saver: str = MAIN, drop: frozenset[str] = frozenset()
) -> Iterator[tuple[Rule, str, frozenset[str]]]:
    """Yield the simple rules in a rule, each with its saver and the components it drops."""
    if isinstance(rule, AnyRule):
        for part in rule.rules:
            yield from flat(part, saver, drop)
    elif isinstance(rule, ThenDrop):
        yield from flat(rule.rule, saver, drop.union(rule.components))
    elif isinstance(rule, BySaver):
        for name, part in rule.rules:
            yield from flat(part, name, drop)
    else:
        yield rule, saver, drop


def savers_of(rule: Rule) -> frozenset[str]:
    """List the savers whose checkpoints a rule applies to."""
    return frozenset(saver for _, saver, _ in flat(rule))


def named_components(rule: Rule) -> frozenset[str]:
    """List the components that a rule may drop from some checkpoint."""
    return frozenset().union(*(drop for _, _, drop in flat(rule)))


def counting(newest_first: Sequence[Candidate]) -> list[int]:
    """List the positions of checkpoints that count towards quotas."""
    return [position for position, entry in enumerate(newest_first) if entry.counts]


def join_reasons(*reasons: str | None) -> str:
    """Join the reasons that are not empty into one text."""
    return ", ".join(reason for reason in reasons if reason)


def _names_savers(rule: Rule) -> bool:
    if isinstance(rule, ThenDrop):
        return _names_savers(rule.rule)
    if isinstance(rule, AnyRule):
        return any(_names_savers(part) for part in rule.rules)
    return isinstance(rule, BySaver)


def groups(newest_first: Sequence[Candidate], saver: str) -> Iterator[list[int]]:
    """Yield positions of a saver's checkpoints; for `main` the whole ones, then partial ones."""
    own = positions_of(saver, newest_first)
    if saver != MAIN:
        yield own
        return
    yield [position for position in own if not newest_first[position].lacks]
    yield [position for position in own if newest_first[position].lacks]


def _grouped(rule: Rule) -> str:
    """Format a rule as part of a list of rules, in parentheses where needed."""
    return f"({rule})" if isinstance(rule, AnyRule | BySaver) else str(rule)


def _list_rules(rule: Rule) -> tuple[Rule, ...]:
    return rule.rules if isinstance(rule, AnyRule) else (rule,)
