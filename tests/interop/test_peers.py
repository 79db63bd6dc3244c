"""Checkpoints that other libraries have made, `tests/golden/peers`: each opens as a source, whole.

Tensors and values are those that the library itself has read back when the samples were made.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.interop.opening import open_source
from holdfast.interop.source import Source, read_pieces

PEERS = Path(__file__).parents[1] / "golden" / "peers"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A file or folder of a peer, and what it is as a source."""

    path: str
    format: str
    step: int | None = None
    components: Mapping[str, str]
    """By component, where it is in what the peer has read: a file, and keys, joined by `/`."""
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By component, keys of what the peer has read that are in other components."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names in `model` that its class ties to another, and its file leaves out."""
    left_out: tuple[str, ...] = ()


SAMPLES = (
    Sample(
        path="lightning/last.ckpt",
        format="lightning",
        step=3,
        components={
            "model": "last.ckpt|state_dict",
            "optimizer": "last.ckpt|optimizer_states/0",
            "scheduler": "last.ckpt|lr_schedulers/0",
            "trainer": "last.ckpt|",
        },
        without={"trainer": ("state_dict", "optimizer_states", "lr_schedulers")},
    ),
    Sample(
        path="transformers/checkpoint-3",
        format="hf-trainer",
        step=3,
        components={
            "model": "checkpoint-3/model.safetensors|",
            "optimizer": "checkpoint-3/optimizer.pt|",
            "scheduler": "checkpoint-3/scheduler.pt|",
            "rng": "checkpoint-3/rng_state.pth|",
            "trainer": "checkpoint-3/trainer_state.json|",
        },
        tied={"lm_head.weight": "transformer.wte.weight"},
        left_out=("training_args.bin",),
    ),
    Sample(path="peft/state.pt", format="torch", components={"model": "state.pt|model"}),
    Sample(
        path="accelerate/state",
        format="accelerate",
        components={
            "model": "state/model.safetensors|",
            "optimizer": "state/optimizer.bin|",
            "scheduler": "state/scheduler.bin|",
            "rng": "state/random_states_0.pkl|",
            "state": "state/custom_checkpoint_0.pkl|",
        },
    ),
    Sample(
        path="ignite/checkpoint_3.pt",
        format="ignite",
        step=3,
        components={
            "model": "checkpoint_3.pt|model",
            "optimizer": "checkpoint_3.pt|optimizer",
            "scheduler": "checkpoint_3.pt|lr_scheduler",
            "trainer": "checkpoint_3.pt|trainer",
        },
    ),
    *(
        Sample(
            path=f"composer/ba3.pt.{ending}",
            format="composer",
            step=3,
            components={
                "model": "ba3.pt|state/model",
                "optimizer": "ba3.pt|state/optimizers/AdamW",
                "scheduler": "ba3.pt|state/schedulers/StepLR",
                "data": "ba3.pt|state/dataset_state",
                "rng": "ba3.pt|rng",
            },
        )
        for ending in ("tar.gz", "zst", "lz4")
    ),
    Sample(
        path="dcp/one",
        format="dcp",
        step=3,
        components={"model": "one|model", "optimizer": "one|optim", "state": "one|"},
        without={"state": ("model", "optim")},
    ),
    Sample(
        path="dcp24/one",
        format="dcp",
        step=3,
        components={"model": "one|model", "optimizer": "one|optimizer", "state": "one|"},
        without={"state": ("model", "optimizer")},
    ),
    Sample(path="dcp/six", format="dcp", components={"model": "six|"}),
    Sample(
        path="dcp/two",
        format="dcp",
        step=3,
        components={"model": "two|model", "state": "two|"},
        without={"state": ("model",)},
    ),
    Sample(path="dcp/safetensors", format="dcp", components={"model": "safetensors|"}),
    Sample(path="dcp/sharded", format="dcp", components={"model": "sharded|"}),
    Sample(
        path="olmo/step3",
        format="olmo-core",
        step=3,
        components={"data": "train|data_loader", "rng": "train|rng", "trainer": "train|"},
        without={"trainer": ("data_loader", "rng")},
    ),
    *(
        Sample(
            path=path,
            format="megatron",
            step=3,
            components={
                "model": "iter_0000003|model",
                "rng": "iter_0000003|rng_state",
                "scheduler": "iter_0000003|opt_param_scheduler",
                "state": "iter_0000003|",
            },
            without={"state": ("model", "optimizer", "rng_state", "opt_param_scheduler")},
        )
        for path in ("megatron", "megatron/iter_0000003")
    ),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.path)
