"""What a `state_dict` will give is known without the call, or not claimed to be known."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state import modules
from holdfast.state.capture.capture import Capturer, capture
from holdfast.state.capture.recall import predict_state


class Branching(nn.Module):
    """Ties, buffers of both kinds, absent children, parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.absent = None
        self.register_module("gone", None)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.ModuleList([nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1), nn.ReLU())])
        self.scale = nn.Parameter(torch.ones(()))


class OwnDict(nn.Linear):
    """Decides by itself what is saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        return {"other": torch.ones(1), **super().state_dict(*args, **kwargs)}


class OwnSaving(nn.Linear):
    """The same, a level below."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "other"] = torch.ones(1)


class Extra(nn.Linear):
    """Has more than tensors."""

    def get_extra_state(self) -> Any:
        """See the base class."""
        return {"calls": 1}


def hooked() -> nn.Module:
    """A module with a hook after `state_dict`."""
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda *_: None)
    return module


def hooked_before() -> nn.Module:
    """A module with a hook before it."""
    module = nn.Linear(2, 2)
    module.register_state_dict_pre_hook(lambda *_: None)
    return module


def shadowed() -> nn.Module:
    """A module with a function of its own, which its class does not have."""
    module = nn.Linear(2, 2)
    module.state_dict = dict  # type: ignore[assignment,method-assign]
    return module


def test_what_is_foreseen_is_what_a_state_dict_gives() -> None:
    module = Branching()
    predicted = predict_state(module)
    assert predicted is not None
    assert predicted.matches_tensors(list(module.state_dict().values()))


def test_what_is_foreseen_is_not_taken_for_other_entries() -> None:
    module = nn.Linear(2, 2)
    predicted = predict_state(module)
    assert predicted is not None
    weight, bias = module.state_dict().values()
    assert not predicted.matches_tensors([weight])
    assert not predicted.matches_tensors([weight, bias.clone()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnDict(2, 2),
        lambda: OwnSaving(2, 2),
        lambda: Extra(2, 2),
        hooked,
        hooked_before,
        shadowed,
        lambda: nn.LazyLinear(2),
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_nothing_is_foreseen_where_others_have_a_say(make: Callable[[], nn.Module]) -> None:
    assert predict_state(make()) is None
    assert predict_state(nn.Sequential(nn.Linear(2, 2), make())) is None


def test_nothing_is_foreseen_where_somebody_put_a_function_in_the_place_of_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = nn.Module.state_dict
    monkeypatch.setattr(nn.Module, "state_dict", lambda self, **given: own(self, **given))
    assert predict_state(nn.Linear(2, 2)) is None


def test_a_module_is_asked_once_while_its_structure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Branching()
    capturer = Capturer({"model": module})
    capturer.capture()
    monkeypatch.setattr(modules, "stamp", lambda _: pytest.fail("asked again"))
    with torch.no_grad():
        module.scale.fill_(3.0)
    captured = capturer.capture().components["model"].tensors
    assert captured["scale"].item() == 3.0
    assert not captured["scale"].requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_buffer("new", torch.ones(1)),
        lambda m: setattr(m, "kept", torch.zeros(2)),
        lambda m: setattr(m, "kept", torch.zeros(5)),
        lambda m: setattr(m, "nothing", torch.zeros(2)),
        lambda m: setattr(m, "gone", nn.Linear(1, 1)),
        lambda m: setattr(m, "scale", nn.Parameter(torch.zeros(()))),
        lambda m: setattr(m.scale, "data", torch.zeros(4)),
        lambda m: setattr(m.scale, "data", torch.zeros((), dtype=torch.float64)),
        lambda m: setattr(m.tied, "weight", nn.Parameter(torch.zeros(3, 3))),
        lambda m: m._non_persistent_buffers_set.add("kept"),
        lambda m: m.inner.append(nn.Linear(1, 1)),
        lambda m: delattr(m, "first"),
        lambda m: m.register_state_dict_post_hook(lambda *a: a[1].pop("scale") and None),
        lambda m: setattr(m, "_version", 7),
    ],
)
def test_a_change_is_captured_as_if_for_the_first_time(change: Callable[[Any], None]) -> None:
    module = Branching()
    capturer = Capturer({"model": module})
    capturer.capture()
    capturer.capture()
    change(module)
    later = capturer.capture().components["model"]
    anew = capture({"model": module}).components["model"]
    assert (later.tree, later.specs) == (anew.tree, anew.specs)
    assert [t.data_ptr() for t in later.tensors.values()] == [
        t.data_ptr() for t in anew.tensors.values()
    ]


def test_what_an_object_before_it_changes_is_seen() -> None:
    module = nn.BatchNorm1d(2)

    class Meddling:
        def state_dict(self) -> dict[str, Any]:
            module.running_mean = torch.full((2,), 9.0)
            return {}

        def load_state_dict(self, state: Any) -> None:
            """Not called."""

    capturer = Capturer({"meddling": Meddling(), "model": module})
    for _ in range(3):
        captured = capturer.capture().components["model"].tensors["running_mean"]
        assert module.running_mean is not None
        assert captured.data_ptr() == module.running_mean.data_ptr()


def test_what_may_overlap_follows_the_groups_of_optimizers() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    capturer = Capturer({"model": module, "optimizer": optimizer})

    def overlapping() -> frozenset[str]:
        return capturer.capture().components["model"].may_overlap

    assert overlapping() == overlapping() == {"0.weight", "0.bias"}
    optimizer.add_param_group({"params": module[1].parameters()})
    assert overlapping() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    optimizer.param_groups.pop(0)
    assert overlapping() == {"1.weight", "1.bias"}


def test_what_may_overlap_follows_a_parameter_into_another_module() -> None:
    first, second = nn.Module(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    state = {"first": first, "second": second, "optimizer": optimizer}
    capturer = Capturer(state)
    capturer.capture()
    first.weight = second.weight
    later, anew = capturer.capture().components, capture(state).components
    for name in ("first", "second"):
        assert later[name].may_overlap == anew[name].may_overlap
    assert later["first"].may_overlap == {"weight"}


def test_no_tensor_is_held_from_one_capture_to_the_next() -> None:
    module = nn.Linear(2, 2)
    capturer = Capturer({"model": module})
    for _ in range(2):
        capturer.capture()
    seen = weakref.ref(module.weight)
    module.weight = nn.Parameter(torch.zeros(2, 2))
    gc.collect()
    assert seen() is None
