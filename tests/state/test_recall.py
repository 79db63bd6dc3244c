"""A state captured again: what is kept of its structure never outlives a change of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import UnsupportedState
from holdfast.state.capture.capture import Captured, Capturer, capture
from holdfast.state.capture.recall import CaptureCache

State = dict[str, Any]


class Versioned(nn.Linear):
    """A module of another type, and version, than the one in whose place it comes."""

    _version = 3


class Counting(nn.Linear):
    """A module with an extra state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def new_state() -> State:
    """One component of each kind that is recalled, with slots in the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Conv2d(2, 2, 2), nn.Linear(3, 3)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model[0].parameters(), *model[1].parameters()], "lr": 0.1},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]
    )
    model[4](model[2](model[1](model[0](torch.randn(4, 3))))).sum().backward()
    optimizer.step()
    shared = [1.5, 2]
    tree = {
        "tensors": {"a": torch.zeros(4), "b": torch.ones(2, 3), "empty": torch.zeros(0)},
        "numbers": [1, 2.0, True, None, "text"],
        "pair": (shared, shared),
    }
    return {"model": model, "optimizer": optimizer, "tree": tree}


def assert_same(again: Captured, fresh: Captured) -> None:
    """Both captures would give the same checkpoint, from the same memory."""
    assert list(again.components) == list(fresh.components)
    for name, one in fresh.components.items():
        other = again.components[name]
        assert (other.kind, other.tree, other.specs) == (one.kind, one.tree, one.specs)
        assert list(other.tensors) == list(one.tensors)
        assert other.may_overlap == one.may_overlap
        for key, tensor in one.tensors.items():
            assert not other.tensors[key].requires_grad
            if name == "rng":
                assert other.tensors[key].tolist() == tensor.tolist()
            elif tensor.numel():
                assert other.tensors[key].data_ptr() == tensor.data_ptr(), key
                assert other.tensors[key].stride() == tensor.stride()


def set_option(name: str, value: Any) -> Callable[[State], None]:
    """Change an option of the first group."""

    def change(state: State) -> None:
        state["optimizer"].param_groups[0][name] = value

    return change


def set_number(position: int, value: Any) -> Callable[[State], None]:
    """Change an entry of the tree's list."""

    def change(state: State) -> None:
        state["tree"]["numbers"][position] = value

    return change


def share_options(state: State) -> None:
    first, second = state["optimizer"].param_groups
    second["betas"] = first["betas"]


def unshare_options(state: State) -> None:
    first, second = state["optimizer"].param_groups
    second["betas"] = (*first["betas"],)


def unshare_list(state: State) -> None:
    state["tree"]["pair"] = ([1.5, 2], [1.5, 2])


def tie(state: State) -> None:
    state["model"][4].weight = state["model"][2].weight


def tie_memory(state: State) -> None:
    state["model"][4].weight.data = state["model"][2].weight.data


def swap_parameters(state: State) -> None:
    first, second = state["model"][0], state["model"][2]
    first.weight, second.weight = second.weight, first.weight


def swap_modules(state: State) -> None:
    model = state["model"]
    model[0], model[2] = model[2], model[0]


def replace_module(state: State) -> None:
    state["model"][2].__class__ = Versioned


def wrap(state: State) -> None:
    state["model"][4] = nn.Sequential(state["model"][4])


def add_buffer(state: State) -> None:
    state["model"].register_buffer("late", torch.zeros(2))


def hide_buffer(state: State) -> None:
    state["model"][1]._non_persistent_buffers_set.add("running_mean")


def half(state: State) -> None:
    state["model"].half()


def freeze(state: State) -> None:
    state["model"][0].weight.requires_grad_(False)


def other_memory(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone()


def channels_last(state: State) -> None:
    conv = state["model"][3]
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)


def drop_slots(state: State) -> None:
    state["optimizer"].state.clear()


def drop_one_slot(state: State) -> None:
    del state["optimizer"].state[state["model"][0].weight]["exp_avg"]


def slot_of_other_type(state: State) -> None:
    slots = state["optimizer"].state[state["model"][0].weight]
    slots["exp_avg"] = slots["exp_avg"].double()


def slot_that_is_a_number(state: State) -> None:
    state["optimizer"].state[state["model"][0].weight]["step"] = 7


def slot_beside(state: State) -> None:
    state["optimizer"].state["global"] = {"step": 3}


def add_group(state: State) -> None:
    state["optimizer"].add_param_group({"params": list(state["model"][3].parameters())})


def move_between_groups(state: State) -> None:
    first, second = state["optimizer"].param_groups
    second["params"].append(first["params"].pop())


