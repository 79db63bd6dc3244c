"""Slots that are tensor subclasses are loaded into templates that the live optimizer makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import CheckpointManager
from holdfast.errors import MismatchError
from quantized import Scaled, ScaledMomentum, bits_of, import_torchao
from state.roundtrip import digest, image


def new_state(make: Callable[..., Any], seed: int = 0, width: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    return {"model": model, "optimizer": make(model.parameters())}


def train(state: dict[str, Any], steps: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        for _ in range(steps):
            model(torch.randn(2, model[0].in_features)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def slots_of(state: dict[str, Any]) -> list[Any]:
    held = state["optimizer"].state
    return [
        {name: bits_of(one) if isinstance(one, torch.Tensor) else one for name, one in slot.items()}
        for slot in (held[parameter] for parameter in state["model"].parameters())
    ]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_of_torchao_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    make = getattr(import_torchao().optim, name)
    state = new_state(make, width=64)
    train(state, 2)
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(2, wait=True)
    train(state, 2)
    again = new_state(make, seed=1, width=64)
    with CheckpointManager(tmp_path, again) as manager:
        assert manager.resume() is not None
    kind = type(again["optimizer"].state[again["model"][0].weight]["exp_avg"])
    assert kind.__name__ == name.replace("AdamW", "OptimState")
    train(again, 2)
    assert digest(again) == digest(state)


def test_another_block_size_is_refused(tmp_path: Path) -> None:
    ao = import_torchao()
    state = new_state(ao.optim.AdamW8bit, width=64)
    train(state, 1)
    stored = image(state)
    again = new_state(lambda parameters: ao.optim.AdamW8bit(parameters, block_size=128), width=64)
    before = digest(again)
    with pytest.raises(MismatchError, match=r"0\.weight\.exp_avg\.scale"):
        stored.load(again)
    assert digest(again) == before


def test_a_template_runs_no_hook_and_moves_no_generator() -> None:
    state = new_state(ScaledMomentum)
    train(state, 2)
    stored, again = image(state), new_state(ScaledMomentum, seed=1)
    calls = []
    optimizer = again["optimizer"]
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights = [parameter.detach().clone() for parameter in again["model"].parameters()]
    generator, options = torch.get_rng_state(), dict(optimizer.param_groups[0])
    prepared = stored.prepare(again)
    hook.remove()
    assert calls == []
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert all(map(torch.equal, weights, again["model"].parameters()))
    assert optimizer.param_groups[0] == options
    prepared.apply_values(stored.tensors)
    assert slots_of(again) == slots_of(state)
    moment = optimizer.state[again["model"][0].weight]["moment"]
    assert type(moment) is Scaled
    assert moment.context is optimizer.context


def test_slots_that_exist_are_copied_into() -> None:
    state, again = (new_state(ScaledMomentum, seed) for seed in (0, 1))
    train(state, 2)
    stored = image(state)
    train(again, 1)
    moment = again["optimizer"].state[again["model"][0].weight]["moment"]
    codes = moment.codes
    stored.load(again)
    assert again["optimizer"].state[again["model"][0].weight]["moment"] is moment
    assert moment.codes is codes
    assert slots_of(again) == slots_of(state)


def test_an_optimizer_that_makes_no_template_is_refused_by_name() -> None:
    state = new_state(ScaledMomentum)
    train(state, 1)
    stored = image(state)
    again = new_state(lambda parameters: ScaledMomentum(parameters, fails=True), seed=1)
    before = digest(again)
    with pytest.raises(MismatchError, match=r"0\.weight\.moment.*no gradients.*one optimizer step"):
        stored.load(again)
    assert digest(again) == before


class Logging(ScaledMomentum):
    """Notes its steps in attributes, in place."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.log, self.counts, self.total = list[int](), {"steps": [0]}, torch.zeros(1)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.log.append(1)
        self.counts["steps"][0] += 1
        self.total += 1


def test_a_template_changes_no_attribute_of_the_optimizer() -> None:
    state, again = (new_state(Logging, seed) for seed in (0, 1))
    train(state, 2)
    image(state).load(again)
    optimizer = again["optimizer"]
    assert (optimizer.log, optimizer.counts, optimizer.total) == ([], {"steps": [0]}, 0)
    assert optimizer.state


def test_no_optimizer_inside_of_another_makes_a_step() -> None:
    def make(parameters: Any) -> Any:
        optimizer = ScaledMomentum([*parameters])
        optimizer.inner = torch.optim.SGD(optimizer.param_groups)
        return optimizer

    state, again = (new_state(make, seed) for seed in (0, 1))
    train(state, 1)
    with pytest.raises(MismatchError, match=r"inner.*one optimizer step"):
        image(state).load(again)


def test_slots_that_are_skipped_need_no_template() -> None:
    state = new_state(ScaledMomentum)
    train(state, 1)
    again = new_state(lambda parameters: ScaledMomentum(parameters, fails=True), seed=1)
    image(state).load(again, skip=["optimizer.**.moment"])
    assert again["optimizer"].state[again["model"][0].weight] == {"count": 1}


def test_tensor_options_of_groups_are_not_changed_by_a_template() -> None:
    def make(parameters: Any) -> Any:
        return ScaledMomentum(parameters, lr=torch.tensor(0.5))

    state, again = (new_state(make, seed) for seed in (0, 1))
    train(state, 1)
    rate = again["optimizer"].param_groups[0]["lr"]
    image(state).load(again)
    assert again["optimizer"].param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_float8_weights_that_train_resume_to_the_bit(tmp_path: Path) -> None:
    import_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def new(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    state, again = new(0), new(1)
    assert type(state["model"][0].weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    train(state, 2)
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(2, wait=True)
    with CheckpointManager(tmp_path, again) as manager:
        manager.resume()
    assert digest(again) == digest(state)
    generator = torch.get_rng_state()
    train(state, 2)
    torch.set_rng_state(generator)
    train(again, 2)
    assert digest(again) == digest(state)
