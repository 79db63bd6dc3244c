"""The index: columns there and back, and every place checked."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import SPECS, is_refused, make_manifest, model_files, mutate

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UnsupportedVersion
from holdfast.format import blocks, index, tensors
from holdfast.format.boxes import Boxes, Ragged, Unfit, check_boxes
from holdfast.format.index import Places, ShardEntry, TensorTable, decode_index, encode_index
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import TensorSpec, lay_out

MODEL = "model-00000.safetensors"


def sample() -> dict[str, Any]:
    return dict(json.loads(model_files()["index.json"]))


def read(document: Any, files: dict[str, FileEntry] | None = None) -> index.Index:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_index(data, files=files or make_manifest().files, what="the-document")


def sharded(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """The sample with one U8 tensor in shards, one behind the other from byte 4,096."""
    document = sample()
    starts, position = [], 4096
    for _, sizes in boxes:
        starts.append(position)
        position += math.prod(sizes)
    document["components"]["model"] |= {"names": ["w"], "dtypes": ["U8"], "shapes": [shape]}
    document["components"]["model"]["shards"] = {
        "tensor": [0] * len(boxes),
        "file": [0] * len(boxes),
        "start": starts,
        "offsets": [offsets for offsets, _ in boxes],
        "sizes": [sizes for _, sizes in boxes],
    }
    return document


def tiles(shape: Any, boxes: Any) -> bool:
    """Whether the boxes of one tensor pass."""
    offsets, sizes = (Ragged.from_lists([box[part] for box in boxes]) for part in (0, 1))
    try:
        check_boxes([shape], Boxes(np.zeros(len(boxes), np.int64), offsets, sizes))
    except Unfit:
        return False
    return True


def test_an_index_comes_back_equal() -> None:
    found = read(sample())
    files = model_files()
    assert found.block_nbytes == 8388608
    assert found.blocks == {
        name: blocks.digest_blocks(data) for name, data in files.items() if name != "index.json"
    }
    (plan,) = lay_out("model", SPECS)
    entries = found.components["model"]
    assert list(entries) == [spec.key for spec in plan.specs]
    for spec, start in zip(plan.specs, plan.starts, strict=True):
        entry = entries[spec.key]
        assert (entry.key, entry.dtype, entry.shape) == (spec.key, spec.dtype, spec.shape)
        assert entry.shards == (ShardEntry(MODEL, start, spec.nbytes),)


def test_components_without_tensors_and_with_two_files_come_back() -> None:
    specs = [TensorSpec(f"k{i}", "U8", (2,)) for i in range(50_001)]
    plan = lay_out("model", specs)
    nbytes = {file.name: file.nbytes for file in plan} | {
        "model-00000.json": 2,
        "rng-00000.json": 0,
    }
    digests = {
        name: b"".join(bytes([i]) * 32 for i in range(blocks.num_blocks(size)))
        for name, size in nbytes.items()
    }
    files = {
        name: FileEntry(nbytes=size, digest=blocks.file_digest(size, digests[name]))
        for name, size in nbytes.items()
    }
    found = read(encode_index({"model": plan, "rng": []}, digests), files)
    assert found.components["rng"] == {}
    assert len(found.components["model"]) == 50_001
    assert found.components["model"]["k50000"].shards[0].file == "model-00001.safetensors"


def test_boxes_in_any_order_are_read_by_tensor() -> None:
    document = sharded([4], [([0], [1]), ([1], [3]), ([0], [2]), ([2], [1])])
    of_model = document["components"]["model"]
    of_model |= {"names": ["w", "v"], "dtypes": ["U8", "U8"], "shapes": [[4], [3]]}
    of_model["shards"]["tensor"] = [0, 0, 1, 1]
    for column in of_model["shards"].values():
        column[:] = [column[at] for at in (3, 1, 2, 0)]
    found = read(document).components["model"]
    assert [(s.offsets, s.start) for s in found["w"].shards] == [((1,), 4097), ((0,), 4096)]
    assert [(s.offsets, s.start) for s in found["v"].shards] == [((2,), 4102), ((0,), 4100)]


def test_shards_that_tile_a_tensor_are_read() -> None:
    boxes = [([0, 0], [2, 3]), ([0, 3], [2, 1]), ([2, 0], [1, 4])]
    entry = read(sharded([3, 4], boxes)).components["model"]["w"]
    assert [(list(s.offsets or ()), list(s.sizes or ())) for s in entry.shards] == boxes
    assert [shard.nbytes for shard in entry.shards] == [6, 2, 4]


def check_shards_must_tile() -> None:
    for shape, boxes in [
        ([4], [([0], [3])]),
        ([4], [([0], [4]), ([0], [0]), ([3], [1])]),
        ([4], [([0], [2]), ([1], [2]), ([3], [1])]),
        ([4], [([0], [2]), ([0], [2])]),
        ([2, 2], [([0, 0], [1, 2]), ([0, 0], [2, 1]), ([1, 1], [1, 1])]),
        ([2, 2], [([0, 0], [2, 1]), ([0, 0], [1, 2])]),
        ([], [([], []), ([], [])]),
        ([4], []),
        ([0], []),
    ]:
        with pytest.raises(FormatError, match="tile"):
            read(sharded(shape, boxes))


def test_shards_must_tile_their_tensor() -> None:
    """R29, D14: holes, overlaps, and holes hidden by overlaps of the same volume."""
    check_shards_must_tile()


@each(
    ("shape", "boxes"),
    [
        ([4], [([1], [4])]),
        ([4], [([2**62], [2**62])]),
        ([4], [([0, 0], [4, 1])]),
        ([4], [([], [])]),
        ([4], [([0], [])]),
        ([4], [([0], [-4])]),
        ([4], [([-1], [5])]),
        ([4], [([0], [True])]),
        ([4], [([0.0], [4])]),
        ([4], [(None, [4])]),
    ],
)
def test_shards_outside_their_tensor_are_refused(shape: Any, boxes: Any) -> None:
    """R29: a box with other dimensions, or that reaches out."""
    document = sharded(shape, [])
    shards = document["components"]["model"]["shards"]
    for offsets, sizes in boxes:
        shards["offsets"].append(offsets)
        shards["sizes"].append(sizes)
        for name, value in (("tensor", 0), ("file", 0), ("start", 4096)):
            shards[name].append(value)
    with pytest.raises(FormatError, match="the-document"):
        read(document)


@given(seed=st.integers(0, 2**32), dims=st.integers(1, 4))
def test_tiles_accepts_tilings_and_nothing_else(seed: int, dims: int) -> None:
    """Against counting cells: random guillotine cuts, then one box moved, grown or dropped."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(dims)]
    boxes = [([0] * dims, list(shape))]
    for _ in range(rng.randint(0, 6)):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(dims)
        cut = rng.randint(0, sizes[axis])
        second = list(offsets)
        second[axis] += cut
        boxes.append((offsets, [*sizes[:axis], cut, *sizes[axis + 1 :]]))
        boxes.append((second, [*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :]]))
    assert tiles(shape, boxes)
    victim, axis = rng.randrange(len(boxes)), rng.randrange(dims)
    offsets, sizes = boxes[victim]
    offsets[axis] = rng.randint(0, shape[axis])
    sizes[axis] = rng.randint(0, shape[axis] - offsets[axis])
    cells: dict[tuple[int, ...], int] = {}
    for offsets, sizes in boxes:
        for cell in _cells(offsets, sizes):
            cells[cell] = cells.get(cell, 0) + 1
    everywhere_once = all(n == 1 for n in cells.values()) and len(cells) == math.prod(shape)
    assert tiles(shape, boxes) == everywhere_once


