"""A consistent copy of the state in host memory, made beside training where that is safe."""
