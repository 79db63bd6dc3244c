"""Settings of schedulers that a script changes: the checkpoint's are used, unless overridden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from holdfast import CheckpointManager
from holdfast.errors import ManagerUnusable, UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Training, for_group
from runs import new_run
from train.small import make, network

Schedule = Callable[[torch.optim.Optimizer], Any]


def warm_up(t_max: int, milestone: int = 3) -> Schedule:
    return lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1), schedules.CosineAnnealingLR(optimizer, t_max)],
        [milestone],
    )


def chained(gamma: float) -> Schedule:
    return lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, gamma)], optimizer
    )


def of(kind: Any, *arguments: Any, **options: Any) -> Schedule:
    return lambda optimizer: kind(optimizer, *arguments, **options)


class Linear:
    """A rate that falls to zero over `total` steps."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.total)


CHANGES: dict[str, tuple[Schedule, Schedule, list[str]]] = {
    "one cycle": (
        of(schedules.OneCycleLR, 0.1, total_steps=6),
        of(schedules.OneCycleLR, 0.1, total_steps=12),
        ["scheduler.total_steps"],
    ),
    "cosine": (
        of(schedules.CosineAnnealingLR, 5),
        of(schedules.CosineAnnealingLR, 12),
        ["T_max"],
    ),
    "restarts": (
        of(schedules.CosineAnnealingWarmRestarts, 4),
        of(schedules.CosineAnnealingWarmRestarts, 7),
        ["scheduler.T_0"],
    ),
    "steps": (of(schedules.StepLR, 2), of(schedules.StepLR, 3, 0.5), ["step_size", "gamma"]),
    "milestones": (
        of(schedules.MultiStepLR, [2, 4]),
        of(schedules.MultiStepLR, [3, 7]),
        ["milestones"],
    ),
    "polynomial": (
        of(schedules.PolynomialLR, 6),
        of(schedules.PolynomialLR, 12),
        ["total_iters"],
    ),
    "cyclic": (
        of(schedules.CyclicLR, 0.01, 0.1, step_size_up=2),
        of(schedules.CyclicLR, 0.01, 0.3, step_size_up=4),
        ["scheduler"],
    ),
    "within a sequence": (warm_up(5), warm_up(12), ["scheduler.1.T_max"]),
    "the sequence": (warm_up(9), warm_up(9, milestone=7), ["scheduler.milestones"]),
    "within a chain": (chained(0.9), chained(0.5), ["scheduler.1.gamma"]),
    "of a callable object": (
        of(schedules.LambdaLR, Linear(6)),
        of(schedules.LambdaLR, Linear(12)),
        ["scheduler.lr_lambdas.0.total"],
    ),
    "of one group": (
        for_group(0, of(schedules.CosineAnnealingLR, 5)),
        for_group(0, of(schedules.CosineAnnealingLR, 12)),
        ["T_max"],
    ),
}


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def after_optimizer_step(self, training: Training) -> None:
        self.seen[training.present_step] = float(training.optimizer.param_groups[0]["lr"])


