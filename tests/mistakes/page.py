"""docs/mistakes.md, whose tables stand between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.mistakes.table import Answer, Case

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "mistakes.md"
BEGIN, END = "<!-- made by python -m tests.mistakes -->\n", "<!-- end -->\n"


def row(case: Case, answer: Answer) -> str:
    """The line of the table."""
    return f"| {_cell(case.did)} | {answer.kind} | {_cell(answer.text)} |\n"


def tables(rows: Iterable[tuple[Case, str]]) -> str:
    """All tables, one for each theme."""
    text, theme = "", ""
    for case, line in rows:
        if case.theme != theme:
            theme = case.theme
            text += f"\n## {theme}\n\n| done | answer | what Holdfast says |\n|---|---|---|\n"
        text += line
    return text + "\n"


def filled(page: str, made: str) -> str:
    """The page with these tables in the place of those that it has."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + made + END + tail


def _cell(text: str) -> str:
    """A text that stays one cell, and is shown as it is."""
    quoted = "`" in text
    safe = text.replace("|", "\\|")
    return safe if quoted else safe.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
