"""Bridge to transformers' Trainer: `CheckpointedTrainer`, and a mixin for its subclasses."""

from holdfast.bridges.transformers.trainer import CheckpointedMixin, CheckpointedTrainer

__all__ = ["CheckpointedMixin", "CheckpointedTrainer"]
