"""What docs/interop-dcp.md shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast import CheckpointManager
from holdfast.interop.roots import release_all
from holdfast.ownership.access import locate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "interop-dcp.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_everything_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state: dict[str, Any] = {"model": {"0.weight": torch.ones(3)}, "train": {"tokens": 5}}
    dcp.save(state, checkpoint_id="old-run/step-500")
    names: dict[str, Any] = {"state": state, "root": "run"}
    for block in BLOCKS:
        state["model"]["0.weight"].fill_(1)
        exec(block, names)
        assert state["model"]["0.weight"].tolist() == [1, 1, 1]
    assert locate("run@step=500")[1].manifest.label == "step-00000500"
    release_all()


def test_what_a_manager_saves_has_the_names_on_the_page(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.save(1, wait=True)
    from holdfast.interop.dcp import HoldfastReader

    reader = HoldfastReader(tmp_path)
    assert sorted(reader.read_metadata().state_dict_metadata) == ["model.0.bias", "model.0.weight"]
    assert "`model.0.weight`" in PAGE
    reader.close()
