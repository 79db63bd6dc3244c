"""docs/format.md is enough to write a reader: this one uses nothing of ours."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from blake3 import blake3
from tests.format.samples import make_manifest, model_files, parted_files

from holdfast.format import manifest

ITEM_NBYTES = {"F32": 4, "I64": 8, "BF16": 2, "C128": 16, "BOOL": 1, "U8": 1}


class SecondReader:
    """Reads one checkpoint folder with the words of the format page alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self._sealed("manifest.json")
        assert self.manifest["kind"] == "checkpoint"
        block = self.manifest["block_nbytes"]
        self.index = json.loads((folder / "index.json").read_bytes())
        for name, entry in self.manifest["files"].items():
            data = (folder / name).read_bytes()
            parts = [data[i : i + block] for i in range(0, len(data), block)]
            digests = b"".join(blake3(part).digest() for part in parts)
            assert name == "index.json" or self.index["blocks"][name] == digests.hex()
            root = blake3(
                len(data).to_bytes(8, "little") + digests, derive_key_context="holdfast 1 file"
            )
            assert entry == {"nbytes": len(data), "digest": f"blake3:{root.hexdigest()}"}

    def _sealed(self, name: str) -> Any:
        data = (self.folder / name).read_bytes()
        start = data.rindex(b'"digest"')
        document = json.loads(data)
        assert list(document)[:2] == ["holdfast", "kind"]
        assert document["holdfast"] == 1
        assert document["digest"] == f"blake3:{blake3(data[:start]).hexdigest()}"
        return document

    def tensors(self, component: str) -> dict[str, tuple[str, list[int], bytes]]:
        """Key → (dtype, shape, bytes)."""
        columns = self.index["components"][component]
        shards = columns["shards"]
        found = {}
        places = zip(shards["tensor"], shards["file"], shards["start"], strict=True)
        for tensor, file, start in places:
            dtype, shape = columns["dtypes"][tensor], columns["shapes"][tensor]
            nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_NBYTES[dtype]
            data = (self.folder / columns["files"][file]).read_bytes()[start : start + nbytes]
            found[columns["names"][tensor]] = (dtype, shape, data)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    for name, data in model_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "manifest.json").write_bytes(manifest.encode_manifest(make_manifest()))
    return tmp_path


def test_a_second_reader_finds_every_tensor(folder: Path) -> None:
    reader = SecondReader(folder)
    found = reader.tensors("model")
    tree = json.loads((folder / "model-00000.json").read_bytes())
    assert tree["tree"]["a"] == {"$tensor": "a"}
    stock = dict(safetensors.deserialize((folder / "model-00000.safetensors").read_bytes()))
    assert found.keys() == stock.keys() == {"a", "b.c", "d", "e", "f"}
    for key, (dtype, shape, data) in found.items():
        assert bytes(stock[key]["data"]) == data
        if dtype == "C128":
            assert (stock[key]["dtype"], stock[key]["shape"]) == ("F64", [*shape, 2])
        else:
            assert (stock[key]["dtype"], stock[key]["shape"]) == (dtype, shape)


def test_a_second_reader_notices_a_flipped_bit(folder: Path) -> None:
    """D14: the digests cover the last byte of the last file."""
    path = folder / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        SecondReader(folder)


def boxes_in_parts(files: dict[str, bytes], component: str) -> dict[str, list[tuple[Any, bytes]]]:
    """Key → (range of each dimension, bytes) of each box, with the words of section 5 alone."""
    root = json.loads(files["index.json"])
    of = root["components"][component]
    cells: list[tuple[int, int, int, int, Any]] = []
    for tensor, (shape, grid) in enumerate(zip(of["shapes"], of["grids"], strict=True)):
        cuts = [root["cuts"][number] for number in root["grids"][grid]["cuts"]]
        sides = [
            [*zip([0, *cut], [*cut, n], strict=True)] for cut, n in zip(cuts, shape, strict=True)
        ]
        item = ITEM_NBYTES[of["dtypes"][tensor]]
        places = itertools.product(*sides)
        for file, cell in zip(root["grids"][grid]["files"], places, strict=True):
            nbytes = item * int(np.prod([b - a for a, b in cell], dtype=np.int64))
            cells.append((file, item, tensor, nbytes, cell))
    found: dict[str, list[tuple[Any, bytes]]] = {key: [] for key in of["names"]}
    starts: dict[tuple[int, int, Any], int] = {}
    for number, name in enumerate(of["files"]):
        part = 1 + sum(end <= number for end in of["parts"])
        document = json.loads(files[f"index-{part:04d}.json"])
        assert document["part"] == part
        data = files[name]
        assert document["blocks"][name] == blake3(data).hexdigest()
        own = [cell for cell in cells if cell[0] == number]
        given = document.get("starts", {}).get(name)
        position = len(data) - sum(cell[3] for cell in own)
        for cell in sorted(own, key=lambda cell: -cell[1]):
            starts[number, cell[2], cell[4]] = position
            position += cell[3]
        if given is not None:
            starts |= {(number, cell[2], cell[4]): at for cell, at in zip(own, given, strict=True)}
    for file, _, tensor, nbytes, cell in cells:
        start = starts[file, tensor, cell]
        found[of["names"][tensor]].append((cell, files[of["files"][file]][start : start + nbytes]))
    return found


def test_a_second_reader_finds_every_box_of_an_index_in_parts() -> None:
    """Each byte of the sample is the number of its box."""
    files = dict(parted_files())
    model, other = (boxes_in_parts(files, name) for name in ("model", "other"))
    numbers = {key: [{*data} for _, data in of_key] for key, of_key in (model | other).items()}
    assert numbers == {
        "a": [{0}, {1}, {2}, {3}],
        "b": [{4}, {5}, {6}, {7}],
        "c": [{8}, {9}, {10}, {11}],
        "d": [{12}],
        "e": [{0}],
        "f": [{1}],
        "g": [set()],
        "h": [{3}],
    }
    assert [cell for cell, _ in model["c"]] == [
        ((0, 3), (0, 2)),
        ((0, 3), (2, 3)),
        ((3, 6), (0, 2)),
        ((3, 6), (2, 3)),
    ]
    assert [len(data) for _, data in model["c"]] == [6, 3, 6, 3]
