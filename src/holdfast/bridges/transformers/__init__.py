"""Bridge to transformers' Trainer: `CheckpointedTrainer`, and a mixin for its subclasses."""

from holdfast.bridges.parts import needs_library

with needs_library("transformers"):
    from holdfast.bridges.transformers.run import CheckpointedMixin, CheckpointedTrainer

__all__ = ["CheckpointedMixin", "CheckpointedTrainer"]
