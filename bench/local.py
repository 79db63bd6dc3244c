"""Holdfast and its peers side by side on local disk: `python -m bench.local`.

Cases take turns inside every round (A B C A B C …), each in a fresh process, so that what the
machine does meanwhile hits all of them; ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.case import Case, Outcome, run
from bench.machine import heading
from bench.peers import PEERS
from bench.report import Rounds, limits_table, load_table, save_table
from bench.states import StateSpec

_CASE_TIMEOUT_S = 900.0
_Results = dict[tuple[str, str, str], list[Outcome]]  # (state, action, case name) -> by round


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every case and print the tables; 1 when a case failed."""
    options = _options(arguments)
    specs = [
        StateSpec(
            kind=kind, gpt_nbytes=round(options.size_gb * 1e9), num_small=options.small_tensors
        )
        for kind in options.states
    ]
    results: _Results = {}
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.folder))
    try:
        for number in range(-options.warmup, options.rounds):
            for spec in specs:
                for case in _cases(spec, options, folder):
                    _report_progress(number, case)
                    outcome = _in_child(case)
                    if number >= 0:
                        results.setdefault((spec.kind, case.action, case.name), []).append(outcome)
        lines = heading("bench.local", folder) + [
            line for spec in specs for line in _tables(spec, results)
        ]
    finally:
        shutil.rmtree(folder)
    print("\n".join(lines))
    if options.json:
        _write_json(options.json, lines, results)
    return int(any(outcome.error for outcomes in results.values() for outcome in outcomes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.local", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default 1)")
    parser.add_argument("--size-gb", type=float, default=2.5, help="GPT-like state, in 1e9 bytes")
    parser.add_argument("--small-tensors", type=int, default=20_000, help="of 256 bytes each")
    parser.add_argument("--states", nargs="+", choices=["gpt", "small"], default=["gpt", "small"])
    parser.add_argument(
        "--only", nargs="+", choices=["limits", *PEERS], default=["limits", *PEERS], help="cases"
    )
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (a disk)")
    parser.add_argument(
        "--settle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="before each measured call, sync, and touch free memory (see bench/README.md)",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args(arguments)


def _cases(spec: StateSpec, options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """The cases of one round. Each peer's files live from its save to its last load."""
    for peer in options.only:
        case_folder = Path(tempfile.mkdtemp(prefix=f"{peer}-", dir=folder))
        first = Case(
            action="limits" if peer == "limits" else "save",
            peer=peer,
            reader="",
            spec=spec,
            folder=case_folder,
            settles=options.settle,
        )
        yield first
        for reader in PEERS[peer].readers if peer in PEERS else ():
            yield replace(first, action="load", reader=reader)
        shutil.rmtree(case_folder)


def _in_child(case: Case) -> Outcome:
    """Run one case in a process forked from a server that has the imports done and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.case"])
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(case, send), name=f"bench-{case.name}")
    child.start()
    send.close()
    try:
        if receive.poll(_CASE_TIMEOUT_S):
            outcome: Outcome = receive.recv()
        else:
            outcome = Outcome(figures={}, error=f"no result after {_CASE_TIMEOUT_S:g} s")
            child.kill()
    except EOFError:
        outcome = Outcome(figures={}, error="the process died")
    child.join()
    return outcome


def _tables(spec: StateSpec, results: _Results) -> list[str]:
    saves, loads, limits = (_rounds(spec, action, results) for action in ("save", "load", "limits"))
    lines = ["", f"### {spec.title}", ""]
    if limits.figures:
        lines += [*limits_table(limits), ""]
    if saves.figures:
        lines += [*save_table(saves, limits), ""]
    if loads.figures:
        lines += load_table(loads)
    return lines


def _rounds(spec: StateSpec, action: str, results: _Results) -> Rounds:
    mine = {
        case: found
        for (kind, act, case), found in results.items()
        if (kind, act) == (spec.kind, action)
    }
    return Rounds(
        figures={case: [o.figures or None for o in found] for case, found in mine.items()},
        errors={case: o.error for case, found in mine.items() for o in found if o.error},
    )


def _report_progress(number: int, case: Case) -> None:
    name = "warm-up" if number < 0 else f"round {number + 1}"
    print(f"{name}: {case.spec.kind} {case.action} {case.name}", file=sys.stderr, flush=True)


def _write_json(path: Path, lines: list[str], results: _Results) -> None:
    cases = [
        {"state": kind, "action": action, "case": case, "rounds": [asdict(o) for o in found]}
        for (kind, action, case), found in results.items()
    ]
    path.write_text(json.dumps({"report": lines, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
