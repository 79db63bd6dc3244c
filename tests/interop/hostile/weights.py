"""Hostile files of weights: headers, indexes, protobufs and HDF5 files that must be refused."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tests.interop.hostile.cases import Case
from tests.interop.sources.reads import safetensors_bytes
from tests.interop.sources.test_mindspore import entry, message, varint

BIG = 2**63 - 1
SOURCES = Path(__file__).parents[1] / "sources"
READERS = {
    path.stem: import_module(f"tests.interop.sources.{path.stem}")
    for path in sorted(SOURCES.glob("test_*.py"))
    if "\ndef malformed(" in path.read_text("utf-8")
}
"""Tests of readers with malformed files of their own."""


def cases(outside: Path) -> Iterator[Case]:
    """The hostile files and folders; `outside` is a file that none may read."""
    for kind, contents in (("header", _headers()), ("protobuf", _protobufs())):
        for number, data in enumerate(contents):
            yield _case(f"{kind}: {number}", f"{kind}-{number}.bin", data)
    for number, index in enumerate(_indexes(outside)):
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        files = {SHARD: _SHARD, INDEX: text}
        yield Case(f"index: {number}", files, is_named=True)
    for name, write in _HDF5.items():
        yield _case(f"hdf5: {name}", f"{name}.mdl", _content(write, outside))
    whole = (Path(__file__).parents[2] / "golden/peers/cerebras/lz4.mdl").read_bytes()
    for length in (8, 9, 48, 96, 500, 2048, 5000, 12_000, len(whole) - 1):
        yield _case(f"hdf5: cut at {length}", "cut.mdl", whole[:length])
    for reader, module in READERS.items():
        for number, data in enumerate(module.malformed()):
            yield _case(f"{reader}: {number}", f"{reader}-{number}.bin", data)


def _case(name: str, file: str, data: bytes) -> Case:
    return Case(name, {file: data}, is_named=True)


def _content(write: Callable[[Path, Path], None], outside: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.mdl"
        write(path, outside)
        return path.read_bytes()


def write_tensor(path: Path, outside: Path | None = None) -> None:
    """Write an HDF5 file of one tensor of Cerebras."""
    _written(path, data=np.arange(8, dtype="f4"))


def harmless() -> Iterator[Case]:
    """A folder of shards, and files of each kind, of which one is more than is read at once."""
    index = {"weight_map": {"w": SHARD}}
    yield Case("folder", {SHARD: _SHARD, INDEX: json.dumps(index).encode()})
    large = {"w": tensor(dtype="U8", shape=(1 << 20,), offsets=(0, 1 << 20))}
    yield Case("large", {"x.safetensors": safetensors_bytes(large, bytes(1 << 20))})
    yield Case("protobuf", {"x.ckpt": entry("w", "Float32", (2,), bytes(8))})
    yield Case("hdf5", {"x.mdl": _content(write_tensor, Path())})


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
_SHARD = safetensors_bytes({"w": tensor()}, bytes(8))


def _headers() -> Iterator[bytes]:
    """Headers of safetensors files; each begins as one does."""
    bodies: tuple[Any, ...] = (
        *({"w": one} for one in (None, [], "x", 1, {}, {"dtype": "F32"}, {**tensor(), "x": 1})),
        *(
            {"w": tensor(dtype=one)}
            for one in ("F33", "O", "F6_E2M3", "F4", None, [], {}, 1, "f32")
        ),
        *({"w": tensor(shape=one)} for one in ([BIG], [BIG, BIG], [2**62, 0, 2**62], [-2], [2.0])),
        *({"w": tensor(shape=one)} for one in (["2"], None, 2, [True, 2], [1] * 200, [10**4000])),
        *({"w": tensor(offsets=one)} for one in ([0, 9], [8, 0], [-8, 0], [0], None, [0, BIG])),
        *({"w": tensor(offsets=one)} for one in ([BIG - 8, BIG], [0.0, 8.0], [4, 12], "08")),
        {"a": tensor(), "b": tensor()},
        {"a": tensor(), "b": tensor(offsets=(16, 24))},
        {"a": tensor(), "b": tensor(offsets=(4, 12))},
        {"__metadata__": {"a": [1]}, "w": tensor()},
        {"__metadata__": 7, "w": tensor()},
    )
    for body in bodies:
        yield safetensors_bytes(body, bytes(8))
    yield safetensors_bytes(b'{"a":' * 200_000 + b"1" + b"}" * 200_000)
    yield safetensors_bytes(b'{"w":' + b"[" * 500_000)
    yield safetensors_bytes(b'{"w":1,"w":2}')
    yield safetensors_bytes(b'{"w":NaN}')
    yield safetensors_bytes(b'{"w":' + b"9" * 2_000_000 + b"}")
    yield safetensors_bytes(b'{"\xff":1}')
    yield safetensors_bytes(b'{"a":1}x')
    yield (1 << 24).to_bytes(8, "little") + b"{"
    yield safetensors_bytes({f"{number}": tensor() for number in range(50_001)})


def _indexes(outside: Path) -> Iterator[Any]:
    names = (
        *("../outside.safetensors", str(outside), "a/../../outside.safetensors", "..", ""),
        *("/etc/passwd", "/proc/self/environ", "file:///etc/passwd", "C:\\x.safetensors", "a\0b"),
        *("model-00002-of-00002.safetensors", "model.safetensors.index.json", ".x.safetensors"),
    )
    for name in names:
        yield {"weight_map": {"w": name}}
    yield {"weight_map": {"w": "model-00001-of-00001.safetensors", "v": "../outside.safetensors"}}
    yield {"weight_map": {}}
    yield {"weight_map": {"v": "model-00001-of-00001.safetensors"}}
    yield {"weight_map": {f"{n}": f"model-{n:05}-of-99999.safetensors" for n in range(20_000)}}
    yield {"weight_map": [["w", "x"]]}
    yield b"[" * 1_000_000
    yield b'{"weight_map":' + b'{"a":' * 100_000
    yield b'{"weight_map":{"w":"a","w":"b"}}'
    yield b"\xff\xfe"
    yield b""


def _protobufs() -> Iterator[bytes]:
    good = entry("w", "Float32", (2,), bytes(8))
    yield good + b"\x0a"
    yield good + b"\x0a" + b"\xff" * 10 + b"\x01"
    yield good + b"\x0a" + varint(BIG)
    yield good + b"\x0a" + varint(2**64 - 1)
    yield good + b"\x0b" + good  # a group
    yield good + message((2, b"x"))
    yield good + message((1, b""))
    yield good + message((0, b""))
    yield good + b"\x08\x01"
    for dims in ((BIG,), (BIG, BIG), (2**64 - 1,), (2**62, 0, 2**62), (3,), (1,) * 129, (0, 5), ()):
        yield entry("w", "Float32", dims, bytes(8))
    for dtype in ("", "Float33", "x" * 65, "\0", "Int4", "object", "pickle"):
        yield entry("w", dtype, (2,), bytes(8))
    yield entry("x" * 5_000, "Float32", (2,), bytes(8))
    yield good + message((1, message((1, b"\xff\xfe"), (2, message((2, "Bool"), (3, b"x"))))))
    yield good + message((1, message((1, "v"))))
    yield good + message((1, message((1, "v"), (2, message((2, "Bool"))))))
    yield good + message((1, message((1, "v"), (2, message((3, b"x"))))))
    yield good + message((1, message((1, "v"), (2, message((2, "Bool"), (3, b"x"), (3, b"x"))))))
    yield good + message((1, message((1, "v"), (2, b"\x1a" + varint(2**40)))))
    yield good + message((1, message((1, "v"), (2, b"\x0a" * 100))))
    yield good + message((1, message((1, "v"), (3, b""), (2, message((2, "Bool"), (3, b"x"))))))
    yield good + entry("v", "Bool", (1,), b"\1") + good
    yield good + b"crc_num" + (12345).to_bytes(10, "big")
    yield b"".join(entry(f"{n}", "Bool", (1,), b"\1") for n in range(50_001))
    yield entry("w", "str", (0,), b"x" * 9) + good[:-1]


def _written(path: Path, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        tell(file.create_dataset("w", **options))


def tell(dataset: h5py.Dataset) -> None:
    """Say that a dataset is a tensor of Cerebras."""
    dataset.attrs.update({"__NUMPY__": True, "__TYPE__": "NumpyArraySerializer"})


def _external_link(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        file["w"] = h5py.ExternalLink(str(outside), "/w")


def _external_link_in_a_group(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("a")["w"] = h5py.ExternalLink(str(outside), "/w")


def _soft_link(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        file["real"] = h5py.ExternalLink(str(outside), "/")
        file["w"] = h5py.SoftLink("/real/w")


def _external_storage(path: Path, outside: Path) -> None:
    _written(path, shape=(64,), dtype="u1", external=[(str(outside), 0, 64)])


def _virtual(path: Path, outside: Path) -> None:
    layout = h5py.VirtualLayout(shape=(8,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(outside), "w", shape=(8,))
    with h5py.File(path, "w") as file:
        tell(file.create_virtual_dataset("w", layout))


def _virtual_without_end(path: Path, outside: Path) -> None:
    none = h5py.h5s.UNLIMITED
    layout = h5py.VirtualLayout(shape=(8,), dtype="f4", maxshape=(None,))
    source = h5py.VirtualSource(str(outside), "w", shape=(8,), maxshape=(None,))
    layout[0:none:1] = source[0:none:1]
    with h5py.File(path, "w") as file:
        tell(file.create_virtual_dataset("w", layout))


def _claims_69_gb(path: Path, outside: Path) -> None:
    _written(path, shape=(2**33, 2), dtype="f4")


def _claims_69_gb_in_chunks(path: Path, outside: Path) -> None:
    _written(path, shape=(2**33, 2), dtype="f4", chunks=(1024, 2), compression="gzip")


def _claims_many_chunks(path: Path, outside: Path) -> None:
    _written(path, shape=(2**40,), dtype="u1", chunks=(1,))


def _one_huge_chunk(path: Path, outside: Path) -> None:
    _written(path, shape=(2**30,), dtype="u1", chunks=(2**30,), compression="gzip")


def _gzip_bomb(path: Path, outside: Path) -> None:
    bomb = zlib.compressobj(9)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(320)) + bomb.flush()
    with h5py.File(path, "w") as file:
        shape = (len(data),)
        made = file.create_dataset("w", shape, "u1", chunks=shape, compression="gzip")
        tell(made)
        made.id.write_direct_chunk((0,), data)


def _wrong_lz4(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "w", (1000,), "u1", chunks=(1000,), compression=32_004, allow_unknown_filter=True
        )
        tell(made)
        head = (1000).to_bytes(8, "big") + (2**31).to_bytes(4, "big")
        made.id.write_direct_chunk((0,), head + (6).to_bytes(4, "big") + b"\xffhelp!")


def _unknown_filter(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "w", (8,), "u1", chunks=(8,), compression=32_015, allow_unknown_filter=True
        )
        tell(made)
        made.id.write_direct_chunk((0,), b"zstd")


def _references(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        made = file.create_dataset("w", (1,), dtype=h5py.ref_dtype)
        made[0] = file.ref
        tell(made)


def _texts(path: Path, outside: Path) -> None:
    _written(path, data=["a", "b"])


def _big_endian(path: Path, outside: Path) -> None:
    _written(path, data=np.arange(3, dtype=">f4"))


def _compound(path: Path, outside: Path) -> None:
    _written(path, data=np.zeros(3, dtype=[("a", "f4"), ("b", "i8")]))


def _deep_groups(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        tell(file.create_dataset("/".join("g" * 60), data=np.arange(3.0)))


def _group_in_itself(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("a")
        group["a"] = group


def _groups_in_each_other(path: Path, outside: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("a")
        for name in ("b", "c", "d"):
            group[name] = group
        tell(group.create_dataset("w", data=np.arange(3.0)))


def _with_spec(spec: Any, **attributes: Any) -> Any:
    def write(path: Path, outside: Path) -> None:
        text = spec if isinstance(spec, str) else json.dumps([None, json.dumps([1, spec])])
        with h5py.File(path, "w", track_order=True) as file:
            file.attrs.update({"__version__": 0.5, "__SUCCESS__": True, "__spec__": text})
            for name, value in attributes.items():
                told = {"__objects__": [name], f"{name}.__metadata__": value}
                file.attrs[f"{name}.__metadata__"] = json.dumps(told)
            tell(file.create_dataset("w", data=np.arange(3.0)))

    return write


def _dict_of(*keys: str) -> dict[str, Any]:
    leaf = {"type": None, "context": None, "children_spec": []}
    return {
        "type": "builtins.dict",
        "context": json.dumps(keys),
        "children_spec": [leaf for _ in keys],
    }


def _deep_spec() -> Any:
    node = _dict_of("a")
    for _ in range(100):
        node = {"type": "builtins.list", "context": "null", "children_spec": [node]}
    return node


_TORCH = {"__TORCH__": True, "__NUMPY__": True, "__TYPE__": "TorchTensorSerializer"}
_SAFE = {"__TYPE__": "DeferredSafeTensor", "__NONE__": True}
_FULL = {"__TYPE__": "DeferredFullTensor", "__NONE__": True}
_HDF5 = {
    "external link": _external_link,
    "external link in a group": _external_link_in_a_group,
    "soft link": _soft_link,
    "external storage": _external_storage,
    "virtual": _virtual,
    "virtual without end": _virtual_without_end,
    "69 GB": _claims_69_gb,
    "69 GB in chunks": _claims_69_gb_in_chunks,
    "many chunks": _claims_many_chunks,
    "huge chunk": _one_huge_chunk,
    "gzip bomb": _gzip_bomb,
    "wrong lz4": _wrong_lz4,
    "unknown filter": _unknown_filter,
    "references": _references,
    "texts": _texts,
    "big-endian": _big_endian,
    "compound": _compound,
    "deep groups": _deep_groups,
    "group in itself": _group_in_itself,
    "groups in each other": _groups_in_each_other,
    "spec of text": _with_spec("x"),
    "spec of brackets": _with_spec("[" * 100_000),
    "spec of a class": _with_spec({"type": "os.system", "context": "null", "children_spec": []}),
    "spec without end": _with_spec({"type": "builtins.list", "context": "null"}),
    "deep spec": _with_spec(_deep_spec()),
    "leaf without metadata": _with_spec(_dict_of("a")),
    "leaf elsewhere": _with_spec(_dict_of("a"), a={**_SAFE, "path": "/etc/passwd", "key": "w"}),
    "leaf of a graph": _with_spec(_dict_of("a"), a={"__TYPE__": "DeferredGraphTensor"}),
    "link to itself": _with_spec(
        _dict_of("a"), a={"__LINKED__": True, "key": "a", "__TYPE__": "LinkedObject"}
    ),
    "link to nothing": _with_spec(_dict_of("a"), a={"__LINKED__": True, "key": 7}),
    "leaf of a file above": _with_spec(_dict_of("../w"), **{"../w": _TORCH}),
    "another dtype": _with_spec(_dict_of("w"), w={**_TORCH, "dtypes": ["torch.float32"]}),
    "another shape": _with_spec(
        _dict_of("w"), w={**_TORCH, "dtypes": ["torch.float64"], "shapes": [[BIG]]}
    ),
    "dtype of a class": _with_spec(_dict_of("w"), w={**_TORCH, "dtypes": ["torch.os"]}),
    "filled without end": _with_spec(
        _dict_of("a"), a={**_FULL, "shape": [BIG, 2], "dtype": "torch.int8", "fill_value": 1}
    ),
    "filled with text": _with_spec(
        _dict_of("a"), a={**_FULL, "shape": [2], "dtype": "torch.int8", "fill_value": "x" * 9}
    ),
    "filled with too much": _with_spec(
        _dict_of("a"), a={**_FULL, "shape": [2], "dtype": "torch.int8", "fill_value": 10**30}
    ),
    "scalar that is none": _with_spec(
        _dict_of("a"), a={"__TYPE__": "ScalarSerializer", "scalar_value": [1] * 99}
    ),
}
