"""Train a small GPT, kill it three times, and compare it with the undisturbed run, bit for bit.

The second kill falls inside a save. After the third, one bit of the newest checkpoint is flipped,
and the run resumes from the one before. The folder then has the checkpoints and logs of both runs,
and `demo.png`, which needs matplotlib.

    python examples/demo/demo.py [--out FOLDER] [--seed N] [--fast]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import holdfast

console = Console(highlight=False, markup=False, soft_wrap=True)
Line = dict[str, Any]


@dataclass(kw_only=True)
class Process:
    """Reports of one training process, until its end or kill."""

    num_workers: int = 0
    flipped: str = ""
    lines: list[Line] = field(default_factory=list)

    def of(self, kind: str) -> list[Line]:
        """Return the reports of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def start(self) -> int:
        """Step of the checkpoint that it resumed from, or 0."""
        return int(self.of("resumed")[0]["step"])

    @property
    def reached(self) -> int:
        """Last completed step."""
        return max([self.start, *(line["step"] for line in self.of("step"))])

    @property
    def unfinished_saves(self) -> set[int]:
        """Steps of the saves that had started, but not committed."""
        started, committed = self.of("save_started"), self.of("committed")
        return {line["step"] for line in started} - {line["step"] for line in committed}

    @property
    def stall_ms(self) -> float:
        """Median time that a save stopped the training loop."""
        return 1e3 * median([line["stall_s"] for line in self.of("stalled")] or [0.0])


class Kill(NamedTuple):
    """SIGKILL, `delay_s` after the first report of a kind from `step` on."""

    kind: str
    step: int
    delay_s: float


def run_process(root: Path, arguments: list[str], process: Process, kill: Kill | None) -> None:
    """Train until the process ends, or kill it and its data workers."""
    script = Path(__file__).with_name("gpt.py")
    command = [sys.executable, script, root, *arguments[:1], process.num_workers, *arguments[1:]]
    log = root.with_suffix(".log")
    with (
        log.open("ab") as stderr,
        console.status(root.name) as status,
        subprocess.Popen(
            map(str, command), stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        ) as child,
    ):
        try:
            for line in map(json.loads, child.stdout or ()):
                process.lines.append(line)
                if line["kind"] == "step":
                    status.update(f"{root.name}: step {line['step']}, loss {line['loss']:.3f}")
                is_due = kill and line["kind"] == kill.kind and line["step"] >= kill.step
                if is_due and child.returncode is None:
                    time.sleep(kill.delay_s)
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            if child.wait() != (0 if kill is None else -signal.SIGKILL):
                raise SystemExit(f"{root.name} ended with status {child.returncode}: see {log}")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def train_with_kills(root: Path, arguments: list[str], usual: Process) -> list[Process]:
    """Kill the training once in each third of the run; `usual` is the undisturbed process."""
    chance = random.Random(int(arguments[0]))
    steps, started, committed = map(usual.of, ("step", "save_started", "committed"))
    step_s = (steps[-1]["at_s"] - steps[0]["at_s"]) / len(steps)
    save_s = median(b["at_s"] - a["at_s"] for a, b in zip(started, committed, strict=True))
    found: list[Process] = []
    for kind, part in (("step", 0.15), ("save_started", 0.42), ("step", 0.68)):
        step = round(len(steps) * (part + 0.15 * chance.random()))
        delay_s = 0.6 * chance.random() * (step_s if kind == "step" else save_s)
        while True:
            process = Process(num_workers=len(found) % 3)
            run_process(root, arguments, process, Kill(kind, step, delay_s))
            found.append(process)
            saves = "".join(f", saving step {step}" for step in process.unfinished_saves)
            console.print(f"  resumed at step {process.start}, SIGKILL at {process.reached}{saves}")
            if kind == "step" or process.unfinished_saves:
                break
            delay_s = 0.0  # the save was faster than the kill
    found.append(Process(num_workers=len(found) % 3, flipped=flip_bit(root, chance)))
    run_process(root, arguments, found[-1], None)
    return found


def flip_bit(root: Path, chance: random.Random) -> str:
    """Flip one bit in the weights of the newest checkpoint; return a description."""
    with holdfast.reading(root) as newest:
        path = min(Path(newest.path).glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    at, bit = chance.randrange(len(data)), chance.randrange(8)
    data[at] ^= 1 << bit
    path.chmod(0o644)
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {newest.folder}/{path.name}"


def losses_of(processes: list[Process]) -> dict[int, float]:
    """Return the loss of each step; of a repeated step, the last."""
    return {line["step"]: line["loss"] for one in processes for line in one.of("step")}


def show(killed: list[Process]) -> None:
    """Print a table of the kills, and what became of the damaged checkpoint."""
    table = Table("kill", "at step", "saving", "rejected", "resumed", "redone", "saves", "stall")
    for number, (one, after) in enumerate(pairwise(killed), start=1):
        rejected, saving = (
            len(after.of("resumed")[0]["rejected"]),
            min(one.unfinished_saves, default=""),
        )
        numbers = (number, one.reached, saving, rejected, after.start, one.reached - after.start)
        table.add_row(*map(str, numbers), str(len(one.of("committed"))), f"{one.stall_ms:.1f} ms")
    console.print(table)
    console.print(f"Flipped: {killed[-1].flipped}.")
    for folder, reason in killed[-1].of("resumed")[0]["rejected"]:
        console.print(f"Rejected: {folder}: {reason}")


def draw(undisturbed: Process, killed: list[Process], path: Path) -> None:
    """Draw the losses of both runs, and the killed run's steps over time."""
    figure = Figure(figsize=(9.0, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1)
    for name, run, width in (("undisturbed", [undisturbed], 5.0), ("killed", killed, 1.0)):
        losses = losses_of(run)
        above.plot(losses.keys(), losses.values(), label=name, linewidth=width)
    for process in killed:
        for kind, style in (("step", "-"), ("committed", "o")):
            lines = process.of(kind)
            times = [line["at_s"] - killed[0].lines[0]["at_s"] for line in lines]
            below.plot(times, [line["step"] for line in lines], style, color="C1")
    for process in killed[:-1]:
        above.axvline(process.reached, color="C3", linestyle="--")
    above.set(xlabel="step", ylabel="loss, nats a byte")
    below.set(xlabel="seconds; circles are checkpoints", ylabel="step")
    above.legend()
    figure.savefig(path)


def main() -> int:
    """Train both runs; return 0 if they are the same, bit for bit, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="a new folder")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--fast", action="store_true", help="use a tiny model")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: delete it, or name another folder by --out")
    options.out.mkdir(parents=True)
    console.print(f"A small GPT learns Python's source, once killed three times. {options.seed=}")
    arguments = [str(options.seed), *(["--fast"] if options.fast else [])]
    roots = [options.out / "undisturbed", options.out / "killed"]
    undisturbed = Process()
    run_process(roots[0], arguments, undisturbed, None)
    killed = train_with_kills(roots[1], arguments, undisturbed)
    show(killed)
    draw(undisturbed, killed, options.out / "demo.png")
    expected, found = losses_of([undisturbed]), losses_of(killed)
    num_differing = sum(found.get(step) != loss for step, loss in expected.items())
    console.print(f"Losses that differ, of {len(expected)} steps: {num_differing}")
    diff = subprocess.run([sys.executable, "-m", "holdfast.cli", "diff", *roots], check=False)
    is_identical = diff.returncode == 0 and num_differing == 0
    console.print("The same run, bit for bit." if is_identical else "THE RUNS DIFFER.")
    return 0 if is_identical else 1


if __name__ == "__main__":
    sys.exit(main())
