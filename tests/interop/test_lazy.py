"""`load_file` and `load_weights` without a model: tensors of any format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast import CheckpointManager, MemoryStore, load_file, load_weights
from holdfast.errors import StoreError, UsageError
from holdfast.interop import source as source_module

WEIGHTS = {
    "h.0.weight": torch.randn(5, 4),
    "half": torch.randn(3, 2).bfloat16(),
    "eight": torch.arange(6.0).reshape(3, 2).to(torch.float8_e4m3fn),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def saved(root: Any, state: dict[str, Any]) -> None:
    with CheckpointManager(root, state, preflight=False, sinks=()) as manager:
        manager.save(3).wait()


def same(one: Tensor, other: Tensor) -> bool:
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*parts)


def test_one_component_is_named_by_paths(path: Path) -> None:
    with load_file(path) as file:
        assert {*file} == {*WEIGHTS}
        assert (file.format, file.step, file.components) == ("safetensors", None, ("model",))
        assert (file["half"].dtype, file["half"].shape, file["half"].nbytes) == ("BF16", (3, 2), 12)
        for name, tensor in WEIGHTS.items():
            assert same(file[name].torch(), tensor)


def test_numpy_gets_its_own_types_or_wider_ones(path: Path) -> None:
    with load_file(path) as file:
        assert file["h.0.weight"].numpy().dtype == np.float32
        assert file["half"].numpy().tolist() == WEIGHTS["half"].float().tolist()
        assert file["eight"].numpy().tolist() == WEIGHTS["eight"].float().tolist()
        assert np.asarray(file["count"]) == 7
        assert file["empty"].numpy().shape == (0, 4)


@pytest.mark.parametrize("rows", [2, -1, slice(1, 3), slice(-2, None), slice(4, 1), slice(None)])
def test_rows_are_those_of_numpy(path: Path, rows: Any) -> None:
    with load_file(path) as file:
        found = file["h.0.weight"][rows]
        expected = WEIGHTS["h.0.weight"].numpy()[rows]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)
        assert same(found.torch(), torch.from_numpy(expected.copy()))


def test_rows_of_rows_are_read_and_missing_ones_refused(path: Path) -> None:
    with load_file(path) as file:
        weight = file["h.0.weight"]
        np.testing.assert_array_equal(weight[1:4][1][:2].numpy(), WEIGHTS["h.0.weight"][2, :2])
        assert [row.shape for row in weight] == [(4,)] * 5
        with pytest.raises(IndexError):
            weight[5]
        with pytest.raises(IndexError):
            file["count"][0]
        with pytest.raises(UsageError, match="only slices of step 1"):
            weight[::2]
        with pytest.raises(KeyError):
            file["nothing"]


def test_only_the_rows_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_file(path) as file:
        source = file["h.0.weight"]._source
        read: list[int] = []
        real = source.read_into
        monkeypatch.setattr(source, "read_into", lambda *a: (read.append(a[3].nbytes), real(*a)))
        file["h.0.weight"][1:3].numpy()
    assert read == [32]


def test_a_large_tensor_is_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_NBYTES", 4096)
    values = {"x": torch.randn(5000)}
    save_file(values, tmp_path / "w.safetensors")
    with load_file(tmp_path / "w.safetensors") as file:
        assert same(file["x"].torch(), values["x"])


def test_a_checkpoint_has_components_and_a_tree(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    saved(tmp_path, {"model": model, "extra": {"lr": 0.5, "of": [torch.ones(2)]}})
    with load_file(f"{tmp_path}@step=3") as file:
        assert file.step == 3
        assert {"model:weight", "model:bias", "extra:of.0"} <= {*file}
        tree = file.tree("extra")
        assert tree["lr"] == 0.5
        assert tree["of"][0].numpy().tolist() == [1.0, 1.0]
        with pytest.raises(UsageError, match="choose a component"):
            file.tree()


def test_a_store_is_opened_with_which(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, {"model": nn.Linear(2, 3)})
    with load_file(store, which="step=3") as file:
        assert "model:weight" in file


@pytest.mark.parametrize(
    "load", [load_file, lambda source, which: load_weights(source, which=which)]
)
@pytest.mark.parametrize(
    ("source", "which", "advice"),
    [
        ("runs/gpt", "step=3", "write 'runs/gpt@step=3'"),
        ("runs/gpt", 3, "write 'runs/gpt@step=3'"),
        ("runs/gpt@paper", "step=3", "write 'runs/gpt@step=3'"),
        ("s3://me:secret@bucket/gpt", "best", "'s3://***@bucket/gpt': must have no credentials"),
        (
            "https://host/runs/gpt?sig=secret",
            3,
            "of 'https://host/runs/gpt': a web server lists no",
        ),
    ],
)
def test_which_beside_a_path_says_what_to_write_instead(
    load: Any, source: str, which: Any, advice: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(source, which=which)
    assert advice in str(caught.value)
    assert "secret" not in str(caught.value)


def test_weights_without_a_model_are_a_dict(tmp_path: Path, path: Path) -> None:
    from_file = load_weights(path)
    assert all(same(from_file[name], tensor) for name, tensor in WEIGHTS.items())
    model = nn.Linear(2, 3)
    saved(tmp_path / "run", {"model": model, "ema": nn.Linear(1, 1)})
    found = load_weights(tmp_path / "run")
    assert {*found} == {"weight", "bias"}
    assert same(found["weight"], model.weight.detach())
    assert {*load_weights(tmp_path / "run", component="ema", skip=["ema.bias"])} == {"weight"}


def test_weights_that_are_tied_are_one_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    saved(tmp_path, {"model": model})
    found = load_weights(tmp_path)
    assert found["0.weight"] is found["1.weight"]


def test_without_a_model_some_arguments_mean_nothing(path: Path) -> None:
    with pytest.raises(UsageError, match="in_place"):
        load_weights(path, None, in_place=True)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="no component 'modle'"):
        load_weights(path, component="modle")
    with pytest.raises(UsageError, match="include"):
        load_weights(path, include=["model.nothing"])


def test_tensors_in_the_state_of_a_generator_are_lazy_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.save({"rng": [generator]}, tmp_path / "g.pt")
    with load_file(tmp_path / "g.pt") as file:
        [found] = file.tree()["rng"] if file.components == ("state",) else file.tree("rng")
        assert same(found.members["state"].torch(), generator.get_state())


def test_a_row_of_a_packed_vector_of_4_bits_is_two_numbers(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + b"\x21\x43"
    (tmp_path / "w.safetensors").write_bytes(data)
    with load_file(tmp_path / "w.safetensors") as file:
        assert np.array_equal(file["x"][1].numpy(), file["x"].numpy()[2:])


@pytest.mark.parametrize("nbytes", [16, 1 << 20])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_file_that_is_written_anew_in_its_place_is_never_read_as_a_mixture(
    tmp_path: Path, nbytes: int, is_cut: bool
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.zeros(nbytes, dtype=torch.uint8)}, path)
    os.utime(path, (1, 1))  # a clock's tick may be longer than this test
    with load_file(path) as file:
        assert not file["x"].numpy().any()
        with path.open("r+b") as writer:
            if is_cut:
                writer.truncate(100)
            else:
                writer.seek(-1, os.SEEK_END)
                writer.write(b"x")
        with pytest.raises(StoreError, match="was written to while it was read"):
            file["x"].numpy()


def test_a_file_in_whose_place_another_is_put_is_read_as_it_was(path: Path) -> None:
    with load_file(path) as file:
        save_file({"h.0.weight": torch.zeros(5, 4)}, path.with_name("new"))
        os.replace(path.with_name("new"), path)
        assert same(file["h.0.weight"].torch(), WEIGHTS["h.0.weight"])
