"""The exact data position: which batches the loop has taken, and how to give it the next ones."""

from __future__ import annotations

from holdfast.data.foreign import describe_inexact, skip
from holdfast.data.loader import Loader

__all__ = ["Loader", "describe_inexact", "skip"]
