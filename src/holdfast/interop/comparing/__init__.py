"""What tensors and trees of sources hold: statistics of one, and differences of two."""
