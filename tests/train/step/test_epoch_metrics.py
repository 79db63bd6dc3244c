"""Metrics that are no means: over an epoch of training, over a validation, and over a resume."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torchmetrics import classification

from holdfast import Best, CheckpointManager, On
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import (
    Callback,
    HookFailed,
    Image,
    Measured,
    Perplexity,
    StepOutput,
    Training,
    Validation,
)
from holdfast.train.group import ALONE
from holdfast.train.outputs import picture
from holdfast.train.step.epoch_metrics import Scores
from holdfast.train.step.undo import Boundary
from marks import full
from train.small import make

LENGTH = 10


def samples(count: int = LENGTH) -> TensorDataset:
    own = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 4, generator=own), torch.randint(2, (count,), generator=own)
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss(model: nn.Module, batch: list[Tensor]) -> StepOutput:
    logits = model(batch[0]).squeeze(-1)
    value = nn.functional.binary_cross_entropy_with_logits(logits, batch[1].float())
    return StepOutput(value, outputs=(logits.sigmoid(), batch[1]), weight=len(batch[1]))


def f1_of(predictions: Tensor, target: Tensor) -> float:
    """The definition."""
    chosen, is_one = predictions > 0.5, target == 1
    right = int((chosen & is_one).sum())
    return 2 * right / max(1, int(chosen.sum()) + int(is_one.sum()))


def confusion_of(predictions: Tensor, target: Tensor) -> Tensor:
    matrix = torch.zeros(2, 2, dtype=torch.int64)
    for chosen, is_one in zip(predictions > 0.5, target, strict=True):
        matrix[int(is_one), int(chosen)] += 1
    return matrix


def all_kinds() -> dict[str, Any]:
    return {
        "f1": classification.BinaryF1Score(),
        "auroc": classification.BinaryAUROC(),
        "matrix": classification.BinaryConfusionMatrix(),
        "by_function": f1_of,
        "perplexity": Perplexity(),
        "several": torchmetrics.MetricCollection(
            {
                "precision": classification.BinaryPrecision(),
                "recall": classification.BinaryRecall(),
            }
        ),
        "first": Measured(
            torchmetrics.MeanMetric(), lambda batch, outputs: (batch[0][:, 0], batch[1] + 1.0)
        ),
    }


def trainer(root: Any, **options: Any) -> Any:
    options = {
        "model": net(),
        "data": Loader(samples(), batch_size=2),
        "loss": loss,
        "metrics": all_kinds(),
        "scheduler": None,
        **options,
    }
    return make(root, **options)


def lines(root: Path) -> list[tuple[int, dict[str, Any]]]:
    found = map(json.loads, (root / "log" / "train.jsonl").read_text("utf-8").splitlines())
    return [
        (line["step"], line["metrics"])
        for line in found
        if "save/nbytes" not in line["metrics"] and "load/nbytes" not in line["metrics"]
    ]


def test_a_validation_has_them_over_all_its_batches() -> None:
    """Unlike the mean of the batches' own values."""
    seen: list[tuple[str, Image]] = []

    class Watch(Callback):
        def log_image(self, training: Training, name: str, image: Image) -> None:
            seen.append((name, image))

    validation = Validation(
        data=Loader(samples(), batch_size=3, shuffle=False), metrics=all_kinds()
    )
    made = trainer(MemoryStore(), metrics=None, validate=validation, callbacks=[Watch()])
    twice = [made.validate() for _ in range(2)]
    assert twice[0] == twice[1], "they begin anew each time"
    found = twice[0]
    inputs, target = samples().tensors
    with torch.no_grad():
        predictions = made.model(inputs).squeeze(-1).sigmoid()
        right, chosen = (predictions > 0.5) & (target == 1), predictions > 0.5
    assert found["val/f1"] == pytest.approx(f1_of(predictions, target))
    assert found["val/by_function"] == pytest.approx(f1_of(predictions, target))
    assert found["val/several/precision"] == pytest.approx(float(right.sum() / chosen.sum()))
    assert found["val/several/recall"] == pytest.approx(float(right.sum() / target.sum()))
    assert found["val/perplexity"] == pytest.approx(math.exp(found["val/loss"]))
    pairs = [(a > b) for a in predictions[target == 1] for b in predictions[target == 0]]
    assert found["val/auroc"] == pytest.approx(sum(map(int, pairs)) / len(pairs))
    mean = (inputs[:, 0] * (target + 1)).sum() / (target + 1).sum()
    assert found["val/first"] == pytest.approx(float(mean))
    assert "val/matrix" not in found
    (name, image), _ = seen
    assert name == "val/matrix"
    assert image.values == confusion_of(predictions, target).double().tolist()


