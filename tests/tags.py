"""Fill in the last column of the tables of tests/README.md: `python tests/tags.py`.

The words are people's; which test files carry a tag is read from the tests.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
README = TESTS / "README.md"
TAG = re.compile(r"\b([RD]\d{1,2})\b")
INVARIANTS = re.compile(r"[Ii]nvariants?\s+(\d+(?:(?:,\s*|\s+and\s+)\d+)*)")
ROW = re.compile(r"^\| ([IRD]\d+) \| (.+?) \| (.*) \|$", re.MULTILINE)


def docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def tags_of(path: Path) -> set[str]:
    """What the docstrings of a test file claim; I and a number stands for an invariant."""
    text = "\n".join(docstrings(path))
    numbers = [n for match in INVARIANTS.finditer(text) for n in re.findall(r"\d+", match[1])]
    return {*TAG.findall(text), *(f"I{number}" for number in numbers)}


@functools.cache
def files_of_tags() -> dict[str, list[str]]:
    """Tag → test files that carry it, sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for tag in tags_of(path):
            found.setdefault(tag, []).append(path.relative_to(TESTS).as_posix())
    return found


def filled(text: str) -> str:
    """The page with its last columns as they should be."""
    files = files_of_tags()

    def row(match: re.Match[str]) -> str:
        names = ", ".join(f"`{name}`" for name in files.get(match[1], []))
        return f"| {match[1]} | {match[2]} | {names} |"

    return ROW.sub(row, text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text("utf-8")), "utf-8")
