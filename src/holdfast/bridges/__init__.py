"""Save and resume a run of another trainer: one module for each, which alone imports it."""
