"""A step of the Trainer: its batches, its losses and metrics, and its undo."""
