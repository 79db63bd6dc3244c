"""How fast the page of `holdfast serve` is, and what it costs a training: `python -m bench.serve`.

A root of many checkpoints with many tensors is served, and Chromium, the browser of the tests,
looks at it. Then a training goes on in that root, with a save in each segment; in every second
segment a page of the run is open. What that takes of the processors is counted, too: on a busy
machine it says more than the time of the steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from bench.command import Bench, progress
from bench.goals import Goal, value
from bench.report import number, results_table, seconds
from bench.results import Outcome, Results
from holdfast import CheckpointManager

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # they bring the browser
from tests.serve.browser.chromium import Chromium, Tab
from tests.serve.browser.conftest import program
from tests.serve.many import multiply
from tests.serve.test_pages import folders

PAGES = {
    "runs": "/",
    "overview": "/r/run",
    "checkpoints": "/r/run/checkpoints",
    "lineage": "/r/run/lineage",
    "retention": "/r/run/retention",
    "resume": "/r/run/resume",
    "costs": "/r/run/costs",
    "compare": "/r/run/compare",
    "checkpoint": "/r/run/c/{folder}",
    "tensors": "/r/run/c/{folder}/tensors",
}
_BLANK = "about:blank"
_SETTLE_S = 2.0
"""Pause after a page was opened: what is measured is one that was left open."""
_MIB = 1 << 20
_SERVE = "from holdfast.cli import main; main()"
_IS_WHOLE = """
document.readyState === 'complete' && !document.body.innerText.includes('Reading the ')
&& [...document.querySelectorAll('.chart')].every(one => one.querySelector('canvas, .notice'))
"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')"
_FILTER = """
const field = document.querySelector('input[name=q]'), old = document.querySelector('#part');
const began = performance.now();
field.value = a[0];
field.dispatchEvent(new Event('input', {bubbles: true}));
while (document.querySelector('#part') === old) await new Promise(requestAnimationFrame);
await new Promise(requestAnimationFrame);
return performance.now() - began;
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--tensors", type=int, default=10_000, help="of each (%(default)s)")
    parser.add_argument(
        "--pairs",
        type=int,
        default=5,
        help="segments with and without an open page (%(default)s: enough for processor time; for "
        "the slowdown of steps, whose pairs differ by more than the goal, 20 on an idle machine)",
    )
    parser.add_argument("--segment-s", type=float, default=5.0, help="of training (%(default)s)")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    results.titles["serve"] = f"{options.checkpoints} checkpoints of {options.tensors:,} tensors"
    root = folder / "run"
    if not root.exists():
        progress(f"  {results.titles['serve']}")
        with CheckpointManager(root, _state(options.tensors), sinks=()) as manager:
            manager.save(100, metrics={"loss": 3.0}).wait()
        multiply(root, options.checkpoints)
    with Chromium(program()) as chromium:
        for name in PAGES:
            progress(f"  first paint: {name}")
            results.add(f"serve/{name}", Outcome(figures=_look(chromium, root, name)))
        progress("  beside a training, once before the pairs")
        results.add("serve/beside", Outcome(figures=_beside(chromium, root, options)))


def _state(num_tensors: int) -> dict[str, Any]:
    names = (f"h.{n // 10}.part.{n % 10}.weight" for n in range(num_tensors))
    return {"model": {name: torch.ones(2) for name in names}}


@contextmanager
def _serving(root: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """Serve a root by the command; yield its process, its origin and the query with the token."""
    words = [sys.executable, "-c", _SERVE, "serve", "--json", "--port", "0", str(root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        try:
            token = said["url"].partition("?")[2]
            yield psutil.Process(process.pid), f"http://127.0.0.1:{said['port']}", token
        finally:
            process.send_signal(signal.SIGINT)


def _look(chromium: Chromium, root: Path, name: str) -> dict[str, list[float]]:
    """Open one page of a server that has just started, then again; filter it; see its memory."""
    path = PAGES[name].format(folder=folders(root)[0])
    with _serving(root) as (process, origin, token), chromium.tab() as tab:
        figures = {"first_s": _painted_s(tab, f"{origin}{path}?{token}")}
        tab.wait_for(_IS_WHOLE)
        figures["whole_s"] = float(tab.run("return performance.now()")) / 1e3
        figures["again_s"] = _painted_s(tab, f"{origin}{path}")
        tab.wait_for(_IS_WHOLE)
        if tab.run("return !!document.querySelector('[role=search]')"):
            words = ("t100", "step-0001", "99", "") if name == "checkpoints" else _WORDS
            tab.run(_FILTER, "first")  # which compiles the scripts
            figures["filter_s"] = median(float(tab.run(_FILTER, word)) for word in words) / 1e3
        return {key: [number] for key, number in figures.items()} | {
            "peak_nbytes": [_peak(process)]
        }


_WORDS = ("h.77.", "weight h.9", "part.3", "")


def _painted_s(tab: Tab, url: str) -> float:
    """Seconds from the navigation to the first paint of some content."""
    tab.open(url)
    tab.wait_for(f"{_PAINT}.length")
    return float(tab.run(f"return {_PAINT}[0].startTime")) / 1e3


def _peak(process: psutil.Process) -> float:
    """Most memory that a process has had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if "VmHWM" in line)) * 1024


