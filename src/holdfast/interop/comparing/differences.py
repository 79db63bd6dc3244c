"""Differences of two sources: structure, dtypes, values and numbers, in constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.errors import UsageError
from holdfast.format.blocks import block_digest, file_digest, list_blocks
from holdfast.format.tensors import TensorSpec, format_record
from holdfast.interop.comparing.numbers import number_nbytes
from holdfast.interop.comparing.pairs import (
    NUM_TOGETHER,
    GeneratorDifference,
    Pair,
    PairTally,
    SmallPair,
    TensorDifference,
    ValueDifference,
    What,
    compared,
    describe_spec,
    differences,
    have_as_many,
    is_small,
)
from holdfast.interop.source import (
    BlockDigests,
    Source,
    SourceComponent,
    TensorPiece,
    lost_tensors,
    read_pieces,
    read_whole,
)
from holdfast.state.patterns import Entries

_Key = tuple[str, str]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a word for what is done, the bytes of a that are done, and all that are to do."""


class NotCompared(msgspec.Struct, frozen=True, kw_only=True):
    """A value with tensors that could not be read, so that nothing is known of its equality."""

    source: Literal["a", "b"]
    """The source that holds it."""
    path: str
    """Where it is in its source, such as "model.weight"."""
    why: str
    """Why it cannot be read."""


class SourceDifference(msgspec.Struct, frozen=True, kw_only=True):
    """All differences of two sources."""

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    generators: tuple[GeneratorDifference, ...]
    """Random generators whose state differs; their tensors and values are in neither list."""
    num_equal: int
    """Tensors that are equal in every bit."""
    num_unread: int
    """Equal tensors that were not read, as their digests are equal."""
    not_compared: tuple[NotCompared, ...] = ()
    """Values with tensors that could not be read."""

    def beyond(self, limit: float | None) -> tuple[TensorDifference, ...]:
        """Return the tensors that differ by more than a limit, or all that differ if it is None."""
        if limit is None:
            return self.tensors
        return tuple(one for one in self.tensors if not one.is_within(limit))


def compare_sources(
    a: Source,
    b: Source,
    components: Collection[str] = (),
    *,
    ignore: Collection[str] = (),
    progress: Progress | None = None,
) -> SourceDifference:
    """Compare two sources, or the named components of them.

    Two sources of one component each are compared whatever these are called. `ignore` are patterns
    of what is left out (see `state.patterns`), written `component:path` or `component.path`.
    """
    ignored = _Ignored(ignore)
    gathered = _Gathered()
    wanted = [*_pair_components(a, b, components)]
    for name, part_a, part_b in wanted:
        if not ignored(name):
            gathered.compare_component(
                name, _find_counterparts(a, b, name), part_a, part_b, ignored
            )
    not_compared = [*_not_compared("a", a, components, ignored)]
    not_compared += _not_compared("b", b, components, ignored)
    ignored.expect_used(wanted)
    if ignore and not (ignored.leaves_something or gathered.pairs or gathered.values):
        raise UsageError("--ignore: leaves nothing to compare")
    read, num_equal, num_unread = _compare_tensors(a, b, gathered.pairs, progress)
    frozen = [_compare_frozen(a, b, *pair) for pair in gathered.frozen]
    num_same = sum(one is None for one in frozen)
    gathered.alone += [one for one in frozen if one is not None]
    of_path, generators = gathered.generators, gathered.differing
    generators |= {at: of_path[one.tensor] for one in read if (at := one.tensor) in of_path}
    return SourceDifference(
        tensors=(*gathered.alone, *(one for one in read if one.tensor not in of_path)),
        values=tuple(gathered.values),
        generators=tuple({one.path: one for one in generators.values()}.values()),
        num_equal=num_equal + num_same,
        num_unread=num_unread + num_same,
        not_compared=tuple(not_compared),
    )


def _not_compared(
    name: Literal["a", "b"], source: Source, components: Collection[str], ignored: _Ignored
) -> Iterator[NotCompared]:
    for lost in lost_tensors(source, components):
        if not ignored(lost.path):
            yield NotCompared(source=name, path=lost.path, why=lost.why)


