"""`holdfast advise`: recommend a save interval from the costs and failures that a run recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from holdfast.cli import options
from holdfast.cli.documents import Document
from holdfast.cli.options import command, option
from holdfast.cli.output import Answer
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint
from holdfast.maintenance.recorded_costs import read_recorded_costs
from holdfast.policy.auto import Auto
from holdfast.policy.clock import Time, Unit


class Advise(Document, frozen=True):
    """Answer of `advise`."""

    root: str
    """Path or URL of the root."""
    every: str
    """Interval to paste."""
    interval_s: float
    """Seconds of training between two saves."""
    limit: Literal["optimum", "overhead_cap", "one_save_at_a_time", "at_least", "at_most"]
    """Reason for the interval."""
    stall_s: float
    """Median of the seconds that a save stops training."""
    write_s: float
    """Median of the seconds that a save is written after that."""
    mtbf_s: float
    """Mean seconds between failures."""
    num_failures: int | None
    """Failures of the run; null if `--mtbf` was given."""
    trained_s: float
    """Seconds of training that were recorded."""
    unreadable: Sequence[str]
    """Checkpoints that could not be read."""


@command(
    "advise",
    options.root,
    option(
        "--mtbf",
        "TIME",
        "Mean time between failures, such as 6h. [default: estimated from the run]",
    ),
    option(
        "--overhead", "SHARE", "Share of the time that saves may take.", type=float, default=0.05
    ),
    answer=Advise,
)
def advise_root(root: str, *, mtbf: str | None, overhead: float) -> Answer:
    """Recommend how often to save.

    Prints the interval that every="auto" would use, computed from the save times and failures that
    the run recorded. The exit code is 3 if no checkpoint recorded its save times.
    """
    auto = Auto(mtbf=mtbf, overhead=overhead)
    store = open_root(root)
    facts = read_recorded_costs(store)
    plan = auto.decide(facts.history)
    if plan is None:
        raise NoCheckpoint(
            f"{store.url}: no checkpoint records how long its save stopped training; save first"
        )
    every = str(Time(max(1, round(plan.interval_s)), Unit.SECOND))
    endings = Counter(start.ending for start in facts.starts)
    counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    return Answer(
        document=Advise(
            root=store.url,
            every=every,
            interval_s=plan.interval_s,
            limit=plan.limit,
            stall_s=plan.stall_s,
            write_s=plan.write_s,
            mtbf_s=plan.mtbf_s,
            num_failures=plan.num_failures,
            trained_s=facts.trained_s,
            unreadable=facts.unreadable,
        ),
        parts=[
            str(plan),
            f"saves measured: {len(facts.saves)}; starts: {counts or 'none recorded'}",
            *(f"cannot be read, not counted: {item}" for item in facts.unreadable),
            f'every="{every}"',
        ],
    )
