"""How much each layer changes from one checkpoint to the next, in constant memory.

A layer is a group of tensors whose paths begin alike. Only two checkpoints are open at a time, and
tensors whose digests are equal are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from holdfast.errors import UsageError
from holdfast.interop.comparing.differences import Progress, equal_by_digest, read_pairs
from holdfast.interop.comparing.pairs import have_as_many
from holdfast.interop.comparing.statistics import stats_of
from holdfast.interop.source import Source

MODULE = "module"
"""Kind of the components that are compared when none is named."""
MOST_LAYERS = 48
"""Most layers when no depth is given: so many rows can still be read."""
Opener: TypeAlias = Callable[[str], Source]
_Path = tuple[str, str]
"""Component and path of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Tensors of a component whose paths begin alike, and how much they change."""

    component: str
    name: str
    paths: tuple[str, ...]
    changes: tuple[float | None, ...]
    """Norm of the difference over the norm before, for each checkpoint but the first; None: they
    have no common tensors, those were zero, or all that differs is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Changes of all layers over a sequence of checkpoints."""

    depth: int
    """Number of parts of a path that make the name of a layer."""
    layers: tuple[Layer, ...]
    total: tuple[float | None, ...]
    """The same of all layers together that changed at all."""
    num_read: int
    """Comparisons of two tensors that were read."""
    num_unread: int
    """Comparisons that were not, as digests are equal."""
    not_finite: tuple[str, ...]
    """Tensors with NaN or infinite numbers, which are left out of the norms."""


@dataclass(slots=True)
class _Sums:
    """Sums of squares by path."""

    before: dict[_Path, float] = field(default_factory=dict)
    """Of the values in the earlier checkpoint."""
    apart: dict[_Path, float] = field(default_factory=dict)
    """Of the differences; without an entry, nothing differs."""
    odd: set[_Path] = field(default_factory=set)
    """Tensors with numbers that are not finite, of which the sums say nothing."""
    common: set[_Path] = field(default_factory=set)
    """Tensors that both have, in the same shape."""


def drift(
    names: Sequence[str],
    opener: Opener,
    components: Collection[str] = (),
    *,
    depth: int | None = None,
    progress: Progress | None = None,
) -> Drift:
    """Compare each checkpoint with the next. `opener` opens one by its name, oldest first.

    `components`: by default the modules. `depth`: by default the largest that gives no more than
    `MOST_LAYERS` layers.

    Raises:
        UsageError: the newest has no component of a given name, or there is no module.
        CorruptData, StoreError: as `Source.read_into`.
    """
    with opener(names[-1]) as newest:
        chosen = _chosen(newest, components)
        paths = [path for name in chosen for path in _paths(newest, name)]
    depth = _depth(paths) if depth is None else depth
    layers: dict[_Path, list[str]] = {}
    for component, path in paths:
        layers.setdefault((component, _layer(path, depth)), []).append(path)
    comparing = _Comparing(progress, len(names) - 1)
    pairs = [comparing.compare(layers, sums) for sums in comparing.walk(names, opener, chosen)]
    columns: dict[_Path, tuple[float | None, ...]] = {
        layer: tuple(found.get(layer) for found, _ in pairs) for layer in layers
    }
    return Drift(
        depth=depth,
        layers=tuple(
            Layer(component=at[0], name=at[1], paths=tuple(inside), changes=columns[at])
            for at, inside in layers.items()
        ),
        total=tuple(total for _, total in pairs),
        num_read=comparing.num_read,
        num_unread=comparing.num_unread,
        not_finite=tuple(comparing.not_finite),
    )


class _Comparing:
    """Compares neighbours; keeps the norms that the next comparison needs."""

    def __init__(self, progress: Progress | None, num_pairs: int) -> None:
        self._progress = progress
        self._num_pairs = num_pairs
        self._num_done = 0
        self._known: dict[_Path, float] = {}
        """Squares of tensors of the earlier checkpoint, as far as they are known."""
        self._needs: Callable[[Collection[_Path]], dict[_Path, float]] = lambda paths: {}
        self.num_read = self.num_unread = 0
        self.not_finite: dict[str, None] = {}

    def walk(
        self, names: Sequence[str], opener: Opener, components: Collection[str]
    ) -> Iterator[_Sums]:
        """Yield the sums of each pair of neighbours, while both are open."""
        for one, other in pairwise(names):
            with opener(one) as a, opener(other) as b:
                self._needs = lambda paths, a=a: self._norms(a, paths)  # type: ignore[misc]
                yield self._sums(a, b, components)
            self._num_done += 1

    def compare(
        self, layers: Mapping[_Path, Sequence[str]], sums: _Sums
    ) -> tuple[dict[_Path, float | None], float | None]:
        """Return the relative change of each layer that both have, and of those that changed."""
        groups = {
            layer: [(layer[0], path) for path in paths if (layer[0], path) in sums.common]
            for layer, paths in layers.items()
        }
        changed = [group for group in groups.values() if any(at in sums.apart for at in group)]
        together = [path for group in changed for path in group]
        sums.before |= self._needs({*together} - {*sums.before})
        found = {layer: _relative(group, sums) for layer, group in groups.items() if group}
        return found, _relative(together, sums) if any(groups.values()) else None

    def _sums(self, a: Source, b: Source, components: Collection[str]) -> _Sums:
        sums = _Sums()
        keys: dict[tuple[_Path, _Path], _Path] = {}
        for component in components:
            ours, theirs = _paths(a, component), _paths(b, component)
            for path, key in theirs.items():
                if path in ours and self._is_comparable(a, b, ours[path], key):
                    sums.common.add(path)
                    keys.setdefault((ours[path], key), path)
        known = {path: self._known[path] for path in sums.common & self._known.keys()}
        self._known = {}
        to_read = [pair for pair in keys if not equal_by_digest(a, pair[0], b, pair[1])]
        self.num_unread += len(keys) - len(to_read)
        self.num_read += len(to_read)
        changed: dict[_Path, float] = {}
        for one, other, tally in read_pairs(a, b, to_read, self._report):
            path = keys[one, other]
            if tally.is_equal:
                continue
            known[path], changed[path], sums.apart[path] = tally.squares
            if tally.has_odd:
                sums.odd.add(path)
                self.not_finite.setdefault(":".join(path))
        sums.before = known
        self._known = {**known, **changed}
        return sums

    def _is_comparable(self, a: Source, b: Source, one: _Path, other: _Path) -> bool:
        spec_a = a.parts[one[0]].specs[one[1]]
        spec_b = b.parts[other[0]].specs[other[1]]
        return spec_a.shape == spec_b.shape and have_as_many(spec_a, spec_b)

    def _norms(self, source: Source, paths: Collection[_Path]) -> dict[_Path, float]:
        """Read tensors that did not change, whose norm is not known yet; once in all."""
        keys = {path: _paths(source, path[0])[path] for path in paths}
        names = {key: path for path, key in keys.items()}
        order = [
            (component, key)
            for component, part in source.parts.items()
            for key in part.specs
            if (component, key) in names
        ]
        found = {
            names[at]: one.norm**2 for at, one in zip(order, stats_of(source, order), strict=True)
        }
        self._known.update(found)
        return found

    def _report(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        if self._progress is not None:
            share = self._num_done + done_nbytes / max(total_nbytes, 1)
            self._progress(what, round(share * total_nbytes), self._num_pairs * total_nbytes)


def _relative(paths: Sequence[_Path], sums: _Sums) -> float | None:
    apart = sum(sums.apart.get(path, 0.0) for path in paths)
    if not apart:
        return None if any(path in sums.odd for path in paths) else 0.0
    before = sum(sums.before.get(path, 0.0) for path in paths)
    return math.sqrt(apart / before) if before else None


def _chosen(source: Source, components: Collection[str]) -> tuple[str, ...]:
    for name in components:
        source.part(name)
    modules = [name for name, part in source.parts.items() if part.kind == MODULE]
    chosen = tuple(dict.fromkeys(components or modules))
    if not chosen:
        has = ", ".join(map(repr, source.parts)) or "none"
        raise UsageError(f"{source.url}: no component is a module; name one of {has}")
    return chosen


def _paths(source: Source, component: str) -> dict[_Path, _Path]:
    """Map the tensors of a component by path to their keys; a tied one has only its first path."""
    part = source.parts.get(component)
    found: dict[str, _Path] = {}
    for path, ref in {} if part is None else part.leaves.items():
        found.setdefault(ref.key, (component, path))
    return {path: (component, key) for key, path in found.items()}


def _depth(paths: Collection[_Path]) -> int:
    """Return the largest number of parts of a path that gives a table one can read."""
    longest = max((path.count(".") + 1 for _, path in paths), default=1)
    for depth in range(longest, 1, -1):
        if len({(component, _layer(path, depth)) for component, path in paths}) <= MOST_LAYERS:
            return depth
    return 1


def _layer(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
