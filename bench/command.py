"""What all benchmarks share on the command line: rounds, folder, heading, JSON."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from bench.goals import Goal, goals_table
from bench.machine import describe, heading, versions
from bench.results import Results, read_json, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One question: `python -m bench.<name>` answers it."""

    name: str
    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    """Adds the options of its own."""
    measure_round: Callable[[argparse.Namespace, Path, Results], None]
    """Measures every case once and adds the outcomes. The folder is the same for all rounds."""
    tables: Callable[[Results], list[str]]
    """Markdown lines: what was found. Says so when there is nothing."""
    goals: Sequence[Goal] = ()
    """What some of its figures should be; printed first."""
    rounds: int = 3
    """Counted rounds, where no option says otherwise."""
    warmup: int = 0
    """Rounds before them."""

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options, from the command line or from `arguments`."""
        parser = argparse.ArgumentParser(
            prog=f"python -m bench.{self.name}", description=self.about
        )
        add_common(parser)
        parser.add_argument(
            "--rounds", type=int, default=self.rounds, help="counted rounds (%(default)s)"
        )
        parser.add_argument(
            "--warmup", type=int, default=self.warmup, help="rounds not counted (%(default)s)"
        )
        parser.add_argument(
            "--settle",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="before each measured call, sync, and touch free memory (see bench/README.md)",
        )
        parser.add_argument(
            "--tables-of", type=Path, help="print what an earlier --json holds; measure nothing"
        )
        self.add_options(parser)
        return parser.parse_args(arguments)

    def collect(self, options: argparse.Namespace) -> Results:
        """Measure all rounds; what was written is deleted."""
        folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.folder))
        results = Results()
        try:
            for number in range(-options.warmup, options.rounds):
                title = "warm-up" if number < 0 else f"round {number + 1} of {options.rounds}"
                progress(f"{self.name}: {title}")
                self.measure_round(options, folder, results if number >= 0 else Results())
        finally:
            shutil.rmtree(folder)
        return results

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print the tables and write the JSON; 1 when a case failed."""
        options = self.parse(arguments)
        is_old = options.tables_of is not None
        results = read_json(options.tables_of) if is_old else self.collect(options)
        goals = [*goals_table(results, self.goals), ""] if self.goals else []
        report(f"bench.{self.name}", options, results, [*goals, *self.tables(results)])
        return int(results.has_failed)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (a disk)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")


def report(
    module: str, options: argparse.Namespace, results: Results, tables: Sequence[str]
) -> None:
    """Print heading, tables and what was left out; write the JSON where it is wanted."""
    lines = [*heading(module, options.folder), "", *tables]
    if results.notes:
        lines += ["", *(f"* left out: {case}: {why}" for case, why in results.notes.items())]
    print("\n".join(lines))
    keep(module, options, results, lines)


def keep(
    module: str, options: argparse.Namespace, results: Results, lines: Sequence[str] = ()
) -> None:
    """Write the JSON where it is wanted, with how and where the figures were found."""
    if options.json:
        about = {
            "command": [module, *sys.argv[1:]],
            "machine": describe(options.folder),
            "date": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "versions": versions(),
            "report": list(lines),
        }
        write_json(options.json, results, about)


def progress(text: str) -> None:
    """Say on standard error what is being measured."""
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)
