"""Golden roots: what version 1 wrote is read for ever, and is still written in the same bytes.

What the roots hold is said here a second time, by hand. A failure means that the bytes on disk, or
their meaning, changed: that needs a new version of the format, not new golden files.
"""

from __future__ import annotations

import ast
import json
import math
import random
import shutil
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePath
from typing import Any

import lz4.frame
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import zstandard
from tests.golden import make, reader

from holdfast import errors
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.nodes import EnumValue
from holdfast.maintenance.verify import verify_root
from holdfast.manager import CheckpointManager
from holdfast.root.catalog import Catalog
from holdfast.staging.arena import FileImage
from holdfast.staging.stage import Stager
from holdfast.state.capture.capture import capture
from holdfast.store.local import LocalStore
from holdfast.threads.workers import Workers
from holdfast.weights import load_weights
from marks import diagonal

V1 = Path(__file__).parent / "v1"
VERSIONED = ("optimizer", "scheduler", "rng")
HAS_E8M0 = hasattr(torch, "float8_e8m0fnu")
HAS_F4 = hasattr(torch, "float4_e2m1fn_x2")
needs_f4 = pytest.mark.skipif(not HAS_F4, reason="this torch lacks 4-bit floats")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def copy_of(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(V1 / case, tmp_path / case))


def folder_of(case: str, step: int) -> Path:
    return next((V1 / case).glob(f"step-{step:08d}.*"))


def manager(root: Path, state: dict[str, Any]) -> CheckpointManager:
    return CheckpointManager(root, state, sinks=(), preflight=False)


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# The root `run`


def test_the_catalog_of_the_run_is_read() -> None:
    """R21."""
    catalog = Catalog(LocalStore(V1 / "run"))
    newest, older = catalog.checkpoints()
    assert (newest.step, older.step) == (20, 10)
    assert (newest.order, older.order) == ((2, 1), (1, 2))
    assert newest.manifest.parent == older.reference
    assert (newest.tags, older.tags) == (("final",), ("kept", "paper"))
    assert (newest.marks.pinned, older.marks.pinned) == (False, True)
    at = newest.manifest.timestamp
    assert (at.epoch, at.samples, at.tokens) == (2, 160, 640)
    assert (newest.manifest.reason, older.manifest.reason) == ("final", "manual")
    assert older.manifest.metrics["loss"] == 0.5
    assert math.isnan(older.manifest.metrics["odd"])
    assert catalog.highest_epoch() == 2
    assert [name.epoch for name in catalog.lineage()] == [2, 1], "what was deleted has ended"
    tombstone = catalog.read(folder_of("run", 5).name)
    assert isinstance(tombstone, Deleted)
    assert tombstone.by == "writer 1"
    assert catalog.marks(folder_of("run", 5).name).retired_by == (1,)
    aborted = catalog.read(folder_of("run", 15).name)
    assert aborted == Aborted(by="gc", reason="its writer is gone")


def assert_is_at(run: make.Run, step: int) -> None:
    """Every bit of the live objects is as it was at `step`."""
    weights = [
        *(("0.weight", [0, 1, 2, 3, 4, 5]), ("0.bias", [100, 101]), ("1.weight", [200, 201])),
        *(("1.bias", [300, 301]), ("1.running_mean", [400, 401]), ("1.running_var", [500, 501])),
    ]
    found = run.model.state_dict()
    for name, values in weights:
        assert data_of(found[name]) == floats(*(value + step for value in values)), name
    assert found["1.num_batches_tracked"].item() == 600 + step
    slots = [run.optimizer.state[p] for p in run.model.parameters()]
    for number, (slot, size) in enumerate(zip(slots, (6, 2, 2, 2), strict=True)):
        assert list(slot) == ["step", "exp_avg", "exp_avg_sq"]
        assert data_of(slot["step"]) == floats(step)
        assert data_of(slot["exp_avg"]) == floats(*[step + number / 8] * size)
        assert data_of(slot["exp_avg_sq"]) == floats(*[step + number / 16] * size)
    group = run.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["initial_lr"]) == (0.25 / step, (0.9, 0.999), 0.25)
    assert (run.scheduler.last_epoch, run.scheduler.step_size) == (step, 5)  # type: ignore[attr-defined]
    assert run.counters == {"step": step, "seen": {"samples": 8 * step}, "best": [0.5, None]}
    assert torch.equal(run.shuffle.get_state(), torch.Generator().manual_seed(step).get_state())
    assert random.getstate() == random.Random(step).getstate()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(step).get_state())
    words = np.random.RandomState(step).get_state(legacy=False)
    assert str(np.random.get_state(legacy=False)) == str(words)