def train(root: str, num_tensors: int, segment_s: float) -> None:
    """Train a segment for each line of the input, with a save at its start."""
    torch.set_num_threads(1)
    state, x = _state(num_tensors), torch.rand(256, 256)
    with CheckpointManager(root, state, sinks=()) as manager:
        resumed = manager.resume()
        step = resumed.step if resumed is not None and resumed.step is not None else 0
        for _ in sys.stdin:
            step += 1
            saved = manager.save(step, metrics={"loss": 1.0})
            times, end = [], time.perf_counter() + segment_s
            while (now := time.perf_counter()) < end:
                for _ in range(10):
                    x = torch.tanh(x @ x)
                times.append(time.perf_counter() - now)
            saved.wait()
            print(json.dumps([sum(times) / len(times), median(times)]), flush=True)


def _beside(chromium: Chromium, root: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Train with and without an open page, in turn; return what the page adds to the steps."""
    copy = root.with_name("trained")
    subprocess.run(["cp", "-al", str(root), str(copy)], check=True)
    words = [sys.executable, "-m", "bench.serve", "--train", str(copy)]
    words += [str(options.tensors), str(options.segment_s)]
    pipe, added, share, taken = subprocess.PIPE, [], [], []
    with (
        subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as training,
        _serving(copy) as (process, origin, token),
        chromium.tab() as tab,
    ):
        assert training.stdin is not None
        assert training.stdout is not None

        browser = psutil.Process(chromium.pid)

        def segment(url: str) -> tuple[float, float, float]:
            tab.open(url)
            if url != _BLANK:
                tab.wait_for(_IS_WHOLE)
            time.sleep(_SETTLE_S)
            before, began = (_processor_s(process), _processor_s(browser)), time.monotonic()
            training.stdin.write("go\n")
            training.stdin.flush()
            mean_s = float(json.loads(training.stdout.readline())[0])
            after, took_s = (_processor_s(process), _processor_s(browser)), time.monotonic() - began
            return mean_s, (after[0] - before[0]) / took_s, (after[1] - before[1]) / took_s

        url = f"{origin}/r/trained"
        tab.open(f"{url}?{token}")
        segment(url)
        for pair in range(options.pairs):
            progress(f"  beside a training: pair {pair + 1} of {options.pairs}")
            order = (url, _BLANK) if pair % 2 else (_BLANK, url)
            found = {place: segment(place) for place in order}
            added.append(found[url][0] / found[_BLANK][0] - 1)
            share.append(found[url][1])
            both = found[url][1] + found[url][2] - found[_BLANK][2]
            taken.append(both / (psutil.cpu_count() or 1))
        training.stdin.close()
    shutil.rmtree(copy)
    return {"added": added, "server_share": share, "taken": taken}


def _processor_s(process: psutil.Process) -> float:
    """Seconds that a process and those that it has started have used the processors."""
    used = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in used))


def tables(results: Results) -> list[str]:
    """First paint, filtering and memory of each page; what an open page costs."""

    def row(case: str) -> list[str]:
        if case == "serve/beside":
            added, share, taken = (
                results.median(case, name) for name in ("added", "server_share", "taken")
            )
            pairs = [one for found in results.cases[case] for one in found.figures["added"]]
            steps = f"{number(added, '{:+.1%}')} ({min(pairs):+.0%} to {max(pairs):+.0%})"
            said = f"steps {steps}, server {number(share, '{:.1%}')} of a core"
            all_cores = f"with the browser {number(taken, '{:.1%}')} of all cores"
            return [f"{said}, {all_cores}", "", "", "", ""]
        first, whole, again, filtered = (
            seconds(results.median(case, name))
            for name in ("first_s", "whole_s", "again_s", "filter_s")
        )
        peak = results.median(case, "peak_nbytes")
        return [first, whole, again, filtered, number(peak and peak / _MIB, "{:.0f} MiB")]

    head = ["page", "first paint", "whole after", "again", "filtered", "server's memory"]
    titles = {f"serve/{name}": name for name in PAGES} | {"serve/beside": "open beside a training"}
    return results_table(results, "serve", head, titles, row)


def _goals() -> Iterator[Goal]:
    def worst(figure: str) -> Any:
        def find(results: Results) -> float | None:
            found = [results.median(f"serve/{name}", figure) for name in PAGES]
            return max((one for one in found if one is not None), default=None)

        return find

    yield Goal(measure="first paint", find=worst("first_s"), bound=1.0, form=seconds)
    yield Goal(measure="filtering", find=worst("filter_s"), bound=0.1, form=seconds)
    yield Goal(
        measure="server's memory",
        find=worst("peak_nbytes"),
        bound=300.0 * _MIB,
        form=lambda found: f"{found / _MIB:.0f} MiB",
    )
    yield Goal(
        measure="processor time of an open page",
        find=value("serve/beside:taken"),
        bound=0.01,
        form="{:.1%}".format,
    )
    yield Goal(
        measure="training steps with an open page",
        find=value("serve/beside:added"),
        bound=0.01,
        form="{:+.1%}".format,
    )


BENCH = Bench(
    name="serve",
    about=__doc__ or "",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=tables,
    goals=tuple(_goals()),
    rounds=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    return BENCH.main(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(main())
