"""Bridges to the checkpoints of other libraries."""
