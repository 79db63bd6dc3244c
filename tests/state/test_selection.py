"""Which paths an entry names, and which leaves `include` and `skip` leave to be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from holdfast.errors import MismatchError, UsageError
from holdfast.state.patterns import covers
from holdfast.state.selection import Selection, names_of_keys
from state.roundtrip import digest, image, raw_bytes, train


def names(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """What the documentation says, as plainly as can be: the pattern names exactly this path."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return names(pattern[1:], path) or (bool(path) and names(pattern, path[1:]))
    return bool(path) and is_one(pattern[0], path[0]) and names(pattern[1:], path[1:])


def is_one(pattern: str, segment: str) -> bool:
    """The same of one segment: `*` is any characters, every other one is itself."""
    if pattern[:1] == "*":
        return any(is_one(pattern[1:], segment[at:]) for at in range(len(segment) + 1))
    return pattern[:1] == segment[:1] and (not pattern or is_one(pattern[1:], segment[1:]))


def names_it_or_above(pattern: Sequence[str], path: Sequence[str]) -> bool:
    return any(names(pattern, path[:i]) for i in range(len(path) + 1))


SEGMENTS = st.sampled_from(["a", "b", "0", "w[0]", "x/y", "?", "*", "", "aba", "abba", "ab"])
PATTERNS = st.lists(
    st.one_of(SEGMENTS, st.sampled_from(["*", "**", "*a", "w*", "x*y", "*a*", "a*b*a", "?*"])),
    min_size=1,
    max_size=6,
)


@given(pattern=PATTERNS, path=st.lists(SEGMENTS, min_size=1, max_size=7))
def test_matching_is_what_a_plain_recursive_definition_says(
    pattern: list[str], path: list[str]
) -> None:
    """D58: `*` stays inside its segment, `**` is any number, and nothing else means anything."""
    assert covers(pattern, path) is names_it_or_above(pattern, path)


def test_many_stars_do_not_take_exponential_time() -> None:
    """A checkpoint may hold a name with very many dots."""
    assert not covers(["**", "a"] * 50 + ["b"], ["a"] * 2000)


def trees() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "w[0]", 0, 1])
    return st.recursive(
        st.integers(0, 3),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3)
        ),
        max_leaves=8,
    )


def leaves(tree: Any, path: str) -> dict[str, Any]:
    if isinstance(tree, dict):
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= leaves(value, f"{path}.{key}")
        return found
    if isinstance(tree, list):
        return {k: v for i, item in enumerate(tree) for k, v in leaves(item, f"{path}.{i}").items()}
    return {path: tree}


def shifted(tree: Any) -> Any:
    """The same tree with other values."""
    if isinstance(tree, dict):
        return {key: shifted(value) for key, value in tree.items()}
    return [shifted(item) for item in tree] if isinstance(tree, list) else tree + 100


ENTRIES = st.lists(
    st.lists(st.sampled_from(["a", "b", "w[0]", "0", "1", "*", "**"]), min_size=1, max_size=3),
    max_size=2,
)


@given(
    tree=st.dictionaries(st.sampled_from(["a", "b", 0]), trees(), max_size=3),
    include=ENTRIES,
    skip=ENTRIES,
)
def test_of_two_trees_alike_exactly_the_named_leaves_are_loaded(
    tree: dict[Any, Any], include: list[list[str]], skip: list[list[str]]
) -> None:
    """D22, D58: include first, then skip; what is not named keeps its live value."""
    live = shifted(tree)
    before, stored = leaves(live, "data"), leaves(tree, "data")

    def is_loaded(path: str) -> bool:
        parts = path.split(".")[1:]
        is_in = not include or any(names_it_or_above(entry, parts) for entry in include)
        return is_in and not any(names_it_or_above(entry, parts) for entry in skip)

    try:
        image({"data": tree}).load(
            {"data": live},
            components=["data"],
            strict=False,
            include=[".".join(["data", *entry]) for entry in include],
            skip=[".".join(["data", *entry]) for entry in skip],
        )
    except UsageError as error:
        if "nothing would be loaded" not in str(error):
            raise
        assert not any(map(is_loaded, before))
    after = leaves(live, "data")
    assert after.keys() == before.keys()
    for path in after:
        assert after[path] == (stored if is_loaded(path) else before)[path]


