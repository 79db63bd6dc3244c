"""What the Trainer adds to each step of a bare loop: `python -m bench.trainer`.

All loops train the same tiny model on the same batches, in one process, and take turns inside
every round; what a loop adds is taken inside a round. With `--memory` each also trains once in a
process of its own, of which the largest resident memory is taken. The lines of code are those of
the pages for those who come from the peers, where both sides do the same training.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.command import Bench
from bench.machine import peak_nbytes
from bench.ports import num_lines
from bench.report import megabytes, number, results_table, seconds
from bench.results import Outcome, Results
from holdfast import Checkpoints
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
            checkpoints=Checkpoints(folder / "run", every=f"{10 * num_steps}step"),
            **options,
        ).fit(num_steps)

    return train


def lightning(loss: Stopwatch, num_steps: int, folder: Path) -> None:
    """Lightning, with a checkpoint callback that asks after each step, and its CSV log."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    parts = Parts.make()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            value = loss(self.model, batch)
            self.log("loss", value)
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return parts.optimizer

    lightning.Trainer(
        max_steps=num_steps,
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(every_n_train_steps=10 * num_steps)],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), parts.data)


def transformers(loss: Stopwatch, num_steps: int, folder: Path) -> None:
    """The Trainer of Hugging Face's transformers, which makes its own loader of the dataset."""
    from transformers import Trainer as HFTrainer
    from transformers import TrainingArguments

    parts = Parts.make()

    class Loop(HFTrainer):
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Tensor:
            return loss(model, inputs)

    Loop(
        parts.model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=4,
            logging_steps=10,
            save_steps=10 * num_steps,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            max_grad_norm=0.0,
        ),
        data_collator=lambda samples: [torch.stack([sample[0] for sample in samples])],
        train_dataset=parts.data.dataset,
        optimizers=(parts.optimizer, None),
    ).train()


def _bar(*, is_terminal: bool) -> ProgressBar:
    return ProgressBar(Console(file=io.StringIO(), force_terminal=is_terminal))


LOOPS: Mapping[str, Callable[[], Loop]] = {
    BARE: lambda: bare,
    "Trainer": lambda: trainer(progress=False, callbacks=[_bar(is_terminal=False)]),
    "Trainer, bar on a terminal": lambda: trainer(
        progress=False, callbacks=[_bar(is_terminal=True)]
    ),
    "Trainer, neither log nor bar": lambda: trainer(progress=False, log=False),
    "Lightning": lambda: lightning,
    "HF Trainer": lambda: transformers,
}
"""How each loop is made anew. The second is the Trainer as it is by itself.

The peers log as it does, and show no bar. They are left out where they are not installed."""
_NEEDS = {"Lightning": "lightning", "HF Trainer": "transformers"}
_PAGES = {**_NEEDS, BARE: "plain"}
"""Pages of docs/coming-from with the same training on both sides."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, help="of each loop (default 2000)")
    parser.add_argument("--memory", action="store_true", help="also of each in its own process")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    torch.set_num_threads(1)
    for name, make in LOOPS.items():
        if name in _NEEDS and find_spec(_NEEDS[name]) is None:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as own:
            step_s = _measure(make(), options.steps, Path(own))
        figures = {"step_s": [step_s]}
        if options.memory and f"trainer/{name}" not in results.cases:
            figures["peak_nbytes"] = [_peak_nbytes(name, options.steps)]
        results.add(f"trainer/{name}", Outcome(figures=figures))


def _peak_nbytes(name: str, num_steps: int) -> float:
    """Largest resident memory of a process that does one training."""
    code = f"from bench.trainer import print_peak; print_peak({name!r}, {num_steps})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    return float(done.stdout.splitlines()[-1])


def print_peak(name: str, num_steps: int) -> None:
    """Do one training, and print the largest resident memory of this process, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        _measure(LOOPS[name](), num_steps, Path(folder))
    print(peak_nbytes())


def _measure(loop: Loop, num_steps: int, folder: Path) -> float:
    """Seconds a step."""
    stopwatch = Stopwatch(num_steps)
    loop(stopwatch, WARMUP_STEPS + num_steps + 1, folder)
    return stopwatch.seconds / num_steps


def _tables(results: Results) -> list[str]:
    """One row a loop; what it adds is paired with the bare loop of its round."""
    bare_s = results.by_round(f"trainer/{BARE}", "step_s")

    def row(case: str) -> list[str]:
        pairs = zip(results.by_round(case, "step_s"), bare_s, strict=True)
        added = [mine - other for mine, other in pairs if mine is not None and other is not None]
        spread = quantiles(added, n=4, method="inclusive") if len(added) > 1 else [added[0]] * 3
        return [
            seconds(results.median(case, "step_s")),
            number(median(added) * 1e6, "{:+.1f} µs"),
            f"{spread[0] * 1e6:+.1f} to {spread[2] * 1e6:+.1f} µs",
            megabytes(results.median(case, "peak_nbytes")),
            _lines(case.removeprefix("trainer/")),
        ]

    head = ["loop", "a step", "added", "middle half of the rounds", "peak memory", "lines of code"]
    titles = {f"trainer/{name}": name for name in LOOPS}
    return results_table(results, "trainer/", head, titles, row)


def _lines(name: str) -> str:
    """Lines of a peer's training, and of the same one with the Trainer."""
    if name not in _PAGES:
        return "–"
    theirs, ours = num_lines(_PAGES[name])
    return f"{theirs}, with the Trainer {ours}"


BENCH = Bench(
    name="trainer",
    about="What the Trainer adds to each step of a bare loop.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    rounds=15,
    warmup=1,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
