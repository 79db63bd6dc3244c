"""Pairs of 4-bit floats: saved, loaded, and read as a source, from our files and from others'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.interop.sources.reads import by_path, data_of
from torch import nn

from holdfast.interop.opening import open_source
from holdfast.manager import CheckpointManager
from holdfast.weights import load_weights

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch lacks 4-bit floats"
)


def pairs(*shape: int, first: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    data = torch.arange(first, first + count, dtype=torch.int64).remainder(256).byte()
    return data.reshape(shape).view(torch.float4_e2m1fn_x2)


class Quantised(nn.Module):
    """A linear layer with its weight, scales and a scalar as 4 and 8 bits."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(pairs(4, 6, first=first), requires_grad=False)
        self.register_buffer("strided", pairs(4, 6, first=first).t()[1:5])
        self.register_buffer("scalar", pairs(1, first=first)[0])
        self.register_buffer("empty", pairs(0, 3))


def data(model: nn.Module) -> dict[str, bytes]:
    return {name: data_of(tensor) for name, tensor in model.state_dict().items()}


def test_a_model_of_4_bit_floats_is_saved_and_loaded(tmp_path: Path) -> None:
    model = Quantised(first=1)
    with CheckpointManager(tmp_path, {"model": model}, sinks=(), preflight=False) as manager:
        manager.save(1).wait()
    loaded, resumed = Quantised(first=99), Quantised(first=99)
    load_weights(tmp_path, loaded)
    with CheckpointManager(tmp_path, {"model": resumed}, sinks=(), preflight=False) as manager:
        assert manager.resume().step == 1
    assert data(loaded) == data(resumed) == data(model) != data(Quantised(first=99))
    with open_source(str(tmp_path)) as source:
        assert by_path(source) == data(model)
        kinds = {spec.dtype for spec in source.get_component("model").specs.values()}
        assert kinds == {"F4_X2"}


def test_safetensors_reads_4_bit_floats_with_torchs_shape(tmp_path: Path) -> None:
    tensors = {"w": pairs(3, 4), "v": pairs(2), "empty": pairs(2, 0)}
    save_file(tensors, tmp_path / "w.safetensors")
    with open_source(str(tmp_path / "w.safetensors")) as source:
        assert by_path(source) == {name: data_of(one) for name, one in tensors.items()}
        shapes = {key: spec.shape for key, spec in source.get_component("model").specs.items()}
        assert shapes == {name: tuple(one.shape) for name, one in tensors.items()}
