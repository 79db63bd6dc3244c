"""Tests that saves and loads on a device are exact to the bit, for tensors of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu.states import Run, bits, tensor_bits
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.manager import CheckpointManager


def saved_and_loaded(root: Path, tree: dict[str, Any], **options: Any) -> None:
    """Save, overwrite every tensor at once, load, and check that the bits are equal."""
    expected = bits(tree)
    with CheckpointManager(root, {"tree": tree}, sinks=(), **options) as manager:
        manager.save(1)
        for tensor in _distinct(tree):
            tensor.zero_()
        manager.wait()
        manager.load(1)
    assert bits(tree) == expected


def _distinct(tree: Any) -> list[Tensor]:
    values = tree.values() if isinstance(tree, dict) else tree
    found: list[Tensor] = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else _distinct(value)
    return found


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("overlap", [False, True, "check"])
def test_a_save_holds_the_state_of_its_call_while_training_goes_on(
    tmp_path: Path, device: str, overlap: Any, in_place: bool, way: str
) -> None:
    """R14: also if the next steps are queued on the stream at once, before the copy is done."""
    run = Run(device, **{way: True})
    run.step()
    with CheckpointManager(tmp_path, run.state, overlap=overlap, sinks=()) as manager:
        for step in range(1, 4):
            expected = run.bits()
            pending = manager.save(step)
            run.step()
            run.step()
            pending.wait()
            assert run.bits() != expected
            manager.load(step, in_place=in_place)
            assert run.bits() == expected


@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(
    tmp_path: Path, device: str, in_place: bool
) -> None:
    """R14: a new model goes on, with the generators of dropout and batches where they were."""
    run = Run(device)
    with CheckpointManager(tmp_path, run.state, overlap=True, sinks=()) as manager:
        for step in range(1, 4):
            run.step()
            manager.save(step)
    for _ in range(3):
        run.step()
    again = Run(device)
    with CheckpointManager(tmp_path, again.state, sinks=()) as manager:
        found = manager.resume(in_place=in_place)
        assert found is not None
        assert found.step == 3
        for _ in range(3):
            again.step()
    assert again.bits() == run.bits()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_load_keeps_the_memory_of_the_live_tensors(
    tmp_path: Path, device: str, in_place: bool
) -> None:
    """Live tensors keep their addresses in a load, because captured CUDA graphs use these."""
    run = Run(device)
    run.step()

    def addresses() -> list[int]:
        slots = [slot.data_ptr() for own in run.optimizer.state.values() for slot in own.values()]
        return slots + [value.data_ptr() for value in run.model.state_dict().values()]

    with CheckpointManager(tmp_path, run.state, sinks=()) as manager:
        manager.save(1).wait()
        run.step()
        before = addresses()
        manager.load(1, in_place=in_place)
    assert addresses() == before


def test_every_type_is_saved(tmp_path: Path, device: str) -> None:
    numbers = torch.arange(1000, device=device)
    types = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    tree: dict[str, Any] = {str(dtype): numbers.to(dtype) for dtype in types}
    tree |= {"none": torch.empty(0, 3, device=device), "one": torch.tensor(3.5, device=device)}
    saved_and_loaded(tmp_path, tree)


@pytest.mark.parametrize("budget", [None, 4 * BLOCK_NBYTES])
def test_tensors_of_any_strides_are_saved(tmp_path: Path, device: str, budget: int | None) -> None:
    """R14: also with a memory budget, which stages the tensors in waves."""
    whole = torch.randn(1500, 2000, device=device)
    image = torch.randn(8, 16, 40, 40, device=device)
    tree = {
        "transposed": whole.clone().t(),
        "every second": whole.clone()[:, ::2],
        "channels last": image.to(memory_format=torch.channels_last),
        "offset": whole.clone().reshape(-1)[7:],
        "conjugate": torch.randn(700, 900, dtype=torch.complex64, device=device).conj(),
        "plain": torch.randn(3, BLOCK_NBYTES // 4, device=device),
    }
    saved_and_loaded(tmp_path, tree, memory_budget=budget)


def test_a_tensor_that_is_expanded_is_saved_in_full(tmp_path: Path, device: str) -> None:
    tree = {"a": torch.arange(5.0, device=device).expand(1000, 5)}
    with CheckpointManager(tmp_path, {"tree": tree}, sinks=()) as manager:
        manager.save(1).wait()
    fresh = {"a": torch.zeros(1000, 5, device=device)}
    with CheckpointManager(tmp_path, {"tree": fresh}, sinks=()) as manager:
        manager.load(1)
    assert torch.equal(fresh["a"], tree["a"])


def test_views_of_one_memory_are_saved(tmp_path: Path, device: str) -> None:
    weight = torch.randn(300, 400, device=device)
    saved_and_loaded(tmp_path, {"all": weight, "half": weight[:150], "turned": weight.t()})


def test_weights_that_are_tied_still_are_after_a_load(tmp_path: Path, device: str) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).to(device)
    model[1].weight = model[0].weight
    expected = bits(model.state_dict())
    with CheckpointManager(tmp_path, {"model": model}, sinks=()) as manager:
        manager.save(1).wait()
        model.state_dict()["0.weight"].zero_()
        manager.load(1)
    assert bits(model.state_dict()) == expected
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_may_lie_on_several_devices(tmp_path: Path, device: str, overlap: bool) -> None:
    first, second = Run(device), Run("cpu")
    state = {
        **{f"first-{name}": part for name, part in first.state.items()},
        **{f"second-{name}": part for name, part in second.state.items()},
        "mixed": {"here": torch.randn(200_000), "there": torch.randn(200_000, device=device)},
    }
    for run in (first, second):
        run.step()
    with CheckpointManager(tmp_path, state, overlap=overlap, sinks=()) as manager:
        for step in (1, 2, 3):
            expected = first.bits(), second.bits(), bits(state["mixed"])
            pending = manager.save(step)
            for tensor in state["mixed"].values():
                tensor.add_(1)
            for run in (first, second):
                run.step()
            pending.wait()
            manager.load(step)
            assert (first.bits(), second.bits(), bits(state["mixed"])) == expected


def test_thousands_of_small_tensors_are_saved(tmp_path: Path, device: str) -> None:
    saved_and_loaded(tmp_path, {"small": [torch.randn(17, device=device) for _ in range(3000)]})


def test_one_tensor_of_many_blocks_is_saved(tmp_path: Path, device: str) -> None:
    large = torch.randn(9 * BLOCK_NBYTES // 4 + 3, device=device)
    expected = tensor_bits(large)
    tree = {"large": large}
    with CheckpointManager(tmp_path, {"tree": tree}, sinks=()) as manager:
        manager.save(1)
        large.zero_()
        manager.save(2)
        manager.wait()
        large.fill_(7)
        manager.load(2, in_place=True)
        assert not tree["large"].any()
        manager.load(1)
        assert tensor_bits(tree["large"]) == expected