def _cells(offsets: list[int], sizes: list[int]) -> list[tuple[int, ...]]:
    cells: list[tuple[int, ...]] = [()]
    for start, size in zip(offsets, sizes, strict=True):
        cells = [(*cell, i) for cell in cells for i in range(start, start + size)]
    return cells


def test_100_000_shards_of_one_tensor_are_checked_in_linear_work() -> None:
    """R29: a hostile index cannot make the check of tilings quadratic."""
    boxes = [((i, j), (1, 1)) for i in range(400) for j in range(250)]
    assert tiles((400, 250), boxes)
    assert not tiles((400, 250), [*boxes[:-1], boxes[0]])


def many_boxes(num: int) -> tuple[TensorTable, dict[str, int]]:
    """`num` tensors, each cut by rows over `num` files; and the lengths of the files."""
    nbytes = 4 * 512 * 2
    tensor, file = np.repeat(np.arange(num), num), np.tile(np.arange(num), num)
    first = 2 * np.arange(num * num + 1)
    offsets = np.stack([4 * file, np.zeros_like(file)], axis=1).ravel()
    boxes = Boxes(tensor, Ragged(offsets, first), Ragged(np.tile([4, 512], num * num), first))
    names = [f"model-{number:05d}.safetensors" for number in range(num)]
    places = Places(names, file, 4096 + nbytes * tensor, np.full(num * num, nbytes))
    specs = {key: TensorSpec(key, "BF16", (4 * num, 512)) for key in map("w{}".format, range(num))}
    return TensorTable(specs, places, boxes), dict.fromkeys(names, 4096 + num * nbytes)


