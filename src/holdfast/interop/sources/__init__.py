"""Readers of the formats that tools understand, one module for each; none imports torch."""
