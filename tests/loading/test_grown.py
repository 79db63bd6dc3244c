"""Resumes of a model that has gained or lost layers: `strict=False`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import CheckpointManager
from holdfast.errors import MismatchError
from holdfast.store.memory import MemoryStore


def state_of(layers: int, **more: Any) -> dict[str, Any]:
    """A model of linear layers with an optimizer of two groups, after a step."""
    torch.manual_seed(layers)
    model = nn.ModuleDict({f"layer{n}": nn.Linear(2, 2) for n in range(layers)})
    named = [*model.named_parameters()]
    weights, biases = ([p for name, p in named if kind in name] for kind in ("weight", "bias"))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
    torch.cat([p.flatten() for _, p in named]).sum().backward()
    return {"model": model, "optimizer": optimizer, "data": {"batches": 0}, **more}


def saved(layers: int, **more: Any) -> tuple[MemoryStore, dict[str, Any]]:
    """A root with a checkpoint of step 1, and its state."""
    store, state = MemoryStore(), state_of(layers, **more)
    state["optimizer"].step()
    with CheckpointManager(store, state) as manager:
        manager.save(1)
    return store, state


def moments(state: dict[str, Any]) -> dict[str, list[float]]:
    optimizer = state["optimizer"]
    return {
        name: optimizer.state[parameter]["exp_avg"].flatten().tolist()
        for name, parameter in state["model"].named_parameters()
        if optimizer.state.get(parameter)
    }


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_the_error_names_each_parameter_and_the_remedy(kind: Any) -> None:
    def made(*sizes: int) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(3, size) for size in sizes))
        optimizer = kind(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "data": {}}

    store = MemoryStore()
    with CheckpointManager(store, made(3)) as manager:
        manager.save(1)
    with (
        CheckpointManager(store, made(3, 3)) as manager,
        pytest.raises(MismatchError, match="strict=False") as more,
    ):
        manager.resume()
    assert more.value.missing == [
        *("model.1.weight", "model.1.bias", "optimizer.1.weight", "optimizer.1.bias")
    ]
    with (
        CheckpointManager(store, made(4)) as manager,
        pytest.raises(MismatchError, match="load_weights") as wider,
    ):
        manager.resume()
    assert "strict=False" not in str(wider.value)
    assert "optimizer.0.weight: stored for [3, 3], live [4, 3]" in wider.value.wrong_shape


def test_new_parameters_begin_without_moments_and_others_are_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, before = saved(1)
    state = state_of(2)
    initial = state["model"]["layer1"].weight.clone()
    with CheckpointManager(store, state) as manager:
        with pytest.raises(MismatchError, match=r"layer1\.weight"):
            manager.resume()
        with caplog.at_level(logging.WARNING, "holdfast"):
            found = manager.resume(strict=False)
        assert found is not None
        assert found.step == 1
        assert moments(state) == moments(before)
        assert torch.equal(state["model"]["layer0"].weight, before["model"]["layer0"].weight)
        assert torch.equal(state["model"]["layer1"].weight, initial)
        assert any("model.layer1.weight" in note for note in found.notes)
        (warning,) = [record for record in caplog.messages if "layer1" in record]
        assert "optimizer.layer1.bias" in warning
        state["optimizer"].step()
        manager.save(2)
    again = state_of(2)
    with CheckpointManager(store, again) as manager:
        assert manager.resume().step == 2  # type: ignore[union-attr]
    assert moments(again) == moments(state)
    assert len(moments(again)) == 4


def test_removed_parameters_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store, before = saved(2)
    state = state_of(1)
    with CheckpointManager(store, state) as manager, caplog.at_level(logging.WARNING, "holdfast"):
        assert manager.resume(strict=False) is not None
        assert manager.save(1).wait().step == 1  # another state at the same step
    assert moments(state) == {
        name: values for name, values in moments(before).items() if "layer0" in name
    }
    assert any("optimizer.layer1.weight" in message for message in caplog.messages)


def test_a_model_of_other_names_is_refused() -> None:
    store, _ = saved(1)
    state = {"model": nn.Linear(2, 2), "data": {"batches": 0}}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())  # type: ignore[attr-defined]
    with (
        CheckpointManager(store, state) as manager,
        pytest.raises(MismatchError, match="nothing would be loaded"),
    ):
        manager.resume(strict=False)


@pytest.mark.parametrize(
    ("stored", "live", "match"),
    [
        ({}, {"more": {"n": 1}}, "more"),
        ({"more": {"n": 1}}, {}, "more"),
    ],
)
def test_whole_components_are_still_strict(
    stored: dict[str, Any], live: dict[str, Any], match: str
) -> None:
    store, _ = saved(1, **stored)
    with (
        CheckpointManager(store, state_of(2, **live)) as manager,
        pytest.raises(MismatchError, match=match),
    ):
        manager.resume(strict=False)


def test_another_optimizer_is_still_refused() -> None:
    store, _ = saved(1)
    state = state_of(2)
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    with (
        CheckpointManager(store, state) as manager,
        pytest.raises(MismatchError, match="saved from AdamW"),
    ):
        manager.resume(strict=False)


def test_a_schedule_for_fewer_groups_is_refused() -> None:
    """torch would fail at its next step, or leave the new group's rate constant."""

    def scheduled(groups: int) -> dict[str, Any]:
        model = nn.ModuleList([nn.Linear(1, 1) for _ in range(groups)])
        optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"model": model, "optimizer": optimizer, "scheduler": schedule}

    store = MemoryStore()
    with CheckpointManager(store, {**scheduled(1), "data": {}}) as manager:
        manager.save(1)
    with (
        CheckpointManager(store, {**scheduled(2), "data": {}}) as manager,
        pytest.raises(MismatchError, match="parameter groups"),
    ):
        manager.resume(strict=False)
