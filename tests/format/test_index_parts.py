"""The index in parts: there and back, read only as far as it is needed, and every place checked."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import (
    make_manifest,
    mutate,
    parted_files,
    parted_tables,
    read_parts,
)

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UnsupportedVersion, UsageError
from holdfast.format import blocks, index_parts, layout, manifest, strictjson
from holdfast.format.index import Places, StoredBlocks, TensorTable
from holdfast.format.index_parts import (
    check_num_files,
    check_size,
    encode_in_parts,
    files_of_index,
    needs_parts,
    open_index,
)
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import ITEM_NBYTES, MAX_DIMS, TensorSpec

ROOT, FIRST, SECOND = "index.json", "index-0001.json", "index-0002.json"
FILE, ODD = "model-00000.safetensors", "other-00000.safetensors"


def sample(name: str) -> dict[str, Any]:
    return dict(json.loads(parted_files()[name]))


def read_all(documents: dict[str, Any]) -> None:
    """Open the index with some documents replaced, and read all of it."""
    data = {name: json.dumps(document).encode() for name, document in documents.items()}
    found = read_parts(data, what=f"the-document/{ROOT}")
    assert [*found.blocks.values()]
    for table in found.components.values():
        assert len(table.shards.start) >= len(table)


def in_order(table: TensorTable) -> dict[str, Any]:
    """Every tensor, its shards in the order of their offsets."""
    return {
        key: (entry.dtype, entry.shape, sorted(entry.shards, key=lambda one: one.offsets or ()))
        for key, entry in table.items()
    }


def test_an_index_in_parts_comes_back_equal() -> None:
    found = read_parts({}, what="w")
    tables, contents = parted_tables()
    assert {name: in_order(table) for name, table in found.components.items()} == {
        name: in_order(table) for name, table in tables.items()
    }
    assert dict(found.blocks) == {
        name: blocks.digest_blocks(data) for name, data in contents.items()
    }
    assert not found.stored.get(FILE)
    assert set(files_of_index(parted_files()[ROOT], what="w")) == parted_files().keys() - {ROOT}


def test_only_the_parts_of_the_files_that_are_asked_for_are_read() -> None:
    files = parted_files()
    entries = {
        name: FileEntry(nbytes=len(data), digest=_digest(data)) for name, data in files.items()
    }
    read: list[str] = []

    def read_one(name: str) -> bytes:
        read.append(name)
        return files[name]

    found = open_index(files[ROOT], read_one, files=entries, what="w")
    model = found.components["model"]
    assert model.specs["a"].shape == (8, 3)
    numbers, cells = model.boxes_of("c")
    assert cells[:, 0].tolist() == [[0, 0], [0, 2], [3, 0], [3, 2]]
    assert not model.is_whole("a")
    assert model.is_whole("d")
    assert read == []
    assert model.locate(numbers[[0, 3]]).start.tolist() == [4168, 4172]  # files 3 and 2
    assert found.blocks["model-00003.safetensors"]
    assert read == [SECOND]
    assert found.blocks[ODD]
    assert [entry.start for _, entry in found.components["other"].shards_in(ODD)] == [4096, 4102]
    assert read == [SECOND, FIRST]


def _digest(data: bytes) -> str:
    return blocks.file_digest(len(data), blocks.digest_blocks(data))


@given(seed=st.integers(0, 2**32))
def test_any_grids_come_back_equal(seed: int) -> None:
    """Random grids, files, orders, writers and compression, against the table they are made of."""
    rng = random.Random(seed)
    num_writers, codec = rng.randint(1, 9), rng.choice(["", "zstd"])
    tables: dict[str, TensorTable] = {}
    lengths: dict[str, int] = {}
    writers: dict[str, list[int]] = {}
    for name in ("model", "other"):
        counts = writers[name] = [rng.choice([0, 1, 1, 2]) for _ in range(num_writers)]
        counts[rng.randrange(num_writers)] += 1
        tables[name] = _random_table(name, sum(counts), rng, codec, lengths)
        lengths[f"{name}-00000.json"] = 7
    digests = {name: rng.randbytes(32 * blocks.num_blocks(n, 4096)) for name, n in lengths.items()}
    stored = {
        name: StoredBlocks((5,) * (len(one) // 32), rng.randbytes(len(one)))
        for name, one in digests.items()
        if codec and (name.endswith(".zst") or rng.random() < 0.5) and "json" not in name
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_parts, "PART_WRITERS", rng.randint(1, 4))
        documents = encode_in_parts(tables, digests, lengths, writers, 4096, stored=stored)
    entries = {
        name: FileEntry(
            nbytes=n,
            digest=blocks.file_digest(n, digests[name]),
            stored=stored[name].entry("zstd") if name in stored else None,
        )
        for name, n in lengths.items()
    }
    entries |= {
        name: FileEntry(nbytes=len(data), digest=_digest(data)) for name, data in documents.items()
    }
    found = open_index(documents[ROOT], documents.__getitem__, files=entries, what="w")
    for name, table in tables.items():
        assert in_order(found.components[name]) == in_order(table)
        for file in table.files:
            assert found.components[name].shards_in(file) == table.shards_in(file)
        for number, spec in enumerate(table.specs.values()):
            if found.components[name].is_whole(spec.key):
                _, places = found.components[name].whole([spec.key])
                assert places.start.tolist() == [table[spec.key].shards[0].start], number
    assert dict(found.blocks) == digests
    assert dict(found.stored) == stored


def _random_table(
    name: str, num_files: int, rng: random.Random, codec: str, lengths: dict[str, int]
) -> TensorTable:
    """Tensors in random grids over files, which have the order of the format, or some any order."""
    boxes: list[tuple[int, int, list[int], list[int]]] = []
    specs: list[TensorSpec] = []
    for number in range(rng.randint(1, 6)):
        shape = tuple(rng.choice([0, 1, 2, 5, 9]) for _ in range(rng.randint(0, 3)))
        cuts = [
            [0, *sorted(rng.sample(range(1, max(n, 1)), rng.randint(0, max(n - 1, 0)))), n]
            for n in shape
        ]
        sides = [[*itertools.pairwise(cut)] for cut in cuts]
        specs.append(TensorSpec(f"{name}{number}", rng.choice(["U8", "BF16", "F32"]), shape))
        of_rank = [rng.randrange(num_files) for _ in range(20)]
        for at, cell in enumerate(itertools.product(*sides)):
            offsets, sizes = [a for a, _ in cell], [b - a for a, b in cell]
            boxes.append((number, of_rank[at % 20], offsets, sizes))
    start = [0] * len(boxes)
    nbytes = [
        int(np.prod(sizes, dtype=int)) * ITEM_NBYTES[specs[n].dtype] for n, *_, sizes in boxes
    ]
    names = []
    for file in range(num_files):
        own = [at for at, box in enumerate(boxes) if box[1] == file]
        own.sort(key=lambda at: -ITEM_NBYTES[specs[boxes[at][0]].dtype])
        if rng.random() < 0.3:
            rng.shuffle(own)
        position = 4096
        for at in own:
            start[at] = position
            position += nbytes[at]
        suffix = ".zst" if codec and rng.random() < 0.5 else ""
        names.append(f"{name}-{file:05d}.safetensors{suffix}")
        lengths[names[-1]] = position + (rng.random() < 0.1)
    return TensorTable.of_boxes(
        {spec.key: spec for spec in specs},
        Places(names, *(np.array(one, np.int64) for one in ([b[1] for b in boxes], start, nbytes))),
        np.array([number for number, *_ in boxes]),
        [offsets for *_, offsets, _ in boxes],
        [sizes for *_, sizes in boxes],
    )


def test_boxes_that_are_no_grid_are_not_written_in_parts() -> None:
    places = Places(
        ["model-00000.safetensors"], *np.array([[0] * 3, [4096, 4098, 4099], [2, 1, 1]])
    )
    sizes = [[2, 1], [1, 1], [1, 1]]
    for offsets in ([[0, 0], [0, 1], [1, 1]], [[0, 0], [0, 1], [0, 1]]):
        table = TensorTable.of_boxes(
            {"w": TensorSpec("w", "U8", (2, 2))}, places, np.zeros(3, np.int64), offsets, sizes
        )
        with pytest.raises(UsageError, match="'w'"):
            encode_in_parts({"model": table}, {FILE: b""}, {FILE: 4100}, {"model": [1]}, stored={})


OF_MODEL = ("components", "model")
WRONG: list[tuple[str, tuple[Any, ...], Any]] = [
    (ROOT, ("holdfast",), 2),
    (ROOT, ("requires",), []),
    (ROOT, ("requires",), ["parts", "more"]),
    (ROOT, ("block_nbytes",), 4097),
    (ROOT, ("block_nbytes",), 4096),
    (ROOT, ("blocks",), {}),
    (ROOT, ("blocks", FILE), "0" * 64),
    (ROOT, ("blocks", "model-00000.json"), "0" * 64),
    (ROOT, ("stored",), {"model-00000.json": {"nbytes": [1], "digests": "0" * 64}}),
    (ROOT, ("cuts",), []),
    (ROOT, ("cuts", 0), [2, 2, 6]),
    (ROOT, ("cuts", 0), [4, 2, 6]),
    (ROOT, ("cuts", 0), [0, 2, 4]),
    (ROOT, ("cuts", 0), [2, 4, 8]),
    (ROOT, ("cuts", 0), [2, 4, 2**63 - 1]),
    (ROOT, ("cuts", 0), [2, 4]),
    (ROOT, ("cuts", 0), [2, 4, -6]),
    (ROOT, ("cuts", 0), [2, 4, True]),
    (ROOT, ("grids",), []),
    (ROOT, ("grids", 0, "cuts"), [0]),
    (ROOT, ("grids", 0, "cuts"), [1, 0]),
    (ROOT, ("grids", 0, "cuts"), [0, 4]),
    (ROOT, ("grids", 0, "cuts"), [0, 1, 1]),
    (ROOT, ("grids", 0, "files"), [0, 1, 2]),
    (ROOT, ("grids", 0, "files"), [0, 1, 2, 4]),
    (ROOT, ("grids", 0, "files"), [0, 1, 2, -1]),
    (ROOT, ("grids", 0, "files"), [3, 3, 3, 3]),
    (ROOT, ("grids", 2, "files"), [3]),
    (ROOT, ("components",), {}),
    (ROOT, (*OF_MODEL, "files", 0), "model-00004.safetensors"),
    (ROOT, (*OF_MODEL, "parts"), [4]),
    (ROOT, (*OF_MODEL, "parts"), [2, 3]),
    (ROOT, (*OF_MODEL, "parts"), [2, 5]),
    (ROOT, (*OF_MODEL, "parts"), [5, 4]),
    (ROOT, (*OF_MODEL, "parts"), [1, 2, 4]),
    (ROOT, (*OF_MODEL, "parts"), []),
    (ROOT, (*OF_MODEL, "parts"), [1, 4]),
    (ROOT, (*OF_MODEL, "names", 0), "b"),
    (ROOT, (*OF_MODEL, "dtypes", 0), "F33"),
    (ROOT, (*OF_MODEL, "dtypes", 0), "F64"),
    (ROOT, (*OF_MODEL, "shapes", 0), [8]),
    (ROOT, (*OF_MODEL, "shapes", 0), [8, 4000]),
    (ROOT, (*OF_MODEL, "shapes", 0), [2**40, 2**40]),
    (ROOT, (*OF_MODEL, "shapes", 0), [2**60 - 1, 1]),
    (ROOT, (*OF_MODEL, "grids"), [0, 0, 1]),
    (ROOT, (*OF_MODEL, "grids", 0), 7),
    (ROOT, (*OF_MODEL, "grids", 0), 2),
    (FIRST, ("holdfast",), 2),
    (FIRST, ("requires",), ["more"]),
    (FIRST, ("part",), 2),
    (FIRST, ("part",), True),
    (FIRST, ("blocks",), {}),
    (FIRST, ("blocks", FILE), "0" * 64),
    (FIRST, ("blocks", FILE), "0" * 63),
    (FIRST, ("blocks", "model-00002.safetensors"), "0" * 64),
    (FIRST, ("stored",), {FILE: {"nbytes": [1], "digests": "0" * 64}}),
    (FIRST, ("starts", ODD), [4102]),
    (FIRST, ("starts", ODD), [4102, 4096, 4096]),
    (FIRST, ("starts", ODD), [4102, 4097]),
    (FIRST, ("starts", ODD), [4103, 4096]),
    (FIRST, ("starts", ODD), [4102, 4095]),
    (FIRST, ("starts", ODD), [2**63 - 1, 4096]),
    (FIRST, ("starts", ODD), [4102, -1]),
    (FIRST, ("starts", "other-00001.safetensors"), [4096, 4096]),
    (FIRST, ("starts", "x"), []),
]


@each(("name", "path", "value"), WRONG, ids=lambda value: repr(value)[:40])
def test_a_wrong_member_is_refused(name: str, path: tuple[Any, ...], value: Any) -> None:
    """R28, R29, R30, D14: grids that do not fit, places outside of files, other digests."""
    document = sample(name)
    inner: Any = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(FormatError, match="the-document"):
        read_all({name: document})


def test_files_that_are_not_of_the_checkpoint_have_no_digests() -> None:
    found = read_parts({}, what="w")
    for name in (ROOT, FIRST, "model-00004.safetensors", "../x"):
        assert found.blocks.get(name) is None


def test_unknown_members_are_ignored_and_others_versions_refused_as_such() -> None:
    root, part = sample(ROOT), sample(FIRST)
    root["later"] = part["later"] = root["components"]["model"]["later"] = root["grids"][0]["x"] = [
        1
    ]
    read_all({ROOT: root, FIRST: part})
    for name, change in ((ROOT, {"holdfast": 2}), (FIRST, {"requires": ["x"]})):
        with pytest.raises(UnsupportedVersion):
            read_all({name: {**sample(name), **change}})


@given(seed=st.integers(0, 2**32))
def test_a_wounded_document_never_gives_places_outside_the_files(seed: int) -> None:
    """R29, R30: only our errors; what is accepted lies inside its file, without overlap."""
    rng = random.Random(seed)
    name, files = rng.choice([ROOT, FIRST, SECOND]), parted_files()
    try:
        found = read_parts({name: mutate(files[name], rng)}, what="w")
        tables = {name: dict(table) for name, table in found.components.items()}
        assert [*found.blocks.values()]
    except FormatError:
        return
    places: dict[str, list[tuple[int, int]]] = {}
    for table in tables.values():
        for entry in table.values():
            spec = TensorSpec(entry.key, entry.dtype, entry.shape)
            assert sum(shard.nbytes for shard in entry.shards) == spec.nbytes
            for shard in entry.shards:
                places.setdefault(shard.file, []).append((shard.start, shard.start + shard.nbytes))
    for file, of_file in places.items():
        of_file.sort()
        assert all(4096 <= start <= stop <= len(files[file]) for start, stop in of_file)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(of_file))


def test_a_short_root_cannot_describe_boxes_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: tensors times cells of one grid, refused before any is made."""
    root = sample(ROOT)
    num = 20_000
    of_model = root["components"]["model"]
    root["cuts"][0] = [*range(1, num)]
    root["grids"][0] = {"cuts": [0], "files": [0] * num}
    root["grids"].append({"cuts": [0], "files": [0] * num})
    of_model |= {"names": [f"t{n}" for n in range(num)], "dtypes": ["U8"] * num}
    of_model |= {"shapes": [[num]] * num, "grids": [0] * num}
    with pytest.raises(LimitExceeded, match=r"400,000,00\d boxes"):
        read_all({ROOT: root})
    monkeypatch.setattr(index_parts, "MAX_PART_BOXES", 8)
    with pytest.raises(LimitExceeded, match="8 are accepted"):
        read_all({})
    monkeypatch.setattr(index_parts, "MAX_PART_BOXES", 9)
    read_all({})
    monkeypatch.setattr(index_parts, "MAX_ALL_BOXES", 16)
    with pytest.raises(LimitExceeded, match="17 boxes"):
        read_all({})


