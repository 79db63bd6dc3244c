"""A hook of mkdocs: puts the README's sections and the examples on the site.

So each text exists once. A page takes a section by a comment such as `<!-- README.md: Install -->`.
In the navigation, `examples/` and `decisions/` stand for all pages of that folder.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
"""The languages of examples, by suffix."""
BADGE = re.compile(r"^\[?!\[[^]]*\]\(https://.*\n", re.MULTILINE)
SECTION = re.compile(r"^<!-- README\.md: (.+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Replace the folders in the navigation by their pages."""
    config.nav = filled(config.nav)
    return config


def filled(nav: Any) -> Any:
    """The navigation with the pages of `examples/` and `decisions/` in place of their names."""
    if isinstance(nav, dict):
        return {title: filled(entry) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [filled(entry) for entry in nav]
    if nav == "examples/":
        return ["examples/index.md", *(page_of(path) for path in example_files())]
    if nav == "decisions/":
        return sorted(
            (path.relative_to(ROOT / "docs").as_posix() for path in decisions()),
            key=lambda name: (not name.endswith("index.md"), name),
        )
    return nav


def decisions() -> list[Path]:
    """The records of decisions and their index."""
    return [*(ROOT / "docs" / "decisions").glob("*.md")]


def example_files() -> list[Path]:
    """The programs in examples/, those of folders last."""
    found = [path for path in EXAMPLES.rglob("*") if path.suffix in LANGUAGES]
    return sorted(found, key=lambda path: (path.parent != EXAMPLES, path))


def page_of(path: Path) -> str:
    """The page on the site of a program in examples/."""
    return f"examples/{path.relative_to(EXAMPLES).with_suffix('.md').as_posix()}"


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each example, and their list."""
    pages = {page_of(path): example(path) for path in example_files()}
    for name, text in {"examples/index.md": list_of_examples(), **pages}.items():
        files.append(File.generated(config, name, content=text))
    return files


def list_of_examples() -> str:
    """examples/README.md with links to pages of the site."""
    text = (EXAMPLES / "README.md").read_text("utf-8")
    text = re.sub(r"\]\(([\w/]+)\.\w+\)", r"](\1.md)", text)
    return text.replace("](../docs/", "](../")


def example(path: Path) -> str:
    """A page of one program: the docstring of Python as text, and the rest as code."""
    code, says, above = path.read_text("utf-8"), "", 0
    if path.suffix == ".py":
        tree = ast.parse(code)
        says = ast.get_docstring(tree) or ""
        above = tree.body[0].end_lineno or 0 if says else 0
    below = "".join(code.splitlines(keepends=True)[above:]).strip()
    title = f'{LANGUAGES[path.suffix]} title="{path.relative_to(ROOT).as_posix()}"'
    return f"# {path.name}\n\n{says}\n\n```{title}\n{below}\n```\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put sections of the README where a page asks for them."""
    return SECTION.sub(lambda match: section(match[1]), markdown)


def section(title: str) -> str:
    """The text below a heading of the README, with links as on the site."""
    text = (ROOT / "README.md").read_text("utf-8")
    match = re.search(rf"^##? {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if match is None:
        raise ValueError(f"README.md has no section {title!r}, which a page asks for")
    # Nothing on the site is fetched from elsewhere, as badges are. Tests are no pages of the site.
    text = BADGE.sub("", match[1])
    text = re.sub(r"\[([^\]]+)\]\((tests/[^)]+)\)", r"\1: `\2`", text)
    return (
        text.strip().replace("](docs/", "](").replace("](examples/README.md", "](examples/index.md")
    )
