"""Saving: from a staged state to a committed checkpoint."""
