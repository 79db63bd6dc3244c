"""Files of torch.save as sources: written by torch here, and read without it."""

from __future__ import annotations

import argparse
import datetime
import enum
import pickle
import random
import tracemalloc
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format.nodes import (
    ArrayRef,
    DeviceName,
    DtypeName,
    GeneratorState,
    SizeTuple,
    TensorRef,
)
from holdfast.interop.files import LocalFile
from holdfast.interop.lazy import load_file
from holdfast.interop.opening import open_source
from holdfast.interop.pickles import values
from holdfast.interop.pickles.values import PickleBudget
from holdfast.interop.source import Source, read_pieces
from holdfast.interop.sources.torchfile import TorchFile, read_pickle
from holdfast.interop.sources.zips import join_crcs
from holdfast.state.leaves import TORCH_DTYPES

WAYS = ("zip", "legacy", "pickle 2", "pickle 4", "pickle 5")


LARGE = {
    "more memory": b"\x80\x02" + b"\x8f0" * 600_000 + b"}.",
    "operations": b"\x80\x02" + b"N" * 1_000 + b"}.",
    "values": pickle.dumps([[[None] * 1000] * 1000] * 5),
    "the paths": pickle.dumps({"x" * 2000: [[np.zeros(1)] * 200] * 200}),
    "claim to be": None,
}
"""Files that cost more than one may by default; by a part of the message."""


def save(value: Any, path: Path, way: str) -> None:
    if way.startswith("pickle"):
        path.write_bytes(pickle.dumps(value, int(way[-1])))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=way == "zip")


def tensors(source: Source, component: str = "model") -> dict[str, torch.Tensor]:
    """Read each tensor of a component, by path."""
    part = source.get_component(component)
    read: dict[str, bytearray] = {key: bytearray() for key in part.specs}
    for piece in read_pieces(source, [(component, key) for key in part.specs]):
        read[piece.key] += piece.memory
    made = {}
    for path, ref in part.leaves.items():
        spec, data = part.specs[ref.key], read[ref.key]
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        made[path] = flat.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    flat = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*flat)


