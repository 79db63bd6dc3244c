"""The examples of docs/loading.md, each of which is run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from holdfast.state.patterns import covers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loading.md"
TEXT = PAGE.read_text("utf-8")


def test_every_example_of_the_page_gives_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, None, 0)
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert results.attempted > 30
    assert results.failed == 0


@pytest.mark.parametrize(
    ("entry", "path", "is_meant"),
    [
        ("optimizer", "optimizer.0.weight.exp_avg", True),
        ("model.0", "model.0.weight", True),
        ("model.0", "model.01.weight", False),
        ("model.*.bias", "model.0.bias", True),
        ("model.*.bias", "model.block.0.bias", False),
        ("**.bias", "model.block.0.bias", True),
        ("**.bias", "optimizer.bias.exp_avg", True),
        ("optimizer.**.exp_avg", "optimizer.0.weight.exp_avg", True),
        ("optimizer.**.exp_avg", "optimizer.0.weight.exp_avg_sq", False),
        ("data.w[0]", "data.w0", False),
        ("data.x?", "data.xy", False),
    ],
)
def test_the_table_of_entries_says_what_they_mean(entry: str, path: str, is_meant: bool) -> None:
    """D58."""
    assert f"`{entry}`" in TEXT
    assert covers(entry.split("."), path.split(".")) is is_meant
