"""Optimizers: exact to the bit, matched by name, nothing cast, nothing fired."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.objects import decode_tree, document
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from state.roundtrip import assert_same_tensors, digest, image, small_model, train

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
    "LBFGS wolfe": lambda p: optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs.abs().mul(3).long().clamp(max=19)).sum(1)


def plain_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def matrices(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def sparse_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Sparse()


SPECIAL: dict[str, tuple[Callable[[int], nn.Module], Callable[[Any], optim.Optimizer]]] = {
    "SparseAdam": (sparse_model, lambda p: optim.SparseAdam(p, lr=0.01)),
}
if hasattr(optim, "Muon"):
    SPECIAL["Muon"] = (matrices, lambda p: optim.Muon(p, lr=0.01))
ALL = {name: (plain_model, make) for name, make in OPTIMIZERS.items()} | SPECIAL


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {
        name
        for name, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    assert classes - {"Optimizer"} == {name.partition(" ")[0] for name in ALL}


def built(name: str, seed: int) -> dict[str, Any]:
    make_model, make_optimizer = ALL[name]
    model = make_model(seed)
    return {"model": model, "optimizer": make_optimizer(model.parameters())}


@pytest.mark.parametrize("live_steps", [0, 2], ids=["fresh", "used"])
@pytest.mark.parametrize("name", ALL)
def test_training_goes_on_to_the_same_bits(name: str, live_steps: int) -> None:
    """Invariant 7: after a load, further steps give what they would have given without it."""
    original = built(name, seed=1)
    train(original["model"], original["optimizer"], 3)
    saved = image(original)
    train(original["model"], original["optimizer"], 3)

    resumed = built(name, seed=2)
    train(resumed["model"], resumed["optimizer"], live_steps)
    saved.load(resumed)
    train(resumed["model"], resumed["optimizer"], 3)

    assert_same_tensors(original["model"].state_dict(), resumed["model"].state_dict())
    assert digest(original) == digest(resumed)


@pytest.mark.parametrize("name", ALL)
def test_a_capture_changes_no_optimizer(name: str) -> None:
    """D22: reading adds no state, calls nothing and moves no step, used or not."""
    state = built(name, seed=1)
    fired: list[str] = []
    state["optimizer"].register_step_pre_hook(lambda *_: fired.append("step"))
    before = dict(state["optimizer"].state)
    capture(state)
    image(state).load(state)
    assert not fired
    assert state["optimizer"].state.keys() == before.keys()


def adam_pair(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = plain_model(seed).to(dtype)
    return {"model": model, "optimizer": optim.Adam(model.parameters(), lr=0.01)}


def test_fp32_moments_of_bf16_parameters_are_never_cast() -> None:
    """Invariant 7: torch's own load_state_dict would make them bf16."""
    original = adam_pair(1, torch.bfloat16)
    for parameter in original["model"].parameters():
        original["optimizer"].state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    resumed = adam_pair(2, torch.bfloat16)
    image(original).load(resumed)
    assert digest(original) == digest(resumed)
    for slots in resumed["optimizer"].state.values():
        assert slots["exp_avg"].dtype == torch.float32


def test_keys_are_parameter_names_and_slots() -> None:
    state = adam_pair(1)
    train(state["model"], state["optimizer"], 1)
    keys = list(capture(state).components["optimizer"].tensors)
    assert keys[:3] == ["0.weight.step", "0.weight.exp_avg", "0.weight.exp_avg_sq"]


def test_names_get_the_component_when_several_modules_are_optimized() -> None:
    models = {"gen": plain_model(1), "disc": plain_model(2)}
    both = [*models["gen"].parameters(), *models["disc"].parameters()]
    state = {**models, "optimizer": optim.SGD(both, lr=0.1, momentum=0.9)}
    for parameter in both:
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    keys = list(capture(state).components["optimizer"].tensors)
    assert keys[0] == "gen.0.weight.momentum_buffer"
    assert keys[-1] == "disc.2.bias.momentum_buffer"


def test_a_parameter_in_no_module_is_named_by_its_place() -> None:
    def build() -> dict[str, Any]:
        loose = nn.Parameter(torch.ones(3))
        return {"optimizer": optim.SGD([loose], lr=0.1, momentum=0.9)}

    original, resumed = build(), build()
    loose = original["optimizer"].param_groups[0]["params"][0]
    loose.grad = torch.tensor([1.0, 2.0, 3.0])
    original["optimizer"].step()
    saved = image(original)
    assert list(saved.tensors["optimizer"]) == ["group0.param0.momentum_buffer"]
    saved.load(resumed)
    assert digest(original) == digest(resumed)


