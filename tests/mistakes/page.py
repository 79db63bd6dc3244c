"""docs/mistakes.md, whose tables come after a mark."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.mistakes.table import Answer, Case

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "mistakes.md"
MARK = "<!-- The rest is written by `python -m tests.mistakes`. -->\n"
LONGEST = 42
"""Characters of a message on the page: enough to find it."""
SELF_EXPLANATORY = ("UsageError", "NoCheckpoint", "MismatchError", "exit")
"""Answers that name the wrong value and the right ones, so that nobody looks them up."""


def message(answer: Answer) -> str:
    """The cells of the message and its class; empty if the message explains itself."""
    if answer.kind.startswith(SELF_EXPLANATORY):
        return ""
    sentence = re.split(r"(?<=\S[.]) (?=[A-Z])", answer.text)[0].rstrip(".")
    sentence = re.sub(r"(…/runs/\w+/)?step-[\d.-]+…/", "…/", sentence)
    sentence = re.sub(r"^(…/runs/\w+|step-[\d.-]+…)(: | cannot be used: )", "", sentence)
    beginning = textwrap.shorten(sentence, LONGEST, placeholder="…")
    if beginning.count("`") % 2:  # cut within code
        beginning = beginning.replace("`", "")
    return f"| {_cell(beginning)} | {answer.kind} |"


def tables(rows: Iterable[tuple[Case, Answer]]) -> str:
    """A table for each theme, with a line for each message and all of its causes."""
    themes: dict[str, dict[str, list[str]]] = {}
    for case, answer in rows:
        if line := message(answer):
            themes.setdefault(case.theme, {}).setdefault(line, []).append(_cell(case.did))
    text = ""
    for theme, causes in themes.items():
        text += f"\n## {theme}\n\n| message | class | cause |\n|---|---|---|\n"
        text += "".join(f"{line} {'; '.join(found)} |\n" for line, found in causes.items())
    return text


def has(page: str, case: Case, answer: Answer) -> bool:
    """Whether a mistake is on the page, or need not be."""
    line = message(answer)
    rows = [row for row in page.splitlines() if row.startswith(line)]
    return not line or any(_cell(case.did) in row for row in rows)


def filled(page: str, made: str) -> str:
    """The page with these tables in the place of those that it has."""
    introduction, _, _ = page.partition(MARK)
    return introduction + MARK + made


def _cell(text: str) -> str:
    """A text that stays one cell, and is shown as it is."""
    quoted = "`" in text
    safe = text.replace("|", "\\|")
    return safe if quoted else safe.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
