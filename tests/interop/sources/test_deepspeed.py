"""Folders of DeepSpeed, ZeRO stages 0 to 3 and universal: weights and moments by name, whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.sources.expected import PEERS, expected, found
from torch import nn

from holdfast import CheckpointManager, load_weights
from holdfast.errors import CorruptData, FormatError, HoldfastError
from holdfast.interop import import_checkpoint
from holdfast.interop.opening import open_source

SAMPLES = PEERS / "deepspeed"
DIVIDED = ("stage1", "stage2", "stage3")
JOINED = ("universal2", "universal3")


@pytest.mark.parametrize("name", ["stage0", *DIVIDED, *JOINED])
def test_weights_are_those_that_deepspeed_joins(name: str) -> None:
    """Of stage 1 it joins no frozen ones, which the model has; universal ones may be float32."""
    record = expected("deepspeed", name.replace("universal", "stage"))["module"]
    with open_source(str(SAMPLES / name)) as source:
        assert (source.format, source.step) == ("deepspeed", 3)
        assert [*source.parts] == ["model", "optimizer", "scheduler", "trainer", "state"]
        assert not source.left_out
        weights = found(source, "model")
        assert found(source, "state")["epoch"] == 7
        tied = source.parts["model"].tree
        assert tied["last.weight"] == tied["tied.weight"]
    if name == "universal2":
        weights |= {one: record[one] for one in ("frozen.weight", "frozen.bias")}
    assert {one: weights[one] for one in record} == record
    assert {*weights} - {*record} <= {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("name", ["stage2", "universal2"])
def test_moments_are_those_that_deepspeed_joins(name: str) -> None:
    record = expected("deepspeed", "stage2")
    with open_source(str(SAMPLES / name)) as source:
        tree = found(source, "optimizer")
    names = [one for group in tree["param_groups"] for one in group["param_names"]]
    assert len(names) == 7
    for number, one in enumerate(names):
        for slot in ("exp_avg", "exp_avg_sq"):
            assert tree["state"][number][slot] == record[slot][one]


class Model(nn.Module):
    """The model of the samples, without ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.first, self.norm = nn.Linear(5, 4), nn.LayerNorm(4)
        self.last, self.tied = nn.Linear(4, 2), nn.Linear(4, 2)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.zeros(4))


@pytest.mark.parametrize("name", [*DIVIDED, *JOINED])
def test_a_run_resumes_from_an_import_with_its_moments(name: str, tmp_path: Path) -> None:
    """The moments of stage 3 are compared with those that its universal folder joins."""
    made = import_checkpoint(SAMPLES / name, tmp_path / "run", allow_loss=False)
    assert made.notes == ()
    model = Model()
    ours = [model.first.weight, model.first.bias, model.norm.weight]
    rest = [model.norm.bias, model.last.weight, model.last.bias, model.tied.bias]
    groups: list[dict[str, Any]] = [{"params": ours, "lr": 1.0}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    model.frozen.to(torch.float32 if name == "universal2" else torch.bfloat16)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path / "run", state, sinks=()) as manager:
        resumed = manager.resume(without=["scheduler", "trainer", "state"])
        assert resumed is not None
    weights = load_weights(SAMPLES / name)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    assert optimizer.param_groups[0]["lr"] != 1.0
    slots = optimizer.state[model.first.bias]
    assert float(slots["step"]) == 3
    folder = SAMPLES / name.replace("stage1", "universal2").replace("stage", "universal")
    for slot in ("exp_avg", "exp_avg_sq"):
        with open_source(str(folder / "joined/zero/first.bias" / f"{slot}.pt")) as one:
            ((_, spec, data),) = _tensors(found(one, next(iter(one.parts))))
        assert spec == (4,)
        assert slots[slot].numpy().tobytes() == data


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [tree]
    return [
        each for one in tree.values() if isinstance(one, tuple | dict) for each in _tensors(one)
    ]


def copy(name: str, folder: Path) -> Path:
    """Copy a sample; return the folder with its files."""
    shutil.copytree(SAMPLES / name, folder)
    return folder / (folder / "latest").read_text()


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(name: str, rank: int, tmp_path: Path) -> None:
    folder = copy(name, tmp_path / "copy")
    (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptData, match=r"rank 0 is missing|2 ranks saved"):
        open_source(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    "other", ["mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt"]
)
def test_tensor_and_pipeline_parallelism_are_refused_with_the_way_out(
    other: str, tmp_path: Path
) -> None:
    folder = copy("stage1", tmp_path / "copy")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / other)
    with pytest.raises(FormatError, match="ds_to_universal"):
        open_source(str(tmp_path / "copy"))


def _grow(state: dict[str, Any]) -> None:
    state["param_shapes"][0]["first.weight"] = torch.Size([2**30, 2**30])


def _negate(state: dict[str, Any]) -> None:
    state["param_shapes"][0]["first.weight"] = (-1, 5)


def _forget(state: dict[str, Any]) -> None:
    del state["param_shapes"][1]


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("change", [_grow, _negate, _forget])
def test_shapes_that_do_not_fit_are_errors(name: str, change: Any, tmp_path: Path) -> None:
    folder = copy(name, tmp_path / "copy")
    for path in folder.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    with pytest.raises((CorruptData, FormatError)):
        open_source(str(tmp_path / "copy"))


def test_latest_leads_to_no_other_folder(tmp_path: Path) -> None:
    copy("stage1", tmp_path / "copy")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latest").write_text("../copy/global_step3")
    with pytest.raises(HoldfastError, match="leads out"):
        open_source(str(tmp_path / "other"))
