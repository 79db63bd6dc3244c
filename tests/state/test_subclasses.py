"""Tensor subclasses: saved as inner tensors, loaded only into live ones of the same class."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import CheckpointManager
from holdfast.errors import MismatchError, UnsupportedState
from holdfast.state.capture.capture import capture
from quantized import (
    Mode,
    Scaled,
    Settings,
    Sizes,
    bits_in,
    bits_of,
    quantized_model,
    scaled,
    scaled_model,
)
from state.roundtrip import digest, image


def test_quantized_weights_are_saved_and_resumed_to_the_bit(tmp_path: Path) -> None:
    states = [
        {"model": model, "optimizer": torch.optim.SGD(model[-1].parameters(), lr=0.1)}
        for model in map(quantized_model, (1, 2))
    ]
    one, other = (state["model"] for state in states)
    kinds = [type(layer.weight).__name__ for layer in one]
    assert kinds[:4] == ["Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "NF4Tensor"]
    before, expected = dict(other.named_parameters()), bits_in(one)
    assert bits_in(other) != expected
    with CheckpointManager(tmp_path, states[0]) as manager:
        manager.save(1, wait=True)
    with CheckpointManager(tmp_path, states[1]) as manager:
        assert manager.resume() is not None
    assert bits_in(other) == expected
    assert bits_in(one) == expected
    for name, parameter in other.named_parameters():
        assert parameter is before[name]


def test_inner_tensors_have_keys_below_the_path() -> None:
    tensors = capture({"model": scaled_model()}).components["model"].tensors
    assert [*tensors][:2] == ["0.weight.codes", "0.weight.scale"]


def test_inner_tensors_keep_their_memory() -> None:
    one, other = scaled_model(1), scaled_model(2)
    weight = other[0].weight
    at = weight.codes.data_ptr()
    image({"model": one}).load({"model": other})
    assert other[0].weight is weight
    assert weight.codes.data_ptr() == at
    assert bits_in(other) == bits_in(one)


def test_subclasses_inside_of_subclasses_are_saved() -> None:
    def new(seed: int) -> nn.Module:
        inner, outer = scaled(seed), scaled(seed)
        outer.scale = inner
        return nn.ParameterDict({"w": nn.Parameter(outer, requires_grad=False)})

    one, other = new(1), new(2)
    found = image({"model": one})
    assert [*found.tensors["model"]] == ["w.codes", "w.scale.codes", "w.scale.scale"]
    found.load({"model": other})
    assert bits_in(other) == bits_in(one)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mode": Mode.DOWN}, ["mode"]),
        ({"block": (2, 3)}, ["block.1", "2", "3"]),
        ({"block": [2, 2]}, ["block"]),
        ({"shape": (2, 2)}, ["shape"]),
        ({"settings": Settings(dtype=torch.float16)}, ["settings.Settings.dtype", "float16"]),
        ({"settings": Settings(sizes=Sizes(2, 0.25))}, ["sizes.Sizes.width", "0.25"]),
        ({"nothing": 0}, ["nothing"]),
        ({"names": ["a"]}, ["names"]),
        ({"scale": 0.25}, ["scale", "0.25"]),
        ({"another": None}, ["its context", "another"]),
    ],
)
def test_another_context_is_refused_by_name(changes: dict[str, Any], names: list[str]) -> None:
    stored, live = image({"model": scaled_model(1)}), {"model": scaled_model(2, **changes)}
    before = digest(live)
    with pytest.raises(MismatchError) as caught:
        stored.load(live)
    assert [name for name in ("model.0.weight", *names) if name not in str(caught.value)] == []
    assert digest(live) == before


def test_devices_in_a_context_may_differ() -> None:
    live = scaled_model(2, settings=Settings(device=torch.device("meta")))
    image({"model": scaled_model(1)}).load({"model": live})
    assert bits_in(live) == bits_in(scaled_model(1))


def test_a_plain_tensor_and_a_subclass_are_not_mixed() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for one, other in ((plain, scaled_model()), (scaled_model(), plain)):
        with pytest.raises(MismatchError, match="Scaled"):
            image({"model": one}).load({"model": other})


class Twice(Scaled):
    """Another class with the same inner tensors."""


def test_another_class_is_refused() -> None:
    live = scaled_model()
    one = live[0].weight
    twice = Twice(one.codes, one.scale, one.context)
    live[0].weight = nn.Parameter(twice, requires_grad=False)
    with pytest.raises(MismatchError, match="Twice"):
        image({"model": scaled_model()}).load({"model": live})


def test_another_shape_is_refused() -> None:
    live = scaled_model()
    live[0].weight = nn.Parameter(scaled(shape=(4, 2)), requires_grad=False)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        image({"model": scaled_model()}).load({"model": live})


@pytest.mark.parametrize("value", [print, object(), torch.ones(1), {1.5: 2}, {1}])
def test_a_context_that_cannot_be_compared_is_refused_early(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match=r"model\.0\.weight.*Scaled"):
        CheckpointManager(tmp_path, {"model": scaled_model(strange=value)})


def test_a_context_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedState, match="inside itself"):
        CheckpointManager(tmp_path, {"model": scaled_model(strange=endless)})


class Computed(Scaled):
    """Computes an inner tensor at each access."""

    @property
    def codes(self) -> torch.Tensor:
        return self.held.clone()

    @codes.setter
    def codes(self, value: torch.Tensor) -> None:
        self.held = value


def test_inner_tensors_that_are_computed_are_refused() -> None:
    one = Computed(torch.ones(2, 2, dtype=torch.int8), torch.ones(2), {})
    with pytest.raises(UnsupportedState, match=r"values\.w.*codes: each access"):
        capture({"values": {"w": one}})


def test_tied_subclasses_stay_tied() -> None:
    def new(seed: int) -> nn.Module:
        model = scaled_model(seed)
        model.register_module("again", nn.Linear(3, 4))
        model.again.weight = model[0].weight
        return model

    one, other = new(1), new(2)
    found = image({"model": one})
    assert "again.weight.codes" not in found.tensors["model"]
    found.load({"model": other})
    assert bits_in(other) == bits_in(one)
    assert other.again.weight is other[0].weight


def test_subclasses_in_dicts_are_copied_into() -> None:
    one, other = scaled(1), scaled(2)
    codes = other.codes
    live = {"average": {"w": other}}
    image({"average": {"w": one}}).load(live)
    assert live["average"]["w"] is other
    assert other.codes is codes
    assert bits_of(other) == bits_of(one)


def test_a_dict_that_holds_the_weights_of_the_model_gets_tensors_of_its_own() -> None:
    saved = scaled_model(1)
    best = {"best": scaled(3)}
    live = scaled_model(2)
    mine = {"model": live, "best": {"best": live[0].weight.detach()}}
    image({"model": saved, "best": best}).load(mine)
    assert bits_in(live) == bits_in(saved)
    assert bits_of(mine["best"]["best"]) == bits_of(best["best"])
    assert type(mine["best"]["best"]).__name__ == "Scaled"


def test_a_dict_without_a_live_tensor_for_a_subclass_is_refused() -> None:
    live: dict[str, Any] = {"average": {}}
    with pytest.raises(MismatchError, match=r"average\.w.*Scaled"):
        image({"average": {"w": scaled(1)}}).load(live)
    assert live == {"average": {}}


class Loads(nn.Linear):
    """A module with loading code of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def test_modules_with_loading_code_of_their_own_get_live_classes() -> None:
    def new(seed: int) -> nn.Module:
        model = scaled_model(seed)
        made = Loads(3, 4)
        made.weight = nn.Parameter(scaled(seed), requires_grad=False)
        model.register_module("own", made)
        return model

    one, other = new(1), new(2)
    image({"model": one}).load({"model": other})
    assert bits_in(other) == bits_in(one)


def test_a_copy_of_a_model_is_a_component_too() -> None:
    saved = {"model": scaled_model(1), "average": scaled_model(3)}
    live = {"model": scaled_model(2), "average": copy.deepcopy(scaled_model(2))}
    image(saved).load(live)
    for name, model in live.items():
        assert bits_in(model) == bits_in(saved[name])
