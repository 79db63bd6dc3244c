"""Tensors that are stored as several boxes: read whole, or only what this rank holds of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from boxed import bits, grid_cuts, random_cuts, reshard
from holdfast.errors import CorruptData
from holdfast.format.codec import CodecName
from holdfast.format.layout import number_of_file
from holdfast.format.manifest import Manifest
from holdfast.loading import block_reader
from holdfast.loading.assembly import _overlaps
from holdfast.loading.open import Opened, open_checkpoint
from holdfast.loading.tensor_reader import TensorReader
from holdfast.manager import CheckpointManager
from holdfast.root.catalog import Catalog
from holdfast.state.shards import Box, LocalShards, Span, boxes_of, packed
from holdfast.store.local import LocalStore
from holdfast.threads.workers import Threads
from holdfast.weights import load_weights

VALUES = {
    "matrix": torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70),
    "bits": torch.arange(30 * 17).reshape(30, 17) % 3 == 0,
    "half": torch.randn(11, 5, 13).to(torch.bfloat16),
    "nan": torch.tensor([0x7FA00001, -0x00600000, 5, 6], dtype=torch.int32).view(torch.float32),
    "complex": torch.randn(9, 12, dtype=torch.complex128),
    "small complex": torch.randn(9, 12, dtype=torch.complex64),
    "long": torch.arange(3001),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
}


def saved(root: Path, values: dict[str, Tensor] = VALUES) -> Path:
    with CheckpointManager(root, {"tree": values}, preflight=False, sinks=()) as manager:
        manager.save(1).wait()
    (folder,) = (path.parent for path in root.glob("step-*/manifest.json"))
    return folder


@contextmanager
def reader(folder: Path) -> Iterator[tuple[TensorReader, Opened]]:
    store = LocalStore(folder.parent)
    manifest = Catalog(store).read(folder.name)
    assert isinstance(manifest, Manifest)
    opened = open_checkpoint(store, folder.name, manifest)
    threads = Threads()
    try:
        yield TensorReader(store, opened, threads=threads, timeout_s=60, verify=True), opened
    finally:
        threads.close_pools()


def held(shape: tuple[int, ...], spans: list[list[Span]]) -> LocalShards:
    """What a rank holds that has these spans of each dimension."""
    local_shape = tuple(sum(stop - start for start, stop in of_dim) for of_dim in spans)
    return LocalShards(
        shape=shape,
        boxes=tuple(boxes_of(spans)),
        places=tuple(boxes_of(packed(spans))),
        views=(),
        local_shape=local_shape,
    )


def expected(tensor: Tensor, spans: list[list[Span]]) -> Tensor:
    for dim, of_dim in enumerate(spans):
        numbers = [number for span in of_dim for number in range(*span)]
        tensor = tensor.index_select(dim, torch.tensor(numbers, dtype=torch.int64))
    return tensor


def random_spans(shape: tuple[int, ...], draw: random.Random) -> list[list[Span]]:
    spans: list[list[Span]] = []
    for size in shape:
        cuts = sorted(draw.randrange(size + 1) for _ in range(2 * draw.choice([1, 1, 2])))
        of_dim = [span for span in zip(cuts[::2], cuts[1::2], strict=True) if span[0] < span[1]]
        spans.append(draw.choice([of_dim, [(0, size)]]))
    return spans


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one plain checkpoint."""
    return saved(tmp_path_factory.mktemp("plain"))


def copied(folder: Path, root: Path) -> Path:
    shutil.copytree(folder.parent, root, dirs_exist_ok=True)
    return root / folder.name


@given(
    seed=st.integers(0, 2**32),
    num_writers=st.integers(1, 3),
    is_compressed=st.booleans(),
    writers_per_part=st.integers(0, 2),
)
@settings(max_examples=40)
def test_random_boxes_come_back_whole_and_in_parts(
    plain: Path,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_writers: int,
    is_compressed: bool,
    writers_per_part: int,
) -> None:
    """Also if the index itself is in parts."""
    draw = random.Random(seed)
    cut = grid_cuts if writers_per_part else random_cuts
    folder = copied(plain, tmp_path_factory.mktemp("boxed"))
    cuts = {
        key: cut(value.shape, draw.choice([1, 2, 7, 30]), draw)
        for key, value in VALUES.items()
        if draw.random() < 0.8
    }
    codec: CodecName | None = "zstd" if is_compressed else None
    reshard(
        folder,
        {"tree": cuts},
        num_writers=num_writers,
        codec=codec,
        writers_per_part=writers_per_part,
    )
    spans = {
        key: random_spans(tuple(value.shape), draw)
        for key, value in VALUES.items()
        if value.dim() and value.numel() and draw.random() < 0.7
    }
    shards = {key: held(tuple(VALUES[key].shape), of_key) for key, of_key in spans.items()}
    with reader(folder) as (tensors, _):
        whole = tensors.read_tensors({"tree": [*VALUES]})["tree"]
        some = [key for key in VALUES if draw.random() < 0.8]
        for parts in (
            tensors.read_tensors({"tree": some}, {"tree": shards}),
            tensors.unread({"tree": some}, {"tree": shards}),
        ):
            assert {*parts["tree"]} == {*some}
            for key in some:
                value = expected(VALUES[key], spans[key]) if key in spans else VALUES[key]
                found = parts["tree"][key]
                found = found if isinstance(found, Tensor) else found.read_tensor()
                assert (found.dtype, found.shape) == (value.dtype, value.shape), key
                assert bits(found) == bits(value), key
    for key, value in VALUES.items():
        assert whole[key].shape == value.shape, key
        assert bits(whole[key]) == bits(value), key


