"""The index of a checkpoint: file and position of each tensor (docs/format.md, section 5)."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from operator import gt
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from holdfast.errors import CorruptData, FormatError, HoldfastError, LimitExceeded
from holdfast.format import blocks as block_digests
from holdfast.format import layout, strictjson
from holdfast.format.blocks import max_stored_nbytes
from holdfast.format.boxes import Boxes, Column, Ragged, Unfit, check_boxes, split_rows
from holdfast.format.codec import CodecName
from holdfast.format.layout import BLOCK_NBYTES, FORMAT_VERSION, MAX_INDEX_NBYTES
from holdfast.format.manifest import FileEntry, StoredEntry, check_block_nbytes
from holdfast.format.tensors import ITEM_NBYTES, MAX_DIMS, TensorFile, TensorSpec, check_shape
from holdfast.store.base import Buffer

MAX_INDEX_VALUES = 32_000_000
MAX_UNKNOWN_NBYTES = 8 << 20
"""Most bytes of an index that are not its known members in their shortest form, nor whitespace."""

_LIMITS = {"max_nbytes": MAX_INDEX_NBYTES, "max_values": MAX_INDEX_VALUES}
_MAX_VERSION_LENGTH = 20
_MAX_KINDS = 100
# Hashes of shapes are predictable: with many more, collisions could slow a dict to quadratic time.
_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_RAW_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]
_Kind = tuple[str, tuple[int, ...]]
"""(dtype, shape) of a tensor."""


class ShardEntry(msgspec.Struct, frozen=True, gc=False):
    """Bytes of `file` with a shard; `offsets` and `sizes` are its box, None if it is whole."""

    file: str
    start: int
    nbytes: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Entry of a tensor: its key in the component, its index dtype, its shape and its shards."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]


class Places(msgspec.Struct, frozen=True):
    """Positions of shards in files, as columns with an entry for each shard."""

    files: Sequence[str]
    file: Column
    """Position in `files` of the shard's file."""
    start: Column
    """Offset of the shard's first byte in the file."""
    nbytes: Column

    def select_shards(self, numbers: Column) -> Places:
        """Select the positions of some shards, in the order of `numbers`."""
        columns = (column[numbers] for column in (self.file, self.start, self.nbytes))
        return Places(self.files, *columns)


