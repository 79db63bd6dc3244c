"""Validation during training, and the checkpoints that are validated afterwards."""
