"""Holdfast: checkpoints for PyTorch training that can be trusted."""