class TensorTable(Mapping[str, TensorEntry]):
    """Tensors of one component by key, in the order of the index; entries are made on access."""

    def __init__(
        self, specs: Mapping[str, TensorSpec], shards: Places, boxes: Boxes | None = None
    ) -> None:
        self.specs = specs
        self._shards = shards
        self._boxes = boxes

    @property
    def shards(self) -> Places:
        """Positions of all shards, in the order of `boxes`; without them, of `specs`."""
        return self._shards

    @property
    def boxes(self) -> Boxes | None:
        """The boxes of all shards; None if every tensor is one shard."""
        return self._boxes

    @classmethod
    def of_corners(
        cls,
        specs: Mapping[str, TensorSpec],
        shards: Places,
        tensor: Column,
        first: Column,
        last: Column,
    ) -> TensorTable:
        """Make a table of boxes in the order of their tensors, from their first and last elements.

        `first` and `last` are positions in the row-major tensor; a tensor without elements has one
        box. Every tensor has a box.
        """
        if len(tensor) == len(specs):
            return cls(specs, shards)
        shapes = Ragged.from_lists([spec.shape for spec in specs.values()])
        num_dims = shapes.lengths[tensor]
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_dims)])
        offsets, sizes = np.empty(begins[-1], np.int64), np.empty(begins[-1], np.int64)
        # Some boxes at a time: bounds the memory of what is computed on the way.
        for some in split_rows(len(tensor)):
            start, end = first[some].astype(np.int64), last[some].astype(np.int64)
            of_some, place, dims = tensor[some], begins[:-1][some], num_dims[some]
            for back in range(1, int(dims.max()) + 1):
                rows = np.flatnonzero(dims >= back)
                at = dims[rows] - back
                extent = shapes.values[shapes.first[of_some[rows]] + at]
                divisor = np.maximum(extent, 1)
                low, high = start[rows] % divisor, end[rows] % divisor
                start[rows] //= divisor
                end[rows] //= divisor
                offsets[place[rows] + at] = low
                sizes[place[rows] + at] = np.minimum(high - low + 1, extent)
        return cls(specs, shards, Boxes(tensor, Ragged(offsets, begins), Ragged(sizes, begins)))

    @classmethod
    def of_boxes(
        cls,
        specs: Mapping[str, TensorSpec],
        shards: Places,
        tensor: Column,
        offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> TensorTable:
        """Make a table of boxes in the order of their tensors; `tensor` has the number of each."""
        is_whole = len(offsets) == len(specs) and all(
            tuple(size) == spec.shape for size, spec in zip(sizes, specs.values(), strict=True)
        )
        if is_whole:
            return cls(specs, shards)
        return cls(
            specs, shards, Boxes(tensor, Ragged.from_lists(offsets), Ragged.from_lists(sizes))
        )

    @property
    def files(self) -> Sequence[str]:
        """Stored names of the tensor files."""
        return self.shards.files

    @property
    def has_boxes(self) -> bool:
        """Whether a tensor is stored in several shards."""
        return self.boxes is not None

    def part(self, keys: Mapping[str, str]) -> TensorTable:
        """Return the whole tensors of some keys under new ones. `keys`: new → stored."""
        if odd := [old for old in keys.values() if not self.is_whole(old)]:
            raise FormatError(f"{min(odd)!r}: a tensor of one rank has boxes")
        specs = {
            new: msgspec.structs.replace(self.specs[old], key=new) for new, old in keys.items()
        }
        return TensorTable(specs, self.whole([*keys.values()])[1])

    def stored_as(self, names: Mapping[str, str]) -> TensorTable:
        """Return this table with the stored names of its files, by plain name."""
        at = self.shards
        shards = Places([names[file] for file in at.files], at.file, at.start, at.nbytes)
        return TensorTable(self.specs, shards, self.boxes)

    def numbers(self, keys: Sequence[str]) -> Column:
        """Return the positions of these keys in the order of `specs`."""
        return np.fromiter(map(self._numbers.__getitem__, keys), np.int64, len(keys))

    def whole(self, keys: Sequence[str]) -> tuple[list[TensorSpec], Places]:
        """Return specs and positions of tensors that are stored as one shard each."""
        if not self.has_boxes and keys == [*self.specs]:
            return [*self.specs.values()], self.locate(self._first[:-1])
        numbers, specs = self.numbers(keys), [self.specs[key] for key in keys]
        first = self._first[numbers]
        assert (self._first[numbers + 1] == first + 1).all(), "a tensor of several shards"
        return specs, self.locate(first)

    def is_whole(self, key: str) -> bool:
        """Whether a tensor is stored as one shard."""
        number = self._numbers[key]
        return not self.has_boxes or bool(self._first[number + 1] - self._first[number] == 1)

    def boxes_of(self, key: str) -> tuple[Column, Column]:
        """Return a tensor's shards and their boxes as (start, stop), at least of one dimension."""
        number, num_dims = self._numbers[key], len(self.specs[key].shape)
        shards = np.arange(self._first[number], self._first[number + 1])
        if not num_dims:
            return shards, np.tile(np.array([[[0], [1]]]), (len(shards), 1, 1))
        offsets, sizes = self._select_boxes(shards)
        start, size = (one.values.reshape(-1, num_dims) for one in (offsets, sizes))
        return shards, np.stack([start, start + size], axis=1)

    def locate(self, numbers: Column) -> Places:
        """Return the positions of some shards, by their numbers among all."""
        return self.shards.select_shards(numbers)

    def shards_in(self, file: str) -> list[tuple[TensorSpec, ShardEntry]]:
        """List the shards in a file, each with its tensor, in the order of their bytes.

        Empty if it is no tensor file of this component.
        """
        if file not in self._file_numbers:
            return []
        numbers = self._numbers_in(self._file_numbers[file])
        tensors = np.searchsorted(self._first, numbers, side="right") - 1
        specs = [self._spec_list[tensor] for tensor in tensors.tolist()]
        return [*zip(specs, self._make_entries(numbers), strict=True)]

    def __getitem__(self, key: str) -> TensorEntry:
        spec, number = self.specs[key], self._numbers[key]
        numbers = np.arange(self._first[number], self._first[number + 1])
        return TensorEntry(key, spec.dtype, spec.shape, tuple(self._make_entries(numbers)))

    def _make_entries(self, numbers: Column) -> Iterator[ShardEntry]:
        at = self.locate(numbers)
        files = [at.files[file] for file in at.file.tolist()]
        places = zip(files, at.start.tolist(), at.nbytes.tolist(), strict=True)
        if not self.has_boxes:
            return starmap(ShardEntry, places)
        rows = (map(tuple, one.lists()) for one in self._select_boxes(numbers))
        return (ShardEntry(*at, *box) for at, *box in zip(places, *rows, strict=True))

    def _select_boxes(self, numbers: Column) -> tuple[Ragged, Ragged]:
        """Return the offsets and sizes of some shards."""
        if self.boxes is not None:
            return self.boxes.offsets.select_ragged(numbers), self.boxes.sizes.select_ragged(
                numbers
            )
        sizes = Ragged.from_lists([self._spec_list[number].shape for number in numbers.tolist()])
        return Ragged(np.zeros_like(sizes.values), sizes.first), sizes

    def _numbers_in(self, file: int) -> Column:
        """Return the numbers of the shards in a file, in the order of their bytes."""
        order, first = self._by_file
        return order[first[file] : first[file + 1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __repr__(self) -> str:
        return f"TensorTable({dict(self)!r})"

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {key: number for number, key in enumerate(self.specs)}

    @cached_property
    def _spec_list(self) -> Sequence[TensorSpec]:
        return [*self.specs.values()]

    @cached_property
    def _file_numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.files)}

    @cached_property
    def _by_file(self) -> tuple[Column, Column]:
        """All shards in the order of their bytes, and where each file begins among them."""
        at = self.shards
        order = np.lexsort((at.nbytes, at.start, at.file))
        return order, np.searchsorted(at.file[order], np.arange(len(at.files) + 1))

    @cached_property
    def _first(self) -> Column:
        """Number of the first shard of each tensor, and of the end."""
        if self.boxes is None:
            return np.arange(len(self.specs) + 1)
        return np.searchsorted(self.boxes.tensor, np.arange(len(self.specs) + 1))


class StoredBlocks(msgspec.Struct, frozen=True):
    """Consecutive blocks of a compressed file as stored: their lengths and joined digests."""

    lengths: tuple[int, ...]
    digests: bytes

    @property
    def nbytes(self) -> int:
        """Total bytes of the stored blocks."""
        return sum(self.lengths)

    def spans(self) -> list[tuple[int, int]]:
        """List (start, stop) of every stored block in the file."""
        return [*pairwise(accumulate(self.lengths, initial=0))]

    def columns(self) -> StoredColumns:
        """Return the lengths and digests as in an index."""
        return StoredColumns([*self.lengths], self.digests.hex())

    def entry(self, codec: CodecName) -> StoredEntry:
        """Make the manifest's entry for the stored blocks."""
        digest = block_digests.file_digest(self.nbytes, self.digests)
        return StoredEntry(codec=codec, nbytes=self.nbytes, digest=digest)


class Index(msgspec.Struct, frozen=True):
    """A decoded index. `blocks`: file → joined digests; `components`: name → key → tensor."""

    blocks: Mapping[str, bytes]
    components: Mapping[str, TensorTable]
    block_nbytes: int
    stored: Mapping[str, StoredBlocks] = {}
    """File → its stored blocks, for compressed files."""


class _Shards(msgspec.Struct):
    tensor: list[Count]
    file: list[Count]
    start: list[Count]
    offsets: list[Shape] | None
    sizes: list[Shape] | None


class _Component(msgspec.Struct):
    files: list[str]
    names: list[str]
    dtypes: list[str]
    shapes: list[Shape]
    shards: _Shards


class StoredColumns(msgspec.Struct):
    """Lengths and digests of the stored blocks of a file, as an index has them."""

    nbytes: list[Count]
    digests: str


class IndexDocument(msgspec.Struct, omit_defaults=True):
    """Base class of documents of an index; members are in the order in which they are written."""

    holdfast: int

    @property
    def is_known(self) -> bool:
        """Whether this Holdfast knows the version and the features."""
        requires = getattr(self, "requires", ())
        return self.holdfast == FORMAT_VERSION and strictjson.KNOWN_REQUIREMENTS.issuperset(
            requires
        )


T = TypeVar("T", bound=IndexDocument)


class _IndexDocument(IndexDocument, omit_defaults=True):
    block_nbytes: int
    blocks: dict[str, str]
    components: dict[str, _Component]
    stored: dict[str, StoredColumns] = {}


def encode_index(
    files: Mapping[str, Sequence[TensorFile] | TensorTable],
    blocks: Mapping[str, bytes],
    block_nbytes: int = BLOCK_NBYTES,
    *,
    stored: Mapping[str, StoredBlocks] = types.MappingProxyType({}),
) -> bytes:
    """Encode an index of `files`, with `blocks` of all files and `stored` ones of compressed."""
    document: dict[str, Any] = {
        "holdfast": FORMAT_VERSION,
        "block_nbytes": block_nbytes,
        "blocks": {name: digests.hex() for name, digests in blocks.items()},
        "components": {name: _columns(of_name) for name, of_name in files.items()},
    }
    if stored:
        document["stored"] = {name: blocks_of.columns() for name, blocks_of in stored.items()}
    return encode_document(document, what=layout.INDEX)


def fits_one_document(
    specs: Sequence[TensorSpec],
    num_boxes: Sequence[int],
    *,
    nbytes_of_boxes: int,
    files_nbytes: int,
) -> bool:
    """Whether the index of tensors in boxes will be within the limits, before it exists."""
    by_tensor = [*zip(specs, num_boxes, strict=True)]
    num_values = sum(4 + len(s.shape) + n * (5 + 2 * len(s.shape)) for s, n in by_tensor)
    digests = 2 * block_digests.DIGEST_NBYTES * (files_nbytes // BLOCK_NBYTES)
    nbytes = sum(map(estimate_nbytes, specs)) + nbytes_of_boxes + digests
    return num_values <= MAX_INDEX_VALUES and nbytes <= MAX_INDEX_NBYTES


def estimate_nbytes(spec: TensorSpec) -> int:
    """Return about the bytes of a tensor in an index, without its boxes."""
    return len(spec.key) + 20 + 3 * len(str(spec.shape)) // 2


def decode_index(data: Buffer, *, files: Mapping[str, FileEntry], what: str) -> Index:
    """Decode the index in `data`, and check it against the manifest's `files`."""
    document = decode_document(data, _IndexDocument, what=what)
    check_block_nbytes(document.block_nbytes, what=what)
    lists = {name: component.files for name, component in document.components.items()}
    check_file_lists(lists, files, what=what)
    listed, size = (
        {name: files[name] for name in files if name != layout.INDEX},
        document.block_nbytes,
    )
    return Index(
        blocks=decode_blocks(document.blocks, listed, size, what=what),
        components={
            name: _decode_component(component, files, what=f"{what}, component {name!r}")
            for name, component in document.components.items()
        },
        block_nbytes=document.block_nbytes,
        stored=decode_stored(document.stored, listed, size, what=what),
    )


def files_of_index(data: Buffer, *, what: str) -> tuple[str, ...]:
    """List the files that an index has digests of: all of a checkpoint but the index itself."""
    return tuple(decode_document(data, _IndexDocument, what=what).blocks)


def decode_document(data: Buffer, kind: type[T], *, what: str) -> T:
    """Decode an index document; unknown members are ignored, and may not be long."""
    document = strictjson.loads_as(data, kind, **_LIMITS)
    if document is not None and document.is_known:
        return document
    strictjson.check_limits(data, what=what, **_LIMITS)
    if memoryview(data).nbytes > MAX_UNKNOWN_NBYTES:
        _check_unknown(bytes(data), kind, what=what)
    value = strictjson.loads(data, what=what, **_LIMITS)
    strictjson.check_version(value, what=what)
    return strictjson.convert(value, kind, what=what)


def encode_document(document: object, *, what: str) -> bytes:
    """Encode an index document, within the limits of `decode_document`."""
    data = msgspec.json.encode(document)
    strictjson.check_limits(data, what=what, **_LIMITS)
    return data


def _check_unknown(text: bytes, kind: type[IndexDocument], *, what: str) -> None:
    """Check that unknown members are short before they are built, as small ones can grow large."""
    try:
        raw = bytes(_RAW_MEMBERS.decode(text).get("holdfast", b""))
        version = int(raw) if len(raw) < _MAX_VERSION_LENGTH else None
        strictjson.check_version({"holdfast": version}, what=what)
        with strictjson.describe_once(kind):
            known = msgspec.json.encode(msgspec.json.decode(text, type=kind))
        unknown = len(msgspec.json.format(text, indent=-1)) - len(known)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"{what}: not an index: {error}") from error
    if unknown > MAX_UNKNOWN_NBYTES:
        raise LimitExceeded(
            f"{what}: {unknown:,} bytes of unknown members; at most {MAX_UNKNOWN_NBYTES:,} are "
            "accepted"
        )


def _columns(files: Sequence[TensorFile] | TensorTable) -> dict[str, Any]:
    if isinstance(files, TensorTable):
        specs, names = [*files.specs.values()], [*files.shards.files]
    else:
        specs, names = [spec for file in files for spec in file.specs], [f.name for f in files]
    return {
        "files": names,
        "names": [spec.key for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [spec.shape for spec in specs],
        "shards": _of_boxes(files) if isinstance(files, TensorTable) else _of_whole(files),
    }


def _of_whole(files: Sequence[TensorFile]) -> dict[str, Any]:
    return {
        "tensor": list(range(sum(len(file.specs) for file in files))),
        "file": [number for number, file in enumerate(files) for _ in file.specs],
        "start": [start for file in files for start in file.starts],
        "offsets": None,
        "sizes": None,
    }


def _of_boxes(table: TensorTable) -> dict[str, Any]:
    at, boxes = table.shards, table.boxes
    return {
        "tensor": list(range(len(table))) if boxes is None else boxes.tensor.tolist(),
        "file": at.file.tolist(),
        "start": at.start.tolist(),
        "offsets": None if boxes is None else boxes.offsets.lists(),
        "sizes": None if boxes is None else boxes.sizes.lists(),
    }


def check_file_lists(
    lists: Mapping[str, Sequence[str]], files: Mapping[str, FileEntry], *, what: str
) -> None:
    """Check that the components, and the tensor files in `lists`, are those of the manifest."""
    expected = {name for name in files if not layout.is_index_name(name)}
    names = {layout.plain_file(name): name for name in expected}
    listed: set[str] = set()
    for name, of_component in lists.items():
        try:
            layout.check_component(name)
        except HoldfastError as err:
            raise FormatError(f"{what}: {str(err)[:200]}") from err
        numbers = range(len(of_component))
        own = [layout.tree_file(name), *(layout.tensor_file(name, number) for number in numbers)]
        tree, *tensors = (names.get(plain, plain) for plain in own)
        if of_component != tensors:
            raise FormatError(f"{what}: component {name!r} lists files that are not its own")
        listed |= {tree, *tensors}
    if listed != expected:
        odd = min(listed ^ expected)
        raise FormatError(f"{what}: does not list the same files as the manifest ({odd[:200]!r})")


def decode_blocks(
    texts: Mapping[str, str], files: Mapping[str, FileEntry], block_nbytes: int, *, what: str
) -> dict[str, bytes]:
    """Decode the block digests of all `files`, which must be those of the manifest."""
    if texts.keys() != files.keys():
        raise FormatError(f"{what}: `blocks` and the manifest list different files")
    decoded: dict[str, bytes] = {}
    for name, text in texts.items():
        num_blocks = block_digests.num_blocks(files[name].nbytes, block_nbytes)
        decoded[name] = _digests(text, num_blocks, what=f"{what}: {name}")
        if block_digests.file_digest(files[name].nbytes, decoded[name]) != files[name].digest:
            raise CorruptData(f"{what}: the block digests of {name} are not the manifest's")
    return decoded


def _digests(text: str, num_blocks: int, *, what: str) -> bytes:
    if len(text) != 2 * block_digests.DIGEST_NBYTES * num_blocks or not _HEX.fullmatch(text):
        raise FormatError(f"{what} should have {num_blocks:,} block digests")
    return bytes.fromhex(text)


def decode_stored(
    found: Mapping[str, StoredColumns],
    files: Mapping[str, FileEntry],
    block_nbytes: int,
    *,
    what: str,
) -> dict[str, StoredBlocks]:
    """Decode the stored blocks of the compressed of `files`; check their numbers and lengths."""
    entries = {name: entry.stored for name, entry in files.items() if entry.stored is not None}
    if found.keys() != entries.keys():
        raise FormatError(f"{what}: `stored` and the manifest list different files")
    decoded: dict[str, StoredBlocks] = {}
    for name, columns in found.items():
        nbytes, num_blocks = files[name].nbytes, len(columns.nbytes)
        expected = block_digests.num_blocks(nbytes, block_nbytes)
        if num_blocks != expected:
            raise FormatError(f"{what}: {name} should have {expected:,} stored blocks")
        spans = block_digests.list_blocks(nbytes, block_nbytes)
        most = (max_stored_nbytes(stop - start) for start, stop in spans)
        if 0 in columns.nbytes or any(map(gt, columns.nbytes, most)):
            raise FormatError(f"{what}: {name} has a stored block that is too short or too long")
        digests = _digests(columns.digests, num_blocks, what=f"{what}: stored, {name}")
        blocks = decoded[name] = StoredBlocks(tuple(columns.nbytes), digests)
        if blocks.entry(entries[name].codec) != entries[name]:
            raise CorruptData(f"{what}: the stored blocks of {name} are not the manifest's")
    return decoded


def _decode_component(
    component: _Component, files: Mapping[str, FileEntry], *, what: str
) -> TensorTable:
    specs, sizes = decode_specs(component.names, component.dtypes, component.shapes, what=what)
    places, boxes = _places_and_boxes(component, sizes, what=what)
    lengths = np.array([files[name].nbytes for name in places.files], np.int64)
    check_places(places, lengths, what=what)
    return TensorTable(specs, places, boxes)


def decode_specs(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], *, what: str
) -> tuple[dict[str, TensorSpec], list[int]]:
    """Decode the tensors of a component, by key; also return the bytes of each."""
    if not len(names) == len(dtypes) == len(shapes):
        raise FormatError(f"{what}: `names`, `dtypes` and `shapes` differ in length")
    specs_by_key = dict(zip(names, map(TensorSpec, names, dtypes, shapes), strict=True))
    if len(specs_by_key) != len(names):
        raise FormatError(f"{what}: a tensor's name appears twice")
    return specs_by_key, _Sizes(what).of(names, [*zip(dtypes, shapes, strict=True)])


class _Sizes(dict[_Kind, int]):
    """Cache of tensors' sizes in bytes by dtype and shape, as most occur often."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __missing__(self, kind: _Kind) -> int:
        nbytes = _nbytes(kind, what=self._what)
        if len(self) < _MAX_KINDS:
            self[kind] = nbytes
        return nbytes

    def of(self, names: Iterable[str], kinds: Sequence[_Kind]) -> list[int]:
        """Compute each tensor's size in bytes; an error names the tensor."""
        try:
            return [*map(self.__getitem__, kinds)]
        except FormatError:
            named = zip(names, kinds, strict=True)
            return [_nbytes(kind, what=f"{self._what}, tensor {n[:200]!r}") for n, kind in named]


def _nbytes(kind: _Kind, *, what: str) -> int:
    dtype, shape = kind
    if dtype not in ITEM_NBYTES:
        raise FormatError(f"{what}: unknown dtype {dtype[:40]!r}")
    return check_shape(list(shape), ITEM_NBYTES[dtype], what=what)


def _places_and_boxes(
    component: _Component, sizes: list[int], *, what: str
) -> tuple[Places, Boxes | None]:
    """Return the positions of the shards, and their boxes if they are no whole tensors; checked."""
    _check_columns(component, what=what)
    shards = component.shards
    if shards.offsets is None or shards.sizes is None:
        return _whole_tensors(component, sizes, what=what), None
    tensor = np.array(shards.tensor, np.int64)
    order = np.argsort(tensor, kind="stable")
    rows = ([of_all[n] for n in order.tolist()] for of_all in (shards.offsets, shards.sizes))
    boxes = Boxes(tensor[order], *map(Ragged.from_lists, rows))
    try:
        counts = check_boxes(component.shapes, boxes)
    except Unfit as error:
        name = component.names[error.tensor]
        raise FormatError(f"{what}, tensor {name[:200]!r}: {error}") from error
    item_nbytes = np.array([ITEM_NBYTES[dtype] for dtype in component.dtypes], np.int64)
    file, start = (np.array(of_all, np.int64)[order] for of_all in (shards.file, shards.start))
    return Places(component.files, file, start, counts * item_nbytes[boxes.tensor]), boxes


def _check_columns(component: _Component, *, what: str) -> None:
    shards = component.shards
    columns: list[list[Any]] = [shards.tensor, shards.file, shards.start]
    if (shards.offsets is None) != (shards.sizes is None):
        raise FormatError(f"{what}: of `offsets` and `sizes`, one is null and one is not")
    columns += [column for column in (shards.offsets, shards.sizes) if column is not None]
    if len({len(column) for column in columns}) != 1:
        raise FormatError(f"{what}: the columns of `shards` differ in length")
    if max(shards.tensor, default=-1) >= len(component.names):
        raise FormatError(f"{what}: a shard of a tensor that does not exist")
    if max(shards.file, default=-1) >= len(component.files):
        raise FormatError(f"{what}: a shard in a file that does not exist")


def _whole_tensors(component: _Component, sizes: list[int], *, what: str) -> Places:
    shards = component.shards
    tensor = np.array(shards.tensor, np.int64)
    counts = np.bincount(tensor, minlength=len(sizes))
    if (wrong := np.flatnonzero(counts != 1)).size:
        name = component.names[wrong[0]]
        problem = "no shard" if counts[wrong[0]] == 0 else "two shards, each the whole"
        raise FormatError(f"{what}, tensor {name[:200]!r}: {problem}")
    file, start = np.empty_like(tensor), np.empty_like(tensor)
    file[tensor], start[tensor] = shards.file, shards.start
    return Places(component.files, file, start, np.array(sizes, np.int64))


def check_places(places: Places, lengths: Column, *, what: str) -> None:
    """Check that every shard lies in the data of its file, of these lengths, and no two overlap."""
    places = places.select_shards(np.lexsort((places.nbytes, places.start, places.file)))
    lengths = lengths[places.file]
    # Not by their sum, which may be beyond 64 bits.
    outside = (places.start > lengths) | (places.nbytes > lengths - places.start)
    if outside.any():
        name, start = _first_wrong(places, outside)
        raise FormatError(f"{what}: the shard at byte {start:,} ends beyond the end of {name}")
    stop = places.start + places.nbytes
    shared = places.start < layout.DATA_ALIGNMENT
    shared[1:] |= (places.file[1:] == places.file[:-1]) & (places.start[1:] < stop[:-1])
    if shared.any():
        name, start = _first_wrong(places, shared)
        raise FormatError(f"{what}: shards overlap at byte {start:,} of {name}")


def _first_wrong(places: Places, wrong: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[str, int]:
    """Return file and first byte of the first wrong entry."""
    number = int(np.argmax(wrong))
    return places.files[places.file[number]], int(places.start[number])