def test_tied_parameters_go_by_their_first_name() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return {"model": model, "optimizer": optim.Adam(model.parameters())}

    original, resumed = build(1), build(2)
    weight = original["model"]["embed"].weight
    weight.grad = torch.randn_like(weight)
    original["optimizer"].step()
    saved = image(original)
    assert list(saved.tensors["model"]) == ["embed.weight"]
    assert "embed.weight.exp_avg" in saved.tensors["optimizer"]
    saved.load(resumed)
    assert digest(original) == digest(resumed)
    assert resumed["model"]["head"].weight is resumed["model"]["embed"].weight


def two_groups(seed: int, *, reverse: bool = False, shuffle: bool = False) -> dict[str, Any]:
    model = plain_model(seed)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named["0.weight"], named["2.weight"]], "weight_decay": 0.1},
        {"params": [named["0.bias"], named["2.bias"]], "weight_decay": 0.0, "lr": 0.5},
    ]
    if reverse:
        groups.reverse()
    if shuffle:
        for group in groups:
            group["params"].reverse()
    return {"model": model, "optimizer": optim.Adam(groups, lr=0.01)}


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    names = {p: n for n, p in state["model"].named_parameters()}
    return {
        names[p]: {**slots, **{k: v for k, v in group.items() if k != "params"}}
        for group in state["optimizer"].param_groups
        for p in group["params"]
        for slots in [state["optimizer"].state[p]]
    }


@pytest.mark.parametrize("order", [{"reverse": True}, {"shuffle": True}])
def test_groups_are_matched_by_names_and_not_by_order(order: dict[str, bool]) -> None:
    original, resumed = two_groups(1), two_groups(2, **order)
    train(original["model"], original["optimizer"], 2)
    original["optimizer"].param_groups[1]["lr"] = 0.25
    image(original).load(resumed)
    expected, found = by_name(original), by_name(resumed)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        for key, value in values.items():
            is_same = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
            assert is_same(value, found[name][key])


def test_parameters_grouped_otherwise_are_refused() -> None:
    original, resumed = two_groups(1), adam_pair(2)
    train(original["model"], original["optimizer"], 1)
    before = digest(resumed)
    with pytest.raises(MismatchError, match="grouped differently"):
        image(original).prepare(resumed)
    with pytest.raises(MismatchError, match="grouped differently"):
        image(original).prepare(resumed, strict=False)
    assert digest(resumed) == before


def test_another_optimizer_is_refused_when_strict() -> None:
    original = adam_pair(1)
    resumed = adam_pair(2)
    resumed["optimizer"] = optim.RMSprop(resumed["model"].parameters())
    with pytest.raises(MismatchError, match="saved from Adam, the live optimizer is RMSprop"):
        image(original).prepare(resumed)
    prepared = image(original).prepare(resumed, strict=False)
    assert any("saved from Adam" in note for note in prepared.notes)


def test_state_that_was_not_there_is_removed() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    train(resumed["model"], resumed["optimizer"], 1)
    image(original).load(resumed)
    assert not resumed["optimizer"].state
    assert digest(original) == digest(resumed)


def test_existing_slots_are_copied_into() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    for state in (original, resumed):
        train(state["model"], state["optimizer"], 2)
    weight = resumed["model"][0].weight
    before = dict(resumed["optimizer"].state[weight])
    image(original).load(resumed)
    after = resumed["optimizer"].state[weight]
    assert all(after[slot] is before[slot] for slot in before)
    assert digest(original) == digest(resumed)


def test_new_slots_do_not_share_the_read_buffer() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    train(original["model"], original["optimizer"], 1)
    image(original).load(resumed)
    for slots in resumed["optimizer"].state.values():
        for tensor in slots.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.data_ptr() % 64 == 0


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    def build(seed: int) -> dict[str, Any]:
        model = plain_model(seed)
        rate = torch.tensor(0.01 * seed)
        return {"model": model, "optimizer": optim.AdamW(model.parameters(), lr=rate)}

    original, resumed = build(1), build(2)
    rate = resumed["optimizer"].param_groups[0]["lr"]
    image(original).load(resumed)
    assert resumed["optimizer"].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.01)


def test_a_number_goes_into_a_live_tensor_learning_rate() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    rate = torch.tensor(5.0)
    resumed["optimizer"].param_groups[0]["lr"] = rate
    image(original).load(resumed)
    assert resumed["optimizer"].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.01)


def test_a_learning_rate_of_another_dtype_is_refused() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    original["optimizer"].param_groups[0]["lr"] = torch.tensor(0.1)
    resumed["optimizer"].param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    with pytest.raises(MismatchError) as caught:
        image(original).prepare(resumed)
    assert caught.value.wrong_dtype == ["optimizer.param_groups.0.lr: stored F32, live F64"]