def test_an_index_that_no_reader_would_accept_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, _ = many_boxes(3)
    num_values = 1 + sum(map(encode_index({"model": table}, {}).count, (b"[", b"{", b",")))
    monkeypatch.setitem(index._LIMITS, "max_values", num_values)
    encode_index({"model": table}, {})
    monkeypatch.setitem(index._LIMITS, "max_values", num_values - 1)
    with pytest.raises(LimitExceeded, match=r"index\.json: more than"):
        encode_index({"model": table}, {})


def test_the_size_of_an_index_is_known_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, lengths = many_boxes(3)
    text = encode_index({"model": table}, {})
    num_values = 1 + sum(map(text.count, (b"[", b"{", b",")))
    specs = [*table.specs.values()]

    def fits(nbytes_of_boxes: int) -> bool:
        return index.fits_one_document(
            specs,
            [3] * 3,
            nbytes_of_boxes=nbytes_of_boxes,
            files_nbytes=sum(lengths.values()),
        )

    assert fits(len(text))
    assert not fits(index.MAX_INDEX_NBYTES)
    monkeypatch.setattr(index, "MAX_INDEX_VALUES", num_values // 2)
    assert not fits(len(text))


def test_long_unknown_members_are_refused_before_they_are_built() -> None:
    """R29: a value of 8 bytes can take 250 in memory."""
    document, inside = sample(), sample()
    document["LATER"] = inside["components"]["model"]["LATER"] = None
    most = index.MAX_UNKNOWN_NBYTES // 8

    def text(of: Any, num: int) -> bytes:
        values = b"[%s0]" % (b'{"a":0},' * num)
        return json.dumps(of).encode().replace(b'"LATER": null', b'"LATER": %s' % values)

    assert read(text(document, most - 1000)).block_nbytes == 8388608
    for of in (document, inside):
        data = text(of, most + 1000)
        tracemalloc.start()
        try:
            with pytest.raises(LimitExceeded, match="bytes of unknown members"):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
        finally:
            tracemalloc.stop()
    for version, found in ((2, UnsupportedVersion), ("1", FormatError), (True, FormatError)):
        with pytest.raises(found):
            read(text({**document, "holdfast": version}, most + 1000))
    with pytest.raises(FormatError, match="not an index"):
        read(text({**document, "components": []}, most + 1000))


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_many_boxes_come_back(num: int) -> None:
    table, lengths = many_boxes(num)
    digests = {name: bytes(32 * blocks.num_blocks(n)) for name, n in lengths.items()}
    digests["model-00000.json"] = bytes(32)
    files = {
        name: FileEntry(nbytes=n, digest=blocks.file_digest(n, digests[name]))
        for name, n in {**lengths, "model-00000.json": 2}.items()
    }
    found = read(encode_index({"model": table}, digests), files).components["model"]
    assert [*found.specs.values()] == [*table.specs.values()]
    assert found.boxes is not None
    assert table.boxes is not None
    assert np.array_equal(found.boxes.tensor, table.boxes.tensor)
    assert np.array_equal(found.boxes.offsets.values, table.boxes.offsets.values)
    assert np.array_equal(found.boxes.sizes.values, table.boxes.sizes.values)
    assert np.array_equal(found.shards.start, table.shards.start)
    assert found["w7"] == table["w7"]
    assert found["w7"].shards[3].offsets == (12, 0)


def check_block_digests_must_be_the_manifests() -> None:
    document = sample()
    digests = document["blocks"][MODEL]
    document["blocks"][MODEL] = digests[:-1] + ("0" if digests[-1] != "0" else "1")
    with pytest.raises(CorruptData, match=MODEL):
        read(document)


def test_block_digests_must_be_the_manifests() -> None:
    """D14, D15: what the index says about bytes is covered by the manifest."""
    check_block_digests_must_be_the_manifests()


def check_shards_cannot_share_bytes() -> None:
    document = sample()
    start = document["components"]["model"]["shards"]["start"]
    start[1] = start[0]
    with pytest.raises(FormatError, match="overlap"):
        read(document)


def test_shards_cannot_share_bytes() -> None:
    """R29: a small file cannot be blown up into many tensors."""
    check_shards_cannot_share_bytes()


WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("holdfast",), True),
    (("holdfast",), "1"),
    (("block_nbytes",), 0),
    (("block_nbytes",), 4097),
    (("block_nbytes",), True),
    (("block_nbytes",), 4096),
    (("block_nbytes",), 10**4000),
    (("blocks",), []),
    (("blocks",), {}),
    (("blocks", MODEL), ""),
    (("blocks", MODEL), "0" * 63),
    (("blocks", MODEL), "0" * 128),
    (("blocks", MODEL), "G" * 64),
    (("blocks", MODEL), "A" * 64),
    (("blocks", MODEL), " " * 64),
    (("blocks", MODEL), 7),
    (("blocks", "index.json"), ""),
    (("blocks", "../x"), ""),
    (("components",), {}),
    (("components",), None),
    (("components", "../x"), {}),
    (("components", "other"), {"files": [], "names": [], "dtypes": [], "shapes": []}),
    (("components", "model", "files"), []),
    (("components", "model", "files"), ["/etc/passwd"]),
    (("components", "model", "files"), ["model-00001.safetensors"]),
    (("components", "model", "files"), [MODEL, MODEL]),
    (("components", "model", "names"), ["a"]),
    (("components", "model", "names"), ["a"] * 5),
    (("components", "model", "names", 0), 1),
    (("components", "model", "dtypes", 0), "F33"),
    (("components", "model", "dtypes", 0), None),
    (("components", "model", "shapes", 0), [-1]),
    (("components", "model", "shapes", 0), [True]),
    (("components", "model", "shapes", 0), [6]),
    (("components", "model", "shapes", 0), [2**70]),
    (("components", "model", "shapes", 0), [2**40, 2**40]),
    (("components", "model", "shapes", 0), [2**62, 2**62, 0]),
    (("components", "model", "shapes", 0), "5"),
    (("components", "model", "shapes", 0), [[5]]),
    (("components", "model", "shards"), []),
    (("components", "model", "shards", "tensor"), [0, 1, 2, 3]),
    (("components", "model", "shards", "tensor", 0), 5),
    (("components", "model", "shards", "tensor", 0), 1),
    (("components", "model", "shards", "tensor", 0), -1),
    (("components", "model", "shards", "tensor", 0), False),
    (("components", "model", "shards", "file", 0), 1),
    (("components", "model", "shards", "file", 0), -1),
    (("components", "model", "shards", "start", 0), 0),
    (("components", "model", "shards", "start", 0), 4095),
    (("components", "model", "shards", "start", 0), -4096),
    (("components", "model", "shards", "start", 0), 2**62),
    (("components", "model", "shards", "start", 0), 2**64),
    (("components", "model", "shards", "start", 0), 4096.0),
    (("components", "model", "shards", "offsets"), [[0]] * 5),
    (("components", "model", "shards", "offsets"), {}),
    (("components", "model", "shards", "sizes"), []),
]


