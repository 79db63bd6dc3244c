"""Everything that the goals need, in one run: `python -m bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import (
    codecs,
    gpu,
    instructions,
    limits,
    local,
    metadata,
    parts,
    resumes,
    slowdown,
    tools,
    trainer,
    where,
)
from bench.command import Bench, add_common, keep, report
from bench.goals import CODEC_GOALS, GOALS, RESUME_GOALS, TOOLS_GOALS, goals_table
from bench.results import Results, read_json

_LOCAL_CASES = (
    "limits",
    "holdfast",
    "holdfast-awaited",
    local.FROZEN,
    "holdfast-overlap",
    "holdfast-budget",
    "safetensors",
    "dcp",
    "dcp-async",
    "dcp-async-kept",
    "dcp-async-shared",
    "torch_checkpointing",
)
_READERS = (
    "holdfast",
    "holdfast-unverified",
    "holdfast-in-place",
    "holdfast-in-place-unverified",
    "holdfast-bounded",
    "safetensors",
    "dcp",
    "torch_checkpointing",
)
_LOCAL = ["--states", "gpt", "--warmup", "0", "--only", *_LOCAL_CASES, "--readers", *_READERS]
FULL: Mapping[str, Sequence[str]] = {
    "local": [*_LOCAL, "--rounds", "2"],
    "resumes": ["--rounds", "1", "--readers", "plain", "default", "safetensors"],
    "slowdown": ["--rounds", "2"],
    "metadata": ["--rounds", "3"],
    "codecs": [],
    "where": ["--rounds", "1"],
    "parts": ["--rounds", "2"],
    "instructions": [],
    "trainer": ["--rounds", "9"],
    "tools": ["--rounds", "3"],
    "gpu": ["--rounds", "1"],
}
"""Benchmark → its arguments."""
QUICK: Mapping[str, Sequence[str]] = {
    "local": [*_LOCAL, "--rounds", "1", "--size-gb", "0.25", "--no-settle"],
    "resumes": [
        *("--rounds", "1", "--size-gb", "0.1", "--readers", "plain", "default", "safetensors"),
        *("--memories", "ready"),
    ],
    "slowdown": ["--rounds", "1", "--size-gb", "0.25", "--steps", "8", "--no-settle"],
    "metadata": ["--rounds", "1", "--size-gb", "0.25", "--checkpoints", "100"],
    "codecs": [
        *("--steps", "30", "--size-gb", "0.1", "--slow-size-gb", "0.1", "--pairs", "2"),
        *("--only", "none again", "auto", "aes-256-gcm", "--no-settle"),
    ],
    "parts": ["--rounds", "1", "--size-gb", "0.25"],
    "trainer": ["--rounds", "3", "--steps", "500"],
    "tools": ["--rounds", "1", "--size-gb", "0.25"],
    "gpu": ["--rounds", "1", "--size-gb", "1"],
}
"""The same in a few minutes: shows that everything runs. The goals are meant for the full size."""
_BENCHES: Mapping[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (
        limits,
        local,
        resumes,
        slowdown,
        metadata,
        codecs,
        where,
        parts,
        instructions,
        trainer,
        tools,
        gpu,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every benchmark, print the goals and then the tables; 1 when a case failed."""
    options = _options(arguments)
    results = Results()
    if options.tables_of:
        results = read_json(options.tables_of)
    else:
        for name, fixed in (QUICK if options.quick else FULL).items():
            if name in options.only:
                _run(name, [*fixed, "--folder", str(options.folder)], results)
                keep("bench", options, results)  # a later one may fail
    lines = [
        "## Goals",
        "",
        *goals_table(results, [*GOALS, *RESUME_GOALS, *CODEC_GOALS, *TOOLS_GOALS]),
    ]
    for name in options.only:
        part = results.part(name)
        if part.cases or part.notes or not options.tables_of:  # an earlier run may have had less
            lines += ["", f"## bench.{name}", "", *_BENCHES[name].tables(part)]
    report("bench", options, results, lines)
    return int(results.has_failed)


def _run(name: str, arguments: Sequence[str], results: Results) -> None:
    bench = _BENCHES[name]
    results.update(bench.collect(bench.parse(arguments)))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add_common(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    parser.add_argument("--only", nargs="+", choices=list(FULL), default=list(FULL))
    parser.add_argument(
        "--tables-of", type=Path, help="print what an earlier --json holds; measure nothing"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
