"""The log of a validation that a resume makes up for is that of the undisturbed run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from holdfast import Stop
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Counters, GradientNorm, LearningRates, Training, Validation
from train.small import Noisy, make, network

STEPS = 4


class Killed(BaseException):
    """Ends a process at once, as far as a Trainer can tell."""


class Saves(Callback):
    """Saves at the end of step 3, before the validation that is due there."""

    def step_end(self, training: Training, metrics: Any) -> None:
        if training.counters.step == 3 and training.manager is not None:
            training.manager.save(3, wait=True)


class Dies(Callback):
    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        if training.counters.step == 3:
            raise Killed


class Signalled(Callback):
    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        if training.counters.step == 3:
            signal.raise_signal(signal.SIGTERM)


class Averages(Callback):
    """Puts its average of the weights into the model while it validates, as torch-ema does."""

    def validation_start(self, training: Training, name: str) -> None:
        self.trained = [weight.detach().clone() for weight in training.model.parameters()]
        for weight in training.model.parameters():
            weight.data.mul_(0.5)

    def validation_end(self, training: Training, name: str, metrics: Any) -> None:
        for weight, trained in zip(training.model.parameters(), self.trained, strict=True):
            weight.data.copy_(trained)


class Counted(Callback):
    """Notes a number of its own, as the page on callbacks shows it."""

    def before_optimizer_step(self, training: Training) -> None:
        self.step_numbers = {"doubled": 2.0 * training.present_step}

    def log(self, training: Training, metrics: Any) -> None:
        if "loss" in metrics:
            training.log(dict(self.step_numbers))


def optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.5)


def trained(root: Path, *callbacks: Callback) -> Any:
    made = make(
        root,
        model=network(),
        optimizer=optimizer,
        every="2step",
        log_every=2,
        clip=0.01,
        callbacks=[GradientNorm(), LearningRates(), Counted(), Saves(), *callbacks],
        validate=Validation(data=Loader(Noisy(), batch_size=5, seed=3), every="3step"),
        scheduler=lambda given: StepLR(given, 1, 0.5),
        stop=Stop(),
    )
    made.fit(STEPS)
    return made


def lines(root: Path) -> list[Any]:
    """The lines of the log, without what is a matter of time."""
    found = map(json.loads, (root / "log" / "train.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name != "time"}
        for line in found
        if not any(name.startswith(("save/", "load/")) for name in line["metrics"])
    ]


@pytest.mark.parametrize(
    "interruptions",
    [[Dies], [Signalled], [Signalled, Signalled], [Signalled, Dies]],
    ids=lambda classes: "-".join(item.__name__ for item in classes),
)
def test_the_resume_logs_what_the_step_would_have_logged(
    tmp_path: Path, interruptions: list[Callable[[], Callback]]
) -> None:
    """Invariant 7."""
    straight = trained(tmp_path / "straight")
    for made in interruptions:
        with pytest.raises((Killed, SystemExit)):
            trained(tmp_path / "run", made())
    resumed = trained(tmp_path / "run")
    expected = lines(tmp_path / "straight")
    of_validated = [line for line in expected if line["step"] == 3]
    names = {name for line in of_validated for name in line["metrics"]}
    assert names >= {"loss", "val/loss", "grad_norm/total", "doubled"}
    assert any("lr" in line for line in of_validated)
    assert lines(tmp_path / "run") == expected
    assert dict(leaf_digests(resumed.state)) == dict(leaf_digests(straight.state))


def test_a_stop_waits_for_a_validation_with_other_weights_in_the_model(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", Averages())
    with pytest.raises(SystemExit):
        trained(tmp_path / "run", Averages(), Signalled())
    resumed = trained(tmp_path / "run", Averages())
    assert dict(leaf_digests(resumed.state)) == dict(leaf_digests(straight.state))


def test_only_a_checkpoint_with_a_validation_to_do_has_the_numbers(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    texts = {
        folder.name[:13]: (folder / "progress-00000.json").read_text()
        for folder in (tmp_path / "run").glob("step-*")
    }
    assert {name for name, text in texts.items() if "grad_norm/" in text or "doubled" in text} == {
        "step-00000003"
    }
    assert len(texts) > 1


@pytest.mark.parametrize("numbers", [[], {"": 1.0}, {"a": {"b": "c"}}, {"a": {"b": True}}])
def test_stored_numbers_are_checked(numbers: Any) -> None:
    state = {**Counters().state_dict(), "step_numbers": numbers}
    with pytest.raises(UsageError, match="step_numbers"):
        Counters().check_state_dict(state)