def test_a_number_and_its_text_as_keys_of_one_dict_have_two_names() -> None:
    """D58: int key 0 and string key "0" are not taken for one another."""
    assert list(names_of_keys([0, "0", 1, True, None, 1.5]).values()) == [
        "int(0)", "0", "True", "None", "1.5",
    ]  # fmt: skip
    live = {0: "live", "0": "live"}
    image({"data": {0: "stored", "0": "stored"}}).load({"data": live}, skip=["data.int(0)"])
    assert live == {0: "live", "0": "stored"}
    live = {0: "live", "0": "live"}
    image({"data": {0: "stored", "0": "stored"}}).load({"data": live}, skip=["data.0"])
    assert live == {0: "stored", "0": "live"}


def test_names_of_strange_keys_are_short_and_never_fail() -> None:
    assert list(names_of_keys([1 << 5000, (1, 2), b"x"]).values()) == [
        "<int>", "<tuple>", "<bytes>",
    ]  # fmt: skip


def whole(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    state = {
        "model": model,
        "optimizer": optimizer,
        "progress": {"step": seed, "log": [seed, seed]},
        "sampler": torch.Generator().manual_seed(seed),
    }
    train(model, optimizer, 1)
    return state


def slot(state: dict[str, Any], parameter: str, name: str) -> torch.Tensor:
    parameters = dict(state["model"].named_parameters())
    tensor: torch.Tensor = state["optimizer"].state[parameters[parameter]][name]
    return tensor


def test_include_is_the_opposite_of_skip_in_every_kind_of_component() -> None:
    stored, live, before = whole(0), whole(1), whole(1)
    prepared = image(stored).load(
        live,
        include=["model.*.bias", "optimizer.**.exp_avg", "progress.log", "rng.python"],
        skip=["model.1", "optimizer.1.weight", "progress.log.0"],
    )
    assert raw_bytes(live["model"][0].bias) == raw_bytes(stored["model"][0].bias)
    for layer in (0, 1):
        kept = before["model"][layer]
        assert raw_bytes(live["model"][layer].weight) == raw_bytes(kept.weight)
    assert raw_bytes(live["model"][1].bias) == raw_bytes(before["model"][1].bias)
    for parameter, name, source in (
        ("0.weight", "exp_avg", stored),
        ("0.weight", "exp_avg_sq", before),
        ("1.weight", "exp_avg", before),
        ("1.bias", "exp_avg", stored),
    ):
        found, expected = slot(live, parameter, name), slot(source, parameter, name)
        assert raw_bytes(found) == raw_bytes(expected), (parameter, name)
    assert live["optimizer"].param_groups[0]["lr"] == 0.2
    assert live["progress"] == {"step": 1, "log": [1, 0]}
    assert live["sampler"].initial_seed() == 1
    assert set(prepared.needed) == {"model", "optimizer", "progress", "rng"}
    assert prepared.needed["model"] == ("0.bias",)


def test_a_load_of_parts_says_what_it_left_alone() -> None:
    """D32: nothing is left out silently."""
    prepared = image(whole(0)).prepare(
        whole(1), skip=["optimizer", "model.*.weight"], include=["model", "optimizer", "progress"]
    )
    assert prepared.notes == (
        "not selected: optimizer, sampler, rng",
        "model: not selected, unchanged: 0.weight, 1.weight",
    )


def test_parts_are_reset_by_skipping_them() -> None:
    stored, live = whole(0), whole(1)
    optimizer = raw_bytes(slot(live, "0.weight", "exp_avg"))
    image(stored).load(live, skip=["optimizer", "progress", "sampler", "rng"])
    assert raw_bytes(live["model"][0].weight) == raw_bytes(stored["model"][0].weight)
    assert raw_bytes(slot(live, "0.weight", "exp_avg")) == optimizer
    assert live["progress"] == {"step": 1, "log": [1, 1]}


def test_an_object_of_which_nothing_is_wanted_is_not_loaded() -> None:
    class Object:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1, "b": 2}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls += 1

    live = Object()
    saved = image({"x": Object(), "progress": {"a": 1}})
    saved.load({"x": live, "progress": {"a": 0}}, include=["**.a"])
    calls = live.calls
    assert calls > 0
    saved.load({"x": live, "progress": {"a": 0}}, include=["**.a"], skip=["x.a"])
    assert live.calls == calls


