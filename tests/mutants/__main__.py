"""Mutation testing: break Holdfast in one place at a time, and see which test fails.

Run `python -m tests.mutants [NAME...]` from the root of the project.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue

from tests.mutants.mutant import Mutant
from tests.mutants.results import Result, Results, Stages, Verdict, is_good, table
from tests.mutants.running import BOTH, NEAR_TIMEOUT_S, TIERS, WHOLE_TIMEOUT_S, Tree, trees
from tests.mutants.tables import all_mutants, faults, key_of


def main(words: Sequence[str]) -> int:
    """Run the mutants; exit status 0 if all were caught, and enough of them by `make test`."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these, with * as in a shell")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--stages", choices=("all", "near"), default="all", help="tests to ask")
    parser.add_argument("--survivors", action="store_true", help="run what was not caught, again")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="run anew")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--table", action="store_true", help="print what is known and run none")
    given = parser.parse_args(words)
    mutants = tuple(_named(all_mutants(), [*given.names, *given.again]))
    if not mutants:
        parser.error(f"no mutant is called {' or '.join([*given.names, *given.again])}")
    results = Results()
    if given.list:
        print("\n".join(f"{m.name}: {m.place}: {m.promise}" for m in mutants))
        return 0
    if wrong := list(faults(mutants)):
        print("\n".join(wrong))
        return 2
    if not given.table:
        due = [
            mutant
            for mutant in mutants
            if mutant.name in given.again
            or _is_due(results.of(mutant), given.stages, survivors=given.survivors)
        ]
        _run(due, given.stages, max(1, min(given.jobs, len(due))), results)
    print(table(mutants, results))
    return 0 if is_good(mutants, results) else 1


def _named(mutants: Sequence[Mutant], names: Sequence[str]) -> Iterator[Mutant]:
    for mutant in mutants:
        if not names or any(fnmatch.fnmatchcase(mutant.name, name) for name in names):
            yield mutant


def _is_due(result: Result | None, stages: Stages, *, survivors: bool) -> bool:
    if result is None or result.verdict == "error":
        return True
    if result.verdict == "survived" and survivors:
        return True
    return stages == "all" and not result.is_final


def _run(mutants: Sequence[Mutant], stages: Stages, jobs: int, results: Results) -> None:
    """Run mutants, several at a time, and print each result."""
    if not mutants:
        return
    with trees(jobs) as made:
        mutants = _with_sound_tests(made[0], mutants, results)
        idle: SimpleQueue[Tree] = SimpleQueue()
        for tree in made:
            idle.put(tree)

        def run(mutant: Mutant) -> Result:
            tree = idle.get()
            try:
                return judged(tree, mutant, stages)
            finally:
                idle.put(tree)

        with ThreadPoolExecutor(jobs) as threads:
            futures = [threads.submit(run, mutant) for mutant in mutants]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    result = future.result()
                    results.add(result)
                    print(f"{number}/{len(mutants)} {result.name}: {result}", flush=True)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for tree in made:
                    tree.end()
                raise


def _with_sound_tests(tree: Tree, mutants: Sequence[Mutant], results: Results) -> Sequence[Mutant]:
    """Return the mutants whose near tests pass in the unchanged source; count the others."""
    near = results.not_known_sound(sorted({path for mutant in mutants for path in mutant.near}))
    if not near:
        return mutants
    print(f"{len(near)} files of tests without a mutant", flush=True)
    run = tree.run(near, marks=TIERS["test"], timeout_s=WHOLE_TIMEOUT_S, stops=False)
    failing = {test.split("::")[0] for test in run.failed} if run.is_complete else {*near}
    results.note_sound(path for path in near if path.split("::")[0] not in failing)
    sound = [m for m in mutants if failing.isdisjoint(path.split("::")[0] for path in m.near)]
    if not run.has_passed:
        told = "\n".join((*run.failed, run.output))
        print(f"{len(mutants) - len(sound)} mutants wait, for these fail without any:\n{told}")
    return sound


def judged(tree: Tree, mutant: Mutant, stages: Stages) -> Result:
    """Run the tests on a mutant, tier by tier, until one fails that passes without it.

    In each tier the near tests come first, then all of them, unless `stages` is `near`.
    """
    spent_s, key = 0.0, key_of(mutant, tree.root)

    def result(verdict: Verdict, *, tier: str = "", test: str = "") -> Result:
        return Result(
            name=mutant.name,
            key=key,
            verdict=verdict,
            stages=stages,
            seconds=round(spent_s, 1),
            tier=tier,
            test=test,
        )

    for tier, marks in TIERS.items():
        for tests in (mutant.near, ()) if stages == "all" else (mutant.near,):
            timeout_s = NEAR_TIMEOUT_S if tests else WHOLE_TIMEOUT_S
            with tree.changed(mutant):
                run = tree.run(tests, marks=marks, timeout_s=timeout_s)
            spent_s += run.seconds
            if run.has_passed:
                continue
            if run.is_cut_off:
                return result("error", test=f"not done after {timeout_s:.0f} s")
            if not run.failed:
                return result("error", test=f"does not import: {run.output[-400:]!r}")
            (test, *_) = run.failed
            with tree.changed(mutant):
                again = tree.run([test], marks=BOTH, timeout_s=NEAR_TIMEOUT_S)
            if again.has_passed:
                return result("error", test=f"{test} failed once, and passed when it ran alone")
            # `_with_sound_tests` has already run the near tests of the first tier.
            is_sound = tier == "test" and bool(tests)
            if is_sound or tree.run([test], marks=BOTH, timeout_s=NEAR_TIMEOUT_S).has_passed:
                return result("caught", tier=tier, test=test)
            return result("error", test=f"{test} fails without the mutant, too")
    return result("survived")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is killed, too
    sys.exit(main(sys.argv[1:]))
