"""Rules `Best` in a loop of one's own: the best value is saved, or a warning is logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager, Checkpoints, MemoryStore
from holdfast.events import Event

Metrics = Callable[[int], Mapping[str, Any]]


def trained(
    metric: str,
    metrics: Metrics,
    *,
    store: MemoryStore | None = None,
    until: int = 20,
    every: str = "10step",
) -> tuple[dict[int, Mapping[str, float]], list[str]]:
    """Train with saves; return what is kept, by step, and the warnings."""
    said: list[Event] = []
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": {}}
    checkpoints = Checkpoints(
        store if store is not None else MemoryStore(),
        every=every,
        keep=f"last:1,best:{metric}",
        preflight=False,
        sinks=[said.append],
    )
    with CheckpointManager(checkpoints, state) as manager:
        manager.expect_metrics()
        found = manager.resume()
        for step in range(1 + (found.step if found else 0), until + 1):
            with torch.no_grad():
                model.weight.fill_(float(step))
            manager.maybe_save(step, metrics=metrics(step))
            manager.wait()
        kept = {entry.step: entry.metrics for entry in manager.list()}
    return kept, [event.message for event in said if event.kind == "warning"]


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])
def test_the_best_of_validations_is_saved_between_two_saves(make: Callable[[float], Any]) -> None:
    """Every fourth step is validated, and every tenth saved; step 12 is the best."""

    def metrics(step: int) -> Mapping[str, Any]:
        return {"accuracy": make(0.9 if step == 12 else 0.1)} if step % 4 == 0 else {}

    kept, said = trained("accuracy", metrics)
    assert sorted(kept) == [12, 20]
    assert kept[12]["accuracy"] == pytest.approx(0.9)
    assert not said


def test_a_value_that_is_passed_on_is_saved_where_it_was_measured() -> None:
    values = {4: 0.5, 8: 0.2, 12: 0.4}
    kept, _ = trained("val_loss", lambda step: {"val_loss": values[max(min(step, 12) // 4 * 4, 4)]})
    assert 8 in kept


def test_a_validation_after_each_step_is_known_by_its_name() -> None:
    kept, said = trained("val_loss", lambda step: {"val_loss": abs(step - 7) + step / 100})
    assert 7 in kept
    assert not said


def test_a_resumed_run_knows_the_best_of_earlier_sessions() -> None:
    store = MemoryStore()
    trained("accuracy", lambda step: {"accuracy": 0.5} if step == 4 else {}, store=store)
    assert sorted(
        trained(
            "accuracy", lambda step: {"accuracy": 0.4} if step == 24 else {}, store=store, until=30
        )[0]
    ) == [4, 30]
    assert sorted(
        trained(
            "accuracy", lambda step: {"accuracy": 0.6} if step == 34 else {}, store=store, until=40
        )[0]
    ) == [34, 40]


def test_values_of_each_step_cause_no_saves_and_one_warning() -> None:
    kept, said = trained("accuracy", lambda step: {"accuracy": step / 100})
    assert sorted(kept) == [20]
    assert len(said) == 1
    assert 'On("evaluation")' in said[0]


def test_a_loss_of_each_step_is_no_mistake() -> None:
    kept, said = trained(
        "val_loss",
        lambda step: {"loss": 1 / step, "val_loss": 0.5} if step == 10 else {"loss": 1 / step},
    )
    assert sorted(kept) == [10, 20]
    assert not said


def test_a_value_that_is_repeated_at_each_step_is_warned_of() -> None:
    """Passed from the step after the validation on, it is stored with other weights."""
    measured = [float(number) for number in range(4)]
    _, said = trained("val_loss", lambda step: {"val_loss": measured[(step - 1) // 5]})
    assert [line for line in said if "older than the weights" in line]


def test_a_validation_of_each_saved_step_hears_nothing() -> None:
    """Nor if the model gets no better for long, and each value is measured anew."""
    kept, said = trained(
        "accuracy",
        lambda step: {"accuracy": 0.5 + min(step, 10) / 100},
        every="1step",
    )
    assert sorted(kept) == [10, 20]
    assert not said


def test_a_renamed_metric_deletes_nothing_and_is_warned_of() -> None:
    store = MemoryStore()
    trained("val_loss", lambda step: {"val_loss": 0.5} if step % 10 == 0 else {}, store=store)
    kept, said = trained(
        "val_loss",
        lambda step: {"validation_loss": 1 / step} if step % 10 == 0 else {},
        store=store,
        until=60,
    )
    assert {30, 40, 50, 60} <= set(kept)
    assert [line for line in said if "'validation_loss': was it renamed?" in line]