@pytest.mark.parametrize("argument", ["include", "skip"])
@pytest.mark.parametrize("entry", ["nobody", "model.2", "**.nobody", "progress.log.7", "*.0.0.*"])
def test_an_entry_that_names_nothing_is_an_error_or_a_note(argument: str, entry: str) -> None:
    """D58, D47: under strict a miss is refused; otherwise it is told."""
    saved, live = image(whole(0)), whole(1)
    before = digest(live)
    others = ["model.0"] if argument == "include" else []
    with pytest.raises(UsageError, match=f"{argument}: nothing is called"):
        saved.prepare(live, **{argument: [*others, entry]})
    prepared = saved.prepare(live, strict=False, **{argument: [*others, entry]})
    assert f"{argument}: nothing is called ['{entry}']" in prepared.notes
    assert digest(live) == before


def test_an_entry_inside_of_what_another_one_names_is_no_miss() -> None:
    saved = image(whole(0))
    saved.prepare(whole(1), skip=["optimizer", "optimizer.0.weight", "model.*", "model.0.weight"])
    saved.prepare(whole(1), components=["model"], skip=["optimizer.0.weight"])


def test_both_names_of_a_renamed_leaf_may_be_used() -> None:
    stored, live = nn.ModuleDict({"old": nn.Linear(2, 2)}), nn.ModuleDict({"new": nn.Linear(2, 2)})
    kept = raw_bytes(live["new"].bias)
    rename = {"old.weight": "new.weight", "old.bias": "new.bias"}
    for skip in ("model.old.bias", "model.new.bias"):
        image({"model": stored}).load({"model": live}, rename=rename, skip=[skip])
        assert raw_bytes(live["new"].weight) == raw_bytes(stored["old"].weight)
        assert raw_bytes(live["new"].bias) == kept
    for include in ("model.old.bias", "model.new.bias"):
        prepared = image({"model": stored}).prepare(
            {"model": live}, rename=rename, include=[include]
        )
        assert prepared.needed == {"model": ("old.bias",)}


def test_strict_holds_for_what_is_included_in_every_component() -> None:
    """D32: a leaf that is asked for and is missing is an error in each component."""
    stored, live = whole(0), whole(1)
    live["model"].append(nn.Linear(2, 2))
    live["optimizer"].add_param_group({"params": list(live["model"][2].parameters())})
    with pytest.raises(MismatchError) as caught:
        image(stored).prepare(live, include=["model.2", "optimizer.2.weight"])
    assert caught.value.missing == ["model.2.weight", "model.2.bias", "optimizer.2.weight"]
    prepared = image(stored).prepare(live, strict=False)
    assert "model.2.bias: not in the checkpoint, unchanged" in prepared.notes
    image(stored).prepare(live, include=["model", "optimizer"], skip=["model.2", "optimizer.2"])


def test_a_part_of_a_tree_that_only_the_live_side_has_stays() -> None:
    live = {"a": {"x": 1, "y": 2}, "b": 3}
    image({"data": {"b": 4}}).load({"data": live}, include=["data.a.x", "data.b"])
    assert live == {"a": {"x": 1, "y": 2}, "b": 4}
    live = {"a": {"x": 1, "y": 2}, "b": 3}
    image({"data": {"b": 4}}).load({"data": live}, skip=["data.a.x"])
    assert live == {"a": {"x": 1}, "b": 4}


def test_only_text_is_an_entry() -> None:
    with pytest.raises(UsageError, match="every entry must be a str"):
        Selection(skip=[0])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="collection"):
        Selection(include="model")