class _Ignored:
    """Patterns of what is left out of a comparison."""

    def __init__(self, patterns: Collection[str]) -> None:
        given = dict.fromkeys(_with_dots(pattern) for pattern in patterns)
        self._entries = Entries(given, "--ignore")
        self.leaves_something = False

    def __call__(self, path: str) -> bool:
        """Whether a component, or a path `component:path`, is left out."""
        if self._sees(path):
            return True
        self.leaves_something |= not path.endswith(":") and ":" in path
        return False

    def _sees(self, path: str) -> bool:
        return bool(self._entries) and self._entries.cover(_with_dots(path.removesuffix(":")))

    def expect_used(
        self, components: Sequence[tuple[str, SourceComponent | None, SourceComponent | None]]
    ) -> None:
        """Raise `UsageError` if a pattern names nothing in these components."""
        if self._entries.unmatched(()):
            # What another pattern leaves out was not walked: a name may be in there.
            for name, *parts in components:
                for tree in (part.tree for part in parts if part is not None):
                    deque(differences(tree, tree, f"{name}:", self._walks), maxlen=0)
        if lost := self._entries.unmatched(()):
            names = ", ".join(name for name, _, _ in components)
            raise UsageError(
                f"{lost[0]} in the compared components, {names}; `holdfast tree` lists the names "
                "in it, and * stands for any characters between two dots"
            )

    def _walks(self, path: str) -> bool:
        self._sees(path)
        return False


def _with_dots(path: str) -> str:
    """Write `component:path` as `component.path`."""
    component, colon, rest = path.partition(":")
    return f"{component}.{rest}" if colon and "." not in component else path


@dataclass(slots=True)
class _Gathered:
    """Trees of two sources, compared before a tensor is read."""

    values: list[ValueDifference] = field(default_factory=list)
    pairs: dict[tuple[_Key, _Key], list[str]] = field(default_factory=dict)
    """Paths of the tensors that are to be compared."""
    alone: list[TensorDifference] = field(default_factory=list)
    generators: dict[str, GeneratorDifference] = field(default_factory=dict)
    """Generator that a tensor belongs to, by the tensor's path."""
    differing: dict[str, GeneratorDifference] = field(default_factory=dict)
    """Generators that are known to differ, by a path inside."""
    frozen: list[tuple[str, str, str]] = field(default_factory=list)
    """Components in both, and path, of each parameter of which a source has only the digest."""

    def compare_component(
        self,
        name: str,
        names: tuple[str, str],
        part_a: SourceComponent | None,
        part_b: SourceComponent | None,
        ignored: _Ignored,
    ) -> None:
        """Compare the trees of a component, which one of the sources may lack."""
        if part_a is None or part_b is None:
            text = f"a component of kind {(part_a or part_b).kind}"  # type: ignore[union-attr]
            found_a, found_b = text if part_a else None, text if part_b else None
            self.values.append(ValueDifference(path=name, a=found_a, b=found_b))
        empty: Mapping[str, Any] = {}
        trees = (part_a.tree if part_a else empty, part_b.tree if part_b else empty)
        recorded = {path for part in (part_a, part_b) if part is not None for path in part.frozen}
        paths = {f"{name}:{path}": path for path in sorted(recorded)}
        self.frozen += [(*names, path) for shown, path in paths.items() if not ignored(shown)]
        for found in differences(*trees, f"{name}:", ignored):
            if isinstance(found, GeneratorDifference):
                self.differing[found.path] = found
            elif isinstance(found, ValueDifference):
                if part_a is not None and part_b is not None:
                    self.values.append(found)
            elif found.path not in paths:
                self._add_pair(found, names, part_a, part_b)

    def _add_pair(
        self,
        pair: Pair,
        names: tuple[str, str],
        part_a: SourceComponent | None,
        part_b: SourceComponent | None,
    ) -> None:
        if pair.a and pair.b:
            keys = ((names[0], pair.a), (names[1], pair.b))
            self.pairs.setdefault(keys, []).append(pair.path)
            if pair.generator is not None:
                self.generators[pair.path] = pair.generator
        elif pair.generator is not None:
            self.differing[pair.path] = pair.generator
        else:
            self.alone.append(_alone(pair, part_a, part_b))


