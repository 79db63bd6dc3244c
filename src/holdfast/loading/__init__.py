"""Loads checkpoints: finds a usable one, reads it, verifies it, applies it."""
