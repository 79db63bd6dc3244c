"""TensorBoard: what is in the files of events is one history of the run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.train import (
    Callback,
    HookFailed,
    Measured,
    Metrics,
    Table,
    TensorBoard,
    Training,
    Validation,
)
from offline import tensorboard_texts
from train.small import Noisy, make

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number files of events from 1: of one second, TensorBoard reads number 10 before number 9."""
    monkeypatch.setattr(writers, "_global_uid", writers.AtomicCounter(0))


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.step:
            raise RuntimeError


NUMBERS = ("loss", "draw", "val/loss", "val/draw")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(item.step, item.value) for item in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def train(root: Path, until: int, *callbacks: Callback) -> dict[str, list[tuple[int, float]]]:
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="3step")
    options: dict[str, Any] = {"every": "3step", "validate": plan}
    make(root / "run", callbacks=[TensorBoard(root / "events"), *callbacks], **options).fit(until)
    return scalars(root / "events")


def test_scalars_are_of_their_steps_also_those_of_validations_and_saves(tmp_path: Path) -> None:
    found = train(tmp_path, 7)
    assert {name: [step for step, _ in values] for name, values in found.items()} == {
        "loss": [1, 2, 3, 4, 5, 6, 7],
        "draw": [1, 2, 3, 4, 5, 6, 7],
        "val/loss": [3, 6, 7],
        "val/draw": [3, 6, 7],
        **{f"save/{name}": [3, 6, 7] for name in ("stall_s", "duration_s", "nbytes")},
        **{f"checkpoint/{name}": [3, 6, 7] for name in ("nbytes", *NUMBERS)},
    }
    texts = tensorboard_texts(tmp_path / "events", "checkpoint/reference")
    assert [step for step, _ in texts] == [3, 6, 7]
    assert f"| root | {tmp_path / 'run'} |" in texts[0][1]


def test_steps_that_are_done_again_are_there_once(tmp_path: Path) -> None:
    """K18: what was shown of steps beyond the checkpoint is taken back."""
    straight = train(tmp_path / "straight", 9)
    with pytest.raises(HookFailed):
        train(tmp_path / "broken", 9, StopAt(6))
    assert [step for step, _ in scalars(tmp_path / "broken" / "events")["loss"]] == [1, 2, 3, 4, 5]
    resumed = train(tmp_path / "broken", 9)
    assert resumed["loss"] == straight["loss"]
    assert [step for step, _ in resumed["load/nbytes"]] == [3]
    assert resumed["val/loss"] == straight["val/loss"]


def test_what_is_logged_within_a_step_is_there_once(tmp_path: Path) -> None:
    """K18: it belongs to the step under way, also after a resume right before it."""

    class Logs(Callback):
        def before_optimizer_step(self, training: Training) -> None:
            training.log({"within": 1.0})

    with pytest.raises(HookFailed):
        train(tmp_path, 9, Logs(), StopAt(5))
    assert [step for step, _ in train(tmp_path, 9, Logs())["within"]] == [*range(1, 10)]


def test_a_validation_alone_writes_nothing(tmp_path: Path) -> None:
    plan = Validation(data=Loader(Noisy(), batch_size=5))
    logger = TensorBoard(tmp_path / "events")
    trainer = make(tmp_path / "run", validate=plan, callbacks=[logger])
    trainer.validate()
    trainer.log({"mine": 1.0}, to=["tensorboard"])
    assert not (tmp_path / "events").exists()


def test_a_test_after_fit_is_of_the_step_of_its_weights(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path / "events")
    trainer = make(tmp_path / "run", every="2step", callbacks=[logger])
    trainer.fit(5)
    found = trainer.test(Loader(Noisy(), batch_size=5), which="step=2")
    written = scalars(tmp_path / "events")
    assert written["test/loss"] == [(2, pytest.approx(found["test/loss"]))]
    assert [step for step, _ in written["loss"]] == [1, 2, 3, 4, 5]


def test_texts_and_tables_are_texts_of_their_steps(tmp_path: Path) -> None:
    class Tells(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"sample": "once", "worst": Table(["word"], [["a"]])})

    train(tmp_path, 2, Tells())
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = {
        name: [(item.step, item.tensor_proto.string_val) for item in events.Tensors(name)]
        for name in events.Tags()["tensors"]
        if not name.startswith("checkpoint/")
    }
    assert found == {
        "sample/text_summary": [(1, [b"once"]), (2, [b"once"])],
        "worst/text_summary": [(step, [b"| word |\n| --- |\n| a |"]) for step in (1, 2)],
    }


def test_a_tensor_is_a_histogram_of_its_step(tmp_path: Path) -> None:
    class Tells(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            training.log({"weights": torch.tensor([0.0, 0.0, 2.0, math.inf])})

    train(tmp_path, 2, Tells())
    events = accumulator.EventAccumulator(str(tmp_path / "events"), {"histograms": 0})
    events.Reload()
    one, two = events.Histograms("weights")
    assert [one.step, two.step] == [1, 2]
    found = one.histogram_value
    assert (found.min, found.max, found.num, found.sum) == (0.0, 2.0, 3, pytest.approx(2.0))
    assert found.sum_squares == pytest.approx(4.0)


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"holdfast-torch\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_a_matrix_is_a_picture_of_its_step(tmp_path: Path) -> None:
    matrix = Measured(lambda inputs: inputs[:2], lambda batch, outputs: batch)
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="2step", metrics={"matrix": matrix})
    logger = TensorBoard(tmp_path / "events")
    make(tmp_path / "run", validate=plan, callbacks=[logger]).fit(4)
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    pictures = events.Images("val/matrix")
    assert [(item.step, item.height, item.width) for item in pictures] == [
        (2, 128, 256),
        (4, 128, 256),
    ]
    assert "val/matrix" not in events.Tags()["scalars"]
