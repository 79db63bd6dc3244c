"""Upkeep of a root: preflight, verify, retention, gc, deletion. Without torch."""
