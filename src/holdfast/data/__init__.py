"""Data loading with an exact position: which batches the loop has taken, and which come next."""

from __future__ import annotations

from holdfast.data.loader import Loader
from holdfast.data.ranks import DataRanks
from holdfast.data.samplers import Buckets, Mixture, Weighted
from holdfast.data.stream import Stream
from holdfast.state.foreign import describe_inexact, skip

__all__ = [
    "Buckets",
    "DataRanks",
    "Loader",
    "Mixture",
    "Stream",
    "Weighted",
    "describe_inexact",
    "skip",
]