@each(("path", "value"), WRONG, ids=lambda value: repr(value)[:50])
def test_a_wrong_member_is_refused(path: tuple[Any, ...], value: Any) -> None:
    """R28, R29, R30: types, names, places and sizes."""
    document = sample()
    inner: Any = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(FormatError, match="the-document"):
        read(document)


def test_other_versions_are_refused_as_such() -> None:
    for change in ({"holdfast": 2}, {"requires": ["x"]}):
        with pytest.raises(UnsupportedVersion):
            read({**sample(), **change})


def test_unknown_members_are_ignored() -> None:
    document = copy.deepcopy(sample())
    document["of_the_future"] = [1]
    document["components"]["model"]["of_the_future"] = {}
    assert read(document) == read(sample())


@given(seed=st.integers(0, 2**32))
def test_a_wounded_index_never_gives_places_outside_the_files(seed: int) -> None:
    """R29, R30: only our errors; what is accepted lies inside its file, without overlap."""
    files = make_manifest().files
    wounded = mutate(model_files()["index.json"], random.Random(seed))
    try:
        found = read(wounded)
    except FormatError:
        return
    places = []
    for entry in found.components["model"].values():
        assert sum(s.nbytes for s in entry.shards) == TensorSpec(*entry_spec(entry)).nbytes
        places += [(s.start, s.start + s.nbytes) for s in entry.shards]
    places.sort()
    assert all(4096 <= start <= stop <= files[MODEL].nbytes for start, stop in places)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))


def entry_spec(entry: index.TensorEntry) -> tuple[str, str, tuple[int, ...]]:
    return entry.key, entry.dtype, entry.shape