@pytest.mark.parametrize(("which", "step"), [("latest", 20), ("paper", 10), ("step=10", 10)])
def test_the_run_is_resumed(tmp_path: Path, which: str, step: int) -> None:
    """R21: bit for bit, into objects that hold other values."""
    run = make.Run()
    run.at(3)
    with manager(copy_of("run", tmp_path), run.state) as resumed:
        found = resumed.resume(which)
    assert found is not None
    assert (found.step, found.rejected) == (step, ())
    assert_is_at(run, step)


def test_the_weights_alone_are_loaded(tmp_path: Path) -> None:
    """R21: from the root and from a copied folder."""
    copied = shutil.copytree(folder_of("run", 20), tmp_path / "best")
    for source in (copy_of("run", tmp_path), copied):
        run = make.Run()
        assert load_weights(source, run.model).step == 20
        assert run.model.state_dict()["0.bias"].tolist() == [120.0, 121.0]


# The root `types`


def types_live() -> dict[str, Any]:
    live = {name: {} for name in ("values", "tensors", "scales", "generators", "rng")}
    return {**live, "empty": ["old"]}


@pytest.fixture
def types(tmp_path: Path) -> dict[str, Any]:
    """The state of the root `types`, as it is loaded into empty containers."""
    live = types_live()
    with manager(copy_of("types", tmp_path), live) as loading:
        assert loading.load(skip=() if HAS_E8M0 else ("scales",)).step == 1
    return live


def test_every_typed_value_is_read(types: dict[str, Any]) -> None:
    """R21: with its exact type, its order and its sharing."""
    found = types["values"]
    expected = {
        "none": "None",
        "booleans": "[True, False]",
        "integers": f"[0, -7, 9223372036854775808, {-(2**200)}]",
        "floats": "[0.1, 3.0, 5e-324, -0.0, 1e+300]",
        "text": ascii('ä€😀 "\\\0\n'),
        "tuple": "(1, (2, [3]), ())",
        "dicts": "[{1: 'a', (2, 'b'): [3]}, {'$x': 1}, {}, {None: 0, True: 1, b'k': 2}]",
        "ordered": repr(OrderedDict([("b", 1), ("a", {"inside": 2})])),
        "counter": repr(Counter({"x": 2, 5: 1})),
        "torch": "[torch.bfloat16, device(type='cuda', index=1), torch.Size([2, 0, 3])]",
    }
    assert {name: ascii(found[name]) for name in expected} == expected
    assert [struct.pack(">d", x).hex() for x in found["special floats"]] == [
        "7ff0000000000000",
        "fff0000000000000",
        "7ff8000000000000",
        "fff8000000000001",
    ]
    assert found["bytes"] == bytes(range(256))
    assert found["sets"] == [{1, 2, 3}, frozenset({"a", "b"}), {0.5, 1, (2, "x")}, set()]
    assert [type(value) for value in found["sets"]] == [set, frozenset, set, set]
    assert found["enums"] == [
        EnumValue("http:HTTPStatus", "NOT_FOUND", 404),
        EnumValue("colours:Paint", None, 3),
    ]
    assert isinstance(found["path"], PurePath)
    assert found["path"].as_posix() == "a/b.txt"
    assert found["times"] == [
        timedelta(microseconds=-86_394_999_993),
        datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime(2026, 1, 2, tzinfo=timezone(-timedelta(minutes=330))),
    ]
    assert found["times"][2].utcoffset() == -timedelta(minutes=330)
    assert found["again"] is found["ordered"]
    shared = found["shared"]
    assert shared == {"one": [1, 2], "two": [1, 2], "outer": {"three": [1, 2]}}
    assert shared["one"] is shared["two"] is shared["outer"]["three"]


