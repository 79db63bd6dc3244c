"""The index of a checkpoint: file and position of each tensor (docs/format.md, section 5)."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from operator import gt
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from holdfast.errors import CorruptData, FormatError, HoldfastError, LimitExceeded
from holdfast.format import blocks as block_digests
from holdfast.format import layout, strictjson
from holdfast.format.blocks import max_stored_nbytes
from holdfast.format.boxes import Boxes, Column, Ragged, Unfit, check_boxes
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
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Count, ...], Meta(max_length=MAX_DIMS)]
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
        self.shards = shards
        """Positions of all shards, in the order of `boxes`; without them, of `specs`."""
        self.boxes = boxes
        """The boxes of all shards; None if every tensor is one shard."""

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
    def places(self) -> Places | None:
        """Positions of the tensors, in the order of `specs`; None if any has several shards."""
        return self.shards if self.boxes is None else None

    def part(self, keys: Mapping[str, str]) -> TensorTable:
        """Return the whole tensors of some keys under new ones. `keys`: new → stored."""
        if self.boxes is not None:
            raise FormatError(f"{min(keys.values(), default='')!r}: a tensor of one rank has boxes")
        specs = {
            new: msgspec.structs.replace(self.specs[old], key=new) for new, old in keys.items()
        }
        return TensorTable(specs, self.shards.select_shards(self.numbers([*keys.values()])))

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
        if self.boxes is None and keys == [*self.specs]:
            return [*self.specs.values()], self.shards
        numbers, specs = self.numbers(keys), [self.specs[key] for key in keys]
        if self.boxes is None:
            return specs, self.shards.select_shards(numbers)
        first = self._first[numbers]
        assert (self._first[numbers + 1] == first + 1).all(), "a tensor of several shards"
        return specs, self.shards.select_shards(first)

    def is_whole(self, key: str) -> bool:
        """Whether a tensor is stored as one shard."""
        number = self._numbers[key]
        return self.boxes is None or bool(self._first[number + 1] - self._first[number] == 1)

    def boxes_of(self, key: str) -> tuple[Column, Column]:
        """Return a tensor's shards and their boxes as (start, stop), at least of one dimension."""
        number, shape = self._numbers[key], self.specs[key].shape
        num_dims = len(shape)
        if self.boxes is None:
            shards, start = np.array([number]), np.zeros((1, num_dims), np.int64)
            sizes = np.array([shape], np.int64)
        else:
            shards = np.arange(self._first[number], self._first[number + 1])
            start, sizes = (
                of_box.select_rows(shards, num_dims)
                for of_box in (self.boxes.offsets, self.boxes.sizes)
            )
        if not shape:
            start, sizes = np.zeros((len(shards), 1), np.int64), np.ones((len(shards), 1), np.int64)
        return shards, np.stack([start, start + sizes], axis=1)

    def __getitem__(self, key: str) -> TensorEntry:
        spec, number = self.specs[key], self._numbers[key]
        numbers = range(number, number + 1)
        if self.boxes is not None:
            numbers = range(*self._first[number : number + 2].tolist())
        return TensorEntry(key, spec.dtype, spec.shape, tuple(map(self._entry, numbers)))

    def _entry(self, number: int) -> ShardEntry:
        at = self.shards
        place = at.files[at.file[number]], int(at.start[number]), int(at.nbytes[number])
        if self.boxes is None:
            return ShardEntry(*place)
        return ShardEntry(*place, self.boxes.offsets.row(number), self.boxes.sizes.row(number))

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
    def _first(self) -> Column:
        """Position of the first shard of each tensor, and of the end; for tables with boxes."""
        assert self.boxes is not None
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
    tensor: list[_Count]
    file: list[_Count]
    start: list[_Count]
    offsets: list[_Shape] | None
    sizes: list[_Shape] | None


class _Component(msgspec.Struct):
    files: list[str]
    names: list[str]
    dtypes: list[str]
    shapes: list[_Shape]
    shards: _Shards


