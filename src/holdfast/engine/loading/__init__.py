"""Loads checkpoints: finds one that can be used, reads it, verifies it, applies it."""
