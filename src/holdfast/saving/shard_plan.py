"""Shares of a save by several ranks: the leaves and boxes that each holds, and what it writes.

The leader plans from the shares of all ranks. Knows the messages' content, and neither their way
nor files on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from holdfast.errors import RanksFailed, UnsupportedState, name_ranks
from holdfast.format import index_parts
from holdfast.format.boxes import key_of_box
from holdfast.format.index import Places, TensorTable, fits_one_document
from holdfast.format.layout import number_of_file, tensor_file
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.ranks.coordinator import RankFailure
from holdfast.staging.interfaces import KnownFile
from holdfast.state.capture.byrank import key_of_rank
from holdfast.state.capture.capture import Captured
from holdfast.state.components import TRAINER, CapturedComponent
from holdfast.state.modules import buffer_names
from holdfast.state.samples import UNKNOWN, Samples, first_difference, sample
from holdfast.state.shardplan import BoxTable, Ints, LeafTable, plan_writes, text_nbytes
from holdfast.state.shards import Box, box_at, whole_box

_ALIKE = frozenset({"module", "optimizer"})
"""Kinds of components whose plain tensors training keeps equal on all ranks. Those of others come
from one rank, so that they fit each other even where ranks differ."""

Leaf: TypeAlias = tuple[str, str, str, tuple[int, ...]]
"""Component, key, dtype and global shape of a leaf."""


class Share(msgspec.Struct, frozen=True, tag="share"):
    """All that one rank holds: leaves, and boxes as columns of bytes."""

    step: int
    components: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each component, and whether each rank has its own."""
    host: str
    leaves: bytes
    """Encoded list of `Leaf`; that of many ranks is the same."""
    leaf: bytes
    """Number of the leaf of each box, 32 bits."""
    first: bytes
    """First corner of each box, 64 bits."""
    last: bytes
    buffers: bytes = b""
    """Number of each leaf that is a buffer of a module, 32 bits."""
    digests: bytes = b""
    """Digest of a sample of each box; `UNKNOWN` if the rank may have its own values."""
    standing: str = ""
    """Folder of the checkpoint of this step that the rank knows."""
    call: tuple[tuple[str, str], ...] = ()
    """Arguments of the save, as text, that must be equal on all ranks."""
    recorded: dict[str, str] = {}
    """Metrics and settings, as text, of which the checkpoint records the leader's."""
    warnings: tuple[str, ...] = ()
    """Warnings of the script of this rank, which the leader logs if it has others."""

    def boxes(self, rank: int, numbers: Ints) -> BoxTable:
        """Return the boxes of a rank; `numbers` has those of its leaves among the leaves of all."""
        leaf = np.frombuffer(self.leaf, "<i4")
        return BoxTable(
            leaf=numbers[leaf],
            rank=np.full(len(leaf), rank, np.int32),
            first=np.frombuffer(self.first, "<i8"),
            last=np.frombuffer(self.last, "<i8"),
        )


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """Message in place of a share that is that of the rank's last save of these components."""

    step: int
    components: tuple[str, ...]
    standing: str = ""
    digests: bytes = b""
    """Digest of a sample of each box that other ranks hold, too; empty: this save has none."""
    call: tuple[tuple[str, str], ...] = ()
    recorded: dict[str, str] = {}
    warnings: tuple[str, ...] = ()


class Assignment(msgspec.Struct, frozen=True):
    """Assignment of boxes to the ranks that write them, as columns over the boxes of all ranks."""

    counts: tuple[int, ...]
    """Number of boxes of each rank."""
    written: bytes
    """A bit for each box: whether its rank writes it."""
    copied: bytes
    """A bit for each box: whether another rank holds it, too."""
    numbers: tuple[tuple[tuple[int, int], ...], ...]
    """For each rank and component the first number of its tensor files, and how many it has."""

    def rows_of(self, rank: int) -> Ints:
        """Return the numbers, among its own, of the boxes that a rank writes."""
        return self._marked(self.written, rank)

    def copied_by(self, rank: int) -> Ints:
        """Return the numbers, among its own, of the boxes of a rank that others hold, too."""
        return self._marked(self.copied, rank)

    def _marked(self, bits: bytes, rank: int) -> Ints:
        start = sum(self.counts[:rank])
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=sum(self.counts))
        return np.flatnonzero(flags[start : start + self.counts[rank]])


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSamples:
    """Samples of boxes of this rank, taken in one save."""

    rows: Sequence[int]
    samples: Samples

    def get_sample(self, row: int) -> bytes:
        """Return the sample of one of the boxes."""
        return self.samples[self.rows.index(row)]


