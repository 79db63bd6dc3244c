"""Tables of medians and of paired ratios; pure functions of the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers import PEERS

Figures = Mapping[str, Sequence[float]]
REFERENCE = "holdfast"

LIMITS: Mapping[str, str] = {
    "direct_write_s": "O_DIRECT write + fsync, all threads",
    "buffered_write_s": "buffered write + fsync, 1 thread",
    "buffered_write_all_s": "buffered write + fsync, all threads",
    "cold_read_s": "read from disk, all threads",
    "direct_read_s": "O_DIRECT read, all threads",
    "warm_read_s": "read from page cache, all threads",
    "copy_fresh_s": "copy into fresh memory, 1 thread",
    "copy_touched_s": "copy into touched memory, 1 thread",
    "copy_touched_all_s": "copy into touched memory, all threads",
    "blake3_1_s": "BLAKE3 of blocks, 1 thread",
    "blake3_all_s": "BLAKE3 of blocks, all threads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Figures of every case of one action in every round, and the errors."""

    figures: Mapping[str, Sequence[Figures | None]]
    """Case -> one entry a round; None where that round failed."""
    errors: Mapping[str, str]

    def median(self, case: str, figure: str) -> float | None:
        """Median over the rounds of a round's own median."""
        values = [value for value in self._by_round(case, figure) if value is not None]
        return median(values) if values else None

    def ratio(self, case: str, figure: str) -> float | None:
        """Median over the rounds of (this case / holdfast in the same round)."""
        pairs = zip(self._by_round(case, figure), self._by_round(REFERENCE, figure), strict=False)
        ratios = [mine / other for mine, other in pairs if mine is not None and other]
        return median(ratios) if ratios else None

    def _by_round(self, case: str, figure: str) -> list[float | None]:
        rounds = self.figures.get(case, [])
        return [median(figures[figure]) if figures else None for figures in rounds]


def save_table(saves: Rounds, limits: Rounds) -> list[str]:
    """Markdown lines: one row a peer."""
    disk_s = limits.median("limits", "direct_write_s")

    def row(case: str) -> list[str]:
        durable_s = saves.median(case, "durable_s")
        nbytes = saves.median(case, "nbytes")
        share = disk_s / durable_s if disk_s and durable_s else None
        return [
            seconds(durable_s),
            number(nbytes / durable_s / 1e9 if nbytes and durable_s else None, "{:.2f}"),
            number(share, "{:.0%}"),
            times(saves.ratio(case, "durable_s")),
            seconds(saves.median(case, "stall_s")),
            times(saves.ratio(case, "stall_s")),
            seconds(saves.median(case, "first_stall_s")),
            megabytes(saves.median(case, "peak_extra_nbytes")),
            megabytes(saves.median(case, "disk_nbytes")),
        ]

    head = [
        "save",
        "durable",
        "GB/s",
        "of disk",
        "ratio",
        "stall",
        "ratio",
        "first stall",
        "extra memory",
        "on disk",
    ]
    titles = {case: PEERS[case].title for case in saves.figures}
    lines = table(head, titles, saves.errors, row)
    durable = [saves.median(case, "durable_s") for case in saves.figures]
    if disk_s and any(value is not None and value < disk_s for value in durable):
        lines += ["", "**A row beats the disk's limit, so the limit is wrong: do not use it.**"]
    return lines


def load_table(loads: Rounds) -> list[str]:
    """Markdown lines: one row a way to load."""
    known = {name: reader for peer in PEERS.values() for name, reader in peer.readers.items()}

    def row(case: str) -> list[str]:
        return [
            seconds(loads.median(case, "cold_s")),
            times(loads.ratio(case, "cold_s")),
            seconds(loads.median(case, "warm_s")),
            times(loads.ratio(case, "warm_s")),
            megabytes(loads.median(case, "peak_extra_nbytes")),
            number(loads.median(case, "cold_share"), "{:.1%}"),
        ]

    head = ["load", "cold", "ratio", "warm", "ratio", "extra memory", "still cached when cold"]
    return table(head, {case: known[case].title for case in loads.figures}, loads.errors, row)


def limits_table(limits: Rounds) -> list[str]:
    """Markdown lines: one row a limit of the machine."""
    nbytes = limits.median("limits", "nbytes")

    def row(figure: str) -> list[str]:
        value = limits.median("limits", figure)
        return [
            seconds(value),
            number(nbytes / value / 1e9 if nbytes and value else None, "{:.2f}"),
        ]

    errors = dict.fromkeys(LIMITS, limits.errors["limits"]) if limits.errors else {}
    return table(["limit", "time", "GB/s"], LIMITS, errors, row)


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def times(value: float | None) -> str:
    """A ratio to holdfast."""
    return number(value, "{:.2f}×")


def megabytes(value: float | None) -> str:
    """Bytes in MB."""
    return number(value / 1e6 if value is not None else None, "{:,.1f} MB")


def number(value: float | None, form: str) -> str:
    """A number in `form`, or a dash."""
    return "–" if value is None else form.format(value)


def table(
    head: Sequence[str],
    titles: Mapping[str, str],
    errors: Mapping[str, str],
    row: Callable[[str], list[str]],
) -> list[str]:
    """Markdown lines: a row for each of `titles`, by its name; an error in place of its cells."""
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for case, title in titles.items():
        if case in errors:
            lines.append(_line([title, f"failed: {errors[case][:80]}", *[""] * (len(head) - 2)]))
        else:
            lines.append(_line([title, *row(case)]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
