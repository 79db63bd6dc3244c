"""What no save can hold is refused before training, unless the hook `edit_save` omits it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import CheckpointManager, StateHooks
from holdfast.errors import UnsupportedState


class Packed(Tensor):
    """A subclass whose memory is not all of it."""


class Moving(torch.optim.SGD):
    """An optimizer whose moments are `Packed`, from the second step on."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"] if self.num_steps > 1 else ():
            self.state[parameter]["moment"] = torch.zeros(2).as_subclass(Packed)


def model(extra: Tensor | None = None) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2))
    made[0].register_buffer("extra", extra)
    return made


def unsavable() -> dict[str, Tensor]:
    return {
        "sparse": torch.eye(2).to_sparse(),
        "subclass": torch.ones(2).as_subclass(Packed),
        "dtype": torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    }


@pytest.mark.parametrize("kind", unsavable())
def test_a_tensor_that_cannot_be_saved_is_refused_when_the_manager_is_made(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedState, match="edit_save") as caught:
        CheckpointManager(tmp_path, {"model": model(unsavable()[kind]), "data": {}})
    assert caught.value.paths == ["model.0.extra"]


def test_so_are_values_in_trees_and_schedules(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    schedule.made_by = model  # type: ignore[attr-defined]
    state = {"schedule": schedule, "progress": {"best": torch.eye(2).to_sparse(), "step": 1}}
    with pytest.raises(UnsupportedState) as caught:
        CheckpointManager(tmp_path, state)
    assert caught.value.paths == ["schedule.made_by", "progress.best"]


def test_slots_that_cannot_be_saved_are_refused_after_the_step_that_makes_them(
    tmp_path: Path,
) -> None:
    net = model()
    state = {"model": net, "optimizer": Moving(net.parameters(), lr=0.1, momentum=0.9), "data": {}}
    with CheckpointManager(tmp_path, state, every="100step") as manager:
        for step in (1, 2):
            net(torch.ones(1, 2)).sum().backward()
            state["optimizer"].step()
            if step == 1:
                manager.maybe_save(step)
        with pytest.raises(UnsupportedState) as caught:
            manager.maybe_save(2)
    assert caught.value.paths == ["optimizer.0.weight.moment", "optimizer.0.bias.moment"]


class Converting(nn.Module):
    """A module that saves its sparse buffer in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.eye(2).to_sparse())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "pairs"] = self.pairs.to_dense()


class OfALibrary(nn.Parameter):
    """A parameter class whose `state_dict` entry is a plain tensor."""


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def of_a_library() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight = OfALibrary(net.weight)
    return net


def with_a_hook() -> nn.Module:
    net = model(torch.eye(2).to_sparse())
    net.register_state_dict_post_hook(lambda module, state, prefix, local: state.pop("0.extra"))
    return net


def not_persistent() -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_buffer("index", torch.eye(2).to_sparse(), persistent=False)
    return net


def raising() -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_state_dict_pre_hook(lambda module, prefix, keep: pytest.fail("was called"))
    return net


@pytest.mark.parametrize(
    "make", [lazy, on_meta, Converting, of_a_library, with_a_hook, not_persistent, raising]
)
def test_what_may_be_savable_at_the_first_save_is_not_refused(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    state = {"model": make(), "data": {}, "draws": torch.Generator()}
    before = torch.get_rng_state()
    CheckpointManager(tmp_path, state).close()
    assert torch.equal(torch.get_rng_state(), before)


# `edit_save`


def without_extra(view: Any) -> None:
    del view["model"]["0.extra"]


@pytest.mark.parametrize("kind", unsavable())
def test_a_hook_omits_what_cannot_be_saved_and_a_resume_keeps_it(kind: str, tmp_path: Path) -> None:
    hooks = StateHooks(edit_save=without_extra)
    old, new = model(unsavable()[kind]), model(unsavable()[kind])
    mine = new[0].extra  # type: ignore[index]
    with CheckpointManager(tmp_path, {"model": old, "data": {}}, hooks=hooks) as manager:
        manager.maybe_save(1)
        manager.save(1).wait()
    with CheckpointManager(tmp_path, {"model": new, "data": {}}, hooks=hooks) as manager:
        found = manager.resume()
    assert found is not None
    assert any("0.extra: keeps" in note for note in found.notes)
    assert torch.equal(new[0].weight, old[0].weight)  # type: ignore[index]
    assert new[0].extra is mine  # type: ignore[index]


def test_a_hook_omits_slots_and_objects(tmp_path: Path) -> None:
    net = model()
    progress = {"step": 1, "made_by": model}
    state = {"model": net, "optimizer": Moving(net.parameters(), lr=0.1), "progress": progress}

    def edit(view: Any) -> None:
        del view["progress"]["made_by"]
        for path in [path for path in view["optimizer"] if path.endswith(".moment")]:
            del view["optimizer"][path]

    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
    with CheckpointManager(tmp_path, state, hooks=StateHooks(edit_save=edit)) as manager:
        manager.save(2).wait()
        manager.load("step=2", components=["progress"])
    assert progress == {"step": 1}


def reads(view: Any) -> None:
    view["model"]["0.weight"] = view["model"]["0.extra"]


def leaves_it(view: Any) -> None:
    view["model"]["0.weight"] = torch.zeros(2, 2)


@pytest.mark.parametrize("edit", [reads, leaves_it, lambda view: None])
def test_a_hook_that_leaves_or_reads_it_is_refused_before_the_first_save(
    edit: Callable[[Any], None], tmp_path: Path
) -> None:
    state = {"model": model(torch.eye(2).to_sparse()), "data": {}}
    hooks = StateHooks(edit_save=edit)
    with CheckpointManager(tmp_path, state, hooks=hooks, every="9step") as manager:
        with pytest.raises(UnsupportedState) as caught:
            manager.maybe_save(1)
        with pytest.raises(UnsupportedState):
            manager.save(2)
    assert caught.value.paths == ["model.0.extra"]


def test_a_hook_stores_a_plain_tensor_in_its_place(tmp_path: Path) -> None:
    def dense(view: Any) -> None:
        view["model"]["0.extra"] = torch.eye(2)

    state = {"model": model(torch.eye(2).to_sparse()), "data": {}}
    hooks = StateHooks(edit_save=dense)
    with CheckpointManager(tmp_path, state, hooks=hooks) as manager:
        manager.save(1).wait()
    plain = model(torch.zeros(2, 2))
    with CheckpointManager(tmp_path, {"model": plain, "data": {}}) as manager:
        manager.resume()
    assert torch.equal(plain[0].extra, torch.eye(2))  # type: ignore[index]
