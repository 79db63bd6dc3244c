"""The page on trackers: its snippets run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trackers.md"


def test_its_snippets_run_and_the_reporter_on_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    model, posted = nn.Linear(4, 1), list[str]()
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "post": posted.append,
    }
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(snippet, names)
    assert [text.partition(" step-")[0] for text in posted] == ["step 1: saved step 1:"]
    assert "holdfast_saves_total" in Path("runs/holdfast.prom").read_text()
