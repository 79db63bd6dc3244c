"""The pages of the bridges: every snippet of them runs, on the real framework."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridges.frameworks import needed

PAGES = Path(__file__).resolve().parents[2] / "docs" / "bridges"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # of the framework, version by version
@pytest.mark.parametrize("page", ["ignite", "index", "lightning"])
def test_the_snippets_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page != "index":
        needed(page)
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((PAGES / f"{page}.md").read_text("utf-8"))
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for code in blocks:
        exec(code, names)