def test_a_training_has_them_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    collected: list[StepOutput] = []

    class Watch(Callback):
        def batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
            collected.append(outputs)

    # A log of the end of an epoch is made whether or not it is due.
    made = trainer(tmp_path, callbacks=[Watch()], log_every=100)
    made.fit("2ep")
    logged = [(step, found) for step, found in lines(tmp_path) if "train/f1" in found]
    matrices = [
        (step, found["train/matrix"]) for step, found in lines(tmp_path) if "train/matrix" in found
    ]
    assert [step for step, _ in logged] == [step for step, _ in matrices] == [5, 10]
    for (_, found), (_, matrix), of_epoch in zip(
        logged, matrices, (collected[:5], collected[5:]), strict=True
    ):
        outputs = [output.outputs for output in of_epoch]
        predictions = torch.cat([item[0] for item in outputs]).detach()
        target = torch.cat([item[1] for item in outputs])
        assert found["train/f1"] == pytest.approx(f1_of(predictions, target))
        assert found["train/by_function"] == pytest.approx(f1_of(predictions, target))
        mean = torch.stack([output.loss.detach() for output in of_epoch]).mean()
        assert found["train/perplexity"] == pytest.approx(float(mean.exp()), rel=1e-6)
        assert matrix == confusion_of(predictions, target).tolist()
    (newest,) = (item for item in CheckpointManager(tmp_path, made.state).list() if item.step == 10)
    assert newest.metrics["train/f1"] == logged[-1][1]["train/f1"]


