"""Staging: a consistent copy of the state in host memory, made during training if safe."""
