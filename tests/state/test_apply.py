"""A load as a whole: all checks first, everything or nothing, and in which order."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch import nn, optim

from holdfast.errors import (
    FormatError,
    HoldfastError,
    MismatchError,
    UnsupportedState,
    UsageError,
)
from holdfast.format.nodes import TensorRef
from holdfast.format.objects import document
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.capture.capture import capture
from holdfast.state.components import StoredComponent
from state.roundtrip import (
    assert_same_tensors,
    digest,
    global_generators_kept,
    image,
    small_model,
    train,
)


class Recorder:
    """An object that notes when it is loaded, and what it then sees."""

    def __init__(self, log: list[str], name: str, model: nn.Module | None = None) -> None:
        self.log, self.name, self.model = log, name, model

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        seen = "" if self.model is None else f" {self.model.weight[0, 0].item():.0f}"
        self.log.append(self.name + seen)


def whole(seed: int) -> dict[str, Any]:
    model = small_model(seed)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "ema": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "sampler": torch.Generator().manual_seed(seed),
        "progress": {"seen": seed, "log": [seed]},
    }


def test_n_and_m_steps_are_the_same_bits_with_a_load_between() -> None:
    """Invariant 7, over every kind of component at once."""
    one = whole(1)
    train(one["model"], one["optimizer"], 3, scheduler=one["scheduler"])
    saved = image(one)
    train(one["model"], one["optimizer"], 3, scheduler=one["scheduler"])
    one_draw = torch.rand(3, generator=one["sampler"])

    two = whole(2)
    saved.load(two)
    train(two["model"], two["optimizer"], 3, scheduler=two["scheduler"])
    assert torch.equal(one_draw, torch.rand(3, generator=two["sampler"]))
    assert digest(one) == digest(two)


class Draws:
    """An object that draws from generators while it is loaded."""

    def __init__(self, sampler: torch.Generator) -> None:
        self.sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3, generator=self.sampler)
        random.random()


def test_what_loading_draws_is_put_back() -> None:
    """Invariant 7: generators come last, those of the state and the global ones."""
    with global_generators_kept():
        sampler = torch.Generator().manual_seed(1)
        state = {"sampler": sampler, "draws": Draws(sampler)}
        saved = image(state)
        expected = torch.rand(3, generator=sampler).tolist(), random.random()
        saved.load(state)
        assert (torch.rand(3, generator=sampler).tolist(), random.random()) == expected


def test_a_refused_load_lists_everything_and_changes_nothing() -> None:
    """D18, D32, invariant 6: one bad leaf anywhere, and every component stays as it was."""
    saved = image(whole(1))
    live = whole(2)
    train(live["model"], live["optimizer"], 1)
    live["model"][4] = nn.Linear(8, 4).to(torch.float16)
    live["optimizer"].param_groups[0]["lr"] = torch.tensor(0.5)
    live["sampler"] = torch.Generator().manual_seed(7)
    live["progress"] = [1]
    live["extra"] = {}
    before = digest(live)
    with pytest.raises(MismatchError) as caught:
        saved.prepare(live)
    text = str(caught.value)
    assert digest(live) == before
    assert caught.value.missing[0] == "extra (the whole component)"
    assert any(line.startswith("model.4.weight") for line in caught.value.wrong_shape)
    assert any(line.startswith("model.4.bias") for line in caught.value.wrong_dtype)
    assert "progress: stored a dict, live a list" in text
    assert "nothing was changed" in text


def test_a_damaged_part_found_late_still_changes_nothing() -> None:
    """D18: bytes that no generator takes are found before the first leaf is written."""
    saved, live = image(whole(1)), whole(2)
    saved.tensors["rng"]["torch.state"].fill_(255)
    before = digest(live)
    with pytest.raises(FormatError):
        saved.load(live)
    assert digest(live) == before


def test_foreign_objects_come_after_all_leaves_in_their_order() -> None:
    log: list[str] = []
    model = nn.Linear(1, 1)
    state = {"b": Recorder(log, "b", model), "a": Recorder(log, "a"), "model": model}
    saved = image(state)
    saved.tensors["model"]["weight"].fill_(5)
    prepared = saved.prepare(state)
    prepared.ready(saved.tensors)
    log.clear()
    prepared.apply_values(saved.tensors)
    assert log == ["b 5", "a"]


class Meter:
    """An object of another library: it counts, and takes no negative total."""

    def __init__(self, total: int) -> None:
        self.total, self.seen = total, [total]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        if state["total"] < 0:
            raise ValueError("a negative total")
        self.total = state["total"]
        self.seen.append(self.total)


def test_what_an_object_refuses_is_refused_before_anything_changes() -> None:
    """Invariant 6."""
    saved = image({"first": Meter(3), "meter": Meter(-1), "model": nn.Linear(1, 1)})
    state = {"first": Meter(5), "meter": Meter(7), "model": nn.Linear(1, 1)}
    before = digest({"model": state["model"]})
    with pytest.raises(MismatchError, match=r"meter: Meter\..*ValueError: a negative total"):
        saved.load(state)
    assert digest({"model": state["model"]}) == before
    assert (state["first"].total, state["meter"].total) == (5, 7)
    assert state["meter"].seen[0] == 7


class Outside:
    """An object whose state is not in its attributes, and that takes no negative total."""

    TOTALS: ClassVar[dict[int, int]] = {}
    __slots__ = ("key",)

    def __init__(self, key: int, total: int) -> None:
        self.key, self.TOTALS[key] = key, total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.TOTALS[self.key]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["total"] < 0:
            raise ValueError("a negative total")
        self.TOTALS[self.key] = state["total"]


def test_a_refusal_after_a_trial_that_could_not_be_undone_says_so() -> None:
    saved = image({"outside": Outside(1, 3), "meter": Meter(-1)})
    live = {"outside": Outside(2, -7), "meter": Meter(7)}
    with pytest.raises(MismatchError, match=r"except perhaps outside: .*a negative total") as error:
        saved.load(live)
    assert Outside.TOTALS[2] == 3, "it was changed"
    assert "except perhaps outside" in str(error.value.hinting("more").beside("x").hinting("y"))


def test_the_trial_of_an_object_leaves_no_trace_in_what_it_then_loads() -> None:
    saved, live = image({"meter": Meter(3)}), Meter(5)
    saved.load({"meter": live})
    assert (live.total, live.seen) == (3, [3, 3])


@pytest.mark.parametrize("is_enabled", [True, False])
def test_mixed_precision_may_be_switched_and_that_is_said(is_enabled: bool) -> None:
    def scaler(is_on: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=is_on, init_scale=4.0)

    live = scaler(is_enabled)
    prepared = image({"scaler": scaler(not is_enabled)}).load({"scaler": live})
    assert [note for note in prepared.lost if "scaler: saved with" in note] != []
    assert live.get_scale() == (4.0 if is_enabled else 1.0)


def test_a_failure_after_the_checks_is_an_error_of_ours_with_its_cause() -> None:
    class Failing(Recorder):
        def check_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError("no")

    state = {"x": Failing([], "x")}
    with pytest.raises(OpaqueLoadFailed, match="ZeroDivisionError: no") as caught:
        image(state).load(state)
    assert isinstance(caught.value, HoldfastError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_prepared_load_is_applied_once() -> None:
    state = {"data": {"x": torch.ones(2)}}
    saved = image(state)
    prepared = saved.prepare(state)
    prepared.apply_values(saved.tensors)
    with pytest.raises(UsageError, match="already applied"):
        prepared.apply_values(saved.tensors)


def test_only_the_needed_tensors_are_asked_for() -> None:
    saved = image(whole(1))
    prepared = saved.prepare(whole(2), components=["model"], skip=["model.0"])
    assert set(prepared.needed) == {"model"}
    assert "0.weight" not in prepared.needed["model"]
    assert "1.weight" in prepared.needed["model"]


def test_weights_alone_load_without_the_optimizer() -> None:
    original, live = whole(1), whole(2)
    train(original["model"], original["optimizer"], 2)
    image(original).load({"model": live["model"]}, components=["model"])
    assert_same_tensors(original["model"].state_dict(), live["model"].state_dict())


def test_a_tree_that_holds_the_models_own_tensors_does_not_overwrite_the_model() -> None:
    """`best = model.state_dict()` before the first improvement: the weights, by reference."""
    original = nn.Linear(2, 2)
    state = {
        "model": original,
        "best": {k: torch.zeros_like(v) for k, v in original.state_dict().items()},
    }
    live = nn.Linear(2, 2)
    best = {k: v.detach() for k, v in live.state_dict().items()}
    for order in (("model", "best"), ("best", "model")):
        image(state).load({name: {"model": live, "best": best}[name] for name in order})
        assert torch.equal(live.weight, original.weight)
        assert best["weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_tree_loaded_alone_does_not_overwrite_the_model_either() -> None:
    live = nn.Linear(2, 2)
    best = {"weight": live.weight.detach()}
    kept = live.weight.clone()
    saved = image({"model": nn.Linear(2, 2), "best": {"weight": torch.zeros(2, 2)}})
    saved.load({"model": live, "best": best}, components=["best"])
    assert torch.equal(live.weight, kept)
    assert best["weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_one_module_under_two_names_goes_round() -> None:
    def build() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].bias.data[0] = float("nan")
        return {"model": model, "trunk": model[0]}

    original, resumed = build(), build()
    image(original).load(resumed)
    assert_same_tensors(original["model"].state_dict(), resumed["model"].state_dict())


def test_two_modules_that_became_one_are_refused_when_their_values_differ() -> None:
    shared = nn.Linear(2, 2)
    state = {"model": shared, "ema": shared}
    saved = image({"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)})
    before = digest(state)
    with pytest.raises(MismatchError, match="are one tensor here, and had two values"):
        saved.load(state)
    assert digest(state) == before


def test_a_checkpoint_whose_slots_are_too_small_for_a_fused_kernel_is_refused() -> None:
    """Invariant 5: the kernel trusts the slot's size and writes beyond its end."""

    def build(**options: Any) -> dict[str, Any]:
        model = nn.Linear(64, 64)
        optimizer = optim.Adam(model.parameters(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    small, narrow = build(fused=True), build(fused=True)
    small["optimizer"].state[small["model"].weight]["exp_avg"] = torch.ones(1)
    slots = narrow["optimizer"].state[narrow["model"].weight]
    slots["exp_avg"] = slots["exp_avg"].to(torch.float16)
    slots["step"] = torch.zeros((), dtype=torch.float16)
    with pytest.raises(MismatchError) as caught:
        image(small).prepare(build(fused=True))
    assert caught.value.wrong_shape == [
        "optimizer.weight.exp_avg: stored [1], fused it is [64, 64]"
    ]
    with pytest.raises(MismatchError) as caught:
        image(narrow).prepare(build(fused=True))
    assert len(caught.value.wrong_dtype) == 2
    small["optimizer"].param_groups[0]["fused"] = None
    with pytest.raises(MismatchError):
        image(small).prepare(build(fused=True))
    image(small).prepare(build())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_slots_of_channels_last_weights_get_their_strides(options: dict[str, bool]) -> None:
    """Invariant 7: a fused kernel pairs elements by place, so contiguous moments would be mixed."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return {"model": model, "optimizer": optim.Adam(model.parameters(), **options)}

    def steps(state: dict[str, Any], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            for parameter in state["model"].parameters():
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
            state["optimizer"].step()

    original, resumed = build(1), build(2)
    steps(original, 1)
    image(original).load(resumed)
    slots = resumed["optimizer"].state[resumed["model"].weight]
    assert slots["exp_avg"].stride() == resumed["model"].weight.stride()
    steps(original, 2)
    steps(resumed, 2)
    assert digest(original) == digest(resumed)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
def test_tensors_of_a_device_that_is_not_here_come_to_the_cpu_with_a_note() -> None:
    live: dict[str, Any] = {}
    saved = image({"data": {"x": torch.ones(2)}})
    saved.stored["data"] = StoredComponent(
        name="data",
        kind="tree",
        tree=document({"x": TensorRef("x", "cuda:0")}).data,
        tensors=saved.stored["data"].tensors,
    )
    prepared = saved.load({"data": live})
    assert prepared.notes == ("data: saved from cuda:0, which is not here: on the CPU instead",)
    assert live["x"].tolist() == [1.0, 1.0]


def test_the_same_live_state_gives_the_same_capture_twice() -> None:
    state = whole(1)
    train(state["model"], state["optimizer"], 1)
    first, second = capture(state), capture(state)
    for name, component in first.components.items():
        assert component.tree == second.components[name].tree
        assert component.specs == second.components[name].specs


def test_a_distributed_wrapper_leaves_no_trace() -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        names = list(capture({"model": wrapped}).components["model"].tensors)
        plain = nn.Linear(2, 2)
        image({"model": plain}).load({"model": wrapped})
        assert torch.equal(wrapped.module.weight, plain.weight)
    finally:
        dist.destroy_process_group()
    assert names == ["weight", "bias"]


def test_an_optimizer_that_cannot_give_its_state_is_named_with_the_remedy() -> None:
    dist = pytest.importorskip("torch.distributed")
    zero = pytest.importorskip("torch.distributed.optim").ZeroRedundancyOptimizer
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        state = {"model": model, "sharded": zero(model.parameters(), torch.optim.AdamW)}
        with pytest.raises(UnsupportedState, match=r"sharded: Zero.*consolidated.*docs/ranks.md"):
            capture(state)
    finally:
        dist.destroy_process_group()


class _Adding:
    """An object whose loading adds to what it has, and a module with such an extra state."""

    def __init__(self) -> None:
        self.seen, self.count = [[1]], 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1], "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen[0].extend(state["seen"])
        self.count += state["count"]


class _AddingModule(_Adding, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        _Adding.__init__(self)

    state_dict = nn.Module.state_dict  # type: ignore[assignment]
    load_state_dict = nn.Module.load_state_dict  # type: ignore[assignment]

    def get_extra_state(self) -> Any:
        return _Adding.state_dict(self)

    def set_extra_state(self, state: Any) -> None:
        _Adding.load_state_dict(self, state)


@pytest.mark.parametrize("kind", [_Adding, _AddingModule])
def test_the_trial_of_a_load_that_adds_to_what_is_there_leaves_nothing(kind: Any) -> None:
    live = kind()
    image({"held": kind()}).load({"held": live})
    assert (live.seen, live.count) == ([[1, 1]], 2)


class _Empty:
    """An object that does not load the state that it has before it is filled."""

    average: dict[str, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state["average"].items())


def test_an_object_loads_that_refuses_the_state_from_before_it_was_filled() -> None:
    saved, live = _Empty(), _Empty()
    saved.average = {"a": 1}
    image({"held": saved}).load({"held": live})
    assert live.average == {"a": 1}
