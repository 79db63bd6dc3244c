"""Batch norm of averaged weights on a rank that gets a neighbor's sample."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.data import DataRanks, Loader
from holdfast.train import SWA
from holdfast.train.evaluation.validation import Restarting
from holdfast.train.window.swa import EqualAverage


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
