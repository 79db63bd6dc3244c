"""Edits around saves and loads: what a hook can do, and that the live state is out of its reach."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from holdfast.errors import CorruptData, FormatError, MismatchError, UnsupportedState, UsageError
from holdfast.state.apply import Prepared, prepare
from holdfast.state.capture.capture import Captured, Capturer, capture
from holdfast.state.capture.edits import StateView, edited, edited_load
from holdfast.state.capture.views import ComponentView
from holdfast.state.components import StoredComponent
from holdfast.state.selection import StateLoadOptions
from state.roundtrip import Image, as_view, digest, image, raw_bytes, train

Edit = Callable[[StateView], None]


def whole(seed: int, rows: int = 4) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(rows, 6), nn.Linear(6, 2))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "progress": {"step": seed, "log": [seed, seed], "best": torch.full((2,), float(seed))},
        "sampler": torch.Generator().manual_seed(seed),
    }


def slot(state: Mapping[str, Any], parameter: str, name: str) -> Tensor:
    parameters = dict(state["model"].named_parameters())
    tensor: Tensor = state["optimizer"].state[parameters[parameter]][name]
    return tensor


def load(saved: Image, live: dict[str, Any], edit: Edit, **options: Any) -> Prepared:
    """As an engine does it: the edit, the checks, then the tensors that are not there yet."""
    found = edited_load(
        saved.stored,
        edit,
        where="step-1",
        read=lambda name: {key: as_view(value) for key, value in saved.tensors[name].items()},
    )
    prepared = prepare(live, found.components, where="step-1", options=StateLoadOptions(**options))
    prepared.apply_values(
        {
            name: {key: found.tensors[name].get(key, saved.tensors[name].get(key)) for key in keys}
            for name, keys in prepared.needed.items()
        }
    )
    return prepared


# On save


def test_what_a_hook_does_with_what_it_reads_reaches_nothing() -> None:
    """D22: every value that can be read is a copy, of the live state and of what is stored."""
    state = whole(1)
    state["progress"].update(
        array=np.ones(2), pair=(torch.ones(1), 2), rng=np.random.default_rng(1)
    )
    before, captured = digest(state), capture(state)

    def spoil(view: StateView) -> None:
        for component in view.values():
            for value in component.values():
                ruin(value)
        ruin(view["progress"]["log"])

    after = edited(captured, spoil)
    assert digest(state) == before
    assert {n: c.tree for n, c in after.components.items()} == {
        n: c.tree for n, c in captured.components.items()
    }


def ruin(value: Any) -> None:
    if isinstance(value, Tensor):
        value.zero_()
    elif isinstance(value, np.ndarray):
        value[:] = 0
    elif isinstance(value, list):
        value.append(7)
    elif isinstance(value, dict):
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            ruin(item)
    elif isinstance(value, torch.Generator):
        value.manual_seed(99)
    elif isinstance(value, np.random.Generator):
        value.random(5)


def test_components_that_are_not_changed_are_those_that_were_captured() -> None:
    captured = capture(whole(1))

    def edit(view: StateView) -> None:
        list(view["optimizer"].items())
        view["progress"]["step"] = 9

    after = edited(captured, edit)
    for name in ("model", "optimizer", "sampler", "rng"):
        assert after.components[name] is captured.components[name]
    assert after.components["progress"] is not captured.components["progress"]
    assert after.left_out == ()


def test_where_tensors_are_is_looked_up_again_after_an_edit() -> None:
    """What the hook has called may have given live tensors other memory."""
    capturer = Capturer(whole(1))
    capturer.capture()
    captured = capturer.capture()
    assert captured.components["model"].addresses is not None
    after = edited(captured, lambda view: None)
    assert {part.addresses for part in after.components.values()} == {None}


def test_values_of_every_kind_are_replaced_in_what_is_stored_only() -> None:
    """D22."""
    resumed, state = whole(2), whole(1)
    before = digest(state)

    def edit(view: StateView) -> None:
        model, optimizer, progress = view["model"], view["optimizer"], view["progress"]
        model["1.weight"] = model["1.weight"] * 2
        optimizer["param_groups.0.lr"] = 0.5
        optimizer["1.bias.exp_avg"] = torch.zeros(2)
        progress["log.0"] = "text"
        progress["log.1"] = {"a": (1, torch.ones(3))}
        progress["added"] = [np.arange(3)]
        progress["best"] = None
        view["sampler"]["value"] = torch.Generator().manual_seed(77)
        view["rng"]["torch"] = torch.Generator().manual_seed(5)

    after = edited(capture(state), edit)
    assert digest(state) == before
    Image(after).load(resumed)
    assert torch.equal(resumed["model"][1].weight, state["model"][1].weight * 2)
    assert torch.equal(resumed["model"][0].weight, state["model"][0].weight)
    assert resumed["optimizer"].param_groups[0]["lr"] == 0.5
    assert slot(resumed, "1.bias", "exp_avg").tolist() == [0.0, 0.0]
    progress = resumed["progress"]
    assert progress["log"][0] == "text"
    assert progress["log"][1]["a"][1].tolist() == [1.0, 1.0, 1.0]
    assert progress["added"][0].tolist() == [0, 1, 2]
    assert progress["best"] is None
    expected = torch.rand(3, generator=torch.Generator().manual_seed(77))
    assert torch.equal(torch.rand(3, generator=resumed["sampler"]), expected)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_what_is_assigned_is_copied_at_once() -> None:
    mine, live = torch.ones(2), whole(1)

    def edit(view: StateView) -> None:
        view["progress"]["best"] = mine
        mine.zero_()
        assert view["progress"]["best"].tolist() == [1.0, 1.0]
        view["progress"]["other"] = mine
        mine.fill_(5)

    resumed = whole(2)
    Image(edited(capture(live), edit)).load(resumed)
    assert resumed["progress"]["best"].tolist() == [1.0, 1.0]
    assert resumed["progress"]["other"].tolist() == [0.0, 0.0]


def test_leaves_and_components_are_left_out() -> None:
    def edit(view: StateView) -> None:
        del view["optimizer"], view["sampler"]
        del view["progress"]["log"]
        del view["model"]["1.bias"]

    after = edited(capture(whole(1)), edit)
    assert after.left_out == ("optimizer", "sampler")
    assert list(after.components) == ["model", "progress", "rng"]
    assert list(after.components["model"].tensors) == ["0.weight", "1.weight"]
    with pytest.raises(MismatchError) as caught:
        Image(after).prepare(whole(2))
    assert caught.value.missing == [
        "optimizer (the whole component)", "sampler (the whole component)", "model.1.bias",
    ]  # fmt: skip


def test_tensors_stay_in_the_order_of_the_tree_under_their_own_keys() -> None:
    def edit(view: StateView) -> None:
        for path in ("1.bias", "0.weight", "1.weight"):
            view["model"][path] = view["model"][path] + 1
        view["optimizer"]["0.weight.extra"] = torch.ones(1)

    after = edited(capture(whole(1)), edit)
    component = after.components["model"]
    assert list(component.tensors) == ["0.weight", "1.weight", "1.bias"]
    assert [spec.key for spec in component.specs] == list(component.tensors)
    assert list(after.components["optimizer"].tensors)[2:4] == [
        "0.weight.exp_avg_sq", "0.weight.extra",
    ]  # fmt: skip


def test_tied_weights_change_together_under_whichever_name() -> None:
    """What is stored fits the model that it came from."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    captured = capture({"model": model})

    def edit(view: StateView) -> None:
        view["model"]["a.weight"] = torch.zeros(2, 2)

    apart = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    Image(edited(captured, edit)).load({"model": apart})
    assert not apart["a"].weight.any()
    assert not apart["b"].weight.any()
    assert model["a"].weight.any()
    Image(edited(captured, edit)).load({"model": model})
    assert model["b"].weight is model["a"].weight
    assert not model["a"].weight.any()