@pytest.mark.parametrize(
    ("rows", "is_read_late"), [((8, 16), True), ((10, 12), True), ((4, 12), False)]
)
def test_a_box_that_is_contiguous_in_a_file_is_read_into_the_live_tensor(
    rows: Span, is_read_late: bool, tmp_path: Path
) -> None:
    values = {"w": torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)}
    folder = saved(tmp_path, values)
    cuts = {"w": [Box((8 * row, 0), (8, 1024)) for row in range(8)]}
    reshard(folder, {"tree": cuts}, num_writers=2)
    spans: list[list[Span]] = [[rows], [(0, 1024)]]
    with reader(folder) as (tensors, _):
        found = tensors.unread({"tree": ["w"]}, {"tree": {"w": held((64, 1024), spans)}})
        box = found["tree"]["w"]
        assert isinstance(box, Tensor) != is_read_late
        box = box if isinstance(box, Tensor) else box.read_tensor()
    assert bits(box) == bits(expected(values["w"], spans))


def test_only_the_blocks_of_held_boxes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of 1,024 elements is a block, and each half of the tensor a writer's."""
    values = {"w": torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)}
    folder = saved(tmp_path, values)
    cuts = {"w": [Box((8 * row, 0), (8, 1024)) for row in range(8)]}
    reshard(folder, {"tree": cuts}, num_writers=2)
    seen: list[tuple[str, int]] = []
    really = TensorReader._plan

    def noted(self: TensorReader) -> Any:
        plans.append(really(self))
        return plans[-1]

    plans: list[Any] = []
    monkeypatch.setattr(TensorReader, "_plan", noted)
    spans: list[list[Span]] = [[(10, 12), (40, 41)], [(0, 1024)]]
    with reader(folder) as (tensors, _):
        (part,) = tensors.read_tensors(
            {"tree": ["w"]}, {"tree": {"w": held((64, 1024), spans)}}
        ).values()
    assert bits(part["w"]) == bits(expected(values["w"], spans))
    seen = sorted(block for plan in plans for block in plan.reads)
    # A file's data begins at block 1. Rows 8 to 15 are in the second file, 40 to 47, too.
    assert seen == [("tree-00001.safetensors", number) for number in (1 + 2, 1 + 3, 1 + 16)]


def test_only_the_parts_of_the_index_with_held_boxes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    cuts = {"matrix": [Box((6 * row, 0), (6, 70)) for row in range(10)]}
    reshard(folder, {"tree": cuts}, num_writers=10, writers_per_part=2)
    with reader(folder) as (_, opened):
        shards = opened.index.components["tree"]["matrix"].shards
    parts = [f"index-{number_of_file(shard.file) // 2 + 1:04d}.json" for shard in shards]
    assert len({*parts}) == 5
    read: list[str] = []
    really = block_reader.read_file

    def noted(store: Any, folder: str, name: str, manifest: Any, *, verify: bool) -> bytes:
        read.append(name)
        return really(store, folder, name, manifest, verify=verify)

    monkeypatch.setattr(block_reader, "read_file", noted)
    spans: list[list[Span]] = [[(13, 20), (49, 50)], [(3, 9)]]  # of boxes 2, 3 and 8
    with reader(folder) as (tensors, opened):
        assert opened.index.components["tree"].specs["matrix"].shape == (60, 70)
        assert sorted(read) == ["index.json", "rng-00000.json", "tree-00000.json"]
        (part,) = tensors.read_tensors(
            {"tree": ["matrix"]}, {"tree": {"matrix": held((60, 70), spans)}}
        ).values()
        assert bits(part["matrix"]) == bits(expected(VALUES["matrix"], spans))
        assert sorted(read[3:]) == sorted({parts[box] for box in (2, 3, 8)})
        everything = tensors.read_tensors({"tree": [*VALUES]})["tree"]
        assert bits(everything["long"]) == bits(VALUES["long"])
        assert sorted(read[3:]) == [f"index-{number:04d}.json" for number in range(1, 6)]


