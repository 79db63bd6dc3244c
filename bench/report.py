"""Tables and the forms of numbers; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.results import Results


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return "–"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-4 else f"{value * 1e6:.3g} µs"


def times(value: float | None) -> str:
    """A ratio."""
    return number(value, "{:.2f}×")


def percent(value: float | None) -> str:
    """A share."""
    return number(value, "{:.0%}")


def megabytes(value: float | None) -> str:
    """Bytes in MB."""
    return number(value / 1e6 if value is not None else None, "{:,.1f} MB")


def number(value: float | None, form: str) -> str:
    """A number in `form`, or a dash."""
    return "–" if value is None else form.format(value)


def table(
    head: Sequence[str],
    titles: Mapping[str, str],
    row: Callable[[str], list[str]],
    errors: Mapping[str, str | None] | None = None,
) -> list[str]:
    """Markdown lines: a row for each of `titles`, by its name; an error in place of its cells."""
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for case, title in titles.items():
        error = errors.get(case) if errors else None
        if error:
            lines.append(_line([title, f"failed: {error[:80]}", *[""] * (len(head) - 2)]))
        else:
            lines.append(_line([title, *row(case)]))
    return lines


def results_table(
    results: Results,
    prefix: str,
    head: Sequence[str],
    titles: Mapping[str, str],
    row: Callable[[str], list[str]],
) -> list[str]:
    """The same for the cases under `prefix` that were measured; `row` takes a case's name."""
    cases = {case: titles[case] for case in results.names(prefix)}
    return table(head, cases, row, {case: results.error(case) for case in cases})


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
