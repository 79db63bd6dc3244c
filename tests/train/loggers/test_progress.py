"""What a training says of itself: a bar on a terminal, lines elsewhere, nothing if asked."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.events import log_event
from holdfast.store.memory import MemoryStore
from holdfast.train import Counts, Metrics, ProgressBar, Trainer, Training, Validation
from holdfast.train.loggers.progress import MAX_ROWS, duration, format_nbytes, short, summary
from train.small import Noisy, make


class Clock:
    """Half a second passes at each step."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Ticking(ProgressBar):
    """A bar whose clock goes on with the steps."""

    def __init__(self, console: Console) -> None:
        self.clock = Clock()
        super().__init__(console, clock=self.clock)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.clock.now_s += 0.5
        super().step_end(training, metrics)


def shown(root: Any, until: str = "6step", *, is_terminal: bool = False, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=200, legacy_windows=False)
    options = {"counts": Counts(samples=len, tokens=torch.numel), "every": "4step", **options}
    make(root, callbacks=[Ticking(console)], log_every=2, scheduler=None, **options).fit(until)
    return file.getvalue()


def test_without_a_terminal_each_log_is_a_line() -> None:
    lines = [line for line in shown(MemoryStore()).splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 2/6", "step 4/6", "step 6/6"]
    _, epoch, loss, *others = lines[1].split("  ")
    assert epoch == "epoch 0"
    assert re.fullmatch(r"loss [0-9.]+", loss)
    memory = others.pop(3)
    assert re.fullmatch(r"memory [0-9.]+ [KMG]iB", memory)
    assert others == ["lr 0.001", "4 samples/s", "16 tokens/s", "ETA 0:01", "not saved yet"]


def test_what_is_not_counted_is_shown_in_steps() -> None:
    text = shown(MemoryStore(), counts=Counts())
    assert "  2 steps/s  " in text
    assert "samples" not in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_resume_validation_and_save_are_told(tmp_path: Path, is_terminal: bool) -> None:
    options: dict[str, Any] = {"is_terminal": is_terminal}
    first = shown(tmp_path, "4step", **options)
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="5step")
    second = shown(tmp_path, "6step", validate=plan, **options)
    (folder,) = [path.name for path in tmp_path.glob("step-00000004.*")]
    assert re.search(rf"saved step 4: {folder}, [0-9.]+ KiB in [0-9.e-]+ s", first)
    assert f"resuming from step 4: {folder}" in second
    assert re.search(r"validated step 5: val/loss [0-9.]+, val/draw", second)
    assert "saved step 4" in second  # in the line, or the bar, of step 6


def test_what_is_logged_is_not_printed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"):
        printed = shown(tmp_path, "4step", sinks=[log_event])
        printed += shown(tmp_path, "6step", sinks=[log_event])
    assert not [line for line in printed.splitlines() if line.startswith(("saved", "resuming"))]
    assert [text for text in caplog.messages if text.startswith("resuming from step 4")]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_finished_run_that_is_started_again_says_so(is_terminal: bool) -> None:
    store = MemoryStore()
    shown(store)
    text = shown(store, is_terminal=is_terminal)
    assert "6step was already reached, at step 6: nothing is trained" in text
    assert "parameters" not in text


def test_a_terminal_sees_the_same_in_a_bar() -> None:
    text = shown(MemoryStore(), is_terminal=True)
    for part in ("step 6/6", "epoch 1", "━━", "loss", "lr 0.001", "4 samples/s", "ETA 0:00"):
        assert part in text


@pytest.mark.parametrize(("until", "place"), [("2ep", "epoch 1/2"), ("80tok", "48/80 tok")])
def test_the_goal_is_shown_in_its_unit(until: str, place: str) -> None:
    assert f"step 6  {place}  loss" in shown(MemoryStore(), until)
    assert "ETA 0:02" in shown(MemoryStore(), until)  # four of ten steps are left


@pytest.mark.parametrize("progress", [True, False])
def test_a_plain_script_speaks_on_stderr_unless_told_not_to(
    progress: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    make(MemoryStore(), progress=progress).fit(2)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("step 2/2" in err) == progress


def test_the_summary_counts_each_parameter_once_and_names_its_part() -> None:
    inner = nn.Linear(2, 3)
    model = nn.ModuleDict({"first": inner, "again": inner, "last": nn.Linear(3, 1)})
    model["last"].weight.requires_grad_(False)
    model.register_parameter("own", nn.Parameter(torch.zeros(2)))
    lines = summary(model, Checkpoints("runs/x", every="5step", keep="last:3"))
    assert lines == [
        "ModuleDict: 15 parameters, 12 trainable",
        "  (own)          2",
        "  first  Linear  9",
        "  last   Linear  4  1 trainable",
        "saves: to runs/x every 5step, and at the end; kept: last:3",
    ]


def test_a_summary_is_short() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(MAX_ROWS + 5)))
    lines = summary(model, Checkpoints(None))
    assert lines[-2:] == ["  and 5 more  10", "saves: none (checkpoints=None)"]
    assert len(lines) == MAX_ROWS + 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (short(0.5), "0.5"),
        (short(12_345), "12.3k"),
        (short(3e9), "3G"),
        (format_nbytes(10), "10 B"),
        (format_nbytes(3 * 1024**3), "3.0 GiB"),
        (duration(7.2), "0:07"),
        (duration(3_725), "1:02:05"),
        (duration(90_000), "1d 1:00:00"),
    ],
)
def test_numbers_are_short(text: str, expected: str) -> None:
    assert text == expected


def test_a_trainer_without_progress_has_no_bar() -> None:
    model = nn.Linear(2, 1)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader([torch.ones(2)] * 4, batch_size=1),
        loss=lambda model, batch: model(batch).mean(),
        checkpoints=MemoryStore(),
        progress=False,
    )
    assert trainer.fit(2).step == 2
