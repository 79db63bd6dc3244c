"""Training loops: the Trainer, its callbacks and its loggers."""

from __future__ import annotations

from holdfast.engine.control.stop import REQUEUE_EXIT_CODE
from holdfast.train.asked import Counts
from holdfast.train.callbacks.calling import HookFailed
from holdfast.train.callbacks.exporting import ExportModel
from holdfast.train.callbacks.freezing import Freeze
from holdfast.train.callbacks.hooks import HOOKS, Callback, Logger
from holdfast.train.callbacks.measuring import (
    GradientNorm,
    LearningRates,
    MemoryMonitor,
    SpeedMonitor,
)
from holdfast.train.callbacks.ready import CollectGarbage, EarlyStopping, Pruning, StopWhen
from holdfast.train.evaluation.predicting import Predictions
from holdfast.train.evaluation.targets import Validated
from holdfast.train.evaluation.validation import Downstream, Validation
from holdfast.train.fit.ending import Outcome
from holdfast.train.fit.finding import LearningRateCurve
from holdfast.train.fit.saving import UnhealthyState
from holdfast.train.loggers.csv import Csv
from holdfast.train.loggers.default import JsonLines
from holdfast.train.loggers.progress import ProgressBar
from holdfast.train.loggers.services import MLflow, TensorBoard, WeightsAndBiases
from holdfast.train.making import for_group
from holdfast.train.outputs import Histogram, Image, Reduced, StepOutput, Table
from holdfast.train.parallel.options import DDP, FSDP2
from holdfast.train.schedules.curves import Curve, cosine, linear, one_cycle, warmup, wsd
from holdfast.train.schedules.stepping import Schedule
from holdfast.train.trainer import Trainer
from holdfast.train.training import Counters, Metrics, Training
from holdfast.train.window.limits import Limits
from holdfast.train.window.loop import Clip, Precision
from holdfast.train.window.nan import NotFinite
from holdfast.train.window.scores import Measured, Perplexity
from holdfast.train.window.several import Control
from holdfast.train.window.swa import SWA

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