def test_a_grid_has_no_more_cuts_than_a_tensor_has_dimensions() -> None:
    """R29: the product of their lengths takes quadratic time; 400,000 cuts took a minute."""
    root = sample(ROOT)
    root["grids"].append({"cuts": [1] * MAX_DIMS, "files": [0]})
    read_all({ROOT: root})
    root["grids"][-1]["cuts"].append(1)
    with pytest.raises(FormatError, match="grids"):
        read_all({ROOT: root})


def test_sums_beyond_64_bits_are_no_way_around_the_check_of_lengths() -> None:
    """R29: two tensors of 2**62 bytes in one file."""
    files = parted_files()
    root = sample(ROOT)
    of_other = root["components"]["other"]
    of_other["shapes"] = [[2**62], [2**61, 2], [1, 0], [5]]
    entries = {
        name: FileEntry(nbytes=len(data), digest=_digest(data)) for name, data in files.items()
    }
    digest = blocks.file_digest(2**63 - 1, b"")
    entries[ODD] = FileEntry(nbytes=2**63 - 1, digest=digest)
    part = sample(FIRST)
    part["blocks"][ODD], part["starts"] = "", {}
    data = {ROOT: json.dumps(root).encode(), FIRST: json.dumps(part).encode()}
    found = open_index(data[ROOT], {**files, **data}.__getitem__, files=entries, what="w")
    with pytest.raises(FormatError):
        _ = found.components["other"].shards