def test_every_numpy_scalar_is_read(types: dict[str, Any]) -> None:
    """R21: the lowest byte is 1, all others are 0."""
    found = types["values"]["scalars"]
    assert list(found) == [type(value).__name__.rstrip("_") for value in found.values()]
    assert len(found) == 14
    for value in found.values():
        assert value.tobytes() == b"\1" + bytes(value.itemsize - 1)


def test_every_tensor_is_read(types: dict[str, Any]) -> None:
    """R21: every dtype of section 4, and every odd shape."""
    found = types["tensors"]
    dtypes = found["dtypes"] | ({"float8_e8m0fnu": types["scales"]["e8m0"]} if HAS_E8M0 else {})
    assert len(dtypes) == 20 + HAS_E8M0
    for name, tensor in dtypes.items():
        data = bytes([1, 0, 1, 1, 0, 0] if name == "bool" else range(1, 6 * tensor.itemsize + 1))
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{name}", (2, 3))
        assert data_of(tensor) == data, name
    assert data_of(found["scalar"]) == floats(2.5)
    assert found["scalar"].shape == ()
    assert [tuple(t.shape) for t in found["empty"]] == [(0,), (3, 0, 2)]
    assert [t.dtype for t in found["empty"]] == [torch.float32, torch.int64]
    assert found["strided"].tolist() == [[0, 4, 8], [2, 6, 10]]
    assert found["strided"].dtype == torch.int32
    assert found["tied"][0].tolist() == [0, 1, 2, 3]
    assert found["tied"][1]["also"] is found["tied"][0]
    arrays = [(a.dtype.name, a.tolist(), a.shape) for a in found["arrays"]]
    assert arrays == [("uint16", [0, 1, 2, 3, 4], (5,)), ("float64", 7.5, ()), ("bool", [], (0, 2))]
    assert found["odd key.s"]["ä/../x"].tolist() == [1]


def test_every_generator_is_read(types: dict[str, Any]) -> None:
    """R21: they go on with the numbers that they would have drawn."""
    found = types["generators"]
    assert torch.equal(found["torch"].get_state(), torch.Generator().manual_seed(3).get_state())
    assert found["python"].getstate() == random.Random(3).getstate()
    pcg = found["numpy"].bit_generator.state
    assert pcg["state"] == {
        "state": 323726261719206589602543583274561722519,
        "inc": 222003063171874261427395693950637096479,
    }
    legacy = np.random.RandomState(3)
    assert (
        found["numpy-legacy"].randint(0, 2**31, 5).tolist() == legacy.randint(0, 2**31, 5).tolist()
    )
    assert types["rng"] == {"none": "of ours"}
    assert types["empty"] == []


def test_enumerations_come_back_where_their_class_stands(tmp_path: Path) -> None:
    """R21, D65: the class is the live one's; nothing is imported for it."""
    live = {**types_live(), "values": {"enums": [HTTPStatus.OK]}}
    with manager(copy_of("types", tmp_path), live) as loading:
        loading.load(components=["values"])
    assert live["values"]["enums"][0] is HTTPStatus.NOT_FOUND


# Both


def test_verify_finds_every_byte_right() -> None:
    """R15, R21."""
    found = {path.name: verify_root(LocalStore(path)) for path in V1.iterdir()}
    assert {name: one.problems for name, one in found.items() if one.problems or not one.ok} == {}
    reports = [(name, report) for name, one in found.items() for report in one.checkpoints]
    assert [(name, report.problems) for name, report in reports if report.problems] == []
    notes = [(name, note) for name, report in reports for note in report.notes]
    assert notes == [("thinned", "component slots was dropped by retention")]
    expected = {"run": 2, "types": 1, "fours": 1, "thinned": 2, "compressed": 1, "beside": 1}
    assert {name: len(one.checkpoints) for name, one in found.items()} == expected


def test_what_is_left_of_a_thinned_checkpoint_is_read(tmp_path: Path) -> None:
    """R21: and what was dropped is known as dropped."""
    root = copy_of("thinned", tmp_path)
    live = make.thinned_state(9)
    with manager(root, live) as loading:
        loading.load("step=1", components=["weights"])
        assert live["weights"]["w"].tolist() == [[1.0] * 3] * 2
        with pytest.raises(errors.NoCheckpoint, match="has dropped slots"):
            loading.load("step=1")
        found = loading.resume()
    assert found is not None
    assert found.step == 2
    assert live["slots"]["step"] == 2


