"""Chooses the tensors of a component that get files apart, since they do not change between saves.

A guess that can only cost time: what is written or linked is decided by the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.format.tensors import TensorSpec

MIN_NBYTES = 8 << 20
MIN_SHARE = 0.1
"""The least that is moved apart, in bytes and as a share of its component."""
_MOST_SAVES = 64


class Grouping:
    """Learns from the saves of one component. `apart` holds the keys that have files apart."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._sizes: Mapping[str, int] = {spec.key: spec.nbytes for spec in specs}
        self._still = dict.fromkeys(self._sizes, 0)
        self._needed: dict[str, int] = {}
        self.apart: frozenset[str] = frozenset()
        self.has_moved = False
        """Whether `apart` has changed since the last `settle`."""

    def settle(self) -> frozenset[str]:
        """The keys that get files apart, for a new plan of the files."""
        self.has_moved = False
        return self.apart

    def observe(self, changed: Collection[str]) -> None:
        """Learn from a commit; `changed` has the keys that were not as in the commit before."""
        for key in self._still:
            self._still[key] = 0 if key in changed else self._still[key] + 1
        wrong = self.apart & frozenset(changed)
        for key in wrong:
            # Twice as long each time: a move rewrites the files of the component, so a tensor that
            # changes now and then must not go to and fro.
            self._needed[key] = min(2 * self._needed.get(key, 1), _MOST_SAVES)
        still = frozenset(
            key for key, count in self._still.items() if count >= self._needed.get(key, 1)
        )
        if still == self._sizes.keys():
            return  # every file is as it was, however they are grouped
        if wrong or self._is_worthwhile(still - self.apart):
            self.has_moved = self.has_moved or self.apart != still
            self.apart = still

    def _is_worthwhile(self, keys: Collection[str]) -> bool:
        nbytes = sum(self._sizes[key] for key in keys)
        return nbytes >= max(MIN_NBYTES, MIN_SHARE * sum(self._sizes.values()))