def fit(
    store: MemoryStore, schedule: Schedule, until: int, lr: float = 0.1, **options: Any
) -> tuple[dict[int, float], Any]:
    model, rates = network(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    given = {"optimizer": optimizer, "scheduler": schedule, "callbacks": [rates], "every": None}
    outcome = make(store, model=model, **given).fit(until, **options)
    return rates.seen, outcome


@pytest.mark.parametrize(("old", "new", "override"), CHANGES.values(), ids=CHANGES)
def test_an_overridden_schedule_continues_as_if_it_had_been_the_only_one(
    old: Schedule, new: Schedule, override: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The override may stay in the script: a later resume takes nothing again."""
    store = MemoryStore()
    fit(store, old, 5)
    seen, outcome = fit(store, new, 7, override=override)
    assert any("replaces the checkpoint's" in note for note in outcome.notes)
    again, outcome = fit(store, new, 10, override=override)
    assert not any(
        "replaces" in note or "from the checkpoint, not" in note for note in outcome.notes
    )
    straight, _ = fit(MemoryStore(), new, 10)
    expected = {step: rate for step, rate in straight.items() if step > 5}
    assert seen | again == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("old", "new", "override"), CHANGES.values(), ids=CHANGES)
def test_a_changed_schedule_is_named_with_the_way_to_take_it(
    old: Schedule, new: Schedule, override: list[str]
) -> None:
    store = MemoryStore()
    fit(store, old, 2)
    notes = fit(store, new, 3)[1].notes
    paths = [name if "." in name else f"scheduler.{name}" for name in override]
    for path in paths if override != ["scheduler"] else ["scheduler.max_lr"]:
        assert any(note.startswith(path) and f"override=['{path}']" in note for note in notes)


def test_a_longer_schedule_and_another_rate_can_both_be_taken() -> None:
    store = MemoryStore()
    fit(store, of(schedules.CosineAnnealingLR, 5), 4)
    new = of(schedules.CosineAnnealingLR, 12)
    seen, _ = fit(store, new, 8, lr=0.3, override=["lr", "T_max"])
    straight, _ = fit(MemoryStore(), new, 8, lr=0.3)
    assert seen == pytest.approx({n: r for n, r in straight.items() if n > 4}, rel=1e-9)
    store = MemoryStore()
    fit(store, of(schedules.CosineAnnealingLR, 5), 4)
    seen, _ = fit(store, new, 8, lr=0.3, override=["T_max"])
    straight, _ = fit(MemoryStore(), new, 8)
    assert seen == pytest.approx({n: r for n, r in straight.items() if n > 4}, rel=1e-9)


def test_a_schedule_that_is_too_short_is_an_error() -> None:
    store = MemoryStore()
    fit(store, of(schedules.OneCycleLR, 0.1, total_steps=12), 9)
    with pytest.raises(UsageError, match="ends before the 9 steps"):
        fit(store, of(schedules.OneCycleLR, 0.1, total_steps=6), 12, override=["total_steps"])


def test_a_plateau_takes_its_patience_and_keeps_what_it_has_seen() -> None:
    store, run = MemoryStore(), new_run()

    def plateau(patience: int) -> Any:
        return schedules.ReduceLROnPlateau(run.optimizer, patience=patience)

    first = plateau(3)
    first.step(1.0)
    first.step(2.0)
    with CheckpointManager(store, {"plateau": first}) as manager:
        manager.save(1, wait=True)
    again = plateau(7)
    with CheckpointManager(store, {"plateau": again}) as manager:
        manager.resume(override=["plateau.patience"])
    assert (again.patience, again.best, again.num_bad_epochs) == (7, 1.0, 1)


def test_after_an_override_that_cannot_be_applied_nothing_is_saved_until_a_load() -> None:
    def state(total_steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
        schedule = schedules.OneCycleLR(optimizer, 0.1, total_steps=total_steps)
        return {"optimizer": optimizer, "scheduler": schedule, "data": {}}

    store, long = MemoryStore(), state(9)
    with CheckpointManager(store, long) as manager:
        for _ in range(6):
            long["optimizer"].step()
            long["scheduler"].step()
        manager.save(6)
    with CheckpointManager(store, state(3)) as manager:
        with pytest.raises(UsageError, match="is loaded without override"):
            manager.resume(override=["total_steps"])
        with pytest.raises(ManagerUnusable, match="without override"):
            manager.save(1)
        manager.resume()
        manager.save(7, wait=True)


def test_another_function_of_a_plain_loop_is_used_and_said() -> None:
    """Functions are not saved; one that gives the run's rates is no change."""
    store = MemoryStore()

    def resumed(total: int, until: int) -> tuple[tuple[str, ...], list[float]]:
        run, rates = new_run(seed=0), []
        schedule = schedules.LambdaLR(run.optimizer, lambda step: 1 - step / total)
        state = {"model": run.model, "optimizer": run.optimizer, "scheduler": schedule}
        with CheckpointManager(store, state) as manager:
            found = manager.resume()
            for _ in range(found.step if found else 0, until):
                run.optimizer.step()
                schedule.step()
                rates.append(schedule.get_last_lr()[0])
            manager.save(until, wait=True)
        return (found.notes if found else ()), rates

    resumed(10, 4)
    assert not any("function" in note for note in resumed(10, 5)[0])
    notes, rates = resumed(20, 7)
    assert any("scheduler: the script's function" in note for note in notes)
    base = rates[0] / (1 - 6 / 20)
    assert rates == pytest.approx([base * (1 - step / 20) for step in (6, 7)])


def test_settings_of_another_librarys_scheduler_are_said_and_can_be_overridden() -> None:
    class CosineScheduler:
        """As timm's: its state is its attributes, and `step` gets the number."""

        def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int) -> None:
            self.optimizer, self.t_initial, self.metric = optimizer, t_initial, 0.0

        def step(self, number: int) -> None:
            self.optimizer.param_groups[0]["lr"] = 1 - number / self.t_initial

        def state_dict(self) -> dict[str, float]:
            return {name: value for name, value in vars(self).items() if name != "optimizer"}

        def load_state_dict(self, state: dict[str, float]) -> None:
            vars(self).update(state)

    def resumed(t_initial: int, **options: Any) -> tuple[Any, int]:
        run = new_run(seed=0)
        scheduler = CosineScheduler(run.optimizer, t_initial)
        scheduler.metric = float(t_initial)
        state = {"model": run.model, "optimizer": run.optimizer, "scheduler": scheduler}
        with CheckpointManager(store, state) as manager:
            found = manager.resume(**options)
            manager.save(1, wait=True)
        return found.notes if found else (), scheduler.t_initial

    store = MemoryStore()
    resumed(10)
    notes, used = resumed(20)
    assert used == 10
    (said,) = [note for note in notes if note.startswith("scheduler.")]
    assert "override=['scheduler.t_initial']" in said
    assert resumed(20, override=["scheduler.t_initial"])[1] == 20
