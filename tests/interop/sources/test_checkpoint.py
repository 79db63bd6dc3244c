"""A checkpoint of this library as a source: however it is stored, and from whichever place."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from allranks import Member, all_of, on_ranks
from boxed import bits, random_cuts, reshard
from holdfast import CheckpointManager, Encryption, PerRank, keys
from holdfast.errors import CorruptData, MissingKey, NoCheckpoint
from holdfast.format import layout
from holdfast.format.codec import CodecName
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.interop.comparing.statistics import stats_of
from holdfast.interop.opening import open_source
from holdfast.interop.source import Source, read_pieces
from holdfast.interop.sources import checkpoint
from holdfast.interop.sources.checkpoint import CheckpointSource
from holdfast.ownership.leases import find_leases
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore

VALUES = {
    "matrix": torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70),
    "bits": torch.arange(30 * 17).reshape(30, 17) % 3 == 0,
    "half": torch.randn(11, 5, 13).to(torch.bfloat16),
    "complex": torch.randn(9, 12, dtype=torch.complex128),
    "long": torch.arange(3001),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "float8": torch.arange(300.0).reshape(30, 10).to(torch.float8_e4m3fn),
}


def saved(root: Any, values: Any = VALUES, **options: Any) -> None:
    with CheckpointManager(root, {"tree": values}, preflight=False, sinks=(), **options) as manager:
        manager.save(1).wait()


def contents(source: Source) -> dict[str, bytes]:
    """All bytes of a source but its generators, by "component:key"."""
    wanted = [
        (name, key) for name, part in source.parts.items() if name != "rng" for key in part.specs
    ]
    found = {f"{name}:{key}": b"" for name, key in wanted}
    for piece in read_pieces(source, wanted):
        found[f"{piece.component}:{piece.key}"] += bytes(piece.memory)
    return found


def expected(values: dict[str, Tensor] = VALUES) -> dict[str, bytes]:
    return {f"tree:{key}": bits(value) for key, value in values.items()}


def only_folder(root: Path) -> Path:
    (folder,) = (path.parent for path in root.glob("step-*/manifest.json"))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compress": "zstd"},
        {"encrypt": Encryption(keys=keys.generate())},
        {"encrypt": Encryption(keys=keys.generate()), "compress": "zstd"},
    ],
    ids=["plain", "compressed", "encrypted", "both"],
)
def test_every_tensor_comes_back_with_its_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, **options)
    with open_source(str(tmp_path), encrypt=options.get("encrypt")) as source:
        assert (source.format, source.step) == ("holdfast", 1)
        assert contents(source) == expected()
        assert source.get_component("tree").leaves.keys() == VALUES.keys()
        assert source.get_component("tree").specs["half"].shape == (11, 5, 13)


@pytest.mark.parametrize("named", ["root", "root@step=1", "root@latest", "folder", "renamed"])
def test_a_checkpoint_is_found_under_each_of_its_names(tmp_path: Path, named: str) -> None:
    root = tmp_path / "a@b"
    saved(root)
    text = str(root) + named.removeprefix("root")
    if named in ("folder", "renamed"):
        text = str(only_folder(root))
    if named == "renamed":
        os.rename(text, text := str(tmp_path / "copy"))
    with open_source(text) as source:
        assert contents(source) == expected()


def test_any_store_is_read() -> None:
    store = MemoryStore()
    saved(store)
    with CheckpointSource(store, which="step=1") as source:
        assert contents(source) == expected()


@given(seed=st.integers(0, 2**32), is_compressed=st.booleans())
@settings(max_examples=10)
def test_random_ranges_of_random_boxes_are_put_together(
    tmp_path_factory: pytest.TempPathFactory, seed: int, is_compressed: bool
) -> None:
    draw = random.Random(seed)
    root = tmp_path_factory.mktemp("boxed")
    saved(root)
    cuts = {
        key: random_cuts(value.shape, draw.choice([1, 2, 7, 30]), draw)
        for key, value in VALUES.items()
    }
    codec: CodecName | None = "zstd" if is_compressed else None
    reshard(only_folder(root), {"tree": cuts}, num_writers=draw.choice([1, 3]), codec=codec)
    with open_source(str(root)) as source:
        assert contents(source) == expected()
        for key, value in VALUES.items():
            whole = bits(value)
            start = draw.randrange(len(whole) + 1)
            memory = bytearray(draw.randrange(len(whole) - start + 1))
            source.read_into("tree", key, start, memoryview(memory))
            assert memory == whole[start : start + len(memory)]


def test_each_block_is_read_once_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {str(n): torch.full((1 << 18,), float(n)) for n in range(40)}
    saved(tmp_path, values)
    read: list[tuple[str, int]] = []
    real = checkpoint.begin_block

    def counting(store: Any, file: Any, number: int, *arguments: Any, **options: Any) -> Any:
        read.append((file.key, number))
        return real(store, file, number, *arguments, **options)

    monkeypatch.setattr(checkpoint, "begin_block", counting)
    with open_source(str(tmp_path)) as source:
        assert contents(source) == expected(values)
    assert len(read) == len({*read}) == 6  # 40 MiB


def test_few_blocks_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {str(n): torch.full((1 << 18,), float(n)) for n in range(40)}
    saved(tmp_path, values)
    monkeypatch.setattr(checkpoint, "KEPT_NBYTES", 16 << 20)
    with CheckpointSource(tmp_path) as source:
        contents(source)
        assert len(source._blocks._held) == 2


def test_a_changed_bit_is_an_error_that_names_file_and_tensor(tmp_path: Path) -> None:
    saved(tmp_path)
    path = only_folder(tmp_path) / "tree-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        open_source(str(tmp_path)) as source,
        pytest.raises(CorruptData, match=r"tree-00000\.safetensors: block 0 .* tree:") as error,
    ):
        contents(source)
    assert "is not what was written" in str(error.value)


LARGE = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "wide": torch.arange(1_300_001, dtype=torch.float64),
    "weight": torch.arange(4_300_003, dtype=torch.float32),
    "half": torch.arange(2_500_001).to(torch.bfloat16),
}
"""Tensors that begin anywhere in a block, and lie in several."""


def test_large_tensors_are_lent_block_by_block(tmp_path: Path) -> None:
    saved(tmp_path, LARGE)
    with open_source(str(tmp_path)) as source:
        assert contents(source) == expected(LARGE)
        wanted = [("tree", key) for key in LARGE]
        found = [
            (piece.key, piece.start, piece.memory.nbytes) for piece in read_pieces(source, wanted)
        ]
    large = [(key, start, nbytes) for key, start, nbytes in found if key != "odd"]
    assert max(nbytes for _, _, nbytes in large) == layout.BLOCK_NBYTES
    assert all(start % LARGE[key].itemsize == 0 for key, start, _ in large)


def test_an_iterator_of_pieces_may_be_dropped(tmp_path: Path) -> None:
    saved(tmp_path, LARGE)
    with open_source(str(tmp_path)) as source:
        some = read_pieces(source, [("tree", "wide"), ("tree", "weight")])
        next(some)
        some.close()
        assert contents(source) == expected(LARGE)


def test_statistics_are_those_of_the_same_tensors_in_another_format(tmp_path: Path) -> None:
    saved(tmp_path / "root", LARGE)
    save_file(LARGE, tmp_path / "file.safetensors")
    found = []
    for path, name in ((tmp_path / "root", "tree"), (tmp_path / "file.safetensors", "model")):
        with open_source(str(path)) as source:
            found.append([*stats_of(source, [(name, key) for key in LARGE])])
    for one, other in zip(*found, strict=True):
        assert (one.exponents, one.zeros, one.max) == (other.exponents, other.zeros, other.max)
        assert one.norm == pytest.approx(other.norm, rel=1e-14)
        assert one.mean == pytest.approx(other.mean, rel=1e-14)


def test_a_damaged_block_that_would_be_lent_names_its_tensor(tmp_path: Path) -> None:
    saved(tmp_path, LARGE)
    path = only_folder(tmp_path) / "tree-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(layout.BLOCK_NBYTES + 5)
        file.write(b"\xff\xff")
    with (
        open_source(str(tmp_path)) as source,
        pytest.raises(CorruptData, match=r"block 1 is not what was written; it holds tree:"),
    ):
        contents(source)


def test_a_failed_read_is_repeated_by_the_next_reader(tmp_path: Path) -> None:
    saved(tmp_path)
    path = only_folder(tmp_path) / "tree-00000.safetensors"
    sound = path.read_bytes()
    with open_source(str(tmp_path)) as source:
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with ThreadPoolExecutor(4) as pool:
            memories = [memoryview(bytearray(8)) for _ in range(8)]
            reads = [pool.submit(source.read_into, "tree", "long", 0, one) for one in memories]
        assert {type(read.exception()) for read in reads} == {CorruptData}
        path.write_bytes(sound)
        assert contents(source) == expected()


def test_a_tree_that_names_a_tensor_of_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(checkpoint, "decode_tree", lambda *_, **__: {"x": TensorRef("gone")})
    with pytest.raises(CorruptData, match=r"'tree' names 1 tensors .* such as 'gone'"):
        open_source(str(tmp_path))


def test_a_checkpoint_is_not_deleted_while_it_is_open(tmp_path: Path) -> None:
    saved(tmp_path)
    store = LocalStore(tmp_path)
    with open_source(str(tmp_path)):
        (lease,) = find_leases(store)
        assert lease.folder == only_folder(tmp_path).name
    assert not [*find_leases(store)]


def test_keys_are_needed_for_an_encrypted_one(tmp_path: Path) -> None:
    saved(tmp_path, encrypt=Encryption(keys=keys.generate()))
    with pytest.raises(MissingKey):
        open_source(str(tmp_path))


def test_a_missing_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    with pytest.raises(NoCheckpoint, match="step=7"):
        open_source(f"{tmp_path}/run@step=7")
    with pytest.raises(NoCheckpoint, match="no such"):
        open_source(f"{tmp_path}/other")


def test_plain_values_and_arrays_are_in_the_tree(tmp_path: Path) -> None:
    array = torch.arange(4).numpy()
    saved(tmp_path, {"lr": 0.5, "of": [torch.ones(2), array], "name": "x"})
    with open_source(str(tmp_path)) as source:
        tree = source.get_component("tree").tree
        assert (tree["lr"], tree["name"]) == (0.5, "x")
        assert type(tree["of"][0]) is TensorRef
        assert type(tree["of"][1]) is ArrayRef
        assert contents(source)[f"tree:{tree['of'][1].key}"] == array.tobytes()


def test_each_rank_has_its_own_tree(tmp_path: Path) -> None:
    def save(member: Member) -> None:
        own = {"own": PerRank({"n": member.rank, "t": torch.full((2,), member.rank)})}
        with member.manager(tmp_path, state=own) as manager:
            manager.save(1).wait()

    all_of(on_ranks(2, save))
    with open_source(str(tmp_path)) as source:
        trees = source.get_component("own").tree
        assert [tree["n"] for tree in trees] == [0, 1]
        assert contents(source)["own:rank1.t"] == torch.full((2,), 1).numpy().tobytes()


def test_unchanged_tensors_have_one_fingerprint(tmp_path: Path) -> None:
    values = {"a": torch.arange(1 << 22), "b": torch.zeros(1 << 22, dtype=torch.int64)}
    with CheckpointManager(tmp_path, {"tree": values}, sinks=()) as manager:
        manager.save(1).wait()
        values["b"] += 1
        manager.save(2).wait()
    first, second = (open_source(f"{tmp_path}@step={step}") for step in (1, 2))
    with first, second:
        prints = [[one.fingerprint("tree", key) for one in (first, second)] for key in "ab"]
    assert None not in prints[0] + prints[1]
    assert prints[0][0] != prints[1][0]
    assert prints[1][0] != prints[1][1]
    assert len(Catalog(LocalStore(tmp_path)).attempts()) == 2
