"""One training step: batches, loss, gradients, update, and the boundary before the next."""
