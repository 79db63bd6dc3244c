"""Statistics of the tensors of a source, and differences of two sources."""
