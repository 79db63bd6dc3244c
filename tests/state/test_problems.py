"""What a caller may leave out or rename, and that nothing asked for does nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import MismatchError, UsageError
from holdfast.state.selection import proposal
from state.roundtrip import assert_same_tensors, digest, image


def layers(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})


def test_a_rename_that_makes_two_names_one_is_refused() -> None:
    saved = image({"model": layers("a", "b")})
    state = {"model": layers("a", "b")}
    before = digest(state)
    for rename in ({"a.weight": "b.weight"}, lambda name: "b.weight"):
        with pytest.raises(UsageError, match=r"both become 'b\.weight'"):
            saved.prepare(state, rename=rename)
    assert digest(state) == before


def test_two_names_can_be_exchanged() -> None:
    original, resumed = layers("a", "b"), layers("a", "b")
    image({"model": original}).load(
        {"model": resumed}, rename={"a.weight": "b.weight", "b.weight": "a.weight"}
    )
    assert torch.equal(original["a"].weight, resumed["b"].weight)
    assert torch.equal(original["b"].weight, resumed["a"].weight)


def test_an_entry_that_renames_nothing_is_refused() -> None:
    """D47: a setting that would silently do nothing is an error."""
    with pytest.raises(UsageError, match="nothing stored is called \\['c'\\]"):
        image({"model": layers("a")}).prepare({"model": layers("a")}, rename={"c": "d"})


def test_a_callable_gets_names_and_nothing_that_is_live() -> None:
    """D22: what a caller's function gets, it may do anything with."""
    seen: list[Any] = []

    def rename(name: str) -> str:
        seen.append(name)
        return name

    image({"model": layers("a"), "data": {"x": 1}}).prepare(
        {"model": layers("a"), "data": {}}, rename=rename
    )
    assert seen == ["a.weight"]


def test_a_callable_that_gives_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match="not a name"):
        image({"model": layers("a")}).prepare({"model": layers("a")}, rename=lambda name: None)


@pytest.mark.parametrize("entry", ["nobody", "model.c", "model.a.weigh", "model.*.b", "mode", "a"])
def test_an_entry_that_skips_nothing_is_refused(entry: str) -> None:
    """D58: no silent miss."""
    with pytest.raises(UsageError, match="nothing is called"):
        image({"model": layers("a")}).prepare({"model": layers("a")}, skip=[entry])


def test_a_bare_text_is_no_collection_of_names() -> None:
    saved = image({"model": layers("a")})
    with pytest.raises(UsageError, match="collection"):
        saved.prepare({"model": layers("a")}, skip="model")
    with pytest.raises(UsageError, match="collection"):
        saved.prepare({"model": layers("a")}, components="model")


def test_what_is_skipped_is_neither_missing_nor_unexpected_nor_read() -> None:
    prepared = image({"model": layers("a", "old"), "gone": {}}).prepare(
        {"model": layers("a", "new"), "extra": {}},
        skip=["model.old", "model.new.weight", "gone", "extra"],
    )
    assert prepared.needed["model"] == ("a.weight",)
    assert set(prepared.needed) == {"model", "rng"}


def test_components_that_only_one_side_has_are_listed() -> None:
    saved = image({"model": layers("a"), "stored": {}})
    state = {"model": layers("a"), "live": {}}
    with pytest.raises(MismatchError) as caught:
        saved.prepare(state)
    assert caught.value.missing == ["live (the whole component)"]
    assert caught.value.unexpected == ["stored (the whole component)"]
    prepared = saved.prepare(state, strict=False)
    assert prepared.notes == (
        "live (the whole component): not in the checkpoint, unchanged",
        "stored (the whole component): in the checkpoint only, not loaded",
    )


def test_a_subset_of_the_components_is_loaded() -> None:
    saved = image({"model": layers("a"), "stored": {}})
    state = {"model": layers("a"), "live": {}}
    assert set(saved.prepare(state, components=["model"]).needed) == {"model"}
    with pytest.raises(MismatchError, match="live"):
        saved.prepare(state, components=["live"])
    with pytest.raises(MismatchError, match="stored"):
        saved.prepare(state, components=["stored"])
    with pytest.raises(UsageError, match="neither live nor stored"):
        saved.prepare(state, components=["nobody"])


def test_a_component_of_another_kind_is_refused() -> None:
    saved = image({"x": {}})
    with pytest.raises(MismatchError, match="x: stored as tree, live as module"):
        saved.prepare({"x": layers("a")}, strict=False)


