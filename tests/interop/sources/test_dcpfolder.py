"""Folders of DCP as a source: what torch has written is read, what cannot be right is refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.errors import CorruptData, FormatError, HoldfastError
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.interop.layouts import megatron_layout
from holdfast.interop.opening import open_source
from holdfast.interop.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAMPLES = Path(__file__).parents[2] / "golden" / "peers" / "dcp"
ROWS = [((0, 0), (2, 4)), ((2, 0), (1, 4))]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(source: Source, component: str, key: str) -> bytes:
    memory = memoryview(bytearray(source.get_component(component).specs[key].nbytes))
    source.read_into(component, key, 0, memory)
    return bytes(memory)


def write_folder(
    folder: Path, tensor: torch.Tensor, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Path:
    """Write a folder with one tensor, `w`, in chunks, given as (offsets, sizes)."""
    folder.mkdir()
    chunks, places = [], {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for offsets, sizes in boxes:
            cut = tensor
            for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
                cut = cut.narrow(dim, start, size)
            start = file.tell()
            torch.save(cut.clone(), file)
            index = MetadataIndex("w", offsets)
            places[index] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    properties = TensorProperties(dtype=tensor.dtype)
    found = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata = Metadata({"w": found}, planner_data=None, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def change(folder: Path, edit: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_every_tensor_and_value_that_dcp_saves_comes_back(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64)
    model = {str(dtype)[6:]: torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    model |= {
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3.5),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 4).t(),
        "part": torch.randn(10, 10)[2:4, ::3],
    }
    values = {
        "text": "a",
        "pair": (1, None),
        "set": {1, 2},
        "size": torch.Size([2, 3]),
        "inner": (torch.arange(4).view(2, 2).t(), [np.arange(3, dtype=np.int16)]),
    }
    dcp.save(
        {"model": model, "lr_scheduler": values, "step": 7}, checkpoint_id=tmp_path, no_dist=True
    )
    with open_source(str(tmp_path)) as source:
        assert source.step == 7
        assert source.left_out == []
        assert source.get_component("model").kind == "module"
        assert {*source.get_component("model").tree} == {*model}
        for key, tensor in model.items():
            spec = source.get_component("model").specs[key]
            assert spec.shape == tuple(tensor.shape)
            assert read(source, "model", key) == bytes_of(tensor)
        tree = source.get_component("scheduler").tree
        assert (tree["text"], tree["pair"], tree["set"]) == ("a", (1, None), {1, 2})
        tensor, [array] = tree["inner"]
        assert isinstance(tensor, TensorRef)
        assert isinstance(array, ArrayRef)
        assert read(source, "scheduler", tensor.key) == bytes_of(values["inner"][0])
        assert read(source, "scheduler", array.key) == values["inner"][1][0].tobytes()


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 7)), ((2, 0), (3, 7))],
        [((0, 3), (5, 4)), ((0, 0), (5, 3))],
        [((0, 0), (2, 3)), ((2, 0), (3, 3)), ((0, 3), (5, 1)), ((0, 4), (5, 0)), ((0, 4), (5, 3))],
    ],
)
def test_any_range_of_a_tensor_in_chunks_has_its_bytes(tmp_path: Path, boxes: Any) -> None:
    tensor = torch.arange(35, dtype=torch.int32).view(5, 7)
    data = bytes_of(tensor)
    with open_source(str(write_folder(tmp_path / "d", tensor, boxes))) as source:
        for start in range(0, 140, 3):
            for stop in (start + 1, start + 9, 140):
                memory = bytearray(min(stop, 140) - start)
                source.read_into("model", "w", start, memoryview(memory))
                assert bytes(memory) == data[start:stop]


def test_chunks_are_put_together_in_bounded_memory(tmp_path: Path) -> None:
    tensor = torch.arange(8 << 20, dtype=torch.int64).view(1 << 12, 1 << 11)
    boxes = [((0, 0), (1 << 12, 1 << 10)), ((0, 1 << 10), (1 << 12, 1 << 10))]
    memory = memoryview(np.empty(64 << 20, np.uint8).data)
    with open_source(str(write_folder(tmp_path / "d", tensor, boxes))) as source:
        tracemalloc.start()
        source.read_into("model", "w", 0, memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert np.array_equal(np.frombuffer(memory, np.int64), tensor.view(-1).numpy())
    assert peak < 24 << 20


def test_members_that_newer_versions_add_are_ignored(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)

    def edit(metadata: Metadata) -> None:
        metadata.added = {"a": np.float32(1)}  # type: ignore[attr-defined]
        for place in metadata.storage_data.values():
            place.checksum = b"abc"
        metadata.state_dict_metadata["w"].chunks[0].strides = (4, 1)  # type: ignore[union-attr]

    folder = write_folder(tmp_path / "d", tensor, ROWS)
    change(folder, edit)
    with open_source(str(folder)) as source:
        assert read(source, "model", "w") == bytes_of(tensor)


def test_what_an_extension_has_transformed_or_no_dtype_here_holds_is_left_out(
    tmp_path: Path,
) -> None:
    dcp.save({"a": torch.ones(2), "b": torch.ones(2), "c": 5}, checkpoint_id=tmp_path, no_dist=True)

    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].properties.dtype = torch.quint8  # type: ignore[union-attr]
        for index, place in metadata.storage_data.items():
            if index.fqn == "c":
                place.transform_descriptors = ["zstd"]

    change(tmp_path, edit)
    with open_source(str(tmp_path)) as source:
        found = {one.path: one.why for one in source.left_out}
        assert {*source.get_component("model").specs} == {"b"}
    assert sorted(why.split()[0] for why in found.values()) == ["a", "transformed"]


def chunk(metadata: Metadata, number: int = 0) -> ChunkStorageMetadata:
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata)
    return tensor.chunks[number]


def place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def sized(metadata: Metadata, size: Sequence[int], sizes: Sequence[int]) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size(size)  # type: ignore[union-attr]
    chunk(metadata).sizes = torch.Size(sizes)


def added(metadata: Metadata, paths: dict[str, tuple[str, ...]]) -> None:
    """Add a tensor `x` that is as `w`, with paths for both."""
    metadata.state_dict_metadata["x"] = metadata.state_dict_metadata["w"]
    places = [*metadata.storage_data.items()]
    metadata.storage_data.update({MetadataIndex("x", one.offset): at for one, at in places})
    metadata.planner_data = paths


class Runs:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


HOSTILE: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a huge chunk": (lambda one: sized(one, (2**40, 4), (2**40 - 1, 4)), "a chunk of .* bytes in"),
    "sizes beyond 64 bits": (lambda one: sized(one, (2**40, 2**40), (1, 1)), "elements"),
    "a gap": (lambda one: sized(one, (3, 4), (1, 4)), "'w': its chunks do not tile it"),
    "a larger tensor": (lambda one: sized(one, (4, 4), (2, 4)), "'w': its chunks do not tile it"),
    "an overlap": (lambda one: sized(one, (3, 4), (3, 4)), "'w': its chunks do not tile it"),
    "outside": (lambda one: sized(one, (2, 4), (2, 4)), "'w': a chunk reaches out of the tensor"),
    "other dimensions": (lambda one: sized(one, (3, 4), (8,)), "differ in number"),
    "no chunks": (lambda one: one.state_dict_metadata["w"].chunks.clear(), "without chunks"),
    "no place": (lambda one: one.storage_data.popitem(), "does not say where the chunk"),
    "a file above": (lambda one: setattr(place(one), "relative_path", "../x"), "leads out"),
    "an absolute file": (lambda one: setattr(place(one), "relative_path", "/etc/passwd"), "leads"),
    "no file": (lambda one: setattr(place(one), "relative_path", "x"), "is missing"),
    "a place behind the end": (lambda one: setattr(place(one), "offset", 10**6), "ends at byte"),
    "a negative place": (lambda one: setattr(place(one), "offset", -1), "which no file has"),
    "a place that is text": (lambda one: setattr(place(one), "length", "9"), "no file, offset"),
    "no tensors": (lambda one: setattr(one, "state_dict_metadata", None), "what was saved"),
    "no places": (lambda one: setattr(one, "storage_data", ["x"]), "does not say where"),
    "an item of another kind": (
        lambda one: one.state_dict_metadata.update(x=Runs()),
        "neither a tensor nor bytes",
    ),
    "bytes without a place": (
        lambda one: one.state_dict_metadata.update(x=BytesStorageMetadata()),
        "does not say where",
    ),
    "code as the dtype": (
        lambda one: one.state_dict_metadata["w"].__dict__.update(properties=Runs()),
        "without a dtype",
    ),
    "one item inside of another": (
        lambda one: added(one, {"w": ("a",), "x": ("a", "b")}),
        "'x': lies where another item is",
    ),
    "two items at one place": (
        lambda one: added(one, {"w": ("a",), "x": ("a",)}),
        "'x': lies where another item is",
    ),
    "a path without end": (
        lambda one: setattr(one, "planner_data", {"w": ("a",) * 100_000}),
        "keys lead to it",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_that_cannot_be_right_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit, match = HOSTILE[name]
    folder = write_folder(tmp_path / "d", torch.arange(12.0).view(3, 4), ROWS)
    change(folder, edit)
    with pytest.raises(HoldfastError, match=match) as caught:
        open_source(str(folder))
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_chunk_that_is_not_what_the_metadata_says_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", torch.arange(12.0).view(3, 4), ROWS)
    other = write_folder(tmp_path / "e", torch.arange(12).int().view(3, 4), ROWS)
    shutil.copy(other / "__0_0.distcp", folder)
    with (
        open_source(str(folder)) as source,
        pytest.raises(FormatError, match=r"'w': I32 of \[2, 4\], but the metadata has F32"),
    ):
        read(source, "model", "w")


@pytest.mark.parametrize(
    "file",
    [
        *("dcp/two/__0_0.distcp", "dcp/two/.metadata", "megatron/iter_0000003/common.pt"),
        *("olmo/step3/config.json", "olmo/step3/train/rank0.pt"),
        "dcp/sharded/shard-00001-model-00001-of-00001.safetensors",
    ],
)
def test_a_link_that_leads_out_of_the_folder_is_not_followed(file: str, tmp_path: Path) -> None:
    peer, name, _ = file.split("/", 2)
    folder = tmp_path / name
    shutil.copytree(SAMPLES.parent / peer / name, folder)
    path = tmp_path / file.removeprefix(f"{peer}/")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="leads out of the folder"):
        open_source(str(folder))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", torch.arange(12.0).view(3, 4), ROWS)
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match=r"__0_0\.distcp: has .* 'w' ends at byte"):
        open_source(str(folder))


def test_a_value_that_is_code_is_left_out_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2), "x": Runs()}, checkpoint_id=tmp_path / "d", no_dist=True)
    with open_source(str(tmp_path / "d")) as source:
        [left] = source.left_out
        assert {*source.parts} == {"model"}
    assert "posix.mkdir" in left.why
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "edit", "match"),
    [
        (1, lambda info: info["rows"].update(saved_offsets=[0, 0]), "do not tile"),
        (1, lambda info: info["rows"].update(saved_offsets=[-1, 0]), "offsets are invalid"),
        (1, lambda info: info.pop("rows"), "no offsets for 'rows'"),
        (0, None, "the file of shard 1 is missing"),
    ],
)
def test_shards_of_safetensors_that_do_not_fit_are_refused(
    files: int, edit: Any, match: str, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    shutil.copytree(SAMPLES / "sharded", folder)
    path = sorted(folder.iterdir())[files]
    if edit is None:
        path.unlink()
    else:
        rewrite(path, edit)
    with pytest.raises(HoldfastError, match=match):
        open_source(str(folder))


@pytest.mark.parametrize("name", ["dcp/two", "dcp/six", "dcp/sharded", "megatron/iter_0000003"])
def test_a_damaged_folder_is_read_or_refused_and_nothing_else(name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    folder = tmp_path / "d"
    shutil.copytree(SAMPLES.parent / name, folder)
    files = sorted(folder.iterdir())
    refused = 0
    for _ in range(40):
        path = draw.choice([*files, files[0]])
        whole = path.read_bytes()
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 1, 9))] = draw.randbytes(draw.choice((0, 1, 1, 9)))
        path.write_bytes(data)
        try:
            with open_source(str(folder)) as source:
                for component, part in source.parts.items():
                    for key in part.specs:
                        read(source, component, key)
        except HoldfastError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 10


def rewrite(path: Path, edit: Callable[[Any], object]) -> None:
    with safe_open(path, "pt") as file:
        beside = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    info = json.loads(beside["DCP_SHARDING_INFO"])
    edit(info)
    save_file(tensors, path, {**beside, "DCP_SHARDING_INFO": json.dumps(info)})


def test_keys_of_a_state_become_the_components_of_a_run(tmp_path: Path) -> None:
    """As torchtitan saves: tensors of the model without a key above them."""
    state = {
        "layers.0.weight": torch.ones(2),
        "layers.0._extra_state": {"scale": 2},
        "optimizer": {"state.layers.0.weight.step": torch.tensor(3.0)},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"seen": 12},
        "train_state": {"step": 3},
        "seed": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with open_source(str(tmp_path)) as source:
        assert source.step == 3
        trees = {name: part.tree for name, part in source.parts.items()}
    assert {*trees} == {"model", "optimizer", "scheduler", "data", "trainer", "state"}
    assert trees["model"]["layers.0._extra_state"] == {"scale": 2}
    assert (trees["data"], trees["state"]["seed"]) == ({"seen": 12}, 7)


def test_objects_of_megatron_in_several_shards_become_a_list_in_their_order() -> None:
    items = {
        "decoder.layers._extra_state/shard_1_2": [b"second"],
        "decoder.layers._extra_state/shard_0_2": [b"first"],
        "rng_state/shard_0.0_1.1": [{"seed": 1}],
        "chained_0.optimizer.state.exp_avg.w": 1,
        "counts": 5,
    }
    layout = megatron_layout(items, {"iteration": 9, "optimizer": {"param_groups": []}})
    assert layout.step == 9
    assert layout.components == {
        "model": {"decoder.layers._extra_state": [b"first", b"second"]},
        "optimizer": {"chained_0.state.exp_avg.w": 1, "param_groups": []},
        "rng": {"seed": 1},
        "state": {"iteration": 9, "counts": 5},
    }


def test_states_of_other_ranks_of_olmo_core_are_listed_as_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "step3"
    shutil.copytree(SAMPLES.parent / "olmo" / "step3", folder)
    shutil.copy(folder / "train" / "rank0.pt", folder / "train" / "rank1.pt")
    with open_source(str(folder)) as source:
        assert [one.path for one in source.left_out] == ["train/rank1.pt"]


def test_a_folder_of_olmo_core_without_its_trainer_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "step3"
    shutil.copytree(SAMPLES.parent / "olmo" / "step3", folder)
    shutil.rmtree(folder / "train")
    with open_source(str(folder)) as source:
        assert {*source.parts} == {"model", "optimizer", "state"}
        assert source.step is None