ALL = {
    **{
        name: torch.arange(24).reshape(2, 3, 4).to(dtype)
        for name, dtype in TORCH_DTYPES.items()
        if not name.startswith(("F4", "F8", "C32"))
    },
    **{
        name: torch.arange(24, dtype=torch.uint8).reshape(2, 12).view(dtype)
        for name, dtype in TORCH_DTYPES.items()
        if name.startswith(("F4", "F8"))
    },
    "scalar": torch.tensor(7.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(60.0).reshape(3, 4, 5).permute(2, 0, 1),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": torch.arange(1000.0)[13:977:7],
    "part": torch.arange(100).reshape(10, 10)[2:5, 3:8],
    "expanded": torch.arange(5.0).expand(4, 5),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "grad": torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_tensor_comes_back_with_its_bits(tmp_path: Path, way: str) -> None:
    some = {k: v for k, v in ALL.items() if way == "zip" or v.dtype != torch.complex32}
    save(some, tmp_path / "w.pt", way)
    with open_source(str(tmp_path / "w.pt")) as source:
        read = tensors(source)
        refs = source.get_component("model").leaves
        assert source.left_out == []
    assert [*read] == [*some]
    assert [name for name in some if not same(read[name], some[name])] == []
    assert refs["parameter"] == TensorRef("parameter", grad=True, parameter=True)
    assert refs["grad"] == TensorRef("grad", grad=True)
    assert refs["channels last"] == TensorRef("channels last", order=(0, 2, 3, 1))
    assert refs["transposed"] == TensorRef("transposed", order=(1, 2, 0))


@pytest.mark.parametrize("way", WAYS)
def test_tied_tensors_have_one_key_and_views_of_a_storage_have_their_own(
    tmp_path: Path, way: str
) -> None:
    weight = torch.randn(4, 3)
    save({"a": weight, "b": weight, "row": weight[1]}, tmp_path / "w.pt", way)
    with open_source(str(tmp_path / "w.pt")) as source:
        part = source.get_component("model")
        assert part.kind == "module"
        assert {path: ref.key for path, ref in part.leaves.items()} == {
            "a": "a",
            "b": "a",
            "row": "row",
        }
        assert same(tensors(source)["row"], weight[1])


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("way", WAYS)
def test_plain_values_come_back_as_they_were(tmp_path: Path, way: str) -> None:
    plain = {
        "numbers": [0, 1, -1, 255, 256, 65536, 2**31, -(2**63), 10**40, 1.5, float("inf")],
        "text": "ä\n€𝄞 'quoted' \\",
        "bytes": bytes(range(256)),
        "nothing": None,
        "flags": (True, False),
        "nested": {"list": [[], (), {}], 1: {2: 3}, (1, "a"): 4},
        "sets": ({1, 2}, frozenset({"a"})),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter(a=3),
        "time": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
        "span": datetime.timedelta(1, 2, 3),
        "path": Path("/a/b"),
        "numpy": np.float32(1.5),
        "scalar": np.int64(-3),
    }
    save({"w": torch.zeros(2), **plain}, tmp_path / "w.pt", way)
    with open_source(str(tmp_path / "w.pt")) as source:
        (part,) = source.parts.values()
        tree = dict(part.tree)
        del tree["w"]
        assert tree == plain
        assert {k: type(v) for k, v in tree.items()} == {k: type(v) for k, v in plain.items()}
        assert source.left_out == []


@pytest.mark.parametrize("way", WAYS)
def test_values_of_torch_and_numpy_are_nodes(tmp_path: Path, way: str) -> None:
    generator = np.random.default_rng(5)
    generator.spawn(1)
    values = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "size": torch.Size([2, 3]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "large": np.arange(100_000),
        "mt": np.random.RandomState(3),
        "pcg": generator,
        "python": random.Random(4),
        "torch": torch.Generator().manual_seed(1),
    }
    save({"w": torch.zeros(2), **values}, tmp_path / "w.pt", way)
    with open_source(str(tmp_path / "w.pt")) as source:
        (part,) = source.parts.values()
        tree, read = part.tree, tensors(source, *source.parts)
        assert source.left_out == []
    assert tree["dtype"] == DtypeName("bfloat16")
    assert tree["device"] == DeviceName("cuda:3")
    assert tree["size"] == SizeTuple((2, 3))
    for name in ("array", "fortran", "large"):
        assert tree[name] == ArrayRef(name)
        assert read[name].numpy().tolist() == values[name].tolist()
    kinds = {name: tree[name].kind for name in ("mt", "pcg", "python", "torch")}
    assert kinds == {"mt": "numpy-legacy", "pcg": "numpy", "python": "python", "torch": "torch"}
    assert tree["pcg"].members["state"] == generator.bit_generator.state
    assert tree["pcg"].members["seed_seq"]["n_children_spawned"] == 1
    assert isinstance(tree["torch"], GeneratorState)
    assert same(read["torch.state"], values["torch"].get_state())
    assert read["python.state"].tolist() == [*values["python"].getstate()[1]]
    assert read["mt.state.state.key"].tolist() == values["mt"].get_state()[1].tolist()


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch no longer likes them
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def test_what_has_no_form_is_left_out_by_name_and_nothing_else(tmp_path: Path) -> None:
    value = {
        "w": torch.zeros(2),
        "args": argparse.Namespace(lr=0.1),
        "default": defaultdict(int, a=1),
        "callbacks": [1, {"ema": pytest.Class, "n": 2}, pytest.Class],
        "complex": 1j,
        "quantized": _quantized(),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "objects": np.array([None, "a"], dtype=object),
        "text": np.array(["a", "bc"]),
        "array": bytearray(b"abc"),
    }
    torch.save(value, tmp_path / "w.pt")
    with open_source(str(tmp_path / "w.pt")) as source:
        (part,) = source.parts.values()
        tree = dict(part.tree)
        out = {one.path.partition(".")[2]: one.why for one in source.left_out}
    assert [*tree] == ["w", "args", "default"]
    assert tree["args"] == {"lr": 0.1}
    assert tree["default"] == {"a": 1}
    assert out["callbacks.1.ema"] == "the class or function _pytest.python.Class"
    for name in ("quantized", "sparse", "meta"):
        assert out[name].startswith(f"a {name} tensor")
    assert out["complex"] == "an object of builtins.complex, which is not carried over"
    assert "'O8'" in out["objects"]
    assert "bytearray" in out["array"]
    assert out.keys() == {*value, "callbacks.1.ema", "callbacks.2"} - {"w", "callbacks"}


@pytest.mark.parametrize("way", ["zip", "legacy", "pickle 4"])
def test_a_file_cut_short_is_refused(tmp_path: Path, way: str) -> None:
    path = tmp_path / "w.pt"
    save({"a": torch.randn(100), "b": torch.arange(9)}, path, way)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 50):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptData, match=r"w\.pt"):
            open_source(str(path))


def test_a_program_is_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch no longer likes them
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "w.pt")
    with pytest.raises(FormatError, match="TorchScript"):
        open_source(str(tmp_path / "w.pt"))


