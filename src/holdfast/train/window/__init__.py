"""One optimizer window: batches, loss, gradients, step, and the boundary between two windows."""
