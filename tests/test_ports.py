"""The guides for other trainers: our side runs, and the plain loop ends with the same weights.

`python -m bench.ports` also runs the sides of Lightning and transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.lightning_port import ours

PAGES = Path(__file__).resolve().parents[1] / "docs" / "coming-from"
GUIDES = sorted(page.stem for page in PAGES.glob("*.md"))
_OURS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", GUIDES)
def test_our_side_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for block in _OURS.findall((PAGES / f"{page}.md").read_text("utf-8")):
        exec(compile(block, page, "exec"), names)
    assert names["trainer"].counters.epoch == 3
    if page == "plain":
        pairs = zip(names["theirs"].values(), names["ours"].values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("page", ["composer", "mindspore", "modelzoo", "olmo-core"])
def test_a_guide_is_short(page: str) -> None:
    assert len((PAGES / f"{page}.md").read_text("utf-8").splitlines()) <= 150


def test_our_side_of_the_port_of_a_hundred_lines_runs(tmp_path: Path) -> None:
    """`python -m bench.lightning_port` compares it with Lightning's."""
    weights, metrics = ours(tmp_path / "run")
    assert metrics["test/accuracy"] > 0.9
    assert all(value.isfinite().all() for value in weights.values())
