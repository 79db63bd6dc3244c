"""Procedures of checkpointing, safe under failures: stage, save, load, claim, commit, resolve."""
