"""Speed, memory, norms and rates are measured right, and logged under the names that are stated."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.system import IS_LINUX, peak_nbytes
from holdfast.train import (
    Callback,
    Counts,
    GradientNorm,
    HookFailed,
    LearningRates,
    Logger,
    MemoryMonitor,
    Metrics,
    SpeedMonitor,
    Training,
    linear,
)
from train.small import make, network


class Notes(Logger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def log(self, training: Training, metrics: Metrics) -> None:
        self.seen.setdefault(training.present_step, {}).update(metrics)


class Clock:
    """Two seconds pass at each look."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


def logged(*callbacks: Callback, until: str = "6step", **options: Any) -> dict[int, dict[str, Any]]:
    notes = Notes()
    options = {"log_every": 2, "scheduler": None, **options}
    make(MemoryStore(), callbacks=[*callbacks, notes], **options).fit(until)
    own = ("speed", "memory", "lr", "grad_norm")
    return {
        step: {name: value for name, value in found.items() if name.partition("/")[0] in own}
        for step, found in notes.seen.items()
    }


def test_speed_is_that_of_the_window() -> None:
    monitor = SpeedMonitor(3, flops_per_token=10.0, peak_flops=400.0, clock=Clock())
    counts = Counts(samples=len, tokens=torch.numel)  # 2 and 8 a step
    expected = {"steps_per_s": 0.5, "samples_per_s": 1.0, "tokens_per_s": 4.0, "mfu": 0.1}
    expected = {f"speed/{name}": value for name, value in expected.items()}
    assert logged(monitor, counts=counts) == {2: expected, 4: expected, 6: expected}


def test_what_is_not_counted_has_no_speed() -> None:
    found = logged(SpeedMonitor(clock=Clock()))
    assert all(set(metrics) == {"speed/steps_per_s"} for metrics in found.values())


def test_memory_is_that_of_the_process_on_a_cpu() -> None:
    found = logged(MemoryMonitor())
    assert all(2**20 < value["memory/resident_nbytes"] < 2**40 for value in found.values())


@pytest.mark.skipif(not IS_LINUX, reason="VmHWM of Linux")
def test_the_peak_of_a_process_is_its_own() -> None:
    """What its parent had before the fork and exec is not of it."""
    large = bytearray(b"x") * (300 << 20)
    code = "from holdfast.system import peak_nbytes, resident_nbytes as now\n"
    code += "x = bytearray(b'x') * (64 << 20); del x; print(now(), peak_nbytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    now, peak = map(int, done.stdout.split())
    assert len(large) > peak > now + (32 << 20)
    assert len(large) < (peak_nbytes() or 0)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_that_of_the_device() -> None:
    found = logged(MemoryMonitor(), device="cuda", optimizer=sgd)
    assert all(
        0 < metrics["memory/allocated_nbytes"] <= metrics["memory/peak_nbytes"]
        for metrics in found.values()
    )


def test_rates_are_those_of_the_step_by_group() -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "name": "body"},
            {"params": model[2].parameters(), "lr": 0.5},
        ]
        return torch.optim.SGD(groups, lr=1.0)

    found = logged(LearningRates(), optimizer=optimizer, scheduler=linear(), until="4step")
    assert found == {2: {"lr/body": 0.75, "lr/1": 0.375}, 4: {"lr/body": 0.25, "lr/1": 0.125}}


class Norms(Callback):
    """The norms by hand, read at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def before_optimizer_step(self, training: Training) -> None:
        flat = [
            torch.cat([weight.grad.flatten() for weight in part.parameters()]).norm()  # type: ignore[union-attr]
            for part in (training.model[0], training.model[2])  # type: ignore[index]
        ]
        self.seen.append((float(flat[0]), float(flat[1])))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip": 0.1}], ids=str)
def test_norms_are_of_what_the_optimizer_gets(options: dict[str, Any]) -> None:
    norms = Norms()
    found = logged(GradientNorm(), norms, model=network(), until="4step", **options)
    for step in (2, 4):
        first, last = norms.seen[step - 1]
        assert found[step]["grad_norm/0"] == pytest.approx(first)
        assert found[step]["grad_norm/2"] == pytest.approx(last)
        assert found[step]["grad_norm/total"] == pytest.approx(math.hypot(first, last))


def test_a_norm_is_read_only_where_it_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    from holdfast.train.callbacks import measuring

    monkeypatch.setattr(measuring, "gather_dtensor", lambda norm: (read.append(1), norm)[1])
    logged(GradientNorm(), until="6step", log_every=3)
    assert len(read) == 2 * 2  # two modules, at two logs


def test_the_log_has_the_rates_of_each_step(tmp_path: Path) -> None:
    make(tmp_path, scheduler=linear(), every=None, log_every=2).fit("4step")
    lines = (tmp_path / "log" / "train.jsonl").read_text("utf-8").splitlines()
    rates = [line["lr"] for line in map(json.loads, lines) if "loss" in line["metrics"]]
    assert rates == [{"0": pytest.approx(0.00075)}, {"0": pytest.approx(0.00025)}]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SpeedMonitor(0), "window=0"),
        (lambda: SpeedMonitor("x"), "window"),  # type: ignore[arg-type]
        (lambda: SpeedMonitor(peak_flops=1e12), "give peak_flops, and either"),
        (lambda: SpeedMonitor(flops_per_token=1.0), "give peak_flops, and either"),
        (lambda: SpeedMonitor(flops_per_token=-1.0, peak_flops=1.0), "must be above zero"),
        (
            lambda: SpeedMonitor(flops_per_token=1.0, flops_per_sample=1.0, peak_flops=1.0),
            "either flops_per_sample",
        ),
    ],
)
def test_what_cannot_work_is_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrong()


def test_a_utilization_without_its_count_is_refused() -> None:
    monitor = SpeedMonitor(flops_per_token=1.0, peak_flops=1.0)
    with pytest.raises(HookFailed, match="tokens are not counted"):
        logged(monitor)