def _pair_components(
    a: Source, b: Source, wanted: Collection[str]
) -> Iterator[tuple[str, SourceComponent | None, SourceComponent | None]]:
    names = [*dict.fromkeys([*a.parts, *b.parts])]
    if missing := [name for name in wanted if name not in names]:
        raise UsageError(
            f"no component {', '.join(map(repr, missing))}; there are "
            f"{', '.join(map(repr, names)) or 'none'}"
        )
    if not wanted and len(a.parts) == len(b.parts) == 1:
        names = names[:1]
    for name in wanted or names:
        name_a, name_b = _find_counterparts(a, b, name)
        yield name, a.parts.get(name_a), b.parts.get(name_b)


def _find_counterparts(a: Source, b: Source, name: str) -> tuple[str, str]:
    """Return the name of a component in both; single components are each other's counterpart."""
    if name not in b.parts and len(a.parts) == len(b.parts) == 1:
        return name, next(iter(b.parts))
    return name, name


def _alone(
    pair: Pair, part_a: SourceComponent | None, part_b: SourceComponent | None
) -> TensorDifference:
    if pair.a:
        assert part_a is not None
        text = describe_spec(part_a.specs[pair.a])
        return TensorDifference(tensor=pair.path, what="only in a", a=text, b=None)
    assert part_b is not None
    text = describe_spec(part_b.specs[pair.b])
    return TensorDifference(tensor=pair.path, what="only in b", a=None, b=text)


def _compare_tensors(
    a: Source, b: Source, pairs: Mapping[tuple[_Key, _Key], list[str]], progress: Progress | None
) -> tuple[list[TensorDifference], int, int]:
    found: list[TensorDifference] = []
    num_equal = num_unread = 0
    to_read: list[tuple[_Key, _Key]] = []
    for (one, other), paths in pairs.items():
        spec_a, spec_b = _spec(a, one), _spec(b, other)
        if spec_a.shape != spec_b.shape or not have_as_many(spec_a, spec_b):
            a_text, b_text = describe_spec(spec_a), describe_spec(spec_b)
            found += [
                TensorDifference(tensor=path, what="shape", a=a_text, b=b_text) for path in paths
            ]
        elif equal_by_digest(a, one, b, other):
            num_equal += len(paths)
            num_unread += len(paths)
        else:
            to_read.append((one, other))
    for one, other, tally in read_pairs(a, b, _in_order(a, to_read), progress):
        paths = pairs[one, other]
        if tally.is_equal:
            num_equal += len(paths)
        else:
            found += [tally.difference(path) for path in paths]
    return found, num_equal, num_unread


def _compare_frozen(
    a: Source, b: Source, name_a: str, name_b: str, path: str
) -> TensorDifference | None:
    """Compare a parameter of which one of the sources has only a digest; None: they are equal."""
    texts = (_find_record(a, name_a, path), _find_record(b, name_b, path))
    if texts[0] == texts[1]:
        return None
    spec_a, spec_b = (None if text is None else text.rpartition(" ")[0] for text in texts)
    what: What = "values" if spec_a == spec_b else "shape"
    if spec_a is None or spec_b is None:
        what = "only in b" if spec_a is None else "only in a"
    at = f"{name_a}:{path}"
    return TensorDifference(tensor=at, what=what, a=spec_a, b=spec_b, unmatched=1)


def _find_record(source: Source, name: str, path: str) -> str | None:
    """Return dtype, sizes and digest of a tensor as text; None: the source has no such tensor."""
    part = source.parts.get(name)
    ref = None if part is None else part.leaves.get(path)
    if part is None or ref is None:
        return None if part is None else part.frozen.get(path)
    spec = part.specs[ref.key]
    digests = [
        block_digest(_read_range(source, (name, ref.key), start, stop))
        for start, stop in list_blocks(spec.nbytes)
    ]
    return format_record(spec.dtype, spec.shape, file_digest(spec.nbytes, b"".join(digests)))


def _spec(source: Source, at: _Key) -> TensorSpec:
    return source.parts[at[0]].specs[at[1]]


def equal_by_digest(a: Source, one: _Key, b: Source, other: _Key) -> bool:
    """Whether digests prove two tensors equal, after reading a large one's outer blocks."""
    spec, known, expected = _spec(a, one), a.fingerprint(*one), b.fingerprint(*other)
    if known is None or expected is None or spec.dtype != _spec(b, other).dtype:
        return False
    if known == expected:
        return True
    edges = known.edges(expected, spec.nbytes) if isinstance(known, BlockDigests) else None
    return edges is not None and all(
        _read_range(a, one, *edge) == _read_range(b, other, *edge) for edge in edges
    )


