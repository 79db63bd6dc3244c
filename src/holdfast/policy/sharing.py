"""Which coming saves share unchanged files with which earlier ones, by hard links.

Follows `holdfast.engine.saving.links`, in pure form: a save shares with the second newest save of
its kind of the same process, unless that one shares with the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from holdfast.policy.rule import Candidate

Order = tuple[int, int]
MIN_SHARED_NBYTES = 1 << 20
"""Smaller files are not shared: writing them takes less time than the check."""


@dataclass(slots=True, kw_only=True)
class Sharing:
    """Hard links between checkpoints that exist, and those that coming saves make."""

    has_links: bool = False
    unchanged: Collection[frozenset[str]] = ()
    """Kinds of checkpoints, as sets of components, of which a large file did not change between
    the last two; it is assumed to stay so."""
    is_one_file: Callable[[Order, Order], bool] = lambda a, b: False
    """Whether two checkpoints that exist have a file in common."""
    excluded: Order | None = None
    """The checkpoint that the run went on from, with which no save shares a file."""
    _origins: dict[Order, Order] = field(default_factory=dict)
    """Coming save → the checkpoint whose file it has."""

    def share(self, a: Order, b: Order) -> bool:
        """Whether two checkpoints have a file in common."""
        one, other = self._origins.get(a, a), self._origins.get(b, b)
        return one == other or self.is_one_file(one, other)

    def add(self, save: Candidate, left: Mapping[Order, Candidate]) -> None:
        """Link the files of a coming save; `left`: the checkpoints that exist when it is made."""
        if not self.has_links or frozenset(save.components) not in self.unchanged:
            return
        newest: dict[tuple[frozenset[str], bool], list[Order]] = {}
        for order in sorted(left, reverse=True):
            entry = left[order]
            if order[0] == save.order[0] and entry.is_usable and not entry.dropped:
                newest.setdefault((frozenset(entry.components), entry.healthy), []).append(order)
        alike = newest.get((frozenset(save.components), save.healthy), [])
        if len(alike) < 2:
            return
        excluded = [orders[0] for orders in newest.values()]
        excluded += [] if self.excluded is None else [self.excluded]
        if not any(self.share(alike[1], order) for order in excluded):
            self._origins[save.order] = self._origins.get(alike[1], alike[1])