def tensor_rate(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.25)


def draw(state: State) -> None:
    random.random()
    np.random.random()
    torch.rand(1)


def draw_half_a_pair(state: State) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()


def tree_of_arrays(state: State) -> None:
    state["tree"]["array"] = np.arange(3)


def tree_resized(state: State) -> None:
    state["tree"]["tensors"]["a"].resize_(2, 2)


def tree_tensor_requires_grad(state: State) -> None:
    state["tree"]["tensors"]["b"].requires_grad_()


def tree_parameter(state: State) -> None:
    state["tree"]["tensors"]["b"] = nn.Parameter(torch.ones(2, 3))


def tree_tie(state: State) -> None:
    state["tree"]["tensors"]["a"] = state["tree"]["tensors"]["b"]


def tree_transposed(state: State) -> None:
    tensors = state["tree"]["tensors"]
    tensors["b"] = torch.ones(3, 2).t()


def tree_complex(state: State) -> None:
    state["tree"]["tensors"]["complex"] = torch.ones(2, dtype=torch.complex64)


def tree_renamed(state: State) -> None:
    tensors = state["tree"]["tensors"]
    tensors["c"] = tensors.pop("b")


CHANGES: dict[str, Callable[[State], None]] = {
    "nothing": lambda state: None,
    "a rate": set_option("lr", 0.05),
    "a rate that is no number": set_option("lr", float("nan")),
    "a negative zero": set_option("weight_decay", -0.0),
    "an integer rate": set_option("lr", 1),
    "new betas": set_option("betas", (0.8, 0.99)),
    "betas as a list": set_option("betas", [0.9, 0.999]),
    "a switch": set_option("amsgrad", True),
    "none for a switch": set_option("foreach", True),
    "a new option": set_option("mine", "text"),
    "a number": set_number(0, 5),
    "a huge number": set_number(0, 1 << 80),
    "a bool for a number": set_number(0, True),
    "a float for an int": set_number(0, 1.0),
    "a text": set_number(4, "other"),
    **{
        change.__name__: change
        for change in (
            share_options,
            unshare_options,
            unshare_list,
            tie,
            tie_memory,
            swap_parameters,
            swap_modules,
            replace_module,
            wrap,
            add_buffer,
            hide_buffer,
            half,
            freeze,
            other_memory,
            channels_last,
            drop_slots,
            drop_one_slot,
            slot_of_other_type,
            slot_that_is_a_number,
            slot_beside,
            add_group,
            move_between_groups,
            tensor_rate,
            draw,
            draw_half_a_pair,
            tree_of_arrays,
            tree_resized,
            tree_tensor_requires_grad,
            tree_parameter,
            tree_tie,
            tree_transposed,
            tree_renamed,
            tree_complex,
        )
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_so_is_its_return(change: Callable[[State], None]) -> None:
    """I7: what is recalled is what would be captured anew, before and after any change."""
    state = new_state()
    capturer = Capturer(state)
    assert_same(capturer.capture(), capture(state))
    assert_same(capturer.capture(), capture(state))
    change(state)
    for _ in range(3):
        assert_same(capturer.capture(), capture(state))
    set_option("lr", 0.375)(state)
    assert_same(capturer.capture(), capture(state))


def test_nothing_is_encoded_again_while_the_structure_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    monkeypatch.setattr(CaptureCache, "__init__", lambda *_, **__: pytest.fail("captured anew"))
    for rate in (0.5, 0.25, float("inf"), 0.125):
        state["optimizer"].param_groups[0]["lr"] = rate
        state["tree"]["numbers"][0] += 1
        capturer.capture()


def test_an_extra_state_is_asked_for_each_time() -> None:
    state = {"model": nn.Sequential(Counting())}
    capturer = Capturer(state)
    before = capturer.capture().components["model"].tree
    state["model"][0].calls = 2  # type: ignore[assignment]
    after = capturer.capture()
    assert after.components["model"].tree != before
    assert_same(after, capture(state))


def test_hooks_on_the_state_dict_run_each_time() -> None:
    model = nn.Linear(2, 2)
    state = {"model": model}
    capturer = Capturer(state)
    capturer.capture()
    model.register_state_dict_post_hook(lambda _, found, *__: found.__delitem__("bias"))
    assert list(capturer.capture().components["model"].tensors) == ["weight"]


def test_a_freed_storage_is_refused_each_time() -> None:
    """Sharded wrappers free what they do not use at the moment."""
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    storage = state["model"][0].weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(UnsupportedState, match=r"model\.0\.weight: its storage was freed"):
        capturer.capture()
    storage.resize_(nbytes)
    assert_same(capturer.capture(), capture(state))


def test_state_of_a_strange_parameter_is_refused_each_time() -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    state["optimizer"].state[nn.Parameter(torch.zeros(5))] = {"step": torch.ones(())}
    for _ in range(2):
        with pytest.raises(UnsupportedState, match=r"in no parameter group"):
            capturer.capture()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_sparse_tensor_is_refused_also_in_the_place_of_another() -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    state["tree"]["tensors"]["b"] = torch.ones(2, 3).to_sparse()
    with pytest.raises(UnsupportedState, match="layout"):
        capturer.capture()
    state["tree"]["tensors"]["b"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedState, match="nested"):
        capturer.capture()


def test_a_negative_view_is_resolved_each_time() -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    for content in (torch.ones(2, 3), torch.full((2, 3), 2.0)):
        state["tree"]["tensors"]["b"] = torch._neg_view(content)
        found = capturer.capture().components["tree"].tensors["tensors.b"]
        assert not found.is_neg()
        assert torch.equal(found, -content)


def test_a_conjugate_view_is_resolved_each_time() -> None:
    state = new_state()
    tensors = state["tree"]["tensors"]
    tensors["b"] = torch.full((2,), 1 + 2j)
    capturer = Capturer(state)
    for expected in (1 + 2j, 1 - 2j, 1 + 2j):
        found = capturer.capture().components["tree"].tensors["tensors.b"]
        assert not found.is_conj()
        assert torch.equal(found, torch.full((2,), expected))
        tensors["b"] = tensors["b"].conj()


def test_a_tree_that_contains_itself_is_refused_also_later() -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    state["tree"]["numbers"].append(state["tree"])
    with pytest.raises(UnsupportedState, match="contains itself"):
        capturer.capture()


def test_a_component_that_was_left_out_is_recalled_later() -> None:
    state = new_state()
    capturer = Capturer(state)
    capturer.capture()
    assert list(capturer.capture(only=["tree"]).components) == ["tree"]
    state["model"].double()
    assert_same(capturer.capture(), capture(state))


def test_what_may_overlap_is_parameters_with_an_optimizer_and_their_slots() -> None:
    """Averages, buffers, frozen weights, options and what stands beside slots may not."""
    state = new_state()
    state["average"] = torch.optim.swa_utils.AveragedModel(state["model"])
    tensor_rate(state)
    optimizer, (first, second, *_) = state["optimizer"], state["model"][0].parameters()
    optimizer.state["shared"] = shared = torch.zeros(2)
    optimizer.state[first]["also"] = shared
    optimizer.state[second]["nested"] = [torch.zeros(2)]
    found = capture(state).components
    trained = {
        key for key in found["model"].tensors if key[0] in "0124" and "running" not in key
    } - {"1.num_batches_tracked"}
    assert found["model"].may_overlap == trained
    slots = {f"{name}.{slot}" for name in trained for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert found["optimizer"].may_overlap == slots
    for name in ("average", "tree", "rng"):
        assert found[name].may_overlap == frozenset()


def test_addresses_are_known_where_every_tensor_is_a_run_of_bytes() -> None:
    state = new_state()
    capturer = Capturer(state)
    assert capturer.capture().components["tree"].addresses is None
    again = capturer.capture()
    for name in state:
        found = again.components[name]
        assert found.addresses == [one.data_ptr() for one in found.tensors.values()]
    tensors = state["tree"]["tensors"]
    tensors["same"] = tensors["b"]
    capturer.capture()
    assert len(capturer.capture().components["tree"].addresses or ()) == 3
    tensors["a"] = torch.zeros(3, 2).t()
    capturer.capture()
    assert capturer.capture().components["tree"].addresses is None


class Moving:
    """Gives a tensor other memory when it is asked for its state."""

    def __init__(self, moved: list[torch.Tensor]) -> None:
        self.moved = moved

    def state_dict(self) -> dict[str, Any]:
        for tensor in self.moved:
            tensor.data = torch.full_like(tensor, 7.0)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


def test_addresses_are_forgotten_where_foreign_code_gave_other_memory_later() -> None:
    """The memory at the old address may be anybody's."""
    state = new_state()
    (slots, *_) = state["optimizer"].state.values()
    moving = state["moving"] = Moving([])
    capturer = Capturer(state)
    capturer.capture()
    assert all(capturer.capture().components[name].addresses for name in ("model", "optimizer"))
    moving.moved = [slots["exp_avg"]]
    found = capturer.capture().components
    assert found["optimizer"].addresses is None
    assert found["model"].addresses is not None
