"""Callbacks: the hooks of a training, their registry, and ready-made callbacks."""