@pytest.mark.parametrize("ends", [(3, 7), *full((2,), (5,), (1, 2, 3, 4))])
def test_a_run_that_ended_within_an_epoch_goes_on_bit_for_bit(
    tmp_path: Path, ends: tuple[int, ...]
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    trainer(once, every="1step").fit("2ep")
    for until in ends:
        trainer(twice, every="1step").fit(until)
    trainer(twice, every="1step").fit("2ep")
    assert only_of_epochs(twice) == only_of_epochs(once) != []


def only_of_epochs(root: Path) -> list[Any]:
    return [
        (step, {name: value for name, value in found.items() if name.startswith("train/")})
        for step, found in lines(root)
        if any(name.startswith("train/") for name in found)
    ]


def test_the_same_trainer_goes_on_as_a_new_one_does(tmp_path: Path) -> None:
    made = trainer(tmp_path / "same", every="1step")
    for until in ("3step", "2ep"):
        made.fit(until)
    trainer(tmp_path / "once", every="1step").fit("2ep")
    assert only_of_epochs(tmp_path / "same") == only_of_epochs(tmp_path / "once")


def test_a_failed_step_leaves_no_trace_in_them(tmp_path: Path) -> None:
    """They had its batch, when the step was undone to save the state of the one before."""

    class Fails(Callback):
        def after_backward(self, training: Training) -> None:
            if training.counters.step == 3 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise RuntimeError

        def batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
            if training.counters.step == 1 and not (tmp_path / "failed later").exists():
                (tmp_path / "failed later").touch()
                raise RuntimeError

    for name, callbacks in (("once", []), ("broken", [Fails()])):
        for _ in range(1 + 2 * len(callbacks)):
            made = trainer(tmp_path / name, every=On("exception"), callbacks=callbacks)
            with suppress(HookFailed):
                made.fit("2ep")
    assert only_of_epochs(tmp_path / "broken") == only_of_epochs(tmp_path / "once")


class WithoutLength:
    """Data that shows its end only when it is asked for more."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 4:
            self.position += 1
            yield [item[self.position : self.position + 2] for item in samples().tensors]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_an_epoch_whose_end_is_seen_late_has_them_too(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    trainer(once, data=WithoutLength(), every="1step").fit("3ep")
    for until in ("4step", "6step", "3ep"):
        trainer(twice, data=WithoutLength(), every="1step").fit(until)
    assert len(only_of_epochs(once)) == 2 * 3
    assert only_of_epochs(twice) == only_of_epochs(once)


def test_a_metric_of_training_decides_what_is_kept(tmp_path: Path) -> None:
    made = trainer(tmp_path, every="1ep", keep=Best("train/auroc", 1, mode="max"))
    made.fit("3ep")
    values = {
        step: found["train/auroc"]
        for step, found in only_of_epochs(tmp_path)
        if "train/auroc" in found
    }
    kept = {item.step for item in CheckpointManager(tmp_path, made.state).list()}
    assert max(values, key=lambda step: values[step]) in kept


def test_metrics_that_are_new_or_other_ones_begin_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"gone": classification.BinaryF1Score(), "other": classification.BinaryF1Score()}
    trainer(tmp_path, metrics=first).fit(3)
    second = {"other": classification.BinaryAUROC(), "new": Perplexity()}
    caplog.clear()
    trainer(tmp_path, metrics=second).fit("1ep")
    said = caplog.text
    assert "metrics new start over in the middle of the epoch: the checkpoint lacks them" in said
    assert "metrics other (it has other states) start over" in said
    found = [names for _, names in only_of_epochs(tmp_path)]
    assert [{*names} for names in found] == [{"train/other", "train/new"}]


def test_nothing_is_said_where_an_epoch_had_just_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, metrics={"f1": classification.BinaryF1Score()}).fit("1ep")
    caplog.clear()
    trainer(tmp_path, metrics={"new": Perplexity()}).fit("2ep")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class Own:
    """A metric as anybody writes one."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.count += len(target)

    def compute(self) -> Mapping[str, Any]:
        return {"count": self.count, "both": np.array([1.0, 2.0]), "text": "no number"}

    def reset(self) -> None:
        self.count = 0


class OwnSaved(Own):
    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_an_object_of_ones_own_is_a_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    validation = Validation(data=Loader(samples(), batch_size=3), metrics={"own": Own()})
    trainer(tmp_path, metrics={"own": OwnSaved()}, validate=validation).fit(3)
    trainer(tmp_path, metrics={"own": OwnSaved()}, validate=validation).fit("1ep")
    ((_, found),) = only_of_epochs(tmp_path)
    assert found == {"train/own/count": LENGTH, "train/own/both/0": 1.0, "train/own/both/1": 2.0}
    assert lines(tmp_path)[-1][1]["val/own/count"] == LENGTH
    assert "metric 'train/own/text' is not one number" in caplog.text


def without_outputs(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch).loss


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mapping": ({"metrics": [Own()]}, r"metrics=\["),
    "a class": ({"metrics": {"own": OwnSaved}}, "'own' is a class"),
    "no metric": ({"metrics": {"own": 3}}, "'own': 3 has no update, compute, reset"),
    "a name that is taken": ({"metrics": {"loss": OwnSaved()}}, "'loss' cannot be the name"),
    "no text": ({"metrics": {3: OwnSaved()}}, "3 cannot be the name"),
    "no state": ({"metrics": {"own": Own()}}, "'own': Own has no state_dict"),
    "no function": (
        {"metrics": {"own": Measured(OwnSaved(), 3)}},  # type: ignore[arg-type]
        "'own': inputs=3 cannot be called",
    ),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_no_metric_is_refused_when_the_trainer_is_made(given: str) -> None:
    options, said = WRONG[given]
    with pytest.raises(UsageError, match=said):
        trainer(MemoryStore(), **options)
    if given != "no state":  # that of a validation has none
        with pytest.raises(UsageError, match=said):
            trainer(MemoryStore(), metrics=None, validate=Validation(data=[1], **options))


def test_one_object_is_no_metric_of_training_and_of_validation() -> None:
    """The validation would reset it in the middle of an epoch."""
    metric = OwnSaved()
    validation = Validation(data=Loader(samples(), batch_size=3), metrics={"same": metric})
    with pytest.raises(UsageError, match=r"'same'.*an object for each"):
        trainer(MemoryStore(), metrics={"own": metric}, validate=validation)
    training = trainer(MemoryStore(), metrics={"own": metric})
    for evaluate in (training.test, lambda given: training.validate(data=given)):
        with pytest.raises(UsageError, match=r"'same'.*an object for each"):
            evaluate(validation)


class Images(Callback):
    def __init__(self) -> None:
        self.names: list[str] = []

    def log_image(self, training: Training, name: str, image: Any) -> None:
        self.names.append(name)


def test_pictures_of_a_test_are_named_so() -> None:
    images = Images()
    training = trainer(MemoryStore(), metrics=None, callbacks=[images])
    matrix = {"matrix": classification.BinaryConfusionMatrix()}
    training.test(Validation(data={"a": Loader(samples(), batch_size=5)}, metrics=matrix))
    training.validate(Validation(data=Loader(samples(), batch_size=5), metrics=matrix))
    assert images.names == ["test/a/matrix", "val/matrix"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": without_outputs}, "'own': the loss gives no outputs"),
        (
            {"metrics": {"own": Measured(OwnSaved(), lambda batch, outputs: batch[0])}},
            "'own' does not accept its inputs",
        ),
        ({"metrics": {"own": Perplexity()}, "loss": without_outputs}, "tokens of a batch"),
        (
            {"metrics": {"own": Measured(f1_of, lambda batch, outputs: (batch, 3))}},
            "a function needs tensors",
        ),
    ],
)
def test_outputs_that_do_not_fit_a_metric_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trainer(MemoryStore(), **{"metrics": {"own": OwnSaved()}, **options}).fit(1)


def test_a_metric_with_the_name_of_one_of_the_loss_is_refused() -> None:
    def named(model: nn.Module, batch: Any) -> StepOutput:
        found = loss(model, batch)
        return StepOutput(found.loss, {"own": 1.0}, outputs=found.outputs)

    validation = Validation(data=Loader(samples(), batch_size=3), metrics={"own": f1_of})
    made = trainer(MemoryStore(), metrics=None, loss=named, validate=validation)
    with pytest.raises(UsageError, match=r"the loss gives metrics named \['own'\]"):
        made.validate()


def test_perplexity_counts_tokens_by_itself_where_the_loss_gives_none() -> None:
    counted = Perplexity(tokens=lambda batch: len(batch[1]))
    validation = Validation(data=Loader(samples(), batch_size=3), metrics={"ppl": counted})
    made = trainer(MemoryStore(), metrics=None, loss=without_outputs, validate=validation)
    found = made.validate()
    assert found["val/ppl"] == pytest.approx(math.exp(found["val/loss"]))


def test_a_matrix_is_drawn_from_white_to_blue() -> None:
    image = picture([[0.0, 1.0, 3.0], [float("nan"), 2.0, 3.0]])
    cell = 64
    assert image.pixels.shape == (2 * cell, 3 * cell, 3)
    assert image.pixels.dtype == np.uint8
    corners = image.pixels[::cell, ::cell]
    assert corners[0, 0].tolist() == [247, 251, 255]
    assert corners[0, 2].tolist() == corners[1, 2].tolist() == [8, 48, 107]
    assert corners[1, 0].tolist() == [220, 30, 30]
    assert np.unique(image.pixels[:cell, :cell]).size == 3, "a square is of one colour"
    assert picture([[1.0] * 300] * 2).pixels.shape == (2, 300, 3)


def test_metrics_do_not_keep_the_graph_of_a_batch() -> None:
    kept: list[Any] = []

    class Keeps(OwnSaved):
        def update(self, predictions: Tensor, target: Tensor) -> None:
            kept.append(predictions)

    trainer(MemoryStore(), metrics={"own": Keeps()}).fit(1)
    assert not kept[0].requires_grad


def test_a_signal_in_the_validation_at_the_end_of_an_epoch_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    class Signals(Callback):
        def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    for name, callbacks in (("once", [[]]), ("twice", [[Signals()], []])):
        for given in callbacks:
            plan = Validation(
                data=Loader(samples(), batch_size=3), every="1ep", metrics=all_kinds()
            )
            made = trainer(tmp_path / name, validate=plan, callbacks=given)
            with pytest.raises(SystemExit) if given else nullcontext():
                made.fit("1ep")
    once, twice = ({*map(repr, lines(tmp_path / name))} for name in ("once", "twice"))
    assert twice == once
    assert len(only_of_epochs(tmp_path / "twice")) == 2


def _outputs(count: int, device: str = "cpu") -> StepOutput:
    return StepOutput(torch.tensor(0.0), outputs=torch.ones(count, device=device))


class _Joins(TorchDispatchMode):
    """Counts how often tensors are joined."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


def test_a_snapshot_puts_outputs_back_and_does_not_copy_them() -> None:
    scores = Scores({"count": len}, ALONE, what="metrics", is_saved=True)
    scores.add_batch(None, _outputs(2))
    scores.add_batch(None, _outputs(1))
    with _Joins() as joins:
        before = Boundary(components={"metrics": scores})
    assert joins.count == 0
    scores.add_batch(None, _outputs(4))
    assert scores.compute_metrics()[0] == {"count": 7}
    scores.reset_metrics()
    scores.add_batch(None, _outputs(5))
    before.restore_snapshot()
    assert scores.compute_metrics()[0] == {"count": 3}


def test_outputs_that_were_loaded_go_to_the_device_of_those_that_follow() -> None:
    scores = Scores({"count": len}, ALONE, what="metrics", is_saved=True)
    scores.add_batch(None, _outputs(2))
    scores.load_state_dict(scores.state_dict())
    scores.add_batch(None, _outputs(1, "meta"))
    assert scores.compute_metrics()[0] == {"count": 3}
