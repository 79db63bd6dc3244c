"""Loads that grow or cut stored tensors: `resize`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from distributed.run import run_ranks
from holdfast import CheckpointManager, load_weights
from holdfast.errors import MismatchError, UsageError
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from state.roundtrip import digest

Rows: TypeAlias = list[list[float]]


class Words(nn.Module):
    """Embedding and head of one weight, as of a language model, and a bias of each word."""

    def __init__(self, rows: int, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, rows)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the next word."""
        return self.head(self.mid(self.embed(words)))  # type: ignore[no-any-return]


class Shadow:
    """An average in a list, as of libraries that keep one beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state["values"]


class Masters(torch.optim.Optimizer):
    """SGD on copies of the weights in float64."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.double().clone())
            master.sub_(parameter.grad.double(), alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)


def new_state(rows: int, seed: int, optimizer: Any = torch.optim.AdamW, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = Words(rows, **more)
    average = AveragedModel(model)
    average.requires_grad_(requires_grad=False)
    return {
        "model": model,
        "optimizer": optimizer(model.parameters(), lr=0.1),
        "average": average,
        "shadow": Shadow(model),
        "data": {},
    }


def train(state: Any) -> None:
    model, optimizer = state["model"], state["optimizer"]

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = model(torch.tensor([0, 1, 2]))
        value = nn.functional.cross_entropy(logits, torch.tensor([1, 2, 0]))
        value.backward()
        return value

    loss()
    optimizer.step(loss if isinstance(optimizer, torch.optim.LBFGS) else None)
    state["average"].update_parameters(model)
    state["shadow"] = Shadow(model)


def saved(rows: int = 4, optimizer: Any = torch.optim.AdamW, **more: Any) -> tuple[Any, Any]:
    """A root with a checkpoint of step 1, and its state."""
    store, state = MemoryStore(), new_state(rows, 0, optimizer, **more)
    train(state)
    with CheckpointManager(store, state) as manager:
        manager.save(1)
    return store, state


ALL = {"**.embed": "rows", "**.head": "rows", "shadow": "rows"}


def test_old_rows_are_the_checkpoints_and_new_ones_keep_their_values() -> None:
    store, before = saved()
    state = new_state(6, 1)
    live = copy.deepcopy(state["model"])
    with CheckpointManager(store, state) as manager:
        found = manager.resume(resize=ALL)
        assert found is not None
        assert "model.embed.weight: [4, 3] → [6, 3]" in found.notes
        model, old = state["model"], before["model"]
        assert model.head.weight is model.embed.weight
        for name in ("embed.weight", "head.bias"):
            value = model.get_parameter(name)
            assert torch.equal(value[:4], old.get_parameter(name))
            assert torch.equal(value[4:], live.get_parameter(name)[4:])
            slots = state["optimizer"].state[value]
            expected = before["optimizer"].state[old.get_parameter(name)]
            assert torch.equal(slots["exp_avg"][:4], expected["exp_avg"])
            assert not slots["exp_avg"][4:].any()
            assert slots["exp_avg_sq"].shape == value.shape
            assert torch.equal(slots["step"], expected["step"])
        assert torch.equal(model.mid.weight, old.mid.weight)
        average = state["average"].module.embed.weight
        assert torch.equal(average[:4], before["average"].module.embed.weight)
        assert torch.equal(average[4:], live.embed.weight[4:])
        assert torch.equal(state["shadow"].values[0][:4], before["shadow"].values[0])
        words = torch.tensor([0, 3])
        assert torch.equal(model(words)[:, :4], old(words))
        train(state)
        manager.save(2)
    again = new_state(6, 2)
    with CheckpointManager(store, again) as manager:
        assert manager.resume().step == 2  # type: ignore[union-attr]
    assert digest(again) == digest(state)


def test_the_change_is_recorded_and_a_later_resume_warns_that_shapes_are_equal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = saved()
    state = new_state(6, 1)
    with CheckpointManager(store, state) as manager:
        manager.resume(resize=ALL)
        train(state)
        manager.save(2)
    (change,) = Catalog(store).find_checkpoint().manifest.changes
    assert "model.embed.weight: [4, 3] → [6, 3]" in change.what
    with CheckpointManager(store, new_state(6, 2)) as manager:
        manager.resume(resize=ALL)
    assert any("'**.embed'" in line and "shapes are equal" in line for line in caplog.messages)


def test_a_cut_drops_the_last_rows_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    store, before = saved(6)
    state = new_state(4, 1)
    with CheckpointManager(store, state) as manager:
        manager.resume(resize=ALL)
    weight = state["model"].embed.weight
    assert torch.equal(weight, before["model"].embed.weight[:4])
    slots = before["optimizer"].state[before["model"].embed.weight]
    assert torch.equal(state["optimizer"].state[weight]["exp_avg"], slots["exp_avg"][:4])
    assert any("model.embed.weight" in line and "last 2 rows" in line for line in caplog.messages)


def test_columns_and_numbered_dimensions() -> None:
    store, before = MemoryStore(), nn.Conv1d(2, 3, 4)
    with CheckpointManager(store, {"model": before}) as manager:
        manager.save(1)
    for dim, live in (("columns", nn.Conv1d(3, 3, 4)), (2, nn.Conv1d(2, 3, 6))):
        load_weights(store, live, resize={"model.weight": dim})
        assert torch.equal(live.weight[:, :2, :4], before.weight)


def test_the_error_proposes_what_works() -> None:
    store, before = saved()
    state = new_state(6, 1)
    with CheckpointManager(store, state) as manager:
        with pytest.raises(MismatchError, match="resize=") as caught:
            manager.resume()
        text = str(caught.value)
        proposed = ast.literal_eval(text[text.index("resize={") + 7 : text.index("}") + 1])
        assert proposed["model.embed.weight"] == "rows"
        with pytest.raises(MismatchError, match=r"shadow\.values\.0"):
            manager.resume(resize=proposed)  # an object has no check of shapes otherwise
        assert manager.resume(resize=proposed | {"shadow": "rows"}) is not None
    assert torch.equal(state["model"].embed.weight[:4], before["model"].embed.weight)


def test_shapes_that_differ_in_two_dimensions_are_not_proposed() -> None:
    store, _ = saved()
    with (
        CheckpointManager(store, new_state(6, 1, width=5)) as manager,
        pytest.raises(MismatchError, match="skip=") as caught,
    ):
        manager.resume()
    assert "resize={" not in str(caught.value)


@pytest.mark.parametrize(
    ("resize", "match"),
    [
        ({"model.emded": "rows"}, "nothing is called"),
        ({"model.embed": "lines"}, "columns"),
        ({"model.embed": -1}, "dimension"),
    ],
)
def test_wrong_entries_are_refused(resize: Any, match: str) -> None:
    store, _ = saved()
    state = new_state(4, 1)
    before = digest(state)
    with CheckpointManager(store, state) as manager, pytest.raises(UsageError, match=match):
        manager.resume(resize=resize)
    assert digest(state) == before


def test_an_entry_of_another_dimension_leaves_the_mismatch() -> None:
    store, _ = saved()
    with (
        CheckpointManager(store, new_state(6, 1)) as manager,
        pytest.raises(MismatchError, match=r"embed\.weight: stored \[4, 3\], live \[6, 3\]"),
    ):
        manager.resume(resize={"**.embed": "columns"})


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "Rprop"])
def test_optimizers_with_other_slots_are_refused_by_name(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)
    store, _ = saved(optimizer=optimizer)
    state = new_state(6, 1, optimizer)
    before = digest(state)
    with (
        CheckpointManager(store, state) as manager,
        pytest.raises(MismatchError, match=r"optimizer\.embed\.weight"),
    ):
        manager.resume(resize=ALL)
    assert digest(state) == before


