"""The gate before each save: warn, skip or raise when the state is not finite."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import SaveSkipped, UsageError
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Training, UnhealthyState
from holdfast.train.fit.saving import check_health
from holdfast.train.group import ALONE
from train.small import make


def steps_saved(root: Path) -> list[int]:
    return sorted(entry.step for entry in Catalog(open_store(root)).checkpoints())


class Spoil(Callback):
    """Makes one weight infinite for a while."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.kept: Tensor | None = None

    def step_end(self, training: Training, metrics: Any) -> None:
        weight: Any = training.model[0].weight  # type: ignore[index]
        with torch.no_grad():
            if training.counters.step in self.steps:
                self.kept = weight.clone()
                weight[0, 0] = float("inf")

    def step_start(self, training: Training) -> None:
        if self.kept is not None:
            with torch.no_grad():
                training.model[0].weight.copy_(self.kept)  # type: ignore[index, operator]
            self.kept = None


def test_a_state_that_is_not_finite_is_warned_of_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        make(tmp_path, callbacks=[Spoil(2)]).fit(3)
    assert "step 2 is not healthy:\n  weight 0.weight is not finite" in caplog.text
    assert "step 3" not in caplog.text
    assert steps_saved(tmp_path) == [2, 3]
    recorded = [e.manifest.unhealthy for e in Catalog(open_store(tmp_path)).checkpoints()]
    assert recorded == [(), ("weight 0.weight is not finite",)]


def test_a_resume_goes_back_to_where_the_weights_were_finite(tmp_path: Path) -> None:
    make(tmp_path, callbacks=[Spoil(4)]).fit(4)
    assert steps_saved(tmp_path) == [2, 4]
    make(tmp_path).fit(6)
    parents = [
        entry.manifest.parent.order
        for entry in Catalog(open_store(tmp_path)).lineage_entries()
        if entry.manifest.parent is not None
    ]
    assert set(parents) == {(1, 1)}
    assert steps_saved(tmp_path) == [2, 4, 4, 6]


def test_only_the_first_of_many_reasons_are_recorded() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    reasons = check_health("warn", 1, model, {"loss": float("nan")}, ALONE)
    assert reasons[0] == "the loss is nan"
    assert (len(reasons), reasons[-1]) == (11, "and 7 more")
    assert check_health("warn", 1, nn.Linear(1, 1), {}, ALONE) == ()


TYPES = [
    item
    for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    if (item := getattr(torch, f"float8_{name}", None)) is not None
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, *TYPES], ids=str)
def test_a_weight_of_any_type_is_looked_at(dtype: torch.dtype) -> None:
    """torch has no isfinite for most of the types of 8 bits."""
    model = nn.Module()
    for name, value in (("fine", 1.0), ("wrong", float("nan"))):
        weight = torch.tensor([1.0, value]).to(dtype)
        setattr(model, name, nn.Parameter(weight, requires_grad=False))
    assert check_health("warn", 1, model, {}, ALONE) == ("weight wrong is not finite",)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_all_weights_of_four_bits_are_finite() -> None:
    model = nn.Module()
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float4_e2m1fn_x2)
    model.weight = nn.Parameter(codes, requires_grad=False)
    assert check_health("raise", 1, model, {}, ALONE) == ()


def test_it_may_be_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No checkpoint of it, also not at the end; training goes on."""
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        outcome = make(tmp_path, unhealthy="skip", callbacks=[Spoil(4, 7)]).fit(7)
    assert steps_saved(tmp_path) == [2, 6]
    assert caplog.text.count("this save was skipped") == 2
    assert outcome.step == 7


def test_it_may_end_the_training(tmp_path: Path) -> None:
    with pytest.raises(UnhealthyState, match="step 4"):
        make(tmp_path, unhealthy="raise", callbacks=[Spoil(3, 4)]).fit(9)
    assert steps_saved(tmp_path) == [2]


def test_the_loss_counts_too() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * 0 + float("nan")

    class Keep(Callback):
        def before_optimizer_step(self, training: Training) -> None:
            for weight in training.model.parameters():
                weight.grad = None

    with pytest.raises(UnhealthyState, match="the loss is nan"):
        make(MemoryStore(), unhealthy="raise", loss=loss, callbacks=[Keep()]).fit(2)


def test_a_save_that_a_callback_asks_for_is_left_out_too(tmp_path: Path) -> None:
    """Training goes on; only who waits for that save hears of it."""

    class Ask(Callback):
        def log(self, training: Training, metrics: Any) -> None:
            assert training.manager is not None
            pending = training.manager.save(training.counters.step)
            if training.counters.step == 1:
                with pytest.raises(SaveSkipped):
                    pending.wait()

    outcome = make(tmp_path, every=None, unhealthy="skip", callbacks=[Spoil(1), Ask()]).fit(2)
    assert outcome.step == 2
    assert set(steps_saved(tmp_path)) == {2}


def test_another_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="unhealthy='ignore'"):
        make(MemoryStore(), unhealthy="ignore")
