"""Validation: during training, and of saved checkpoints."""
