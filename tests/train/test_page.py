"""The pages on the Trainer and on stops: their snippets run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

PAGES = Path(__file__).resolve().parent.parent.parent / "docs"


LONG = '"1_000step", without='
"""Part of a snippet that resumes a run up to step 1,000: too long for a test, as it saves often."""


@pytest.mark.parametrize("page", ["trainer.md", "hooks.md", "running.md"])
def test_its_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `LONG` run ends at step 60 here."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "held_out": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "loss_fn": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }
    snippets = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text("utf-8"), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(snippet.replace(LONG, '"60step", without='), names)
    if page == "trainer.md":
        assert names["outcome"].step == 60
