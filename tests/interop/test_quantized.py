"""Checkpoints with tensor subclasses: compared, exported and imported with all inner tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.interop import export_checkpoint, import_checkpoint
from holdfast.interop.comparing.differences import compare_sources
from holdfast.interop.opening import open_source
from quantized import Mode, bits_in, bits_of, scaled_model
from state.roundtrip import raw_bytes


def saved(root: Path, model: nn.Module) -> str:
    with holdfast.CheckpointManager(root, {"model": model}) as manager:
        manager.save(1, wait=True)
    return str(root)


def test_a_comparison_finds_other_inner_tensors_and_contexts(tmp_path: Path) -> None:
    models = [scaled_model(1), scaled_model(1), scaled_model(1, mode=Mode.DOWN)]
    models[1][0].weight.codes.add_(1)
    roots = [saved(tmp_path / str(number), model) for number, model in enumerate(models)]
    found = []
    for other in roots[1:]:
        with open_source(roots[0]) as a, open_source(other) as b:
            found.append(compare_sources(a, b, ["model"]))
    assert [one.tensor for one in found[0].tensors] == ["model:0.weight.codes"]
    assert not found[0].values
    assert [one.path for one in found[1].values] == ["model:0.weight.$context.mode"]
    assert not found[1].tensors


def test_a_safetensors_file_gets_the_inner_tensors(tmp_path: Path) -> None:
    model = scaled_model(1)
    done = export_checkpoint(
        saved(tmp_path / "run", model), tmp_path / "w.safetensors", to="safetensors"
    )
    written = load_file(tmp_path / "w.safetensors")
    inner = [written["0.weight.codes"], written["0.weight.scale"]]
    assert [*map(raw_bytes, inner)] == bits_of(model[0].weight)
    assert ["Scaled" in left.why for left in done.left_out if left.path == "model.0.weight"] == [
        True
    ]


def test_a_torch_file_gets_a_dict_of_inner_tensors(tmp_path: Path) -> None:
    model = scaled_model(1)
    done = export_checkpoint(saved(tmp_path / "run", model), tmp_path / "w.pt", to="pt")
    written = torch.load(tmp_path / "w.pt")["model"]["0.weight"]
    assert [raw_bytes(written[name]) for name in ("codes", "scale")] == bits_of(model[0].weight)
    assert written["$context"]["block"] == (2, 2)
    assert any("inner tensors" in note for note in done.notes)


def test_a_folder_for_transformers_is_refused(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", scaled_model(1))
    with pytest.raises(UsageError, match=r"0\.weight.*Scaled"):
        export_checkpoint(root, tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_an_imported_checkpoint_loads_into_live_classes(tmp_path: Path) -> None:
    model, live = scaled_model(1), scaled_model(2)
    import_checkpoint(saved(tmp_path / "run", model), tmp_path / "again", rename={"0": "first"})
    live = nn.Sequential()
    for name, one in zip(("first", "1"), scaled_model(2), strict=True):
        live.add_module(name, one)
    holdfast.load_weights(tmp_path / "again", live)
    assert [*bits_in(live).values()] == [*bits_in(model).values()]


def test_weights_without_a_model_are_the_inner_tensors(tmp_path: Path) -> None:
    model = scaled_model(1)
    weights = holdfast.load_weights(saved(tmp_path / "run", model))
    inner = [weights["0.weight.codes"], weights["0.weight.scale"]]
    assert [*map(raw_bytes, inner)] == bits_of(model[0].weight)
