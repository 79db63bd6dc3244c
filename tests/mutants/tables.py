"""Functions that collect the mutants of this folder, apply them, and check the tables."""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.tags import README, ROW

PROJECT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path("src/holdfast")


def all_mutants() -> tuple[Mutant, ...]:
    """Collect the mutants of every table, which is a tuple `MUTANTS` of a module in this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = [importlib.import_module(f"tests.mutants.{name}") for name in names if name[0] != "_"]
    return tuple(mutant for module in modules for mutant in getattr(module, "MUTANTS", ()))


def key_of(mutant: Mutant, root: Path = PROJECT) -> str:
    """Digest a mutant and the file that it changes; its result is stored under this key."""
    source = (root / SOURCE / mutant.file).read_text("utf-8")
    parts = (mutant.file, mutant.before, mutant.after, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source with the mutant's change.

    Raises:
        ValueError: `before` does not occur exactly once, or nothing changes.
    """
    if source.count(mutant.before) != 1:
        raise ValueError(f"`before` is {source.count(mutant.before)} times in {mutant.file}")
    if mutant.after == mutant.before:
        raise ValueError("`after` is `before`")
    return source.replace(mutant.before, mutant.after)


def faults(mutants: tuple[Mutant, ...]) -> Iterator[str]:
    """Find the errors of the tables: mutants that cannot be run, or would prove nothing."""
    tags = {match[1] for match in ROW.finditer(README.read_text("utf-8"))}
    names: set[str] = set()
    for mutant in mutants:
        if mutant.name in names:
            yield f"{mutant.name}: two mutants have this name"
        names.add(mutant.name)
        if mutant.promise.split(":")[0].split(",")[0] not in tags:
            yield f"{mutant.name}: tests/README.md has no tag for {mutant.promise!r}"
        for test in mutant.near:
            if not (PROJECT / test.split("::")[0]).exists():
                yield f"{mutant.name}: no {test}"
        if not mutant.near:
            yield f"{mutant.name}: no tests are near"
        path = PROJECT / SOURCE / mutant.file
        if not path.is_file():
            yield f"{mutant.name}: no file {mutant.file}"
            continue
        try:
            ast.parse(mutated(mutant, path.read_text("utf-8")))
        except (ValueError, SyntaxError) as error:
            yield f"{mutant.name}: {error}"


def untouched_folders(mutants: tuple[Mutant, ...]) -> list[str]:
    """List the source folders in which none of these mutants changes anything."""
    folders = {
        path.parent.relative_to(PROJECT / SOURCE).as_posix()
        for path in (PROJECT / SOURCE).rglob("*.py")
        if path.name != "__init__.py"
    }
    touched = {Path(mutant.file).parent.as_posix() for mutant in mutants}
    return sorted(folders - touched)
