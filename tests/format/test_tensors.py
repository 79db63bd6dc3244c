"""Tensor files: the plan, the header, and that the stock library reads every one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each
from tests.format.samples import header_bytes, image, is_refused

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError
from holdfast.format import tensors
from holdfast.format.layout import MAX_TENSOR_FILE_NBYTES, MAX_TENSORS_PER_FILE
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec, lay_out

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SPECS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=("Cs",))),
        st.sampled_from(sorted(ITEM_NBYTES)),
        SHAPES,
    ),
    max_size=20,
    unique_by=lambda spec: spec[0],
).map(lambda specs: [TensorSpec(*spec) for spec in specs if spec[0] != "__metadata__"])


def parse(data: bytes, file_nbytes: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    return tensors.parse_header(data, file_nbytes=file_nbytes, what="the-document")


@given(SPECS)
def test_any_plan_is_a_valid_safetensors_file_that_says_the_same(specs: list[TensorSpec]) -> None:
    files = lay_out("model", specs)
    assert len(files) == (1 if specs else 0)
    for file in files:
        stock = dict(safetensors.deserialize(image(file)))
        found = parse(file.header, file.nbytes)
        assert stock.keys() == found.keys() == {spec.key for spec in specs}
        for spec, start in zip(file.specs, file.starts, strict=True):
            dtype, shape, begin, stop = found[spec.key]
            assert (begin, stop) == (start, start + spec.nbytes)
            assert stock[spec.key]["shape"] == list(shape)
            assert len(stock[spec.key]["data"]) == spec.nbytes
            if spec.dtype in ("C32", "C128"):
                assert (dtype, shape[-1]) == ({"C32": "F16", "C128": "F64"}[spec.dtype], 2)
            elif spec.dtype == "F4_X2":
                last = 2 * spec.shape[-1] if spec.shape else 2
                assert (dtype, shape) == ("F4", (*spec.shape[:-1], last))
            else:
                assert (dtype, shape) == (spec.dtype, spec.shape)


@given(SPECS)
def test_data_is_aligned_dense_and_in_order(specs: list[TensorSpec]) -> None:
    for file in lay_out("model", specs):
        assert len(file.header) % 4096 == 0
        position = len(file.header)
        for spec, start in zip(file.specs, file.starts, strict=True):
            assert start == position
            assert start % ITEM_NBYTES[spec.dtype] == 0
            position += spec.nbytes
        assert position == file.nbytes
        sizes = [ITEM_NBYTES[spec.dtype] for spec in file.specs]
        assert sizes == sorted(sizes, reverse=True)
        for size in set(sizes):
            of_size = [spec for spec in specs if ITEM_NBYTES[spec.dtype] == size]
            assert [spec for spec in file.specs if ITEM_NBYTES[spec.dtype] == size] == of_size


def test_the_stock_library_reads_values_of_every_dtype(tmp_path: Path) -> None:
    """Interchange: safetensors' own loader gives the same tensors, complex ones as views."""
    dtypes = {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "U16": torch.uint16,
        "I16": torch.int16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "F32": torch.float32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
    specs = [
        TensorSpec(f"{name}.{n}", name, s)
        for name in dtypes
        for n, s in enumerate([(3, 2), (), (0, 4)])
    ]
    specs.append(TensorSpec("C128", "C128", (3,)))
    (file,) = lay_out("model", specs)
    data = bytearray(image(file, fill=1))
    wide = torch.tensor([1 + 2j, 3 - 4j, 5j], dtype=torch.complex128)
    start = file.starts[[spec.key for spec in file.specs].index("C128")]
    data[start : start + 48] = wide.numpy().tobytes()
    (tmp_path / file.name).write_bytes(data)
    loaded = safetensors.torch.load_file(tmp_path / file.name)
    for spec in specs[:-1]:
        expected = torch.full((spec.nbytes,), 1, dtype=torch.uint8).view(dtypes[spec.dtype])
        found = loaded[spec.key]
        assert found.dtype == dtypes[spec.dtype]
        assert tuple(found.shape) == spec.shape
        assert found.flatten().view(torch.uint8).equal(expected.view(torch.uint8))
    assert torch.view_as_complex(loaded["C128"]).equal(wide)
    with safetensors.safe_open(tmp_path / file.name, "pt") as opened:
        assert opened.metadata() == {"format": "holdfast", "component": "model"}


@pytest.mark.full
def test_50_001_tensors_take_two_files_that_the_stock_library_reads() -> None:
    specs = [TensorSpec(f"blocks.{i}.weight", "F32", (1,)) for i in range(MAX_TENSORS_PER_FILE + 1)]
    files = lay_out("model", specs)
    assert [file.name for file in files] == ["model-00000.safetensors", "model-00001.safetensors"]
    assert [len(file.specs) for file in files] == [MAX_TENSORS_PER_FILE, 1]
    assert [len(safetensors.deserialize(image(file))) for file in files] == [50_000, 1]
    assert [len(parse(file.header, file.nbytes)) for file in files] == [50_000, 1]


def test_files_are_split_at_4_gib_unless_one_tensor_is_larger() -> None:
    gib = 2**30
    specs = [
        TensorSpec("a", "U8", (3 * gib,)),
        TensorSpec("b", "U8", (gib,)),
        TensorSpec("c", "U8", (1,)),
        TensorSpec("d", "U8", (9 * gib,)),
        TensorSpec("e", "U8", (1,)),
    ]
    files = lay_out("m", specs)
    assert [[spec.key for spec in file.specs] for file in files] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert all(
        file.nbytes - len(file.header) <= MAX_TENSOR_FILE_NBYTES or len(file.specs) == 1
        for file in files
    )


@pytest.mark.full
def test_files_are_split_where_long_keys_would_make_too_long_a_header() -> None:
    """R29: what is written stays within the limits of what is read."""
    specs = [TensorSpec(f"{i:06d}" + "k" * 994, "F32", ()) for i in range(40_000)]
    files = lay_out("model", specs)
    assert [file.name for file in files] == [
        f"model-{i:05d}.safetensors" for i in range(len(files))
    ]
    assert [spec for file in files for spec in file.specs] == specs
    for file in files:
        assert len(file.header) <= tensors.MAX_HEADER_NBYTES + 8
        assert len(parse(file.header, file.nbytes)) == len(file.specs)


@pytest.mark.parametrize(
    "keys", [["a", "a"], ["__metadata__"], ["\ud800"], ["k" * (17 << 20)]], ids=lambda k: k[0][:9]
)
def test_keys_that_no_header_can_hold_are_the_callers_error(keys: list[str]) -> None:
    with pytest.raises(UsageError, match="model"):
        lay_out("model", [TensorSpec(key, "F32", ()) for key in keys])


def test_sizes_are_exact_integers() -> None:
    assert TensorSpec("a", "C128", (2**40, 2**40, 3)).nbytes == 48 * 2**80
    assert TensorSpec("a", "F32", (2**62, 2**62, 0)).nbytes == 0
    assert TensorSpec("a", "F32", ()).nbytes == 4


def head(entries: Any) -> tuple[bytes, int]:
    data = header_bytes(json.dumps(entries))
    return data, len(data)


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: list[tuple[Any, int]] = [
    ([], 0),
    ("x", 0),
    (None, 0),
    ({"a": None}, 0),
    ({"a": []}, 0),
    ({"a": {}}, 0),
    ({"a": {**tensor(), "x": 1}}, 8),
    ({"a": tensor(dtype="F33")}, 8),
    ({"a": tensor(dtype=None)}, 8),
    ({"a": tensor(dtype=["F32"])}, 8),
    ({"a": tensor(dtype={})}, 8),
    ({"a": tensor(dtype="C128", shape=[1], offsets=[0, 16])}, 16),
    ({"a": tensor(dtype="F4_X2", shape=[8], offsets=[0, 8])}, 8),
    ({"a": tensor(dtype="F4", shape=[8], offsets=[0, 8])}, 8),
    ({"a": tensor(dtype="F4", shape=[2, 3], offsets=[0, 3])}, 3),
    ({"a": tensor(dtype="F4", shape=[], offsets=[0, 0])}, 0),
    ({"a": tensor(dtype="F4", shape=[0, 3], offsets=[0, 0])}, 0),
    ({"a": tensor(dtype="F6_E2M3", shape=[4], offsets=[0, 3])}, 3),
    ({"a": tensor(shape=2)}, 8),
    ({"a": tensor(shape=None)}, 8),
    ({"a": tensor(shape=["2"])}, 8),
    ({"a": tensor(shape=[2.0])}, 8),
    ({"a": tensor(shape=[True, 2])}, 8),
    ({"a": tensor(shape=[-2])}, 8),
    ({"a": tensor(shape=[-1, -2])}, 8),
    ({"a": tensor(shape=[2**64])}, 8),
    ({"a": tensor(shape=[10**4000])}, 8),
    ({"a": tensor(shape=[2**32, 2**32], offsets=[0, 0])}, 0),
    ({"a": tensor(shape=[2**62, 2**62, 0], offsets=[0, 0])}, 0),
    ({"a": tensor(shape=[2**63 - 1] * 128, offsets=[0, 0])}, 0),
    ({"a": tensor(shape=[1] * 129, offsets=[0, 4])}, 4),
    ({"a": tensor(offsets=[0])}, 8),
    ({"a": tensor(offsets=[0, 8, 8])}, 8),
    ({"a": tensor(offsets="08")}, 8),
    ({"a": tensor(offsets=None)}, 8),
    ({"a": tensor(offsets=[0, 8.0])}, 8),
    ({"a": tensor(offsets=[False, 8])}, 8),
    ({"a": tensor(offsets=[8, 0])}, 8),
    ({"a": tensor(offsets=[-8, 0])}, 8),
    ({"a": tensor(offsets=[0, 9])}, 9),
    ({"a": tensor(offsets=[2**70, 2**70 + 8])}, 8),
    ({"a": tensor()}, 7),
    ({"a": tensor()}, 9),
    ({"a": tensor()}, 0),
    ({"a": tensor(offsets=[1, 9])}, 9),
    ({"a": tensor(), "b": tensor()}, 8),
    ({"a": tensor(), "b": tensor(offsets=[4, 12])}, 12),
    ({"a": tensor(), "b": tensor(offsets=[9, 17])}, 17),
    ({}, 1),
]


@each(("entries", "data_nbytes"), HOSTILE, ids=lambda v: repr(v)[:60])
def test_a_header_that_does_not_fit_its_file_is_refused(entries: Any, data_nbytes: int) -> None:
    """R29, R30, D14: gaps, overlaps, ranges, wrong types, sizes beyond 64 bits."""
    data, nbytes = head(entries)
    with pytest.raises(FormatError, match="the-document"):
        parse(data, nbytes + data_nbytes)


def test_a_header_with_a_name_twice_is_refused() -> None:
    text = json.dumps({"a": tensor(), "b": tensor(offsets=[8, 16])}).replace('"b"', '"a"')
    with pytest.raises(FormatError, match="twice"):
        parse(header_bytes(text), 4096 + 16)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 84 * 2**20, 100_000_001, 16 * 2**20 + 1])
