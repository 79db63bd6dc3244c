"""Verification of checkpoints whose tensors are stored as several boxes."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boxed import random_cuts, reshard
from holdfast import CheckpointManager
from holdfast.format import blocks, layout
from holdfast.format.boxes import Boxes, Ragged
from holdfast.format.codec import CodecName
from holdfast.format.index import TensorTable, decode_index, encode_index
from holdfast.format.manifest import FileEntry, encode_manifest
from holdfast.maintenance.verify import verify
from holdfast.state.shards import Box
from holdfast.store.local import LocalStore

SHAPES = {"matrix": (40, 60), "deep": (9, 4, 11), "long": (5000,), "single": (1,), "none": (0, 3)}


def saved(root: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    tree = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    tree["complex"] = torch.randn(6, 7, dtype=torch.complex128, generator=generator)
    with CheckpointManager(root, {"tree": tree}, preflight=False, sinks=()) as manager:
        manager.save(1).wait()
    (folder,) = (path.parent for path in root.glob("step-*/manifest.json"))
    return folder


@given(seed=st.integers(0, 2**32), num_writers=st.integers(1, 3), is_compressed=st.booleans())
@settings(max_examples=15)
def test_sound_boxes_give_no_alarm_and_damage_of_one_is_named(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_writers: int, is_compressed: bool
) -> None:
    draw = random.Random(seed)
    folder = saved(tmp_path_factory.mktemp("verified"))
    cuts = {key: random_cuts(shape, draw.randint(1, 9), draw) for key, shape in SHAPES.items()}
    cuts["complex"] = random_cuts((6, 7), 3, draw)
    codec: CodecName | None = "lz4" if is_compressed else None
    manifest = reshard(folder, {"tree": cuts}, num_writers=num_writers, codec=codec)
    store = LocalStore(folder.parent)
    report = verify(store, folder.name)
    assert (report.ok, report.problems, report.notes) == (True, (), ())
    assert report.num_files == len(manifest.files)

    data = (folder / layout.INDEX).read_bytes()
    table = decode_index(data, files=manifest.files, what="").components["tree"]
    key = draw.choice(["matrix", "deep", "long", "complex"])
    shard = draw.choice(table[key].shards)
    path = folder / shard.file
    damaged = bytearray(path.read_bytes())
    stored = decode_index(data, files=manifest.files, what="").stored.get(shard.file)
    block = shard.start // 4096
    start = shard.start if stored is None else stored.spans()[block][0]
    damaged[start] ^= 1
    path.write_bytes(damaged)
    (problem,) = verify(store, folder.name).problems
    assert (problem.file, problem.block) == (shard.file, block)
    assert key in problem.tensors


def test_a_box_under_another_name_in_the_header_is_a_problem(tmp_path: Path) -> None:
    """The index is made to say that two boxes of equal size have changed places."""
    folder = saved(tmp_path)
    boxes = [Box((0,), (2500,)), Box((2500,), (2500,))]
    manifest = reshard(folder, {"tree": {"long": boxes}})
    old = decode_index((folder / layout.INDEX).read_bytes(), files=manifest.files, what="")
    table = old.components["tree"]
    assert table.boxes is not None
    offsets = table.boxes.offsets.lists()
    first, second = (
        number for number, row in enumerate(table.boxes.sizes.lists()) if row == [2500]
    )
    offsets[first], offsets[second] = offsets[second], offsets[first]
    swapped = Boxes(table.boxes.tensor, Ragged.from_lists(offsets), table.boxes.sizes)
    tables = {**old.components, "tree": TensorTable(table.specs, table.shards, swapped)}
    data = encode_index(tables, old.blocks, old.block_nbytes)
    digest = blocks.file_digest(len(data), blocks.digest_blocks(data, old.block_nbytes))
    files = {**manifest.files, layout.INDEX: FileEntry(nbytes=len(data), digest=digest)}
    (folder / layout.INDEX).write_bytes(data)
    changed = encode_manifest(msgspec.structs.replace(manifest, files=files))
    (folder / layout.MANIFEST).write_bytes(changed)
    report = verify(LocalStore(tmp_path), folder.name)
    assert {problem.tensors for problem in report.problems} == {
        ("long[0:2500]",),
        ("long[2500:5000]",),
    }
