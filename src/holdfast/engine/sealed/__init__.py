"""Roots whose checkpoints are encrypted."""
