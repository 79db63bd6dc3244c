"""The index: in which file and where each tensor lies (docs/format.md, section 5)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.errors import CorruptData, FormatError, HoldfastError
from holdfast.format import blocks as block_digests
from holdfast.format import layout, sealed, strictjson
from holdfast.format.layout import BLOCK_NBYTES, FORMAT_VERSION
from holdfast.format.manifest import FileEntry, check_block_nbytes
from holdfast.format.tensors import ITEM_NBYTES, TensorFile, check_shape
from holdfast.store.base import Buffer

MAX_INDEX_NBYTES = 64 * 1024 * 1024
MAX_INDEX_VALUES = 8_000_000

_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_PRIME = 2**61 - 1
_RANDOM = random.Random()  # of our own: seeded by the system, out of reach of random.seed
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Box = tuple[tuple[int, ...], tuple[int, ...]]


class ShardEntry(msgspec.Struct, frozen=True, gc=False):
    """One shard: the bytes [start, start + nbytes) of `file`.

    `offsets` and `sizes` say which box of the tensor it is, in elements; both are None when it
    is the whole tensor.
    """

    file: str
    start: int
    nbytes: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: its key in the component, its index dtype, its shape and its shards."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]


class Index(msgspec.Struct, frozen=True):
    """`blocks`: file → its block digests, joined. `components`: name → key → tensor."""

    blocks: Mapping[str, bytes]
    components: Mapping[str, Mapping[str, TensorEntry]]
    block_nbytes: int


class _Shards(msgspec.Struct):
    tensor: list[_Count]
    file: list[_Count]
    start: list[_Count]
    offsets: list[list[_Count]] | None
    sizes: list[list[_Count]] | None


class _Component(msgspec.Struct):
    files: list[str]
    names: list[str]
    dtypes: list[str]
    shapes: list[Any]
    shards: _Shards


class _Document(msgspec.Struct):
    block_nbytes: int
    blocks: dict[str, str]
    components: dict[str, _Component]


def encode_index(
    files: Mapping[str, Sequence[TensorFile]],
    blocks: Mapping[str, bytes],
    block_nbytes: int = BLOCK_NBYTES,
) -> bytes:
    """The index of whole tensors. `files`: component → its tensor files, in order.

    `blocks` has the digests of every file of the manifest except the index itself.
    """
    document = {
        "holdfast": FORMAT_VERSION,
        "block_nbytes": block_nbytes,
        "blocks": {name: digests.hex() for name, digests in blocks.items()},
        "components": {name: _columns(of_name) for name, of_name in files.items()},
    }
    return msgspec.json.encode(document)


def decode_index(data: Buffer, *, files: Mapping[str, FileEntry], what: str) -> Index:
    """The index in `data`, checked against the manifest's `files`.

    Raises:
        CorruptData: the block digests are not those of the manifest's files.
        FormatError: anything else that the format does not allow.
    """
    value = strictjson.loads(
        data, what=what, max_nbytes=MAX_INDEX_NBYTES, max_values=MAX_INDEX_VALUES
    )
    sealed.check_version(value, what=what)
    document = strictjson.convert(value, _Document, what=what)
    del value
    check_block_nbytes(document.block_nbytes, what=what)
    _check_file_lists(document, files, what=what)
    return Index(
        blocks=_decode_blocks(document, files, what=what),
        components={
            name: _decode_component(component, files, what=f"{what}, component {name!r}")
            for name, component in document.components.items()
        },
        block_nbytes=document.block_nbytes,
    )


def _columns(files: Sequence[TensorFile]) -> dict[str, Any]:
    specs = [spec for file in files for spec in file.specs]
    return {
        "files": [file.name for file in files],
        "names": [spec.key for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [spec.shape for spec in specs],
        "shards": {
            "tensor": list(range(len(specs))),
            "file": [number for number, file in enumerate(files) for _ in file.specs],
            "start": [start for file in files for start in file.starts],
            "offsets": None,
            "sizes": None,
        },
    }


def _check_file_lists(document: _Document, files: Mapping[str, FileEntry], *, what: str) -> None:
    """The components and their files are those of the manifest."""
    expected = {name for name in files if name != layout.INDEX}
    listed: set[str] = set()
    for name, component in document.components.items():
        try:
            layout.check_component(name)
        except HoldfastError as err:
            raise FormatError(f"{what}: {str(err)[:200]}") from err
        numbers = range(len(component.files))
        if component.files != [layout.tensor_file(name, number) for number in numbers]:
            raise FormatError(f"{what}: component {name!r} has other files than its own")
        listed |= {layout.tree_file(name), *component.files}
    if listed != expected:
        odd = min(listed ^ expected)
        raise FormatError(f"{what}: lists other files than the manifest ({odd[:200]!r})")


def _decode_blocks(
    document: _Document, files: Mapping[str, FileEntry], *, what: str
) -> dict[str, bytes]:
    if document.blocks.keys() != files.keys() - {layout.INDEX}:
        raise FormatError(f"{what}: `blocks` lists other files than the manifest")
    decoded: dict[str, bytes] = {}
    for name, text in document.blocks.items():
        num_blocks = block_digests.num_blocks(files[name].nbytes, document.block_nbytes)
        if len(text) != 2 * block_digests.DIGEST_NBYTES * num_blocks or not _HEX.fullmatch(text):
            raise FormatError(f"{what}: {name} should have {num_blocks:,} block digests")
        decoded[name] = bytes.fromhex(text)
        if block_digests.file_digest(files[name].nbytes, decoded[name]) != files[name].digest:
            raise CorruptData(f"{what}: the block digests of {name} are not the manifest's")
    return decoded


def _decode_component(
    component: _Component, files: Mapping[str, FileEntry], *, what: str
) -> dict[str, TensorEntry]:
    names = component.names
    if not len(names) == len(component.dtypes) == len(component.shapes):
        raise FormatError(f"{what}: `names`, `dtypes` and `shapes` differ in length")
    if len(set(names)) != len(names):
        raise FormatError(f"{what}: a tensor's name appears twice")
    sizes = [
        _tensor_nbytes(name, dtype, shape, what=what)
        for name, dtype, shape in zip(names, component.dtypes, component.shapes, strict=True)
    ]
    shards_of = _decode_shards(component, sizes, what=what)
    _check_places([shard for shards in shards_of for shard in shards], files, what=what)
    return {
        name: TensorEntry(name, component.dtypes[i], tuple(component.shapes[i]), shards_of[i])
        for i, name in enumerate(names)
    }


def _tensor_nbytes(name: str, dtype: str, shape: Any, *, what: str) -> int:
    if dtype not in ITEM_NBYTES:
        raise FormatError(f"{what}, tensor {name[:200]!r}: unknown dtype {dtype[:40]!r}")
    return check_shape(shape, ITEM_NBYTES[dtype], what=f"{what}, tensor {name[:200]!r}")


def _decode_shards(
    component: _Component, sizes: list[int], *, what: str
) -> list[tuple[ShardEntry, ...]]:
    """The shards of each tensor, complete and each inside its tensor."""
    shards = component.shards
    _check_columns(component, what=what)
    if shards.offsets is None or shards.sizes is None:
        return _whole_tensors(component, sizes, what=what)
    found: list[list[ShardEntry]] = [[] for _ in sizes]
    columns = zip(
        shards.tensor, shards.file, shards.start, shards.offsets, shards.sizes, strict=True
    )
    for tensor, file, start, offsets, extent in columns:
        where = f"{what}, tensor {component.names[tensor][:200]!r}"
        shape = component.shapes[tensor]
        nbytes = check_shape(extent, ITEM_NBYTES[component.dtypes[tensor]], what=where)
        if not len(offsets) == len(extent) == len(shape):
            raise FormatError(f"{where}: a shard of another number of dimensions")
        if any(o + s > n for o, s, n in zip(offsets, extent, shape, strict=True)):
            raise FormatError(f"{where}: a shard reaches out of the tensor")
        name = component.files[file]
        found[tensor].append(ShardEntry(name, start, nbytes, tuple(offsets), tuple(extent)))
    for name, shape, entries in zip(component.names, component.shapes, found, strict=True):
        boxes = [(entry.offsets or (), entry.sizes or ()) for entry in entries]
        if not boxes or not tiles(shape, boxes):
            raise FormatError(f"{what}, tensor {name[:200]!r}: its shards do not tile it")
    return [tuple(entries) for entries in found]


def _check_columns(component: _Component, *, what: str) -> None:
    shards = component.shards
    columns: list[list[Any]] = [shards.tensor, shards.file, shards.start]
    if (shards.offsets is None) != (shards.sizes is None):
        raise FormatError(f"{what}: of `offsets` and `sizes`, one is null and one is not")
    columns += [column for column in (shards.offsets, shards.sizes) if column is not None]
    if len({len(column) for column in columns}) != 1:
        raise FormatError(f"{what}: the columns of `shards` differ in length")
    if max(shards.tensor, default=-1) >= len(component.names):
        raise FormatError(f"{what}: a shard of a tensor that is not there")
    if max(shards.file, default=-1) >= len(component.files):
        raise FormatError(f"{what}: a shard in a file that is not there")


def _whole_tensors(
    component: _Component, sizes: list[int], *, what: str
) -> list[tuple[ShardEntry, ...]]:
    shards = component.shards
    found: list[tuple[ShardEntry, ...]] = [()] * len(sizes)
    for tensor, file, start in zip(shards.tensor, shards.file, shards.start, strict=True):
        if found[tensor]:
            raise FormatError(
                f"{what}, tensor {component.names[tensor][:200]!r}: two shards, each the whole"
            )
        found[tensor] = (ShardEntry(component.files[file], start, sizes[tensor]),)
    if () in found:
        name = component.names[found.index(())]
        raise FormatError(f"{what}, tensor {name[:200]!r}: no shard")
    return found


def _check_places(
    shards: Sequence[ShardEntry], files: Mapping[str, FileEntry], *, what: str
) -> None:
    """Every shard lies in the data of its file, and no two share a byte."""
    name, stop = "", 0
    for shard in sorted(shards, key=_place):
        if shard.file != name:
            name, stop = shard.file, layout.DATA_ALIGNMENT
        if shard.start < stop:
            raise FormatError(f"{what}: shards overlap at byte {shard.start:,} of {name}")
        stop = shard.start + shard.nbytes
        if stop > files[name].nbytes:
            raise FormatError(f"{what}: a shard ends at byte {stop:,}, behind the end of {name}")


def _place(shard: ShardEntry) -> tuple[str, int, int]:
    return (shard.file, shard.start, shard.nbytes)


def tiles(shape: Sequence[int], boxes: Sequence[_Box]) -> bool:
    """Whether the boxes (offsets, sizes), each inside `shape`, cover it exactly once.

    Compares measures: give every coordinate c of dimension d a random number F_d(c) modulo a
    prime, and a box the product over d of F_d(stop) - F_d(start). That is additive, so a tiling
    has the measure of the whole. The other way round, the difference between a box's cover
    and the whole is a polynomial of degree at most 128 in the F, which is zero by chance with
    probability below 128 / 2**61 (Schwartz and Zippel). Linear, where comparing boxes is not.
    """
    measures: list[dict[int, int]] = [{} for _ in shape]

    def measure(dimension: int, coordinate: int) -> int:
        known = measures[dimension]
        if coordinate not in known:
            known[coordinate] = _RANDOM.randrange(_PRIME)
        return known[coordinate]

    def mass(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for dimension, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            side = measure(dimension, start + size) - measure(dimension, start)
            product = product * side % _PRIME
        return product

    return sum(mass(*box) for box in boxes) % _PRIME == mass([0] * len(shape), shape)
