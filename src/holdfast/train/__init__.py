"""Training loops: the Trainer, its callbacks and its loggers."""

from __future__ import annotations

from holdfast.control.stop import REQUEUE_EXIT_CODE
from holdfast.train.argument_checks import Counts
from holdfast.train.averages import SWA
from holdfast.train.callbacks.early_stopping import CollectGarbage, EarlyStopping, Pruning, StopWhen
from holdfast.train.callbacks.exporting import ExportModel, Freeze
from holdfast.train.callbacks.hooks import HOOKS, Callback, Logger
from holdfast.train.callbacks.measuring import (
    GradientNorm,
    LearningRates,
    MemoryMonitor,
    SpeedMonitor,
)
from holdfast.train.callbacks.registry import HookFailed
from holdfast.train.curves import Curve, cosine, linear, one_cycle, warmup, wsd
from holdfast.train.evaluation.evaluator import Validated
from holdfast.train.evaluation.predicting import Predictions
from holdfast.train.evaluation.validation import Downstream, Validation
from holdfast.train.fit.saving import UnhealthyState
from holdfast.train.fit.tuner import LearningRateCurve
from holdfast.train.loggers.files import Csv, JsonLines
from holdfast.train.loggers.progress import ProgressBar
from holdfast.train.loggers.services import MLflow, TensorBoard, WeightsAndBiases
from holdfast.train.outputs import Histogram, Image, Reduced, StepOutput, Table
from holdfast.train.schedules import Schedule, for_group
from holdfast.train.status import Outcome
from holdfast.train.step.batches import Limits
from holdfast.train.step.epoch_metrics import Measured, Perplexity
from holdfast.train.step.numerics import NotFinite, Precision
from holdfast.train.step.several_optimizers import Control
from holdfast.train.step.step import Clip
from holdfast.train.strategies import DDP, FSDP2
from holdfast.train.trainer import Trainer
from holdfast.train.training import Counters, Metrics, Training

__all__ = [
    "DDP",
    "FSDP2",
    "HOOKS",
    "REQUEUE_EXIT_CODE",
    "SWA",
    "Callback",
    "Clip",
    "CollectGarbage",
    "Control",
    "Counters",
    "Counts",
    "Csv",
    "Curve",
    "Downstream",
    "EarlyStopping",
    "ExportModel",
    "Freeze",
    "GradientNorm",
    "Histogram",
    "HookFailed",
    "Image",
    "JsonLines",
    "LearningRateCurve",
    "LearningRates",
    "Limits",
    "Logger",
    "MLflow",
    "Measured",
    "MemoryMonitor",
    "Metrics",
    "NotFinite",
    "Outcome",
    "Perplexity",
    "Precision",
    "Predictions",
    "ProgressBar",
    "Pruning",
    "Reduced",
    "Schedule",
    "SpeedMonitor",
    "StepOutput",
    "StopWhen",
    "Table",
    "TensorBoard",
    "Trainer",
    "Training",
    "UnhealthyState",
    "Validated",
    "Validation",
    "WeightsAndBiases",
    "cosine",
    "for_group",
    "linear",
    "one_cycle",
    "warmup",
    "wsd",
]
