"""Reads and writes of the records in a run's root: attempts, manifests, claims and marks."""
