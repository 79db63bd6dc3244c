"""Hostile nodes of tensor subclasses: refused, with nothing imported, built or changed."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import FormatError, MismatchError
from holdfast.format.tensors import TensorSpec
from quantized import bits_in, scaled, scaled_model
from state.roundtrip import Image, digest, image

NAMES = (
    *("os:system", "subprocess:Popen", "builtins:eval", "builtins:exec", "posix:system"),
    *("torch:Tensor", "torch:load", "torch.nn.parameter:Parameter", "quantized:Twice", "nt:system"),
    *("this:s", "antigravity:fly", "holdfast.testing:anything", "quantized:Scaled.x", ":Scaled"),
    *("quantized:", "Scaled", "", ":", "quantized.Scaled", "quantized:scaled", "..:Scaled"),
    *("quantized:Scaled\x00", "quantized:Ｓcaled", "a" * 100_000, "a" * 5_000 + ":Scaled"),
)
SHAPES: tuple[Any, ...] = (
    *([], [4], [3, 4], [4, 3, 1], [12], [0, 3], [-4, 3], [4, -3], [4.0, 3.0], [True, 3]),
    *("4,3", None, {"$tuple": [4, 3]}, [[4, 3]], [2**62, 2**62], [2**200, 1], [10**30], 4),
)
DTYPES: tuple[Any, ...] = (
    *("float16", "int8", "complex64", "system", "torch.float32", "", "Float32", "load"),
    *(None, 3, ["float32"], {"$dtype": "float32"}, "f" * 1000, "float32 "),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**70, 1.5, "text", "", [], {}, [[]], {"a": 1}, [1, 2, 3]),
    *({"$tuple": []}, {"$set": [1]}, {"$frozenset": []}, {"$bytes": "AAAA"}, {"$size": [2, 2, 2]}),
    *(
        {"$dtype": "float64"},
        {"$float": "nan"},
        {"$path": "/etc/passwd"},
        {"$timedelta": [1, 2, 3]},
    ),
    *({"$tensor": "0.bias"}, {"$array": "0.bias"}, {"$scalar": ["F32", "00000000"]}, {"$same": 0}),
    *({"$same": 1}, {"$same": -1}, {"$same": 99}, {"$deque": [1, []]}, {"$counter": []}),
    *({"$ordered": [["a", 1]]}, {"$dict": [[1, 2]]}, {"$unknown": 1}, {"$subclass": {}}),
    *({"$generator": {"kind": "torch"}}, {"$ranks": [1]}, {"$enum": {}}, {"$dtype": "system"}),
    *({"$enum": {"type": "os:system", "name": "NEAR", "value": "id"}},),
    *({"$enum": {"type": "other:Mode", "name": "NEAR", "value": "near"}},),
    *({"$enum": {"type": "quantized:Mode", "name": None, "value": "near"}},),
    *({"$enum": {"type": "quantized:Mode", "name": "DOWN", "value": "near"}},),
    *({"$datetime": "2026-01-02"}, {"$device": "cuda:99999"}, {"$device": "../../etc"}),
)


def set_at(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a node with another value at a path; a missing one if it is `Ellipsis`."""
    made = copy.deepcopy(node)
    inner = made
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def nested(depth: int, part: Any) -> Any:
    """Subclasses inside of subclasses."""
    for _ in range(depth):
        part = {
            "$subclass": {
                "type": "quantized:Scaled",
                "shape": [4, 3],
                "dtype": "float32",
                "tensors": {"codes": part},
                "context": {},
            }
        }
    return part


def paths_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in items:
        yield (*path, name)
        if isinstance(value, dict | list) and "$device" not in value:
            yield from paths_in(value, (*path, name))


