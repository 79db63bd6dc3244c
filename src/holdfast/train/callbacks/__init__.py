"""Callbacks: the hooks of a training, who calls them, and ready-made ones."""