def test_names_of_parameters_stay_with_the_live_group() -> None:
    """`param_names` are positions: taking the stored ones would mislabel reordered parameters."""

    def build(seed: int, *, reverse: bool) -> dict[str, Any]:
        model = plain_model(seed)
        named = list(model.named_parameters())
        return {"model": model, "optimizer": optim.Adam(named[::-1] if reverse else named)}

    original, resumed = build(1, reverse=False), build(2, reverse=True)
    train(original["model"], original["optimizer"], 1)
    image(original).load(resumed)
    group = resumed["optimizer"].param_groups[0]
    assert group["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_state_under_text_keys_is_kept_and_stale_ones_go() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    original["optimizer"].state["global"] = {"count": 3, "sums": torch.ones(2)}
    resumed["optimizer"].state["old"] = 1
    image(original).load(resumed)
    assert "old" not in resumed["optimizer"].state
    assert resumed["optimizer"].state["global"]["count"] == 3
    assert digest(original) == digest(resumed)


def test_state_of_a_strange_tensor_is_refused() -> None:
    state = adam_pair(1)
    state["optimizer"].state[torch.ones(2)] = {"step": 1}
    state["optimizer"].state[7] = {"step": 1}
    with pytest.raises(UnsupportedState) as caught:
        capture(state)
    assert caught.value.paths == ["optimizer.state", "optimizer.state"]


def test_what_cannot_be_saved_inside_a_slot_is_named_by_its_parameter() -> None:
    state = adam_pair(1)
    weight = state["model"][0].weight
    state["optimizer"].state[weight] = {"nested": [{"bad": object()}], "meta": weight.to("meta")}
    with pytest.raises(UnsupportedState) as caught:
        capture(state)
    assert caught.value.paths == [
        "optimizer.0.weight.nested.0.bad",
        "optimizer.0.weight.meta",
    ]


def test_nested_slots_come_back() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    weight = original["model"][0].weight
    original["optimizer"].state[weight] = {"nested": [{"a": torch.ones(2)}, (1, None, "x")]}
    image(original).load(resumed)
    assert digest(original) == digest(resumed)


def test_state_that_is_no_dict_comes_back() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    original["optimizer"].state[original["model"][0].weight] = torch.ones(3)
    image(original).load(resumed)
    assert torch.equal(resumed["optimizer"].state[resumed["model"][0].weight], torch.ones(3))


def test_another_shape_of_a_parameter_is_found_without_its_module() -> None:
    def build(size: int) -> dict[str, Any]:
        return {"optimizer": optim.SGD([nn.Parameter(torch.ones(size))], lr=0.1)}

    with pytest.raises(MismatchError) as caught:
        image(build(3)).prepare(build(4))
    assert caught.value.wrong_shape == ["optimizer.group0.param0: stored for [3], live [4]"]


def test_a_strict_load_lists_parameters_that_only_one_side_has() -> None:
    """D32: strict is honoured."""
    original, resumed = adam_pair(1), adam_pair(2)
    resumed["model"].append(nn.Linear(3, 2))
    resumed["optimizer"].add_param_group({"params": list(resumed["model"][3].parameters())})
    train(original["model"], original["optimizer"], 1)
    with pytest.raises(MismatchError) as caught:
        image(original).prepare(resumed)
    expected = ["model.3.weight", "model.3.bias", "optimizer.3.weight", "optimizer.3.bias"]
    assert caught.value.missing == expected

    loaded = image(original).load(resumed, strict=False)
    assert len(loaded.notes) == 4
    kept = resumed["optimizer"].state
    assert resumed["model"][0].weight in kept
    assert resumed["model"][3].weight not in kept


def test_skipping_leaves_slots_and_options_alone() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    train(original["model"], original["optimizer"], 2)
    train(resumed["model"], resumed["optimizer"], 1)
    resumed["optimizer"].param_groups[0]["lr"] = 7.0
    state = resumed["optimizer"].state
    first, last = resumed["model"][0].weight, resumed["model"][2].bias
    average, slots = state[first]["exp_avg"].clone(), dict(state[last])
    image(original).load(
        resumed,
        skip=["optimizer.param_groups.0.lr", "optimizer.0.weight.exp_avg", "optimizer.2.bias"],
    )
    assert resumed["optimizer"].param_groups[0]["lr"] == 7.0
    assert torch.equal(state[first]["exp_avg"], average)
    assert state[first]["step"].item() == 2
    assert all(state[last][slot] is value for slot, value in slots.items())
    assert state[last]["step"].item() == 1


def test_renaming_reaches_the_optimizer() -> None:
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(3, 3))

    def build(name: str) -> dict[str, Any]:
        model = Named(name)
        return {"model": model, "optimizer": optim.Adam(model.parameters())}

    original, resumed = build("old"), build("new")
    for parameter in original["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    original["optimizer"].step()
    table = {"old.weight": "new.weight", "old.bias": "new.bias"}
    image(original).load(resumed, rename=table)
    other = build("new")
    image(original).load(other, rename=lambda name: name.replace("old", "new"))
    assert digest(resumed) == digest(other)
    state = resumed["optimizer"].state
    assert state[resumed["model"].new.weight]["step"].item() == 1


def test_a_saved_step_counter_comes_back_beside_the_right_device() -> None:
    """A step without the capturable or fused flag is a CPU tensor, whatever the parameter's."""
    original, resumed = adam_pair(1), adam_pair(2)
    train(original["model"], original["optimizer"], 1)
    image(original).load(resumed)
    assert resumed["optimizer"].state[resumed["model"][0].weight]["step"].device.type == "cpu"


def test_an_optimizer_with_its_own_state_dict_is_left_to_itself() -> None:
    class Own(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    model = plain_model(1)
    state = {"model": model, "optimizer": Own(model.parameters(), lr=0.1)}
    saved = image(state)
    assert saved.stored["optimizer"].kind == "object"
    saved.load(state)
    assert state["optimizer"].loaded == {"mine": 1}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tree: tree.pop("groups"),
        lambda tree: tree.update(groups={}),
        lambda tree: tree.update(groups=[1]),
        lambda tree: tree.update(groups=[[1]]),
        lambda tree: tree.update(groups=[tuple(tree["groups"][0])]),
        lambda tree: tree.update(param_groups=[1]),
        lambda tree: tree.update(param_groups=[]),
        lambda tree: tree.update(param_groups=tuple(tree["param_groups"])),
        lambda tree: tree["shapes"].popitem(),
        lambda tree: tree["slots"].update(stranger={}),
        lambda tree: tree["groups"][0].append("0.weight"),
    ],
)
def test_a_tree_that_no_optimizer_wrote_is_a_format_error(spoil: Callable[[Any], None]) -> None:
    """Invariant 5: what is read is checked before it is used."""
    state = adam_pair(1)
    saved = image(state)
    tree = decode_tree(saved.stored["optimizer"].tree, what="test")
    spoil(tree)
    saved.stored["optimizer"] = StoredComponent(
        name="optimizer",
        kind="optimizer",
        tree=document(tree).data,
        tensors=saved.stored["optimizer"].tensors,
    )
    with pytest.raises(FormatError):
        saved.prepare(state)