class _StoredColumns(msgspec.Struct):
    nbytes: list[_Count]
    digests: str


class _IndexDocument(msgspec.Struct, omit_defaults=True):
    """Members of an index document, in the order in which they are written."""

    holdfast: int
    block_nbytes: int
    blocks: dict[str, str]
    components: dict[str, _Component]
    stored: dict[str, _StoredColumns] = {}


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
        document["stored"] = {
            name: {"nbytes": blocks_of.lengths, "digests": blocks_of.digests.hex()}
            for name, blocks_of in stored.items()
        }
    data = msgspec.json.encode(document)
    strictjson.check_limits(data, what=layout.INDEX, **_LIMITS)
    return data


def check_size(
    specs: Sequence[TensorSpec],
    num_boxes: Sequence[int],
    *,
    nbytes_of_boxes: int,
    files_nbytes: int,
) -> None:
    """Expect that the index of tensors in boxes will not be too large, before it exists."""
    by_tensor = [*zip(specs, num_boxes, strict=True)]
    num_values = sum(4 + len(s.shape) + n * (5 + 2 * len(s.shape)) for s, n in by_tensor)
    names = sum(len(spec.key) + 20 + 3 * len(str(spec.shape)) // 2 for spec in specs)
    digests = 2 * block_digests.DIGEST_NBYTES * (files_nbytes // BLOCK_NBYTES)
    nbytes = names + nbytes_of_boxes + digests
    if num_values > MAX_INDEX_VALUES or nbytes > MAX_INDEX_NBYTES:
        raise LimitExceeded(
            f"{len(specs):,} tensors in {sum(num_boxes):,} boxes: their index takes {num_values:,} "
            f"values and about {nbytes:,} bytes; at most {MAX_INDEX_VALUES:,} and "
            f"{MAX_INDEX_NBYTES:,} are accepted. Nothing was written. Shard each tensor over fewer "
            "ranks, as HSDP does, or join small tensors"
        )


def decode_index(data: Buffer, *, files: Mapping[str, FileEntry], what: str) -> Index:
    """Decode the index in `data`, and check it against the manifest's `files`."""
    document = _decode_document(data, what=what)
    check_block_nbytes(document.block_nbytes, what=what)
    _check_file_lists(document, files, what=what)
    return Index(
        blocks=_decode_blocks(document, files, what=what),
        components={
            name: _decode_component(component, files, what=f"{what}, component {name!r}")
            for name, component in document.components.items()
        },
        block_nbytes=document.block_nbytes,
        stored=_decode_stored(document, files, what=what),
    )


def files_of_index(data: Buffer, *, what: str) -> tuple[str, ...]:
    """List the files that an index has digests of: all of a checkpoint but the index itself."""
    return tuple(_decode_document(data, what=what).blocks)


def _decode_document(data: Buffer, *, what: str) -> _IndexDocument:
    document = strictjson.loads_as(data, _IndexDocument, **_LIMITS)
    if document is not None and document.holdfast == FORMAT_VERSION:
        return document
    strictjson.check_limits(data, what=what, **_LIMITS)
    if memoryview(data).nbytes > MAX_UNKNOWN_NBYTES:
        _check_unknown(bytes(data), what=what)
    value = strictjson.loads(data, what=what, **_LIMITS)
    strictjson.check_version(value, what=what)
    return strictjson.convert(value, _IndexDocument, what=what)


def _check_unknown(text: bytes, *, what: str) -> None:
    """Check that unknown members are short before they are built, as small ones can grow large."""
    try:
        raw = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("holdfast", b""))
        version = int(raw) if len(raw) < _MAX_VERSION_LENGTH else None
        strictjson.check_version({"holdfast": version}, what=what)
        known = msgspec.json.encode(msgspec.json.decode(text, type=_IndexDocument))
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


def _check_file_lists(
    document: _IndexDocument, files: Mapping[str, FileEntry], *, what: str
) -> None:
    """Check that the components and their files are those of the manifest."""
    expected = {name for name in files if name != layout.INDEX}
    names = {layout.plain_file(name): name for name in expected}
    listed: set[str] = set()
    for name, component in document.components.items():
        try:
            layout.check_component(name)
        except HoldfastError as err:
            raise FormatError(f"{what}: {str(err)[:200]}") from err
        numbers = range(len(component.files))
        own = [layout.tree_file(name), *(layout.tensor_file(name, number) for number in numbers)]
        tree, *tensors = (names.get(plain, plain) for plain in own)
        if component.files != tensors:
            raise FormatError(f"{what}: component {name!r} has other files than its own")
        listed |= {tree, *tensors}
    if listed != expected:
        odd = min(listed ^ expected)
        raise FormatError(f"{what}: lists other files than the manifest ({odd[:200]!r})")


def _decode_blocks(
    document: _IndexDocument, files: Mapping[str, FileEntry], *, what: str
) -> dict[str, bytes]:
    if document.blocks.keys() != files.keys() - {layout.INDEX}:
        raise FormatError(f"{what}: `blocks` lists other files than the manifest")
    decoded: dict[str, bytes] = {}
    for name, text in document.blocks.items():
        num_blocks = block_digests.num_blocks(files[name].nbytes, document.block_nbytes)
        decoded[name] = _digests(text, num_blocks, what=f"{what}: {name}")
        if block_digests.file_digest(files[name].nbytes, decoded[name]) != files[name].digest:
            raise CorruptData(f"{what}: the block digests of {name} are not the manifest's")
    return decoded


def _digests(text: str, num_blocks: int, *, what: str) -> bytes:
    if len(text) != 2 * block_digests.DIGEST_NBYTES * num_blocks or not _HEX.fullmatch(text):
        raise FormatError(f"{what} should have {num_blocks:,} block digests")
    return bytes.fromhex(text)


def _decode_stored(
    document: _IndexDocument, files: Mapping[str, FileEntry], *, what: str
) -> dict[str, StoredBlocks]:
    """Decode the stored blocks of compressed files; check their numbers and lengths."""
    entries = {name: entry.stored for name, entry in files.items() if entry.stored is not None}
    if document.stored.keys() != entries.keys():
        raise FormatError(f"{what}: `stored` lists other files than the manifest")
    decoded: dict[str, StoredBlocks] = {}
    for name, columns in document.stored.items():
        nbytes, num_blocks = files[name].nbytes, len(columns.nbytes)
        expected = block_digests.num_blocks(nbytes, document.block_nbytes)
        if num_blocks != expected:
            raise FormatError(f"{what}: {name} should have {expected:,} stored blocks")
        spans = block_digests.list_blocks(nbytes, document.block_nbytes)
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
    names = component.names
    if not len(names) == len(component.dtypes) == len(component.shapes):
        raise FormatError(f"{what}: `names`, `dtypes` and `shapes` differ in length")
    specs = map(TensorSpec, names, component.dtypes, component.shapes)
    specs_by_key = dict(zip(names, specs, strict=True))
    if len(specs_by_key) != len(names):
        raise FormatError(f"{what}: a tensor's name appears twice")
    kinds = [*zip(component.dtypes, component.shapes, strict=True)]
    sizes = _Sizes(what).of(names, kinds)
    places, boxes = _places_and_boxes(component, sizes, what=what)
    _check_places(places, files, what=what)
    return TensorTable(specs_by_key, places, boxes)


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


def _check_places(places: Places, files: Mapping[str, FileEntry], *, what: str) -> None:
    """Check that every shard lies in the data of its file, and no two overlap."""
    places = places.select_shards(np.lexsort((places.nbytes, places.start, places.file)))
    lengths = np.array([files[name].nbytes for name in places.files], np.int64)[places.file]
    # Not by their sum, which may be beyond 64 bits.
    outside = (places.start > lengths) | (places.nbytes > lengths - places.start)
    if outside.any():
        name, start = _first_wrong(places, outside)
        raise FormatError(f"{what}: a shard from byte {start:,} on ends behind the end of {name}")
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
