"""Writing and committing of checkpoints, from a copy of the state in host memory."""