class Slot(str, enum.Enum):
    """A name of a state beside the slots."""

    AVERAGE = "average"


def test_a_state_that_is_named_by_an_enumeration_does_not_stop_the_load() -> None:
    original, resumed = adam_pair(1), adam_pair(2)
    train(original["model"], original["optimizer"], 1)
    state: dict[Any, Any] = original["optimizer"].state
    state[Slot.AVERAGE] = 5
    image(original).load(resumed)
    weight = resumed["model"][0].weight
    assert resumed["optimizer"].state[weight]["step"].item() == 1


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "Step": lambda o: optim.lr_scheduler.StepLR(o, 2),
    "MultiStep": lambda o: optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "OneCycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "Cosine": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "Lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "Cyclic": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "Sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
    "Chained": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWA": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_nothing_had_happened(name: str, tensor_lr: bool) -> None:
    """Invariant 7, for the schedulers of torch."""

    def build(seed: int) -> dict[str, Any]:
        model = small_model(seed)
        rate = torch.tensor(0.05) if tensor_lr else 0.05
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=0.9, foreach=False)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    original, resumed = build(1), build(2)
    train(original["model"], original["optimizer"], 4, scheduler=original["scheduler"])
    saved = image(original)
    train(original["model"], original["optimizer"], 4, scheduler=original["scheduler"])
    saved.load(resumed)
    train(resumed["model"], resumed["optimizer"], 4, scheduler=resumed["scheduler"])
    assert digest(original) == digest(resumed)


def test_a_plateau_scheduler_and_its_infinities_come_back() -> None:
    def build(seed: int) -> dict[str, Any]:
        model = small_model(seed)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"model": model, "optimizer": optimizer, "scheduler": plateau}

    original, resumed = build(1), build(2)
    image(original).load(resumed)
    assert digest(original) == digest(resumed)
    for loss in (3.0, float("nan"), 4.0, 5.0):
        original["scheduler"].step(loss)
    image(original).load(resumed)
    assert digest(original) == digest(resumed)


def test_a_gradient_scaler_comes_back() -> None:
    def build(scale: float) -> dict[str, Any]:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=scale)}

    original, resumed = build(1024.0), build(2.0)
    image(original).load(resumed)
    assert resumed["scaler"].get_scale() == 1024.0
