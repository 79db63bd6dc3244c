"""Plan of a distributed save: the boxes (slices of tensors) of each rank, and their writers.

The leader makes a `Plan` from the `Share` of each rank: `state.shardplan` chooses who writes which
box. `saving.finish` makes the plan again from stored shares, so it must depend on nothing else
(tests/saving/test_finish.py). Messages are sent by `saving.distributed`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from torch import Tensor

from holdfast.errors import FormatError, RanksFailed, UnsupportedState, name_ranks
from holdfast.format import index_parts
from holdfast.format.boxes import key_of_box
from holdfast.format.index import Places, TensorTable, fits_one_document
from holdfast.format.layout import number_of_file, tensor_file
from holdfast.format.strictjson import describe_once
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.ranks.coordinator import RankFailure
from holdfast.staging.interfaces import KnownFile
from holdfast.state.capture.byrank import key_of_rank
from holdfast.state.capture.capture import Captured
from holdfast.state.components import TRAINER, CapturedComponent
from holdfast.state.modules import buffer_names
from holdfast.state.samples import DIGEST_NBYTES, Samples, first_difference, sample
from holdfast.state.shardplan import BoxTable, Flags, Ints, LeafTable, plan_writes, text_nbytes
from holdfast.state.shards import Box, box_at, whole_box

_ALIKE = frozenset({"module", "optimizer"})
"""Kinds of components whose plain tensors training keeps equal on all ranks. Those of others come
from one rank, so that they fit each other even where ranks differ."""

_PER_RANK = ", per rank"
_FORM_NBYTES = 16
_MOST_ASKED = 64
"""Most ranks of a class that are asked for the digests of its boxes."""

Leaf: TypeAlias = tuple[str, str, str, tuple[int, ...]]
"""Component, key, dtype and global shape of a leaf."""


class Form(msgspec.Struct, frozen=True):
    """Leaves of a rank, and which of its boxes have the same corners: equal on ranks alike."""

    components: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each component, and whether each rank has its own."""
    leaves: tuple[Leaf, ...]
    """Of a component of which each rank has its own, keys do not have the rank."""
    buffers: tuple[int, ...]
    """Number of each leaf that is a buffer of a module."""
    leaf: bytes
    """Number of the leaf of each box, 32 bits."""
    corner: bytes
    """Number of the box's corners among those of the rank, 32 bits."""

    @property
    def per_rank_leaves(self) -> Ints:
        """Numbers of the leaves of which each rank has its own."""
        pairs = zip(self.components, self.kinds, strict=True)
        by_rank = {name for name, kind in pairs if kind.endswith(_PER_RANK)}
        return np.flatnonzero([component in by_rank for component, *_ in self.leaves])


def decode_form(message: bytes, digest: bytes) -> Form:
    """Decode the form that a rank has posted, or raise `FormatError` if it is another one."""
    try:
        data = zlib.decompress(message)
        if blake3(data).digest(_FORM_NBYTES) == digest:
            with describe_once(Form):
                return msgspec.msgpack.decode(data, type=Form)
    except (zlib.error, msgspec.DecodeError) as error:
        raise FormatError(f"leaves of a rank: not a message of a rank: {error}") from error
    raise FormatError("leaves of a rank: they have another digest than its share")


class Share(msgspec.Struct, frozen=True, tag="share", array_like=True):
    """All that one rank holds: the digest of its form, and corners of boxes."""

    step: int
    components: tuple[str, ...]
    form: bytes
    corners: bytes
    """First and last corner of each distinct box, 64 bits each, compressed."""
    host: str
    standing: str = ""
    """Folder of the checkpoint of this step that the rank knows."""
    call: tuple[str, ...] = ()
    """Arguments of the save, as text, that must be equal on all ranks."""
    recorded: bytes = b""
    """Digests of metrics and settings, of which the checkpoint records the leader's."""
    warnings: bytes = b""
    """Digests of warnings of the script of this rank; the leader logs those of others."""


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged", array_like=True):
    """Message in place of a share that equals the last one of the rank for these components."""

    step: int
    components: tuple[str, ...]
    standing: str = ""
    call: tuple[str, ...] = ()
    recorded: bytes = b""
    warnings: bytes = b""
    digests: bytes = b""
    """Digest of the samples of each class of boxes; empty: this save has none."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Part of a plan for one rank: the boxes that it writes, and their files."""

    written: bytes
    """A bit for each box of the rank: whether it writes it; compressed."""
    classes: bytes
    """Number of the class of each box, 32 bits, compressed. Boxes with the same holders are a
    class, from 1; 0: not compared."""
    files: tuple[tuple[int, int], ...]
    """For each component the first number of its tensor files, and how many the rank has."""
    apart: bytes = b""
    """Like `written`: whether the box is in a file of small boxes; empty if none is."""

    @property
    def rows(self) -> Ints:
        """Numbers, among those of the rank, of the boxes that it writes."""
        return _unpack_flags(self.written)

    @property
    def class_of_row(self) -> Ints:
        """Class of each box of the rank."""
        return np.frombuffer(zlib.decompress(self.classes), "<i4")