@given(seed=st.integers(0, 2**32))
def test_any_scalar_of_an_index_replaced_by_anything_raises_only_our_errors(seed: int) -> None:
    """R30: structure-aware."""
    rng = random.Random(seed)
    document = sample()
    anything: list[Any] = [None, True, -1, 0, 5, 2**63, 1.5, "", "F32", "../x", [], [[]], {}, [{}]]
    inner: Any = document
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(inner[key], (dict, list)) and inner[key] and rng.random() < 0.8:
            inner = inner[key]
            continue
        inner[key] = rng.choice(anything)
        break
    is_refused(lambda data, what: read(data), json.dumps(document).encode())


def test_dtypes_of_index_and_layout_are_the_same() -> None:
    assert set(tensors.ITEM_NBYTES) == {
        *("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"),
        *("F4_X2", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "C32"),
        *("U64", "I64", "F64", "C64", "C128"),
    }


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([4096, 4100], "overlap at byte 4,100"),
        ([4096, 4095], "overlap at byte 4,095"),
        ([4096, 4112], "beyond the end"),
        ([4096, 2**63 - 1], "beyond the end"),
        ([4096, 2**63 - 60], "beyond the end"),
        ([2**63 - 1, 2**63 - 1], "beyond the end"),
    ],
)
def test_places_are_checked_without_their_sums_leaving_64_bits(
    starts: list[int], message: str
) -> None:
    """R29, D14: two tensors of 128 bytes each."""
    document = sample()
    document["components"]["model"] |= {
        "names": ["a", "b"],
        "dtypes": ["U8", "U8"],
        "shapes": [[128], [128]],
        "shards": {
            "tensor": [0, 1],
            "file": [0, 0],
            "start": starts,
            "offsets": None,
            "sizes": None,
        },
    }
    with pytest.raises(FormatError, match=message):
        read(document)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [([0, 0], "two shards, each the whole"), ([1, 1], "no shard"), ([0, 2], "does not exist")],
)
def test_each_whole_tensor_has_one_shard(tensor: list[int], message: str) -> None:
    document = sample()
    columns = document["components"]["model"]
    columns |= {"names": ["a", "b"], "dtypes": ["U8", "U8"], "shapes": [[1], [1]]}
    columns["shards"] |= {"tensor": tensor, "file": [0, 0], "start": [4096, 4097]}
    with pytest.raises(FormatError, match=message):
        read(document)


def test_what_is_wrong_is_told_alike_however_the_index_is_written() -> None:
    """A compact text is read in another way; what is checked is the same."""
    document = sample()
    wrong: list[tuple[Any, str]] = []
    for change, message in [
        (lambda c: c["dtypes"].__setitem__(1, "F33"), "unknown dtype 'F33'"),
        (lambda c: c["shapes"].__setitem__(1, [2**62, 2**62]), "more bytes than 64 bits"),
        (lambda c: c["shapes"].__setitem__(1, [-1]), "-1|>= 0"),
        (lambda c: c["names"].__setitem__(1, c["names"][0]), "appears twice"),
        (lambda c: c["names"].pop(), "differ in length"),
        (lambda c: c["shards"]["start"].__setitem__(1, 0), "overlap"),
        (lambda c: c["shards"]["tensor"].__setitem__(1, 0), "two shards|no shard"),
    ]:
        changed = copy.deepcopy(document)
        change(changed["components"]["model"])
        wrong.append((changed, message))
    for changed, message in wrong:
        told = set()
        for data in (json.dumps(changed).encode(), msgspec.json.encode(changed)):
            with pytest.raises(FormatError, match=message) as caught:
                read(data)
            told.add(str(caught.value))
        assert len(told) == 1


def test_a_wrong_tensor_is_called_by_its_name() -> None:
    document = sample()
    names = document["components"]["model"]["names"]
    document["components"]["model"]["dtypes"][2] = "F33"
    with pytest.raises(FormatError, match=f"tensor '{names[2]}'"):
        read(document)


def test_shapes_cannot_be_made_to_collide_without_end() -> None:
    """R29: numbers have known hashes; the number of shapes that are kept is bounded."""
    sizes = index._Sizes("the-document")
    kinds = [("U8", (length,)) for length in range(1000)]
    names = [str(number) for number in range(1001)]
    assert sizes.of(names, kinds) == [*range(1000)]
    assert len(sizes) <= 100
    with pytest.raises(FormatError, match="tensor '1000'"):
        sizes.of(names, [*kinds, ("F33", ())])


def test_another_version_is_told_as_such_also_when_compact() -> None:
    with pytest.raises(UnsupportedVersion):
        read(msgspec.json.encode(sample() | {"holdfast": 2}))
