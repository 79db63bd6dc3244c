"""A second reader of the format, written from docs/format.md alone: nothing of Holdfast is here.

It reads a root whole and checks every digest. Types that numpy lacks come as unsigned integers.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import Counter, OrderedDict
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import blosc2
import lz4.frame
import numpy as np
import zstandard
from blake3 import blake3

FOLDER = re.compile(r".+\.[0-9]{4,10}-[0-9]{6,12}-[0-9a-f]{8}")
THINNED = r"thinned-[a-z0-9_-]{1,64}-[0-9]{8,12}"
MARK = re.compile(rf"(notes-[0-9]{{4}}|retired-[0-9]{{8,12}}|{THINNED}|rejected)\.json$")
TYPES = """
BOOL=? U8=u1 I8=i1 U16=<u2 I16=<i2 F16=<f2 BF16=<u2 U32=<u4 I32=<i4 F32=<f4 C32=<u4 U64=<u8
I64=<i8 F64=<f8 C64=<c8 C128=<c16 F8_E4M3=u1 F8_E5M2=u1 F8_E4M3FNUZ=u1 F8_E5M2FNUZ=u1 F8_E8M0=u1
F4_X2=u1
"""
DTYPES = dict(re.findall(r"(\w+)=(\S+)", TYPES))
VIEWS = {"C128": "F64", "C32": "F16", "F4_X2": "F4"}


def strict_json(data: bytes) -> Any:
    """JSON without repeated names and without numbers that are none."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a name twice"
        return dict(pairs)

    return json.loads(data.decode(), object_pairs_hook=members, parse_constant={}.__getitem__)


def expect_version(document: Any) -> None:
    assert next(iter(document)) == "holdfast"
    assert document["holdfast"] == 1
    assert set(document.get("requires", [])) <= {"codec"}


def sealed(path: Path) -> dict[str, Any]:
    """A self-checking document (section 2)."""
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    document: dict[str, Any] = strict_json(data)
    expect_version(document)
    assert (list(document)[1], list(document)[-1]) == ("kind", "digest")
    seal = f'"digest": "blake3:{blake3(data[:start]).hexdigest()}"}}\n'
    assert data[start:].decode() == seal
    return document


def file_digest(nbytes: int, block_digests: bytes) -> str:
    """The digest of a file (section 3)."""
    hasher = blake3(derive_key_context="holdfast 1 file")
    hasher.update(nbytes.to_bytes(8, "little") + block_digests)
    return f"blake3:{hasher.hexdigest()}"


def decoded(name: str, data: bytes, entry: Any, stored: Any, size: int) -> bytes:
    """The plain bytes of a file that a codec made (section 8)."""
    lengths, nbytes = stored["nbytes"], entry["nbytes"]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    blocks = [data[at : at + length] for at, length in zip(starts, lengths, strict=True)]
    digests = b"".join(blake3(block).digest() for block in blocks)
    assert (len(data), digests.hex()) == (sum(lengths), stored["digests"])
    codec = entry["stored"]["codec"]
    digest = {"codec": codec, "nbytes": len(data), "digest": file_digest(len(data), digests)}
    assert entry["stored"] == digest
    assert name.endswith({"zstd": ".zst", "lz4": ".lz4", "blosc2": ".blosc2"}[codec])
    decode = {"zstd": zstandard.decompress, "lz4": lz4.frame.decompress}.get(codec)
    parts = [(decode or blosc2.decompress2)(block) for block in blocks]
    sizes = [min(size, nbytes - start) for start in range(0, nbytes, size)]
    assert [len(part) for part in parts] == sizes
    return b"".join(parts)