def test_a_parameter_in_a_tree_stays_one_with_other_values() -> None:
    state = {"data": {"p": nn.Parameter(torch.ones(2)), "t": torch.ones(2, requires_grad=True)}}
    resumed: dict[str, Any] = {"data": {}}

    def edit(view: StateView) -> None:
        for name in ("p", "t"):
            read = view["data"][name]
            assert not read.requires_grad
            view["data"][name] = read * 3

    Image(edited(capture(state), edit)).load(resumed)
    assert isinstance(resumed["data"]["p"], nn.Parameter)
    assert resumed["data"]["t"].requires_grad
    assert resumed["data"]["p"].tolist() == resumed["data"]["t"].tolist() == [3.0, 3.0]


class Color(enum.Enum):
    RED = 1


def test_what_the_format_cannot_hold_is_refused_where_it_is_assigned() -> None:
    def edit(view: StateView) -> None:
        component = view["progress"]
        with pytest.raises(UnsupportedState, match=r"progress\.log\.x"):
            component["log"] = {"x": object()}
        with pytest.raises(UnsupportedState, match=r"progress\.best"):
            component["best"] = torch.ones(2).to_sparse()
        assert component["log"] == [1, 1]
        assert component["best"].tolist() == [1.0, 1.0]
        component["best"] = Color.RED

    after = edited(capture(whole(1)), edit)
    assert list(after.components["progress"].tensors) == []


