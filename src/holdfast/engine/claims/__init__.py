"""Owners and readers of a run, and whether their processes still live."""
