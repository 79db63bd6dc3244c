"""Layers and optimizers of bitsandbytes: saved, and resumed to the bit."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from distributed.run import run_ranks
from holdfast import CheckpointManager
from holdfast.errors import FormatError, MismatchError
from state.roundtrip import Image, digest, image, raw_bytes
from state.test_subclasses import Loads


def import_bitsandbytes() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes
    return bitsandbytes


def new_model(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    layers = import_bitsandbytes().nn
    torch.manual_seed(seed)
    if kind == "int8":
        made = layers.Linear8bitLt(64, 64, has_fp16_weights=False)
    else:
        nested = kind == "nf4"
        options = {"quant_type": kind, "compress_statistics": nested, **options}
        made = layers.Linear4bit(64, 64, compute_dtype=torch.float32, **options)
    return nn.Sequential(made, nn.Linear(64, 2)).to("cpu")


def quantized_tensors(model: Any) -> list[bytes]:
    weight, state = model[0].weight, getattr(model[0].weight, "quant_state", None)
    found = [weight.data, getattr(weight, "SCB", None), getattr(model[0], "state", weight).__dict__]
    tensors = [*found[:2], *(found[2].get(name) for name in ("CB", "SCB"))]
    for one in (state, getattr(state, "state2", None)):
        tensors += [getattr(one, name, None) for name in ("absmax", "code", "offset")]
    return [raw_bytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantized_layers_resume_to_the_bit(kind: str, has_run: bool, tmp_path: Path) -> None:
    model, live = new_model(kind, 1), new_model(kind, 2)
    inputs = torch.randn(2, 64)
    if has_run:  # an int8 layer moves its scales in its first forward pass
        model(inputs)
        live(inputs)
    with CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.save(1, wait=True)
    before = dict(live.named_parameters())
    with CheckpointManager(tmp_path, {"model": live}) as manager:
        manager.resume()
    assert quantized_tensors(live) == quantized_tensors(model)
    assert all(one is before[name] for name, one in live.named_parameters())
    assert torch.equal(live(inputs), model(inputs))


def resume_sharded(_: int, root: str) -> None:
    """Compare outputs: fully_shard drops the scales of the weight, and leaves them in the layer."""
    import_bitsandbytes()
    model, live = (fully_shard(new_model("nf4", seed)[0]) for seed in (1, 2))
    inputs = torch.randn(2, 64)
    expected = model(inputs)
    with CheckpointManager(root, {"model": model}) as manager:
        manager.save(1, wait=True)
    with CheckpointManager(root, {"model": live}) as manager:
        manager.resume()
    assert torch.equal(live(inputs), expected)


@pytest.mark.full
def test_scales_of_sharded_layers_resume_to_the_bit(tmp_path: Path) -> None:
    import_bitsandbytes()
    run_ranks(1, partial(resume_sharded, root=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"quant_type": "fp4"}, ["0.weight"]),
        ({"compress_statistics": False}, ["0.weight"]),
    ],
)
def test_layers_with_other_settings_are_refused(changes: dict[str, Any], names: list[str]) -> None:
    stored, live = image({"model": new_model("nf4")}), {"model": new_model("nf4", 2, **changes)}
    before = digest(live)
    with pytest.raises(MismatchError) as caught:
        stored.load(live)
    assert [name for name in names if name not in str(caught.value)] == []
    assert digest(live) == before


def test_a_layer_that_is_not_quantized_is_refused() -> None:
    live = nn.Sequential(import_bitsandbytes().nn.Linear4bit(64, 64), nn.Linear(64, 2))
    stored, before = image({"model": new_model("nf4")}), digest({"model": live})
    with pytest.raises(MismatchError, match=r"0\.weight\.absmax"):
        stored.load({"model": live})
    assert digest({"model": live}) == before


PACKED = "0.weight.quant_state.bitsandbytes__nf4"


def with_settings(data: bytes) -> Image:
    """The image of a model, with other bytes for the settings of its layer."""
    stored = image({"model": new_model("nf4", 1)})
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    part = stored.stored["model"]
    spec = replace_shape(part.tensors[PACKED], values)
    stored.stored["model"] = replace(part, tensors={**part.tensors, PACKED: spec})
    stored.tensors["model"][PACKED] = values
    return stored


def replace_shape(spec: Any, values: torch.Tensor) -> Any:
    return type(spec)(spec.key, spec.dtype, tuple(values.shape))


def settings(**changes: Any) -> bytes:
    plain = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 64]}
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
    return json.dumps({**plain, **nested, **changes}).encode()


def test_the_offset_in_the_settings_is_restored() -> None:
    live = new_model("nf4", 2)
    with_settings(settings()).load({"model": live})
    assert live[0].weight.quant_state.offset == 0.25


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (settings(dtype="nn"), "dtype"),
        (settings(blocksize=128), "blocksize"),
        (settings(shape=[4096, 1]), "shape"),
        (settings(quant_type="fp4"), "quant_type"),
        (settings(more=1), "more"),
        (settings(nested_offset="1"), "nested_offset"),
        (settings(nested_offset=None), "nested_offset"),
        (b"[1]", PACKED),
        (b"\xff\xfe", PACKED),
        (b"[" * 5000, PACKED),
    ],
)
def test_strange_settings_are_refused(data: bytes, name: str) -> None:
    stored, live = with_settings(data), {"model": new_model("nf4", 2)}
    before = digest(live)
    with pytest.raises((MismatchError, FormatError), match=name.replace(".", r"\.")):
        stored.load(live)
    assert digest(live) == before


def test_another_table_of_values_is_refused_and_the_shared_one_stays() -> None:
    stored, live = image({"model": new_model("nf4", 1)}), new_model("nf4", 2)
    stored.tensors["model"]["0.weight.quant_map"] += 1
    before = digest({"model": live})
    with pytest.raises(MismatchError, match="quant_map"):
        stored.load({"model": live})
    assert digest({"model": live}) == before


def test_beside_a_module_with_its_own_loading_code() -> None:
    def new(seed: int) -> nn.Module:
        model = new_model("nf4", seed)
        model.register_module("own", Loads(3, 4))
        return model

    one, other = new(1), new(2)
    image({"model": one}).load({"model": other})
    assert quantized_tensors(other) == quantized_tensors(one)
    assert digest({"model": other}) == digest({"model": one})


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit"])
def test_optimizers_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    def new(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 2))
        kind = getattr(import_bitsandbytes().optim, name)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}

    def train(state: dict[str, Any]) -> None:
        for _ in range(2):
            state["model"](torch.randn(2, 64)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    state, again = new(1), new(2)
    train(state)
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(2, wait=True)
    train(state)
    with CheckpointManager(tmp_path, again) as manager:
        manager.resume()
    train(again)
    slots = [
        [state["optimizer"].state[parameter] for parameter in state["model"].parameters()]
        for state in (state, again)
    ]
    assert slots[0][0]["state1"].dtype is torch.uint8
    for one, other in zip(*slots, strict=True):
        assert one.keys() == other.keys()
        for slot, value in one.items():
            same = raw_bytes if isinstance(value, torch.Tensor) else repr
            assert same(value) == same(other[slot]), slot
    assert digest({"model": again["model"]}) == digest({"model": state["model"]})