def test_a_zip_file_with_64_bit_lengths_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.arange(50), "b": torch.ones(3)}, tmp_path / "w.pt")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "large.pt", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with open_source(str(tmp_path / "large.pt")) as source:
        assert same(tensors(source)["a"], torch.arange(50))


def test_records_of_a_caller_keep_their_members(tmp_path: Path) -> None:
    """What a reader of another library's metadata asks for by name, and nothing else."""
    path = tmp_path / "x.metadata"
    value = argparse.ArgumentError(None, "x")
    path.write_bytes(pickle.dumps({"known": Record(1), "other": value}, 4))
    file = LocalFile.open_regular(path)
    found = read_pickle(file, records=[f"{Record.__module__}.Record"])
    file.close()
    assert type(found["known"]) is values.PickledObject
    assert found["known"].members == {"a": 1}
    assert type(found["other"]) is values.Unknown


class Record:
    def __init__(self, a: int) -> None:
        self.a = a


def test_many_small_tensors_take_little_memory(tmp_path: Path) -> None:
    """A pickle has about 35 operations for a tensor, whose values are freed as it goes on."""
    torch.save({f"layer.{n}.weight": torch.ones(2) for n in range(2_000)}, tmp_path / "w.pt")
    tracemalloc.start()
    with open_source(str(tmp_path / "w.pt")) as source:
        assert len(source.get_component("model").specs) == 2_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_members_of_a_zip_file_that_overlap_are_refused_as_such(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(50)}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    second = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 1)
    data[second + 42 : second + 46] = (10).to_bytes(4, "little")
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(FormatError, match="overlaps another member"):
        open_source(str(tmp_path / "w.pt"))


@pytest.mark.parametrize("message", LARGE)
def test_trust_lifts_each_bound_on_the_values_of_a_file_and_the_error_says_so(
    tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R27: a large checkpoint of its own user must have a way in."""
    path, data = tmp_path / "large.pkl", LARGE[message]
    if data is None:
        torch.save({"x": torch.zeros(1).expand(20 << 20)}, path)
    else:
        path.write_bytes(data)
    if message == "operations":
        monkeypatch.setattr(
            PickleBudget.__init__, "__kwdefaults__", {"operations": 100, "nbytes": 9999}
        )
    with pytest.raises(LimitExceeded, match=rf"{message}.*--trust.*trust=True"):
        open_source(str(path))
    with (
        load_file(path, trust=True)
        if message == "operations"
        else open_source(str(path), trust=True)
    ):
        pass
    with pytest.raises(LimitExceeded):
        open_source(str(path))


class _Conjugate:
    """A tensor whose bytes stand for other numbers, as any kind of dict may say."""

    def __reduce__(self) -> Any:
        storage = torch.ones(2, dtype=torch.complex64)._typed_storage()
        metadata = OrderedDict(conj=True)
        arguments = (storage, 0, (2,), (1,), False, OrderedDict(), metadata)
        return torch._utils._rebuild_tensor_v2, arguments


def test_bytes_that_stand_for_other_numbers_are_left_out(tmp_path: Path) -> None:
    torch.save({"x": _Conjugate(), "y": 1}, tmp_path / "a.pt")
    with open_source(str(tmp_path / "a.pt")) as source:
        assert ["conj" in one.why for one in source.left_out] == [True]


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_bytes_of_a_tensor_that_are_not_what_was_written_are_found_once_all_are_read(
    tmp_path: Path, num_pieces: int
) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"first": torch.ones(30), "second": torch.full((30,), 2.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.rindex(torch.full((30,), 2.0).numpy().tobytes()) + 77] ^= 1
    path.write_bytes(data)
    nbytes = 120 // num_pieces
    with TorchFile(path) as source:
        memory = memoryview(bytearray(nbytes))
        for key in ("first", "second"):
            for start in reversed(range(nbytes, 120, nbytes)):
                source.read_into("model", key, start, memory)
            if key == "first":
                source.read_into("model", key, 0, memory)
        with pytest.raises(CorruptData, match=r"saved\.pt: member 'saved/data/1' is not what was"):
            source.read_into("model", "second", 0, memory)


def test_a_file_whose_sums_torch_did_not_compute_is_read(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(30.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with TorchFile(path) as source:
        memory = bytearray(120)
        source.read_into("model", "weight", 0, memoryview(memory))
    assert memory == torch.arange(30.0).numpy().tobytes()


@pytest.mark.parametrize("lengths", [(0, 5), (1, 1), (4 << 20, 12_345), (3, 1 << 20)])
def test_sums_of_two_runs_are_joined_as_zlib_computes_them(lengths: tuple[int, int]) -> None:
    first, second = (Random(number).randbytes(nbytes) for number, nbytes in enumerate(lengths))
    found = join_crcs(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)
