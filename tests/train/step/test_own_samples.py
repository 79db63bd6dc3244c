"""Samples that several ranks get: batch norm of averaged weights, samplers that repeat some."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from holdfast.data import DataRanks, Loader
from holdfast.train import SWA, Trainer
from holdfast.train.averages import EqualAverage
from holdfast.train.evaluation.validation import Restarting


def test_statistics_of_batch_norm_leave_out_a_neighbors_sample() -> None:
    """Rank 0 of 3 gets samples 0 and 1, then sample 6, which is rank 2's and is no batch of two."""
    rows = TensorDataset(torch.arange(7.0).view(7, 1))
    loader = Loader(rows, batch_size=2, shuffle=False, ranks=DataRanks(0, 3))
    model = nn.BatchNorm1d(1)
    average = EqualAverage(model, SWA(start="1step", batch_norm=loader))
    average.num_averaged = 1
    taken: list[list[float]] = []
    restarting = Restarting(loader)

    def forward(batch: list[torch.Tensor]) -> None:
        taken.append(batch[0].flatten().tolist())
        average.model(batch[0])

    average.update_statistics(restarting.batches(), forward, lambda: restarting.fills_in)
    assert taken == [[0.0, 1.0], [6.0]]
    assert average.model.running_mean.tolist() == [0.5]  # type: ignore[union-attr]
    assert not any(module.training for module in average.model.modules())


@pytest.mark.parametrize(("size", "is_said"), [(5, True), (4, False)])
def test_a_validation_whose_sampler_repeats_samples_says_so(
    size: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = TensorDataset(torch.arange(float(size)).view(size, 1))
    sampler: DistributedSampler[object] = DistributedSampler(rows, 2, 0, shuffle=False)
    Trainer(
        nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader(rows, batch_size=1),
        loss=lambda model, batch: model(batch[0]).mean(),
        validate=DataLoader(rows, sampler=sampler),
        checkpoints=None,
        progress=False,
    )
    assert ("gives 1 samples twice" in caplog.text) == is_said