def test_edits_that_cannot_be_are_refused() -> None:
    """D22, D58."""

    def edit(view: StateView) -> None:
        with pytest.raises(UsageError, match="belongs in the state"):
            view["extra"] = {"x": 1}  # type: ignore[index]
        with pytest.raises(UsageError, match="assign the list"):
            del view["progress"]["log.0"]
        with pytest.raises(UsageError, match="nothing can be added"):
            view["progress"]["log.2"] = 1
        with pytest.raises(UsageError, match="there is no 'nobody'"):
            view["progress"]["nobody.x"] = 1
        with pytest.raises(UsageError, match="are not text"):
            view["progress"]["numbers.5"] = 1
        with pytest.raises(UsageError, match="no parameter and no option"):
            view["optimizer"]["2.weight.exp_avg"] = torch.ones(2)
        with pytest.raises(UsageError, match="leave out the component"):
            del view["sampler"]["value"]
        for path in ("nobody", "log.5", "log.0.x"):
            with pytest.raises(KeyError, match=f"progress.{path}"):
                view["progress"][path]
            with pytest.raises(KeyError):
                del view["progress"][path]

    state = whole(1)
    state["progress"]["numbers"] = {0: 1, 1: 2}
    captured = capture(state)
    assert edited(captured, edit).components == captured.components


def test_leaving_out_everything_is_refused() -> None:
    def edit(view: StateView) -> None:
        for name in list(view):
            del view[name]

    with pytest.raises(UsageError, match="nothing would be saved"):
        edited(capture(whole(1)), edit)


def test_a_view_is_of_no_use_after_its_hook() -> None:
    kept: list[Any] = []

    def edit(view: StateView) -> None:
        kept.extend((view["model"], view["optimizer"]))
        del view["optimizer"]

    edited(capture(whole(1)), edit)
    for component in kept:
        with pytest.raises(UsageError, match="only inside its hook"):
            component["1.bias"] = torch.zeros(2)


def test_a_hook_that_fails_passes_its_error_on() -> None:
    def edit(view: StateView) -> None:
        view["model"]["1.bias"] = torch.zeros(2)
        raise ZeroDivisionError("no")

    saved, state = image(whole(2)), whole(1)
    before = digest(state)
    with pytest.raises(ZeroDivisionError):
        edited(capture(state), edit)
    with pytest.raises(ZeroDivisionError):
        load(saved, state, edit)
    assert digest(state) == before


def test_a_number_and_its_text_as_keys_are_two_leaves() -> None:
    """D58."""
    resumed: dict[str, Any] = {"data": {}}

    def edit(view: StateView) -> None:
        assert list(view["data"]) == ["int(0)", "0", "a.b", "a.b#2"]
        view["data"]["0"] = "text"
        view["data"]["a.b#2"] = "second"

    state = {"data": {0: 1, "0": 2, "a.b": 3, "a": {"b": 4}}}
    Image(edited(capture(state), edit)).load(resumed)
    assert resumed["data"] == {0: 1, "0": "text", "a.b": 3, "a": {"b": "second"}}


def test_a_view_lists_its_leaves_as_messages_name_them() -> None:
    captured = capture(whole(1))

    def edit(view: StateView) -> None:
        assert list(view) == ["model", "optimizer", "progress", "sampler", "rng"]
        assert list(view["model"]) == ["0.weight", "1.weight", "1.bias"]
        assert list(view["optimizer"])[:2] == ["0.weight.step", "0.weight.exp_avg"]
        assert "param_groups.0.lr" in view["optimizer"]
        assert list(view["progress"]) == ["step", "log.0", "log.1", "best"]
        assert len(view["progress"]) == 4
        assert "log" in view["progress"]
        assert "nobody" not in view["progress"]
        assert list(view["sampler"]) == ["value"]
        assert "rng.torch".partition(".")[2] in view["rng"]

    assert edited(captured, edit).components == captured.components