def test_a_damaged_part_fails_only_loads_that_need_it(tmp_path: Path) -> None:
    """D14: a part is covered by the digests of the manifest."""
    folder = saved(tmp_path)
    cuts = {"matrix": [Box((6 * row, 0), (6, 70)) for row in range(10)]}
    reshard(folder, {"tree": cuts}, num_writers=10, writers_per_part=2)
    with reader(folder) as (_, opened):
        shards = opened.index.components["tree"]["matrix"].shards
    parts = [f"index-{number_of_file(shard.file) // 2 + 1:04d}.json" for shard in shards]
    part = folder / parts[2]
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    for row in (0, 12, 20, 30, 42):
        needed = {"matrix": held((60, 70), [[(row, row + 1)], [(0, 70)]])}
        is_damaged = parts[row // 6] == part.name
        with reader(folder) as (tensors, _):
            if is_damaged:
                with pytest.raises(CorruptData, match=part.name):
                    tensors.read_tensors({"tree": ["matrix"]}, {"tree": needed})
            else:
                tensors.read_tensors({"tree": ["matrix"]}, {"tree": needed})


def test_held_boxes_of_a_tensor_that_is_stored_whole(tmp_path: Path) -> None:
    """A plain checkpoint of one process is read by many ranks, each its own part."""
    folder = saved(tmp_path)
    spans: list[list[Span]] = [[(0, 60)], [(3, 9), (30, 33)]]
    shards = {"matrix": held((60, 70), spans), "absent": held((3,), [[(0, 3)]])}
    nothing = held((11, 5, 13), [[], [(0, 5)], [(0, 13)]])
    with reader(folder) as (tensors, _):
        found = tensors.read_tensors({"tree": [*VALUES]}, {"tree": {**shards, "half": nothing}})[
            "tree"
        ]
    assert bits(found["matrix"]) == bits(expected(VALUES["matrix"], spans))
    assert found["half"].shape == (0, 5, 13)
    assert bits(found["long"]) == bits(VALUES["long"])


def test_damage_names_file_block_and_tensors(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    cuts = {"matrix": [Box((row, 0), (1, 70)) for row in range(60)]}
    reshard(folder, {"tree": cuts}, num_writers=2)
    with reader(folder) as (tensors, opened):
        shard = opened.index.components["tree"]["matrix"].shards[40]
        path = folder / shard.file
        data = bytearray(path.read_bytes())
        data[shard.start + 3] ^= 1
        path.write_bytes(data)
        block = shard.start // 4096
        with pytest.raises(CorruptData, match=rf"{shard.file}.*block {block}.*tree\.matrix"):
            tensors.read_tensors({"tree": [*VALUES]})
        other = held((60, 70), [[(0, 1)], [(0, 70)]])
        tensors.read_tensors({"tree": ["matrix"]}, {"tree": {"matrix": other}})


def test_boxes_that_are_read_in_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.loading.plan.PACKED_NBYTES", 4000)
    folder = saved(tmp_path)
    cuts = {"matrix": [Box((0, 7 * number), (60, 7)) for number in range(10)]}
    reshard(folder, {"tree": cuts}, num_writers=3)
    with reader(folder) as (tensors, _):
        found = tensors.read_tensors({"tree": [*VALUES]})["tree"]
    assert bits(found["matrix"]) == bits(VALUES["matrix"])


def test_a_thousand_boxes_are_compared_with_their_neighbours_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10,000 stored and as many held rows, cut elsewhere: twice as many pairs, not squares."""
    edges = np.arange(10_001)
    stored = np.stack([3 * edges[:-1], 3 * edges[1:]], axis=1)[:, :, None]
    mine = np.stack([3 * edges[:-1] + 1, 3 * edges[1:] + 1], axis=1)[:, :, None]
    sizes: list[int] = []
    really = np.arange

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = really(*args, **kwargs)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(np, "arange", noted)
    of_held, of_stored = _overlaps(mine, stored)
    assert len(of_held) == len(of_stored) == 2 * 10_000 - 1
    assert max(sizes) == len(of_held)


def test_a_load_brings_boxes_back_whatever_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.checkpoints.MIN_BUDGET", 1)
    folder = saved(tmp_path)
    draw = random.Random(4)
    cuts = {key: random_cuts(value.shape, 5, draw) for key, value in VALUES.items()}
    reshard(folder, {"tree": cuts}, num_writers=3)
    for options in ({}, {"memory_budget": 1}):
        for load in ({}, {"in_place": True}):
            live = {key: torch.zeros_like(value) for key, value in VALUES.items()}
            with CheckpointManager(
                tmp_path, {"tree": live}, preflight=False, sinks=(), **options
            ) as manager:
                manager.load(which="latest", **load)
            for key, value in VALUES.items():
                assert bits(live[key]) == bits(value), (key, options, load)


def test_weights_are_loaded_from_boxes(tmp_path: Path) -> None:
    model, other = nn.Linear(30, 20), nn.Linear(30, 20)
    with CheckpointManager(tmp_path, {"model": model}, preflight=False, sinks=()) as manager:
        manager.save(1).wait()
    (folder,) = (path.parent for path in tmp_path.glob("step-*/manifest.json"))
    cuts = {"weight": random_cuts((20, 30), 8, random.Random(1))}
    reshard(folder, {"model": cuts}, num_writers=2, codec="zstd")
    for in_place in (False, True):
        with torch.no_grad():
            other.weight.zero_()
        load_weights(tmp_path, other, in_place=in_place)
        assert bits(other.weight.detach()) == bits(model.weight.detach())
