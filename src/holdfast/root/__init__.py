"""Reads and writes the records of a run's root: attempts, manifests, claims and marks."""
