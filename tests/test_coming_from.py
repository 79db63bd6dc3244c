"""The reference of behaviors of other trainers: no row is missing, and every snippet runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.each import each

PAGES = Path(__file__).resolve().parents[1] / "docs" / "coming-from" / "behaviors"

NUMBERS = {
    "olmo-core": [*(f"O{n}" for n in range(1, 63)), "X1", "X2"],
    "composer": [*(f"C{n}" for n in range(1, 73)), "C39b", *(f"X{n}" for n in range(3, 7))],
    "modelzoo": [
        *(f"K{n}" for n in range(1, 49) if n != 33),
        "K43b",
        *(f"X{n}" for n in range(7, 16)),
    ],
    "mindspore": [*(f"M{n}" for n in range(1, 53)), *(f"X{n}" for n in range(16, 21))],
}
_ROW = re.compile(r"^\| ([OCKMX]\d+b?) \| (.+) \| (.+) \|$", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of a page that shows some of its rows."""

    page: str
    numbers: tuple[str, ...]
    code: str
    line: int


def rows(page: str) -> dict[str, str]:
    """Map each number of a page to the last column of its row."""
    found = _ROW.findall((PAGES / f"{page}.md").read_text("utf-8"))
    assert len({number for number, _, _ in found}) == len(found), "a number has two rows"
    return {number: here for number, _, here in found}


def blocks(page: str) -> tuple[str, list[Snippet]]:
    """The first block, which the others share, and the others."""
    text = (PAGES / f"{page}.md").read_text("utf-8")
    found = [(match[1], text.count("\n", 0, match.start()) + 2) for match in _BLOCK.finditer(text)]
    snippets = [
        Snippet(page, tuple(code.splitlines()[0].removeprefix("#").split()), code, line)
        for code, line in found[1:]
    ]
    return found[0][0], snippets


ALL = [snippet for page in NUMBERS for snippet in blocks(page)[1]]


@pytest.mark.parametrize("page", NUMBERS)
def test_every_number_has_a_row_and_every_row_a_snippet_or_a_reason(page: str) -> None:
    said = rows(page)
    assert sorted(said) == sorted(NUMBERS[page])
    shown = {number for snippet in blocks(page)[1] for number in snippet.numbers}
    unshown = {n for n, here in said.items() if not here.startswith(("**Absent**", "**Later**"))}
    assert shown == unshown


@pytest.mark.parametrize("page", NUMBERS)
def test_few_are_absent_and_each_says_why(page: str) -> None:
    said = rows(page)
    later = [number for number, here in said.items() if here.startswith("**Later**")]
    absent = [here for here in said.values() if here.startswith("**Absent**")]
    assert len(absent) <= (len(said) - len(later)) / 5
    assert all(len(here.split()) > 5 for here in absent)


def test_the_reference_is_short() -> None:
    texts = [page.read_text("utf-8") for page in PAGES.iterdir()]
    words = [re.sub(r"```.*?```", "", text, flags=re.DOTALL).split() for text in texts]
    assert sum(map(len, words)) <= 6_500


def test_every_snippet_shows_something() -> None:
    shown = [snippet for snippet in ALL if "assert " in snippet.code or "raises(" in snippet.code]
    assert [snippet for snippet in ALL if snippet not in shown] == []


@pytest.mark.full
@each("snippet", ALL[::8], ids=lambda s: f"{s.page}.md:{s.line}")
def test_some_snippets_run(
    snippet: Snippet, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(snippet, tmp_path_factory.mktemp("snippet"), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("page", NUMBERS)
def test_every_snippet_runs(
    page: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    @each("snippet", [s for s in ALL if s.page == page], ids=lambda s: f"{s.page}.md:{s.line}")
    def run_all(snippet: Snippet) -> None:
        run(snippet, tmp_path_factory.mktemp("snippet"), monkeypatch)

    run_all()


def run(snippet: Snippet, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a snippet in a folder of its own, after the block that its page's snippets share."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("holdfast.store.memory._named", {})  # else a page could not run twice
    shared, _ = blocks(snippet.page)
    names: dict[str, object] = {"__name__": f"snippet_{snippet.line}"}
    exec(compile(shared, f"{snippet.page}.md", "exec"), names)
    code = "\n" * (snippet.line - 1) + snippet.code  # so that errors point into the page
    exec(compile(code, f"{snippet.page}.md", "exec"), names)
