"""How files and folders of trainers become components; written by torch as the trainers do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import CorruptData, FormatError, MismatchError, UsageError
from holdfast.interop.opening import open_source
from holdfast.interop.source import Source


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def bits(source: Source, component: str, key: str) -> torch.Tensor:
    spec = source.get_component(component).specs[key]
    memory = memoryview(bytearray(spec.nbytes))
    source.read_into(component, key, 0, memory)
    return torch.frombuffer(memory, dtype=torch.float32).reshape(spec.shape)


def kinds(source: Source) -> dict[str, str]:
    return {name: part.kind for name, part in source.parts.items()}


def test_a_file_of_lightning(tmp_path: Path, trained: Any) -> None:
    model, optimizer, scheduler = trained
    checkpoint = {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best_model_path": "x"}},
        "optimizer_states": [optimizer.state_dict(), optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "_class_path": "os.system"},
        "ema": {"weight": torch.ones(2)},
    }
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with open_source(str(tmp_path / "last.ckpt")) as source:
        assert (source.format, source.step, source.left_out) == ("lightning", 7, [])
        assert kinds(source) == {
            "model": "module",
            "optimizer": "tree",
            "optimizer1": "tree",
            "scheduler": "tree",
            "trainer": "tree",
            "state": "tree",
        }
        assert (
            source.get_component("trainer").tree["hyper_parameters"]["_class_path"] == "os.system"
        )
        assert [*source.get_component("state").tree] == ["ema"]
        assert torch.equal(bits(source, "model", "weight"), model.weight)
        average = bits(source, "optimizer", "state.0.exp_avg")
        assert torch.equal(average, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    ("names", "step"),
    [
        (("model", "optimizer", "scheduler", "iteration"), "iteration"),
        (
            ("model_state_dict", "optimizer_state_dict", "lr_scheduler", "global_step"),
            "global_step",
        ),
        (("state_dict", "optimizer", "scheduler_state_dict", "step"), "step"),
    ],
)
def test_a_dict_by_the_names_that_people_use(
    tmp_path: Path, trained: Any, names: tuple[str, ...], step: str
) -> None:
    model, optimizer, scheduler = trained
    states = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), 12)
    torch.save({**dict(zip(names, states, strict=True)), "loss": 0.5}, tmp_path / "x.pt")
    with open_source(str(tmp_path / "x.pt")) as source:
        assert (source.format, source.step) == ("torch", 12)
        assert [*source.parts] == ["model", "optimizer", "scheduler", "state"]
        assert source.get_component("state").tree == {step: 12, "loss": 0.5}


def test_weights_alone_are_a_model_and_one_tensor_is_one_too(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    torch.save(torch.ones(3), tmp_path / "b.pt")
    torch.save({"epoch": 3, "names": ["a"]}, tmp_path / "c.pt")
    for name, wanted in (("a", "module"), ("b", "tree")):
        with open_source(str(tmp_path / f"{name}.pt")) as source:
            assert kinds(source) == {"model": wanted}
    with open_source(str(tmp_path / "c.pt")) as source:
        assert source.get_component("state").tree == {"epoch": 3, "names": ["a"]}


def test_a_whole_module_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"torch\.nn\.modules\.linear\.Linear.*state_dict\(\)"):
        open_source(str(tmp_path / "a.pt"))


def _accelerate(folder: Path, trained: Any) -> None:
    model, optimizer, scheduler = trained
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "pytorch_model_1.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    for rank in range(2):
        state = {
            "step": 3,
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.RandomState(rank).get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        torch.save(state, folder / f"random_states_{rank}.pkl")
    torch.save({"count": 3}, folder / "custom_checkpoint_0.pkl")
    (folder / "notes.txt").write_text("mine")


def test_a_folder_of_accelerate(tmp_path: Path, trained: Any) -> None:
    _accelerate(tmp_path / "state", trained)
    with open_source(str(tmp_path / "state")) as source:
        assert (source.format, source.step) == ("accelerate", None)
        assert kinds(source) == {
            "model": "module",
            "model1": "module",
            "optimizer": "tree",
            "scheduler": "tree",
            "rng": "tree",
            "rng1": "tree",
            "state": "tree",
            "files": "tree",
        }
        assert source.get_component("state").tree == {"count": 3}
        assert source.get_component("rng1").tree["random_state"] == random.getstate()
        assert torch.equal(bits(source, "model1", "weight"), trained[0].weight)
        assert {*source.get_component("files").tree} == {"notes.txt"}
        assert source.left_out == []


def _trainer(folder: Path, trained: Any) -> dict[str, torch.Tensor]:
    _, optimizer, scheduler = trained
    folder.mkdir()
    first, second = ({"a.w": torch.randn(4, 2)}, {"b.w": torch.randn(3), "c": torch.ones(2)})
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save(
        {"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / "rng_state.pth"
    )
    torch.save(math.sin, folder / "training_args.bin")
    (folder / "tokenizer.json").write_text("{}")
    state = {"global_step": 30, "log_history": [{"loss": math.nan}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return first | second


def test_a_folder_of_the_trainer_of_transformers(tmp_path: Path, trained: Any) -> None:
    weights = _trainer(tmp_path / "checkpoint-30", trained)
    with open_source(str(tmp_path / "checkpoint-30")) as source:
        assert (source.format, source.step) == ("hf-trainer", 30)
        assert [*source.parts] == ["model", "optimizer", "rng", "scheduler", "trainer", "files"]
        assert {*source.get_component("files").tree} == {"tokenizer.json"}
        assert source.get_component("model").kind == "module"
        for key, tensor in weights.items():
            assert torch.equal(bits(source, "model", key), tensor)
        assert math.isnan(source.get_component("trainer").tree["log_history"][0]["loss"])
        assert [one.path for one in source.left_out] == ["training_args.bin"]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, trained: Any) -> None:
    _trainer(tmp_path / "c", trained)
    save_file({"a.w": torch.ones(1)}, tmp_path / "c" / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match=r"'a\.w' is in .* and in "):
        open_source(str(tmp_path / "c"))


@pytest.mark.parametrize(
    "name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_weights_without_all_their_shards_are_refused(
    tmp_path: Path, trained: Any, name: str
) -> None:
    _trainer(tmp_path / "c", trained)
    (tmp_path / "c" / name).unlink()
    with pytest.raises(FormatError, match="is missing"):
        open_source(str(tmp_path / "c"))


def test_names_that_a_config_ties_are_in_a_folder_of_the_trainer_too(
    tmp_path: Path, trained: Any
) -> None:
    _trainer(tmp_path / "c", trained)
    for path in (tmp_path / "c").glob("model*"):
        path.unlink()
    save_file({"model.embed_tokens.weight": torch.ones(2)}, tmp_path / "c" / "model.safetensors")
    (tmp_path / "c" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with open_source(str(tmp_path / "c")) as source:
        assert {*source.get_component("model").tree} == {
            "model.embed_tokens.weight",
            "lm_head.weight",
        }
        assert len(source.get_component("model").specs) == 1


def test_a_damaged_file_in_a_folder_is_refused_by_its_name(tmp_path: Path, trained: Any) -> None:
    _accelerate(tmp_path / "state", trained)
    path = tmp_path / "state" / "optimizer.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match=r"optimizer\.bin"):
        open_source(str(tmp_path / "state"))


def test_a_file_that_only_its_code_can_read_is_left_out(tmp_path: Path, trained: Any) -> None:
    _accelerate(tmp_path / "state", trained)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "state" / "custom_checkpoint_1.pkl")
    with open_source(str(tmp_path / "state")) as source:
        assert "state1" not in source.parts
        assert any("custom_checkpoint_1.pkl" in one.path for one in source.left_out)
    with pytest.raises((UsageError, MismatchError)):
        source.get_component("state1")