class OwnCode(torch.optim.AdamW):
    """Loads by code of its own, as the optimizers of bitsandbytes do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_slots_that_the_optimizer_loads_itself_are_refused() -> None:
    store, _ = saved(optimizer=OwnCode)
    state = new_state(6, 1, OwnCode)
    before = digest(state)
    with CheckpointManager(store, state) as manager:
        with pytest.raises(MismatchError, match=r"optimizer\.state\.0\.exp_avg: \[4, 3\].*own"):
            manager.resume(resize=ALL)
        assert digest(state) == before
        manager.load(resize=ALL, skip=["optimizer"])


def test_new_rows_of_master_copies_are_those_of_the_weight() -> None:
    store, before = saved(optimizer=Masters)
    state = new_state(6, 1, Masters)
    with CheckpointManager(store, state) as manager:
        manager.resume(resize=ALL)
    weight = state["model"].embed.weight
    master = state["optimizer"].state[weight]["master"]
    old = before["optimizer"].state[before["model"].embed.weight]["master"]
    assert torch.equal(master[:4], old)
    assert torch.equal(master[4:], weight[4:].double())


def freeze(model: nn.Module) -> None:
    model.get_parameter("embed.weight").requires_grad_(requires_grad=False)


def quantize(model: nn.Module) -> None:
    for module in (model.get_submodule("embed"), model.get_submodule("head")):
        shape = model.get_parameter("embed.weight").shape
        weight = torch.zeros(shape, dtype=torch.int8)
        module.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(("change", "match"), [(freeze, "frozen"), (quantize, "quantized")])
def test_frozen_and_quantized_weights_are_refused(change: Any, match: str) -> None:
    store, states = MemoryStore(), [{"model": Words(rows)} for rows in (4, 6)]
    for state in states:
        change(state["model"])
    with CheckpointManager(store, states[0]) as manager:
        manager.save(1)
    with CheckpointManager(store, states[1]) as manager:
        with pytest.raises(MismatchError, match=rf"model\.embed\.weight.*{match}") as caught:
            manager.resume(resize={"**.embed": "rows", "**.head": "rows"})
        assert "resize={" not in str(caught.value)


def test_a_tied_weight_that_became_two_is_refused() -> None:
    store, _ = saved()
    model = Words(6)
    model.head.weight = nn.Parameter(torch.ones(6, 3))
    with pytest.raises(MismatchError, match=r"model\.embed\.weight and model\.head\.weight"):
        load_weights(store, model, resize={"model.embed": "rows", "model.head": "rows"})


def sharded(rows: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Words(rows)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "data": {}}


def step_of(state: Mapping[str, Any]) -> None:
    loss = state["model"](torch.tensor([0, 1, 2])).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def whole(state: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """The weight of the words and its first moment, of all ranks."""
    weight = state["model"].embed.weight
    moment = state["optimizer"].state[weight]["exp_avg"]
    return weight.full_tensor().tolist(), moment.full_tensor().tolist()


def save_sharded(root: Path, rank: int) -> tuple[Rows, Rows]:
    state = sharded(5, 0)
    step_of(state)
    with CheckpointManager(LocalStore(root), state) as manager:
        manager.save(1, wait=True)
    return whole(state)


def load_sharded(root: Path, rank: int) -> list[tuple[Rows, Rows]]:
    found = []
    for rows in (7, 3):
        state = sharded(rows, 1)
        with CheckpointManager(LocalStore(root), state) as manager:
            manager.load(resize={"model.embed": "rows", "model.head.bias": "rows"})
        found.append(whole(state))
        step_of(state)
    return found


def test_dtensors_are_resized_on_any_number_of_ranks(tmp_path: Path) -> None:
    before, _ = run_ranks(2, partial(save_sharded, tmp_path))
    assert before is not None
    torch.manual_seed(1)
    live = Words(7).embed.weight.tolist()
    grown = (before[0] + live[5:], before[1] + [[0.0, 0.0, 0.0]] * 2)
    cut = (before[0][:3], before[1][:3])
    assert run_ranks(3, partial(load_sharded, tmp_path)) == [[grown, cut]] * 3
