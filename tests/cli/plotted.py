"""A training to be drawn: `python plotted.py ROOT UNTIL [KILL_AT]`; SIGKILL within that step."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.train import Callback, Counts, Trainer, Training, Validation, linear


class Kill(Callback):
    """Ends the process where nobody can clean up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_optimizer_step(self, training: Training) -> None:
        if training.present_step == self.step:
            assert training.manager is not None
            training.manager.wait()  # the checkpoint before it is durable
            os.kill(os.getpid(), signal.SIGKILL)


def main(root: str, until: str, kill_at: int) -> None:
    model = nn.Linear(2, 1)
    data = [torch.ones(2)] * 8
    Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data=Loader(data, batch_size=2),
        loss=lambda model, batch: model(batch).square().mean(),
        checkpoints=Checkpoints(root, every="3step", keep="last:2"),
        scheduler=linear("10step"),
        validate=Validation(data=Loader(data, batch_size=4), every="4step"),
        counts=Counts(samples=len),
        callbacks=[Kill(kill_at)],
        log_every=1,
        progress=False,
    ).fit(until)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