def test_a_second_reader_reads_what_is_left() -> None:
    """R21."""
    _, (older, newer) = reader.read_root(V1 / "thinned")
    assert (older.dropped, newer.dropped) == ({"slots"}, set())
    assert older.trees["weights"]["w"].tolist() == [[1.0] * 3] * 2
    assert newer.trees["slots"]["step"] == 2


def test_what_codecs_made_is_read(tmp_path: Path) -> None:
    """R21: by both readers; each way to compress is a component of its own."""
    expected, live = make.compressed_state(), make.compressed_state()
    for tree in live.values():
        tree.clear()
    with manager(copy_of("compressed", tmp_path), live) as loading:
        found = loading.resume()
    assert found is not None
    _, (second,) = reader.read_root(V1 / "compressed")
    for name, tree in expected.items():
        assert [*live[name]] == [*tree]
        for key, value in tree.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(live[name][key], value)
                assert second.trees[name][key].tolist() == value.tolist()
            else:
                assert live[name][key] == second.trees[name][key] == value
    names = {path.name for path in folder_of("compressed", 1).iterdir()}
    assert names == {
        *("manifest.json", "index.json", "as_it_is-00000.json", "as_it_is-00000.safetensors"),
        *("zstd-00000.json.zst", "lz4-00000.json", "byte-00000.json", "bit-00000.json"),
        *("zstd-00000.safetensors.zst", "lz4-00000.safetensors.lz4", "rng-00000.json"),
        *("byte-00000.safetensors.blosc2", "bit-00000.safetensors.blosc2"),
    }


def test_the_tools_of_the_formats_give_the_plain_files(tmp_path: Path) -> None:
    """Issue 5: whoever has only `zstd` or `lz4` can get at the weights."""
    folder, expected = folder_of("compressed", 1), make.compressed_state()
    plain = tmp_path / "plain.safetensors"
    with (folder / "zstd-00000.safetensors.zst").open("rb") as file, plain.open("wb") as out:
        reading = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        shutil.copyfileobj(reading, out)
    assert torch.equal(safetensors.torch.load_file(plain)["w"], expected["zstd"]["w"])
    with lz4.frame.open(folder / "lz4-00000.safetensors.lz4") as source:
        plain.write_bytes(source.read())
    assert torch.equal(safetensors.torch.load_file(plain)["w"], expected["lz4"]["w"])


def test_stock_safetensors_reads_every_tensor_file() -> None:
    """R21: names, dtypes, shapes and bytes as the second reader has them."""
    checkpoints = {c.folder: c for case in V1.iterdir() for c in reader.read_root(case)[1]}
    paths = sorted(V1.rglob("*.safetensors"))
    assert len(paths) == 17
    for path in paths:
        component = path.name.rpartition("-")[0]
        mine = checkpoints[path.parent].arrays[component]
        stock = {key: bytes(s["data"]) for key, s in safetensors.deserialize(path.read_bytes())}
        assert stock == {key: array.tobytes() for key, array in mine.items()}, path
        if {"scales": HAS_E8M0, "fours": HAS_F4}.get(component, True):
            assert safetensors.torch.load_file(path).keys() == mine.keys(), path


def plain(value: Any) -> Any:
    """What Holdfast read, as the second reader would have it."""
    if isinstance(value, torch.Tensor):
        return ("array", tuple(value.shape), data_of(value))
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.tobytes())
    if isinstance(value, dict):
        return (type(value), [(plain(key), plain(item)) for key, item in value.items()])
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        return (type(value), [plain(item) for item in value])
    if isinstance(value, EnumValue):
        return plain(("$enum", value.type, value.name, value.value))
    if isinstance(value, torch.dtype | torch.device):
        name = "$dtype" if isinstance(value, torch.dtype) else "$device"
        return plain((name, str(value).removeprefix("torch.")))
    if isinstance(value, float | np.generic):
        return (type(value), np.asarray(value).tobytes())
    return value.as_posix() if isinstance(value, PurePath) else value


