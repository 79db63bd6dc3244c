"""R38: trees of several ranks are joined by name, or refused with every path."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import UnsupportedState
from holdfast.format.nodes import SizeTuple, TensorRef
from holdfast.format.objects import decode_tree, document
from holdfast.state.capture.byrank import join_by_name
from holdfast.state.capture.capture import capture
from stages import Stage


def tree(value: Any, **beside: Any) -> bytes:
    return document(value, beside=beside).data


def trees(stages: list[Stage], component: str) -> list[bytes]:
    return [capture(stage.state).components[component].tree for stage in stages]


def paths(kind: str, parts: list[bytes]) -> list[str]:
    with pytest.raises(UnsupportedState) as caught:
        join_by_name("c", kind, parts)
    return caught.value.paths


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, -0.0, float("nan"), 1.0])
    | st.text("ab", max_size=2)
    | st.builds(TensorRef, st.sampled_from(["k", "l"]))
    | st.builds(SizeTuple, st.tuples(st.integers(0, 3))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)
NAMES = st.dictionaries(st.text("abc", min_size=1, max_size=2), VALUES, max_size=4)


@given(whole=NAMES, data=st.data())
def test_parts_of_one_tree_are_joined_to_that_tree(whole: dict[str, Any], data: Any) -> None:
    some = [data.draw(st.sets(st.sampled_from([*whole]))) if whole else set() for _ in range(3)]
    parts = [{name: whole[name] for name in whole if name in names} for names in some]
    rest = {name: value for name, value in whole.items() if not any(name in one for one in parts)}
    found = decode_tree(join_by_name("c", "module", [*map(tree, [*parts, rest])]), what="")
    assert found.keys() == whole.keys()
    assert all(tree(found[name]) == tree(whole[name]) for name in whole)


@given(first=NAMES, second=NAMES)
def test_every_name_with_two_values_is_refused(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    differing = [n for n in second if n in first and tree(first[n]) != tree(second[n])]
    if differing:
        found = paths("module", [tree(first), tree(second)])
        assert [path.split(".")[1] for path in found] == differing
    else:
        join_by_name("c", "module", [tree(first), tree(second)])


def test_equal_trees_are_taken_as_they_are() -> None:
    assert join_by_name("c", "module", [b"not looked at"] * 3) == b"not looked at"


@pytest.mark.parametrize("component", ["model", "optimizer"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_part_beside_the_whole_adds_nothing(component: str, is_trained: bool) -> None:
    stages = [Stage(range(4)), Stage([1, 2]), Stage([3])]
    if is_trained:
        for stage in stages:
            stage.train()
    whole, *parts = trees(stages, component)
    kind = "module" if component == "model" else "optimizer"
    assert join_by_name("c", kind, [whole, *parts]) == whole


def test_an_error_names_both_ranks_and_both_values() -> None:
    parts = [tree({"a": 1}), tree({"a": 1}), tree({"a": 2}), tree({"b": 1})]
    with pytest.raises(UnsupportedState, match=r"c\.a: on rank 0 it is 1, on rank 2 2"):
        join_by_name("c", "module", parts)


@pytest.mark.parametrize(
    ("one", "other", "path", "shown"),
    [
        ({"n": 1, "loss": 0.5}, {"n": 1, "loss": 0.25}, "c.w.loss", "0.5, on rank 1 0.25"),
        ([1, {"a": (2, 3)}], [1, {"a": (2, 4)}], "c.w.1.a.1", "3, on rank 1 4"),
        ({"a": 1}, {"a": 1, "b": None}, "c.w.b", "absent, on rank 1 None"),
        (1, 1.0, "c.w", "1, on rank 1 1.0"),
        ([1, 2], [1], "c.w", "[1, 2], on rank 1 [1]"),
        (
            "x" * 99 + "a",
            "x" * 99 + "b",
            "c.w",
            "…" + "x" * 20 + "a', on rank 1 …" + "x" * 20 + "b'",
        ),
    ],
)
def test_an_error_shows_the_entry_that_differs(one: Any, other: Any, path: str, shown: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        join_by_name("c", "module", [tree({"w": one}), tree({"w": other})])
    ((found, reason),) = caught.value.offenders
    assert found == path
    assert f"on rank 0 it is {shown}; " in reason


def test_versions_of_submodules_are_joined_and_must_agree() -> None:
    first, second = (tree({name: 1}, versions={name: 3}) for name in "ab")
    joined = join_by_name("c", "module", [first, second])
    assert joined == tree({"a": 1, "b": 1}, versions={"a": 3, "b": 3})
    other = tree({"b": 1}, versions={"a": 4})
    assert paths("module", [first, other]) == ["c.versions.a"]


def change_lr(stage: Stage) -> None:
    stage.optimizer.param_groups[1]["lr"] = 0.5


def add_option(stage: Stage) -> None:
    stage.optimizer.param_groups[1]["mine"] = 1


def add_group(stage: Stage) -> None:
    stage.optimizer.add_param_group({"params": []})


def swap_groups(stage: Stage) -> None:
    first, second = stage.optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def drop_slots(stage: Stage) -> None:
    stage.optimizer.state.pop(stage.model["layers"]["1"].weight)


def set_extra(stage: Stage) -> None:
    stage.optimizer.state["mine"] = 1


def add_stranger(stage: Stage) -> None:
    stage.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_lr, ["c.param_groups.1.lr"]),
        (add_option, ["c.param_groups.1"]),
        (add_group, ["c.number of param_groups"]),
        (swap_groups, [f"c.layers.1.{name} in param_groups" for name in ("bias", "weight")]),
        (drop_slots, ["c.slots.layers.1.weight"]),
        (set_extra, ["c.extra.mine"]),
        (add_stranger, ["c.group0.param2"]),
    ],
)
def test_what_differs_in_optimizers_is_refused_by_path(change: Any, expected: list[str]) -> None:
    stages = [Stage([0, 1]), Stage([1, 2])]
    for stage in stages:
        stage.train()
    change(stages[1])
    assert sorted(paths("optimizer", trees(stages, "optimizer"))) == expected
