"""The pages of the bridges: every snippet of them runs, on the real framework."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
import readme
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [0, 1], ids=["lightning", "transformers"])
def test_the_snippets_of_the_readme_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second time there is nothing left to do."""
    monkeypatch.chdir(tmp_path)
    code = readme.code_under("In Lightning or Transformers")[number]
    for _ in range(2):
        names = _lightning() if number == 0 else _transformers()
        exec(code.replace("2_000", "4").replace("500step", "2step"), names)
        state = names["trainer"].global_step if number == 0 else names["trainer"].state.global_step
        assert state == 4
    folders = sorted(path.name for path in Path("runs/first").glob("step-*"))
    assert [name[:13] for name in folders] == ["step-00000002", "step-00000004"]


def _lightning() -> dict[str, Any]:
    """The names that the README takes for granted."""
    lightning = needed("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    inputs = torch.randn(256, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return {"holdfast": holdfast, "module": Module(), "dataset": dataset}


def _transformers() -> dict[str, Any]:
    transformers = needed("transformers")

    class Net(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> Any:  # type: ignore[override]
            out = super().forward(x).squeeze(-1)
            return {"loss": (out - labels).square().mean(), "logits": out}

    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    dataset = [{"x": torch.randn(4), "labels": torch.zeros(())} for _ in range(64)]
    args = transformers.TrainingArguments("runs/hf", max_steps=4, **options)
    return {"holdfast": holdfast, "model": Net(4, 1), "args": args, "dataset": dataset}
