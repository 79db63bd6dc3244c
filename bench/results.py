"""What was measured: figures by case and round, their medians and paired ratios, and the one
JSON schema of all benchmarks. Knows nothing of what a case is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")

Figures: TypeAlias = Mapping[str, Sequence[float]]
"""Figures by name, with the unit at its end (`_s`, `_nbytes`); lists where a thing was repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case gave in one round: figures, or an error."""

    figures: Figures
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that one run measured."""

    cases: dict[str, list[Outcome]] = field(default_factory=dict)
    """Name, such as `local/gpt/save/holdfast` → one outcome a round."""
    titles: dict[str, str] = field(default_factory=dict)
    """Names, or beginnings of names → what they are, for people."""
    notes: dict[str, str] = field(default_factory=dict)
    """Cases that were left out → why."""

    def add(self, case: str, outcome: Outcome) -> None:
        """Add the outcome of one more round."""
        self.cases.setdefault(case, []).append(outcome)

    def update(self, other: Results) -> None:
        """Take in the cases of another benchmark."""
        self.cases.update(other.cases)
        self.titles.update(other.titles)
        self.notes.update(other.notes)

    def part(self, bench: str) -> Results:
        """What belongs to one benchmark."""
        return Results(
            cases=_part(self.cases, bench),
            titles=_part(self.titles, bench),
            notes=_part(self.notes, bench),
        )

    def names(self, prefix: str) -> list[str]:
        """Cases under `prefix`, in the order in which they were measured."""
        return [name for name in self.cases if name.startswith(prefix)]

    def by_round(self, case: str, figure: str) -> list[float | None]:
        """A round's own median, for each round; None where the round has no such figure."""
        outcomes = self.cases.get(case, [])
        return [median(o.figures[figure]) if o.figures.get(figure) else None for o in outcomes]

    def median(self, case: str, figure: str) -> float | None:
        """Median over the rounds of a round's own median; None where there is none."""
        values = [value for value in self.by_round(case, figure) if value is not None]
        return median(values) if values else None

    def ratios(self, over: tuple[str, str], under: tuple[str, str]) -> list[float]:
        """Quotients of two (case, figure), each within one round."""
        pairs = zip(self.by_round(*over), self.by_round(*under), strict=False)
        return [mine / other for mine, other in pairs if mine is not None and other]

    def ratio(self, over: tuple[str, str], under: tuple[str, str]) -> float | None:
        """Median of `ratios`; None where no round has both figures."""
        found = self.ratios(over, under)
        return median(found) if found else None

    def added(self, case: str, none: str, figure: str) -> list[float | None]:
        """By round: a case's figure, less that of the case in which nothing is done."""
        pairs = zip(self.by_round(case, figure), self.by_round(none, figure), strict=False)
        return [None if a is None or b is None else a - b for a, b in pairs]

    def error(self, case: str) -> str | None:
        """The first error of a case."""
        return next((o.error for o in self.cases.get(case, []) if o.error), None)

    @property
    def has_failed(self) -> bool:
        """Whether any case failed in any round."""
        return any(self.error(case) for case in self.cases)


def _part(named: Mapping[str, _T], bench: str) -> dict[str, _T]:
    return {name: value for name, value in named.items() if name.split("/")[0] == bench}


def write_json(path: Path, results: Results, about: Mapping[str, Any]) -> None:
    """Write all figures; `about` says how and where they were found."""
    cases = {name: [asdict(o) for o in found] for name, found in results.cases.items()}
    document = {**about, "titles": results.titles, "notes": results.notes, "cases": cases}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> Results:
    """What `write_json` wrote."""
    document = json.loads(path.read_text())
    cases = {
        name: [Outcome(figures=o["figures"], error=o["error"]) for o in found]
        for name, found in document["cases"].items()
    }
    return Results(cases=cases, titles=document["titles"], notes=document["notes"])
