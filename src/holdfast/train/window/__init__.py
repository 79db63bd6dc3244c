"""The optimizer window: batches, loss, gradients, step, and the boundary before the next."""
