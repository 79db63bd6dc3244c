"""Prove that a small GPT resumes exactly: `holdfast prove`, with three SIGKILLs, and a picture.

The folder then has both runs, all of their checkpoints and logs, and `demo.png`, which needs
matplotlib.

    python examples/demo/demo.py [--out FOLDER] [--seed N] [--fast]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Line = dict[str, Any]


def read_processes(log: Path) -> list[list[Line]]:
    """Read the reports of a run from its log, as one list for each process."""
    processes: list[list[Line]] = []
    for line in map(json.loads, filter(lambda text: text.startswith("{"), log.open("r"))):
        if line["kind"] == "resumed":
            processes.append([])
        processes[-1].append(line)
    return processes


def reports_of(process: list[Line], kind: str, name: str) -> list[Any]:
    """Return a value of all reports of a kind."""
    return [line[name] for line in process if line["kind"] == kind]


def draw(folder: Path, *, are_equal: bool) -> None:
    """Draw the losses of both runs, with the kills."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    killed = read_processes(folder / "killed.log")
    runs = {"undisturbed": read_processes(folder / "undisturbed.log"), "killed": killed}
    for (name, processes), width in zip(runs.items(), (5.0, 1.0), strict=True):
        losses = {line["step"]: line["loss"] for one in processes for line in one if "loss" in line}
        axes.plot(losses.keys(), losses.values(), label=name, linewidth=width)
    for number, process in enumerate(killed[:-1]):
        last_step = max(reports_of(process, "step", "step"))
        label = "" if number else "SIGKILL"
        axes.axvline(last_step, color="C3", linestyle="--", label=label)
    saved = {step for process in killed for step in reports_of(process, "committed", "step")}
    result = "0 bits differ" if are_equal else "they differ"
    axes.set_title(f"{len(killed) - 1} kills, {len(saved)} checkpoints compared: {result}")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    figure.savefig(folder / "demo.png", dpi=100)


def main() -> int:
    """Run the proof and draw its picture; return the exit code of the proof."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="a new folder")
    parser.add_argument("--seed", default="11", help="of the training and of the kills")
    parser.add_argument("--fast", action="store_true", help="use a tiny model")
    options = parser.parse_args()
    script = Path(__file__).with_name("gpt.py")
    training = [sys.executable, script, "{root}", options.seed, *["--fast"] * options.fast]
    proof = ["prove", "--seed", options.seed, "--folder", options.out, "--", *training]
    code = subprocess.run([sys.executable, "-m", "holdfast.cli", *proof], check=False).returncode
    if code in (0, 1):
        draw(options.out, are_equal=code == 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
