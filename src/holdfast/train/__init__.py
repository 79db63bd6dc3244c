"""Who drives: the Trainer, its callbacks and its loggers."""

from __future__ import annotations

from holdfast.train.callbacks import Callback, Logger, Metrics
from holdfast.train.counters import Counters
from holdfast.train.loggers import JsonLines
from holdfast.train.progress import ProgressBar
from holdfast.train.trainer import Trainer

__all__ = ["Callback", "Counters", "JsonLines", "Logger", "Metrics", "ProgressBar", "Trainer"]
