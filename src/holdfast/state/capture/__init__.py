"""Captures the state at a save, and warns of state that it would miss."""
