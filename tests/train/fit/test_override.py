"""Options of the optimizer that a script changes: the checkpoint's go on, unless overridden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Trainer, Training, for_group
from marks import full
from runs import new_run
from train.small import make, network

Schedule = Callable[[torch.optim.Optimizer], Any]


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def after_optimizer_step(self, training: Training) -> None:
        self.seen[training.present_step] = float(training.optimizer.param_groups[0]["lr"])


def trainer(
    store: Any, lr: float, schedule: Schedule | None = None, *callbacks: Callback, **given: Any
) -> Trainer:
    model = given.pop("model", None) or network()
    state = given.pop("state", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **given)
    return make(
        store,
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        callbacks=callbacks,
        every=None,
        state=None if state is None else state(optimizer),
    )


SCHEDULES: Mapping[str, Schedule] = {
    "step": lambda optimizer: schedules.StepLR(optimizer, 3, gamma=0.5),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=10),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=4),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplied": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "polynomial": lambda optimizer: schedules.PolynomialLR(optimizer, 10),
    "warm-up, cosine": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, 0.1, total_iters=3),
            schedules.CosineAnnealingLR(optimizer, T_max=7),
        ],
        [3],
    ),
    "of one group": for_group(0, lambda optimizer: schedules.StepLR(optimizer, 3, gamma=0.5)),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)],
        optimizer=optimizer,
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("ended_at", [5, *full(2)])
def test_the_schedule_goes_on_as_if_it_had_begun_with_the_new_rate(
    schedule: Schedule, ended_at: int
) -> None:
    store, rates, expected = MemoryStore(), Rates(), Rates()
    trainer(store, 0.1, schedule).fit(ended_at)
    again = trainer(store, 0.3, schedule, rates)
    again.fit(9, override=["lr"])
    trainer(MemoryStore(), 0.3, schedule, expected).fit(9)
    wanted = {step: rate for step, rate in expected.seen.items() if step > ended_at}
    assert rates.seen == pytest.approx(wanted, rel=1e-9)
    last = again.schedulers["scheduler"].get_last_lr()
    assert last == [group["lr"] for group in again.optimizer.param_groups]


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_cycle_takes_the_rates_that_the_script_gives_it(factor: float) -> None:
    def one_cycle(factor: float) -> Schedule:
        return lambda optimizer: schedules.OneCycleLR(optimizer, 0.1 * factor, total_steps=20)

    store, rates, expected = MemoryStore(), Rates(), Rates()
    trainer(store, 0.1, one_cycle(1)).fit(4)
    trainer(store, 0.1, one_cycle(factor), rates).fit(12, override=["lr"])
    trainer(MemoryStore(), 0.1, one_cycle(factor), expected).fit(12)
    assert rates.seen == pytest.approx({n: r for n, r in expected.seen.items() if n > 4}, rel=1e-9)


def test_without_a_schedule_it_is_the_rate_of_the_script() -> None:
    store, rates = MemoryStore(), Rates()
    trainer(store, 0.1).fit(2)
    outcome = trainer(store, 0.3, None, rates).fit(4, override=["lr"])
    assert rates.seen == {3: 0.3, 4: 0.3}
    text = "optimizer.param_groups.0.lr: the script's 0.3 replaces the checkpoint's 0.1"
    assert text in outcome.notes


@pytest.mark.parametrize("schedule", [None, SCHEDULES["step"]])
def test_the_rate_of_the_checkpoint_goes_on_and_is_told(
    schedule: Schedule | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, rates = MemoryStore(), Rates()
    trainer(store, 0.02, schedule).fit(2)
    outcome = trainer(store, 9.0, schedule, rates).fit(3)
    assert rates.seen == {3: 0.02}
    text = "optimizer.param_groups.0.lr: using 0.02 from the checkpoint, not 9.0 from the script"
    assert any(note.startswith(text) for note in outcome.notes)
    assert text in caplog.text
    # And again, until it is taken.
    outcome = trainer(store, 9.0, schedule, rates).fit(4)
    assert any(note.startswith(text) for note in outcome.notes)
    trainer(store, 9.0, None if schedule is None else schedule, rates).fit(5, override=["lr"])
    assert rates.seen[5] == pytest.approx(9.0 if schedule is None else 4.5)


class Halves(Callback):
    """Changes the learning rate without a schedule."""

    def step_end(self, training: Training, metrics: Any) -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.5


class StepsPlateau(Callback):
    def step_end(self, training: Training, metrics: Any) -> None:
        training.state["plateau"].step(1.0)


@pytest.mark.parametrize(
    ("callbacks", "given"),
    [
        ((), {"schedule": SCHEDULES["warm-up, cosine"]}),
        ((Halves,), {}),
        (
            (StepsPlateau,),
            {
                "state": lambda optimizer: {
                    "plateau": schedules.ReduceLROnPlateau(optimizer, patience=0)
                }
            },
        ),
    ],
)
def test_resumes_are_exact_while_the_override_stays_in_the_script(
    callbacks: tuple[type[Callback], ...], given: dict[str, Any]
) -> None:
    schedule = given.pop("schedule", None)
    ends = []
    for stops in ([4, 9], [4, 6, 9]):
        store, rates = MemoryStore(), Rates()
        for number, stop in enumerate(stops):
            lr = 0.1 if number == 0 else 0.3
            made = [kind() for kind in callbacks]
            trained = trainer(store, lr, schedule, rates, *made, **given)
            trained.fit(stop, override=["lr"])
        weights = [weight.detach().clone() for weight in trained.model.parameters()]
        ends.append((rates.seen, weights))
    assert ends[0][0] == ends[1][0]
    for once, twice in zip(ends[0][1], ends[1][1], strict=True):
        assert torch.equal(once, twice)
    assert ends[0][0][5] > ends[0][0][4]


def test_only_what_is_named_is_taken_of_one_group_or_of_all() -> None:
    def made(store: MemoryStore, lr: float, decay: float, betas: tuple[float, float]) -> Trainer:
        model = network()
        groups = [{"params": [*model[number].parameters()]} for number in (0, 2)]
        optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=decay, betas=betas)
        return make(store, model=model, optimizer=optimizer, scheduler=None, every=None)

    store = MemoryStore()
    made(store, 0.1, 0.01, (0.9, 0.99)).fit(2)
    again = made(store, 0.3, 0.03, (0.8, 0.9))
    outcome = again.fit(3, override=["betas", "optimizer.param_groups.1.weight_decay"])
    found = [
        (group["lr"], group["weight_decay"], group["betas"])
        for group in again.optimizer.param_groups
    ]
    assert found == [(0.1, 0.01, (0.8, 0.9)), (0.1, 0.03, (0.8, 0.9))]
    assert sum("from the checkpoint, not" in note for note in outcome.notes) == 3
    assert sum("replaces" in note for note in outcome.notes) == 3


def test_a_tensor_stays_a_tensor() -> None:
    store, lr = MemoryStore(), torch.tensor(0.1)
    trainer(store, lr, foreach=False).fit(2)  # type: ignore[arg-type]
    again = trainer(store, torch.tensor(0.3), foreach=False)  # type: ignore[arg-type]
    again.fit(3, override=["lr"])
    found = again.optimizer.param_groups[0]["lr"]
    assert isinstance(found, torch.Tensor)
    assert found.item() == pytest.approx(0.3)


@pytest.mark.parametrize("wrong", ["lrr", "optimizer.param_groups.1.lr", "amsgrad", "step_size"])
def test_what_no_optimizer_has_is_an_error_that_names_what_there_is(wrong: str) -> None:
    store = MemoryStore()
    made = trainer(store, 0.1)
    with pytest.raises(UsageError, match=r"there are betas, eps, lr, weight_decay"):
        made.fit(2, override=[wrong])
    assert not store.children()


def test_a_new_run_from_a_checkpoint_of_another_takes_it_too(tmp_path: Path) -> None:
    rates, sweeps = Rates(), []
    trainer(tmp_path / "old", 0.1, SCHEDULES["step"]).fit(4)
    for lr in (0.2, 0.4):
        new = trainer(tmp_path / f"new-{lr}", lr, SCHEDULES["step"], rates)
        new.fit(5, start_from=tmp_path / "old", override=["lr"])
        sweeps.append(rates.seen[5])
    assert sweeps == pytest.approx([0.1, 0.2])


def test_a_part_that_is_not_loaded_is_not_told_about() -> None:
    store, run = MemoryStore(), new_run()
    with run.manager(store) as manager:
        manager.save(1, wait=True)
    other = new_run()
    for group in other.optimizer.param_groups:
        group["initial_lr"] = group["weight_decay"] = 0.5
    with other.manager(store) as manager:
        assert "from the checkpoint, not" not in "".join(manager.load(components=["model"]).notes)
        assert "from the checkpoint, not" not in "".join(
            manager.load(skip=["optimizer.param_groups"]).notes
        )
        assert "from the checkpoint, not" in "".join(manager.load().notes)


def test_a_rate_of_zero_is_left_for_that_of_the_script() -> None:
    store, rates = MemoryStore(), Rates()
    trainer(store, 0.0, SCHEDULES["step"]).fit(2)
    trainer(store, 0.3, SCHEDULES["step"], rates).fit(3, override=["lr"])
    assert rates.seen[3] == 0.3
