"""A training step: batches, loss, gradients, update, metrics, and its undo."""
