"""Entry point of the demo, called by `holdfast demo`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from rich.console import Console

from holdfast.demo import figure, report, story
from holdfast.demo.plan import DemoPlan, fast_plan

PICTURE = "demo.png"


def run(out: Path, *, seed: int | None = None, fast: bool = False, as_json: bool = False) -> int:
    """Run the demo in the folder `out`; returns 0 if both runs are the same, bit for bit, else 1.

    Writes `demo.json` (the record), `demo.png` (the plot), and the roots and logs of both
    runs. An earlier demo in `out` is removed. With `as_json` the record also goes to standard
    output, and all else to standard error. None draws a seed; `fast` takes a tiny model.

    Raises:
        UsageError: `out` holds something else, or matplotlib is not installed.
        WorkerFailed: a training process failed without being killed.
        DeadlineExceeded: a training process reported nothing for two minutes.
    """
    figure.check_library()
    story.prepare(out)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    plan = fast_plan(seed) if fast else DemoPlan(seed=seed)
    console = Console(stderr=as_json)
    console.print(
        f"A small GPT learns the source of Python's standard library in {plan.num_steps} steps: "
        f"once undisturbed,\nand once killed at three random moments (seed {seed}).",
        highlight=False,
    )
    live = report.Live(console, plan)
    with live.progress:
        record = story.tell(out, plan, live.watch)
    figure.draw(record, out / PICTURE)
    report.show(console, record)
    console.print(f"Picture: {out / PICTURE}   took {record.took_s:.0f} s", highlight=False)
    if as_json:
        print(json.dumps(record.to_json()))
    return 0 if record.is_identical else 1
