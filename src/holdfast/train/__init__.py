"""Who drives: the Trainer, its callbacks and its loggers."""

from __future__ import annotations

from holdfast.train.callbacks import HookFailed
from holdfast.train.counters import Counters
from holdfast.train.health import UnhealthyState
from holdfast.train.hooks import Callback, Logger
from holdfast.train.loggers import JsonLines
from holdfast.train.outcome import REQUEUE_EXIT_CODE, Outcome
from holdfast.train.precision import Precision
from holdfast.train.progress import ProgressBar
from holdfast.train.schedulers import for_group
from holdfast.train.tensorboard import TensorBoard
from holdfast.train.trainer import Trainer
from holdfast.train.training import Metrics, Training
from holdfast.train.validation import Validation
from holdfast.train.wandb import WeightsAndBiases

__all__ = [
    "REQUEUE_EXIT_CODE",
    "Callback",
    "Counters",
    "HookFailed",
    "JsonLines",
    "Logger",
    "Metrics",
    "Outcome",
    "Precision",
    "ProgressBar",
    "TensorBoard",
    "Trainer",
    "Training",
    "UnhealthyState",
    "Validation",
    "WeightsAndBiases",
    "for_group",
]
