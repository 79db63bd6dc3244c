"""Staging: a consistent copy of the state in host memory, made beside training if that is safe."""
