"""Measurements. Not part of the package; see README.md."""