def _check(num_tensors: int, num_cells: int, **changes: Any) -> None:
    tensor = np.repeat(np.arange(num_tensors), num_cells)
    first = np.tile(np.arange(num_cells), num_tensors)
    specs = [TensorSpec(f"w{n}", "U8", (num_cells,)) for n in range(num_tensors)]
    given_ = {"num_files": num_cells, "num_of_writer": num_tensors, **changes}
    check_size(specs, tensor, (first, first), first, **given_)


def test_the_size_is_known_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(30, 1000)
    with pytest.raises(LimitExceeded, match=r"30 tensors in 30,000 boxes.*Nothing was written"):
        _check(30, 1000, num_of_writer=index_parts.MAX_PART_BOXES + 1)
    for name, most, least in (
        ("MAX_ALL_BOXES", 30_000, 29_999),
        ("MAX_INDEX_VALUES", 7_000, 5_000),  # of one grid, not of 30
        ("MAX_INDEX_NBYTES", 230_000, 210_000),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(index_parts, name, most)
            _check(30, 1000)
            patch.setattr(index_parts, name, least)
            with pytest.raises(LimitExceeded, match="30 tensors"):
                _check(30, 1000)


def test_the_size_of_a_manifest_is_known_before_it_is_written() -> None:
    """As measured of runs of two and of ten ranks: 185 bytes a file, encrypted 585."""
    for options, most in (
        ((False, False), 83_000),
        ((True, False), 45_000),
        ((False, True), 27_000),
    ):
        is_compressed, is_encrypted = options
        check_num_files(most, is_compressed=is_compressed, is_encrypted=is_encrypted)
        with pytest.raises(LimitExceeded, match="tensor files"):
            check_num_files(most + 1000, is_compressed=is_compressed, is_encrypted=is_encrypted)
    with pytest.raises(LimitExceeded, match="compressed and encrypted"):
        check_num_files(30_000, is_compressed=True, is_encrypted=True)


def test_parts_are_for_many_files_or_boxes() -> None:
    assert not needs_parts(4096, 1_000_000)
    assert needs_parts(4097, 1)
    assert needs_parts(1, 1_000_001)


def parted_manifest(**changes: Any) -> manifest.Manifest:
    """The manifest of `parted_files`."""
    files = parted_files()
    plain = make_manifest()
    components = {
        name: msgspec.structs.replace(
            plain.components["model"],
            files=(f"{name}-00000.json", *(f"{name}-{n:05d}.safetensors" for n in range(count))),
        )
        for name, count in (("model", 4), ("other", 2))
    }
    entries = {
        name: FileEntry(nbytes=len(data), digest=_digest(data)) for name, data in files.items()
    }
    return make_manifest(**{"components": components, "files": entries, "sharded": True, **changes})


def test_the_manifest_lists_the_parts_and_requires_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parted_manifest()
    data = manifest.encode_manifest(made)
    assert json.loads(data)["requires"] == ["shards", "parts"]
    assert manifest.decode_register(data, what="w") == made
    for changes in ({FIRST: None}, {"index-0004.json": made.files[FIRST]}):
        files = {**made.files, **changes}
        kept = {name: entry for name, entry in files.items() if entry is not None}
        wrong = manifest.encode_manifest(msgspec.structs.replace(made, files=kept))
        with pytest.raises(FormatError, match="do not list the same files"):
            manifest.decode_register(wrong, what="w")
    known = frozenset({"codec", "shards", "sealed", "frozen"})
    monkeypatch.setattr(strictjson, "KNOWN_REQUIREMENTS", known)
    with pytest.raises(UnsupportedVersion, match="parts"):
        manifest.decode_register(data, what="w")


def test_a_part_is_no_file_of_a_component_called_index() -> None:
    assert layout.tree_file("index") == "index-00000.json"
    assert layout.parse_part("index-00000.json") is None
    assert layout.parse_part(layout.part_name(9999)) == 9999
    assert layout.component_of("index-0001.json") == "index"
    for name in ("index-0001.json", "index.json"):
        layout.check_file_name(name)
        assert layout.is_listed_name(name)
        assert layout.is_data_name(name)
        assert not layout.is_sidecar(name)


def test_digests_of_a_part_are_those_of_the_manifest() -> None:
    """D14, D15."""
    part = copy.deepcopy(sample(SECOND))
    digests = part["blocks"]["other-00001.safetensors"]
    part["blocks"]["other-00001.safetensors"] = digests[:-1] + ("0" if digests[-1] != "0" else "1")
    with pytest.raises(CorruptData, match=r"index-0002\.json: .*other-00001"):
        read_all({SECOND: part})