def test_the_paths_of_a_view_follow_its_edits() -> None:
    shared = {"x": 1, "y": 2}
    state = {"data": {"one": shared, "two": shared, "rest": {"p": 1, "q": 2}}, "other": {"p": 1}}

    def edit(view: StateView) -> None:
        data, other = view["data"], view["other"]
        del data["one.x"]
        assert list(data) == ["one.y", "two.y", "rest.p", "rest.q"]
        del data["rest.p"], data["rest.q"]
        assert list(data)[2:] == ["rest"]
        assert data["rest"] == {}
        data["two.y"] = 5
        assert data["one.y"] == 5
        other["q"] = 2
        other["r"] = {"s": 3}
        del other["p"]
        other["p"] = 4
        assert list(other) == ["q", "r.s", "p"]

    resumed: dict[str, Any] = {"data": {}, "other": {}}
    Image(edited(capture(state), edit)).load(resumed)
    assert resumed["data"] == {"one": {"y": 5}, "two": {"y": 5}, "rest": {}}
    assert resumed["data"]["one"] is resumed["data"]["two"]
    assert resumed["other"] == {"q": 2, "r": {"s": 3}, "p": 4}


# On load


def test_an_edit_changes_what_is_applied() -> None:
    stored, live = whole(1), whole(2)

    def edit(view: StateView) -> None:
        view["model"]["1.weight"] = view["model"]["1.weight"] + 1
        view["progress"]["step"] = 0
        view["optimizer"]["param_groups.0.lr"] = 0.25

    load(image(stored), live, edit)
    assert torch.equal(live["model"][1].weight, stored["model"][1].weight + 1)
    assert torch.equal(live["model"][1].bias, stored["model"][1].bias)
    assert live["progress"]["step"] == 0
    assert live["optimizer"].param_groups[0]["lr"] == 0.25
    assert raw_bytes(slot(live, "1.bias", "exp_avg")) == raw_bytes(
        slot(stored, "1.bias", "exp_avg")
    )


def grown(old: Tensor, rows: int) -> Tensor:
    return torch.cat([old, torch.zeros(rows, old.shape[1])])


def test_a_resized_embedding_goes_with_its_moments() -> None:
    """D22: what does not fit can be made to fit before it is checked."""
    stored, live = whole(1), whole(2, rows=7)
    with pytest.raises(MismatchError):
        image(stored).prepare(live)

    def edit(view: StateView) -> None:
        view["model"]["0.weight"] = grown(view["model"]["0.weight"], 3)
        for name in ("exp_avg", "exp_avg_sq"):
            path = f"0.weight.{name}"
            view["optimizer"][path] = grown(view["optimizer"][path], 3)

    load(image(stored), live, edit)
    assert torch.equal(live["model"][0].weight[:4], stored["model"][0].weight)
    assert slot(live, "0.weight", "exp_avg").shape == (7, 6)
    train_once(live)