def hostile_nodes(node: dict[str, Any]) -> Iterator[Any]:
    """Nodes that are each different from a valid one in one way."""
    inside = ("$subclass",)
    yield from (set_at(node, (*inside, "type"), name) for name in NAMES)
    yield from (set_at(node, (*inside, "type"), value) for value in (None, 1, [], {"$bytes": ""}))
    yield from (set_at(node, (*inside, "shape"), value) for value in SHAPES)
    yield from (set_at(node, (*inside, "dtype"), value) for value in DTYPES)
    yield from (set_at(node, (*inside, name), ...) for name in node["$subclass"])
    yield from (set_at(node, (*inside, name), 1) for name in ("more", "grad", "$tensor", "class"))
    yield {**node, "more": 1}
    yield {"more": 1, **node}
    tensors = node["$subclass"]["tensors"]
    for value in (*VALUES, nested(1, tensors["codes"]), nested(3, {"$tensor": "0.weight.codes"})):
        yield set_at(node, (*inside, "tensors", "codes"), value)
    for name in (
        "__class__",
        "__dict__",
        "data",
        "grad",
        "a.b",
        "$type",
        "",
        "codes.scale",
        "x" * 999,
    ):
        yield set_at(node, (*inside, "tensors", name), tensors["codes"])
        yield set_at(
            set_at(node, (*inside, "tensors", name), tensors["codes"]),
            (*inside, "tensors", "codes"),
            ...,
        )
    for key in ("nothing", "0.bias", "0.weight.scale", "", "../0.weight.codes", 1, None, ["a"]):
        yield set_at(node, (*inside, "tensors", "codes", "$tensor"), key)
    yield set_at(node, (*inside, "tensors"), {})
    yield set_at(node, (*inside, "tensors"), [tensors["codes"], tensors["scale"]])
    for depth in (2, 10, 25, 60):
        yield nested(depth, {"$tensor": "0.weight.codes"})
    context = node["$subclass"]["context"]
    yield from (set_at(node, (*inside, "context"), value) for value in VALUES)
    yield set_at(node, (*inside, "context"), {**context, "more": None})
    for path in paths_in(context):
        yield set_at(node, (*inside, "context", *path), {"$path": "other"})
        yield set_at(node, (*inside, "context", *path), ...)
    for value in VALUES:
        yield set_at(node, (*inside, "context", "block"), value)
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    yield set_at(node, (*inside, "context", "names"), deep)
    yield set_at(node, (*inside, "context", "names"), ["a", "b" * 1_000_000])


def with_weight(stored: Image, node: Any) -> Image:
    """The image with another node for the weight."""
    part = stored.stored["model"]
    document = json.loads(part.tree)
    document["tree"]["0.weight"] = node
    made = copy.copy(stored)
    made.stored = {**stored.stored, "model": replace(part, tree=json.dumps(document).encode())}
    return made


def test_hostile_nodes_are_refused_and_change_nothing() -> None:
    stored, live = image({"model": scaled_model(1)}), {"model": scaled_model(2)}
    node = json.loads(stored.stored["model"].tree)["tree"]["0.weight"]
    with_weight(stored, node).load({"model": scaled_model(3)})  # the valid one
    before, imported = digest(live), {*sys.modules}
    known = [*live["model"].named_parameters()]
    num_nodes = 0
    for hostile in hostile_nodes(node):
        if hostile == node:
            continue
        num_nodes += 1
        made = with_weight(stored, hostile)
        try:
            made.load(live)
        except (FormatError, MismatchError):
            continue
        pytest.fail(f"loaded: {json.dumps(hostile)[:500]}")
    assert num_nodes >= 200
    assert {*sys.modules} == imported
    assert digest(live) == before
    assert all(
        a is b for (_, a), (_, b) in zip(known, live["model"].named_parameters(), strict=True)
    )


@pytest.mark.parametrize("spec", [("I8", (3, 4)), ("U8", (4, 3)), ("I8", (12,)), ("F32", (4, 3))])
def test_inner_tensors_of_other_shapes_and_types_are_refused(spec: Any) -> None:
    stored, live = image({"model": scaled_model(1)}), {"model": scaled_model(2)}
    part, key = stored.stored["model"], "0.weight.codes"
    tensors = {**part.tensors, key: TensorSpec(key, *spec)}
    stored.stored["model"] = replace(part, tensors=tensors)
    before = bits_in(live["model"])
    with pytest.raises(MismatchError, match=r"0\.weight\.codes"):
        stored.prepare(live)
    assert bits_in(live["model"]) == before


@pytest.mark.parametrize("live", [{"w": torch.ones(4, 3)}, {"w": None}, {}, {"w": {"codes": 1}}])
def test_a_tree_makes_no_class_without_a_live_tensor(live: Any) -> None:
    state = {"tree": {**live, "n": 1}}
    before = repr(state)
    with pytest.raises(MismatchError, match="Scaled"):
        image({"tree": {"w": scaled(1), "n": 2}}).load(state)
    assert repr(state) == before


def test_an_object_gets_no_class_without_a_live_tensor() -> None:
    class Keeps:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return {"w": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["w"]

    saved, live = Keeps(scaled(1)), Keeps(nn.Linear(1, 1).weight.detach())
    with pytest.raises(MismatchError, match="Scaled"):
        image({"keeps": saved}).load({"keeps": live})