def test_a_huge_header_is_refused_from_its_first_eight_bytes(length: int) -> None:
    """R29: before anything of that size is read or made."""
    with pytest.raises(LimitExceeded, match="the-document"):
        tensors.header_nbytes(length.to_bytes(8, "little"), file_nbytes=2**62, what="the-document")


def test_a_header_beyond_the_end_of_the_file_is_refused() -> None:
    for first8, nbytes in [(b"\0" * 7, 100), (b"\x10" + b"\0" * 7, 23), (b"\0" * 8, 7)]:
        with pytest.raises(CorruptData, match="the-document"):
            tensors.header_nbytes(first8, file_nbytes=nbytes, what="the-document")
    data, nbytes = head({"a": tensor()})
    with pytest.raises(CorruptData, match="cut short"):
        parse(data[:2000], nbytes + 8)


def test_too_many_tensors_are_refused() -> None:
    """R29: counts are bounded."""
    text = json.dumps({str(i): tensor("U8", [0], [0, 0]) for i in range(50_001)})
    data = header_bytes(text, length=len(text))
    with pytest.raises(LimitExceeded, match="50,000"):
        parse(data, len(data))


@given(seed=st.integers(0, 2**32))
def test_a_wounded_header_never_gives_places_outside_the_file(seed: int) -> None:
    """R29, R30: whatever is accepted is inside the file, dense and without overlap."""
    rng = random.Random(seed)
    entries: dict[str, Any] = {"a": tensor(), "b": tensor("U8", [3], [8, 11])}
    text = bytearray(json.dumps(entries).encode())
    for _ in range(rng.randint(1, 3)):
        text[rng.randrange(len(text))] = rng.choice(b'0123456789[]{},"-.eF')
    data = (4088).to_bytes(8, "little") + bytes(text).ljust(4088)
    try:
        found = parse(data, 4096 + 11)
    except FormatError:
        return
    places = sorted((start, stop) for _, _, start, stop in found.values())
    assert places[0][0] == 4096
    assert places[-1][1] == 4096 + 11
    for dtype, shape, start, stop in found.values():
        assert stop - start == math.prod(shape) * ITEM_NBYTES[dtype]


@given(data=st.binary(max_size=200), nbytes=st.integers(0, 2**63))
def test_random_bytes_raise_nothing_but_our_errors(data: bytes, nbytes: int) -> None:
    """R30: any bytes, with a length that fits and one that does not."""
    is_refused(lambda d, what: tensors.parse_header(d, file_nbytes=nbytes, what=what), data)
    sized = len(data).to_bytes(8, "little") + data
    is_refused(lambda d, what: tensors.parse_header(d, file_nbytes=len(d), what=what), sized)