def train_once(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def test_half_resized_moments_are_refused() -> None:
    def edit(view: StateView) -> None:
        view["model"]["0.weight"] = grown(view["model"]["0.weight"], 3)
        path = "0.weight.exp_avg"
        view["optimizer"][path] = grown(view["optimizer"][path], 3)

    saved, live = image(whole(1)), whole(2, rows=7)
    before = digest(live)
    with pytest.raises(UsageError, match=r"exp_avg_sq: still \[4, 6\]"):
        load(saved, live, edit)
    assert digest(live) == before


def test_a_parameter_left_out_of_an_optimizer_starts_anew() -> None:
    stored, live = whole(1), whole(2, rows=7)
    live["optimizer"].state.clear()

    def edit(view: StateView) -> None:
        view["model"]["0.weight"] = grown(view["model"]["0.weight"], 3)
        del view["optimizer"]["0.weight"]

    with pytest.raises(MismatchError) as caught:
        load(image(stored), live, edit)
    assert caught.value.missing == ["optimizer.0.weight"]
    load(image(stored), live, edit, skip=["optimizer.0.weight"])
    assert live["model"][0].weight not in live["optimizer"].state
    assert raw_bytes(slot(live, "1.bias", "exp_avg")) == raw_bytes(
        slot(stored, "1.bias", "exp_avg")
    )
    train_once(live)


def test_an_edited_load_is_checked_like_any_other() -> None:
    """D22, D32, invariant 6: a wrong edit is found before anything live changes."""

    def edit(view: StateView) -> None:
        view["model"]["1.weight"] = torch.zeros(3, 3)
        view["model"]["1.bias"] = torch.zeros(2, dtype=torch.float64)
        view["model"]["unknown"] = torch.zeros(1)
        del view["model"]["0.weight"]
        del view["progress"]

    saved, live = image(whole(1)), whole(2)
    before = digest(live)
    with pytest.raises(MismatchError) as caught:
        load(saved, live, edit)
    assert digest(live) == before
    assert caught.value.wrong_shape == ["model.1.weight: stored [3, 3], live [2, 6]"]
    assert caught.value.wrong_dtype == ["model.1.bias: stored F64, live F32"]
    assert caught.value.unexpected == ["model.unknown"]
    assert caught.value.missing == ["progress (the whole component)", "model.0.weight"]


def test_a_hook_cannot_reach_the_live_state_by_what_it_assigns() -> None:
    """D22."""
    mine, live = torch.ones(2), whole(2)

    def edit(view: StateView) -> None:
        view["progress"]["new"] = mine
        view["model"]["1.bias"] = mine

    load(image(whole(1)), live, edit)
    mine.fill_(9)
    assert live["progress"]["new"].tolist() == live["model"][1].bias.tolist() == [1.0, 1.0]


def test_tensors_are_read_when_they_are_looked_at_and_once() -> None:
    saved, asked = image(whole(1)), []

    def read(name: str) -> Mapping[str, Tensor]:
        asked.append(name)
        return saved.tensors[name]

    def edit(view: StateView) -> None:
        assert view["progress"]["step"] == 1
        view["optimizer"]["param_groups.0.lr"] = 0.5
        assert asked == []
        list(view["model"].items())

    found = edited_load(saved.stored, edit, where="step-1", read=read)
    assert asked == ["model"]
    assert found.components["model"] is saved.stored["model"]
    assert found.tensors["model"].keys() == saved.tensors["model"].keys()
    assert found.tensors["optimizer"] == {}


def test_damage_that_is_met_in_a_hook_is_raised() -> None:
    saved = image(whole(1))

    def read(name: str) -> Mapping[str, Tensor]:
        raise CorruptData(f"{name}: block 0")

    with pytest.raises(CorruptData):
        edited_load(
            saved.stored, lambda view: ruin(view["model"]["1.bias"]), where="step-1", read=read
        )


def test_a_damaged_tree_is_an_error_of_the_format() -> None:
    for kind in ("optimizer", "tree"):
        broken = StoredComponent(name="x", kind=kind, tree=b'{"holdfast":1,"tree":[', tensors={})
        with pytest.raises(FormatError):
            edited_load({"x": broken}, lambda view: list(view["x"]), where="s", read=dict)  # type: ignore[arg-type]
    other = StoredComponent(
        name="x", kind="optimizer", tree=b'{"holdfast":1,"tree":{}}', tensors={}
    )
    with pytest.raises(FormatError, match="not the tree of an optimizer"):
        edited_load({"x": other}, lambda view: list(view["x"]), where="s", read=dict)  # type: ignore[arg-type]


def test_versions_of_modules_outlive_an_edit() -> None:
    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    seen: list[Any] = []

    def edit(view: StateView) -> None:
        view["model"]["weight"] = torch.zeros(2, 2)

    captured: Captured = edited(capture({"model": Versioned(2, 2)}), edit)
    live = Versioned(2, 2)
    Image(captured).load({"model": live})
    assert {*seen} == {7}
    assert live.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_n_and_m_steps_are_the_same_bits_when_an_edit_writes_back_what_it_read() -> None:
    """D22, invariant 7: an edit that changes nothing changes nothing."""

    def edit(view: StateView) -> None:
        for component in view.values():
            write_back(component)

    one = whole(1)
    saved = Image(edited(capture(one), edit))
    two = whole(2)
    load(saved, two, edit)
    assert digest(one) == digest(two)
    for state in (one, two):
        torch.manual_seed(5)
        train(state["model"][1:], state["optimizer"], 2)
    assert raw_bytes(one["model"][1].weight) == raw_bytes(two["model"][1].weight)


def write_back(component: ComponentView) -> None:
    for path in list(component):
        component[path] = component[path]
