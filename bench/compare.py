"""What changed from one run to another: `python -m bench.compare OLD NEW`, two `--json` files.

Figures of the same case and round are paired. Two runs met two states of the machine: look at
the cases named `limits` first, and take a ratio there off the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.report import table, times
from bench.results import Results, read_json

COMPARED = ("_s", "_nbytes", "_count")
"""Figures with these units; the smaller one is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure of one case in two runs."""

    old: float
    """Median over the rounds."""
    new: float
    ratios: tuple[float, ...]
    """New by old, round by round."""


def changes(old: Results, new: Results) -> dict[str, Change]:
    """`case figure` → its change, for whatever both runs have."""
    found = {}
    for case in old.cases:
        figures = {name: None for o in old.cases[case] for name in o.figures}
        for figure in figures:
            change = _change(old, new, case, figure)
            if change is not None:
                found[f"{case} {figure}"] = change
    return found


def compare_table(found: dict[str, Change]) -> list[str]:
    """Markdown lines: a row a figure."""

    def row(name: str) -> list[str]:
        change = found[name]
        low, high = min(change.ratios), max(change.ratios)
        return [
            f"{change.old:.4g}",
            f"{change.new:.4g}",
            times(median(change.ratios)),
            f"{low:.2f} to {high:.2f}",
        ]

    head = ["figure", "old", "new", "new / old", "by round"]
    return table(head, {name: name for name in found}, row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("old", type=Path, help="what --json wrote")
    parser.add_argument("new", type=Path, help="what --json wrote later")
    parser.add_argument("--only", default="", help="cases with this in their names")
    options = parser.parse_args(arguments)
    found = changes(read_json(options.old), read_json(options.new))
    lines = compare_table({name: c for name, c in found.items() if options.only in name})
    print("\n".join(lines))
    return 0


def _change(old: Results, new: Results, case: str, figure: str) -> Change | None:
    before, after = old.median(case, figure), new.median(case, figure)
    if before is None or after is None or not figure.endswith(COMPARED):
        return None
    pairs = zip(old.by_round(case, figure), new.by_round(case, figure), strict=False)
    ratios = tuple(mine / other for other, mine in pairs if other and mine is not None)
    return Change(old=before, new=after, ratios=ratios) if ratios else None


if __name__ == "__main__":
    sys.exit(main())
