"""Folders as `save_pretrained` writes them: shards, ties, adapters and the files beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.interop.sources.reads import by_path, data_of, read

from holdfast.errors import FormatError, StoreError
from holdfast.interop.opening import open_source
from holdfast.interop.sources import huggingface

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_weights() -> dict[str, torch.Tensor]:
    return {
        "transformer.wte.weight": torch.randn(8, 4),
        "transformer.h.0.bias": torch.randn(4).bfloat16(),
        "transformer.steps": torch.tensor(3),
        "transformer.mask": torch.tensor([True, False]),
    }


def save_config(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def make_shards(
    folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], index: Any = None
) -> None:
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name, {"format": "pt"})
    places = {key: name for name, tensors in shards.items() for key in tensors}
    document = {"metadata": {"total_size": 1}, "weight_map": places} if index is None else index
    (folder / INDEX).write_text(json.dumps(document))


def test_a_folder_of_one_file_gives_weights_and_the_files_beside_them(tmp_path: Path) -> None:
    weights = make_weights()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    save_config(tmp_path, architectures=["GPT2Model"])
    (tmp_path / "tokenizer.json").write_bytes(b'{"x": "\xc3\xa4"}')
    (tmp_path / "merges.txt").write_bytes(b"")
    with open_source(str(tmp_path)) as source:
        assert source.format == "huggingface"
        assert by_path(source) == {name: data_of(tensor) for name, tensor in weights.items()}
        assert read(source, "files") == {
            name: (tmp_path / name).read_bytes()
            for name in ("config.json", "merges.txt", "tokenizer.json")
        }
        assert [*source.left_out] == []
        assert {*source.parts} == {"model", "files"}


def test_shards_are_one_component(tmp_path: Path) -> None:
    weights = make_weights()
    names = [*weights]
    first, second = ({name: weights[name] for name in some} for some in (names[:1], names[1:]))
    make_shards(tmp_path, {FIRST: first, SECOND: second})
    with open_source(str(tmp_path)) as source:
        assert by_path(source) == {name: data_of(tensor) for name, tensor in weights.items()}
        assert source.get_component("model").specs["transformer.steps"].shape == ()
        assert {*source.parts} == {"model"}, "neither index nor shards are carried along as files"


@pytest.mark.parametrize(
    ("architecture", "stored", "tied"),
    [
        ("GPT2LMHeadModel", "transformer.wte.weight", {"lm_head.weight"}),
        ("LlamaForCausalLM", "model.embed_tokens.weight", {"lm_head.weight"}),
        (
            "MT5ForConditionalGeneration",
            "shared.weight",
            {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"},
        ),
        (
            "WhisperForConditionalGeneration",
            "model.decoder.embed_tokens.weight",
            {"proj_out.weight"},
        ),
        ("GPT2Model", "wte.weight", set()),
        ("OurOwn", "transformer.wte.weight", set()),
    ],
)
def test_names_that_the_model_ties_share_a_tensor(
    tmp_path: Path, architecture: str, stored: str, tied: set[str]
) -> None:
    save_file({stored: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    save_config(tmp_path, architectures=[architecture])
    with open_source(str(tmp_path)) as source:
        leaves = source.get_component("model").leaves
        assert {*leaves} == {stored, *tied}
        assert {leaf.key for leaf in leaves.values()} == {stored}
    save_config(tmp_path, architectures=[architecture], tie_word_embeddings=False)
    with open_source(str(tmp_path)) as source:
        assert {*source.get_component("model").leaves} == {stored}


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.ones(2), "lm_head.weight": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors")
    save_config(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    with open_source(str(tmp_path)) as source:
        assert by_path(source) == {name: data_of(tensor) for name, tensor in weights.items()}


def test_an_adapter_is_the_model_unless_there_is_one(tmp_path: Path) -> None:
    save_file({"lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with open_source(str(tmp_path)) as source:
        assert {*source.parts} == {"model", "files"}
        assert {*read(source, "files")} == {"adapter_config.json"}
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_source(str(tmp_path)) as source:
        assert {*read(source, "model")} == {"weight"}
        assert {*read(source, "adapter")} == {"lora_A.weight"}


def test_what_is_not_carried_along_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "MAX_CARRIED_NBYTES", 100)
    monkeypatch.setattr(huggingface, "MAX_CARRIED_FILES", 2)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("model.fp16.safetensors", "tf_model.h5", "training_args.bin", "a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("c.txt", ".gitattributes"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "big.txt").write_bytes(bytes(101))
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with open_source(str(tmp_path)) as source:
        assert {*read(source, "files")} == {"a.txt", "b.txt"}
        assert {one.path: one.why for one in source.left_out} == {
            ".gitattributes": "a hidden file",
            "big.txt": "101 bytes; files up to 100 are carried along",
            "c.txt": "more than 2 files",
            "model.fp16.safetensors": "not the weights that were opened",
            "pipe": "not a regular file",
            "runs": "a folder",
            "tf_model.h5": "not the weights that were opened",
            "training_args.bin": "a pickle, which is not opened",
        }


def test_a_link_out_of_the_folder_is_not_carried_along_but_one_into_the_cache_is(
    tmp_path: Path,
) -> None:
    """R27: what is elsewhere, such as a key, must not get into a checkpoint."""
    folder = tmp_path / "models--a" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (tmp_path / "models--a" / "blobs").mkdir()
    blob = tmp_path / "models--a" / "blobs" / "12ab"
    blob.write_text("{}")
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    (folder / "vocab.txt").symlink_to("../../../secret")
    (folder / "config.json").symlink_to("../../blobs/12ab")
    (folder / "again.json").symlink_to("config.json")
    with open_source(str(folder)) as source:
        assert {*source.get_component("files").tree} == {"again.json", "config.json"}
        assert [(one.path, one.why) for one in source.left_out] == [
            ("vocab.txt", "a link that leads out of the folder")
        ]


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "."),
        *("C:\\x.safetensors", "C:x.safetensors", "x\0.safetensors", "config.json", ""),
    ],
)
def test_an_index_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    make_shards(folder, {}, {"weight_map": {"w": name}})
    with pytest.raises(FormatError, match="is not a name in this folder"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"a": FIRST, "b": SECOND}, rf"'c' in {SECOND} is not listed"),
        ({"a": FIRST, "b": FIRST, "c": SECOND}, rf"'b' is not in {FIRST}"),
        ({"a": FIRST, "b": SECOND, "c": SECOND, "d": SECOND}, rf"'d' is not in {SECOND}"),
        ({"a": FIRST, "b": "model-00003-of-00002.safetensors"}, "model-00003.* is missing"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, listed: dict[str, str], message: str
) -> None:
    make_shards(
        tmp_path,
        {FIRST: {"a": torch.ones(1)}, SECOND: {"b": torch.ones(1), "c": torch.ones(1)}},
        {"weight_map": listed},
    )
    with pytest.raises(FormatError, match=message):
        open_source(str(tmp_path))


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    both = {"a": torch.ones(1)}
    listed = {"a": FIRST, "b": SECOND}
    make_shards(
        tmp_path, {FIRST: both, SECOND: {**both, "b": torch.ones(1)}}, {"weight_map": listed}
    )
    with pytest.raises(FormatError, match=rf"'a' is in {FIRST} and in {SECOND}"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}]
)
def test_what_is_no_index_is_refused(tmp_path: Path, index: Any) -> None:
    make_shards(tmp_path, {}, index)
    with pytest.raises(FormatError, match="no `weight_map`"):
        open_source(str(tmp_path))


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "a.txt").write_bytes(bytes(10))
    with open_source(str(tmp_path)) as source:
        (tmp_path / "a.txt").write_bytes(bytes(9))
        with pytest.raises(StoreError, match=r"a\.txt: was written to"):
            read(source, "files")


def test_a_folder_of_a_trainer_is_not_a_model_folder(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert huggingface.recognises(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert not huggingface.recognises(tmp_path)


def test_pickled_weights_are_read_by_their_own_source(tmp_path: Path) -> None:
    """Shards of `pytorch_model.bin`: nothing in them is run."""
    shards = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.randn(3, 3)},
        "pytorch_model-00002-of-00002.bin": {"b": torch.randn(2).bfloat16(), "c": torch.tensor(7)},
    }
    for name, tensors in shards.items():
        torch.save(tensors, tmp_path / name)
    places = {key: name for name, tensors in shards.items() for key in tensors}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with open_source(str(tmp_path)) as source:
        assert source.format == "huggingface"
        assert by_path(source) == {
            key: data_of(tensor) for tensors in shards.values() for key, tensor in tensors.items()
        }
