"""Policies: when to save, what to keep, how checkpoints are named. Pure, without torch."""