def test_a_second_reader_finds_the_same_trees(types: dict[str, Any]) -> None:
    """R21: the format page alone is enough."""
    _, (found,) = reader.read_root(V1 / "types")
    found.trees["values"]["torch"][2] = torch.Size(found.trees["values"]["torch"][2])
    for name in ("values", "tensors", "rng", "empty", *(["scales"] if HAS_E8M0 else [])):
        assert plain(found.trees[name]) == plain(types[name]), name
    state = found.trees["generators"]["numpy"][1]["state"]
    assert state == types["generators"]["numpy"].bit_generator.state
    words = found.trees["generators"]["python"][1]["state"].tolist()
    assert words == list(types["generators"]["python"].getstate()[1])


def test_a_second_reader_finds_the_same_run(tmp_path: Path) -> None:
    """R21: manifests, marks, claims and every tensor of both checkpoints."""
    others, found = reader.read_root(V1 / "run")
    assert {document["kind"] for document in others.values()} == {
        *("writer", "closed", "aborted", "deleted")
    }
    assert others["writers/00000002.json"]["resumed_from"]["epoch"] == 1
    assert [c.manifest["timestamp"]["step"] for c in found] == [10, 20]
    assert found[0].manifest["metrics"] == {"loss": 0.5, "odd": {"$float": "nan"}}
    assert found[0].marks["notes-0002.json"]["tags"] == ["paper"]
    assert found[0].marks["notes-0002.json"]["pinned"] is True
    for checkpoint in found:
        run = make.Run()
        with manager(copy_of("run", tmp_path / checkpoint.folder.name), run.state) as loading:
            loading.load(checkpoint.folder.name)
        weights = {name: data_of(value) for name, value in run.model.state_dict().items()}
        assert {k: a.tobytes() for k, a in checkpoint.arrays["model"].items()} == weights
        slots = checkpoint.trees["optimizer"]["slots"]
        for name, parameter in run.model.named_parameters():
            mine = {slot: array.tobytes() for slot, array in slots[name].items()}
            assert mine == {k: data_of(v) for k, v in run.optimizer.state[parameter].items()}


def written(state: dict[str, Any]) -> dict[str, bytes]:
    """The trees and tensor files that a save of `state` writes, by name."""
    workers = Workers(1, "test")
    staged = Stager().prepare_staging(capture(state))
    staged.transfer.run_copies(workers, 0, timeout_s=60)
    workers.close_pool()
    files = {f"{name}-00000.json": tree for name, tree in staged.trees.items()}
    for image in staged.all_files:
        assert isinstance(image, FileImage)
        files[image.file.name] = bytes(image.arena.memory)
    return files


def is_comparable(name: str, folder: Path) -> bool:
    """Some trees name versions, or hold what another torch adds to a state dict."""
    recorded = (folder / "manifest.json").read_text()
    component = name.rpartition("-")[0]
    same_torch = f'"torch": "{torch.__version__}"' in recorded
    if name.endswith(".json") and component in VERSIONED:
        return same_torch and component != "rng"
    return component != "scales" or HAS_E8M0


@pytest.mark.parametrize("step", [10, 20])
def test_the_run_is_still_written_in_the_same_bytes(step: int) -> None:
    """R21: a change here is a change of the format."""
    run = make.Run()
    run.at(step)
    folder = folder_of("run", step)
    files = written(run.state)
    assert {*files, "index.json", "manifest.json"} <= {path.name for path in folder.iterdir()}
    for name, data in files.items():
        if is_comparable(name, folder):
            assert data == (folder / name).read_bytes(), name


@pytest.mark.skipif(not HAS_E8M0, reason="this torch lacks a dtype of the format")
def test_all_types_are_still_written_in_the_same_bytes() -> None:
    """R21."""
    folder = folder_of("types", 1)
    for name, data in written(make.types_state()).items():
        assert data == (folder / name).read_bytes(), name


# The root `fours`


