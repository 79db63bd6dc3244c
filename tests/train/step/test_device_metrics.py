"""Metrics wait for the device only when somebody looks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import (
    Callback,
    Downstream,
    Metrics,
    Reduced,
    StepOutput,
    Training,
    Validation,
)
from holdfast.train.step.device_metrics import LazyMetrics, Mean, convert_metric
from train.small import make


class Looks:
    """Counts how often a number is taken out of a tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = Tensor.item

        def item(tensor: Tensor) -> Any:
            self.count += 1
            return real(tensor)

        monkeypatch.setattr(Tensor, "item", item)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return model(batch).square().mean(), {"extra": batch.max()}


def weighed(model: nn.Module, batch: Tensor) -> StepOutput:
    value, extra = loss(model, batch)
    return StepOutput(value, extra, weight=(batch > 0).sum())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # The step of Adam on a CPU takes its count out of a tensor.
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_nobody_waits_between_two_logs(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the loss, nor for a metric, nor for the norm of the gradients."""
    for module in ("train.step.device_metrics", "saving.recorder"):
        monkeypatch.setattr(f"holdfast.{module}.is_at_hand", lambda value: False)
    waits: list[int] = []

    class Watch(Callback):
        def step_start(self, training: Training) -> None:
            looks.count = 0

        def log(self, training: Training, metrics: Metrics) -> None:
            assert set(metrics) == {"loss", "extra", "grad_norm"}
            dict(metrics)

        def before_data(self, training: Training) -> None:
            if training.counters.step:
                waits.append(looks.count)

    made = make(
        MemoryStore(),
        optimizer=sgd,
        loss=loss,
        clip=1.0,
        ema=0.9,
        every="100step",
        log_every=4,
        callbacks=[Watch()],
    )
    made.fit(9)
    assert waits == [0, 0, 0, 3, 0, 0, 0, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weighs", [False, True])
def test_nobody_waits_for_an_accelerator_between_two_logs(precision: str, weighs: bool) -> None:
    """As torch itself sees it: any wait inside the step is an error."""

    class Strict(Callback):
        def step_start(self, training: Training) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def step_end(self, training: Training, metrics: Metrics) -> None:
            torch.cuda.set_sync_debug_mode("default")

    make(
        MemoryStore(),
        device="cuda",
        optimizer=sgd,
        loss=weighed if weighs else loss,
        precision=precision,
        clip=1.0,
        ema=0.9,
        accumulate=2,
        every=None,
        log_every=4,
        callbacks=[Strict()],
    ).fit(9)


def test_logs_are_at_the_same_steps_after_a_resume_and_at_the_end() -> None:
    """K18."""
    store, steps = MemoryStore(), list[int]()

    class Watch(Callback):
        def log(self, training: Training, metrics: Metrics) -> None:
            steps.append(training.counters.step)

    for until in (5, 10):
        make(store, log_every=3, callbacks=[Watch()]).fit(until)
    assert steps == [3, 5, 6, 9, 10]


def test_a_value_is_of_the_moment_it_was_given() -> None:
    """Although the tensor is written to later, and nobody had looked."""
    tensor = torch.tensor(1.0)
    found = LazyMetrics({"loss": convert_metric("loss", tensor)})
    tensor.fill_(2.0)
    assert dict(found) == {"loss": 1.0}
    assert repr(found.joined({"more": 3.0})) == "{'loss': 1.0, 'more': 3.0}"
    assert len(found) == 1


def test_means_are_weighted_and_over_the_batches_that_have_the_metric() -> None:
    mean = Mean()
    mean.add_batch({"a": torch.tensor(1.0), "b": 4.0}, 3.0)
    mean.add_batch({"a": 5.0}, 1.0)
    assert {name: float(value) for name, value in mean.compute_means().items()} == {
        "a": 2.0,
        "b": 4.0,
    }


def of_batch(model: nn.Module, batch: Tensor) -> StepOutput:
    """Metrics by each reduction of the largest number of a batch, with a weight."""
    top = batch.max()
    kinds: Any = ("mean", "sum", "max", "min", "l2")
    return StepOutput(model(batch).square().mean(), {k: Reduced(top, k) for k in kinds}, weight=3)


def test_metrics_are_reduced_over_the_batches_of_a_step_and_of_a_validation() -> None:
    """O59: only a mean is weighted."""
    seen: list[dict[str, float]] = []

    class Keeps(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            seen.append(dict(metrics))

        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            seen.append({metric.removeprefix("val/"): value for metric, value in metrics.items()})

    data = [torch.full((2, 4), value) for value in (3.0, -1.0, 2.0)]
    options = {"accumulate": 3, "validate": Validation(data=data), "callbacks": [Keeps()]}
    loader = Loader(torch.cat(data), batch_size=2, shuffle=False)
    make(None, data=loader, loss=of_batch, **options).fit(1)
    expected = {"mean": 4 / 3, "sum": 4.0, "max": 3.0, "min": -1.0, "l2": math.sqrt(14)}
    for found in seen:
        assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert len(seen) == 2


def test_an_extreme_is_nan_if_a_batch_has_nan() -> None:
    for values in ([math.nan, 1.0], [1.0, math.nan], [torch.tensor(1.0), math.nan]):
        mean = Mean()
        for value in values:
            mean.add_batch({"top": value}, 1.0, {"top": "max"})
        assert math.isnan(float(mean.compute_means()["top"]))


def test_one_metric_has_one_reduction() -> None:
    with pytest.raises(UsageError, match="by='median'"):
        Reduced(1.0, "median")  # type: ignore[arg-type]
    mean = Mean()
    mean.add_batch({"top": 1.0}, 1.0)
    with pytest.raises(UsageError, match="'top' is reduced by mean and by max"):
        mean.add_batch({"top": 1.0}, 1.0, {"top": "max"})


def test_a_metric_that_is_no_number_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a loss, a check or a callback gives it: no run ends by it."""

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[Any, Any]]:
        wrong = {"text": "good", "none": None, "vector": batch[0], "huge": 10**400, 3: 1.0}
        return model(batch).square().mean(), {"fine": 2.0, **wrong}

    class Logs(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            assert set(metrics) == {"loss", "fine"}
            training.log({"mine": 1.0, "my_list": [3.5]})  # type: ignore[dict-item]

    check = Downstream(name="check", run=lambda model: {"fine": 1.0, "words": ["a"]})
    validation = Validation(data=[torch.ones(2, 4)], downstream=[check])
    trainer = make(tmp_path, loss=loss, callbacks=[Logs()], validate=validation)
    trainer.fit(5)
    names = ["text", "none", "vector", "huge", 3, "my_list", "words"]
    for name in names:
        said = [r.getMessage() for r in caplog.records if f"metric {name!r}" in r.getMessage()]
        assert len(said) == 1, name
    assert "'good' of type str" in caplog.text
    log = (tmp_path / "log" / "train.jsonl").read_text("utf-8")
    logged = {name for line in log.splitlines() for name in json.loads(line)["metrics"]}
    expected = {"loss", "fine", "mine", "val/loss", "val/fine", "val/check/fine"}
    assert {name for name in logged if "save" not in name} == expected


def test_a_loss_that_gives_no_metrics_by_name_is_refused(tmp_path: Path) -> None:
    """Such as the outputs of the model, which are not what is logged."""
    with pytest.raises(UsageError, match="or that and a dict of metrics"):
        make(tmp_path, loss=lambda model, batch: (model(batch).mean(), 3)).fit(1)


@pytest.mark.parametrize("value", [torch.zeros(2), "text", "3.5", None, [1.0], 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="'extra'"):
        convert_metric("extra", value)


def test_an_integer_beyond_the_range_of_a_float_is_refused_by_name() -> None:
    """Issue 20, line 10: it was an OverflowError that named nothing."""
    with pytest.raises(UsageError, match=r"'count'.*too large"):
        convert_metric("count", 10**400)
