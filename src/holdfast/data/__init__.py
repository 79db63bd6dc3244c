"""Data loading with an exact position: which batches the loop has taken, and which come next."""

from __future__ import annotations

from holdfast.data.foreign import describe_inexact, skip
from holdfast.data.loader import Loader
from holdfast.data.ranks import DataRanks

__all__ = ["DataRanks", "Loader", "describe_inexact", "skip"]