class OwnShare:
    """The share of this rank, and the tensors behind it."""

    def __init__(self, captured: Captured, rank: int, host: str) -> None:
        self._rank = rank
        self._parts = captured.components
        self._rows: list[tuple[str, str, int]] = []
        """Component, key and number of the box in its leaf, of each box."""
        self.num_saves = 0
        leaves: list[Leaf] = []
        held: list[Sequence[Box]] = []
        buffers: list[int] = []
        for name, part in captured.components.items():
            names = buffer_names(captured.state[name]) if part.kind == "module" else frozenset()
            for spec in part.specs:
                if spec.key in names:
                    buffers.append(len(leaves))
                shape, boxes = _boxes_of(part, spec)
                self._rows += ((name, spec.key, number) for number in range(len(boxes)))
                held.append(boxes)
                key = key_of_rank(spec.key, rank) if part.by_rank else spec.key
                leaves.append((name, key, spec.dtype, shape))
        self._assignment: Assignment | None = None
        self._picks: dict[str, _Pick] = {}
        table = BoxTable.from_boxes(rank, [shape for _, _, _, shape in leaves], held)
        self.share = Share(
            step=0,
            components=tuple(captured.components),
            kinds=tuple(_describe_kind(part) for part in captured.components.values()),
            host=host,
            leaves=msgspec.msgpack.encode(leaves),
            leaf=table.leaf.astype("<i4").tobytes(),
            first=table.first.astype("<i8").tobytes(),
            last=table.last.astype("<i8").tobytes(),
            buffers=np.array(buffers, "<i4").tobytes(),
        )

    @property
    def num_boxes(self) -> int:
        """Number of boxes that this rank holds."""
        return len(self._rows)

    def sample(self, captured: Captured, rows: Sequence[int], turn: int) -> OwnSamples:
        """Sample some of the boxes, but for those of components of which each rank has its own."""
        parts = captured.components
        rows = [row for row in rows if _is_compared(parts[self._rows[row][0]])]
        return OwnSamples(rows=rows, samples=self.read_samples(captured, rows, turn))

    def read_samples(self, captured: Captured, rows: Sequence[int], turn: int) -> Samples:
        """Read samples of boxes of this rank."""
        parts, tensors = captured.components, []
        for row in rows:
            name, key, number = self._rows[row]
            held = parts[name].shards.get(key)
            tensors.append(parts[name].tensors[key] if held is None else held.views[number])
        return sample(tensors, turn)

    def name_of(self, row: int) -> tuple[str, str]:
        """Return component and key of a box."""
        return self._rows[row][:2]

    def is_that_of(self, captured: Captured) -> bool:
        """Whether a captured state has the same leaves and boxes."""
        parts = captured.components
        return parts.keys() == self._parts.keys() and all(
            _is_alike(parts[name], part) for name, part in self._parts.items()
        )

    def select_written(self, captured: Captured, assignment: Assignment) -> Captured:
        """Select what this rank writes: a state of plain tensors, a box each."""
        if self._assignment != assignment:
            self._assignment, self._picks = assignment, self._picked(assignment)
        parts = {name: self._picks[name].of(part) for name, part in captured.components.items()}
        return replace(captured, components=parts)

    def locate_boxes(self, files: Mapping[str, Sequence[KnownFile]]) -> Written:
        """Return where each box of this rank's part is in its tensor files."""
        places = {
            (component, spec.key): (number_of_file(known.file.name), start)
            for component, of_component in files.items()
            for known in of_component
            for spec, start in zip(known.file.specs, known.file.starts, strict=True)
        }
        names = [(name, spec.key) for name, pick in self._picks.items() for spec in pick.specs]
        found = np.array([places[name] for name in names], np.int64).reshape(-1, 2)
        row = [row for pick in self._picks.values() for row in pick.rows]
        return Written(row=np.array(row, np.int64), file=found[:, 0], start=found[:, 1])

    def _picked(self, assignment: Assignment) -> dict[str, _Pick]:
        rows: dict[str, list[int]] = {name: [] for name in self._parts}
        for row in assignment.rows_of(self._rank).tolist():
            rows[self._rows[row][0]].append(row)
        numbers = zip(self._parts.items(), assignment.numbers[self._rank], strict=True)
        return {name: self._pick(part, rows[name], *of) for (name, part), of in numbers}

    def _pick(self, part: CapturedComponent, rows: Sequence[int], first: int, count: int) -> _Pick:
        positions = {spec.key: number for number, spec in enumerate(part.specs)}
        specs: dict[str, TensorSpec] = {}
        sources: list[tuple[str, int | None]] = []
        for row in rows:
            _, key, number = self._rows[row]
            spec, held = part.specs[positions[key]], part.shards.get(key)
            name = key_of_rank(key, self._rank) if part.by_rank else key
            shape, box_number = spec.shape, None
            if held is not None:
                box, shape = held.boxes[number], held.boxes[number].sizes
                if held.places[number].sizes != held.local_shape:
                    box_number = number
                if box != whole_box(held.shape):
                    name = key_of_box(name, box.offsets, box.sizes)
            if name in specs:
                raise UnsupportedState([(f"{part.name}.{key}", f"a box of it is named {name!r}")])
            specs[name] = TensorSpec(name, spec.dtype, shape)
            sources.append((key, box_number))
        return _Pick(
            rows=rows,
            specs=tuple(specs.values()),
            sources=sources,
            positions=[positions[key] for key, _ in sources],
            numbers=range(first, first + count),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pick:
    """Boxes of one component that this rank writes."""

    rows: Sequence[int]
    """Numbers, among those of the rank, of the boxes."""
    specs: tuple[TensorSpec, ...]
    sources: Sequence[tuple[str, int | None]]
    """Key of each in the captured component, and number of the box; None: all of the tensor."""
    positions: Sequence[int]
    """Position of each in the captured component."""
    numbers: range

    def of(self, part: CapturedComponent) -> CapturedComponent:
        """Select the boxes from a captured component."""
        tensors = {
            spec.key: part.tensors[key] if box is None else part.shards[key].views[box]
            for spec, (key, box) in zip(self.specs, self.sources, strict=True)
        }
        keys = zip(self.specs, self.sources, strict=True)
        addresses = part.addresses
        if addresses is not None:
            is_whole = all(box is None for _, box in self.sources)
            addresses = [addresses[place] for place in self.positions] if is_whole else None
        return replace(
            part,
            tensors=tensors,
            specs=self.specs,
            may_overlap=frozenset(spec.key for spec, (key, _) in keys if key in part.may_overlap),
            addresses=addresses,
            shards={},
            numbers=self.numbers,
        )


def digest_column(found: OwnSamples, rows: Sequence[int]) -> bytes:
    """Return the digests of the samples as a column over `rows`; `UNKNOWN` where there is none."""
    digests = dict(zip(found.rows, found.samples.digests(), strict=True))
    return b"".join(digests.get(row, UNKNOWN) for row in rows)


def _is_compared(part: CapturedComponent) -> bool:
    return not part.by_rank and part.name != TRAINER


def _boxes_of(part: CapturedComponent, spec: TensorSpec) -> tuple[tuple[int, ...], Sequence[Box]]:
    held = part.shards.get(spec.key)
    return (spec.shape, [whole_box(spec.shape)]) if held is None else (held.shape, held.boxes)


def _is_alike(one: CapturedComponent, other: CapturedComponent) -> bool:
    if one.specs is not other.specs and one.specs != other.specs:
        return False
    if one.shards is other.shards:
        return True
    return one.shards.keys() == other.shards.keys() and all(
        (held.shape, held.boxes) == (other.shards[key].shape, other.shards[key].boxes)
        for key, held in one.shards.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Columns of the boxes that one rank has written."""

    row: Ints
    file: Ints
    start: Ints


def _leaves_of(share: Share) -> list[Leaf]:
    return msgspec.msgpack.decode(share.leaves, type=list[Leaf])


def _holder_of(leaf: Leaf, shares: Sequence[Share]) -> int:
    """Return the first rank that has a leaf."""
    return next(rank for rank, share in enumerate(shares) if leaf in _leaves_of(share))


def _describe_kind(part: CapturedComponent) -> str:
    return f"{part.kind}, per rank" if part.by_rank else part.kind


def _describe_components(components: Sequence[str], kinds: Sequence[str]) -> str:
    pairs = zip(components, kinds, strict=True)
    return ", ".join(f"{name} ({kind})" for name, kind in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A box of which ranks hold different values."""

    leaf: Leaf
    box: Box
    is_buffer: bool
    holders: list[tuple[int, int]]
    """Rank and number of the box there: of the first holder, and of all that differ from it."""

    @property
    def path_and_ranks(self) -> tuple[str, str]:
        """Path, and which ranks differ."""
        component, key, *_ = self.leaf
        (first, _), *others = self.holders
        ranks = name_ranks([rank for rank, _ in others])
        return f"{component}.{key}", f"rank {first} and {ranks} hold different values"

    def explain(self, one: bytes, other: bytes, turn: int) -> tuple[str, str]:
        """Return path and reason for an error, from the samples of the first two holders."""
        _, key, dtype, _ = self.leaf
        spec = TensorSpec(key, dtype, self.box.sizes)
        path, reason = self.path_and_ranks
        where = first_difference(spec, turn, one, other, self.box.offsets)
        return path, f"{reason}: {where}"


class Plan:
    """The leader's plan of one save: all leaves and boxes, and who writes which."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._components, self._kinds = shares[0].components, shares[0].kinds
        self._check_components(shares)
        self._leaves: dict[tuple[str, str], Leaf] = {}
        self._buffers: set[tuple[str, str]] = set()
        known: dict[bytes, Ints] = {}
        for rank, share in enumerate(shares):
            if share.leaves not in known:
                numbers = known[share.leaves] = self._number_leaves(rank, shares)
                keys = [*self._leaves]
                of_all = numbers[np.frombuffer(share.buffers, "<i4")]
                self._buffers.update(keys[number] for number in of_all.tolist())
        tables = [share.boxes(rank, known[share.leaves]) for rank, share in enumerate(shares)]
        counts = [len(table.leaf) for table in tables]
        self._boxes = BoxTable.concatenate(tables)
        self._starts = np.cumsum([0, *counts])
        hosts = {host: number for number, host in enumerate({share.host: 0 for share in shares})}
        table = self._make_table()
        self._plan = plan_writes(
            table, self._boxes, np.array([hosts[share.host] for share in shares], np.int32)
        )
        self.assignment = Assignment(
            counts=tuple(counts),
            written=np.packbits(self._is_written()).tobytes(),
            copied=np.packbits(self._plan.copied).tobytes(),
            numbers=self._number_files(table, len(shares)),
        )
        self._is_in_parts = self._needs_parts(table)

    def _needs_parts(self, table: LeafTable) -> bool:
        """Whether the index is in parts; raise `LimitExceeded` if it would be too large."""
        specs = [TensorSpec(key, dtype, shape) for _, key, dtype, shape in self._leaves.values()]
        row = self._plan.row
        leaf = self._boxes.leaf[row]
        if not index_parts.needs_parts(self.num_files, len(row)) and fits_one_document(
            specs,
            np.bincount(leaf, minlength=len(specs)).tolist(),
            nbytes_of_boxes=text_nbytes(table, self._boxes, self._plan),
            files_nbytes=self.nbytes,
        ):
            return False
        index_parts.check_size(
            specs,
            leaf,
            (self._boxes.first[row], self._boxes.last[row]),
            self._plan.file,
            num_files=self.num_files,
            num_of_writer=int(np.bincount(self._boxes.rank[row]).max(initial=0)),
        )
        return True

    @property
    def writers(self) -> dict[str, list[int]] | None:
        """Number of tensor files of each rank, by component; None: the index is one document."""
        if not self._is_in_parts:
            return None
        return {
            name: [of_rank[number][1] for of_rank in self.assignment.numbers]
            for number, name in enumerate(self._components)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return int(self._plan.nbytes.sum())

    @property
    def num_tensors(self) -> int:
        """Number of leaves."""
        return len(self._leaves)

    @property
    def num_files(self) -> int:
        """Number of tensor files."""
        return sum(count for of_rank in self.assignment.numbers for _, count in of_rank)

    @property
    def of_ranks(self) -> list[tuple[int, int]]:
        """Bytes and tensor files that each rank writes."""
        rank = np.searchsorted(self._starts, self._plan.row, side="right") - 1
        nbytes = np.bincount(rank, self._plan.nbytes, len(self._starts) - 1).astype(np.int64)
        files = [sum(count for _, count in of_rank) for of_rank in self.assignment.numbers]
        return [*zip(nbytes.tolist(), files, strict=True)]

    def differing(self, posts: Sequence[Share | Unchanged]) -> list[Difference]:
        """Find the leaves of which copies differ by the digests in posts: a box of each."""
        counts = self.assignment.counts
        digests = np.zeros(sum(counts), np.uint64)
        for rank, post in enumerate(posts):
            column = np.frombuffer(post.digests, "<u8")
            of_rank = digests[self._starts[rank] : self._starts[rank + 1]]
            if isinstance(post, Share):
                of_rank[:] = column
            elif len(column):
                of_rank[self.assignment.copied_by(rank)] = column
        row = np.flatnonzero(self._plan.copied & (digests != 0))
        row = row[np.argsort(self._plan.box[row], kind="stable")]
        box = self._plan.box[row]
        first = row[np.searchsorted(box, box)]
        odd = digests[row] != digests[first]
        found: dict[int, Difference] = {}
        leaves = [*self._leaves.values()]
        for one, other in zip(first[odd].tolist(), row[odd].tolist(), strict=True):
            number = int(self._boxes.leaf[one])
            if number not in found:
                leaf = leaves[number]
                ends = int(self._boxes.first[one]), int(self._boxes.last[one])
                found[number] = Difference(
                    leaf=leaf,
                    box=box_at(leaf[3], *ends),
                    is_buffer=leaf[:2] in self._buffers,
                    holders=[self._holder(one)],
                )
            if found[number].box == box_at(
                leaves[number][3], int(self._boxes.first[one]), int(self._boxes.last[one])
            ):
                found[number].holders.append(self._holder(other))
        return [*found.values()]

    def _holder(self, row: int) -> tuple[int, int]:
        """Return the rank that holds a box, and the box's number among those of the rank."""
        rank = int(self._boxes.rank[row])
        return rank, row - int(self._starts[rank])

    def tables(self, written: Sequence[Written]) -> dict[str, TensorTable]:
        """Make the tables of the index, by component, from what each rank has written."""
        rows = [column.row + self._starts[rank] for rank, column in enumerate(written)]
        planned = np.sort(self._plan.row)
        for rank, of_rank in enumerate(rows):
            low, high = np.searchsorted(planned, self._starts[rank : rank + 2])
            if not np.array_equal(np.sort(of_rank), planned[low:high]):
                failure = RankFailure("writing its files", "it wrote other boxes than were planned")
                raise RanksFailed("the save", {rank: failure})
        row = np.concatenate(rows)
        file = np.concatenate([column.file for column in written])
        start = np.concatenate([column.start for column in written])
        nbytes = np.empty(len(self._boxes.leaf), np.int64)
        nbytes[self._plan.row] = self._plan.nbytes
        leaf = self._boxes.leaf[row]
        order = np.lexsort((self._boxes.last[row], self._boxes.first[row], leaf))
        row, file, start, leaf = row[order], file[order], start[order], leaf[order]
        places = Places([], file, start, nbytes[row])
        by_component: dict[str, TensorTable] = {}
        first, stop = 0, 0
        leaves = [*self._leaves.values()]
        for name, count in self._leaves_by_component():
            stop = first + count
            low, high = (int(i) for i in np.searchsorted(leaf, [first, stop]))
            by_component[name] = self._table_of(
                name, leaves[first:stop], leaf[low:high] - first, row[low:high], places, low
            )
            first = stop
        return by_component

    def _table_of(
        self, name: str, leaves: Sequence[Leaf], tensor: Ints, row: Ints, places: Places, low: int
    ) -> TensorTable:
        specs = {key: TensorSpec(key, dtype, shape) for _, key, dtype, shape in leaves}
        number = self._components.index(name)
        count = sum(of_rank[number][1] for of_rank in self.assignment.numbers)
        some = slice(low, low + len(row))
        own = Places(
            [tensor_file(name, n) for n in range(count)],
            places.file[some],
            places.start[some],
            places.nbytes[some],
        )
        return TensorTable.of_corners(
            specs, own, tensor.astype(np.int64), self._boxes.first[row], self._boxes.last[row]
        )

    def _check_components(self, shares: Sequence[Share]) -> None:
        for rank, share in enumerate(shares):
            kinds = (share.components, share.kinds)
            if kinds != (self._components, self._kinds):
                failure = RankFailure(
                    "sharing",
                    f"it saves the components {_describe_components(*kinds)}; the leader saves "
                    f"{_describe_components(self._components, self._kinds)}",
                )
                raise RanksFailed("the save", {rank: failure})

    def _number_leaves(self, rank: int, shares: Sequence[Share]) -> Ints:
        """Number the leaves of one rank among those of all, adding those that are new."""
        numbers = {key: number for number, key in enumerate(self._leaves)}
        found = []
        odd: list[tuple[str, str]] = []
        for component, key, dtype, shape in _leaves_of(shares[rank]):
            leaf = (component, key, dtype, shape)
            known = self._leaves.setdefault((component, key), leaf)
            if known != leaf:
                first = _holder_of(known, shares)
                reason = (
                    f"on rank {first} it is {known[2]} {list(known[3])}, on rank {rank} {dtype} "
                    f"{list(shape)}; values on several ranks must be equal"
                )
                odd.append((f"{component}.{key}", reason))
            found.append(numbers.setdefault((component, key), len(numbers)))
        if odd:
            raise UnsupportedState(odd)
        return np.array(found, np.int32)

    def _leaves_by_component(self) -> Iterator[tuple[str, int]]:
        counts = dict.fromkeys(self._components, 0)
        for component, _ in self._leaves:
            counts[component] += 1
        yield from counts.items()

    def _make_table(self) -> LeafTable:
        """Make the planner's table; leaves of a component come together, in their order."""
        keys = [*self._leaves]
        place = {name: number for number, name in enumerate(self._components)}
        order = sorted(range(len(keys)), key=lambda number: place[keys[number][0]])
        moved = np.empty(len(order), np.int32)
        moved[order] = np.arange(len(order), dtype=np.int32)
        self._leaves = {keys[n]: self._leaves[keys[n]] for n in order}
        self._boxes = replace(self._boxes, leaf=moved[self._boxes.leaf])
        leaves = [*self._leaves.values()]
        return LeafTable(
            paths=[f"{component}.{key}" for component, key, _, _ in leaves],
            shapes=[shape for _, _, _, shape in leaves],
            item_nbytes=np.array([ITEM_NBYTES[dtype] for _, _, dtype, _ in leaves], np.int64),
            component=np.array([place[component] for component, _, _, _ in leaves], np.int64),
            has_choice=np.array(
                [
                    self._kinds[place[component]] in _ALIKE
                    and (component, key) not in self._buffers
                    for component, key, _, _ in leaves
                ],
                np.bool_,
            ),
        )

    def _is_written(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        is_written = np.zeros(len(self._boxes.leaf), np.bool_)
        is_written[self._plan.row] = True
        return is_written

    def _number_files(
        self, table: LeafTable, num_ranks: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        component = table.component[self._boxes.leaf[self._plan.row]]
        rank = self._boxes.rank[self._plan.row]
        numbers = [[(0, 0)] * len(self._components) for _ in range(num_ranks)]
        pairs = np.unique(np.stack([rank, component, self._plan.file], axis=1), axis=0)
        for of_rank, of_component, file in pairs.tolist():
            first, count = numbers[of_rank][of_component]
            numbers[of_rank][of_component] = (file if count == 0 else first, count + 1)
        return tuple(map(tuple, numbers))