def _read_range(source: Source, at: _Key, start: int, stop: int) -> bytearray:
    found = bytearray(stop - start)
    read_whole(source, *at, start, memoryview(found))
    return found


def _in_order(source: Source, pairs: Iterable[tuple[_Key, _Key]]) -> list[tuple[_Key, _Key]]:
    """Sort pairs by where the first of each lies in its source."""
    places = [(name, key) for name, part in source.parts.items() for key in part.specs]
    numbers = {place: number for number, place in enumerate(places)}
    return sorted(pairs, key=lambda pair: numbers[pair[0]])


def read_pairs(
    a: Source, b: Source, pairs: list[tuple[_Key, _Key]], progress: Progress | None
) -> Iterator[tuple[_Key, _Key, PairTally]]:
    """Read both equally long tensors of each pair, by component and key, side by side."""
    total = sum(_spec(a, one).nbytes for one, _ in pairs)
    done = 0
    streams = (
        _Stream(read_pieces(a, [one for one, _ in pairs])),
        _Stream(read_pieces(b, [other for _, other in pairs])),
    )
    try:
        for specs, group in _groups(a, b, pairs):
            for at, tally in zip(group, _tallies(streams, specs), strict=True):
                yield *at, tally
            done += sum(spec.nbytes for spec, _ in specs)
            if progress is not None:
                progress("compared", done, total)
    finally:
        for stream in streams:
            stream.close_pieces()


_Specs = tuple[TensorSpec, TensorSpec]


def _groups(
    a: Source, b: Source, pairs: Sequence[tuple[_Key, _Key]]
) -> Iterator[tuple[list[_Specs], list[tuple[_Key, _Key]]]]:
    """Put small tensors of one dtype together that follow each other; any other is alone."""
    specs: list[_Specs] = []
    group: list[tuple[_Key, _Key]] = []
    num_left = 0
    for one, other in pairs:
        spec_a, spec_b = _spec(a, one), _spec(b, other)
        is_alone = not is_small(spec_a, spec_b)
        num = 0 if is_alone else spec_a.nbytes // number_nbytes(spec_a.dtype)
        if specs and (is_alone or num > num_left or spec_a.dtype != specs[0][0].dtype):
            yield specs, group
            specs, group = [], []
        if not specs:
            num_left = NUM_TOGETHER
        specs.append((spec_a, spec_b))
        group.append((one, other))
        num_left = 0 if is_alone else num_left - num
    if specs:
        yield specs, group


def _tallies(streams: tuple[_Stream, _Stream], specs: Sequence[_Specs]) -> list[PairTally]:
    if len(specs) == 1:
        return [_tally(streams, *specs[0])]
    a, b = streams
    return compared([SmallPair(*pair, a.copy_tensor(), b.copy_tensor()) for pair in specs])


def _tally(streams: tuple[_Stream, _Stream], a: TensorSpec, b: TensorSpec) -> PairTally:
    tally = PairTally(a, b)
    while tally.num_left:
        memories = [stream.rest(size) for stream, size in zip(streams, tally.sizes, strict=True)]
        count = min(
            memory.nbytes // size for memory, size in zip(memories, tally.sizes, strict=True)
        )
        tally.add_numbers(
            *(
                stream.read_bytes(count * size)
                for stream, size in zip(streams, tally.sizes, strict=True)
            )
        )
    for stream in streams:
        stream.skip_empty_piece()
    return tally


class _Stream:
    """Stream of the pieces of one source, from which any number of bytes is taken."""

    def __init__(self, found: Generator[TensorPiece, None, None]) -> None:
        self._pieces = found
        self._rest: memoryview | None = None

    def rest(self, size: int) -> memoryview:
        """Return what is left of the piece in progress: at least one number of `size` bytes."""
        if self._rest is None or not self._rest.nbytes:
            self._rest = next(self._pieces).memory
        assert self._rest.nbytes >= size
        return self._rest

    def read_bytes(self, nbytes: int) -> memoryview:
        assert self._rest is not None
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken

    def copy_tensor(self) -> bytes:
        """Return a copy of the next tensor, which is small."""
        return next(self._pieces).memory.tobytes()

    def skip_empty_piece(self) -> None:
        """Skip the piece of a tensor without elements."""
        if self._rest is None:
            next(self._pieces)
        self._rest = None

    def close_pieces(self) -> None:
        self._pieces.close()
