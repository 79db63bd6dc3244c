"""Ends before the goal: the same whether a run was resumed or not, and once for all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, EarlyStopping, HookFailed, StopWhen, Training, Validation
from train.small import Noisy, make


def course(values: list[float]) -> Validation:
    """A validation at each step, whose loss is the value of that step."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.tensor(values[int(model.at.step.item()) - 1])  # type: ignore[operator, union-attr]

    return Validation(data=[torch.zeros(1, 4)], every="1step", loss=loss)


class At(nn.Module):
    """Tells the loss function at which step it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))


class Follow(Callback):
    priority = 1

    def step_end(self, training: Training, metrics: Any) -> None:
        training.model.at.step.fill_(training.counters.step)  # type: ignore[operator, union-attr]


def trainer(root: Any, values: list[float], *callbacks: Callback) -> Any:
    model = nn.Sequential(nn.Linear(4, 1))
    model.at = At()

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model[0](batch).square().mean()  # type: ignore[no-any-return]

    return make(
        root,
        model=model,
        loss=loss,
        every="1step",
        validate=course(values),
        callbacks=[Follow(), *callbacks],
    )


def test_the_direction_is_that_of_the_metric_and_never_guessed() -> None:
    rising = EarlyStopping("val/accuracy")
    assert [rising._is_better(0.5)] == [True]
    rising.best = 0.5
    assert [rising._is_better(value) for value in (0.4, 0.6)] == [False, True]
    with pytest.raises(UsageError, match=r"'val/score'.*mode="):
        EarlyStopping("val/score")
    with pytest.raises(UsageError, match="StopWhen"):
        EarlyStopping("loss")


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([5, 4, 4, 4, 1, 1, 1], {"patience": 2}, (4, "stopped")),
        ([5, 4, 4, 3, 3, 2, 9], {"patience": 2}, (7, "goal")),
        ([5, 4.5, 4.2, 3, 3, 3, 3], {"patience": 2, "min_delta": 0.9}, (3, "stopped")),
        ([1, 2, 3, 3, 2, 9, 9], {"patience": 2, "mode": "max"}, (5, "stopped")),
        ([math.nan, math.nan, 1, 1, 1, 1, 1], {"patience": 2}, (2, "stopped")),
        ([math.nan, 2, math.nan, 1, 1, 1, 1], {"patience": 3}, (7, "goal")),
    ],
)
def test_it_ends_when_the_metric_has_become_no_better(
    values: list[float], options: dict[str, Any], expected: tuple[int, str]
) -> None:
    """K46."""
    outcome = trainer(MemoryStore(), values, EarlyStopping(**options)).fit(7)
    assert (outcome.step, outcome.reason) == expected


def test_it_ends_where_it_would_without_a_resume(tmp_path: Path) -> None:
    """K46, D55: the best value and the count are in the checkpoint."""

    class Ends(Callback):
        def before_data(self, training: Training) -> None:
            if training.counters.step == 3:
                raise RuntimeError

    values = [5.0, 4.0, 4.5, 4.1, 4.2, 1.0]
    with pytest.raises(HookFailed):
        trainer(tmp_path, values, EarlyStopping(), Ends()).fit(6)
    stopping = EarlyStopping()
    outcome = trainer(tmp_path, values, stopping).fit(6)
    assert (outcome.step, outcome.reason, stopping.best) == (5, "stopped", 4.0)
    assert "no better than 4.0 in 3 validations" in outcome.detail


def test_what_was_ended_stays_so_until_there_is_more_patience(tmp_path: Path) -> None:
    """K46: once true stays true."""
    values = [5.0, 5.0, 5.0, 4.0, 4.0, 4.0]
    for _ in range(2):
        outcome = trainer(tmp_path, values, EarlyStopping(patience=2)).fit(6)
        assert (outcome.step, outcome.reason) == (3, "stopped")
    assert "raise patience=2" in outcome.detail  # of the second start
    assert trainer(tmp_path, values, EarlyStopping(patience=3)).fit(6).reason == "goal"


@pytest.mark.parametrize(
    ("watching", "says"),
    [
        (EarlyStopping("val/lss", mode="min"), "earlystopping: 'val/lss'; is 'val/loss' meant"),
        (EarlyStopping("val/other/f1"), "There are: loss, val/loss"),
        (
            StopWhen(lambda training, metrics: metrics.get("val/los", 1.0) < 0),
            "stopwhen: 'val/los'; is 'val/loss' meant",
        ),
        (StopWhen(lambda training, metrics: metrics.get("los", 1.0) < 0), "is 'loss' meant"),
    ],
)
def test_a_metric_that_is_never_there_is_an_error_at_the_first_validation(
    watching: Callback, says: str
) -> None:
    made = trainer(MemoryStore(), [1.0, 1.0], watching)
    with pytest.raises(UsageError, match=says):
        made.fit(2)
    assert made.counters.step == 1


def test_a_stop_by_a_validation_needs_one() -> None:
    with pytest.raises(UsageError, match=r"give validate=.*\n.*earlystopping: 'val/loss'"):
        make(MemoryStore(), callbacks=[EarlyStopping()])


def below_zero(name: str) -> StopWhen:
    return StopWhen(lambda training, metrics: metrics.get(name, 1.0) < 0)


def test_without_validations_a_metric_of_one_is_an_error_after_the_first_step() -> None:
    made = make(MemoryStore(), callbacks=[below_zero("val/loss")])
    with pytest.raises(UsageError, match="stopwhen: 'val/loss'; is 'loss' meant"):
        made.fit("2ep")
    assert made.counters.step == 1


def test_without_validations_another_missing_metric_is_a_warning_after_the_first_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be logged later: here at step 8, in the second of three epochs."""

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        return model(batch).square().mean(), {"rare": -1.0} if made.counters.step == 7 else {}

    made = make(MemoryStore(), loss=loss, callbacks=[below_zero("rare")])
    assert made.fit("3ep").step == 8
    (warning,) = [text for text in caplog.messages if "metrics are watched" in text]
    assert "stopwhen: 'rare'" in warning
    assert "There are: loss" in warning
    caplog.clear()
    assert make(MemoryStore(), callbacks=[below_zero("los")]).fit("3ep").reason == "goal"
    (warning,) = [text for text in caplog.messages if "metrics are watched" in text]
    assert "'los'; is 'loss' meant?" in warning