def _pack_flags(flags: Flags) -> bytes:
    return zlib.compress(np.packbits(flags).tobytes())


def _unpack_flags(data: bytes) -> Ints:
    return np.flatnonzero(np.unpackbits(np.frombuffer(zlib.decompress(data), np.uint8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSamples:
    """Samples of boxes of this rank, taken in one save."""

    rows: Sequence[int]
    samples: Samples
    by_class: Sequence[Sequence[int]]
    """Rows of the boxes of each class, from 1, in an order that all ranks have."""

    def get_sample(self, row: int) -> bytes:
        """Return the sample of one of the boxes."""
        return self.samples[self.rows.index(row)]

    def digest_class(self, number: int) -> bytes:
        """Join the digests of the boxes of a class, in the order of rows."""
        digests = dict(zip(self.rows, self.samples.digests(), strict=True))
        return b"".join(digests[row] for row in sorted(self.by_class[number - 1]))

    def digest_classes(self) -> bytes:
        """Compute one digest of each class."""
        digests = dict(zip(self.rows, self.samples.digests(), strict=True))
        return b"".join(
            blake3(b"".join(digests[row] for row in rows)).digest(DIGEST_NBYTES)
            for rows in self.by_class
        )


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
                leaves.append((name, spec.key, spec.dtype, shape))
        self._part: Part | None = None
        self._picks: dict[str, _Pick] = {}
        shapes = [shape for _, _, _, shape in leaves]
        table = BoxTable.from_boxes(rank, shapes, held)
        distinct: dict[tuple[tuple[int, ...], int, int], int] = {}
        columns = (table.leaf.tolist(), table.first.tolist(), table.last.tolist())
        corner = [
            distinct.setdefault((shapes[number], first, last), len(distinct))
            for number, first, last in zip(*columns, strict=True)
        ]
        form = msgspec.msgpack.encode(
            Form(
                components=tuple(captured.components),
                kinds=tuple(_describe_kind(part) for part in captured.components.values()),
                leaves=tuple(leaves),
                buffers=tuple(buffers),
                leaf=table.leaf.astype("<i4").tobytes(),
                corner=np.array(corner, "<i4").tobytes(),
            )
        )
        self.form = zlib.compress(form)
        """The form of this share, encoded, for a leader that does not know it."""
        corners = np.array([ends for _, *ends in distinct], "<i8").tobytes()
        self.share = Share(
            step=0,
            components=tuple(captured.components),
            form=blake3(form).digest(_FORM_NBYTES),
            corners=zlib.compress(corners),
            host=host,
        )

    def sample(self, captured: Captured, part: Part, turn: int) -> OwnSamples:
        """Sample the boxes that other ranks hold, too, and that are compared."""
        class_of_row = part.class_of_row
        by_class: list[list[int]] = [[] for _ in range(int(class_of_row.max(initial=0)))]
        rows = np.flatnonzero(class_of_row).tolist()
        for row in sorted(rows, key=lambda row: self._place(captured, row)):
            by_class[class_of_row[row] - 1].append(row)
        samples = self.read_samples(captured, rows, turn)
        return OwnSamples(rows=rows, samples=samples, by_class=by_class)

    def read_samples(self, captured: Captured, rows: Sequence[int], turn: int) -> Samples:
        """Read samples of boxes of this rank."""
        parts, tensors = captured.components, list[Tensor]()
        for row in rows:
            name, key, number = self._rows[row]
            held = parts[name].shards.get(key)
            tensors.append(parts[name].tensors[key] if held is None else held.views[number])
        return sample(tensors, turn)

    def _place(self, captured: Captured, row: int) -> tuple[str, str, Sequence[int]]:
        """Return component, key and offsets of a box, by which all ranks sort alike."""
        name, key, number = self._rows[row]
        held = captured.components[name].shards.get(key)
        return name, key, () if held is None else held.boxes[number].offsets

    def name_of(self, row: int) -> tuple[str, str]:
        """Return component and key of a box."""
        return self._rows[row][:2]

    def matches_state(self, captured: Captured) -> bool:
        """Whether a captured state has the same leaves and boxes."""
        parts = captured.components
        return parts.keys() == self._parts.keys() and all(
            _is_alike(parts[name], part) for name, part in self._parts.items()
        )

    def select_written(self, captured: Captured, part: Part) -> Captured:
        """Select the boxes that this rank writes, as a state of plain tensors."""
        if self._part != part:
            self._part, self._picks = part, self._picked(part)
        parts = {name: self._picks[name].of(one) for name, one in captured.components.items()}
        return replace(captured, components=parts)

    def digest_layout(self, files: Mapping[str, Sequence[KnownFile]]) -> bytes:
        """Compute the digest of the places of this rank's boxes in its tensor files."""
        places = {
            (component, spec.key): (number_of_file(known.file.name), start - len(known.file.header))
            for component, of_component in files.items()
            for known in of_component
            for spec, start in zip(known.file.specs, known.file.starts, strict=True)
        }
        pairs = [
            (row, *places[name, spec.key])
            for name, pick in self._picks.items()
            for row, spec in zip(pick.rows, pick.specs, strict=True)
        ]
        columns = np.array(sorted(pairs), np.int64).reshape(-1, 3)
        return digest_columns(*columns.T)

    def _picked(self, part: Part) -> dict[str, _Pick]:
        rows: dict[str, list[int]] = {name: [] for name in self._parts}
        for row in part.rows.tolist():
            rows[self._rows[row][0]].append(row)
        apart = frozenset(_unpack_flags(part.apart).tolist() if part.apart else ())
        return {
            name: self._pick(one, rows[name], apart, range(first, first + count))
            for (name, one), (first, count) in zip(self._parts.items(), part.files, strict=True)
        }

    def _pick(
        self, part: CapturedComponent, rows: Sequence[int], apart: Set[int], numbers: range
    ) -> _Pick:
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
            numbers=numbers,
            apart=frozenset(name for name, row in zip(specs, rows, strict=True) if row in apart),
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
    apart: frozenset[str]

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
            apart=self.apart,
        )


def digest_columns(row: Ints, file: Ints, offset: Ints) -> bytes:
    """Digest rows, file numbers and offsets behind the header of one rank's boxes."""
    hasher = blake3()
    for column in (row, file, offset):
        hasher.update(column.astype("<i8").tobytes())
    return hasher.digest(_FORM_NBYTES)


def list_files(components: Sequence[str], numbers: Sequence[tuple[int, int]]) -> list[str]:
    """List the plain names of a rank's tensor files from their numbers in each component."""
    return [
        tensor_file(component, number)
        for component, (first, count) in zip(components, numbers, strict=True)
        for number in range(first, first + count)
    ]


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


def _describe_kind(part: CapturedComponent) -> str:
    return f"{part.kind}{_PER_RANK}" if part.by_rank else part.kind


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
    num_unasked: int = 0
    """Ranks that differ in its class and were not asked for digests of their boxes."""

    @property
    def path_and_ranks(self) -> tuple[str, str]:
        """Path of the tensor, and the ranks that differ."""
        component, key, *_ = self.leaf
        (first, _), *others = self.holders
        ranks = name_ranks([rank for rank, _ in others])
        more = f" ({self.num_unasked} more ranks may differ)" if self.num_unasked else ""
        return f"{component}.{key}", f"rank {first} and {ranks} hold different values{more}"

    def explain(self, one: bytes, other: bytes, turn: int) -> tuple[str, str]:
        """Return path and reason for an error, from the samples of the first two holders."""
        _, key, dtype, _ = self.leaf
        spec = TensorSpec(key, dtype, self.box.sizes)
        path, reason = self.path_and_ranks
        where = first_difference(spec, turn, one, other, self.box.offsets)
        return path, f"{reason}: {where}"


class Plan:
    """The leader's plan of one save: all leaves and boxes, and who writes which."""

    def __init__(self, shares: Sequence[Share], forms: Mapping[bytes, Form]) -> None:
        first = forms[shares[0].form]
        self._components, self._kinds = first.components, first.kinds
        self._check_components(shares, forms)
        self._leaves: list[Leaf] = []
        self._numbers: dict[tuple[str, str], int] = {}
        """Number of each leaf, by component and key."""
        self._buffers: set[tuple[str, str]] = set()
        counts = [len(forms[share.form].leaf) // 4 for share in shares]
        self._starts = np.cumsum([0, *counts])
        self._boxes = self._join_boxes(shares, forms)
        hosts = {host: number for number, host in enumerate({share.host: 0 for share in shares})}
        table = self._make_table()
        self._plan = plan_writes(
            table, self._boxes, np.array([hosts[share.host] for share in shares], np.int32)
        )
        self._item_nbytes, self._component = table.item_nbytes, table.component
        self.file_numbers = self._number_files(table, len(shares))
        """For each rank and component the first number of its tensor files, and how many it has."""
        self._classes = self._number_classes(table, len(shares))
        self._is_in_parts = self._needs_parts(table)

    def _needs_parts(self, table: LeafTable) -> bool:
        """Whether the index is in parts; raise `LimitExceeded` if it would be too large."""
        specs = [TensorSpec(key, dtype, shape) for _, key, dtype, shape in self._leaves]
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
            name: [of_rank[number][1] for of_rank in self.file_numbers]
            for number, name in enumerate(self._components)
        }

    def make_parts(self) -> list[Part]:
        """Make the part of each rank."""
        is_written, is_apart = np.zeros((2, len(self._boxes.leaf)), np.bool_)
        is_written[self._plan.row] = True
        is_apart[self._plan.row] = self._plan.apart
        parts = []
        for rank, files in enumerate(self.file_numbers):
            some = slice(*self._starts[rank : rank + 2])
            classes = np.searchsorted([0, *self._classes_of(rank)], self._classes[some])
            parts.append(
                Part(
                    written=_pack_flags(is_written[some]),
                    classes=zlib.compress(classes.astype("<i4").tobytes()),
                    files=files,
                    apart=_pack_flags(is_apart[some]) if is_apart[some].any() else b"",
                )
            )
        return parts

    @property
    def has_classes(self) -> bool:
        """Whether several ranks hold a box that is compared."""
        return bool(self._classes.any())

    def _classes_of(self, rank: int) -> Ints:
        """Return the classes of a rank's boxes, in the order of their numbers on the rank."""
        found: Ints = np.unique(self._classes[slice(*self._starts[rank : rank + 2])])
        return found[found > 0]

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
        return sum(count for of_rank in self.file_numbers for _, count in of_rank)

    @property
    def of_ranks(self) -> list[tuple[int, int]]:
        """Bytes and tensor files that each rank writes."""
        rank = np.searchsorted(self._starts, self._plan.row, side="right") - 1
        nbytes = np.bincount(rank, self._plan.nbytes, len(self._starts) - 1).astype(np.int64)
        files = [sum(count for _, count in of_rank) for of_rank in self.file_numbers]
        return [*zip(nbytes.tolist(), files, strict=True)]

    def find_differing_classes(
        self, digests: Sequence[bytes], skipped: Set[tuple[str, str]]
    ) -> dict[int, list[int]]:
        """Find classes of which ranks hold different values: by rank, those to ask it for.

        Args:
            digests: for each rank those of its classes, or none.
            skipped: component and key of leaves that may differ.
        """
        numbers = [
            self._classes_of(rank) if data else self._classes[:0]
            for rank, data in enumerate(digests)
        ]
        number = np.concatenate(numbers)
        rank = np.repeat(np.arange(len(digests)), [*map(len, numbers)])
        digest = np.frombuffer(b"".join(digests), "<u8")
        order = np.argsort(number, kind="stable")
        number, rank, digest = number[order], rank[order], digest[order]
        is_odd = digest != digest[np.searchsorted(number, number)]
        asked: dict[int, list[int]] = {}
        self._num_unasked: dict[int, int] = {}
        for one in np.unique(number[is_odd]).tolist():
            holders = rank[number == one]
            odd = rank[is_odd & (number == one)].tolist()
            rows = self._rows_of(one, int(holders[0]))
            names = {self._leaves[n][:2] for n in self._boxes.leaf[rows].tolist()}
            if names <= skipped:
                continue
            self._num_unasked[one] = len(odd[_MOST_ASKED:])
            for of_rank in (int(holders[0]), *odd[:_MOST_ASKED]):
                place = int(np.searchsorted(self._classes_of(of_rank), one)) + 1
                asked.setdefault(of_rank, []).append(place)
        return asked

    def _rows_of(self, number: int, rank: int) -> Ints:
        """Return the rows of a class on one of its ranks."""
        start, stop = self._starts[rank : rank + 2].tolist()
        rows: Ints = np.arange(start, stop)[self._classes[start:stop] == number]
        return rows

    def differing(self, answers: Mapping[int, Mapping[int, bytes]]) -> list[Difference]:
        """Find the leaves of which copies differ: a box of each.

        Args:
            answers: by rank and number of the class there, the digests of its boxes.
        """
        rows, columns = [self._plan.row[:0]], [b""]
        for rank, of_rank in sorted(answers.items()):
            classes = self._classes_of(rank)
            for number, column in of_rank.items():
                rows.append(self._rows_of(int(classes[number - 1]), rank))
                columns.append(column)
        row, digest = np.concatenate(rows), np.frombuffer(b"".join(columns), "<u8")
        order = np.lexsort((row, self._plan.box[row]))
        row, digest = row[order], digest[order]
        box = self._plan.box[row]
        first = np.searchsorted(box, box)
        odd = np.flatnonzero(digest != digest[first])
        found: dict[int, Difference] = {}
        boxes: dict[int, int] = {}
        for one, other in zip(row[first[odd]].tolist(), row[odd].tolist(), strict=True):
            number = int(self._boxes.leaf[one])
            if number not in found:
                leaf = self._leaves[number]
                ends = int(self._boxes.first[one]), int(self._boxes.last[one])
                boxes[number] = one
                found[number] = Difference(
                    leaf=leaf,
                    box=box_at(leaf[3], *ends),
                    is_buffer=leaf[:2] in self._buffers,
                    holders=[self._holder(one)],
                    num_unasked=self._num_unasked.get(int(self._classes[one]), 0),
                )
            if boxes[number] == one:
                found[number].holders.append(self._holder(other))
        return [*found.values()]

    def _holder(self, row: int) -> tuple[int, int]:
        """Return the rank that holds a box, and the box's number among those of the rank."""
        rank = int(self._boxes.rank[row])
        return rank, row - int(self._starts[rank])

    @cached_property
    def _layout(self) -> _Layout:
        """Lay out the boxes of all ranks as their writers do."""
        row, leaf = self._plan.row, self._boxes.leaf[self._plan.row]
        component = self._component[leaf]
        order = np.lexsort((row, -self._item_nbytes[leaf], self._plan.file, component))
        order = order.astype(np.int32)
        num_files = np.zeros(len(self._components) + 1, np.int64)
        np.maximum.at(num_files[1:], component, self._plan.file + 1)
        file = (np.cumsum(num_files)[component] + self._plan.file).astype(np.int32)
        nbytes = self._plan.nbytes[order]
        opens = np.flatnonzero(np.diff(file[order], prepend=-1))
        begins = np.cumsum(nbytes) - nbytes
        offset = np.empty_like(begins)
        offset[order] = begins - np.repeat(begins[opens], np.diff(opens, append=len(order)))
        by_row = np.argsort(row)
        ends = np.searchsorted(row[by_row], self._starts)
        digests = []
        for number, start in enumerate(self._starts[:-1].tolist()):
            some = by_row[ends[number] : ends[number + 1]]
            digests.append(digest_columns(row[some] - start, self._plan.file[some], offset[some]))
        data_nbytes = np.zeros(int(num_files.sum()), np.int64)
        np.add.at(data_nbytes, file, self._plan.nbytes)
        return _Layout(
            file=file,
            offset=offset,
            digests=digests,
            first_file=np.cumsum(num_files),
            data_nbytes=data_nbytes,
        )

    def names_of(self, rank: int) -> list[str]:
        """List the plain names of the tensor files of a rank."""
        return list_files(self._components, self.file_numbers[rank])

    def tables(
        self, layouts: Sequence[bytes], lengths: Sequence[Sequence[int]]
    ) -> dict[str, TensorTable]:
        """Make the tables of the index, by component, from what each rank has written.

        Args:
            layouts: for each rank the digest of the places of its boxes.
            lengths: for each rank the lengths of its tensor files, in the order of `names_of`.
        """
        planned = self._layout
        header = -planned.data_nbytes
        for rank, of_rank in enumerate(lengths):
            pairs = zip(planned.first_file.tolist(), self.file_numbers[rank], strict=False)
            files = [first + n for first, of in pairs for n in range(of[0], sum(of))]
            if layouts[rank] != planned.digests[rank] or len(files) != len(of_rank):
                failure = RankFailure("writing its files", "it wrote boxes that were not planned")
                raise RanksFailed("the save", {rank: failure})
            header[np.array(files, np.int64)] += np.array(of_rank, np.int64)
        row, leaf = self._plan.row, self._boxes.leaf[self._plan.row]
        start = planned.offset + header[planned.file]
        places = Places([], self._plan.file, start, self._plan.nbytes)
        by_component: dict[str, TensorTable] = {}
        first, stop = 0, 0
        for name, count in self._leaves_by_component():
            stop = first + count
            low, high = (int(i) for i in np.searchsorted(leaf, [first, stop]))
            by_component[name] = self._table_of(
                name, self._leaves[first:stop], leaf[low:high] - first, row[low:high], places, low
            )
            first = stop
        return by_component

    def _table_of(
        self, name: str, leaves: Sequence[Leaf], tensor: Ints, row: Ints, places: Places, low: int
    ) -> TensorTable:
        specs = {key: TensorSpec(key, dtype, shape) for _, key, dtype, shape in leaves}
        number = self._components.index(name)
        count = sum(of_rank[number][1] for of_rank in self.file_numbers)
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

    def _check_components(self, shares: Sequence[Share], forms: Mapping[bytes, Form]) -> None:
        ours = (self._components, self._kinds)
        odd = {digest for digest, form in forms.items() if (form.components, form.kinds) != ours}
        for rank, share in enumerate(shares):
            if share.form in odd:
                form = forms[share.form]
                failure = RankFailure(
                    "sharing",
                    f"it saves the components {_describe_components(form.components, form.kinds)}; "
                    f"the leader saves {_describe_components(*ours)}",
                )
                raise RanksFailed("the save", {rank: failure})

    def _join_boxes(self, shares: Sequence[Share], forms: Mapping[bytes, Form]) -> BoxTable:
        """Join the boxes of all ranks, and number their leaves."""
        leaf, rank_column = (np.empty(self._starts[-1], np.int32) for _ in range(2))
        first, last = (np.empty(self._starts[-1], np.int64) for _ in range(2))
        known: dict[bytes, tuple[Ints, Ints, Ints, Ints]] = {}
        for rank, share in enumerate(shares):
            form = forms[share.form]
            if share.form not in known:
                own = form.per_rank_leaves
                shared = np.setdiff1d(np.arange(len(form.leaves)), own)
                numbers = np.empty(len(form.leaves), np.int32)
                numbers[shared] = self._number_leaves(
                    rank, [form.leaves[number] for number in shared.tolist()], shares, forms
                )
                self._buffers.update(form.leaves[number][:2] for number in form.buffers)
                leaf_of_box, corner = (
                    np.frombuffer(column, "<i4") for column in (form.leaf, form.corner)
                )
                known[share.form] = (numbers, own, leaf_of_box, corner)
            numbers, own, leaf_of_box, corner = known[share.form]
            if len(own):
                keyed = [
                    (component, key_of_rank(key, rank), dtype, shape)
                    for component, key, dtype, shape in map(form.leaves.__getitem__, own.tolist())
                ]
                numbers[own] = self._number_leaves(rank, keyed, shares, forms)
            ends = np.frombuffer(zlib.decompress(share.corners), "<i8").reshape(-1, 2)[corner]
            some = slice(*self._starts[rank : rank + 2])
            leaf[some], rank_column[some] = numbers[leaf_of_box], rank
            first[some], last[some] = ends.T
        return BoxTable(leaf=leaf, rank=rank_column, first=first, last=last)

    def _number_leaves(
        self,
        rank: int,
        leaves: Sequence[Leaf],
        shares: Sequence[Share],
        forms: Mapping[bytes, Form],
    ) -> list[int]:
        """Number leaves of one rank among those of all, adding those that are new."""
        found = []
        odd: list[tuple[str, str]] = []
        for leaf in leaves:
            component, key, dtype, shape = leaf
            number = self._numbers.setdefault((component, key), len(self._leaves))
            if number == len(self._leaves):
                self._leaves.append(leaf)
            known = self._leaves[number]
            if known != leaf:
                first = next(r for r, one in enumerate(shares) if known in forms[one.form].leaves)
                reason = (
                    f"on rank {first} it is {known[2]} {list(known[3])}, on rank {rank} {dtype} "
                    f"{list(shape)}; values on several ranks must be equal"
                )
                odd.append((f"{component}.{key}", reason))
            found.append(number)
        if odd:
            raise UnsupportedState(odd)
        return found

    def _leaves_by_component(self) -> Iterator[tuple[str, int]]:
        counts = dict.fromkeys(self._components, 0)
        for component, *_ in self._leaves:
            counts[component] += 1
        yield from counts.items()

    def _make_table(self) -> LeafTable:
        """Make the planner's table; leaves of a component come together, in their order."""
        place = {name: number for number, name in enumerate(self._components)}
        order = sorted(range(len(self._leaves)), key=lambda n: place[self._leaves[n][0]])
        moved = np.empty(len(order), np.int32)
        moved[order] = np.arange(len(order), dtype=np.int32)
        self._leaves = leaves = [self._leaves[number] for number in order]
        self._boxes = replace(self._boxes, leaf=moved[self._boxes.leaf])
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

    def _number_files(self, table: LeafTable, num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
        num_components = len(self._components)
        writer = self._boxes.rank[self._plan.row].astype(np.int64) * num_components
        writer += table.component[self._boxes.leaf[self._plan.row]]
        first = np.full(num_ranks * num_components, np.iinfo(np.int64).max)
        stop = np.zeros_like(first)
        np.minimum.at(first, writer, self._plan.file.astype(np.int64))
        np.maximum.at(stop, writer, self._plan.file.astype(np.int64) + 1)
        first = np.minimum(first, stop)
        pairs = [*zip(first.tolist(), (stop - first).tolist(), strict=True)]
        return [
            tuple(pairs[start : start + num_components])
            for start in range(0, len(pairs), num_components)
        ]

    def _number_classes(self, table: LeafTable, num_ranks: int) -> Ints:
        """Number the classes of boxes: those with the same holders, buffers apart from others.

        Returns the class of each row, from 1; 0 if no other rank holds it, or if it is not
        compared.
        """
        has_class = np.array([name != TRAINER for name in self._components], np.bool_)[
            table.component
        ]
        is_buffer = np.array([leaf[:2] in self._buffers for leaf in self._leaves], np.bool_)
        row = np.flatnonzero(self._plan.copied & has_class[self._boxes.leaf]).astype(np.int32)
        box = self._plan.box[row]
        # A set of holders is recognized by the sum of random numbers of its ranks.
        tokens = np.random.default_rng(0).integers(2**63, size=num_ranks, dtype=np.uint64)
        sums = np.zeros(int(box.max(initial=-1)) + 1, np.uint64)
        np.add.at(sums, box, tokens[self._boxes.rank[row]])
        sums[box] ^= is_buffer[self._boxes.leaf[row]]
        classes = np.zeros(len(self._boxes.leaf), np.int32)
        classes[row] = np.unique(sums[box], return_inverse=True)[1] + 1
        return classes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Places of all written boxes, as columns in the order of the plan."""

    file: Ints
    """Number of the file among those of all components."""
    offset: Ints
    """First byte behind the header of the file."""
    digests: Sequence[bytes]
    """By rank."""
    first_file: Ints
    """Number of the first file of each component."""
    data_nbytes: Ints
    """Bytes of each file without the header."""
