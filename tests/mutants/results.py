"""Results of mutants, kept as lines of JSON in an append-only file, and a table of them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from tests.mutants.mutant import Mutant
from tests.mutants.tables import PROJECT, SOURCE, key_of

FILE = PROJECT / "build" / "mutants.jsonl"
GOAL = 0.9
"""The share of the mutants that `make test` has to catch."""

Verdict = Literal["caught", "survived", "error"]
Stages = Literal["all", "near"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one mutant."""

    name: str
    key: str
    """See `key_of`."""
    verdict: Verdict
    stages: Stages
    """Which tests were run: all, or only those near to the mutant."""
    seconds: float
    tier: str = ""
    """The tier that caught it."""
    test: str = ""
    """The id of the test that caught it; of an error, the reason."""
    tests_key: str = ""
    """Digest of the file with that test; if none caught it, of all tests."""

    @property
    def is_final(self) -> bool:
        """Whether running all tests could not change the result."""
        return self.tier == "test" or (self.stages == "all" and self.verdict != "error")

    def __str__(self) -> str:
        if self.verdict == "caught":
            return f"caught by make {target(self.tier)} in {self.seconds:.1f} s by {self.test}"
        if self.verdict == "error":
            return f"ERROR: {self.test}"
        return f"SURVIVED {self.stages} tests ({self.seconds:.1f} s)"


def target(tier: str) -> str:
    """Name the Makefile target that runs a tier."""
    return "test" if tier == "test" else "test-full"


class Results:
    """The file of results, to which each new one is appended."""

    def __init__(self, path: Path = FILE) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Result] = {}
        self._sound: set[tuple[str, str]] = set()
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            record = json.loads(line)
            if "sound" in record:
                self._sound.add((record["sound"], record["key"]))
            else:
                result = Result(**record)
                self._found[result.name, result.key] = result

    def of(self, mutant: Mutant) -> Result | None:
        """Return the newest result of a mutant, if what it changes and ran is still the same."""
        found = self._found.get((mutant.name, key_of(mutant)))
        return found if found is not None and found.tests_key == _tests_key(found) else None

    def add(self, result: Result) -> None:
        """Store a result."""
        result = replace(result, tests_key=_tests_key(result))
        self._found[result.name, result.key] = result
        self._append(asdict(result))

    def not_known_sound(self, paths: Iterable[str]) -> list[str]:
        """Return the tests not yet known to pass without a mutant, in the source as it is now."""
        return [path for path in paths if (path, _key_of_test(path)) not in self._sound]

    def note_sound(self, paths: Iterable[str]) -> None:
        """Store that these tests pass without a mutant."""
        for path in paths:
            self._append({"sound": path, "key": _key_of_test(path)})

    def _append(self, record: Mapping[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _key_of_test(path: str) -> str:
    """Digest the whole source and one test file."""
    return _digest([*sorted((PROJECT / SOURCE).rglob("*.py")), PROJECT / path.split("::")[0]])


@functools.cache
def _key_of_all_tests() -> str:
    return _digest(sorted((PROJECT / "tests").rglob("*.py")))


def _tests_key(result: Result) -> str:
    if result.verdict != "caught":
        return _key_of_all_tests()
    return _digest([PROJECT / result.test.split("::")[0]])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]


def table(mutants: Sequence[Mutant], results: Results) -> str:
    """Format the results as a Markdown table, with counts below it."""
    lines = ["| mutant | promise | caught by | s | test |", "|---|---|---|---|---|"]
    counts = dict.fromkeys(("make test", "make test-full", "survived", "error", "not run"), 0)
    for mutant in mutants:
        result = results.of(mutant)
        verdict = "not run" if result is None else str(result.verdict)
        if result is not None and result.verdict == "caught":
            verdict = f"make {target(result.tier)}"
        counts[verdict] += 1
        seconds = "" if result is None else f"{result.seconds:.0f}"
        test = "" if result is None else result.test.replace("|", "\\|")
        told = f"`{test}`" if test else ""
        lines.append(f"| {mutant.name} | {mutant.promise} | {verdict} | {seconds} | {told} |")
    counted = ", ".join(f"{what} {number}" for what, number in counts.items() if number)
    return "\n".join([*lines, "", f"{len(mutants)} mutants: {counted}"])


def is_good(mutants: Sequence[Mutant], results: Results) -> bool:
    """Whether all mutants were caught, and enough of them by `make test` (see `GOAL`)."""
    found = [results.of(mutant) for mutant in mutants]
    caught = [result for result in found if result is not None and result.verdict == "caught"]
    quick = [result for result in caught if result.tier == "test"]
    return len(caught) == len(mutants) and len(quick) >= GOAL * len(mutants)
