"""Writes and commits checkpoints, from a copy of the state in host memory."""