def test_a_condition_on_a_metric_of_steps_may_be_asked_at_validations_too() -> None:
    condition = StopWhen(lambda training, metrics: metrics.get("loss", 9.0) < -1)
    assert trainer(MemoryStore(), [1.0, 1.0], condition).fit(2).reason == "goal"


def test_a_validation_outside_of_fit_does_not_count() -> None:
    stopping = EarlyStopping(patience=1)
    made = trainer(MemoryStore(), [1.0], stopping)
    for _ in range(3):
        made.validate()
    assert (stopping.best, stopping.num_waited) == (None, 0)


def test_a_condition_ends_it_after_the_step_and_again_in_a_rerun(tmp_path: Path) -> None:
    """K46: asked about steps, validations and the checkpoint."""

    def until(loss: float) -> StopWhen:
        return StopWhen(lambda training, metrics: metrics.get("val/loss", 9.0) < loss, "is good")

    values = [5.0, 4.0, 3.0, 2.0, 1.0]
    for _ in range(2):
        outcome = trainer(tmp_path, values, until(3.5)).fit(5)
        assert (outcome.step, outcome.reason, outcome.detail) == (3, "stopped", "is good")
    assert trainer(tmp_path, values, until(2.5)).fit(5).step == 4
    at_two = StopWhen(lambda training, metrics: training.counters.step >= 2)
    assert trainer(MemoryStore(), values, at_two).fit(5).step == 2


@pytest.mark.parametrize(
    "options",
    [{"mode": "best"}, {"patience": 0}, {"patience": True}, {"min_delta": -1}, {"min_delta": "x"}],
)
def test_what_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="EarlyStopping"):
        EarlyStopping(**options)


def test_what_is_no_condition_or_state_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        StopWhen("val/loss < 1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not the state"):
        EarlyStopping().load_state_dict({})


def test_a_condition_is_not_asked_about_a_checkpoint_of_which_nothing_is_known() -> None:
    """Such as that of a run that was stopped before its first step."""

    class Stops(Callback):
        def fit_start(self, training: Training) -> None:
            training.request_stop("no time")

    store = MemoryStore()
    condition = lambda training, metrics: metrics["loss"] < -1  # noqa: E731
    make(store, callbacks=[StopWhen(condition), Stops()]).fit(3)
    assert make(store, callbacks=[StopWhen(condition)]).fit(3).reason == "goal"


def test_two_of_them_have_names(tmp_path: Path) -> None:
    """Issue 20, line 10: without one they are refused, as their states would change places."""
    loss, draw = (
        EarlyStopping("val/loss", name="loss"),
        EarlyStopping("val/draw", mode="min", name="draw"),
    )
    trainer = make(tmp_path, callbacks=[loss, draw], validate=[torch.zeros(1, 4)])
    assert {"callback-loss", "callback-draw"} <= set(trainer.state)
    with pytest.raises(UsageError, match="EarlyStopping"):
        make(tmp_path, callbacks=[EarlyStopping("val/loss"), EarlyStopping("val/draw", mode="min")])


def test_a_request_to_stop_where_nothing_runs_is_refused(tmp_path: Path) -> None:
    """Issue 20, line 10: it was dropped in silence, and `fit` trained to its goal."""
    trainer = make(tmp_path)
    with pytest.raises(UsageError, match="request_stop"):
        trainer.request_stop("too soon")
    trainer.fit(2)
    with pytest.raises(UsageError, match="request_stop"):
        trainer.request_stop("too late")

    class Asks(Callback):
        def setup(self, training: Training) -> None:
            training.request_stop("too soon")

    with pytest.raises(HookFailed, match="request_stop"):
        make(tmp_path, callbacks=[Asks()])


def test_a_request_in_a_validation_outside_of_fit_means_nothing(tmp_path: Path) -> None:
    """Issue 20, line 10: there is nothing to stop, and the callback need not know."""

    class Asks(Callback):
        def validation_end(self, training: Training, name: str, metrics: Any) -> None:
            training.request_stop("good enough")

    validation = Validation(data=Loader(Noisy(), batch_size=5, shuffle=False), every="9step")
    trainer = make(tmp_path, callbacks=[Asks()], validate=validation)
    assert trainer.validate()
    assert trainer.validate()
