"""Logger for TensorBoard (the extra `tensorboard`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.train.callbacks.hooks import Logger
from holdfast.train.loggers.extras import import_extra
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint


class TensorBoard(Logger):
    """Logger of metrics, and of the costs of saves and loads, as scalars of their steps.

    When training begins or resumes, TensorBoard is asked to purge later steps, which will be done
    again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Log to `folder`: the argument of `tensorboard --logdir`, or a folder in it.

        Raises:
            UsageError: the extra is not installed.
        """
        self.folder = os.fspath(folder)
        import_extra("tensorboard", "tensorboard")
        self._make = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def fit_start(self, training: Training) -> None:
        """Open a file of events."""
        self._writer = self._make(self.folder, purge_step=training.counters.step + 1)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Write the metrics of the step."""
        self._write(metrics, training.present_step)

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the load."""
        self._write(cost, checkpoint.step)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the save, and flush the file."""
        self._write(cost, checkpoint.step)
        self._writer.flush()

    def close(self, training: Training) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, metrics: Metrics, step: int) -> None:
        if self._writer is None:  # outside of `fit`, `validate` has no step to write at
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
