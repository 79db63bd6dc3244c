"""Exports: torch and safetensors read them, they are whole or absent, and the same each time."""

from __future__ import annotations

import copy
import datetime
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from tests.interop.given import GivenSource
from torch import nn
from typing_extensions import override

from holdfast import CheckpointManager
from holdfast.errors import CorruptData, StoreError, UnsupportedState, UsageError
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop import export_checkpoint
from holdfast.interop.exporting.export import Export, ExportOptions
from holdfast.interop.renaming import RenameRules
from holdfast.interop.source import SourceComponent
from holdfast.store.base import proof_of

EVERY_DTYPE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.bool, torch.complex64),
)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"of.{dtype}": (torch.rand(3, 5) * 4).to(dtype) for dtype in EVERY_DTYPE}
    return {**made, "scalar": torch.tensor(7.5), "empty": torch.empty(0, 4)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    data = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*data)


def write(source: GivenSource, out: Path, to: Any, **options: Any) -> Any:
    return Export(source, ExportOptions(to=to, rename=RenameRules(), **options)).write_files(out)


def model_of(values: dict[str, Any], **others: Any) -> GivenSource:
    return GivenSource({"model": ("module", values), **others}, step=3)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_every_dtype_of_a_pt_file(tmp_path: Path, mmap: bool) -> None:
    write(model_of(tensors()), tmp_path / "x.pt", "pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
    assert [*found] == [*tensors()]
    assert all(same(found[name], one) for name, one in tensors().items())


def test_a_pt_file_has_every_value_that_weights_only_takes(tmp_path: Path) -> None:
    tree = {
        "list": [1, 2.5, None, True, "text", b"bytes"],
        "tuple": (1, (2, torch.ones(2))),
        3: {"inner": torch.zeros(1)},
        "ordered": OrderedDict(a=1),
        "set": {1, 2},
    }
    write(GivenSource({"state": ("tree", tree)}), tmp_path / "x.pt", "pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(found["tuple"][1][1], torch.ones(2))
    assert same(found[3]["inner"], torch.zeros(1))
    assert {name: found[name] for name in ("list", "ordered", "set")} == {
        name: tree[name] for name in ("list", "ordered", "set")
    }


def test_what_weights_only_would_refuse_becomes_something_else_and_a_note_says_so(
    tmp_path: Path,
) -> None:
    tree = {
        "array": np.arange(3.0),
        "scalar": np.float64(2.5),
        "path": Path("a/b"),
        "time": datetime.timedelta(seconds=3),
        "frozen": frozenset({1}),
    }
    made = write(GivenSource({"state": ("tree", tree)}), tmp_path / "x.pt", "pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(found.pop("array"), torch.arange(3.0, dtype=torch.float64))
    assert found == {"scalar": 2.5, "path": "a/b", "time": 3.0, "frozen": {1}}
    assert [*made.notes] == [
        "state.array: a numpy array became a tensor",
        "state.scalar: a numpy float64 became a number",
        "state.path: a path became text",
        "state.time: a time became seconds",
        "state.frozen: a frozenset became a set",
    ]


def test_tied_tensors_of_a_pt_file_share_memory(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    write(model_of({"a": weight, "b": weight}), tmp_path / "x.pt", "pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_an_optimizer_of_ours_loads_into_torchs(tmp_path: Path) -> None:
    """Invariant 7: slots, options and order are those of the optimizer that was saved."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": [*one.parameters()], "lr": 0.1 + n} for n, one in enumerate(model)]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "run", {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1).wait()
    export_checkpoint(tmp_path / "run", tmp_path / "x.pt", to="pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert {*found} == {"model", "optimizer", "rng"}
    expected = optimizer.state_dict()
    assert found["optimizer"]["param_groups"] == expected["param_groups"]
    for number, slots in expected["state"].items():
        assert all(
            same(found["optimizer"]["state"][number][name], one) for name, one in slots.items()
        )
    fresh = torch.optim.AdamW(copy.deepcopy(groups))
    fresh.load_state_dict(found["optimizer"])
    assert same(found["rng"]["torch"], torch.get_rng_state())


@pytest.mark.parametrize("shard_nbytes", [None, 100])
def test_safetensors_reads_every_dtype(tmp_path: Path, shard_nbytes: int | None) -> None:
    out = tmp_path / "out"
    write(model_of(tensors()), out, "safetensors", shard_nbytes=shard_nbytes)
    if shard_nbytes is None:
        found = load_file(out)
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        found = {}
        for name in sorted({*index["weight_map"].values()}):
            shard = load_file(out / name)
            assert {index["weight_map"][key] for key in shard} == {name}
            found |= shard
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors().values())
        assert len({*index["weight_map"].values()}) > 2
    assert {*found} == {*tensors()}
    assert all(same(found[name], one) for name, one in tensors().items())


def test_tied_tensors_are_written_once_as_save_model_does(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    state = model.state_dict(keep_vars=True)
    write(model_of(state), tmp_path / "x.safetensors", "safetensors")
    assert {*load_file(tmp_path / "x.safetensors")} == {"a.weight", "a.bias", "b.bias"}
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "b.weight": "a.weight"}
    fresh = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    fresh["b"].weight = fresh["a"].weight
    assert load_model(fresh, str(tmp_path / "x.safetensors")) == (set(), [])
    assert same(fresh["b"].weight, model["a"].weight)


def test_floats_are_cast_and_others_stay(tmp_path: Path) -> None:
    values = {"w": torch.tensor([1.1, 1e30, float("inf")]), "n": torch.tensor([1, 2])}
    made = write(model_of(values), tmp_path / "x.safetensors", "safetensors", dtype="f16")
    found = load_file(tmp_path / "x.safetensors")
    assert same(found["w"], values["w"].half())
    assert same(found["n"], values["n"])
    assert [*made.notes] == ["values too large for f16, which became infinite: 1"]


def test_names_are_mapped_and_other_components_are_left_out(tmp_path: Path) -> None:
    save_file({"net.a": torch.ones(2)}, tmp_path / "w.safetensors")
    out = tmp_path / "out.safetensors"
    export_checkpoint(
        tmp_path / "w.safetensors", out, to="safetensors", rename={"net.**": "model.**"}
    )
    assert [*load_file(out)] == ["model.a"]
    source = model_of({"w": torch.ones(2)}, data=("tree", {"epoch": 1}))
    made = write(source, tmp_path / "x", "safetensors")
    assert [(left.path, left.why) for left in made.left_out] == [
        ("data", "the file holds the weights of one component")
    ]


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("pt", {}),
        ("safetensors", {}),
        ("safetensors", {"shard_nbytes": 100}),
        ("hf", {"dtype": "bf16"}),
    ],
)
def test_the_same_source_gives_the_same_bytes(
    tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    for name in ("a", "b"):
        write(model_of(tensors()), tmp_path / name, to, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [*path.iterdir()]
    return {"" if one == path else one.name: one.read_bytes() for one in files}


def test_an_output_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "x.pt"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"x\.pt: already exists"):
        write(model_of(tensors()), out, "pt")
    assert out.read_bytes() == b"mine"
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder: is a folder, and the export is one file"):
        write(model_of(tensors()), tmp_path / "folder", "safetensors")
    write(model_of(tensors()), tmp_path / "folder", "hf")
    with pytest.raises(UsageError, match="there is no folder"):
        write(model_of(tensors()), tmp_path / "none" / "x.pt", "pt")


class Failing(GivenSource):
    """A source that is damaged at its end."""

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        if key == "empty.not":
            raise CorruptData("given: damaged")
        super().read_into(component, key, start, memory)


@pytest.mark.parametrize("to", ["pt", "safetensors", "hf"])
def test_a_failed_export_leaves_nothing_and_clears_what_a_killed_one_left(
    tmp_path: Path, to: str
) -> None:
    left = f".out.part-0123abcd-{proof_of('.out.part-0123abcd')}"
    (tmp_path / left).mkdir()
    (tmp_path / left / "model.safetensors").write_bytes(b"half")
    others = {left.replace("out", "out2"), ".out.part-0123abcd", ".out.part-of-mine"}
    for name in others:
        (tmp_path / name).write_bytes(b"of another export")
    source = Failing({"model": ("module", {**tensors(), "empty.not": torch.ones(1)})}, step=1)
    with pytest.raises(CorruptData):
        write(source, tmp_path / "out", to)
    assert {*os.listdir(tmp_path)} == others


class Meanwhile(GivenSource):
    """A source that does something when its first tensor is read."""

    do: Any = None

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        do, self.do = self.do, None
        if do is not None:
            do()
        super().read_into(component, key, start, memory)


@pytest.mark.parametrize("to", ["pt", "safetensors", "hf"])
def test_of_two_exports_to_one_output_the_second_is_refused(tmp_path: Path, to: str) -> None:
    refused = []

    def again() -> None:
        with pytest.raises(UsageError, match="another process is writing it now") as found:
            write(model_of(tensors()), tmp_path / "out", to)
        refused.append(found)

    source = Meanwhile({"model": ("module", tensors())}, step=1)
    source.do = again
    write(source, tmp_path / "out", to)
    assert refused
    assert os.listdir(tmp_path) == ["out"]


def test_without_room_for_all_nothing_is_written(tmp_path: Path) -> None:
    source = GivenSource({}, step=1)
    specs = {"w": TensorSpec("w", "U8", (2**60,))}  # more than any disk has
    source.parts["model"] = SourceComponent(kind="module", tree={"w": TensorRef("w")}, specs=specs)
    with pytest.raises(StoreError, match=r"takes 1,152,921,504,606,.* Nothing was written"):
        write(source, tmp_path / "out", "safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "options", "name"),
    [
        ("pt", {"dtype": "bf16"}, "--dtype"),
        ("pt", {"shard_nbytes": 1}, "--shard-size"),
        ("safetensors", {"configs": [Path()]}, "--config"),
    ],
)
def test_an_option_that_does_nothing_is_refused(
    tmp_path: Path, to: str, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(UsageError, match=f"{name}: does nothing with --to {to}"):
        write(model_of(tensors()), tmp_path / "out", to, **options)


def test_a_dtype_that_safetensors_lacks_is_refused_with_all_names(tmp_path: Path) -> None:
    values = {name: torch.ones(2, dtype=torch.complex128) for name in ("a", "b")}
    with pytest.raises(UnsupportedState, match=r"(?s)a: safetensors has no C128.*b: saf"):
        write(model_of(values), tmp_path / "out", "safetensors")


def test_the_component_is_asked_for_where_several_may_be_meant(tmp_path: Path) -> None:
    source = GivenSource(
        {name: ("module", {"w": torch.full((1,), n)}) for n, name in enumerate(("a", "b"))}
    )
    with pytest.raises(UsageError, match="--component NAME; it has a, b"):
        write(source, tmp_path / "out", "safetensors")
    write(source, tmp_path / "out", "safetensors", components=["b"])
    assert load_file(tmp_path / "out")["w"].item() == 1


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x", "torch_dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / ".hidden").write_bytes(b"")
    return folder


def test_a_model_folder_has_the_config_and_no_program(tmp_path: Path, config: Path) -> None:
    made = write(model_of(tensors()), tmp_path / "hf", "hf", configs=[config], dtype="bf16")
    found = contents(tmp_path / "hf")
    assert {*found} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads(found["config.json"]) == {"model_type": "x", "torch_dtype": "bfloat16"}
    assert {Path(left.path).name: left.why for left in made.left_out} == {
        "modeling.py": "hidden, or a program",
        ".hidden": "hidden, or a program",
        "pytorch_model.bin": "weights, or a pickle",
    }


def test_files_that_a_checkpoint_carries_along_go_into_the_folder(tmp_path: Path) -> None:
    carried = {
        "config.json": np.frombuffer(b"{}", np.uint8),
        "../evil.json": np.frombuffer(b"x", np.uint8),
    }
    source = model_of(tensors(), files=("tree", carried))
    made = write(source, tmp_path / "hf", "hf")
    assert contents(tmp_path / "hf")["config.json"] == b"{}"
    assert "evil.json" not in os.listdir(tmp_path)
    assert ("files.../evil.json", "no name of a file") in [
        (left.path, left.why) for left in made.left_out
    ]


def test_a_model_folder_without_a_config_says_what_it_lacks(tmp_path: Path) -> None:
    made = write(model_of(tensors()), tmp_path / "hf", "hf")
    assert [note for note in made.notes if "--config PATH" in note]


PEFT = Path(__file__).resolve().parents[1] / "golden" / "peers" / "peft"


def same_folder(found: Path, expected: Path) -> bool:
    """Whether two folders of an adapter have equal tensors and configurations."""
    ours, theirs = (load_file(one / "adapter_model.safetensors") for one in (found, expected))
    configs = {(one / "adapter_config.json").read_bytes() for one in (found, expected)}
    return (
        ours.keys() == theirs.keys()
        and all(same(ours[name], one) for name, one in theirs.items())
        and len(configs) == 1
    )


@pytest.mark.parametrize("adapter", ["default", "second"])
def test_an_adapter_is_what_peft_itself_writes_of_it(adapter: str, tmp_path: Path) -> None:
    """LoRA and DoRA, of layers and embeddings, with biases and modules that are trained whole."""
    out, beside = tmp_path / "out", PEFT / "adapters"
    theirs = beside if adapter == "default" else beside / adapter
    export_checkpoint(PEFT / "state.pt", out, to="peft", config=beside, adapter=adapter)
    assert same_folder(out, theirs)


def test_several_adapters_are_the_folders_that_peft_itself_writes(tmp_path: Path) -> None:
    out, theirs = tmp_path / "out", PEFT / "adapters"
    made = export_checkpoint(PEFT / "state.pt", out, to="peft", config=theirs)
    assert {one.relative_to(out) for one in out.rglob("*")} == {
        one.relative_to(theirs) for one in theirs.rglob("*")
    }
    assert same_folder(out, theirs)
    assert same_folder(out / "second", theirs / "second")
    assert "second" not in {Path(left.path).name for left in made.left_out}


@pytest.mark.parametrize("name", ["a/b", "a\\b", "/a"])
def test_an_adapter_whose_name_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    values = {f"m.lora_A.{one}.weight": torch.ones(2, 2) for one in ("default", name)}
    with pytest.raises(UsageError, match="cannot name folders"):
        write(model_of(values), tmp_path / "out", "peft", configs=[PEFT / "adapters"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"config": PEFT / "adapters", "adapter": "third"}, "no adapter 'third'.*default, second"),
        ({"config": PEFT / "adapters" / "second"}, r"'second'.*FOLDER/second"),
        ({"adapter": "second"}, "adapter_config.json is not in"),
        ({"to": "hf"}, "default, second; name one with --adapter"),
    ],
    ids=str,
)
def test_an_adapter_that_could_not_be_loaded_is_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named):
        export_checkpoint(PEFT / "state.pt", tmp_path / "out", **{"to": "peft", **options})
    assert not [*tmp_path.iterdir()]
