"""Tests that a Trainer on the device, interrupted or killed, resumes exactly."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.states import bits
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import Report, StepReporter, assert_resume_equivalent
from holdfast.train import Callback, Precision, Trainer, Training
from runs import be_a_script
from train.small import make

STEPS = 7


class Interrupt(Callback):
    """Callback that interrupts the run in the middle of a step, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_optimizer_step(self, training: Training) -> None:
        if training.counters.step + 1 == self.at:
            raise KeyboardInterrupt


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trainer(root: Any, device: str, dtype: Any, **options: Any) -> Trainer:
    """Make a Trainer with averaged weights, and a loss scale that grows during the run."""
    precision = Precision(dtype=dtype, loss_scale=16.0, growth_interval=2)
    return make(
        root,
        device=device,
        optimizer=adamw,
        precision=precision,
        ema=0.9,
        clip=0.5,
        log=False,
        **options,
    )


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def state_bits(of: Trainer) -> dict[str, bytes]:
    parts = {name: part.state_dict() for name, part in of.state.items()}
    plain = {name: repr(part).encode() for name, part in parts.items() if name == "scaler"}
    return bits(parts) | plain


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_training_that_was_interrupted_goes_on_as_if_it_had_not_been(
    tmp_path: Path, device: str, dtype: str
) -> None:
    """Invariant 7: weights, optimizer, average, scaler and generators equal the straight run's."""
    straight = trainer(MemoryStore(), device, dtype)
    seed(3)
    straight.fit(STEPS)

    stopped = trainer(tmp_path, device, dtype, callbacks=[Interrupt(at=6)])
    seed(3)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(STEPS)
    again = trainer(tmp_path, device, dtype)
    seed(4)
    again.fit(STEPS)

    assert again.counters.step == straight.counters.step == STEPS
    assert {weight.device.type for weight in again.model.parameters()} == {device}
    assert state_bits(again) == state_bits(straight)
    if dtype == "fp16":
        assert again.state["scaler"].get_scale() > 16.0


def run(device: str, dtype: str, root: str, steps: int, report: Report) -> None:
    """Train in a child process, which the test kills and starts again."""
    be_a_script()
    trainer(Path(root), device, dtype, every="1step", callbacks=[StepReporter(report)]).fit(steps)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(device: str, dtype: str) -> None:
    """Invariant 7: killed by SIGKILL, and resumed in a new process."""
    assert_resume_equivalent(
        partial(run, device, dtype), STEPS, 4, timeout_s=120.0, start_method="forkserver"
    )
