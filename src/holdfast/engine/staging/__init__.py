"""One consistent copy of the state in host memory, beside training where that can be."""
