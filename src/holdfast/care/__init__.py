"""Upkeep of a root: preflight, verify, retention, gc. Without torch."""
