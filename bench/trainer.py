"""What the Trainer adds to each step of a bare loop: `python -m bench.trainer`.

All loops train the same tiny model on the same batches, in one process, and take turns inside
every round; what a loop adds is taken inside a round.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.machine import heading
from bench.report import number, table
from holdfast.data import Loader
from holdfast.train import ProgressBar, Trainer

BARE = "bare loop"
WARMUP_STEPS = 200
_BATCHES_AN_EPOCH = 500
_SEED = 7


@dataclass(slots=True)
class Stopwatch:
    """The loss function of every loop, each of which calls it once a step.

    It takes the time of the steps between, so that what begins and ends a training (the claim,
    the last save) is not in it.
    """

    num_steps: int
    """Steps that are measured, after `WARMUP_STEPS`."""
    seconds: float = 0.0
    """What they took."""
    _calls: int = 0
    _start_s: float = field(default=0.0)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; mean square."""
        if self._calls == WARMUP_STEPS:
            self._start_s = perf_counter()
        elif self._calls == WARMUP_STEPS + self.num_steps:
            self.seconds = perf_counter() - self._start_s
        self._calls += 1
        loss: Tensor = model(batch[0]).square().mean()
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a loop trains with; new and equal for each."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Loader[Any]

    @classmethod
    def make(cls) -> Parts:
        """A model so small that the loop around it is what takes the time."""
        torch.manual_seed(_SEED)
        model = nn.Linear(8, 8)
        batch_size = 4
        dataset = TensorDataset(torch.randn(batch_size * _BATCHES_AN_EPOCH, 8))
        return cls(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            data=Loader(dataset, batch_size=batch_size, seed=_SEED),
        )


Loop = Callable[[Stopwatch, int, Path], None]
"""Trains with a loss, for a number of steps; what it writes goes into a folder."""


def bare(loss: Stopwatch, num_steps: int, folder: Path) -> None:
    """What anybody would write."""
    parts, step = Parts.make(), 0
    while step < num_steps:
        for batch in parts.data:
            loss(parts.model, batch).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            step += 1
            if step == num_steps:
                break


def trainer(**options: Any) -> Loop:
    """The same with a Trainer that asks a trigger after each step."""

    def train(loss: Stopwatch, num_steps: int, folder: Path) -> None:
        parts = Parts.make()
        Trainer(
            parts.model,
            optimizer=parts.optimizer,
            data=parts.data,
            loss=loss,
            root=folder / "run",
            every=f"{10 * num_steps}step",
            **options,
        ).fit(num_steps)

    return train


def _bar(*, is_terminal: bool) -> ProgressBar:
    return ProgressBar(Console(file=io.StringIO(), force_terminal=is_terminal))


LOOPS: Mapping[str, Callable[[], Loop]] = {
    BARE: lambda: bare,
    "Trainer": lambda: trainer(progress=False, callbacks=[_bar(is_terminal=False)]),
    "Trainer, bar on a terminal": lambda: trainer(
        progress=False, callbacks=[_bar(is_terminal=True)]
    ),
    "Trainer, neither log nor bar": lambda: trainer(progress=False, log=False),
}
"""How each loop is made anew. The second is the Trainer as it is by itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every loop in turns and print the table."""
    options = _options(arguments)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as folder:
        for number_of_round in range(-1, options.rounds):
            print(f"round {number_of_round + 1}", file=sys.stderr, flush=True)
            for name, make in LOOPS.items():
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    step_s = _measure(make(), options.steps, Path(own))
                if number_of_round >= 0:
                    found[name].append(step_s)
        lines = [*heading("bench.trainer", Path(folder)), "", *_table(found)]
    print("\n".join(lines))
    if options.json:
        report = {"report": lines, "steps": options.steps, "step_s": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.trainer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default 15)")
    parser.add_argument("--steps", type=int, default=2000, help="of each loop (default 2000)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (a disk)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args(arguments)


def _measure(loop: Loop, num_steps: int, folder: Path) -> float:
    """Seconds a step."""
    stopwatch = Stopwatch(num_steps)
    loop(stopwatch, WARMUP_STEPS + num_steps + 1, folder)
    return stopwatch.seconds / num_steps


def _table(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Markdown lines: one row a loop; what it adds is paired with the bare loop of its round."""

    def row(name: str) -> list[str]:
        added = [mine - other for mine, other in zip(found[name], found[BARE], strict=True)]
        spread = quantiles(added, n=4, method="inclusive") if len(added) > 1 else [added[0]] * 3
        return [
            number(median(found[name]) * 1e6, "{:.1f} µs"),
            number(median(added) * 1e6, "{:+.1f} µs"),
            f"{spread[0] * 1e6:+.1f} to {spread[2] * 1e6:+.1f} µs",
        ]

    head = ["loop", "a step", "added", "middle half of the rounds"]
    return table(head, {name: name for name in found}, {}, row)


if __name__ == "__main__":
    sys.exit(main())
