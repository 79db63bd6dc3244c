"""Who drives: the Trainer, its callbacks and its loggers."""

from __future__ import annotations

from holdfast.engine.control.stop import REQUEUE_EXIT_CODE
from holdfast.train.callbacks import HookFailed
from holdfast.train.counters import Counters
from holdfast.train.early import EarlyStopping, StopWhen
from holdfast.train.health import UnhealthyState
from holdfast.train.hooks import Callback, Logger
from holdfast.train.loggers import JsonLines
from holdfast.train.mlflow import MLflow
from holdfast.train.outcome import Outcome
from holdfast.train.precision import Precision
from holdfast.train.progress import ProgressBar
from holdfast.train.schedulers import for_group
from holdfast.train.sparsity import Pruning
from holdfast.train.targets import Validated
from holdfast.train.tensorboard import TensorBoard
from holdfast.train.trainer import Trainer
from holdfast.train.training import Metrics, Training
from holdfast.train.validation import Downstream, Validation
from holdfast.train.wandb import WeightsAndBiases

__all__ = [
    "REQUEUE_EXIT_CODE",
    "Callback",
    "Counters",
    "Downstream",
    "EarlyStopping",
    "HookFailed",
    "JsonLines",
    "Logger",
    "MLflow",
    "Metrics",
    "Outcome",
    "Precision",
    "ProgressBar",
    "Pruning",
    "StopWhen",
    "TensorBoard",
    "Trainer",
    "Training",
    "UnhealthyState",
    "Validated",
    "Validation",
    "WeightsAndBiases",
    "for_group",
]
