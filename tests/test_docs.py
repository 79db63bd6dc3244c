"""What the documents say is there, and what they show works."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import readme
from holdfast.version import __version__
from tags import README, ROW, files_of_tags, filled, tags_of

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), TESTS / "README.md"])
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def test_the_loop_of_the_readme_trains_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D25: running the finished script again is well, and changes nothing."""
    monkeypatch.chdir(tmp_path)
    first = readme.run_loop(tmp_path)
    assert first["found"] is None
    assert first["step"] == 2_000
    kept = sorted(path.name for path in Path("runs/first").glob("step-*"))
    assert len(kept) == 3
    second = readme.run_loop(tmp_path)
    assert second["found"].step == 2_000
    assert second["found"].tags == ("final",)
    assert sorted(path.name for path in Path("runs/first").glob("step-*")) == kept
    weights = [run["model"].state_dict() for run in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_loop_of_the_readme_is_short() -> None:
    lines = [line for line in readme.loop().splitlines() if line.strip()]
    assert len(lines) <= 14


def test_the_diff_of_the_readme_makes_a_loop_that_resumes_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: the loop is interrupted in step 60, when step 50 is saved."""
    monkeypatch.chdir(tmp_path)
    code = f"import holdfast\n{readme.changed_loop()}".replace("500step", "50step")
    seen: list[int] = []

    def train_step(batch: object, stop_at: int) -> float:
        seen.append(len(seen))
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        return 0.5

    names = {**readme.toy(), "train_step": lambda batch: train_step(batch, 60)}
    with pytest.raises(KeyboardInterrupt):
        exec(code, names)
    names.pop("checkpoints").close()
    seen.clear()
    names = {**readme.toy(), "train_step": lambda batch: train_step(batch, 0)}
    exec(code, names)
    names["checkpoints"].close()
    assert names["step"] == 80
    assert len(seen) == 80 - 50


def test_the_tag_to_install_is_this_version() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"holdfast@v([\w.]+)", text) == [__version__]


def broken_links(page: Path) -> Iterator[str]:
    """The links of a page to files that are not there, or that are not built with it."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" in link:
            continue
        target = (page.parent / link).resolve()
        if target.is_relative_to(DOCS / "examples"):  # docs/site.py makes these pages
            continue
        # What is built knows the pages, and nothing beside them.
        is_built = not target.is_dir() and target.is_relative_to(DOCS)
        if not target.exists() or (page.is_relative_to(DOCS) and not is_built):
            yield f"{page.relative_to(ROOT)}: {link}"


def broken_tables(page: Path) -> Iterator[str]:
    """The rows of a page that a reader sees as text: outside of a table, or with other columns."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    columns = 0
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            columns = 0
            continue
        found = re.sub(r"\\\||`[^`]*`", "", line).count("|")
        if not columns and re.fullmatch(r"\|[\s:|-]+\|", following):
            columns = found
        elif found != columns:
            yield f"{page.relative_to(ROOT)}: {line[:60]}"


def test_every_row_is_in_a_table() -> None:
    assert not [row for page in PAGES for row in broken_tables(page)]


def test_every_link_leads_somewhere() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []


FOR_EXTENSIONS = {
    f"holdfast.{name}"
    for name in (
        *("format.manifest", "store", "store.base"),
        *(f"policy.{name}" for name in ("clock", "costs", "naming", "retention", "rule", "rules")),
        *("policy.savers", "policy.triggers"),
    )
}
"""Modules with bases of rules and stores of one's own; the reference has some of their names."""

PUBLIC = {
    f"holdfast.{name}"
    for name in (
        *("data", "errors", "events", "interop", "interop.dcp", "keys", "sinks", "testing"),
        *("testing.cluster", "train"),
        *(
            f"bridges.{name}"
            for name in ("accelerate", "ignite", "lightning", "torchtitan", "transformers")
        ),
    )
}
"""Modules that the reference has completely."""


def modules_imported(path: Path) -> set[str]:
    """Modules of the package that the Python of a page or of an example imports.

    Blocks with the name of a file of `src/` or `tests/` are changes, and may import any.
    """
    text = path.read_text("utf-8")
    code = re.findall(r"```python(?! title=\"(?:src|tests)/)[^\n]*\n(.*?)```", text, re.DOTALL)
    lines = text if path.suffix == ".py" else "\n".join(code)
    return set(
        re.findall(r"^(?:>>> |\.\.\. )?\s*(?:from|import) (holdfast[\w.]*)", lines, re.MULTILINE)
    )


def test_what_is_shown_imports_public_modules_only() -> None:
    examples = [*(ROOT / "examples").rglob("*.py")]
    assert len(examples) > 3
    shown = {path.name: modules_imported(path) for path in (*PAGES, *examples)}
    deeper = {name: found - {"holdfast", *PUBLIC, *FOR_EXTENSIONS} for name, found in shown.items()}
    assert {name: found for name, found in deeper.items() if found} == {}
    # The demo runs the command.
    assert all(modules_imported(path) for path in examples if path.name != "demo.py")


def test_every_page_has_one_place_in_the_navigation() -> None:
    """Pages of `not_in_nav` have none, and docs/site.py adds the pages of two folders."""
    settings, navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")
    [reference] = re.findall(r"^not_in_nav: /(.+)$", settings, re.MULTILINE)
    named = re.findall(r"[\w./-]+\.md", navigation)
    assert re.findall(r"([\w-]+)/$", navigation, re.MULTILINE) == ["examples", "decisions"]
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    elsewhere = ("decisions/", reference)
    assert sorted(named) == sorted(page for page in pages if not page.startswith(elsewhere))
    assert all(
        f"behaviors/{path.name}" in (DOCS / "coming-from" / path.name).read_text("utf-8")
        for path in (DOCS / reference).iterdir()
    )


def test_every_test_that_the_source_names_exists() -> None:
    named = {
        (name.rstrip("."), path.relative_to(ROOT).as_posix())
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"tests/[\w./]+", path.read_text("utf-8"))
    }
    assert len(named) > 30
    assert [each for each in sorted(named) if not (ROOT / each[0]).exists()] == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"))
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_every_make_target_that_a_page_names_exists() -> None:
    named = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)
    found = [(page, name) for page in PAGES for name in named.findall(page.read_text("utf-8"))]
    assert [(p.name, name) for p, name in found if f"\n{name}:" not in MAKEFILE] == []


def test_help_lists_every_target() -> None:
    phony = next(line for line in MAKEFILE.splitlines() if line.startswith(".PHONY:"))
    described = re.findall(r"^([a-z-]+):.*  ## ", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()[1:]) == sorted(described)


def test_continuous_integration_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert 'make --no-print-directory "${1:-test}"' in script.read_text("utf-8")


def test_the_picture_in_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "images" / "demo.png").stat().st_size < 150_000


def test_the_tables_name_the_files_that_carry_each_tag() -> None:
    text = README.read_text("utf-8")
    assert filled(text) == text, "run: python tests/tags.py"
    rows = ROW.findall(text)
    assert len(rows) > 40
    assert [tag for tag, _, files in rows if not files] == []


def test_every_tag_in_a_test_is_explained() -> None:
    explained = {tag for tag, _, _ in ROW.findall(README.read_text("utf-8"))}
    assert {tag: files for tag, files in files_of_tags().items() if tag not in explained} == {}


def test_tags_are_found_in_docstrings_only(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        'def test_a():\n    """R15, D14: yes; invariants 3, 4 and 11."""\n    D99 = "R98"\n'
    )
    assert tags_of(file) == {"R15", "D14", "I3", "I4", "I11"}
