"""Holdfast, its peers and the machine's limits side by side on local disk: `python -m bench.local`.

Cases take turns inside every round (A B C A B C …), each in a fresh process, so that what the
machine does meanwhile hits all of them; ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import case as measured
from bench.case import FROZEN_CHANGING, Case
from bench.child import in_child
from bench.command import Bench, progress
from bench.limits import table_of
from bench.peers import PEERS
from bench.report import megabytes, number, percent, results_table, seconds, times
from bench.results import Figures, Results
from bench.states import StateSpec

FROZEN = "holdfast-frozen"
CASES = ("limits", "holdfast", FROZEN, *(name for name in PEERS if name != "holdfast"))
DEFAULT_CASES = tuple(name for name in CASES if name != "dcp-async-pinned")
READERS = tuple(name for peer in PEERS.values() for name in peer.readers)
_REFERENCE = "holdfast"
_OVERLAP = "save/holdfast-overlap"
_MAY_BEAT_DISK = (FROZEN, "torch_checkpointing")  # one writes less, one waits for no disk


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")
    parser.add_argument("--small-tensors", type=int, default=20_000, help="of 256 bytes each")
    parser.add_argument("--states", nargs="+", choices=["gpt", "small"], default=["gpt", "small"])
    parser.add_argument("--only", nargs="+", choices=CASES, default=DEFAULT_CASES, help="cases")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS, help="loads")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    for kind in options.states:
        spec = StateSpec(
            kind=kind, gpt_nbytes=round(options.size_gb * 1e9), num_small=options.small_tensors
        )
        results.titles[f"local/{kind}"] = spec.title
        for name in options.only:
            _measure(name, spec, options, folder, results)


def _measure(
    name: str, spec: StateSpec, options: argparse.Namespace, folder: Path, results: Results
) -> None:
    """One peer: its saves, then each way to load them."""
    place = f"local/{spec.kind}"
    why = PEERS[name].lacks(spec.kind) if name in PEERS else None
    if why:
        results.notes[f"{place}/{name}"] = why
        return
    peer = _REFERENCE if name == FROZEN else name
    with _case(peer, spec, options, folder) as case:
        if name == "limits":
            _add(results, f"{place}/limits", measured.limits, case)
        elif name == FROZEN:
            _add(results, f"{place}/save/{FROZEN}", measured.frozen_saves, case)
        else:
            _add(results, f"{place}/save/{name}", measured.saves, case)
            for reader in PEERS[name].readers:
                if reader in options.readers:
                    _add(results, f"{place}/load/{reader}", measured.load, case, reader)


@contextmanager
def _case(peer: str, spec: StateSpec, options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """A case whose files live from its save to its last load."""
    own = Path(tempfile.mkdtemp(prefix=f"{peer}-", dir=folder))
    yield Case(peer=peer, spec=spec, folder=own, settles=options.settle)
    shutil.rmtree(own)


def _add(results: Results, name: str, work: Callable[..., Figures], *arguments: object) -> None:
    progress(f"  {name}")
    results.add(name, in_child(work, *arguments))


def _tables(results: Results) -> list[str]:
    lines = []
    for kind in ("gpt", "small"):
        place = f"local/{kind}"
        if results.names(f"{place}/"):
            lines += [f"### {results.titles[place]}", ""]
        if results.names(f"{place}/limits"):
            lines += [*table_of(results, f"{place}/limits"), ""]
        if results.names(f"{place}/save/"):
            lines += [*_save_table(results, place), ""]
        if results.names(f"{place}/load/"):
            lines += [*_load_table(results, place), ""]
    return lines


def _save_table(results: Results, place: str) -> list[str]:
    """Markdown lines: one row a peer."""
    titles = {f"{place}/save/{name}": peer.title for name, peer in PEERS.items()}
    titles[f"{place}/save/{FROZEN}"] = f"holdfast, {1 - FROZEN_CHANGING:.0%} of the bytes frozen"

    def row(case: str) -> list[str]:
        durable_s, nbytes = results.median(case, "durable_s"), results.median(case, "nbytes")
        return [
            seconds(durable_s),
            number(nbytes / durable_s / 1e9 if durable_s and nbytes else None, "{:.2f}"),
            percent(results.ratio((case, "disk_s"), (case, "durable_s"))),
            times(_beside(results, place, "save", case, "durable_s")),
            seconds(results.median(case, "stall_s")),
            percent(share(results, place, "stage", (case, "stall_s"))),
            times(_beside(results, place, "save", case, "stall_s")),
            seconds(results.median(case, "first_stall_s")),
            megabytes(results.median(case, "peak_extra_nbytes")),
            megabytes(results.median(case, "written_nbytes")),
            megabytes(results.median(case, "disk_nbytes")),
        ]

    head = ["save", "durable", "GB/s", "of disk", "ratio", "stall", "of copy", "ratio"]
    head += ["first stall", "extra memory", "written", "on disk"]
    lines = results_table(results, f"{place}/save/", head, titles, row)
    durable = [row for row in results.names(f"{place}/save/") if not row.endswith(_MAY_BEAT_DISK)]
    shares = [results.ratio((row, "disk_s"), (row, "durable_s")) for row in durable]
    walk = results.ratio((f"{place}/limits", "ask_state_s"), (f"{place}/{_OVERLAP}", "stall_s"))
    if walk is not None and place.endswith("/gpt"):  # of which most may overlap
        lines += ["", f"To ask each tensor where it lies is {walk:.0%} of a call with overlap."]
    if any(value is not None and value > 1 for value in shares):
        lines += ["", "**A row beats the disk's limit, so the limit is wrong: do not use it.**"]
    return lines


def _load_table(results: Results, place: str) -> list[str]:
    """Markdown lines: one row a way to load."""
    readers = {name: reader for peer in PEERS.values() for name, reader in peer.readers.items()}
    titles = {f"{place}/load/{name}": reader.title for name, reader in readers.items()}

    def row(case: str) -> list[str]:
        return [
            seconds(results.median(case, "cold_s")),
            percent(results.ratio((case, "disk_s"), (case, "cold_s"))),
            times(_beside(results, place, "load", case, "cold_s")),
            seconds(results.median(case, "warm_s")),
            percent(share(results, place, "warm", (case, "warm_s"))),
            times(_beside(results, place, "load", case, "warm_s")),
            megabytes(results.median(case, "peak_extra_nbytes")),
            number(results.median(case, "cold_share"), "{:.1%}"),
        ]

    head = ["load", "cold", "of disk", "ratio", "warm", "of copy + digest", "ratio"]
    head += ["extra memory", "still cached when cold"]
    return results_table(results, f"{place}/load/", head, titles, row)


def share(results: Results, place: str, ceiling: str, figure: tuple[str, str]) -> float | None:
    """The ceiling's time as a share of a (case, figure): 1 is as fast as the machine."""
    return results.ratio((f"{place}/limits", f"ceiling_{ceiling}_s"), figure)


def _beside(results: Results, place: str, action: str, case: str, figure: str) -> float | None:
    return results.ratio((case, figure), (f"{place}/{action}/{_REFERENCE}", figure))


BENCH = Bench(
    name="local",
    about="Holdfast, its peers and the machine's limits side by side on local disk.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    warmup=1,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