@needs_f4
def test_pairs_of_4_bit_floats_are_read(tmp_path: Path) -> None:
    """R21: by the manager, by safetensors' own loader, and by the second reader."""
    root = copy_of("fours", tmp_path)
    expected = make.fours_state()["fours"]
    live = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    with manager(root, {"fours": live, "rng": {}}) as loading:
        loading.load("step=1")
    _, (found,) = reader.read_root(root)
    folder = root / folder_of("fours", 1).name
    stock = safetensors.torch.load_file(folder / "fours-00000.safetensors")
    assert stock["w"].dtype == torch.float4_e2m1fn_x2
    for name, tensor in expected.items():
        data = data_of(tensor)
        assert (live[name].dtype, data_of(live[name])) == (torch.float4_e2m1fn_x2, data)
        assert found.arrays["fours"][name].tobytes() == data
        assert found.arrays["fours"][name].shape == tuple(tensor.shape)
        assert data_of(stock[name]) == data
        assert stock[name].shape == (tensor.shape or (1,)), "safetensors has no scalar of a pair"
    assert data_of(expected["w"]) == bytes(range(1, 7))
    assert verify_root(LocalStore(root)).ok


@needs_f4
def test_pairs_of_4_bit_floats_are_still_written_in_the_same_bytes() -> None:
    """R21."""
    folder = folder_of("fours", 1)
    for name, data in written(make.fours_state()).items():
        assert data == (folder / name).read_bytes(), name


# The root `beside`


def test_members_beside_a_tree_are_read(tmp_path: Path) -> None:
    """R21: a version and buffers that are not saved, which a load compares."""
    document = json.loads((folder_of("beside", 1) / "model-00000.json").read_text())
    assert document["versions"] == {"1": 3}
    assert document["unsaved"]["1.mask"] == "[4,2] -inf -inf 0 -inf 0 0 0 0 -inf"
    assert document["unsaved"]["1.angles"] == "[2] 1 2 -0 -0.5 0.625"
    sizes, *values = document["unsaved"]["1.many"].split(" ")
    assert (sizes, len(values), values[1], values[-2:]) == ("[100]", 33, "9", ["9801", "3284"])
    assert "1.empty" not in document["unsaved"]
    live = make.beside_state()
    with manager(copy_of("beside", tmp_path), live) as loading:
        assert not any("1.mask" in note for note in loading.load().notes)
        live["model"][1].mask.zero_()
        live["model"][1].weight.data.zero_()
        assert any("1.mask" in note for note in loading.load().notes)
    assert live["model"][1].weight.tolist() == [0.0, 1.0]


def test_members_beside_a_tree_are_still_written_in_the_same_bytes() -> None:
    """R21."""
    folder = folder_of("beside", 1)
    for name, data in written(make.beside_state()).items():
        assert data == (folder / name).read_bytes(), name


# The check of the checks


def test_the_second_reader_uses_nothing_of_ours() -> None:
    text = Path(reader.__file__).read_text("utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    own = {"__future__", "base64", "json", "re", "struct", "collections", "datetime", "pathlib"}
    codecs = {"zstandard", "lz4.frame", "blosc2"}
    assert named - own - codecs <= {"typing", "numpy", "blake3"}
    assert len(text.splitlines()) <= 260


def test_the_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in V1.rglob("*") if path.is_file()) < 300_000


def wrong_byte(data: bytearray) -> None:
    data[-1] ^= 1


def longer(data: bytearray) -> None:
    data.append(0)


@pytest.mark.parametrize(
    ("case", "damage"), diagonal(["types", "compressed"], [wrong_byte, longer])
)
def test_both_readers_notice_a_changed_byte(
    tmp_path: Path, case: str, damage: Callable[[bytearray], None]
) -> None:
    """R15, D14: so that the tests above are not vacuous."""
    root = copy_of(case, tmp_path)
    folder = root / folder_of(case, 1).name
    live = types_live() if case == "types" else make.compressed_state()
    missed = []
    with manager(root, live) as loading:
        for path in sorted(folder.iterdir()):
            whole = path.read_bytes()
            data = bytearray(whole)
            damage(data)
            path.write_bytes(data)
            if raised(partial(reader.read_root, root), (AssertionError, ValueError)) is None:
                missed.append(f"{path.name}: the second reader")
            if raised(partial(loading.load, folder.name), errors.FormatError) is None:
                missed.append(f"{path.name}: ours")
            path.write_bytes(whole)
    assert missed == []


def raised(
    read: Callable[[], object], expected: type[Exception] | tuple[type[Exception], ...]
) -> Exception | None:
    """The error of one of these kinds that reading raises."""
    try:
        read()
    except expected as error:
        return error
    return None