def test_a_peers_own_checkpoint_opens_with_all_that_the_peer_reads(sample: Sample) -> None:
    record = Record(sample.path.partition("/")[0])
    with open_source(str(PEERS / sample.path)) as source:
        assert (source.format, source.step) == (sample.format, sample.step)
        assert sorted(one.path for one in source.left_out) == sorted(sample.left_out)
        assert {*sample.components} <= {*source.parts}
        for name, place in sample.components.items():
            expected = record.at(place)
            for key in sample.without.get(name, ()):
                del expected[key]
            if name == "model":
                expected |= {tied: expected[other] for tied, other in sample.tied.items()}
            assert values_of(source, name) == expected, name


def test_items_of_olmo_core_are_those_that_it_reads_by_name() -> None:
    items = Record("olmo").at("model_and_optim|")
    with open_source(str(PEERS / "olmo" / "step3")) as source:
        found = {
            f"{prefix}.{name}": value
            for prefix, component in (("model", "model"), ("optim", "optimizer"))
            for name, value in values_of(source, component).items()
        }
        config = source.get_component("state").tree["config"]
    assert found == items
    assert config == json.loads((PEERS / "olmo" / "step3" / "config.json").read_text())


def test_sharded_tensors_and_options_of_megatron_make_its_optimizer() -> None:
    optimizer = Record("megatron").at("iter_0000003|optimizer")
    with open_source(str(PEERS / "megatron")) as source:
        found = values_of(source, "optimizer")
    [(key, tensor)] = [one for one in found.items() if one[0].startswith("state.exp_avg.")]
    assert tensor == optimizer["exp_avg"]
    assert found == {key: tensor, "param_groups": optimizer["param_groups"]}


def test_every_sample_is_read() -> None:
    beside = {"cerebras", "deepspeed", "mindspore"}  # by tests of their own, in `sources`
    names = {path.parent.name for path in PEERS.glob("*/versions.json")}
    assert names - beside == {sample.path.partition("/")[0] for sample in SAMPLES}


@dataclass(frozen=True)
class Tensor:
    """Dtype, shape and row-major bytes of a tensor or an array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Record:
    """What a peer has read back of its files."""

    def __init__(self, peer: str) -> None:
        self._files = json.loads((PEERS / peer / "expected.json").read_text())
        with np.load(PEERS / peer / "expected.npz") as arrays:
            self._data = arrays["bytes"].tobytes()

    def at(self, place: str) -> Any:
        """Return the values at a file and keys."""
        file, _, keys = place.partition("|")
        value = self._value(self._files[file])
        for key in filter(None, keys.split("/")):
            value = value[int(key) if isinstance(value, list) else key]
        return value

    def _value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._value(one) for one in node]
        if not isinstance(node, dict):
            return _plain(node)
        [first, *_] = [*node, ""]
        return self._special(first, node[first]) if first.startswith("$") else self._dict(node)

    def _dict(self, node: dict[str, Any]) -> dict[str, Any]:
        return {key: self._value(value) for key, value in node.items()}

    def _special(self, kind: str, value: Any) -> Any:
        if kind in ("$tensor", "$array"):
            dtype, shape, start = value
            nbytes = math.prod(shape) * _ITEM_NBYTES[dtype]
            return Tensor(dtype, tuple(shape), self._data[start : start + nbytes])
        if kind in ("$tuple", "$set", "$frozenset"):
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[kind](self._value(value))
        if kind in ("$dict", "$ordered", "$counter"):
            make = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[kind]
            return make({self._value(key): self._value(one) for key, one in value})
        return _SPECIAL[kind](value)


_ITEM_NBYTES = {"BOOL": 1, "U8": 1, "BF16": 2, "F16": 2, "I32": 4, "U32": 4, "F32": 4} | {
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_SPECIAL: dict[str, Any] = {
    "$float": lambda text: _plain(float(text)),
    "$bytes": base64.b64decode,
    "$path": PurePath,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$datetime": datetime.datetime.fromisoformat,
    "$size": tuple,
    "$dtype": lambda name: name,
    "$device": lambda name: name,
    "$object": lambda name: f"an object of {name}",
}


def _plain(value: Any) -> Any:
    return "not a number" if isinstance(value, float) and math.isnan(value) else value


def values_of(source: Source, component: str) -> Any:
    """Return a component as values, its tensors read."""
    part = source.get_component(component)
    read: dict[str, bytes] = dict.fromkeys(part.specs, b"")
    for piece in read_pieces(source, [(component, key) for key in part.specs]):
        read[piece.key] += bytes(piece.memory)

    def value(node: Any) -> Any:
        if isinstance(node, TensorRef | ArrayRef):
            spec = part.specs[node.key]
            return Tensor(spec.dtype, spec.shape, read[node.key])
        if isinstance(node, dict):
            return {key: value(one) for key, one in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(value(one) for one in node)
        if isinstance(node, msgspec.Struct):
            return node
        return _plain(node)

    return value(part.tree)