def within(parts: list[str], model: nn.Module) -> nn.Module:
    for part in reversed(parts):
        model = nn.ModuleDict({part: model})
    return model


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    assert_same_tensors(*(dict(enumerate(model.parameters())) for model in (one, other)))


@pytest.mark.parametrize("prefix", ["module.", "model.", "_forward_module.module."])
def test_paths_that_differ_by_a_prefix_come_with_the_rename(prefix: str) -> None:
    plain, longer = layers("fc"), within(prefix.split(".")[:-1], layers("fc"))
    rules = {
        f'name.removeprefix("{prefix}")': (longer, plain),
        f'"{prefix}" + name': (plain, longer),
    }
    for rule, models in rules.items():
        saved, live = (
            {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
            for model in models
        )
        with pytest.raises(MismatchError) as caught:
            image(saved).prepare(live)
        assert f"rename=lambda name: {rule}" in str(caught.value)
        image(saved).load(live, rename=eval(f"lambda name: {rule}"))
        assert_same_weights(*models)


def test_prefixes_that_live_names_never_have_come_with_the_rename() -> None:
    """Of a file of another program: live names are without the parts of torch.compile."""
    for prefix in ("_orig_mod.", "_orig_mod.module.", "module._orig_mod."):
        found = proposal([([f"{prefix}fc.weight"], ["fc.weight"])])
        assert found is not None
        assert f'rename=lambda name: name.removeprefix("{prefix}")' in found


def test_a_wrapper_inside_of_the_names_comes_with_the_rename() -> None:
    saved = nn.ModuleDict(
        {"enc": nn.ModuleDict({"module": layers("submodule")}), "head": layers("a")}
    )
    live = nn.ModuleDict({"enc": layers("submodule"), "head": layers("a")})
    with pytest.raises(MismatchError, match="rename=lambda name: ") as caught:
        image({"model": saved}).prepare({"model": live})
    rule = str(caught.value).partition("rename=")[2].splitlines()[0]
    image({"model": saved}).load({"model": live}, rename=eval(rule))
    assert_same_weights(saved, live)


def test_no_rename_is_proposed_that_would_break_another_name() -> None:
    """`module.fc` fits already, so that the prefix cannot go from every name."""
    saved = nn.ModuleDict({"module": layers("fc", "head")})
    live = nn.ModuleDict({"module": layers("fc"), "head": layers("head")["head"]})
    with pytest.raises(MismatchError) as caught:
        image({"model": saved}).prepare({"model": live})
    assert "rename=" not in str(caught.value)


def heads(size: int) -> dict[str, Any]:
    """A model of two layers with heads for `size` classes, and its optimizer."""
    torch.manual_seed(size)
    parts = {f"layer{n}": nn.ModuleDict({"body": nn.Linear(2, 2)}) for n in (1, 2)}
    for part in parts.values():
        part["head"] = nn.Linear(2, size)
    model = nn.ModuleDict({**parts, "mean": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_parameters_of_other_shapes_come_with_the_skip_that_leaves_them_out() -> None:
    saved, live = heads(3), heads(5)
    before = image(saved)
    with pytest.raises(MismatchError) as caught:
        before.prepare(live)
    skip = eval(re.search(r"skip=(\[.+?\])", str(caught.value))[1])  # type: ignore[index]
    assert skip == ["model.**.head", "optimizer.**.head"]
    kept = live["optimizer"].state[live["model"]["layer1"]["head"].weight]["exp_avg"].clone()
    before.load(live, skip=skip)
    for name, parameter in live["model"].named_parameters():
        same = saved["model"].get_parameter(name)
        assert ("head" in name) is (parameter.shape != same.shape)
        if "head" not in name:
            assert torch.equal(parameter, same)
            of_each = (live["optimizer"].state[parameter], saved["optimizer"].state[same])
            assert torch.equal(*(held["exp_avg"] for held in of_each))
    head = live["model"]["layer1"]["head"].weight
    assert torch.equal(live["optimizer"].state[head]["exp_avg"], kept)


def test_no_skip_is_proposed_if_nothing_fits() -> None:
    with pytest.raises(MismatchError) as caught:
        image({"model": nn.Linear(2, 3)}).prepare({"model": nn.Linear(4, 5)})
    assert "skip=[…]" in str(caught.value)