class Checkpoint:
    """One committed checkpoint: `manifest`, `marks`, `arrays` and `trees` by component."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        epoch, sequence, id8 = manifest["epoch"], manifest["sequence"], manifest["save_id"][:8]
        assert folder.name == f"{manifest['label']}.{epoch:04}-{sequence:06}-{id8}"
        self.marks = {path.name: sealed(path) for path in folder.iterdir() if MARK.match(path.name)}
        self.dropped = self._dropped()
        self.files: dict[str, bytes] = {}
        self.index = self._index()
        left = [name for name in manifest["components"] if name not in self.dropped]
        self.arrays = {name: self._arrays(name) for name in left}
        self.trees = {name: self._tree(name) for name in left}

    def _dropped(self) -> set[str]:
        """Components that a mark names and of which a file is missing (section 7)."""
        marked = {mark["component"] for mark in self.marks.values() if mark["kind"] == "thinned"}
        files = {name: self.manifest["components"][name]["files"] for name in marked}
        return {n for n in marked if not all((self.folder / file).exists() for file in files[n])}

    def _index(self) -> dict[str, Any]:
        """The index, once every file was read and fits manifest and index."""
        index: dict[str, Any] = strict_json((self.folder / "index.json").read_bytes())
        expect_version(index)
        size = self.manifest["block_nbytes"]
        assert index["block_nbytes"] == size
        components = self.manifest["components"]
        lost = {file for name in self.dropped for file in components[name]["files"]}
        stored = {n for n, entry in self.manifest["files"].items() if "stored" in entry}
        assert stored == index.get("stored", {}).keys()
        assert not stored or self.manifest["requires"] == ["codec"]
        for name, entry in self.manifest["files"].items():
            if name in lost:
                continue
            data = (self.folder / name).read_bytes()
            if name in stored:
                data = decoded(name, data, entry, index["stored"][name], size)
            self.files[name] = data
            parts = [data[start : start + size] for start in range(0, len(data), size)]
            digests = b"".join(blake3(part).digest() for part in parts)
            assert entry["nbytes"] == len(data)
            assert entry["digest"] == file_digest(len(data), digests)
            assert name == "index.json" or index["blocks"][name] == digests.hex()
        assert index["blocks"].keys() == self.manifest["files"].keys() - {"index.json"}
        return index

    def _arrays(self, component: str) -> dict[str, np.ndarray[Any, Any]]:
        columns = self.index["components"][component]
        shards, listed = columns["shards"], self.manifest["components"][component]
        assert listed["files"] == [self._tree_file(component), *columns["files"]]
        assert listed["num_tensors"] == len(columns["names"])
        assert shards["offsets"] is None is shards["sizes"]
        images = [self.files[name] for name in columns["files"]]
        headers, found = [self._header(image, component) for image in images], {}
        places = zip(shards["tensor"], shards["file"], shards["start"], strict=True)
        for tensor, file, start in places:
            key, name = columns["names"][tensor], columns["dtypes"][tensor]
            shape, dtype = columns["shapes"][tensor], np.dtype(DTYPES[name])
            count = int(np.prod(shape, dtype=np.int64))
            flat = np.frombuffer(images[file], dtype, count, start)
            found[key] = flat.reshape(shape)
            view = [*shape, 2] if name in VIEWS else shape
            if name == "F4_X2" and shape:
                view = [*shape[:-1], 2 * shape[-1]]
            stored = (VIEWS.get(name, name), view)
            assert headers[file].pop(key) == (*stored, start, start + flat.nbytes)
        assert not any(headers), "a header with tensors that the index lacks"
        return {key: found[key] for key in columns["names"]}

    @staticmethod
    def _header(image: bytes, component: str) -> dict[str, Any]:
        """Key → (dtype, shape, first byte, end) of a tensor file (section 4)."""
        length = int.from_bytes(image[:8], "little")
        assert (8 + length) % 4096 == 0
        header = strict_json(image[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "holdfast", "component": component}
        return {
            key: (e["dtype"], e["shape"], *(8 + length + offset for offset in e["data_offsets"]))
            for key, e in header.items()
        }

    def _tree_file(self, component: str) -> str:
        return next(name for name in self.files if name.startswith(f"{component}-00000.json"))

    def _tree(self, component: str) -> Any:
        document = strict_json(self.files[self._tree_file(component)])
        expect_version(document)
        return Tree(self.arrays[component]).value(document["tree"])


class Tree:
    """Reads typed trees (section 6). What Python has no value for is (name, argument)."""

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays
        self._containers: list[Any] = []

    def value(self, node: Any, *, in_key: bool = False) -> Any:
        if isinstance(node, list):
            return self._container("", node, in_key)
        if not isinstance(node, dict):
            return node
        name = next(iter(node), "")
        if not name.startswith("$"):
            return self._container("{}", node, in_key)
        if name in ("$tuple", "$set", "$frozenset", "$dict", "$ordered", "$counter"):
            return self._container(name, node[name], in_key)
        return self._leaf(name, node[name])

    def _container(self, name: str, inside: Any, in_key: bool) -> Any:
        number = len(self._containers)
        self._containers += [] if in_key else [None]
        is_keys = in_key or name in ("$set", "$frozenset")
        if name == "{}":
            value: Any = {key: self.value(item, in_key=in_key) for key, item in inside.items()}
        elif name in ("$dict", "$ordered", "$counter"):
            pairs = [(self.value(k, in_key=True), self.value(v, in_key=in_key)) for k, v in inside]
            value = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[name](dict(pairs))
        else:
            types: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
            value = types.get(name, list)(self.value(item, in_key=is_keys) for item in inside)
        if not in_key:
            self._containers[number] = value
        return value

    def _leaf(self, name: str, inside: Any) -> Any:
        if name in ("$tensor", "$array"):
            return self._arrays[inside]
        if name == "$same":
            return self._containers[inside]
        if name == "$float":
            named = inside in ("inf", "-inf", "nan")
            return float(inside) if named else struct.unpack(">d", bytes.fromhex(inside))[0]
        if name == "$bytes":
            return base64.b64decode(inside, validate=True)
        if name == "$scalar":
            return np.frombuffer(bytes.fromhex(inside[1]), DTYPES[inside[0]])[0]
        if name == "$timedelta":
            return timedelta(*inside)
        if name == "$generator":
            return (name, {key: self.value(item) for key, item in inside.items()})
        if name == "$enum":
            return (name, inside["type"], inside["name"], self.value(inside["value"]))
        plain = {"$path": PurePosixPath, "$datetime": datetime.fromisoformat, "$size": tuple}
        return plain[name](inside) if name in plain else (name, inside)


def read_root(root: Path) -> tuple[dict[str, Any], list[Checkpoint]]:
    """(name → document) of everything that is no checkpoint, and the checkpoints, oldest first."""
    others = {f"writers/{path.name}": sealed(path) for path in (root / "writers").iterdir()}
    found = []
    for folder in (path for path in root.iterdir() if FOLDER.fullmatch(path.name)):
        register = sealed(folder / "manifest.json")
        if register["kind"] == "checkpoint":
            found.append(Checkpoint(folder, register))
        else:
            others[folder.name] = register
    return others, sorted(found, key=lambda c: (c.manifest["epoch"], c.manifest["sequence"]))
