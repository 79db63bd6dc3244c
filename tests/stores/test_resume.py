"""A run that was killed and goes on from an object store is the run that was never killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.data import Loader
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.testing.resume import Report, assert_resume_equivalent
from servers.fixtures import on
from train.small import make

PLACE = "TEST_RESUME_ROOT"


def run(root: str, steps: int, report: Report) -> None:
    """A training run below the URL of the environment, under the name of the harness's folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = Loader(range(64), batch_size=2, seed=1)
    state = {"model": model, "optimizer": optimizer, "data": data}
    url = f"{os.environ[PLACE]}/{Path(root).name}"
    with CheckpointManager(url, state, keep=Last(2), sinks=()) as manager:
        found = manager.resume()
        step = found.step if found else 0
        for batch in data.until(steps, start=step):
            inputs = batch.float()[:, None].expand(-1, 4)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            manager.save(step).wait()
            report(step, state)


@pytest.mark.full
@on("localstack", "moto", "gcs", "azurite", "ceph")
def test_resuming_from_an_object_store_is_exact(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7, R1."""
    monkeypatch.setenv(PLACE, root)
    assert_resume_equivalent(run, 6, [2, 4], timeout_s=120.0)


@pytest.mark.full
@on("moto")
def test_a_run_begins_with_the_checkpoint_of_a_bucket(root: str, tmp_path: Path) -> None:
    """Invariant 7; issue 20, line 10: `start_from` is exact, also from an object store."""
    found = []
    for place, goal, start in (
        (f"{root}/straight", 5, None),
        (f"{root}/old", 3, None),
        (tmp_path, 5, f"{root}/old@step=3"),
    ):
        trainer = make(place, log=False, ema=0.9)
        trainer.fit(goal, start_from=start)
        found.append([[weight.tolist() for weight in trainer.model.parameters()], torch.rand(3)])
    assert found[2][0] == found[0][0] != found[1][0]
    assert torch.equal(found[2][1], found[0][1])
