"""Functions that collect the mutants of this folder, apply them, and check the tables."""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant
from tests.tags import README, ROW

PROJECT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path("src/holdfast")


def all_mutants() -> tuple[Mutant, ...]:
    """Collect the mutants of every table, which is a tuple `MUTANTS` of a module in this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = [importlib.import_module(f"tests.mutants.{name}") for name in names if name[0] != "_"]
    return tuple(mutant for module in modules for mutant in getattr(module, "MUTANTS", ()))


@cache
def _definitions(root: Path) -> dict[str, list[tuple[Path, str]]]:
    """Collect every function, class and constant of the source by qualified name, with its text."""
    found: dict[str, list[tuple[Path, str]]] = defaultdict(list)

    def walk(node: ast.AST, prefix: str, path: Path, lines: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            names = _names_of(child, is_global=isinstance(node, ast.Module))
            for name in names:
                text = "".join(lines[_first_line(child) - 1 : getattr(child, "end_lineno", None)])
                found[prefix + name].append((path, text))
            walk(child, f"{prefix}{names[0]}." if names else prefix, path, lines)

    for path in sorted((root / SOURCE).rglob("*.py")):
        source = path.read_text("utf-8")
        walk(ast.parse(source), "", path, source.splitlines(keepends=True))
    return found


def _names_of(node: ast.AST, *, is_global: bool) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if is_global and isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _first_line(node: Any) -> int:
    decorators = getattr(node, "decorator_list", [])
    return int(min([node.lineno, *(decorator.lineno for decorator in decorators)]))


def _find(mutant: Mutant, root: Path) -> tuple[Path, str]:
    """Return the file and the text of the one definition that the mutant changes.

    Raises:
        ValueError: no definition of that name has `before` exactly once, or several have it.
    """
    definitions = _definitions(root).get(mutant.place, [])
    having = [(path, text) for path, text in definitions if mutant.before in text]
    count = sum(text.count(mutant.before) for _, text in having)
    if count != 1:
        raise ValueError(
            f"`before` is {count} times in {len(definitions)} definitions of {mutant.place}"
        )
    return having[0]


def find_file(mutant: Mutant, root: Path = PROJECT) -> Path:
    """Return the path of the file that a mutant changes."""
    return _find(mutant, root)[0]


def key_of(mutant: Mutant, root: Path = PROJECT) -> str:
    """Digest a mutant and the file that it changes; its result is stored under this key."""
    path = find_file(mutant, root)
    parts = (mutant.before, mutant.after, path.read_text("utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def mutated(mutant: Mutant, root: Path = PROJECT) -> str:
    """Return the text of its file with the mutant's change.

    Raises:
        ValueError: nothing changes, or the place is not found.
    """
    path, text = _find(mutant, root)
    if mutant.after == mutant.before:
        raise ValueError("`after` is `before`")
    source = path.read_text("utf-8")
    return source.replace(text, text.replace(mutant.before, mutant.after), 1)


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
        try:
            ast.parse(mutated(mutant))
        except (ValueError, SyntaxError) as error:
            yield f"{mutant.name}: {error}"


def untouched_folders(mutants: tuple[Mutant, ...]) -> list[str]:
    """List the source folders in which none of these mutants changes anything."""
    folders = {
        path.parent.relative_to(PROJECT / SOURCE).as_posix()
        for path in (PROJECT / SOURCE).rglob("*.py")
        if path.name != "__init__.py"
    }
    touched = {
        find_file(mutant).parent.relative_to(PROJECT / SOURCE).as_posix() for mutant in mutants
    }
    return sorted(folders - touched)
